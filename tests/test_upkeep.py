"""What keeps the house in order: one command for all checks, rooms that import one way, lists in step."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet
from typer.main import get_command

from regraft.cli import app

ROOT = Path(__file__).parents[1]
# What a room may import, besides itself and the small files beside the rooms.
ROOMS = {
    "assets": "",
    "recipes": "",
    "ops": "",
    "layers": "ops",
    "convert": "ops layers assets recipes",
    "distill": "ops layers assets recipes convert",
    "report": "ops layers assets recipes convert distill",
    "probes": "ops layers recipes",
    "doctor": "ops layers",
}
BESIDE = {"errors", "files"}


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def recipe_of(target: str) -> list[str]:
    """Commands of a target of the Makefile."""
    block = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", read("Makefile"), re.MULTILINE)
    assert block, target
    return [line.strip().replace("$(BIN)", ".venv/bin") for line in block[1].splitlines()]


def test_one_command_checks_everything_everywhere() -> None:
    """README, .ci/run and the GitHub workflow: `make test`, and lint behind it."""
    commands = [
        line for line in read(".ci/run").splitlines() if line and not line.startswith(("#", "set", "cd"))
    ]
    assert commands == ["make test", "make lint"]
    workflow = yaml.safe_load(read(".github/workflows/ci.yml"))
    assert [step["run"] for step in workflow["jobs"]["check"]["steps"] if "run" in step] == [".ci/run"]
    assert re.search(r"^( {4})?make test\b", read("README.md"), re.MULTILINE)
    assert (ROOT / ".ci/run").stat().st_mode & 0o111


def test_the_workflow_takes_versions_that_the_package_takes() -> None:
    job = yaml.safe_load(read(".github/workflows/ci.yml"))["jobs"]["transformers"]
    asked = re.search(r'"transformers(>=[^"]+)"', read("pyproject.toml"))
    oldest, *_ = versions = job["strategy"]["matrix"]["version"]
    assert asked and all(SpecifierSet(asked[1]).contains(version) for version in versions)
    assert oldest.startswith(asked[1].removeprefix(">=")), "the oldest has to be among them"
    assert job["steps"][-1]["run"].startswith("make test-transformers TRANSFORMERS=")


def test_hooks_are_what_lint_runs() -> None:
    (repository,) = yaml.safe_load(read(".pre-commit-config.yaml"))["repos"]
    assert [hook["entry"] for hook in repository["hooks"]] == recipe_of("lint")


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_one_way(room) -> None:
    allowed = {room, *ROOMS[room].split(), *BESIDE}
    for file in (ROOT / "regraft" / room).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names = [node.module]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for name in names:
                package, _, inside = name.partition(".")
                if package == "regraft" and inside:
                    assert inside.split(".")[0] in allowed, f"{file}: {name}"


def test_every_room_is_listed() -> None:
    assert {
        folder.name for folder in (ROOT / "regraft").iterdir() if (folder / "__init__.py").exists()
    } == set(ROOMS)


def test_every_verb_is_in_the_changelog() -> None:
    text = read("CHANGELOG.md")
    assert "## [Unreleased]" in text
    assert not [verb for verb in get_command(app).commands if f"`regraft {verb}`" not in text]


def test_files_that_contributing_names_are_there() -> None:
    """Paths in code marks, those of the package without `regraft/` too."""
    for word in re.findall(r"`([\w./*-]+\.(?:py|md|yaml|sh|toml))`", read("CONTRIBUTING.md")):
        places = [*ROOT.glob(word), *ROOT.glob(f"regraft/{word}")]
        assert places or word == "recipe.yaml", word


@pytest.mark.parametrize("form", sorted(p.name for p in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")))
def test_issue_forms_are_whole(form) -> None:
    fields = yaml.safe_load(read(f".github/ISSUE_TEMPLATE/{form}"))
    if form != "config.yml":
        assert fields["name"] and fields["description"]
        assert all(item["attributes"]["label"] for item in fields["body"])
