"""The runner of the probes: what is kept, what is run again, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from regraft.errors import UserError
from regraft.probes import bandits
from regraft.probes.backbone import decayed
from regraft.probes.load import VERBS, load, shipped
from regraft.probes.pool import Gathered
from regraft.probes.runner import Cell, _Clock, probe_of, run_probe

torch.set_num_threads(1)
SMALL = """\
probe: bandits
gains: [0.1, 0.2]
tasks:
  - {kind: beta-bernoulli, arms: 2, length: 12, delay: 2, episodes: 8}
  - {kind: logistic, arms: 2, length: 12, delay: 2, episodes: 8}
  - {kind: logistic, arms: 3, length: 12, delay: 2, episodes: 8}
"""


@pytest.fixture
def recipe(tmp_path: Path):
    file = tmp_path / "mine.yaml"
    file.write_text(SMALL)
    return lambda *overrides: load("belief", file, overrides)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tasks that were run, in order; an entry `stop` before the run interrupts at the second."""
    done: list[str] = []
    real = bandits.run

    def run(settings, device, tick):
        if done[:1] == ["stop"] and len(done) == 2:
            raise KeyboardInterrupt
        done.append(f"{settings['task']['kind']}-{settings['task']['arms']}")
        return real(settings, device, tick)

    monkeypatch.setattr(bandits, "run", run)
    return done


def test_an_interrupted_sweep_goes_on(recipe, ran: list[str], tmp_path: Path) -> None:
    whole = run_probe(recipe(), tmp_path / "whole", shown=False)
    ran[:] = ["stop"]
    with pytest.raises(KeyboardInterrupt):
        run_probe(recipe(), tmp_path / "out", shown=False)
    assert ran == ["stop", "beta-bernoulli-2"]
    assert len(list((tmp_path / "out" / "cells").iterdir())) == 1
    assert not (tmp_path / "out" / "result.json").exists()
    ran.clear()
    assert run_probe(recipe(), tmp_path / "out", shown=False) == whole
    assert ran == ["logistic-2", "logistic-3"]
    ran.clear()
    assert run_probe(recipe(), tmp_path / "out", shown=False) == whole
    assert ran == []
    same = [f.read_bytes() for f in (tmp_path / "whole" / "result.json", tmp_path / "out" / "result.json")]
    assert same[0] == same[1] and json.loads(same[0]) == whole


def test_another_recipe_is_refused_and_shares_its_cells(recipe, ran: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    run_probe(recipe(), out, shown=False)
    before = (out / "result.json").read_bytes()
    ran.clear()
    other = recipe("tasks.2.arms=4")
    with pytest.raises(UserError, match="another recipe"):
        run_probe(other, out, shown=False)
    assert (out / "result.json").read_bytes() == before and ran == []
    (out / "old.png").write_text("a figure of the recipe before")
    run_probe(other, out, overwrite=True, shown=False)
    assert not (out / "old.png").exists()
    assert ran == ["logistic-4"] and (out / "result.json").read_bytes() != before


def test_a_directory_with_something_else_is_refused(recipe, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(UserError, match="not empty"):
        run_probe(recipe(), tmp_path, overwrite=True, shown=False)
    assert not (tmp_path / "cells").exists()


def test_several_processes_find_the_same(recipe, tmp_path: Path) -> None:
    here = run_probe(recipe(), None, shown=False)
    assert run_probe(recipe(), tmp_path / "out", jobs=2, shown=False) == here


def test_a_cell_is_named_by_all_its_settings() -> None:
    names = {Cell("a", {"x": x}).file for x in (1, 2, [1, 2])} | {Cell("b", {"x": 1}).file}
    assert len(names) == 4
    assert Cell("a", {"x": 1, "y": 2}).file == Cell("a", {"y": 2, "x": 1}).file


@pytest.mark.parametrize("verb", VERBS)
def test_shipped_recipes_are_valid(verb: str) -> None:
    assert shipped(verb)
    for name, file in shipped(verb).items():
        assert load(verb, name) == load(verb, file)
        assert file.read_text().startswith("# ")


@pytest.mark.parametrize(
    "override, message",
    [
        ("tasks.0.arm=3", "did you mean `arms`"),
        ("probe=recall", "is no recipe of `regraft probe belief`"),
        ("gains=[2.0]", "gains.0"),
        ("tasks.0.arms=0", "greater than or equal to 1"),
    ],
)
def test_mistakes_are_named(regraft, override: str, message: str) -> None:
    code, _, error = regraft("probe", "belief", "--set", override)
    assert code == 2 and message in error.replace("\n", " ")


def test_unknown_recipe_and_device(regraft) -> None:
    code, _, error = regraft("probe", "belief", "analitic")
    assert code == 2 and "did you mean `analytic`" in error
    code, _, error = regraft("probe", "collision", "--device", "gpu")
    assert code == 2 and "--device gpu" in error


def test_weight_decay_leaves_noise_and_norms_alone() -> None:
    recipe = load("mqar", "small", ["mixers=[bayesian, gla]"])
    for cell in (probe_of("mqar").cells(recipe)[i] for i in (0, 3)):
        model = probe_of("mqar").model_of(cell.settings)
        matrices, rest = decayed(model)
        names = {id(p): n for n, p in model.named_parameters()}
        assert len(matrices) + len(rest) == len(names)
        kept = {names[id(p)].rpartition("mixer.")[2] for p in rest}
        decays = {names[id(p)].rpartition("mixer.")[2] for p in matrices}
        assert "q_proj.weight" in decays and "o_norm.weight" in kept
        if cell.settings["mixer"]["use"] == "bayesian":
            assert {"A_log", "evidence", "obs_proj.weight", "process_proj.weight"} <= kept


@pytest.mark.parametrize("verb", VERBS)
def test_help_names_the_shipped_recipes(regraft, verb: str) -> None:
    text = " ".join(regraft("probe", verb, "--help")[1].split())
    assert all(name in text for name in shipped(verb))


def test_seeds_are_run_in_turn(recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    order = []

    def run(settings, device, tick):
        order.append((settings["mixer"], settings["seed"]))
        return {}

    cells = [Cell(f"{m}-{s}", {"mixer": m, "seed": s}) for m in "ab" for s in (0, 1)]
    monkeypatch.setattr(bandits, "cells", lambda _: cells)
    monkeypatch.setattr(bandits, "run", run)
    monkeypatch.setattr(bandits, "summary", lambda *_: {})
    run_probe(recipe(), None, shown=False)
    assert order == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]


TRAINED = """\
probe: kernel
mixers: [attention, delta_net]
length: 6
fit: 64
held_out: 16
seeds: [0, 1]
train: {steps: 2, batch: 2}
"""


def test_a_sweep_cut_short_is_summed_up_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(TRAINED)
    recipe, out = load("belief", file), tmp_path / "out"
    with pytest.raises(UserError, match="before any run was done"):
        run_probe(recipe, out, minutes=0, shown=False)
    now = iter(range(0, 6000, 25))  # every look at the clock is 25 seconds later
    monkeypatch.setattr("regraft.probes.runner.time.monotonic", lambda: next(now))
    summary = run_probe(recipe, out, minutes=2, shown=False)
    done = len(list((out / "cells").iterdir()))
    assert 0 < done < 8 and summary["missing"] == 8 - done
    text = (out / "result.md").read_text()
    assert text.startswith(f"{8 - done} runs are missing.") and "(1 of 2 seeds)" in text
    assert (out / "kernels.png").is_file()
    monkeypatch.undo()
    assert run_probe(recipe, out, minutes=0, shown=False) == summary
    whole = run_probe(recipe, out, shown=False)
    assert "missing" not in whole and whole == run_probe(recipe, None, shown=False)
    assert "missing" not in (out / "result.md").read_text()


def test_progress_is_handed_on_whole_and_rarely() -> None:
    told: list[float] = []
    often, rarely = Gathered(told.append, seconds=0.0), Gathered(told.append, seconds=60.0)
    often(0.25)
    assert told == [0.25]
    for _ in range(4):
        rarely(0.25)
    assert told == [0.25]
    rarely.hand_on()
    assert told == [0.25, 1.0]


def test_minutes_are_for_recipes_that_train(regraft) -> None:
    code, _, error = regraft("probe", "collision", "--minutes", "1")
    assert code == 2 and "--minutes" in error


def test_no_cell_begins_that_would_end_late() -> None:
    clock = _Clock(1.0)
    assert clock.more()
    clock.longest = 61.0
    assert not clock.more()
    assert _Clock(None).more() and not _Clock(0.0).more()
