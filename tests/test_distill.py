"""Training: exact resume, the order of data, the control on the same rows."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from folders import write_teacher
from loops import make_loop, make_recipe, write_models

from regraft.convert import load_model, load_tokenizer, make_student
from regraft.distill import control, distill
from regraft.distill.data import RowStream
from regraft.distill.stage import control_stages, phase_stages
from regraft.distill.trainable import parameter_groups, trainable_names
from regraft.errors import UserError
from regraft.recipes.load import dump_recipe
from regraft.recipes.schema import Data, Evidence

# Rows with padding, in several micro-batches.
RAGGED = (
    "convert.process_match=0.3",
    "data.pack=false",
    "phases.0.micro_batch=1",
    "phases.0.tokens=384",
    "phases.1.tokens=384",
    "checkpoint={every: 4, keep: 2}",
)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def teacher_folder(tmp_path_factory):
    return write_teacher(
        tmp_path_factory.mktemp("distill") / "teacher", tokenizer=True, tie_word_embeddings=True
    )


@pytest.fixture
def recipe(teacher_folder):
    return make_recipe(teacher_folder, *RAGGED)


@pytest.fixture
def pair(recipe):
    """A teacher and its exact copy with Bayesian Layers at 1 and 2."""
    teacher = load_model(recipe.teacher.model)
    for p in teacher.parameters():
        p.requires_grad_(False)
    return teacher, make_student(recipe.teacher.model, [1, 2]).student


def test_weight_decay_touches_matrices_only(pair):
    _, student = pair
    names = trainable_names(student, "converted+norms", (1, 2))
    optimizer = torch.optim.AdamW(parameter_groups(student, names, 1.0), lr=0.1)
    before = {n: p.detach().clone() for n, p in student.named_parameters()}
    for name, p in student.named_parameters():
        p.grad = torch.zeros_like(p) if name in names else None
    optimizer.step()
    moved = {n for n, p in student.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {n for n in names if n.endswith("_proj.weight") and "obs" not in n and "process" not in n}


@pytest.mark.parametrize("pack", [True, False])
def test_rows_depend_on_the_seed_alone_and_a_position_can_be_restored(teacher_folder, pack):
    tokenizer = load_tokenizer(str(teacher_folder))
    parts = [{"weight": 1, "source": {"kind": "builtin"}}, {"weight": 1, "source": {"kind": "needles"}}]
    data = Data(source={"kind": "mix", "parts": parts}, seq_len=288, pack=pack)
    stream = RowStream(data, tokenizer)
    first = stream.take(5)
    position = json.loads(json.dumps(stream.state()))
    rest = stream.take(9)
    again = RowStream(data, tokenizer)
    assert torch.equal(again.take(14).ids, torch.cat([first.ids, rest.ids]))
    restored = RowStream(data, tokenizer)
    restored.restore(position)
    assert torch.equal(restored.take(9).ids, rest.ids)
    other = RowStream(data.model_copy(update={"seed": 1}), tokenizer)
    assert not torch.equal(other.take(5).ids, first.ids)


def test_packing_fills_rows_and_cuts_no_document_that_fits_one(tmp_path, teacher_folder):
    tokenizer = load_tokenizer(str(teacher_folder))
    texts = [f"{i} " + "word " * (5 * i) for i in range(1, 12)] + ["long " * 700]
    (tmp_path / "docs.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    data = Data(source={"kind": "jsonl", "path": str(tmp_path / "docs.jsonl")}, seq_len=64)
    rows = RowStream(data, tokenizer).take(40)
    pieces = []
    for ids, real, first in zip(rows.ids, rows.real, rows.first, strict=True):
        starts = [*first.nonzero().flatten().tolist(), int(real.sum())]
        pieces += [ids[a:b].tolist() for a, b in pairwise(starts)]
    whole = {(*tokenizer.encode(t), tokenizer.eos_token_id) for t in texts[:-1]}
    assert all(len(w) <= 64 for w in whole)
    assert {tuple(p) for p in pieces if p[-1] == tokenizer.eos_token_id and len(p) < 64} >= whole
    assert float(rows.real.float().mean()) > 0.8 and int(rows.first.sum()) > 40
    alone = RowStream(data.model_copy(update={"pack": False}), tokenizer).take(40)
    assert int(alone.first.sum()) == 40


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"", "holds no text"),
        ("bad.txt", b"\xff\xfe\x00", "not UTF-8"),
        ("cut.xz", b"\xfd7zXZ", "cannot be read"),
        ("lines.jsonl", b'{"text": "a"}\n{"txt": 1}\n', "line 2"),
        ("blank.jsonl", b"\n\n", "holds no text"),
    ],
)
def test_broken_text_files_are_named(tmp_path, teacher_folder, name, content, message):
    (tmp_path / name).write_bytes(content)
    kind = "jsonl" if name.endswith("jsonl") else "text"
    data = Data(source={"kind": kind, "path": str(tmp_path / name)}, seq_len=32, pack=False)
    with pytest.raises(UserError, match=message):
        RowStream(data, load_tokenizer(str(teacher_folder))).take(1)


def test_a_mistake_in_the_data_shows_before_a_run_directory_is_made(tmp_path, teacher_folder) -> None:
    recipe = make_recipe(teacher_folder, "data.source={kind: text, path: nothing.txt}")
    with pytest.raises(UserError, match="no such file"):
        distill(recipe, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_schedules(recipe):
    stage = phase_stages(recipe)[0]
    assert stage.tokens == 384 and stage.next_step(0) == (2, 384)
    done = range(0, 384, 64)
    levels = [stage.evidence_at(i, 64) for i in done]
    assert levels == sorted(levels) and 0 < levels[0] < 1 and levels[2:] == [1.0, 1.0, 1.0, 1.0]
    rates = [stage.lr_at(i, 64) for i in done]
    assert max(rates) <= stage.lr and 0 < rates[-1] < rates[1]
    (whole,) = control_stages(recipe)
    assert whole.tokens == 768
    assert [whole.next_step(i) for i in (0, 350, 384)] == [(2, 384), (2, 34), (2, 384)]


def test_the_control_moves_the_same_layers_and_nothing_else(tmp_path, recipe):
    distill(recipe, tmp_path / "run")
    control(tmp_path / "run")
    found = [
        json.loads((tmp_path / "run" / name / "manifest.json").read_text())["finished"]
        for name in (".", "control")
    ]
    for key in ("data_sha256", "tokens", "steps", "ledger"):
        assert found[0][key] == found[1][key]
    assert found[0]["tokens"] == 768
    teacher = dict(load_model(recipe.teacher.model).named_parameters())
    trained = dict(load_model(str(tmp_path / "run" / "control" / "export")).named_parameters())
    moved = {name for name, p in trained.items() if not torch.equal(p, teacher[name])}
    assert moved and all(n.startswith(("model.layers.1.attn.", "model.layers.2.attn.")) for n in moved)
    cards = [(tmp_path / "run" / name / "export" / "README.md").read_text() for name in (".", "control")]
    for card, title, mixer in zip(cards, ("distilled", "control"), ("bayesian", "gated_delta"), strict=True):
        assert f"{title}\n\n`{teacher_name(recipe)}`" in card and f"| 2 | {mixer}" in card
        assert "768 tokens in" in card and found[0]["data_sha256"] in card
        assert dump_recipe(recipe) == card.split("```yaml\n")[1].split("```")[0]


def teacher_name(recipe):
    return Path(recipe.teacher.model).name


def test_evidence_arrives_at_its_end_and_learned_evidence_moves(tmp_path):
    models = write_models(tmp_path)
    for learn in (False, True):
        loop = make_loop(models, tmp_path / str(learn), evidence=Evidence(end=0.8, learn=learn))
        loop.run()
        evidence = loop.student.model.layers[1].attn.evidence
        assert bool((evidence == 0.8).all()) is not learn
        assert bool(((evidence - 0.8).abs() < 0.2).all())


def test_a_run_refuses_another_recipe_and_a_directory_in_use(tmp_path, recipe, teacher_folder):
    distill(recipe, tmp_path / "run")
    with pytest.raises(UserError, match=r"holds a run.*--resume"):
        distill(recipe, tmp_path / "run")
    with pytest.raises(UserError, match=f"give {tmp_path / 'run' / 'export'}"):
        load_model(str(tmp_path / "run"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine").touch()
    with pytest.raises(UserError, match="not empty"):
        distill(recipe, tmp_path / "other")
    with pytest.raises(UserError, match=r"recipe\.yaml.*: phases\.0\.lr is 0\.01 there and 0\.0001 here\."):
        distill(make_recipe(teacher_folder, *RAGGED, "phases.0.lr=1e-4"), tmp_path / "run", resume=True)
    with pytest.raises(UserError, match="no run directory"):
        control(tmp_path)
