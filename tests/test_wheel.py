"""The wheel: what it holds, and the demo, shortened, run from it in a folder without the source tree."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import regraft

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
SHORT = (
    "phases.0.tokens=8192",
    "phases.1.tokens=8192",
    "report.niah.samples=1",
    "report.niah.lengths=[512]",
    "report.perplexity.lengths=[512]",
)
TEXT = (
    "A special magic number is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the number afterwards.\n"
    "One of the special magic numbers for brave-otter is: 7301942. The rain went on all day.\n"
    "What is the special magic number for brave-otter mentioned in the provided text? "
    "The special magic number for brave-otter mentioned in the provided text is"
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
    assert "student - control" in printed and "runs/demo/export" in printed
    check_the_demo(home / "runs" / "demo")


def check_the_demo(run: Path) -> None:
    """From an exact start to a whole report, and a student that is a filter and still retrieves."""
    for name in ("report.json", "niah_mean.png", "perplexity.png", "inspect_layer_1.png", "report.html"):
        assert (run / "report" / name).stat().st_size > 1000
    assert json.loads((run / "start" / "verify.json").read_text())["passed"]
    assert (run / "control" / "export" / "model.safetensors").stat().st_size > 1000
    student = AutoModelForCausalLM.from_pretrained(run / "export")
    evidence = student.model.layers[1].attn.evidence
    assert torch.equal(evidence, torch.ones_like(evidence))
    tokenizer = AutoTokenizer.from_pretrained(run / "export")
    ids = tokenizer(TEXT, return_tensors="pt")
    answer = student.generate(**ids, max_new_tokens=6, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert "7301942" in tokenizer.decode(answer)
