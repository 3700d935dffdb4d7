"""Bandits without training: the Bayes predictors, the exactness of the filter, the reference lines."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from regraft.probes.bandits import RULES, predict, run
from regraft.probes.bandits_data import PRIOR_LOSS, Episodes, bayes, draw, losses, score
from regraft.probes.load import load
from regraft.probes.runner import no_tick
from regraft.probes.schema import BanditTask

torch.set_num_threads(1)
GAINS = [0.12, 0.14, 0.18, 0.2, 0.25]


def scores(kind: str, arms: int, length: int, delay: int, episodes: int) -> dict[str, dict[str, float]]:
    task = {"kind": kind, "arms": arms, "length": length, "delay": delay, "episodes": episodes}
    found = run({"task": task, "gains": GAINS, "seed": 1}, "cpu", no_tick)
    return {r["rule"]: r for r in found["rules"]} | {"Bayes": {"loss": found["bayes_loss"]}}


def test_beta_bernoulli_reference_lines() -> None:
    """A dense filter is the Bayes predictor; the best constant gain reaches about .92."""
    found = scores("beta-bernoulli", 5, 64, 4, 1024)
    assert found["Bayes"]["loss"] == pytest.approx(0.574, abs=0.004)
    for exact in ("filter (Bayesian Layer)", "KDN diagonal, mu = 1"):
        assert found[exact]["value"] == pytest.approx(1, abs=1e-9)
    for rule, value in (
        ("constant gain (DeltaNet)", 0.93),
        ("KDN diagonal, mu = D", 0.826),
        ("KDN isotropic, mu = 1", 0.977),
        ("KDN isotropic, mu = D", 0.735),
    ):
        assert found[rule]["value"] == pytest.approx(value, abs=0.02), rule
        assert found[rule]["low"] < found[rule]["value"] < found[rule]["high"], rule
        assert 0 < found[rule]["deviation"] < 0.01, rule


def test_beta_bernoulli_at_the_papers_size() -> None:
    found = scores("beta-bernoulli", 30, 600, 16, 48)
    assert found["filter (Bayesian Layer)"]["value"] == pytest.approx(1, abs=1e-9)
    assert found["constant gain (DeltaNet)"]["value"] == pytest.approx(0.92, abs=0.02)
    assert found["constant gain (DeltaNet)"]["gain"] == 0.14
    assert found["KDN isotropic, mu = 1"]["value"] == pytest.approx(0.976, abs=0.02)


def test_logistic_reference_lines() -> None:
    found = scores("logistic", 5, 64, 4, 1024)
    assert found["Bayes"]["loss"] == pytest.approx(0.545, abs=0.006)
    assert found["filter (Bayesian Layer)"]["value"] == pytest.approx(0.961, abs=0.015)
    assert found["constant gain, unit keys"]["value"] == pytest.approx(0.85, abs=0.02)
    assert found["constant gain (DeltaNet)"]["value"] == pytest.approx(0.905, abs=0.015)


def test_laplace_s_rule_by_hand() -> None:
    x = Episodes(
        torch.tensor([[0, 0, 1, 0]]), torch.ones(1, 4).double(), torch.tensor([[1.0, 0, 1, 1]]).double()
    )
    # delay 1: before step t the rewards of steps up to t - 1 have arrived
    assert bayes("beta-bernoulli", x, 2, 1)[0].tolist() == pytest.approx([2 / 3, 1 / 2, 2 / 4])
    assert losses(torch.full((1, 3), 0.5).double(), x, 1)[0] == pytest.approx(3 * PRIOR_LOSS)


def test_logistic_bayes_is_a_posterior_by_sampling() -> None:
    """The grid agrees with importance sampling from the prior."""
    x = draw("logistic", 2, 2, 12, 0)
    got = bayes("logistic", x, 2, 3)
    theta = np.random.default_rng(0).normal(0, 2, (400_000, 2))
    for n in range(2):
        weight = np.ones(len(theta))
        for s in range(9):  # all that has arrived before the last step
            z = (2 * x.reward[n, s].item() - 1) * x.context[n, s].item() * theta[:, x.arm[n, s]]
            weight = weight / (1 + np.exp(-z))
        now = 1 / (1 + np.exp(-x.context[n, 11].item() * theta[:, x.arm[n, 11]]))
        assert float(got[n, -1]) == pytest.approx(float((weight * now).sum() / weight.sum()), abs=0.005)


def test_nothing_of_the_future_is_used() -> None:
    """Changing a reward changes no prediction up to K steps later."""
    task = BanditTask(kind="logistic", arms=3, length=20, delay=5, episodes=4)
    x = draw(task.kind, 4, 3, 20, 0)
    reward = x.reward.clone()
    reward[:, 8] = 1 - reward[:, 8]
    other = x._replace(reward=reward)
    for name, rule in RULES.items():
        gain = 0.2 if rule.gain else None
        same = predict(rule, x, task, gain) == predict(rule, other, task, gain)
        assert same[:, : 8 + 5 - 5].all() and not same[:, 8:].all(), name
    assert torch.equal(bayes("logistic", x, 3, 5)[:, :8], bayes("logistic", other, 3, 5)[:, :8])


def test_the_score_s_ends() -> None:
    optimal = torch.tensor([3.0, 4.0, 5.0]).double()
    steps = 10
    assert score(optimal, optimal, steps).value == 1
    assert score(torch.full_like(optimal, steps * math.log(2)), optimal, steps).value == pytest.approx(0)


def test_a_delay_beyond_the_end_is_refused(tmp_path) -> None:
    from regraft.errors import UserError

    with pytest.raises(UserError, match="no reward ever arrives"):
        load("belief", "analytic", ["tasks.0.delay=64"])
