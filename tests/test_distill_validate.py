"""`recipes validate`: what it finds before a run, and that every key of a recipe is read somewhere."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from folders import write_teacher
from tokenizers import processors
from transformers import AutoTokenizer

import regraft as package
from regraft.distill.validate import narrow, validate
from regraft.errors import UserError
from regraft.layers import RegraftConfig
from regraft.recipes import load_recipe, shipped
from regraft.recipes.schema import json_schema

LOCAL = ("data.source={kind: builtin}", "data.seq_len=64")
RESET = "convert.to=covariance-reset"
SHORT = ("phases.0.batch_tokens=128", "phases.1.batch_tokens=128")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A folder of 24 layers, as the recipes for the 340M model have them."""
    return write_teacher(tmp_path_factory.mktemp("validate") / "t", tokenizer=True, num_hidden_layers=24)


def problem(recipe):
    with pytest.raises(UserError) as caught:
        list(validate(recipe))
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(shipped()))
def test_shipped_recipes_are_valid(name, teacher):
    recipe = load_recipe(name)
    if recipe.teacher.model != "embedded":
        recipe = load_recipe(name, [f"teacher.model={teacher}", *LOCAL, *SHORT])
    lines = list(validate(recipe))
    for part in ("key plan: ", "tokenizer: ", "data: ", "keys: ", "losses: ", "memory: ", "FLOPs: "):
        assert sum(line.startswith(part) for line in lines) == 1
    converted = "1, 3, 5" if recipe.teacher.model == "embedded" else "5, 11, 17, 23"
    assert f"layers {converted} converted" in lines[0]


@pytest.mark.slow
def test_the_verb_prints_what_it_checked(regraft):
    code, out, _ = regraft("recipes", "validate", "demo")
    assert code == 0 and "18 of them new" in out and out.splitlines()[-1].startswith("demo: valid")
    code, out, _ = regraft("recipes", "validate", "paper-340m", "--keys-only")
    assert code == 0 and out.count("\n") == 1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["teacher.model=./nowhere"], "./nowhere"),
        (["convert.layers=[7]"], "layer 7 does not exist"),
        (["convert.noise_groups=5"], "5 groups do not divide"),
        (["convert.targets=[{layer: 2, to: kdn-diagonal}]"], "layer 2 is not among the converted layers"),
        (["data.source={kind: text, path: nowhere.txt}"], "nowhere.txt"),
        (["phases.1.train=['model.layer.*']"], "fits no parameter"),
        (["phases.1.train={kind: lora, targets: [q_prj]}"], "did you mean `q_proj`"),
        (["phases.0.train=all"], "no loss reaches"),
        (["phases.0.evidence={end: 0}"], "nothing would be trained"),
        ([RESET], "nothing would be trained"),
        (
            ["convert.to=covariance-reset", "convert.process_match=0.5"],
            "no converted layer has process noise",
        ),
        (
            [RESET, "phases.0.evidence={end: 0.4}"],
            "no converted layer has an evidence",
        ),
        (["phases.0.evidence={over: 0, shape: cosine}"], "with `over: 0` there is no ramp"),
        (["phases.0.logit_chunk=7"], "phases.0.logit_chunk: no loss of the phase looks at logits"),
        (
            ["phases.1.losses=[{kind: forward_kl, weight: 0, temperature: 2}, {kind: boundary_mse}]"],
            "phases.1.losses.0.temperature: the loss has weight 0",
        ),
        (
            [
                "convert={layers: [1], to: bayesian, targets: [{layer: 1, to: kdn-diagonal}]}",
                "phases.0.logit_chunk=7",
            ],
            "every layer has a target of its own. Fix: leave it out, and likewise phases.0.logit_chunk",
        ),
    ],
)
def test_what_would_stop_a_run_or_do_nothing_is_named(overrides, message):
    assert message in problem(load_recipe("demo", [*SHORT, *LOCAL, *overrides]))


def test_a_problem_ends_with_exit_code_2(regraft):
    code, _, err = regraft("recipes", "validate", "demo", "--set", "data.source={kind: text, path: no.txt}")
    assert code == 2 and "no.txt" in err and "fix:" in err


def test_scanned_layers_are_stood_in_for():
    lines = list(validate(load_recipe("demo", ["convert.layers=scan:2", *LOCAL, *SHORT])))
    assert "layers 4, 5 converted in place of those that scan:2 finds" in lines[0]


def test_a_tokenizer_that_does_not_belong_to_the_model_is_named(tmp_path):
    folder = write_teacher(tmp_path / "t", tokenizer=True, num_hidden_layers=6, vocab_size=8000)
    assert "has 8192 tokens, the model's embedding 8000 rows" in problem(
        load_recipe("demo", [f"teacher.model={folder}"])
    )
    folder = write_teacher(tmp_path / "l", tokenizer=True, num_hidden_layers=6)
    file = folder / "tokenizer.json"
    state = json.loads(file.read_text())
    state["normalizer"] = {"type": "Lowercase"}
    file.write_text(json.dumps(state))
    assert "does not give a text back" in problem(load_recipe("demo", [f"teacher.model={folder}"]))


def test_a_token_before_every_text_stands_there_once(tmp_path):
    folder = write_teacher(tmp_path / "t", tokenizer=True, num_hidden_layers=6)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    eos = tokenizer.eos_token
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{eos} $A", special_tokens=[(eos, tokenizer.eos_token_id)]
    )
    tokenizer.save_pretrained(folder)
    recipe = load_recipe("demo", [f"teacher.model={folder}", *LOCAL, *SHORT])
    assert f"{eos!r} stands before a document" in "\n".join(validate(recipe))


def test_a_narrow_twin_has_the_same_parameters():
    from regraft.layers import RegraftForCausalLM

    for settings in ({"noise_groups": 1}, {"noise_groups": 6}):
        config = RegraftConfig(
            num_hidden_layers=2,
            num_heads=2,
            num_v_heads=4,
            head_dim=48,
            expand_v=2.0,
            mixers=[{"kind": "bayesian", **settings}, {"kind": "gated_deltanet"}],
        )
        small = RegraftForCausalLM(narrow(config, settings["noise_groups"]))
        assert sum(p.numel() for p in small.parameters()) < 300_000
        assert small.config.num_v_heads == 2 and small.config.mixers == config.mixers


def test_every_key_of_a_recipe_is_read_somewhere():
    root = Path(package.__file__).parent
    code = "\n".join(p.read_text() for p in root.rglob("*.py") if p.name != "schema.py")
    schema = json_schema()
    unread = {
        name
        for model in (schema, *schema["$defs"].values())
        for name in model["properties"]
        if not re.search(rf"\.{name}\b", code)
    }
    # `version` is read by the schema itself, and there is one transition so far.
    assert unread - {"version"} == {"transition"}
