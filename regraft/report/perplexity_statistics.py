"""Perplexity tables: token-weighted, with standard errors by document, and paired ratios of two models."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regraft.report.statistics import Row, bootstrap, cell_seed, check_pairs, interval

CellKey = tuple[str, int, int | None, int | None]  # set, length, first and last position of a bucket
MIN_DOCUMENTS = 10  # fewer: a stretch of text counts as a document of its own
_SAME = ("text_sha256", "tokenizer", "before")
_Z95 = 1.959963984540054


def perplexity_table(records: Iterable[Row]) -> list[Row]:
    """Rows model, set, length, start, end, documents, tokens, perplexity, low, high, bits_per_byte.

    `start` and `end` are a range of positions in the block, None for all of it (bits per byte is given
    there only). The 95 % interval is from the standard error of the mean by document; fewer than ten
    documents are taken by stretch.
    """
    rows = []
    for model, own in _by_model(records).items():
        for key, units in _cells(own).items():
            sums, tokens = np.array([unit[0] for unit in units]), np.array([unit[1] for unit in units])
            mean, error = _mean_and_error(sums, tokens)
            n_bytes = sum(unit[2] for unit in units)
            rows.append(
                {
                    "model": model, "set": key[0], "length": key[1], "start": key[2], "end": key[3],
                    "documents": len(units), "tokens": int(tokens.sum()), "perplexity": math.exp(mean),
                    "low": math.exp(mean - _Z95 * error), "high": math.exp(mean + _Z95 * error),
                    "bits_per_byte": None if key[2] is not None else sums.sum() / n_bytes / math.log(2),
                }
            )  # fmt: skip
    return rows


def perplexity_differences(
    records: Iterable[Row], student: str, baseline: str, *, resamples: int = 10_000, seed: int = 0
) -> list[Row]:
    """Rows student, baseline, set, length, start, end, documents, ratio, low, high of two perplexities.

    The 95 % interval is the percentile bootstrap over documents.

    Raises:
        UserError: the two did not read the same tokens.
    """
    by_model = _by_model(records)
    check_pairs(by_model, student, baseline, _stretch, _SAME)
    others = _cells(by_model[baseline])
    rows = []
    for key, units in _cells(by_model[student]).items():
        gain = np.array([a[0] - b[0] for a, b in zip(units, others[key], strict=True)])
        tokens = np.array([unit[1] for unit in units], dtype=np.float64)
        low, high = interval(bootstrap(gain, tokens, resamples=resamples, seed=cell_seed(seed, key)))
        rows.append(
            {
                "student": student, "baseline": baseline,
                "set": key[0], "length": key[1], "start": key[2], "end": key[3], "documents": len(units),
                "ratio": math.exp(gain.sum() / tokens.sum()), "low": math.exp(low), "high": math.exp(high),
            }
        )  # fmt: skip
    return rows


def _by_model(records: Iterable[Row]) -> dict[str, list[Row]]:
    by_model: dict[str, list[Row]] = defaultdict(list)
    for record in records:
        by_model[record["model"]].append(record)
    return by_model


def _stretch(record: Row) -> tuple[Any, ...]:
    return record["set"], record["length"], record["document"], record["stretch"]


def _cells(records: Sequence[Row]) -> dict[CellKey, list[tuple[float, int, int]]]:
    """(nll, tokens, bytes) by document, or by stretch where documents are few, of every cell and bucket."""
    documents: dict[str, set[int]] = defaultdict(set)
    for record in records:
        documents[record["set"]].add(record["document"])
    cells: dict[CellKey, dict[Any, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0.0, 0, 0]))
    for record in records:
        many = len(documents[record["set"]]) >= MIN_DOCUMENTS
        unit = record["document"] if many else (record["document"], record["stretch"])
        parts = [(None, None, record["tokens"], record["nll"]), *map(tuple, record["buckets"])]
        for start, end, tokens, nll in parts:
            total = cells[record["set"], record["length"], start, end][unit]
            for i, value in enumerate((nll, tokens, record["bytes"])):
                total[i] += value
    return {
        key: [(nll, int(tokens), int(n_bytes)) for nll, tokens, n_bytes in units.values()]
        for key, units in cells.items()
    }


def _mean_and_error(sums: NDArray[np.float64], tokens: NDArray[np.float64]) -> tuple[float, float]:
    """Token-weighted mean and its standard error, the units taken as independent."""
    mean = float(sums.sum() / tokens.sum())
    if len(sums) < 2:
        return mean, 0.0
    residuals = sums - mean * tokens
    error = math.sqrt(float((residuals**2).sum()) * len(sums) / (len(sums) - 1)) / float(tokens.sum())
    return mean, error
