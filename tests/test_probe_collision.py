"""The collision probe: the paper's printed numbers, closed forms, and the verb."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from regraft.ops import kalman_delta_rule
from regraft.probes.collision import compare, entries, first_negative, markdown, run
from regraft.probes.collision_rules import (
    BAYES,
    KDN,
    RESET,
    RULES,
    SETTING,
    A,
    B,
    Rule,
    keys,
    margins,
    rotations,
    schedule,
    write_vectors,
)

torch.set_num_threads(1)
FLOOD = SETTING.flood_start


def test_printed_numbers() -> None:
    """All but one match at the printed digits; E.4.3 at rho 0.98 is a rounding of a rounding."""
    found = entries()
    assert {e.table for e in found} == {"E.4.2", "E.4.3", "E.4.4", "E.2"} and len(found) == 50
    assert [(e.table, e.rho, e.printed) for e in found if not e.matches] == [("E.4.3", 0.98, "0.34")]
    assert all(e.note for e in found if not e.matches)


@pytest.mark.parametrize(
    "rho, bayes, reset",
    [(0.45, 0.4620, 0.3213), (0.92, 0.4462, -0.2972), (0.98, 0.33497, -0.4207), (0.99, 0.1983, -0.4414)],
)
def test_margins_to_more_digits(rho: float, bayes: float, reset: float) -> None:
    k = keys(rho)[None]
    assert float(margins(BAYES, k)[0, -1]) == pytest.approx(bayes, abs=5e-5)
    assert float(margins(RESET, k)[0, -1]) == pytest.approx(reset, abs=5e-5)


def test_closed_forms() -> None:
    """Boost plateau tanh(1/2); the vector written turns from the unresolved direction towards A."""
    k = keys(0.92)
    for rule in (BAYES, RESET, RULES["DeltaNet"]):
        assert float(margins(rule, k[None])[0, FLOOD - 1]) == pytest.approx(math.tanh(0.5), abs=1e-5)
    kappa = write_vectors(BAYES, k)
    angles = torch.rad2deg((kappa[FLOOD : FLOOD + 6] @ k[A] / kappa[FLOOD : FLOOD + 6].norm(dim=-1)).arccos())
    assert angles.tolist() == pytest.approx([62.9, 43.0, 20.3, 8.1, 3.1, 1.2], abs=0.06)
    assert float(kappa[FLOOD] @ k[B]) == pytest.approx(0.138, abs=5e-4)  # the leak into B
    steady = (1 + math.sqrt(5)) / 2 * SETTING.process_var  # r² = l²: the golden ratio times l²
    assert float(kappa[-1] @ k[A]) == pytest.approx(steady / (SETTING.obs_var + steady), abs=1e-9)


@pytest.mark.parametrize("c", [0.05, 3.0])
def test_flood_plateau_of_a_constant_gain(c: float) -> None:
    """`b = M0ᵀk_B + rho (v_A - M0ᵀk_A)`, M0 the memory before the flood, whatever the gain."""
    k, order, rho = keys(0.92), schedule()[:FLOOD], 0.92
    one = torch.ones(1, FLOOD, 1, dtype=torch.float64)
    values = torch.eye(6, dtype=torch.float64)
    written = (k[order][None, :, None], values[order][None, :, None])
    _, state = kalman_delta_rule(
        written[0],
        *written,
        0 * one,
        SETTING.obs_var * one,
        0 * one,
        covariance="reset",
        prior_var=c,
        output_final_state=True,
    )
    assert state is not None
    before = k @ state[0][0, 0]
    plateau = before[B] + rho * (values[A] - before[A])
    margin = float(margins(Rule("reset", c), k[None])[0, -1])
    assert margin == pytest.approx(math.tanh(float(plateau[B] - plateau[A]) / 2), abs=1e-9)


def test_a_rotation_changes_nothing_but_the_diagonal_rules() -> None:
    k = keys(0.92)
    turned = k @ rotations(3).mT
    torch.testing.assert_close(turned @ turned.mT, (k @ k.T).expand(3, -1, -1), rtol=0, atol=1e-12)
    for name, rule in (RULES | KDN).items():
        same = torch.allclose(margins(rule, turned), margins(rule, k[None]).expand(3, -1), atol=1e-9)
        assert same == (rule.covariance != "diagonal"), name


def test_rotated_variant_takes_the_diagonal_rule_s_advantage() -> None:
    rows = {(r["rule"], r["rho"]): r for r in run({"rotations": 32})["rotated"]}
    diagonal = rows["KDN diagonal, mu = D", 0.92]
    assert diagonal["axes"] == pytest.approx(0.376, abs=5e-4)
    assert diagonal["mean"] < 0.2 and diagonal["deviation"] > 0.03
    assert rows["KDN diagonal, mu = 1", 0.92]["axes"] == pytest.approx(0.359, abs=5e-4)
    assert rows["KDN isotropic, mu = 1", 0.92]["axes"] == pytest.approx(-0.214, abs=5e-4)
    assert rows["KDN isotropic, mu = D", 0.92]["axes"] == pytest.approx(-0.256, abs=5e-4)
    assert rows["Bayesian Layer", 0.92]["deviation"] < 1e-9


def test_comparison_at_printed_digits() -> None:
    assert compare("t", "q", 0.9, 0.984, "~1.0").matches
    assert compare("t", "q", 0.9, -0.4449, "-0.44").matches
    assert not compare("t", "q", 0.9, -0.4451, "-0.44").matches
    assert compare("t", "q", 0.9, None, "never").matches
    assert not compare("t", "q", 0.9, 54, "never").matches
    assert not compare("t", "q", 0.9, None, "54").matches
    assert first_negative(margins(BAYES, keys(0.99)[None])[0]) is None


def test_the_verb_writes_tables_json_and_figures(regraft, tmp_path: Path) -> None:
    out, few = tmp_path / "collision", ("--set", "rotations=2")
    code, text, _ = regraft("probe", "collision", *few, "--out", out)
    assert code == 0 and "49 of 50 printed numbers match" in text
    written = {"result.json", "result.md", "margin.png", "gain.png", "recipe.yaml", "cells"}
    assert {f.name for f in out.iterdir()} == written
    assert (out / "result.md").read_text().rstrip() == text.rstrip()
    assert (out / "margin.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    before = (out / "result.json").read_bytes()
    code, _, error = regraft("probe", "collision", "--out", out)
    assert code == 2 and "another recipe" in error
    code, text, _ = regraft("probe", "collision", *few, "--out", out, "--json")
    assert code == 0 and (out / "result.json").read_bytes() == before
    printed = json.loads(text)
    assert printed == json.loads(before) and markdown(printed) == (out / "result.md").read_text()
