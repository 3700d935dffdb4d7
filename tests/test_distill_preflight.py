"""The checks before a run: zero at the teacher, every loss felt where it should be; FLOPs and memory."""

from __future__ import annotations

import copy

import pytest
import torch
from folders import write_teacher

from regraft.convert import load_model, make_student
from regraft.distill import divergence
from regraft.distill.adapters import add_adapters
from regraft.distill.preflight import preflight
from regraft.distill.stage import control_stages, phase_stages
from regraft.errors import UserError
from regraft.recipes.load import parse_recipe

LAYERS = (1, 2)
RECIPE = """
version: 1
teacher: {model: embedded}
convert: {layers: [1, 2]}
data: {source: {kind: builtin}, seq_len: 32}
phases:
  - {name: match, losses: [{kind: layer_nmse}], tokens: 256, batch_tokens: 64, lr: 0.01}
  - {name: joint, losses: [{kind: forward_kl}, {kind: boundary_mse}], tokens: 256, batch_tokens: 64, lr: 1e-3}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_teacher(tmp_path_factory.mktemp("preflight") / "t", tokenizer=True))


@pytest.fixture(scope="module")
def models(folder):
    return make_student(folder, LAYERS).student, load_model(folder)


@pytest.fixture
def pair(models):
    return copy.deepcopy(models[0]), models[1]


def stages(*overrides):
    return phase_stages(parse_recipe(RECIPE, "test", overrides))


def state(model):
    return {n: (p.detach().clone(), p.requires_grad) for n, p in model.named_parameters()}


def test_a_sound_recipe_passes_and_leaves_both_models_as_they_were(pair):
    student, teacher = pair
    before = [state(m) for m in pair]
    rng = torch.get_rng_state()
    preflight(student, teacher, stages(), LAYERS)
    for model, old in zip(pair, before, strict=True):
        for name, (value, wanted) in state(model).items():
            assert torch.equal(value, old[name][0]) and wanted == old[name][1]
            assert dict(model.named_parameters())[name].grad is None
    assert torch.equal(torch.get_rng_state(), rng)


@pytest.mark.parametrize(
    "losses",
    ["reverse_kl", "jsd", "forward_kl", "cross_entropy"],
)
@pytest.mark.parametrize("train", ["all", "converted", "['model.layers.3.mlp.*']"])
def test_head_losses_reach_everything(pair, losses, train):
    preflight(*pair, stages(f"phases.1.losses=[{{kind: {losses}}}]", f"phases.1.train={train}"), LAYERS)


def test_adapters_are_reached(pair):
    student, teacher = pair
    recipe = parse_recipe(RECIPE, "test", ["phases.1.train={kind: lora, rank: 2}"])
    add_adapters(student, recipe.lora, LAYERS)
    preflight(student, teacher, phase_stages(recipe), LAYERS)


def test_the_control_is_checked_too(pair):
    _, teacher = pair
    preflight(teacher, None, control_stages(parse_recipe(RECIPE, "test")), LAYERS)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["phases.0.train=all"], "phase match: no loss reaches lm_head.weight, model.embeddings.weight"),
        (
            ["phases.0.train=converted+norms"],
            "match: no loss reaches model.layers.0.attn.o_norm.weight",
        ),
        (["phases.0.train=['model.layers.3.*']"], "layer_nmse does not reach anything that the phase trains"),
        (
            ["phases.1.losses=[{kind: boundary_mse}]", "phases.1.train=['model.layers.[13].mlp.*']"],
            "phase joint: no loss reaches model.layers.3.mlp.down_proj.weight",
        ),
        (["phases.0.evidence={end: 0}"], "the student is its teacher and every loss is 0 there"),
        (["phases.0.evidence={end: 0, learn: true}"], "every loss is 0 there: nothing would be trained"),
        (
            ["phases.0.evidence={end: 0}", "phases.1.losses=[{kind: cross_entropy}]"],
            "phase match: layer_nmse does not reach model.layers.1.attn.refresh",
        ),
    ],
)
def test_what_a_loss_does_not_reach_is_named(pair, overrides, message):
    with pytest.raises(UserError) as caught:
        preflight(*pair, stages(*overrides), LAYERS)
    assert message in str(caught.value)


def test_evidence_learned_from_0_is_felt(pair):
    kept = "phases.0.losses=[{kind: layer_nmse}, {kind: cross_entropy}]"
    preflight(*pair, stages("phases.0.evidence={end: 0, learn: true}", kept), LAYERS)


def test_a_mixer_without_evidence_needs_cross_entropy(folder):
    student, teacher = make_student(folder, LAYERS, to="covariance-reset").student, load_model(folder)
    with pytest.raises(UserError, match="this mixer has no evidence"):
        preflight(student, teacher, stages(), LAYERS)
    preflight(student, teacher, stages("phases.1.losses=[{kind: forward_kl}, {kind: cross_entropy}]"), LAYERS)


def test_a_student_from_an_earlier_run_may_have_its_evidence_already(pair):
    student, teacher = pair
    (_, joint) = stages()
    with pytest.raises(UserError, match="nothing would be trained"):
        preflight(student, teacher, [joint], LAYERS)
    for i in LAYERS:
        student.model.layers[i].attn.evidence.data.fill_(1.0)
    preflight(student, teacher, [joint], LAYERS)


def test_a_forward_kl_that_is_a_cross_entropy_is_caught(pair, monkeypatch):
    """The mistake that others made: the teacher's entropy left in."""

    def wrong(student, teacher, temperature=1.0):
        p = teacher.float().softmax(-1)
        log_s = student.float().log_softmax(-1)
        return -(p * log_s).sum(-1), log_s.exp() - p

    monkeypatch.setattr(divergence, "forward_kl", wrong)
    with pytest.raises(UserError, match=r"forward_kl is \d.* where student and teacher are one"):
        preflight(*pair, stages(), LAYERS)


def test_a_gradient_that_does_not_vanish_is_caught(pair, monkeypatch):
    def wrong(student, teacher, temperature=1.0):
        value, gradient = right(student, teacher, temperature)
        return value, gradient + 1e-3

    right = divergence.forward_kl
    monkeypatch.setattr(divergence, "forward_kl", wrong)
    with pytest.raises(UserError, match="forward_kl is 0 where student and teacher are one; gradient up to"):
        preflight(*pair, stages(), LAYERS)


def test_broken_weights_are_named(pair):
    student, teacher = pair
    student.model.layers[1].attn.q_proj.weight.data[0, 0] = float("nan")
    with pytest.raises(UserError, match="is no number"):
        preflight(student, teacher, stages(), LAYERS)
