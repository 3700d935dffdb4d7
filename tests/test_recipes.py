"""Recipes: strict at every depth, errors with paths, YAML 1.2 scalars, overrides, layer selectors; files."""

from __future__ import annotations

import copy
import json
import os
import re

import pytest

from regraft.errors import UserError
from regraft.files import (
    atomic_directory,
    hash_directory,
    refuse_existing,
    sha256_file,
    write_json,
    write_text,
)
from regraft.recipes import dump_recipe, load_recipe, resolve_layers, shipped
from regraft.recipes.load import parse_recipe
from regraft.recipes.schema import Evidence, json_schema
from regraft.recipes.yaml12 import format_yaml, parse_yaml

MINIMAL = """
version: 1
teacher: {model: embedded}
convert: {layers: [1, 3]}
data: {source: {kind: mix, parts: [{weight: 1, source: {kind: text, path: a.txt}}]}, seq_len: 64}
phases:
  - {name: match, losses: [{kind: layer_nmse}], tokens: 1M, batch_tokens: 640, lr: 1e-3}
  - {name: joint, losses: [{kind: forward_kl}], tokens: 1M, batch_tokens: 640, lr: 1e-4}
"""


def parse(*overrides: str, text: str = MINIMAL):
    return parse_recipe(text, "test", overrides)


def problem(*overrides: str, text: str = MINIMAL) -> str:
    with pytest.raises(UserError) as caught:
        parse(*overrides, text=text)
    assert not re.search(r"[A-Z]\w+(Source|Section)|Phase\b|pydantic", str(caught.value))
    return str(caught.value)


# strictness


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("sed=1", "sed: unknown key; did you mean `seed`?"),
        ("teacher.modl=x", "teacher.modl: unknown key; did you mean `model`?"),
        ("phases.1.losses.0.wieght=2", "phases.1.losses.0.wieght: unknown key; did you mean `weight`?"),
        ("phases.0.evidence.ovr=1", "phases.0.evidence.ovr: unknown key; did you mean `over`?"),
        (
            "data.source.parts.0.source.pth=x",
            "data.source.parts.0.source.pth: unknown key; did you mean `path`?",
        ),
        ("report.niah.sample=3", "report.niah.sample: unknown key; did you mean `samples`?"),
        ("contrl.lr=1", "contrl: unknown key; did you mean `control`?"),
        ("layers=[1]", "layers: unknown key; it belongs to convert.layers"),
        (
            "control.temperature=1",
            "control.temperature: unknown key; it belongs to phases.N.losses.N.temperature",
        ),
        ("teacher.zzz=1", "teacher.zzz: unknown key; known here: model, revision, dtype"),
        ("data.source.kind=mx", "data.source.kind: 'mx' does not exist; did you mean `mix`?"),
        ("data.source={path: x}", "data.source: needs a `kind`"),
        ("data.source=3", "data.source: should be a mapping with a `kind`"),
        ("phases.0=3", "phases.0: should be a mapping"),
        ("phases=[]", "phases: should name at least one"),
        ("phases.0.losses=[]", "phases.0.losses: should name at least one"),
        ("phases.0.losses.0.weight=0", "phases.0.losses: every loss has weight 0"),
        ("control.losses=[{kind: forward_kl}]", "control.losses.0.kind: should be 'cross_entropy'"),
        ("phases.1.name=match", "phases: two phases are named 'match'"),
        ("phases.1.batch_tokens=100", "phases.1.batch_tokens: 100 is not a multiple of data.seq_len, 64"),
        ("report.perplexity={lengths: [3, 4], sets: [a]}", "report.perplexity.lengths: 3 should divide the"),
        ("convert.layers=evry:6", "convert.layers: 'evry:6' does not fit"),
        ("convert.layers=[true]", "convert.layers.0: should be a valid integer, not True"),
        ("convert.layers=[-1]", "convert.layers.0: should be greater than or equal to 0, not -1"),
        ("seed='1'", "seed: should be a valid integer, not '1'"),
        ("seed=true", "seed: should be a valid integer, not True"),
        ("phases.0.lr=.inf", "phases.0.lr: should be a finite number, not inf"),
        ("phases.0.warmup=1", "phases.0.warmup: should be less than 1, not 1"),
        ("phases.0.tokens=10X", "phases.0.tokens: should be a whole number of tokens"),
        ("phases.0.tokens=true", "phases.0.tokens: should be a valid integer, not True"),
        ("phases.0.tokens=0", "phases.0.tokens: should be greater than 0, not 0"),
        ("version=2", "version: should be 1, not 2"),
    ],
)
def test_a_problem_is_named_by_path_and_reason(override: str, expected: str) -> None:
    assert f"\n  {expected}" in problem(override)


def test_every_mapping_at_every_depth_refuses_an_unknown_key() -> None:
    tree = parse_yaml(dump_recipe(parse()), "test")
    mappings = list(_mappings(tree))
    assert len(mappings) > 12
    for path in mappings:
        changed = copy.deepcopy(tree)
        node = changed
        for step in path:
            node = node[step]
        node["zzz"] = 1
        where = ".".join(map(str, (*path, "zzz")))
        assert f"\n  {where}: unknown key" in problem(text=format_yaml(changed))


def _mappings(node, path=()):
    if isinstance(node, dict):
        yield path
    for key, inner in node.items() if isinstance(node, dict) else enumerate(node):
        if isinstance(inner, dict | list):
            yield from _mappings(inner, (*path, key))


def test_all_problems_are_listed_at_once() -> None:
    message = problem("seed=-1", "teacher.zzz=1", "phases.0.lr=0")
    assert message.count("\n  ") == 3


def test_a_missing_key_is_named() -> None:
    assert "\n  teacher: is missing" in problem(text=MINIMAL.replace("teacher:", "# teacher:"))


@pytest.mark.parametrize(
    "text", ["", "- 1", "a: [", "a: 1\na: 2", "a: {b: 1, b: 2}", "!!python/object:os.x {}"]
)
def test_what_is_no_recipe_is_refused(text: str) -> None:
    problem(text=text)


def test_recipes_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        parse().seed = 3


# scalars


@pytest.mark.parametrize("spelling", ["1e-4", "1.e-4", "1E-4", "1.0e-4", ".1e-3", "0.0001"])
def test_floats_in_every_spelling(spelling: str) -> None:
    assert parse(f"phases.0.lr={spelling}").phases[0].lr == 1e-4
    assert parse(text=MINIMAL.replace("lr: 1e-3", f"lr: {spelling}")).phases[0].lr == 1e-4


@pytest.mark.parametrize("word", ["no", "yes", "on", "off", "No", "y", "1:30", "2024-01-01", "1_000"])
def test_words_stay_text(word: str) -> None:
    assert parse(f"teacher.model={word}").teacher.model == word


@pytest.mark.parametrize(
    "text", ["no", "1e-4", "1", "null", "0o7", "true", "~", "", "a: b", "é", "1:30", "x\n"]
)
def test_text_survives_writing_and_reading(text: str) -> None:
    assert parse_yaml(format_yaml({"a": text}), "test") == {"a": text}


def test_integers_are_decimal() -> None:
    assert parse_yaml("[010, 0o10, 0x10, -3]", "test") == [10, 8, 16, -3]


@pytest.mark.parametrize(
    ("written", "tokens"),
    [
        ("100M", 100_000_000),
        ("256K", 256_000),
        ("1.5B", 1_500_000_000),
        ("1_000_000", 1_000_000),
        ("1e6", 1_000_000),
        ("7", 7),
        ("1.001K", 1001),
    ],
)
def test_token_counts(written: str, tokens: int) -> None:
    assert parse(f"phases.0.tokens={written}").phases[0].tokens == tokens


# defaults, overrides, round trip


def test_evidence_rises_in_the_first_phase_and_then_stays() -> None:
    first, second = parse().phases
    assert first.evidence == Evidence(start=0, end=1, over=0.5)
    assert second.evidence is None
    assert parse("phases.0.evidence.end=0.3").phases[0].evidence == Evidence(end=0.3)


def test_overrides() -> None:
    recipe = parse(
        "teacher.model=x=y", "report.niah.samples=5", "phases.1.losses.0.temperature=2", "seed=1", "seed=2"
    )
    assert recipe.teacher.model == "x=y"
    assert recipe.report.niah.samples == 5
    assert recipe.phases[1].losses[0].temperature == 2
    assert recipe.seed == 2
    assert parse("data.source={kind: jsonl, path: a.jsonl.gz}").data.source.field == "text"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("seed", "is not path=value"),
        ("=1", "is not path=value"),
        ("a..b=1", "is not path=value"),
        ("phases.2.lr=1", "the list has no item '2'"),
        ("phases.3={}", "the list has no item '3'"),
        ("phases.-1.lr=1", "the list has no item '-1'"),
        ("phases.lr=1", "the list has no item 'lr'"),
        ("seed.a=1", "--set seed.a=1"),
        ("control.losses.0.weight=1", "there is nothing to set '0' in"),
        ("seed=[1", "not valid YAML"),
    ],
)
def test_overrides_that_lead_nowhere(override: str, expected: str) -> None:
    text = MINIMAL + "seed: 0\n"
    assert expected in problem(override, text=text)


def test_an_override_one_past_the_end_adds_an_item() -> None:
    whole = parse(
        "phases.2={name: last, losses: [{kind: cross_entropy}], tokens: 1M, batch_tokens: 4096, lr: 1e-4}"
    )
    assert [p.name for p in whole.phases] == ["match", "joint", "last"]


def test_an_override_changes_one_place_although_an_alias_shares_it() -> None:
    text = MINIMAL.replace("losses: [{kind: layer_nmse}]", "losses: &l [{kind: forward_kl}]")
    text = text.replace("name: joint, losses: [{kind: forward_kl}]", "name: joint, losses: *l")
    first, second = parse("phases.0.losses.0.temperature=3", text=text).phases
    assert (first.losses[0].temperature, second.losses[0].temperature) == (3, 1)


@pytest.mark.parametrize("name", list(shipped()))
def test_shipped_recipes_are_valid_and_survive_the_round_trip(name: str) -> None:
    recipe = load_recipe(name)
    assert parse_recipe(dump_recipe(recipe), name) == recipe
    assert dump_recipe(parse_recipe(dump_recipe(recipe), name)) == dump_recipe(recipe)


def test_a_recipe_is_found_by_path_and_its_name_suggested(tmp_path) -> None:
    file = tmp_path / "r.yaml"
    file.write_bytes(b"\xef\xbb\xbf" + MINIMAL.replace("\n", "\r\n").encode())  # as a Windows editor saves it
    assert load_recipe(file) == parse()
    with pytest.raises(UserError, match="did you mean `demo`"):
        load_recipe("demmo")
    file.write_bytes(b"version: \xff")
    with pytest.raises(UserError, match="not UTF-8"):
        load_recipe(file)


def test_every_key_is_described() -> None:
    schema = json_schema()
    for model in (schema, *schema["$defs"].values()):
        assert model["description"]
        for name, field in model["properties"].items():
            assert field.get("description"), name


# layer selectors


@pytest.mark.parametrize(
    ("selector", "n_layers", "expected"),
    [
        ("every:6", 24, (5, 11, 17, 23)),
        ("every:6", 20, (5, 11, 17)),
        ("last:4", 24, (20, 21, 22, 23)),
        ("last:1", 1, (0,)),
        ("1,3", 6, (1, 3)),
        (" 3, 1 ", 6, (1, 3)),
        ([3, 1], 6, (1, 3)),
        ((0,), 1, (0,)),
    ],
)
def test_layers(selector, n_layers, expected) -> None:
    assert resolve_layers(selector, n_layers) == expected


@pytest.mark.parametrize(
    ("selector", "reason"),
    [
        ([99], "layer 99 does not exist. Fix: choose from 0 to 5"),
        ("-1", "layer -1 does not exist"),
        ([1, 3, 1], "layer 1 is given twice"),
        ([], "selects no layer"),
        ("", "selects no layer"),
        ("every:7", "selects no layer"),
        ("last:7", "layer -1 does not exist"),
        ("every:0", "'every:0' is not a layer"),
        ("evry:2", "is not a layer"),
        ("1,,2", "'' is not a layer"),
        ([True], "True is not a layer"),
    ],
)
def test_layers_that_do_not_exist(selector, reason) -> None:
    with pytest.raises(UserError) as caught:
        resolve_layers(selector, 6)
    assert reason in str(caught.value)


# files


def test_a_directory_appears_whole(tmp_path) -> None:
    with atomic_directory(tmp_path / "a" / "b") as made:
        (made / "sub").mkdir()
        (made / "sub" / "f").write_text("1")
        assert not (tmp_path / "a").exists()
    assert (tmp_path / "a" / "b" / "sub" / "f").read_text() == "1"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_place_that_may_not_be_written_to_is_refused_before_any_work(tmp_path, monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(os, "access", lambda path, mode: asked.append((path, mode)) or False)
    with pytest.raises(UserError, match="may not be written to"):
        refuse_existing(tmp_path / "new" / "deep")
    assert asked == [(tmp_path, os.W_OK | os.X_OK)]


def test_a_file_makes_its_folders(tmp_path) -> None:
    write_text(tmp_path / "new" / "deep" / "f", "1")
    assert (tmp_path / "new" / "deep" / "f").read_text() == "1"


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failure_leaves_nothing_and_keeps_the_old(tmp_path, error) -> None:
    old = tmp_path / "old"
    with atomic_directory(old) as made:
        (made / "f").write_text("1")
    for target in (old, tmp_path / "new" / "deep"):
        with pytest.raises(error), atomic_directory(target, overwrite=True) as made:
            (made / "g").write_text("2")
            raise error
    assert [p.name for p in tmp_path.rglob("*")] == ["old", "f"]


def test_overwrite_replaces_and_its_absence_refuses(tmp_path) -> None:
    target = tmp_path / "d"
    target.mkdir()
    for text in "12":  # an empty directory needs no permission
        with atomic_directory(target, overwrite=text == "2") as made:
            (made / text).touch()
    assert [p.name for p in target.iterdir()] == ["2"]
    assert [p.name for p in tmp_path.iterdir()] == ["d"]
    with pytest.raises(UserError, match="not empty"), atomic_directory(target):
        raise AssertionError("the block must not run")
    with pytest.raises(UserError, match="is a file"), atomic_directory(target / "2", overwrite=True):
        raise AssertionError("the block must not run")


def test_json_is_the_same_bytes_for_the_same_value(tmp_path) -> None:
    file = tmp_path / "f.json"
    write_json(file, {"b": 1, "a": "é"})
    first = file.read_bytes()
    write_json(file, {"a": "é", "b": 1})
    assert file.read_bytes() == first == '{\n  "a": "é",\n  "b": 1\n}\n'.encode()
    with pytest.raises(ValueError, match="JSON"):
        write_json(file, {"a": float("nan")})
    assert json.loads(file.read_text()) == {"a": "é", "b": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["f.json"]


def test_hashes_follow_the_model_and_nothing_else(tmp_path) -> None:
    write_text(tmp_path / "config.json", "{}")
    write_text(tmp_path / "model.safetensors", "abc")
    assert sha256_file(tmp_path / "model.safetensors").startswith("ba7816bf8f01cfea")
    before = hash_directory(tmp_path)
    write_text(tmp_path / "README.md", "card")
    assert hash_directory(tmp_path) == before
    (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
    assert hash_directory(tmp_path) != before
    with pytest.raises(UserError):
        hash_directory(tmp_path / "none")


def test_targets_of_single_layers_survive_writing_out(tmp_path) -> None:
    recipe = load_recipe("demo", ["convert.targets=[{layer: 2, to: kdn-diagonal}]"])
    assert recipe.convert.targets[0].to == "kdn-diagonal"
    (tmp_path / "r.yaml").write_text(dump_recipe(recipe))
    assert load_recipe(str(tmp_path / "r.yaml")) == recipe
