"""Belief maintenance: the estimates are posterior means, the fit finds known kernels, a layer learns."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from regraft.ops import kalman_delta_rule
from regraft.probes.kernel import ridge, run
from regraft.probes.kernel_data import FIT, HELD_OUT, TRAIN, bayes_kernel, draw, steady
from regraft.probes.kernel_figures import EACH, distance
from regraft.probes.load import load
from regraft.probes.runner import no_tick, probe_of

torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("regime", "persistence"), [("uniform", 1.0), ("exponential", 1.0), ("exponential", 0.95)]
)
def test_the_filter_of_one_channel_is_the_bayes_estimate(regime: str, persistence: float) -> None:
    seen, target = (x.double() for x in draw(regime, 8, 40, HELD_OUT, 0, 0, persistence))
    one = torch.ones(8, 40, 1, dtype=torch.float64)
    prior, process, decay = 1.0, 0.0, 0.0
    if regime == "exponential":
        gain, before, process = steady(persistence)
        # The first step decays and adds noise too, so the prior is the steady posterior, g at unit noise.
        prior, decay = gain, float(torch.tensor(persistence).double().log())
        assert before == pytest.approx(persistence**2 * prior + process)
    o, _ = kalman_delta_rule(
        one[..., None],
        one[..., None],
        seen[..., None, None],
        decay * one,
        one,
        process * one,
        prior_var=prior,
    )
    torch.testing.assert_close(o[..., 0, 0], target, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("regime", "power"), [("uniform", 0.959), ("exponential", 0.725)])
def test_estimates_have_the_stated_power_and_residual(regime: str, power: float) -> None:
    """E m² over 128 steps, and no linear use of the past that the estimate has missed."""
    seen, target = draw(regime, 20_000, 128, HELD_OUT, 0, 0)
    assert float(target.square().mean()) == pytest.approx(power, abs=0.03)
    innovation = seen[:, 1:] - target[:, :-1]
    assert abs(float((innovation * target[:, :-1]).mean())) < 0.02
    assert abs(float((innovation[:, 1:] * seen[:, 1:-1]).mean())) < 0.02
    assert steady(1.0) == pytest.approx((0.1, 1 / 9, 1 / 90))


@pytest.mark.parametrize("regime", ["uniform", "exponential"])
def test_the_fit_finds_the_kernel_of_the_estimate(regime: str) -> None:
    seen, target = (x.double() for x in draw(regime, 2000, 128, FIT, 0, 0))
    kernel, exact = ridge(seen, target[:, -1], 1e-2), bayes_kernel(regime, 128)
    assert float((kernel - exact).norm() / exact.norm()) < (1e-4 if regime == "uniform" else 1e-3)


def test_episodes_depend_on_their_arguments_alone() -> None:
    first = draw("uniform", 4, 8, TRAIN, 0, 0)[0]
    torch.randn(3)
    assert torch.equal(first, draw("uniform", 4, 8, TRAIN, 0, 0)[0])
    others = [draw("uniform", 4, 8, *which)[0] for which in ((TRAIN, 0, 1), (TRAIN, 1, 0), (FIT, 0, 0))]
    assert not any(torch.equal(first, other) for other in others)


SMALL = (
    "train={steps: 60, batch: 32, lr: 5e-3}",
    "length=16",
    "width=8",
    "heads=2",
    "mlp=8",
    "fit=512",
    "held_out=512",
    "regimes=[exponential]",
    "seeds=[0, 1]",
)


def test_a_layer_learns_and_the_summary_has_everything(tmp_path) -> None:
    recipe = load("belief", "small", [*SMALL, "mixers=[attention, gla]"])
    probe = probe_of("kernel")
    cells = probe.cells(recipe)
    assert [c.name for c in cells][:2] == ["exponential-attention-0", "exponential-attention-1"]
    results = [run(c.settings, "cpu", no_tick) for c in cells]
    for r in results:
        assert r["mse"] < 0.5 * r["power"] and len(r["kernel"]) == 16 and 0.5 < r["r2"] <= 1
    summary = probe.summary(recipe, cells, results)
    assert summary["regimes"][0]["mixers"][1]["mse"]["values"] == [r["mse"] for r in results[2:]]
    assert "exponential kernel (an estimate of 0 has regret 0." in probe.markdown(summary)
    assert [f.name for f in probe.figures(summary, tmp_path)] == ["kernels.png"]


def test_a_run_that_diverges_is_told(tmp_path) -> None:
    recipe = load("belief", "small", [*SMALL, "train.lr=1e30", "seeds=[0]", "mixers=[gla]"])
    probe = probe_of("kernel")
    cells = probe.cells(recipe)
    summary = probe.summary(recipe, cells, [run(c.settings, "cpu", no_tick) for c in cells])
    assert "diverged" in probe.markdown(summary)
    probe.figures(summary, tmp_path)


def test_distances_are_over_a_few_lags_each() -> None:
    exact, kernels = np.zeros(EACH + 2), np.zeros((2, EACH + 2))
    kernels[0, :EACH], kernels[:, EACH:] = 2.0, 3.0
    lags, far = distance(kernels, exact)
    assert lags.tolist() == [(EACH - 1) / 2, EACH + 0.5]
    np.testing.assert_allclose(far, [2**0.5, 3.0])
