"""Every bad argument is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from filter_problems import (
    TOKENS,
    make_problem,
    run,
)

from regraft.ops import kalman_delta_rule

torch.set_num_threads(1)


@pytest.mark.parametrize(
    "name, change",
    [
        ("q, k", {"k": torch.zeros(2, 9, 2, 5)}),
        ("q, k", {"q": torch.zeros(2, 9, 2)}),
        ("v", {"v": torch.zeros(2, 8, 2, 6)}),
        ("g", {"g": torch.zeros(2, 9, 3)}),
        ("process_var", {"process_var": torch.zeros(2, 9)}),
        ("obs_var", {"obs_var": torch.ones(2, 9, 3)}),
        ("obs_var", {"obs_var": torch.ones(2, 9, 2, 4)}),
        ("evidence", {"evidence": torch.ones(3)}),
        ("prior_var", {"prior_var": torch.ones(2, 2)}),
        ("initial_state", {"initial_state": (torch.zeros(2, 2, 4, 5), None)}),
        ("initial_state", {"initial_state": (torch.zeros(2, 2, 4, 6), torch.zeros(2, 2, 1, 4, 4))}),
        ("covariance", {"covariance": "full"}),
        ("backend", {"backend": "fast"}),
        ("chunk_size", {"chunk_size": 0}),
    ],
)
def test_a_bad_argument_is_named(name: str, change: dict[str, Any]) -> None:
    problem = make_problem(9)
    arguments = {key: problem[key] for key in TOKENS if key in problem}
    with pytest.raises(ValueError, match=f"^{name}: "):
        kalman_delta_rule(**{**arguments, **change})


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "name, value",
    [
        ("q", NAN),
        ("k", NAN),
        ("v", INF),
        ("g", NAN),
        ("g", 0.01),
        ("obs_var", 0.0),
        ("obs_var", -1.0),
        ("obs_var", INF),
        ("process_var", -1e-9),
        ("process_var", NAN),
        ("rotation", NAN),
        ("evidence", -0.1),
        ("evidence", NAN),
        ("prior_var", 0.0),
        ("mean", NAN),
        ("cov", INF),
        ("k", 1.0),
    ],
)
def test_a_value_out_of_range_is_named(name: str, value: float) -> None:
    problem = make_problem(9, rotation=True)
    problem[name].view(-1)[-1] = value
    argument = "initial_state" if name in ("mean", "cov") else name
    with pytest.raises(ValueError, match=f"^{argument}: "):
        run(problem)


@pytest.mark.parametrize("family, name, value", [("none", "obs_var", -1.0), ("diagonal", "evidence", -1.0)])
def test_ranges_of_the_other_families(family: str, name: str, value: float) -> None:
    problem = make_problem(9, family)
    problem[name].view(-1)[-1] = value
    with pytest.raises(ValueError, match=f"^{name}: "):
        run(problem, covariance=family)


def test_the_additive_family_takes_keys_of_any_norm() -> None:
    problem = make_problem(9, "none")
    problem["k"] *= 7
    run(problem, covariance="none")


@pytest.mark.parametrize(
    "name, family, change",
    [
        ("rotation", "diagonal", {"rotation": torch.zeros(1, 9, 2, 2)}),
        ("rotation", "dense", {"rotation": torch.zeros(1, 9, 2, 4)}),
        ("rotation", "dense", {"rotation": torch.zeros(1, 9, 2, 2), "g": torch.zeros(1, 9, 2, 4)}),
        ("initial_state", "reset", {"initial_state": (None, torch.ones(1, 2, 2, 4))}),
        ("initial_state", "isotropic", {"initial_state": (None, torch.ones(1, 2, 2, 4))}),
        ("cu_seqlens", "dense", {"cu_seqlens": torch.tensor([0, 5])}),
        ("cu_seqlens", "dense", {"cu_seqlens": torch.tensor([0, 5, 5, 9])}),
        ("cu_seqlens", "dense", {"cu_seqlens": torch.tensor([1, 9])}),
        ("obs_var_floor", "dense", {"obs_var_floor": -1.0}),
    ],
)
def test_arguments_that_do_not_go_together(name: str, family: str, change: dict[str, Any]) -> None:
    problem = make_problem(9, B=1)
    arguments = {key: problem[key] for key in TOKENS if key in problem}
    with pytest.raises(ValueError, match=f"^{name}: "):
        kalman_delta_rule(**{**arguments, "covariance": family, "backend": "chunk", **change})


def test_documents_are_packed_into_one_row() -> None:
    with pytest.raises(ValueError, match=r"^cu_seqlens: .* 2 rows"):
        run(make_problem(9), cu_seqlens=torch.tensor([0, 9]))
