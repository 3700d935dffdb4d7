"""The wheel: what it holds, and the demo run from it in a folder without the source tree."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import regraft

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
SHORT = (
    "phases.0.tokens=2048",
    "phases.1.tokens=2048",
    "report.niah.tasks=[niah_single_2]",
    "report.niah.lengths=[512]",
    "report.niah.samples=1",
    "report.perplexity=null",
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from the source tree with what is installed: no network."""
    folder = tmp_path_factory.mktemp("dist")
    options = ["--no-deps", "--no-build-isolation", "--quiet", "--disable-pip-version-check"]
    build = [sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", folder, ROOT]
    subprocess.run(build, check=True, cwd=folder)
    return next(folder.glob("*.whl"))


def test_the_wheel_holds_the_package_and_nothing_else(wheel) -> None:
    """Recipes, teacher, tokenizer, texts and task files too; no tests, scripts or docs."""
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    package = (file for file in (ROOT / "regraft").rglob("*") if file.is_file())
    expected = {file.relative_to(ROOT).as_posix() for file in package if "__pycache__" not in file.parts}
    assert names == expected
    assert {"regraft/recipes/demo.yaml", "regraft/assets/teacher/model.safetensors"} <= names


def test_the_demo_runs_from_the_wheel_outside_the_source_tree(wheel, tmp_path) -> None:
    site, home = tmp_path / "site", tmp_path / "home"
    options = ["--no-deps", "--no-index", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, "--target", site, wheel], check=True, cwd=tmp_path
    )
    home.mkdir()
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("HF_")},
        "PYTHONPATH": str(site),
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home),
        "REGRAFT_CACHE": str(home / "regraft"),
        "HF_HUB_OFFLINE": "1",
    }

    def run(*command: object) -> str:
        done = subprocess.run(
            list(map(str, command)), env=environment, cwd=home, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    here = run(sys.executable, "-c", "import regraft; print(regraft.__file__)")
    assert Path(here.strip()).is_relative_to(site)
    program = site / "bin" / "regraft"
    assert run(program, "--version") == f"regraft {regraft.__version__}\n"
    overrides = [word for override in SHORT for word in ("--set", override)]
    printed = run(program, "demo", *overrides)
    assert "student - control" in printed
    for file in ("export/model.safetensors", "control/export/model.safetensors", "report/report.html"):
        assert (home / "runs" / "demo" / file).stat().st_size > 1000
