"""What `--help` promises: examples that work, options in named groups, completion in the shells."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from typer.main import get_command

import regraft.distill as engine
import regraft.report.run as reporting
from regraft.cli import app
from regraft.cli_options import complete_override

FIRST_WORDS = "Example: regraft "


def commands(group: Any = None, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every verb with its words."""
    for name, command in (group or get_command(app)).commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*words, name))
        else:
            yield (*words, name), command


VERBS = dict(commands())
EXAMPLES = {
    verb: shlex.split(command.epilog.removeprefix(FIRST_WORDS).partition(">")[0])
    for verb, command in VERBS.items()
}


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_every_verb_has_a_line_groups_and_an_example_that_parses(verb) -> None:
    command = VERBS[verb]
    summary = command.help.split("\n\n")[0]
    assert summary.endswith(".") and len(" ".join(summary.split())) < 110, summary
    for parameter in command.params:
        if parameter.param_type_name == "option":
            assert parameter.rich_help_panel, f"{parameter.name} stands in no group"
        assert parameter.help and parameter.help.endswith("."), parameter.name
    assert command.epilog.startswith(FIRST_WORDS)
    words = EXAMPLES[verb]
    assert tuple(words[: len(verb)]) == verb
    with command.make_context(verb[-1], words[len(verb) :]) as context:
        assert not context.args


def test_an_option_says_the_same_in_every_verb() -> None:
    said: dict[str, set[str]] = {}
    for verb, command in VERBS.items():
        for parameter in command.params:
            if verb[0] == "probe" and parameter.name == "set_":
                assert "seeds" in parameter.help  # recipes of another form
            elif parameter.name in ("set_", "overwrite", "resume", "revision", "dtype", "device", "recipe"):
                help = "RECIPE" if "a YAML file." in parameter.help else parameter.help
                said.setdefault(parameter.name, set()).add(f"{parameter.rich_help_panel} {help}")
    assert len(said) == 7
    assert not {name: texts for name, texts in said.items() if len(texts) > 1}


@pytest.mark.slow
def test_the_cheap_examples_run(regraft, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for verb in ("convert", *(f"recipes {verb}" for verb in ("ls", "show", "copy", "validate", "schema"))):
        code, out, err = regraft(*EXAMPLES[tuple(verb.split())])
        assert (code, bool(out)) == (0, True), f"{verb}: {err}"


@pytest.fixture
def completed(regraft, monkeypatch):
    """What bash is offered for the last of these words."""

    def complete(words: str) -> list[str]:
        monkeypatch.setenv("_REGRAFT_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
        code, out, err = regraft()
        assert (code, err) == (0, "")
        return out.split()

    return complete


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("regraft re", ["report", "recipes"]),
        ("regraft distill d", ["demo"]),
        ("regraft recipes show paper", ["paper-340m"]),
        ("regraft convert emb", ["embedded"]),
        ("regraft convert embedded --to kdn", ["kdn-diagonal", "kdn-isotropic"]),
        ("regraft convert embedded --target 5=kdn", ["5=kdn-diagonal", "5=kdn-isotropic"]),
        ("regraft report run --set report.ni", ["report.niah."]),
        ("regraft probe mqar sm", ["small"]),
        ("regraft control run --match f", ["flops"]),
    ],
)
def test_a_shell_completes_names(words, offered, completed) -> None:
    assert completed(words) == offered


def test_a_completion_loads_no_models(tmp_path) -> None:
    script = (
        "import sys\nfrom regraft.cli import app\n"
        "try:\n    app(prog_name='regraft')\n"
        "finally:\n    assert 'torch' not in sys.modules"
    )
    words = {"COMP_WORDS": "regraft distill d", "COMP_CWORD": "2", "_REGRAFT_COMPLETE": "complete_bash"}
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, **words}, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("demo\n", "")


def test_overrides_complete_to_tasks_and_items_of_lists() -> None:
    assert "report.niah.tasks=[niah_single_2]" in complete_override("report.niah.tasks")
    assert complete_override("phases.0.sched")[1:] == [
        f"phases.0.schedule={x}" for x in ("constant", "linear", "cosine")
    ]
    assert complete_override("pha") == ["phases."] and complete_override("phases.") == ["phases.0."]
    assert "data.source.kind=parquet" in complete_override("data.source.k")
    assert complete_override("nothing") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_are_shown_and_installed(shell, tmp_path, monkeypatch) -> None:
    """In a home of its own; Typer asks for the shell's name where it may not look at the parent process."""
    environment = {**os.environ, "HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    for option in ("--show-completion", "--install-completion"):
        script = "from regraft.cli import app\napp(prog_name='regraft')"
        done = subprocess.run(
            [sys.executable, "-c", script, option, shell],
            env={**environment, "_REGRAFT_COMPLETE": ""},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        if option == "--show-completion":
            assert "_REGRAFT_COMPLETE" in done.stdout
    written = [file for file in tmp_path.rglob("*") if file.is_file() and "regraft" in file.read_text()]
    assert written


@pytest.mark.parametrize("words", [["--resume"], ["--resume", "auto"], ["--resume=auto"], []])
def test_resume_auto_is_resume(regraft, monkeypatch, words) -> None:
    seen = []
    monkeypatch.setattr(engine, "distill", lambda *_, resume, **__: seen.append(resume))
    monkeypatch.setattr(engine, "control", lambda *_, resume, **__: seen.append(resume))
    assert regraft("distill", "demo", "--out", "x", *words)[0] == 0
    assert regraft("distill", *words, "demo", "--out", "x")[0] == 0
    assert regraft("control", "auto", *words)[0] == 0
    assert seen == [bool(words)] * 3


def test_the_demo_is_distill_control_and_report(regraft, monkeypatch) -> None:
    done = []
    monkeypatch.setattr(
        engine, "distill", lambda recipe, out, **how: done.append(("distill", recipe.seed, how))
    )
    monkeypatch.setattr(engine, "control", lambda run, **how: done.append(("control", how)))
    monkeypatch.setattr(reporting, "report_run", lambda run, **how: done.append(("report", how)))
    assert regraft("demo", "--out", "x", "--set", "seed=5")[0] == 0
    assert done == [
        ("distill", 5, {"resume": True}),
        ("control", {"resume": True}),
        ("report", {"inspect": True, "overwrite": True}),
    ]
