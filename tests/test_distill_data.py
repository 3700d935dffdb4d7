"""Where rows come from: every kind of source, the tokens kept on disk, the ledger, the budget."""

from __future__ import annotations

import gzip
import json
import lzma
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import zstandard
from tokenizers import processors

from regraft.assets import teacher_dir
from regraft.convert import load_tokenizer
from regraft.distill import sources, token_store
from regraft.distill.data import RowStream
from regraft.distill.text_files import paragraphs
from regraft.distill.token_store import Framing
from regraft.errors import UserError
from regraft.recipes.schema import Data

TEXTS = [f"Number {i}: " + "a word or two, " * i for i in range(9)]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of its own; the number of texts tokenised so far."""
    monkeypatch.setenv("REGRAFT_CACHE", str(tmp_path / "cache"))
    count = SimpleNamespace(texts=0, folder=tmp_path / "cache" / "tokens")
    original = Framing.__call__

    def counted(self, texts):
        count.texts += len(texts)
        return original(self, texts)

    monkeypatch.setattr(Framing, "__call__", counted)
    return count


@pytest.fixture
def tokenizer():
    return load_tokenizer(teacher_dir())


def stream(tokenizer, source, **settings):
    return RowStream(Data(source=source, **{"seq_len": 16, **settings}), tokenizer)


def documents(rows):
    """Documents, or their pieces, of unpacked or packed rows."""
    ids = [i[r].tolist() for i, r in zip(rows.ids, rows.real, strict=True)]
    starts = [f[r].nonzero().flatten().tolist() for f, r in zip(rows.first, rows.real, strict=True)]
    return [
        row[a:b] for row, s in zip(ids, starts, strict=True) for a, b in zip(s, [*s[1:], None], strict=True)
    ]


def write_sources(folder, tokenizer):
    """One set of documents in every form."""
    lines = "".join(json.dumps({"body": t}) + "\n" for t in TEXTS).encode()
    for suffix, pack in {
        "": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstandard.ZstdCompressor().compress
    }.items():  # fmt: skip
        (folder / f"d.jsonl{suffix}").write_bytes(pack(lines))
        yield {"kind": "jsonl", "path": str(folder / f"d.jsonl{suffix}"), "field": "body"}
    for part, texts in enumerate((TEXTS[:4], TEXTS[4:])):
        pq.write_table(pa.table({"body": texts}), folder / f"part-{part}.parquet")
    yield {"kind": "parquet", "path": str(folder / "part-*.parquet"), "field": "body"}
    ids = [i for t in TEXTS for i in [*tokenizer.encode(t), tokenizer.eos_token_id]]
    np.save(folder / "t.npy", np.array(ids, np.int32))
    yield {"kind": "tokens", "path": str(folder / "t.npy")}
    np.array(ids, "<u2").tofile(folder / "t.bin")
    yield {"kind": "tokens", "path": str(folder / "t.bin")}


def test_every_form_of_one_set_gives_the_same_rows(tmp_path, tokenizer):
    found = [stream(tokenizer, source).take(40) for source in write_sources(tmp_path, tokenizer)]
    assert len(found) == 7
    assert all(
        torch.equal(rows.ids, found[0].ids) and torch.equal(rows.first, found[0].first) for rows in found
    )
    text = tokenizer.decode(found[0].ids.flatten())
    assert all(t.split(":")[0] in text for t in TEXTS)


def test_hub_sets_streamed_or_not(tmp_path, tokenizer):
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(json.dumps({"body": t}) + "\n" for t in TEXTS))
    source = {"kind": "hub", "name": str(folder), "split": "train", "field": "body"}
    for streaming in (True, False):
        rows = stream(tokenizer, {**source, "streaming": streaming})
        first = rows.take(9)
        position = rows.state()
        rest = rows.take(40)
        again = stream(tokenizer, {**source, "streaming": streaming})
        again.restore(position)
        assert torch.equal(again.take(40).ids, rest.ids)
        assert rows.ledger["sources"][str(folder)]["passes"] > 1
        assert not torch.equal(first.ids, stream(tokenizer, source, seed=1).take(9).ids)
    with pytest.raises(UserError, match=r"no column 'txt'.*name one of body"):
        stream(tokenizer, {**source, "field": "txt"}).take(1)
    with pytest.raises(UserError, match="cannot be read"):
        stream(tokenizer, {**source, "split": "test"})


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"one\n\ntwo", "one\n\ntwo"),
        (b"one\r\n\r\ntwo\r\n", "one\n\ntwo"),
        (b"\xef\xbb\xbfone\n", "one"),
        ("one\u2028two\x85three".encode(), "one\u2028two\x85three"),
        (b"no end of line", "no end of line"),
    ],
)
def test_line_ends_and_marks(tmp_path, tokenizer, content, expected):
    (tmp_path / "t.txt").write_bytes(content)
    rows = stream(tokenizer, {"kind": "text", "path": str(tmp_path / "t.txt")}, pack=False).take(1)
    (document,) = documents(rows)
    assert document == [*tokenizer.encode(expected), tokenizer.eos_token_id][:16]
    line = json.dumps({"text": content.decode("utf-8-sig")}, ensure_ascii=False).encode() + b"\r\n"
    (tmp_path / "t.jsonl").write_bytes(line * 2)
    rows = stream(tokenizer, {"kind": "jsonl", "path": str(tmp_path / "t.jsonl")}, pack=False)
    assert rows.take(2).ids[0].tolist() == rows.take(1).ids[0].tolist()


def test_paragraphs_keep_every_word():
    lines = [line for i in range(9) for line in (f"paragraph {i} " + "x" * 3000 + "\n", "\n")]
    pieces = list(paragraphs(lines))
    assert "".join("".join(pieces).split()) == "".join("".join(lines).split())
    assert len(pieces) == 5 and max(map(len, pieces)) < 8000
    assert list(paragraphs(["\n", " \n"])) == []


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("cut.jsonl.zst", zstandard.ZstdCompressor().compress(b"x" * 999)[:9], "read|holds no text"),
        ("cut.txt.gz", gzip.compress(b"x" * 9999, mtime=0)[:30], "cannot be read"),
        ("not.parquet", b"PAR1", "cannot be read"),
        ("t.npy", b"", "cannot be read"),
        ("t.bin", b"\xff\xff", "holds token 65535.*below 8192"),
        ("t.bin", b"", "cannot be read"),
        ("t.bin", b"\x05\x00", "holds no text"),
        ("nothing.txt", None, "no such file"),
        ("blank.jsonl", b'{"text": " "}\n', "holds no text"),
    ],
    ids=["zst cut", "gz cut", "parquet", "npy empty", "id", "empty", "no document", "no file", "blank"],
)  # fmt: skip
def test_files_without_use_are_named(tmp_path, tokenizer, cache, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    kinds = {"jsonl": "jsonl", "txt": "text", "parquet": "parquet", "npy": "tokens", "bin": "tokens"}
    kind = kinds[name.split(".")[1]]
    with pytest.raises(UserError, match=message):
        stream(tokenizer, {"kind": kind, "path": str(tmp_path / name)})
    assert not [p for p in cache.folder.glob(".*")] if cache.folder.exists() else True


def test_parquet_columns(tmp_path, tokenizer):
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [1, 2], "body": ["one", None]}), file)
    for field, message in {"text": "holds int64, not text", "words": "name one of text, body"}.items():
        with pytest.raises(UserError, match=message):
            stream(tokenizer, {"kind": "parquet", "path": str(file), "field": field})
    rows = stream(tokenizer, {"kind": "parquet", "path": str(file), "field": "body"})
    assert {tuple(d) for d in documents(rows.take(2))} == {(*tokenizer.encode("one"), tokenizer.eos_token_id)}


def test_first_and_last_tokens_stand_once(tokenizer):
    end = tokenizer.eos_token_id
    assert Framing(tokenizer)(["a", "a<|endoftext|>", " "]) == [[*tokenizer.encode("a"), end]] * 2 + [[]]
    pad = tokenizer.convert_tokens_to_ids("<|pad|>")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|pad|> $A", special_tokens=[("<|pad|>", pad)]
    )
    assert tokenizer.encode("a")[0] == pad
    plain = tokenizer.encode("a", add_special_tokens=False)
    assert Framing(tokenizer)(["a", "<|pad|>a"]) == [[pad, *plain, end]] * 2


# the tokens kept on disk


def test_tokens_are_made_once_for_content_tokenizer_and_settings(tmp_path, tokenizer, cache):
    source = next(write_sources(tmp_path, tokenizer))
    rows = stream(tokenizer, source).take(9)
    assert cache.texts == len(TEXTS)
    assert torch.equal(stream(tokenizer, source, seq_len=16).take(9).ids, rows.ids)
    stream(tokenizer, source, seed=5, pack=False)
    assert cache.texts == len(TEXTS) and len(list(cache.folder.iterdir())) == 1
    (tmp_path / "d.jsonl").write_text(json.dumps({"body": "other text"}))
    assert not torch.equal(stream(tokenizer, source).take(9).ids, rows.ids)
    assert cache.texts == len(TEXTS) + 1
    tokenizer.add_tokens(["word or two"])
    changed = stream(tokenizer, source)
    assert cache.texts == len(TEXTS) + 2 and len(list(cache.folder.iterdir())) == 3
    for folder in cache.folder.iterdir():  # deleted while in use, then made again
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
    assert changed.take(2).tokens
    stream(tokenizer, source)
    assert cache.texts == len(TEXTS) + 3


def test_a_damaged_or_unwritable_cache(tmp_path, tokenizer, cache, monkeypatch):
    source = next(write_sources(tmp_path, tokenizer))
    rows = stream(tokenizer, source).take(9)
    (folder,) = cache.folder.iterdir()
    (folder / "ids.bin").write_bytes((folder / "ids.bin").read_bytes()[:-2])
    assert torch.equal(stream(tokenizer, source).take(9).ids, rows.ids)
    assert cache.texts == 2 * len(TEXTS)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("REGRAFT_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match="REGRAFT_CACHE"):
        stream(tokenizer, source)


def test_a_failure_while_tokens_are_made_leaves_nothing(tmp_path, tokenizer, cache, monkeypatch):
    source = next(write_sources(tmp_path, tokenizer))

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(token_store, "write_json", full)
        with pytest.raises(UserError, match="No space left"):
            stream(tokenizer, source)
    assert not [p for p in (tmp_path / "cache").rglob("*") if p.is_file()]
    stream(tokenizer, source)


# ledger and budget


@pytest.mark.parametrize("pack", [True, False])
def test_every_token_read_is_trained_or_dropped_and_a_budget_is_met_exactly(tmp_path, tokenizer, pack):
    (tmp_path / "d.jsonl").write_text(
        "".join(json.dumps({"text": t}) + "\n" for t in [*TEXTS, "", "z" * 300])
    )
    source = {"kind": "jsonl", "path": str(tmp_path / "d.jsonl")}
    whole = stream(tokenizer, source, pack=pack)
    rows = stream(tokenizer, source, pack=pack)
    taken, budget = [], 777
    while budget:
        taken.append(rows.take(3, budget))
        assert 0 < taken[-1].tokens <= min(48, budget)
        budget -= taken[-1].tokens
        ledger = rows.closed_ledger()
        assert ledger["read"] == ledger["trained"] + sum(ledger["dropped"].values())
    assert rows.ledger["trained"] == sum(t.tokens for t in taken) == 777
    assert rows.ledger["padding"] == sum(int((~t.real).sum()) for t in taken)
    of = rows.ledger["sources"][source["path"]]
    assert of["tokens"] == rows.ledger["read"]
    assert of["passes"] == -(-of["documents"] // 10) > 1  # ten of eleven texts hold something
    assert rows.tokens_per_pass == sum(len(d) for d in islice(Framing(tokenizer)([*TEXTS, "z" * 300]), 10))
    for before in taken[:-1]:  # the budget cuts nothing but its last step
        assert torch.equal(whole.take(3).ids[: len(before.ids)], before.ids)
    after = rows.take(1)  # what was cut off comes next
    assert after.tokens and bool(after.first[0, 0])


def test_a_budget_of_one_token_more(tmp_path, tokenizer):
    rows = stream(tokenizer, next(write_sources(tmp_path, tokenizer)))
    assert [rows.take(2, 1).tokens, rows.take(2, 1).tokens, rows.take(2, 31).tokens] == [1, 1, 31]


def test_needles_and_mixtures_are_open_at_any_place(tokenizer):
    needles = {"kind": "needles", "tasks": ["niah_single_1"]}
    mix = {"kind": "mix", "parts": [{"weight": 3, "source": needles}, {"weight": 1, "source": needles}]}
    data = Data(source=mix, seq_len=256)
    source = sources.open_source(data.source, "0", tokenizer, 256)
    forward = [source.document(i).ids for i in range(5)]
    assert [source.document(i).ids for i in (3, 1, 4)] == [forward[i] for i in (3, 1, 4)]
    assert len({tuple(d) for d in forward}) == 5
