"""MQAR: sequences against a dictionary, the mended generator, learning, and the summary."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from regraft.errors import UserError
from regraft.probes.load import load
from regraft.probes.mqar import accuracy, model_of, run
from regraft.probes.mqar_data import TEST, TRAIN, VALIDATION, Asked, draw
from regraft.probes.runner import no_tick, probe_of
from regraft.probes.schema import MqarTask

torch.set_num_threads(1)
SIZE, V = (64, 8), 96
TASKS = {
    "base": {},
    "update": {"updated": 0.5},
    "interleaved": {"updated": 1.0, "interleaved": True},
    "block": {"block": 4},
    "uneven block": {"block": 3},
}


def task(name: str) -> MqarTask:
    return MqarTask(name=name, train=[SIZE], test=[SIZE], **TASKS[name])


def drawn(name: str, batch: int = 64, seed: tuple[int, ...] = (TEST, 0), filler: str = "random") -> Asked:
    return draw(task(name), SIZE, V, filler, batch, seed)


def read(ids: list[int], t: MqarTask) -> tuple[dict[int, list[int]], int]:
    """What a reader of the context writes down: the values of each key in order; and the context's length."""
    events, written, at = 8 + round(t.updated * 8), {}, 0
    while events:
        b = min(t.block, events)
        for key, value in zip(ids[at : at + b], ids[at + b : at + 2 * b], strict=True):
            written.setdefault(key, []).append(value)
        at, events = at + 2 * b, events - b
    return written, at


@pytest.mark.parametrize("name", TASKS)
def test_labels_are_the_values_last_written(name: str) -> None:
    x, t = drawn(name), task(name)
    for row in range(len(x.ids)):
        ids = x.ids[row].tolist()
        written, context = read(ids, t)
        assert len(written) == 8 and sorted(ids[p] for p in x.at[row]) == sorted(written)
        for p, answer, updated in zip(x.at[row].tolist(), x.answer[row], x.updated[row], strict=True):
            assert p >= context and (p - context) % 2 == 0
            assert written[ids[p]][-1] == answer and len(written[ids[p]]) == 1 + int(updated)
    assert int(x.updated.sum()) == 64 * round(t.updated * 8)


@pytest.mark.parametrize("name", TASKS)
def test_filler_is_never_a_key_or_a_value(name: str) -> None:
    x, t = drawn(name), task(name)
    for row in range(len(x.ids)):
        ids = x.ids[row].tolist()
        written, context = read(ids, t)
        used = set(written) | {v for values in written.values() for v in values}
        assert len(used) == 16 + round(t.updated * 8)  # keys and all values distinct
        rest = [i for p, i in enumerate(ids) if p >= context and p not in x.at[row].tolist()]
        assert not used & set(rest) and min(rest) >= 1 and max(ids) < V
    zero = drawn(name, filler="zero")
    filled = torch.ones_like(zero.ids, dtype=torch.bool).scatter(1, zero.at, False)
    filled[:, : read(zero.ids[0].tolist(), t)[1]] = False
    assert (zero.ids[filled] == 0).all() and (zero.ids[~filled] > 0).all()


class Oracle(torch.nn.Module):
    """A perfect memory: answers with what a reader of the context wrote down last."""

    def __init__(self, t: MqarTask) -> None:
        super().__init__()
        self.task = t

    def forward(self, ids: Tensor, at: Tensor) -> Tensor:
        logits = torch.zeros(*at.shape, V)
        for row, (tokens, places) in enumerate(zip(ids.tolist(), at.tolist(), strict=True)):
            written, _ = read(tokens, self.task)
            for i, p in enumerate(places):
                logits[row, i, self.answer(written, tokens[p])] = 1
        return logits

    def answer(self, written: dict[int, list[int]], key: int) -> int:
        return written[key][-1]


class First(Oracle):
    """A memory that never overwrites."""

    def answer(self, written: dict[int, list[int]], key: int) -> int:
        return written[key][0]


class Guess(Oracle):
    """Knows the values and not which belongs to which key."""

    def answer(self, written: dict[int, list[int]], key: int) -> int:
        values = [v[-1] for v in written.values()]
        return values[key % len(values)]


@pytest.mark.parametrize("name", TASKS)
def test_a_perfect_memory_scores_one(name: str) -> None:
    found = accuracy(Oracle(task(name)), iter([drawn(name)]))
    assert found["accuracy"] == 1.0
    assert found["updated"] == (1.0 if task(name).updated else None)
    assert found["untouched"] == (None if task(name).updated == 1 else 1.0)


def test_updated_and_untouched_keys_are_told_apart() -> None:
    found = accuracy(First(task("update")), iter([drawn("update")]))
    assert found == {"accuracy": 0.5, "updated": 0.0, "untouched": 1.0}


@pytest.mark.parametrize("name", ["base", "interleaved"])
def test_chance_among_the_last_values_is_one_in_n(name: str) -> None:
    found = accuracy(Guess(task(name)), iter([drawn(name, 1024)]))
    assert found["accuracy"] == pytest.approx(1 / 8, abs=0.015)


def test_slots_do_not_follow_the_keys_and_come_early() -> None:
    t = MqarTask(name="sparse", train=[[256, 8]], test=[[256, 8]])
    x = draw(t, (256, 8), V, "random", 2000, (TEST, 0))
    order = torch.arange(8).expand_as(x.at).float()
    correlation = torch.corrcoef(torch.stack([order.flatten(), x.at.float().flatten()]))[0, 1]
    assert abs(float(correlation)) < 0.03
    share = (x.at == 16).any(1).float().mean()  # the first of 120 slots
    assert share > 0.5 and float((x.at > 136).float().mean()) < 0.35
    assert (x.at.sort(1).values.diff(dim=1) >= 2).all()


def test_interleaved_updates_mix_with_first_writes() -> None:
    x, t = drawn("interleaved", 256), task("interleaved")
    seconds = []  # how many second writes stand in the first half of the context
    for row in x.ids.tolist():
        keys = row[0:32:2]
        seconds.append(len(keys[:8]) - len(set(keys[:8])))
    assert 1 < sum(seconds) / len(seconds) < 3 and t.interleaved
    block = drawn("update", 16)
    assert all(len(set(row[0:16:2])) == 8 for row in block.ids.tolist())  # all first writes come first


def test_batches_depend_on_their_seed_alone() -> None:
    there = [drawn("base", 4, (TRAIN, 0, i)).ids for i in range(4)]
    back = [drawn("base", 4, (TRAIN, 0, i)).ids for i in reversed(range(4))][::-1]
    torch.manual_seed(7)
    assert all(torch.equal(a, b) for a, b in zip(there, back, strict=True))
    others = [
        there[0],
        there[1],
        drawn("base", 4, (TRAIN, 1, 0)).ids,
        drawn("base", 4, (VALIDATION, 0, 0)).ids,
    ]
    assert len({tuple(o.flatten().tolist()) for o in others}) == 4
    longer = draw(task("base"), (72, 8), V, "random", 4, (TRAIN, 0, 0))
    assert not torch.equal(longer.ids[:, :16], there[0][:, :16])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("tasks.0.test=[[16, 5]]", "need 20 tokens"),
        ("vocabulary=9", "4 pairs needs 10 ids"),
        ("tasks.1.updated=2.0", "tasks.1.updated"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load("mqar", "small", [override])


SMALL = (
    "tasks=[{name: base, train: [[16, 2]], test: [[16, 2]]}, "
    "{name: update, train: [[16, 2]], test: [[16, 2], [24, 3]], updated: 0.5}]",
    "vocabulary=16",
    "widths=[16, 32]",
    "rates=[1e-2, 2e-2]",
    "train={steps: 40, batch: 16}",
    "seeds=[0]",
    "sequences=32",
    "validation=32",
)


def test_sweep_and_summary(tmp_path) -> None:
    recipe = load("mqar", "small", [*SMALL, "mixers=[attention, delta_net]"])
    probe = probe_of("mqar")
    cells = probe.cells(recipe)
    assert len(cells) == 2 * 2 * 2 * 2 and len({c.file for c in cells}) == len(cells)
    done = run(cells[0].settings, "cpu", no_tick)
    assert done == run(cells[0].settings, "cpu", no_tick)
    assert done["training"]["losses"][-1] < done["training"]["losses"][0]

    def made_up(settings: dict) -> dict:
        better = settings["train"]["lr"] == 2e-2
        tests = [{"size": s, "accuracy": 0.9 if better else 0.1, "updated": None, "untouched": 0.9}
                 for s in settings["task"]["test"]]  # fmt: skip
        return {**done, "validation": 0.8 if better else 0.2, "tests": tests}

    summary = probe.summary(recipe, cells, [made_up(c.settings) for c in cells])
    widths = summary["tasks"][1]["mixers"][1]["widths"]
    assert [(w["width"], w["rate"]) for w in widths] == [(16, 2e-2), (32, 2e-2)]
    assert widths[0]["tests"][1]["accuracy"]["mean"] == 0.9
    assert [(r["rate"], r["validation"]["mean"]) for r in widths[0]["tried"]] == [(1e-2, 0.2), (2e-2, 0.8)]
    assert "T = 24, n = 3, untouched" in probe.markdown(summary)
    assert {f.name for f in probe.figures(summary, tmp_path)} == {"width.png", "pairs.png", "updates.png"}


def test_a_rate_is_chosen_among_those_with_the_most_seeds_and_guesses_are_counted() -> None:
    """A better mean of fewer seeds does not decide, and what never learned is said."""
    recipe = load("mqar", "small", [*SMALL, "mixers=[gla]", "seeds=[0, 1]", "widths=[16]"])
    probe = probe_of("mqar")
    done = {"training": {"steps": 2}, "parameters": 1, "tests": []}
    validation = {(1e-2, 0): 0.9, (1e-2, 1): 0.01, (2e-2, 0): 0.99}
    pairs = [
        (cell, {**done, "validation": validation[key]})
        for cell in probe.cells(recipe)
        if (key := (cell.settings["train"]["lr"], cell.settings["seed"])) in validation
    ]
    summary = probe.summary(recipe, *zip(*pairs, strict=True))
    found = summary["tasks"][0]["mixers"][0]["widths"][0]
    assert found["rate"] == 1e-2
    assert [r["guesses"] for r in found["tried"]] == [1, 0]
    assert "| 0.01: 0.46 (1 of 2 at chance), 0.02: 0.99 |" in probe.markdown(summary)


def test_training_stops_where_it_is_told() -> None:
    recipe = load("mqar", "small", [*SMALL, "mixers=[attention]", "stop_at=0.0"])
    assert run(probe_of("mqar").cells(recipe)[0].settings, "cpu", no_tick)["training"]["steps"] == 2


class Mean(torch.nn.Module):
    """A foreign mixer that takes only a width."""

    def __init__(self, d_model: int, scale: float = 1.0) -> None:
        super().__init__()
        self.out = torch.nn.Linear(d_model, d_model)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.out(x.cumsum(1))


def test_a_class_by_its_import_path() -> None:
    mixer = f"{{use: '{__name__}:Mean', settings: {{scale: 0.5}}, name: mine}}"
    recipe = load("mqar", "small", [*SMALL, f"mixers=[{mixer}]"])
    cell = probe_of("mqar").cells(recipe)[0]
    assert cell.name.startswith("base-mine-16")
    mixer = model_of(cell.settings).blocks[1].mixer
    assert type(mixer).__name__ == "Mean" and mixer.scale == 0.5
    bound = 16**-0.5  # its own initialisation, not the backbone's
    assert 0.5 * bound < float(mixer.out.weight.detach().abs().max()) <= bound
    assert run(cell.settings, "cpu", no_tick)["tests"]
