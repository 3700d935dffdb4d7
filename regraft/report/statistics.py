"""Means with Wilson intervals, paired differences with bootstrap intervals, by task, length and depth.

Every table is a list of flat rows. `task` is a task or `MEAN`, the mean over tasks (each task weighs the
same); `depth` is None for document scores, else a depth group, counted from the top of the document.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regraft.errors import UserError

Row = dict[str, Any]
Key = tuple[str, int, int | None]  # task, length, depth group
Draw = tuple[int, int]  # seed and index: a document within its task and length
MEAN = "mean"
DECILES = 10
_Z95 = 1.959963984540054
_COMPARABLE = ("prompt_sha256", "tokenizer", "bos", "generator", "new_tokens")


def wilson(mean: float, n: float) -> tuple[float, float]:
    """Wilson's 95 % interval of a share `mean` of `n` trials; (0, 1) for none.

    For document scores that are shares themselves (four needles asked) it is on the safe side: no variable
    between 0 and 1 varies more than a coin of the same mean.
    """
    if n <= 0:
        return 0.0, 1.0
    centre = (mean + _Z95**2 / (2 * n)) / (1 + _Z95**2 / n)
    half = _Z95 / (1 + _Z95**2 / n) * math.sqrt(mean * (1 - mean) / n + _Z95**2 / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def table(records: Iterable[Row], *, groups: int = DECILES) -> list[Row]:
    """Rows model, task, length, depth, n, mean, low, high of every cell, every task and the mean over tasks.

    Args:
        records: from `regraft.report.niah.evaluate`.
        groups: depth groups, a divisor of 10; needles count where they really lie.

    `n` counts documents where depth is None and asked needles elsewhere. The interval of a mean over tasks
    uses the number of trials that an equally weighted mean of shares is worth.
    """
    rows = []
    by_model = records_by_model(records)
    for model, own in by_model.items():
        sums = {key: (_total(cell, 0), _total(cell, 1)) for key, cell in _cells(own, groups).items()}
        for key, (hits, n) in sums.items():
            rows.append(_row(model, key, n, hits / n, n))
        for (length, depth), tasks in _over_tasks(sums).items():
            cells = [sums[task, length, depth] for task in tasks]
            effective = len(cells) ** 2 / sum(1 / n for _, n in cells)
            mean = sum(hits / n for hits, n in cells) / len(cells)
            rows.append(_row(model, (MEAN, length, depth), sum(n for _, n in cells), mean, effective))
    return rows


def _row(model: str, key: Key, n: float, mean: float, effective: float) -> Row:
    low, high = wilson(mean, effective)
    task, length, depth = key
    return {
        "model": model, "task": task, "length": length, "depth": depth,
        "n": int(n), "mean": mean, "low": low, "high": high,
    }  # fmt: skip


def differences(
    records: Iterable[Row],
    student: str,
    baseline: str,
    *,
    groups: int = DECILES,
    resamples: int = 10_000,
    seed: int = 0,
) -> list[Row]:
    """Rows student, baseline, task, length, depth, n, difference, low, high: student minus baseline, paired.

    The 95 % interval is the percentile bootstrap over documents, within each task for the mean over tasks.

    Raises:
        UserError: a model is missing, or the two did not read the same documents under the same conditions.
    """
    by_model = records_by_model(records)
    check_pairs(by_model, student, baseline)
    cells = _cells(by_model[student], groups)
    others = _cells(by_model[baseline], groups)
    estimates: dict[Key, float] = {}
    clouds: dict[Key, NDArray[np.float64]] = {}
    counts: dict[Key, float] = {}
    for key, own in cells.items():
        draws = sorted(own)
        gain = np.array([own[draw][0] - others[key][draw][0] for draw in draws], dtype=np.float64)
        count = np.array([own[draw][1] for draw in draws], dtype=np.float64)
        estimates[key], counts[key] = float(gain.sum() / count.sum()), float(count.sum())
        clouds[key] = bootstrap(gain, count, resamples=resamples, seed=cell_seed(seed, key))
    for (length, depth), tasks in _over_tasks(cells).items():
        keys: list[Key] = [(task, length, depth) for task in tasks]
        mean_key = (MEAN, length, depth)
        estimates[mean_key] = sum(estimates[key] for key in keys) / len(keys)
        counts[mean_key] = sum(counts[key] for key in keys)
        clouds[mean_key] = np.mean([clouds[key] for key in keys], axis=0)
    return [
        {
            "student": student, "baseline": baseline, "task": key[0], "length": key[1], "depth": key[2],
            "n": int(counts[key]), "difference": estimate, "low": low, "high": high,
        }
        for key, estimate in estimates.items()
        for low, high in [interval(clouds[key])]
    ]  # fmt: skip


def bootstrap(
    sums: NDArray[np.float64], counts: NDArray[np.float64], *, resamples: int, seed: int
) -> NDArray[np.float64]:
    """Ratios `[resamples]` of total `sums` to total `counts` over documents drawn with replacement."""
    rng = np.random.default_rng(seed)
    ratios = []
    for start in range(0, resamples, 1000):  # in portions: all draws at once would take n x resamples numbers
        drawn = rng.integers(len(sums), size=(min(1000, resamples - start), len(sums)))
        ratios.append(sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1))
    return np.concatenate(ratios)


def interval(cloud: NDArray[np.float64]) -> tuple[float, float]:
    """The middle 95 % of a bootstrap."""
    low, high = np.quantile(cloud, [0.025, 0.975])
    return float(low), float(high)


def cell_seed(seed: int, key: tuple[Any, ...]) -> int:
    """A seed per cell, so that a cell's interval does not depend on which others are reported."""
    return int.from_bytes(hashlib.sha256(f"{seed}|{key}".encode()).digest()[:8], "big")


def check_pairs(
    by_model: dict[str, list[Row]],
    student: str,
    baseline: str,
    document: Callable[[Row], tuple[Any, ...]] | None = None,
    fields: Sequence[str] = _COMPARABLE,
) -> None:
    """Refuse to compare two models that did not read the same documents under the same conditions.

    Args:
        by_model: records by model.
        student, baseline: the two.
        document: what names a record's document, the needle documents' by default.
        fields: what must be equal of each document.
    """
    name_of = document or _document
    for name in (student, baseline):
        if name not in by_model:
            raise UserError("models", f"no records of {name!r}", f"use some of {', '.join(by_model)}")

    def read(name: str) -> dict[tuple[Any, ...], tuple[Any, ...]]:
        return {name_of(r): tuple(r[field] for field in fields) for r in by_model[name]}

    one, two = read(student), read(baseline)
    if one.keys() != two.keys():
        n = len(one.keys() ^ two.keys())
        reason = f"{n} documents were read by only one of {student} and {baseline}"
        raise UserError("records", reason, "evaluate both on the same tasks, lengths and samples")
    for key, conditions in one.items():
        for field, a, b in zip(fields, conditions, two[key], strict=True):
            if a != b:
                reason = f"{student} and {baseline} differ in {field} at document {key}: {a} and {b}"
                raise UserError("records", reason, "evaluate both with one seed, tokenizer and version")


def _document(record: Row) -> tuple[Any, ...]:
    return record["task"], record["length"], record["seed"], record["index"]


def records_by_model(records: Iterable[Row]) -> dict[str, list[Row]]:
    """Records per model, by rising length; the same document twice for one model is refused."""
    by_model: dict[str, dict[tuple[Any, ...], Row]] = defaultdict(dict)
    for record in records:
        if by_model[record["model"]].setdefault(_document(record), record) is not record:
            reason = f"{record['model']} read document {_document(record)} twice"
            raise UserError("records", reason, "give each run its own name")
    return {
        model: sorted(own.values(), key=lambda r: (r["length"], r["index"]))
        for model, own in by_model.items()
    }


def _cells(records: Sequence[Row], groups: int) -> dict[Key, dict[Draw, list[float]]]:
    """[hits, trials] per document of every cell: a document is one trial without depth, each needle with."""
    if groups < 1 or DECILES % groups:
        raise UserError("groups", f"{groups} depth groups do not divide ten", "use 1, 2, 5 or 10")
    cells: dict[Key, dict[Draw, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0.0, 0.0]))
    for record in records:
        task, length, draw = record["task"], record["length"], (record["seed"], record["index"])
        cells[task, length, None][draw] = [record["score"], 1.0]
        for needle in record["needles"]:
            if needle["asked"]:
                trial = cells[task, length, needle["decile"] * groups // DECILES][draw]
                trial[0] += needle["hit"]
                trial[1] += 1
    return cells


def _total(cell: dict[Draw, list[float]], column: int) -> float:
    return math.fsum(trial[column] for trial in cell.values())


def _over_tasks(cells: Iterable[Key]) -> dict[tuple[int, int | None], list[str]]:
    """Tasks that have something at each (length, depth)."""
    tasks: dict[tuple[int, int | None], list[str]] = defaultdict(list)
    for task, length, depth in cells:
        tasks[length, depth].append(task)
    return tasks
