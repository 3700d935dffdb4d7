"""The command line: exit codes, one clear message, no traceback unless asked for."""

from __future__ import annotations

import errno
import json
import os
import runpy
import sys

import pytest

import regraft.distill as engine
from regraft.errors import VerificationError


@pytest.fixture
def distilling(monkeypatch):
    """Replace the work of `distill` by raising an error."""

    def fail(error: BaseException) -> None:
        def distill(*_: object, **__: object) -> None:
            raise error

        monkeypatch.setattr(engine, "distill", distill, raising=False)

    return fail


def test_help_and_version(regraft) -> None:
    code, out, _ = regraft("--help")
    assert code == 0
    assert all(verb in out for verb in ("convert", "distill", "control", "report", "recipes"))
    assert regraft("--version")[1].startswith("regraft ")
    for verb in ("convert", "distill", "control", "report", "recipes show"):
        code, out, _ = regraft(*verb.split(), "--help")
        assert (code, "Example: regraft " + verb in out) == (0, True)


def test_recipes_are_listed_shown_and_validated(regraft) -> None:
    assert "demo" in regraft("recipes", "ls")[1]
    assert "# The whole path" in regraft("recipes", "show", "demo")[1]
    assert "seed: 7" in regraft("recipes", "show", "demo", "--set", "seed=7")[1]
    assert "betas" in regraft("recipes", "show", "demo", "--resolved")[1]
    code, out, _ = regraft("recipes", "validate", "demo", "--keys-only")
    assert (code, "valid" in out) == (0, True)
    assert json.loads(regraft("recipes", "schema")[1])["title"] == "Recipe"


def test_a_copy_keeps_comments_and_what_is_there(regraft, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert regraft("recipes", "copy", "demo")[0] == 0
    assert (tmp_path / "demo.yaml").read_text().startswith("# The whole path")
    (tmp_path / "demo.yaml").write_text("mine")
    assert regraft("recipes", "copy", "demo")[0] == 2
    assert (tmp_path / "demo.yaml").read_text() == "mine"
    assert regraft("recipes", "copy", "demo", "demo.yaml", "--overwrite")[0] == 0
    assert regraft("recipes", "validate", "demo.yaml", "--keys-only")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["recipes", "validate", "demo", "--set", "seeed=3"], "seeed: unknown key; did you mean `seed`?"),
        (["recipes", "validate", "dmo"], "did you mean `demo`?"),
        (["recipes", "show", "none.yaml"], "no such recipe or file"),
        (["report"], "name a run, or models by --model"),
        (["distill", "demo", "--out", "x", "--set", "phases.9.lr=1"], "the list has no item '9'"),
        (["convert", "embedded", "--layers", "1"], "--out: is missing"),
        (["convert", "embedded"], "--layers"),
        (["recipes", "validate"], "RECIPE"),
    ],
)
def test_mistakes_exit_with_2_and_one_message(regraft, arguments, message) -> None:
    code, out, err = regraft(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


def test_a_failed_verification_exits_with_3(regraft, distilling) -> None:
    distilling(VerificationError("logits differ by 0.1 [tolerance 1e-4]"))
    code, _, err = regraft("distill", "demo", "--out", "x")
    assert (code, "logits differ by 0.1 [tolerance 1e-4]" in err) == (3, True)


@pytest.mark.parametrize(
    ("number", "fix"),
    [
        (errno.EACCES, "that you may write to"),
        (errno.EROFS, "that you may write to"),
        (errno.ENOSPC, "make room"),
    ],
)
def test_a_place_that_cannot_be_written_is_a_mistake_to_mend(regraft, distilling, number, fix) -> None:
    distilling(OSError(number, os.strerror(number), "/there/.run.tmp-1234"))
    code, _, err = regraft("distill", "demo", "--out", "x")
    assert (code, f"error /there: {os.strerror(number)}." in err, fix in err) == (2, True, True)


def test_tracebacks_only_with_debug(regraft, distilling) -> None:
    distilling(RuntimeError("boom [1]"))
    code, _, err = regraft("distill", "demo", "--out", "x")
    assert (code, "RuntimeError: boom [1]" in err, "Traceback" in err) == (1, True, False)
    code, _, err = regraft("--debug", "distill", "demo", "--out", "x")
    assert (code, "Traceback" in err) == (1, True)


def test_an_interrupt_says_how_to_go_on(regraft, distilling) -> None:
    distilling(KeyboardInterrupt())
    code, _, err = regraft("distill", "demo", "--out", "my run", "--overwrite")
    assert code == 130
    assert "regraft distill demo --out 'my run' --resume" in err


def test_the_module_runs_as_a_program(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["regraft", "recipes", "validate", "demo", "--set", "version=2"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("regraft", run_name="__main__")
    assert stop.value.code == 2
    assert "version: should be 1, not 2" in capsys.readouterr().err
