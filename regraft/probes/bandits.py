"""Update rules in delayed bandits with one-hot keys: how much of the Bayes predictor each of them reaches.

Nothing is trained. The arm is the key, the reward the value; the delay is undone, as a convolution of width
K + 1 could do, so the score S is of belief maintenance alone. In the Beta-Bernoulli task the posterior mean
of an arm is a Kalman filter's for every count, with prior variance 1/12 and observation variance 1/6. In the
logistic task the filter sees pseudo-responses `4 (reward - 1/2)` of variance 4 (paper 004, Appendix B).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regraft.ops import kalman_delta_rule
from regraft.ops.inputs import Covariance
from regraft.probes.bandits_data import PRIOR_LOSS, Episodes, bayes, draw, losses, score
from regraft.probes.pool import Tick
from regraft.probes.runner import Cell
from regraft.probes.schema import Bandits, BanditTask

# (prior variance, observation variance) of the task's own filter.
NOISE = {"beta-bernoulli": (1 / 12, 1 / 6), "logistic": (4.0, 4.0)}
BATCH = 64  # episodes at once, few enough for the cache


class Rule(NamedTuple):
    """An update rule. `gain` rules keep no covariance and are swept over constant gains."""

    covariance: Covariance
    evidence: str = "1"  # mu: 1 or D, the number of arms
    gain: bool = False
    normalised: bool = False  # logistic: the value is divided by the context, not the key multiplied by it


RULES: dict[str, Rule] = {
    "filter (Bayesian Layer)": Rule("dense"),
    "KDN diagonal, mu = 1": Rule("diagonal"),
    "KDN diagonal, mu = D": Rule("diagonal", "D"),
    "KDN isotropic, mu = 1": Rule("isotropic"),
    "KDN isotropic, mu = D": Rule("isotropic", "D"),
    "constant gain (DeltaNet)": Rule("reset", gain=True),
    "constant gain, unit keys": Rule("reset", gain=True, normalised=True),
    "sum (linear attention)": Rule("none", gain=True),
}


def cells(recipe: Bandits) -> list[Cell]:
    """One a task."""
    return [
        Cell(
            f"{t.kind}-{t.arms}-{t.length}-{t.delay}",
            {"task": t.model_dump(), "gains": list(recipe.gains), "seed": recipe.seed},
            t.arms * t.length * t.episodes,
        )
        for t in recipe.tasks
    ]


def run(settings: dict[str, Any], device: str, tick: Tick) -> dict[str, Any]:
    """Losses of the Bayes predictor and of every rule in one task, and S."""
    task = BanditTask(**settings["task"])
    x = draw(task.kind, task.episodes, task.arms, task.length, settings["seed"])
    optimal = losses(bayes(task.kind, x, task.arms, task.delay), x, task.delay)
    steps, rows = task.length - task.delay, []
    runs = list(_runs(task, settings["gains"]))
    for name, rule, gain in runs:
        loss = torch.cat(
            [losses(predict(rule, part, task, gain, device), part, task.delay) for part in _batches(x)]
        )
        found = score(loss, optimal, steps)._asdict()
        rows.append({"rule": name, "gain": gain, "loss": float(loss.mean()) / steps, **found})
        tick(task.arms * task.length * task.episodes / len(runs))
    return {"bayes_loss": float(optimal.mean()) / steps, "prior_loss": PRIOR_LOSS, "rules": _best(rows)}


def _runs(task: BanditTask, gains: Sequence[float]) -> Iterator[tuple[str, Rule, float | None]]:
    for name, rule in RULES.items():
        if rule.normalised and task.kind != "logistic":
            continue  # every context is 1
        for gain in gains if rule.gain else (None,):
            yield name, rule, gain


def _best(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each rule the row with the highest score."""
    names = dict.fromkeys(row["rule"] for row in rows)
    return [max((r for r in rows if r["rule"] == n), key=lambda r: r["value"]) for n in names]


def _batches(x: Episodes) -> Iterator[Episodes]:
    for start in range(0, len(x.arm), BATCH):
        yield Episodes(*(part[start : start + BATCH] for part in x))


def predict(rule: Rule, x: Episodes, task: BanditTask, gain: float | None, device: str = "cpu") -> Tensor:
    """Reward probability `[N,T-K]` that the rule's mean gives, by the read-out of the task."""
    N, seen = len(x.arm), task.length - task.delay
    arm = F.one_hot(x.arm, task.arms).double()[:, :, None]
    context, now = x.context[:, :seen, None], x.context[:, task.delay :]
    prior, noise = NOISE[task.kind]
    if gain is not None:  # a prior of 1 with the noise that makes this gain along a unit key
        prior, noise = 1.0, (1 - gain) / gain
    value, key = x.reward[:, :seen, None, None] - 0.5, arm[:, :seen]
    if task.kind == "logistic":
        value = 4 * value
    # A key of norm |c| and a noise r² are a unit key and r²/c², with the value divided by c.
    exact = rule.normalised or rule.covariance in ("dense", "diagonal", "isotropic")
    obs_var = torch.full((N, seen, 1), noise, dtype=torch.float64)
    if exact:
        value = value / context[..., None]
        obs_var = obs_var if rule.normalised else obs_var / context.square()
    else:
        key = key * context[..., None]
    none = torch.zeros_like(obs_var)
    tensors = (arm[:, task.delay :], key, value, none, obs_var, none)
    mean, _ = kalman_delta_rule(
        *(t.to(device) for t in tensors),
        covariance=rule.covariance,
        evidence=float(task.arms) if rule.evidence == "D" else float(rule.evidence),
        prior_var=prior,
        scale=1.0,
        check=False,  # a key times its context is longer than 1
    )
    mean = mean[..., 0, 0].cpu()
    return torch.sigmoid(now * mean) if task.kind == "logistic" else 0.5 + mean


def summary(recipe: Bandits, cells: Sequence[Cell], results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The tasks in order."""
    tasks = [{"task": c.settings["task"], **r} for c, r in zip(cells, results, strict=True)]
    return {"seed": recipe.seed, "tasks": tasks}


def markdown(summary: dict[str, Any]) -> str:
    """One table a task."""
    lines = ["S is 0 for the prior predictor and 1 for the Bayes predictor; ± is a bootstrap deviation."]
    for found in summary["tasks"]:
        t = found["task"]
        lines += [
            "",
            f"{t['kind']}, {t['arms']} arms, {t['length']} steps, delay {t['delay']}, "
            f"{t['episodes']} episodes",
            "",
            "| rule | nats a step | S | 95 % | gain |",
            "|---|---|---|---|---|",
            f"| prior | {found['prior_loss']:.4f} | 0 | | |",
        ]
        for r in sorted(found["rules"], key=lambda r: r["value"]):
            gain = "" if r["gain"] is None else f"{r['gain']:g}"
            interval = f"{r['low']:.3f} to {r['high']:.3f}"
            lines.append(
                f"| {r['rule']} | {r['loss']:.4f} | {r['value']:.3f} ± {r['deviation']:.3f} "
                f"| {interval} | {gain} |"
            )
        lines.append(f"| Bayes | {found['bayes_loss']:.4f} | 1 | | |")
    return "\n".join(lines) + "\n"


def figures(summary: dict[str, Any], folder: Path) -> list[Path]:
    """`score.png`."""
    from regraft.probes.bandits_figures import draw_scores

    return [draw_scores(summary, folder / "score.png")]
