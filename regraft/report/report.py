"""The report directory: records, statistics, tables and heatmaps; the same records give the same bytes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from regraft.errors import UserError
from regraft.files import atomic_directory, write_json, write_text
from regraft.report import tables
from regraft.report.figures import heatmaps
from regraft.report.statistics import Row, check_pairs, differences, records_by_model, table

TERMINAL_GROUPS = 5  # depth groups that fit a terminal of 100 columns


def write_report(
    records: Sequence[Row],
    out_dir: str | Path,
    *,
    student: str | None = None,
    baseline: str | None = None,
    resamples: int = 10_000,
    overwrite: bool = False,
) -> dict[str, Path]:
    """Write `records.jsonl`, `report.json`, `report.md` and one heatmap PNG per task.

    Args:
        records: from `regraft.report.niah.evaluate`, of one model or more.
        out_dir: directory to make; it appears whole or not at all.
        student: the model that the others are subtracted from, paired by document; None for no comparison.
        baseline: the model of the heatmaps' difference panel; the tables hold all comparisons.
        resamples: of the bootstrap.
        overwrite: replace an existing directory.

    Returns:
        The files by name: `records`, `json`, `markdown`, and `heatmap <task>`.

    Raises:
        UserError: models that did not read the same documents, an unknown name, a directory in the way.
    """
    scores = table(records)
    gains = _gains(records, student, baseline, resamples=resamples)
    models = list(dict.fromkeys(row["model"] for row in scores))
    header = settings(records, student, baseline, resamples)
    shown = [row for row in gains if row["baseline"] == baseline]
    out_dir = Path(out_dir)
    with atomic_directory(out_dir, overwrite) as folder:
        lines = (
            json.dumps(record, sort_keys=True, ensure_ascii=False, allow_nan=False) for record in records
        )
        write_text(folder / "records.jsonl", "".join(f"{line}\n" for line in lines))
        write_json(folder / "report.json", {"settings": header, "scores": scores, "differences": gains})
        images = heatmaps(scores, shown, folder, models=models, student=student, baseline=baseline)
        names = {task: path.name for task, path in images.items()}
        write_text(folder / "report.md", tables.markdown(header, scores, gains, names))
    files = {"records": "records.jsonl", "json": "report.json", "markdown": "report.md"}
    files |= {f"heatmap {task}": name for task, name in names.items()}
    return {key: out_dir / name for key, name in files.items()}


def terminal_table(
    records: Sequence[Row],
    *,
    student: str | None = None,
    baseline: str | None = None,
    resamples: int = 10_000,
) -> Table:
    """Every model and the paired differences by length and depth, for a terminal of 100 columns."""
    scores = table(records, groups=TERMINAL_GROUPS)
    gains = _gains(records, student, baseline, resamples=resamples, groups=TERMINAL_GROUPS)
    return tables.terminal(scores, gains)


def _gains(records: Sequence[Row], student: str | None, baseline: str | None, **options: int) -> list[Row]:
    """Student minus every other model, the baseline first; without a student only checks comparability."""
    by_model = records_by_model(records)
    if not by_model:
        raise UserError("records", "there are none", "evaluate at least one model")
    if student is None:
        first = next(iter(by_model))
        for model in by_model:
            check_pairs(by_model, first, model)
        return []
    others = dict.fromkeys(([] if baseline is None else [baseline]) + list(by_model))
    others.pop(student, None)
    return [row for other in others for row in differences(records, student, other, **options)]


def settings(
    records: Sequence[Row], student: str | None, baseline: str | None, resamples: int
) -> dict[str, Any]:
    """What the numbers were made with, equal for all models of a report."""
    first = records[0]
    own = [record for record in records if record["model"] == first["model"]]
    return {
        "models": list(dict.fromkeys(record["model"] for record in records)),
        "student": student,
        "baseline": baseline,
        "tasks": list(dict.fromkeys(record["task"] for record in records)),
        "lengths": sorted({record["length"] for record in records}),
        "seeds": sorted({record["seed"] for record in records}),
        "documents": len(own),
        "new_tokens": {record["task"]: record["new_tokens"] for record in own},
        "resamples": resamples,
        **{field: first[field] for field in ("tokenizer", "bos", "generator")},
    }
