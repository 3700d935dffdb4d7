"""Perplexity: known values, lm-eval's rolling log-likelihood, streaming, the same tokens at every length."""

from __future__ import annotations

import gzip
import json
import math

import datasets
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from regraft.assets import austen
from regraft.errors import UserError
from regraft.layers import RegraftForCausalLM
from regraft.report.niah import Entrant
from regraft.report.perplexity import buckets, measure, score_stream, stretches
from regraft.report.perplexity_statistics import perplexity_differences, perplexity_table
from regraft.report.shelf import Shelf
from regraft.report.texts import texts


@pytest.fixture(scope="module")
def uniform(tiny) -> RegraftForCausalLM:
    model = RegraftForCausalLM(tiny.config).eval()
    torch.nn.init.zeros_(model.lm_head.weight)
    return model


@pytest.fixture(scope="module")
def records(tiny, uniform, tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "some.jsonl"
    lines = [austen()[i * 9000 : (i + 1) * 9000] for i in range(4)]
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in [*lines, "too short"]))
    models = {"tiny": Entrant(tiny, tokenizer), "uniform": Entrant(uniform, tokenizer)}
    return measure(models, sets=[str(path)], lengths=[128, 512], samples=6)


def test_a_uniform_model_has_the_vocabulary_size(records, tokenizer):
    rows = [row for row in perplexity_table(records) if row["model"] == "uniform"]
    assert rows and all(row["perplexity"] == pytest.approx(len(tokenizer), rel=1e-6) for row in rows)
    total = next(row for row in rows if row["length"] == 512 and row["start"] is None)
    expected = 6 * 512 * math.log2(len(tokenizer)) / sum(r["bytes"] for r in records[:6])
    assert total["bits_per_byte"] == pytest.approx(expected)
    assert total["low"] == pytest.approx(total["high"])


def test_the_sum_is_lm_evals_rolling_log_likelihood(tiny, tokenizer):
    text = austen()[5000:7000]
    plain = HFLM(tiny, tokenizer=tokenizer, max_length=4096, batch_size=1)
    (theirs,) = plain.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (text,), 0)], True)
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    ours = torch.cat(list(score_stream(tiny, [ids], tokenizer.eos_token_id)), dim=1)
    assert float(ours.sum()) == pytest.approx(-theirs, rel=2e-7)


def test_streaming_equals_one_long_pass(tiny, tokenizer):
    ids = torch.tensor([tokenizer(austen()[:4000])["input_ids"][:900]])
    with torch.no_grad():
        logits = tiny(torch.cat([torch.zeros(1, 1, dtype=torch.long), ids[:, :-1]], dim=1)).logits
    expected = torch.nn.functional.cross_entropy(logits[0].double(), ids[0], reduction="none")
    for pieces, segment in (([ids], 2048), (ids.split([300, 1, 599], dim=1), 100), (ids.split(7, dim=1), 64)):
        streamed = torch.cat(list(score_stream(tiny, iter(pieces), 0, segment=segment)), dim=1)[0]
        torch.testing.assert_close(streamed, expected, atol=1e-4, rtol=0)


def test_every_length_scores_the_same_tokens(records):
    for model in ("tiny", "uniform"):
        by_length = {n: [r for r in records if r["model"] == model and r["length"] == n] for n in (128, 512)}
        assert len(by_length[128]) == len(by_length[512]) == 6
        for short, long in zip(by_length[128], by_length[512], strict=True):
            assert short["text_sha256"] == long["text_sha256"] and short["tokens"] == long["tokens"] == 512
            for record in (short, long):
                assert sum(bucket[3] for bucket in record["buckets"]) == pytest.approx(record["nll"])
                assert sum(bucket[2] for bucket in record["buckets"]) == record["tokens"]
    assert buckets(1000) == [(0, 256), (256, 512), (512, 1000)]


def test_differences_are_paired_ratios(records):
    rows = perplexity_differences(records, "tiny", "uniform", resamples=200)
    scores = {(r["model"], r["length"], r["start"]): r["perplexity"] for r in perplexity_table(records)}
    for row in rows:
        ratio = scores["tiny", row["length"], row["start"]] / scores["uniform", row["length"], row["start"]]
        assert row["ratio"] == pytest.approx(ratio) and row["low"] <= ratio <= row["high"]
    other = [r | {"text_sha256": "x"} if r["model"] == "uniform" else r for r in records]
    with pytest.raises(UserError, match="differ in text_sha256"):
        perplexity_differences(other, "tiny", "uniform")


def test_stretches_keep_to_documents_and_count_bytes(tokenizer):
    found = stretches(["short", "naïve café " * 90, austen()[:20_000]], tokenizer, 100, 12)
    assert len(found) == 12 and {s.document for s in found} == {1, 2}
    for stretch in found:
        text = tokenizer.decode(stretch.ids)
        assert len(stretch.ids) == 100 and abs(len(text.encode()) - stretch.n_bytes) <= 3


def test_finished_cells_are_not_measured_again(tiny, tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text(austen()[:3000])
    shelf = Shelf(tmp_path / "cells")
    settings = {"sets": [str(tmp_path / "a.txt")], "lengths": [64], "samples": 2, "finished": shelf}
    first = measure({"m": Entrant(tiny, tokenizer, "hash")}, **settings)
    assert measure({"m": Entrant(lambda: 1 / 0, tokenizer, "hash")}, **settings) == first
    settings["lengths"] = [10_000]
    with pytest.raises(UserError, match="has 10000 tokens"):
        measure({"m": Entrant(tiny, tokenizer)}, **settings)


def test_a_long_file_is_read_as_far_as_it_is_needed(tiny, tokenizer, tmp_path):
    """What lies beyond is never looked at, here bytes that are no text."""
    (tmp_path / "long.txt").write_bytes(austen()[:300_000].encode() + b"\xff" * 10_000)
    (tmp_path / "short.txt").write_text(austen()[:20_000])
    settings = {"lengths": [64, 128], "samples": 3}
    long, short = (
        measure({"m": Entrant(tiny, tokenizer)}, sets=[str(tmp_path / f"{name}.txt")], **settings)
        for name in ("long", "short")
    )
    assert [record["nll"] for record in long] == [record["nll"] for record in short]
    with pytest.raises(UserError, match="not UTF-8"):
        list(texts(str(tmp_path / "long.txt")))


def test_a_set_of_the_hub_is_streamed_and_read_no_further_than_needed(tiny, tokenizer, tmp_path, monkeypatch):
    """Local files in the place of PG-19, through `datasets`' own streaming; the last is no JSON."""
    books = [json.dumps({"text": austen()[i * 6000 : (i + 1) * 6000]}) for i in range(3)]
    (tmp_path / "0.jsonl").write_text("\n".join(books))
    (tmp_path / "1.jsonl").write_text("broken")
    real = datasets.load_dataset

    def local(name, config, *, split, streaming):
        assert name == "emozilla/pg19"
        files = {split: [str(tmp_path / "0.jsonl"), str(tmp_path / "1.jsonl")]}
        return real("json", config, data_files=files, split=split, streaming=streaming)

    monkeypatch.setattr(datasets, "load_dataset", local)
    records = measure({"m": Entrant(tiny, tokenizer)}, sets=["pg19"], lengths=[64], samples=25)
    assert len(records) == 25 and {record["document"] for record in records} == {0, 1}
    with pytest.raises(UserError, match="cannot be read"):
        list(texts("pg19"))


def test_texts_come_from_files_and_the_hub(tmp_path, monkeypatch):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"one document\n\nof two paragraphs"))
    assert list(texts(str(tmp_path / "a.txt.gz"))) == ["one document\n\nof two paragraphs"]
    with pytest.raises(UserError, match="no known text set"):
        texts("wikitext104")
    calls = []

    def load_dataset(name, config, *, split, streaming):
        calls.append((name, config, split, streaming))
        lines = ["", " = One = \n", " == Part == \n", "text\n", " = Two = \n", "more\n"]
        return [{"text": line} for line in lines]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert list(texts("wikitext103")) == ["", " = One = \n == Part == \ntext\n", " = Two = \nmore\n"]
    assert len(list(texts("pg19"))) == len(list(texts("slimpajama"))) == 6
    assert calls == [
        ("Salesforce/wikitext", "wikitext-103-raw-v1", "test", True),
        ("emozilla/pg19", None, "test", True),
        ("cerebras/SlimPajama-627B", None, "validation", True),
    ]

    def fail(*_, **__):
        raise ConnectionError("offline")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(UserError, match="cannot be read: offline"):
        list(texts("pg19"))


def test_a_text_that_is_not_there_is_named_before_any_needle_is_looked_for(regraft, tmp_path, monkeypatch):
    monkeypatch.setenv("REGRAFT_CACHE", str(tmp_path / "cache"))
    sets = "report.perplexity={sets: [austen, missing.txt], lengths: [64]}"
    code, out, error = regraft("report", "--model", "one=embedded", "--out", tmp_path / "new", "--set", sets)
    assert (code, out) == (2, "") and "missing.txt" in error
    assert not (tmp_path / "cache").exists()
