"""From results to rows: seeds of a comparison pooled, differences paired by document."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from regraft.report.inspection import Trace
from regraft.report.perplexity_statistics import perplexity_differences, perplexity_table
from regraft.report.statistics import MEAN, Row, differences, table
from scripts.replicate.plan import CONTROL, STUDENT, TEACHER
from scripts.replicate.results import Results

MAIN = "main"  # the comparison that has sections of its own
PAIRS = ((STUDENT, CONTROL), (STUDENT, TEACHER), (CONTROL, TEACHER))
RESAMPLES = 10_000
POOL = "pool"  # name of the mean of seeds


@dataclass(frozen=True)
class Ablation:
    """A variant without a control of its own, and what it is compared with: the mean of that one's seeds."""

    name: str
    question: str
    student: str
    against: str
    gains: list[Row]  # of `differences`
    ratios: list[Row]  # of `perplexity_differences`
    spread: dict[int, tuple[float, float]]  # by length, the worst and the best of those seeds, as differences

    def beyond(self, length: int) -> bool:
        """Whether its interval holds no 0 and it lies outside the range of those seeds."""
        row, (low, high) = overall(self.gains, task=MEAN)[length], self.spread[length]
        return not row["low"] <= 0 <= row["high"] and not low <= row["difference"] <= high


class Analysis:
    """Tables of one comparison; `student` and `control` are means over its seeds that are finished.

    Args:
        results: of a whole replication.
        base: the variant compared with its control; its other seeds have its name and a number behind it.
    """

    def __init__(self, results: Results, base: str = MAIN) -> None:
        self.results, self.base = results, base
        names = list(results.models)
        controls = _controls(results)
        seeds = _comparisons(controls).get(base, [])
        # both or none: a seed without its control would be a mean over other data
        self.seeds = [s for s in seeds if {f"{s}/{STUDENT}", controls[s]} <= set(names)]
        self.controls = {seed: controls[seed] for seed in self.seeds}
        pools = {STUDENT: [f"{seed}/{STUDENT}" for seed in self.seeds], CONTROL: [*self.controls.values()]}
        pools = {TEACHER: [TEACHER], **pools} if TEACHER in names else pools
        self.models = [role for role, members in pools.items() if members]
        self.records = [r for role in self.models for r in _pooled(results.records, pools[role], role)]
        self.perplexity = [
            r for role in self.models for r in _pooled_nll(results.perplexity, pools[role], role)
        ]

    @property
    def complete(self) -> bool:
        """Whether teacher, student and control are all there."""
        return self.models == [TEACHER, STUDENT, CONTROL]

    @cached_property
    def scores(self) -> list[Row]:
        """Shares of teacher, student and control."""
        return table(self.records)

    @cached_property
    def gains(self) -> list[Row]:
        """Differences of every pair over whole documents."""
        return [row for pair in PAIRS for row in _gains(self.records, *pair)] if self.complete else []

    @cached_property
    def depth_gains(self) -> list[Row]:
        """Student minus control and student minus teacher by tenth of depth."""
        if not self.complete:
            return []
        rows = (differences(self.records, STUDENT, b, resamples=RESAMPLES) for b in (CONTROL, TEACHER))
        return [row for found in rows for row in found if row["depth"] is not None]

    @cached_property
    def perplexities(self) -> list[Row]:
        """Perplexities of teacher, student and control."""
        return perplexity_table(self.perplexity)

    @cached_property
    def ratios(self) -> list[Row]:
        """Perplexity of student and control over the teacher's."""
        if not self.complete:
            return []
        pairs = [(STUDENT, TEACHER), (CONTROL, TEACHER)]
        return [
            row
            for a, b in pairs
            for row in perplexity_differences(self.perplexity, a, b, resamples=RESAMPLES)
        ]

    @cached_property
    def seed_gains(self) -> dict[str, list[Row]]:
        """Student minus control of every seed by itself, over whole documents."""
        return {
            seed: _gains(self.results.records, f"{seed}/{STUDENT}", control)
            for seed, control in self.controls.items()
        }

    @cached_property
    def others(self) -> list[Analysis]:
        """The other comparisons that are finished, each with its own seeds."""
        bases = (base for base in _comparisons(_controls(self.results)) if base != self.base)
        return [own for own in (Analysis(self.results, base) for base in bases) if own.complete]

    @cached_property
    def ablations(self) -> list[Ablation]:
        """All variants without a control of their own that are finished, each against what the plan says."""
        done, found = self.results.models, []
        pools: dict[str, tuple[list[str], list[Row], list[Row]]] = {}
        for variant in self.results.plan["variants"]:
            student, against = f"{variant['name']}/{STUDENT}", variant["against"]
            if variant["control"] is True or student not in done or against not in done:
                continue
            if against not in pools:  # most variants share one
                pools[against] = self._pool(against)
            members, pooled, pooled_texts = pools[against]
            records = [*self.results.records, *pooled]
            texts = [*self.results.perplexity, *pooled_texts]
            found.append(
                Ablation(
                    variant["name"], variant["question"], student, against, _gains(records, student, POOL),
                    perplexity_differences(texts, student, POOL, resamples=RESAMPLES),
                    _spread(records, members),
                )
            )  # fmt: skip
        return found

    def _pool(self, model: str) -> tuple[list[str], list[Row], list[Row]]:
        """All seeds of a model that are finished, itself among them, and their means as records and texts."""
        base, _, role = model.partition("/")
        seeds = _comparisons(_controls(self.results)).get(base, [base])
        members = [name for seed in seeds if (name := f"{seed}/{role}") in self.results.models]
        records = _pooled(self.results.records, members, POOL)
        return members, records, _pooled_nll(self.results.perplexity, members, POOL)

    @cached_property
    def traces(self) -> dict[str, dict[str, Trace]]:
        """What was seen inside the filters of students, by model and layer."""
        return {
            name: {layer: _trace(fields) for layer, fields in model["inside"]["traces"].items()}
            for name, model in self.results.models.items()
            if "traces" in model.get("inside", {})
        }

    @cached_property
    def shares(self) -> dict[str, list[Row]]:
        """What every model found, rows of `table`; seeds of a comparison pooled, a shared control once."""
        own: dict[str, tuple[str, list[Row]]] = {}
        shown: list[set[str]] = []
        for comparison in (self, *self.others):
            controls = {*comparison.controls.values()}
            for role in comparison.models:
                if role == CONTROL and any(controls <= others for others in shown):
                    continue
                label = role if role == TEACHER else f"{comparison.base} {role}"
                own[label] = role, comparison.records
            shown.append(controls)
        pooled = {seed for comparison in (self, *self.others) for seed in comparison.seeds}
        own |= {a.name: (a.student, self.results.records) for a in self.ablations if a.name not in pooled}
        return {
            label: table(r for r in records if r["model"] == model) for label, (model, records) in own.items()
        }

    @cached_property
    def profiles(self) -> dict[str, dict[int, Row]]:
        """What every model found of the longest documents by tenth of depth."""
        return {
            label: {
                row["depth"]: row
                for row in rows
                if row["task"] == MEAN and row["depth"] is not None and row["length"] == self.lengths[-1]
            }
            for label, rows in self.shares.items()
        }

    @property
    def layers(self) -> str:
        """The converted layers."""
        first = self.results.models[f"{self.seeds[0]}/{STUDENT}"]
        return ", ".join(map(str, first.get("layers", ())))

    @property
    def lengths(self) -> list[int]:
        return sorted({record["length"] for record in self.results.records})

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(record["task"] for record in self.results.records))


def _trace(fields: dict[str, Any]) -> Trace:
    arrays: dict[str, Any] = {
        name: value if isinstance(value, int) else np.array(value, dtype=np.float64)
        for name, value in fields.items()
    }
    return Trace(**arrays)


def _controls(results: Results) -> dict[str, str]:
    """Controls of the variants that have one, their own or another's, in the order of the plan."""
    return {
        v["name"]: f"{v['name'] if v['control'] is True else v['control']}/{CONTROL}"
        for v in results.plan["variants"]
        if v["control"]
    }


def _comparisons(controls: dict[str, str]) -> dict[str, list[str]]:
    """Seeds of variants with a control by the name of their comparison."""
    found: dict[str, list[str]] = {}
    for name in controls:
        head, _, number = name.rpartition("-")
        found.setdefault(head if number.isdecimal() and head in controls else name, []).append(name)
    return found


def _gains(records: Sequence[Row], student: str, against: str) -> list[Row]:
    own = [{**r, "needles": []} for r in records if r["model"] in (student, against)]  # no depth
    return differences(own, student, against, resamples=RESAMPLES)


def _spread(records: Sequence[Row], members: Sequence[str]) -> dict[int, tuple[float, float]]:
    """By length how far the scores of single seeds lie from their mean, over all tasks."""
    scores: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        if record["model"] in members:
            scores[record["length"]][record["model"]].append(record["score"])
    means = {n: [float(np.mean(own)) for own in by_model.values()] for n, by_model in scores.items()}
    return {n: (min(own) - float(np.mean(own)), max(own) - float(np.mean(own))) for n, own in means.items()}


def _pooled(records: Iterable[Row], members: Sequence[str], name: str) -> list[Row]:
    """Records of a model that found what its members found on average."""
    by_document: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for record in records:
        if record["model"] in members:
            by_document[record["task"], record["length"], record["seed"], record["index"]].append(record)
    pooled = []
    for group in by_document.values():
        needles = [dict(needle) for needle in group[0]["needles"]]
        for i, needle in enumerate(needles):
            if needle["asked"]:
                needle["hit"] = sum(record["needles"][i]["hit"] for record in group) / len(group)
        score = sum(record["score"] for record in group) / len(group)
        pooled.append({**group[0], "model": name, "needles": needles, "score": score})
    return pooled


def _pooled_nll(records: Iterable[Row], members: Sequence[str], name: str) -> list[Row]:
    """Records of a model whose log-likelihoods are the means of its members'."""
    by_text: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for record in records:
        if record["model"] in members:
            by_text[record["set"], record["length"], record["document"], record["stretch"]].append(record)
    pooled = []
    for group in by_text.values():
        buckets = [
            [*parts[0][:3], sum(part[3] for part in parts) / len(parts)]
            for parts in zip(*(record["buckets"] for record in group), strict=True)
        ]
        nll = sum(record["nll"] for record in group) / len(group)
        pooled.append({**group[0], "model": name, "buckets": buckets, "nll": nll})
    return pooled


def overall(rows: Iterable[Row], **wanted: Any) -> dict[int, Row]:
    """Rows over the whole document (or block) by length, those with the wanted fields."""
    return {
        row["length"]: row
        for row in rows
        if row.get("depth") is None
        and row.get("start") is None
        and all(row[key] == value for key, value in wanted.items())
    }


__all__ = ["CONTROL", "MAIN", "MEAN", "PAIRS", "STUDENT", "TEACHER", "Ablation", "Analysis", "overall"]
