"""Learned recall: sequences against a dictionary, rules against recurrences, any mixer in the host."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from regraft.errors import UserError
from regraft.probes.load import load
from regraft.probes.mixers import build, mixer_config
from regraft.probes.plots import balanced
from regraft.probes.recall import accuracy, drawn, model_of, run
from regraft.probes.recall_data import TEST, TRAIN, Recalled, collision_batch, random_batch
from regraft.probes.recall_rules import FixedAddress
from regraft.probes.runner import no_tick, probe_of
from regraft.probes.schema import CollisionRecall, MixerSpec, RandomRecall

torch.set_num_threads(1)
TASK, RANDOM = CollisionRecall(pairs=3, boost=2), RandomRecall(raw=24, labels=20, queries=4)
STYLES = "regraft.probes.recall_rules"


def batches() -> list[Recalled]:
    shaken = TASK.model_copy(update={"basis": "random"})
    return [
        collision_batch(TASK, 16, 5, (0.6, 0.8), [TRAIN, 0, 0]),
        collision_batch(shaken, 16, 3, (0.9, 0.9), [TRAIN, 0, 1]),
        random_batch(RANDOM, 16, 30, 8, [TRAIN, 0, 2]),
    ]


class Dictionary(torch.nn.Module):
    """A perfect memory: the value last written at exactly the address that is asked for."""

    def forward(self, tokens: Tensor, address: Tensor, write: Tensor, at: Tensor) -> Tensor:
        labels = self.labels
        answers = torch.zeros(*at.shape, labels)
        for b in range(len(tokens)):
            held: dict[tuple[float, ...], Tensor] = {}
            for t in range(tokens.shape[1]):
                if write[b, t]:
                    held[tuple(address[b, t].tolist())] = tokens[b, t, -labels:]
            for i, t in enumerate(at[b]):
                answers[b, i] = held[tuple(address[b, t].tolist())]
        return answers


@pytest.mark.parametrize("index", range(3))
def test_a_perfect_memory_is_always_right(index: int) -> None:
    batch, oracle = batches()[index], Dictionary()
    oracle.labels = 20 if index == 2 else 6
    assert accuracy(oracle, iter([batch])) == {"accuracy": 1.0, "rival": 0.0}


@pytest.mark.parametrize("index", range(3))
def test_queries_say_nothing_of_the_value_and_chance_is_as_stated(index: int) -> None:
    batch = batches()[index]
    labels = 20 if index == 2 else 6
    Q = batch.answer.shape[1]
    assert not batch.write[:, -Q:].any() and batch.write[:, :-Q].all()
    assert (batch.tokens[:, -Q:, -labels:] == 0).all() and (batch.tokens[:, -Q:, 0] == 0).all()
    assert (batch.tokens[:, :-Q, -labels:].sum(-1) == 1).all()
    torch.testing.assert_close(batch.address.norm(dim=-1), torch.ones(batch.write.shape))
    many = (
        random_batch(RANDOM, 4000, 8, 8, [TEST, 1])
        if index == 2
        else collision_batch(TASK, 4000, 1, (0.6, 0.8), [TEST, 1])
    )
    share = torch.bincount(many.answer.flatten(), minlength=labels) / many.answer.numel()
    torch.testing.assert_close(share, torch.full((labels,), 1 / labels), rtol=0, atol=0.02)


def test_phases_and_overlaps() -> None:
    batch = collision_batch(TASK, 32, 4, (0.85, 0.95), [TEST, 0])
    assert batch.write.shape[1] == 6 + 3 * 2 + 3 * 4 + 3
    flood = batch.address[:, 12:24].unflatten(1, (3, 4))
    assert (flood == flood[:, :, :1]).all()
    boost = batch.address[:, 6:12].unflatten(1, (3, 2))[:, :, 0]
    gram = boost @ flood[:, :, 0].mT  # of B_i with A_j
    rho = gram.diagonal(dim1=1, dim2=2)
    assert rho.min() >= 0.85 and rho.max() <= 0.95 and rho.std() > 0.01
    torch.testing.assert_close(gram - torch.diag_embed(rho), torch.zeros_like(gram))
    # the rival is the label that the flood of the asked target's partner writes
    asked = batch.address[:, -3:]
    partner = (asked @ flood[:, :, 0].mT).argmax(-1)
    written = batch.tokens[:, 12:24, -6:].argmax(-1).unflatten(1, (3, 4))[:, :, 0]
    assert torch.equal(written.gather(1, partner), batch.rival)


def test_batches_depend_on_their_seed_alone() -> None:
    there = [drawn(TASK, 4, 6, 0, step) for step in range(5)]
    back = [drawn(TASK, 4, 6, 0, step) for step in reversed(range(5))][::-1]
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(there, back, strict=True))
    assert not torch.equal(drawn(TASK, 4, 6, 1, 0).tokens, there[0].tokens)
    assert [b.write.shape[1] for b in there] == [6 + 6 + 3 * f + 3 for f in (1, 2, 4, 8, 1)]
    first, second = (random_batch(RANDOM, 4, 8, 8, [split, 0, 0]) for split in (TRAIN, TEST))
    assert not torch.equal(first.tokens, second.tokens)


def hosted(use: str, **settings: object) -> FixedAddress:
    spec = MixerSpec(use=use, settings=settings)
    config = mixer_config(spec, 12, 2, conv=1, head_dim=6, use_gate=False)
    mixer, _ = build(spec, config)
    torch.manual_seed(0)
    for p in mixer.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return FixedAddress(mixer)


def recurrence(host: FixedAddress, x: Tensor, address: Tensor, write: Tensor) -> Tensor:
    """The rule of the host token by token, one sequence and head at a time."""
    m = host.mixer
    v = m.v_proj(x).unflatten(-1, (2, 6))
    out = torch.zeros_like(v)
    for b in range(len(x)):
        for h in range(2):
            M, P = torch.zeros(6, 6), 3.0 * torch.eye(6)
            for t in range(x.shape[1]):
                k, value = address[b, t], v[b, t, h]
                if write[b, t]:
                    if m.kind == "linear-style":
                        M = M + torch.outer(k, value)
                    if m.kind == "gla-style":
                        gate = (m.gate(x[b, t]) + m.gate_bias).sigmoid().unflatten(-1, (2, 6))[h]
                        M = gate[:, None] * M + torch.outer(k, value)
                    if m.kind == "delta-style":
                        beta = (m.b_proj(x[b, t]) + m.b_bias).sigmoid()[h]
                        M = M + beta * torch.outer(k, value - M.T @ k)
                    if m.kind == "reset-style":
                        M = M + 0.5 * torch.outer(k, value - M.T @ k)
                    if m.kind == "bayesian-style":
                        noise = torch.nn.functional.softplus(m.process_proj(x[b, t]) + m.process_bias)[h]
                        P = P + noise * torch.eye(6)
                        u = P @ k
                        gain = u / (0.05 + k @ u)
                        M, P = M + torch.outer(gain, value - M.T @ k), P - torch.outer(gain, u)
                out[b, t, h] = M.T @ k
    return m.o_proj(out.flatten(2))


@pytest.mark.parametrize("name", ["LinearStyle", "GLAStyle", "DeltaStyle", "ResetStyle", "BayesianStyle"])
def test_rules_are_their_recurrences(name: str) -> None:
    host, batch = hosted(f"{STYLES}:{name}"), batches()[0]
    x = torch.randn(2, batch.write.shape[1], 12)
    got = host(x, batch.address[:2], batch.write[:2])
    expected = recurrence(host, x, batch.address[:2], batch.write[:2])
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("use", ["bayesian", "gated_deltanet", "kalman_delta_net", "mamba2_ssd", "retnet"])
def test_any_mixer_is_hosted_and_queries_write_nothing(use: str) -> None:
    host, batch = hosted(use), batches()[0]
    x = torch.randn(2, batch.write.shape[1], 12)
    whole = host(x, batch.address[:2], batch.write[:2])
    without = [*range(batch.write.shape[1] - 3), batch.write.shape[1] - 1]  # the last query alone
    alone = host(x[:, without], batch.address[:2, without], batch.write[:2, without])
    torch.testing.assert_close(whole[:, -1], alone[:, -1], rtol=1e-4, atol=1e-5)


SMALL = (
    "collision={pairs: 2, boost: 1, floods: [1], test_floods: [2], test_overlaps: [[0.6, 0.8]], "
    "curve: [0.9], test: 16}",
    "random={raw: 8, labels: 4, queries: 2, writes: [3], test_writes: [3, 6], test: 16}",
    "train={steps: 60, batch: 16, lr: 0.01}",
    "width=16",
    "heads=2",
    "key_width=4",
    "mlp=16",
    "seeds=[0, 1]",
)


def test_a_model_learns_and_the_summary_has_everything(tmp_path) -> None:
    recipe = load("recall", "small", [*SMALL, f"mixers=['{STYLES}:BayesianStyle']"])
    probe = probe_of("recall")
    cells = probe.cells(recipe)
    assert [c.name for c in cells] == [
        f"{task}-BayesianStyle-{seed}" for task in ("collision", "random") for seed in (0, 1)
    ]
    results = [run(c.settings, "cpu", no_tick) for c in cells]
    assert run(cells[0].settings, "cpu", no_tick) == results[0]  # the same seed, the same run
    assert results[0] != results[1]
    losses = results[0]["training"]["losses"]
    assert losses[-1] < 0.7 * losses[0]
    summary = probe.summary(recipe, cells, results)
    row = summary["collision"]["mixers"][0]["tests"][0]
    assert row["accuracy"]["values"] == [r["tests"][0]["accuracy"] for r in results[:2]]
    text = probe.markdown(summary)
    assert "chance 0.2500" in text and "n = 6 (1.5 D)" in text
    names = {f.name for f in probe.figures(summary, tmp_path)}
    assert names == {"flood.png", "overlap.png", "random.png"}


def test_a_run_that_diverges_is_told(tmp_path) -> None:
    recipe = load("recall", "small", [*SMALL, "train.lr=1e30", "random=null", "seeds=[0]", "mixers=[gla]"])
    probe = probe_of("recall")
    cells = probe.cells(recipe)
    results = [run(c.settings, "cpu", no_tick) for c in cells]
    training = results[0]["training"]
    assert training["diverged"] and training["loss"] is None and results[0]["tests"] == []
    summary = probe.summary(recipe, cells, results)
    assert "diverged" in probe.markdown(summary)
    probe.figures(summary, tmp_path)


@pytest.mark.parametrize(
    ("mixer", "message"),
    [
        ("attention", "takes no addresses"),
        ("gla2", "gla2"),
        ("os:path", "no torch.nn.Module class"),
        ("no_such_package:Layer", "cannot be imported"),
        ("{use: bayesian, settings: {groups: 2}}", "groups"),
        ("{use: bayesian, start: {evidenc: 1}}", "no parameter 'evidenc'"),
    ],
)
def test_a_wrong_mixer_is_named_before_anything_runs(mixer: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        probe_of("recall").cells(load("recall", "small", [f"mixers=[{mixer}]"]))


def test_starting_values_and_frozen_parameters() -> None:
    spec = "{use: bayesian, start: {evidence: 1}, frozen: [evidence]}"
    recipe = load("recall", "small", [f"mixers=[{spec}]", "random=null"])
    model = model_of(probe_of("recall").cells(recipe)[0].settings)
    evidence = model.blocks[0].mixer.mixer.evidence
    assert (evidence == 1).all() and not evidence.requires_grad


def test_mistakes_leave_nothing_behind(regraft, tmp_path) -> None:
    code, _, error = regraft("probe", "recall")
    assert code == 2 and "--out" in error
    code, _, error = regraft("probe", "recall", "--out", tmp_path / "out", "--set", "mixers=[attention]")
    assert code == 2 and "takes no addresses" in error and not (tmp_path / "out").exists()


def test_a_legend_has_the_fewest_rows_and_they_are_of_about_one_length() -> None:
    assert [balanced(n, 4) for n in (0, 1, 4, 5, 7, 8, 9)] == [1, 1, 4, 3, 4, 4, 3]
