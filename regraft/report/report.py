"""The report directory: records, statistics, tables and figures; the same records give the same bytes."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from regraft.errors import UserError
from regraft.files import atomic_directory, write_json, write_text
from regraft.report import tables
from regraft.report.curves import depth_profiles, perplexity_curves
from regraft.report.figures import heatmaps
from regraft.report.perplexity_statistics import perplexity_differences, perplexity_table
from regraft.report.render import html, markdown, model_card
from regraft.report.statistics import Row, check_pairs, differences, records_by_model, table
from regraft.report.tables import Findings

TERMINAL_GROUPS = 5  # depth groups that fit a terminal of 100 columns
Drawn = Sequence[tuple[str, str]]  # figures: file name without suffix, caption


def write_report(
    records: Sequence[Row],
    out_dir: str | Path,
    *,
    student: str | None = None,
    baseline: str | None = None,
    perplexity: Sequence[Row] = (),
    inspect: Callable[[Path], Drawn] | None = None,
    colours: str = "viridis",
    resamples: int = 10_000,
    overwrite: bool = False,
) -> dict[str, Path]:
    """Write the report: HTML, Markdown, JSON, CSV, records, and every figure as PNG and SVG.

    Args:
        records: from `regraft.report.niah.evaluate`, of one model or more.
        out_dir: directory to make; it appears whole or not at all.
        student: the model in question: it is compared with every other.
        baseline: the model that every other is compared with, paired by document.
        perplexity: from `regraft.report.perplexity.measure`, of the same models, or nothing.
        inspect: draws further figures into the folder it is given.
        colours: of the heatmaps, `viridis` or `red-yellow-green`.
        resamples: of the bootstrap.
        overwrite: replace an existing directory.

    Returns:
        The files by name: `html`, `markdown`, `json`, `records`, `model card`, `heatmap`, `scores`, and
        `differences`, `perplexity` if there are any.

    Raises:
        UserError: models that did not read the same documents, an unknown name, a directory in the way.
    """
    found = findings(records, student, baseline, perplexity, resamples=resamples)
    models = found.settings["models"]
    out_dir = Path(out_dir)
    with atomic_directory(out_dir, overwrite) as folder:
        shown = baseline if baseline is not None else next((row["baseline"] for row in found.gains), None)
        figures = heatmaps(found.scores, found.gains, folder, models=models, baseline=shown, colours=colours)
        figures["depth"] = depth_profiles(found.scores, folder, models)
        if len(found.settings["tasks"]) > 1:
            figures["depth by task"] = depth_profiles(found.scores, folder, models, found.settings["tasks"])
        if found.perplexity:
            figures["perplexity"] = perplexity_curves(found.perplexity, folder, models)
        if inspect is not None:
            found = Findings(**{**vars(found), "inspected": inspect(folder)})
        parts = tables.sections(found, figures)
        texts = {
            "html": ("report.html", html(parts, folder)),
            "markdown": ("report.md", markdown(parts)),
            "model card": ("model_card.md", model_card(found)),
            "records": ("records.jsonl", _lines(records)),
            "scores": ("scores.csv", _csv(found.scores)),
            "differences": ("differences.csv", _csv(found.gains)),
            "perplexity": ("perplexity.csv", _csv([*found.perplexity, *found.ratios])),
            "perplexity records": ("perplexity.jsonl", _lines(perplexity)),
        }
        for name, text in texts.values():
            if text:
                write_text(folder / name, text)
        write_json(folder / "report.json", _plain(found))
    files = {key: name for key, (name, text) in texts.items() if text}
    files |= {"json": "report.json", "heatmap": f"{figures[tables.MEAN]}.png"}
    return {key: out_dir / name for key, name in files.items()}


def findings(
    records: Sequence[Row],
    student: str | None = None,
    baseline: str | None = None,
    perplexity: Sequence[Row] = (),
    *,
    resamples: int = 10_000,
    groups: int = 10,
) -> Findings:
    """All rows of a report.

    Args:
        records, student, baseline, perplexity, resamples: as in `write_report`.
        groups: depth groups, a divisor of 10.

    Raises:
        UserError: as in `write_report`.
    """
    scores = table(records, groups=groups)
    pairs = _pairs(records, student, baseline)
    return Findings(
        settings(records, student, baseline, resamples, perplexity),
        scores,
        [row for a, b in pairs for row in differences(records, a, b, groups=groups, resamples=resamples)],
        perplexity_table(perplexity),
        [r for a, b in pairs if perplexity
         for r in perplexity_differences(perplexity, a, b, resamples=resamples)],
    )  # fmt: skip


def terminal_table(
    records: Sequence[Row],
    *,
    student: str | None = None,
    baseline: str | None = None,
    resamples: int = 10_000,
) -> Table:
    """Every model and the paired differences by length and depth, for a terminal of 100 columns."""
    found = findings(records, student, baseline, resamples=resamples, groups=TERMINAL_GROUPS)
    gains = [row for row in found.gains if student in (None, row["student"])]  # the rest is in the files
    return tables.terminal(found.scores, gains)


def _pairs(records: Sequence[Row], student: str | None, baseline: str | None) -> list[tuple[str, str]]:
    """Every model against the baseline, the student first, then the student against the rest."""
    by_model = records_by_model(records)
    if not by_model:
        raise UserError("records", "there are none", "evaluate at least one model")
    for name in (student, baseline):
        if name is not None and name not in by_model:
            raise UserError("models", f"no records of {name!r}", f"use some of {', '.join(by_model)}")
    first = next(iter(by_model))
    for model in by_model:
        check_pairs(by_model, first, model)
    order = sorted(by_model, key=lambda name: name != student)
    pairs = [(name, baseline) for name in order if baseline is not None and name != baseline]
    if student is not None and student != baseline:
        pairs += [(student, name) for name in by_model if name not in (student, baseline)]
    return pairs


def settings(
    records: Sequence[Row],
    student: str | None,
    baseline: str | None,
    resamples: int,
    perplexity: Sequence[Row] = (),
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
        **({"perplexity": {"before": perplexity[0]["before"]}} if perplexity else {}),
    }


def _plain(found: Findings) -> dict[str, Any]:
    plain = {"settings": found.settings, "scores": found.scores, "differences": found.gains}
    if found.perplexity:
        plain |= {"perplexity": found.perplexity, "perplexity_ratios": found.ratios}
    return plain


def _lines(records: Sequence[Row]) -> str:
    lines = (json.dumps(record, sort_keys=True, ensure_ascii=False, allow_nan=False) for record in records)
    return "".join(f"{line}\n" for line in lines)


def _csv(rows: Sequence[Row]) -> str:
    """Rows as CSV with a header, nothing for none; a column that a row lacks stays empty."""
    if not rows:
        return ""
    out = io.StringIO()
    columns = dict.fromkeys(column for row in rows for column in row)
    writer = csv.DictWriter(out, list(columns), lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()
