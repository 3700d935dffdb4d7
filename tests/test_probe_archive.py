"""The kept runs of `docs/probes.md` still belong to the shipped recipes: its tables come without a GPU."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

ARCHIVE = Path(__file__).parents[1] / "docs" / "probes" / "results.tar.xz"
LACKING = {"recall full": 0, "mqar widths": 0, "mqar medium": 0, "mqar blocks": 10, "belief full": 95}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kept")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.mark.parametrize("recipe", LACKING)
def test_every_kept_run_is_one_of_the_recipe_s(regraft, kept: Path, recipe: str) -> None:
    out = kept / recipe.replace(" ", "-")
    cells = {file.name for file in (out / "cells").iterdir()}
    code, _, error = regraft("probe", *recipe.split(), "--out", out, "--minutes", "0")
    assert code == 0, error
    found = json.loads((out / "result.json").read_text())
    assert found.get("missing", 0) == LACKING[recipe]
    assert {file.name for file in (out / "cells").iterdir()} == cells
    if recipe == "recall full":
        check_recall(found)


def check_recall(found: dict) -> None:
    """What the page says first: floods of 64 at overlap 0.95."""
    at = {
        m["mixer"]: next(t for t in m["tests"] if (t["flood"], t["overlap"]) == (64, [0.95, 0.95]))[
            "accuracy"
        ]
        for m in found["collision"]["mixers"]
    }
    assert at["Bayesian Layer"]["values"] == pytest.approx([1, 1, 1], abs=5e-4)
    assert at["covariance reset"]["mean"] == pytest.approx(0.077, abs=5e-4)
