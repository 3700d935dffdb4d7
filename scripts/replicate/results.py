"""Everything measured, in one file that is small enough to keep: `results.jsonl.xz`.

Lines, each with a `kind`: `plan`; `teacher`, what its training reported; `document`, one a needle document;
`model`, one a model: what it is, what it cost, what was seen inside it, and for every document in order
which needles it found and what it wrote; `perplexity`, one a model, stretch and length.
"""

from __future__ import annotations

import argparse
import json
import lzma
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from regraft.distill.parent import read_manifest
from regraft.errors import UserError
from regraft.report.statistics import Row
from scripts.replicate.job import records_file
from scripts.replicate.plan import CONTROL, STUDENT, Variant, Work, model_name

RESULTS = "results.jsonl.xz"
_DOCUMENT = ("task", "length", "index", "seed", "n_tokens", "new_tokens", "prompt_sha256")
_HEADER = ("tokenizer", "bos", "generator")
_NEEDLE = ("depth", "decile", "start_token", "asked")
_CURVE = ("step", "stage", "tokens", "loss", "evidence")
POINTS = 60  # of a training curve that are kept


@dataclass
class Results:
    """What the file holds."""

    plan: dict[str, Any] = field(default_factory=dict)
    teacher: dict[str, Any] = field(default_factory=dict)
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    records: list[Row] = field(default_factory=list)
    perplexity: list[Row] = field(default_factory=list)


def pack(work: Work, out: Path | None = None, old: Path | None = None) -> Path:
    """Write what is finished of a plan.

    Args:
        work: the plan and its folder.
        out: the file, `WORK/results.jsonl.xz` by default.
        old: results of an earlier run with the same teacher, for the models that this one has not.

    Raises:
        UserError: the other results are of another teacher or of other documents.
    """
    out = out or work.folder / RESULTS
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_suffix(".tmp")
    with lzma.open(temporary, "wt", preset=9, encoding="utf-8") as file:
        for line in sorted(_joined(list(_lines(work)), old), key=_place(work)):
            file.write(json.dumps(line, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n")
    temporary.replace(out)
    return out


def _joined(lines: list[dict[str, Any]], old: Path | None) -> Iterator[dict[str, Any]]:
    yield from lines
    if old is None:
        return
    with lzma.open(old, "rt", encoding="utf-8") as file:
        theirs = [json.loads(line) for line in file]
    for what in ("document", "teacher"):
        one, two = ([line for line in found if line["kind"] == what] for found in (lines, theirs))
        if one and two and one != two:
            reason = f"its {what}s are others than those of this run."
            raise UserError(old, reason, "join results of one teacher and one plan.")
        if not one:
            yield from two
    here = {line["name"] for line in lines if line["kind"] == "model"}
    for line in theirs:
        name = {"model": "name", "perplexity": "of"}.get(line["kind"])
        if name is not None and line[name] not in here:
            yield line


def _place(work: Work) -> Callable[[dict[str, Any]], tuple[int, int]]:
    """Where a line belongs: models in the order of the plan, whichever run they are from."""
    kinds = ("plan", "teacher", "document", "model", "perplexity")
    order = {model_name(*model): i for i, model in enumerate(work.plan.models())}

    def place(line: dict[str, Any]) -> tuple[int, int]:
        name = line.get("of") or line.get("name")
        return kinds.index(line["kind"]), order.get(str(name), len(order))

    return place


def _lines(work: Work) -> Iterator[dict[str, Any]]:
    yield {"kind": "plan", **work.plan.model_dump(mode="json")}
    teacher = work.folder / "teacher" / "teacher.json"
    if teacher.is_file():
        yield {"kind": "teacher", **json.loads(teacher.read_text())}
    known = False
    for variant, role in work.plan.models():
        name = model_name(variant, role)
        file = records_file(work.folder, name)
        if not file.is_file():
            continue
        found = json.loads(file.read_text(encoding="utf-8"))
        answers = found["answers"]
        if not known:
            known = True
            for record in answers:
                needles = [[needle[key] for key in _NEEDLE] for needle in record["needles"]]
                yield {"kind": "document", **{key: record[key] for key in _DOCUMENT}, "needles": needles}
        yield {
            "kind": "model", "name": name, "sha256": found["sha256"], "dtype": found["dtype"],
            **{key: answers[0][key] for key in _HEADER}, **_cost(work, variant, role),
            "inside": found.get("inside", {}),
            "hits": ["".join(str(int(n["hit"])) for n in r["needles"] if n["asked"]) for r in answers],
            "completions": [record["completion"] for record in answers],
        }  # fmt: skip
        for record in found["perplexity"]:
            own = {key: value for key, value in record.items() if key != "model"}
            yield {"kind": "perplexity", "of": name, **own, "set": Path(record["set"]).name}


def _cost(work: Work, variant: Variant | None, role: str) -> dict[str, Any]:
    """What a training took and how it went."""
    if variant is None:
        return {}
    source = work.source(variant)
    if variant.quiet and source:
        return {"layers": read_manifest(source)["layers"]}
    run = work.run(variant) if role == STUDENT else work.run(variant) / CONTROL
    manifest = read_manifest(run)
    finished = manifest["finished"]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = {*range(0, len(lines), max(1, len(lines) // POINTS)), len(lines) - 1}
    curve = [[lines[i].get(key) for key in _CURVE] for i in sorted(kept)]
    return {
        "layers": manifest["layers"], "versions": manifest["versions"],
        **{key: finished[key] for key in ("tokens", "flops", "seconds", "device", "data_sha256")},
        "curve": curve,
    }  # fmt: skip


def unpack(path: Path) -> Results:
    """Read the file back; records are as `regraft.report` made them, without keys and values of needles."""
    found = Results()
    documents: list[dict[str, Any]] = []
    with lzma.open(path, "rt", encoding="utf-8") as file:
        for line in map(json.loads, file):
            match line.pop("kind"):
                case "plan":
                    found.plan = line
                case "teacher":
                    found.teacher = line
                case "document":
                    line["needles"] = [dict(zip(_NEEDLE, n, strict=True)) for n in line["needles"]]
                    documents.append(line)
                case "perplexity":
                    found.perplexity.append({"model": line.pop("of"), **line})
                case "model":
                    hits, completions = line.pop("hits"), line.pop("completions")
                    found.records += _records(line, documents, hits, completions)
                    found.models[line["name"]] = line
    return found


def _records(
    model: dict[str, Any], documents: Iterable[dict[str, Any]], hits: list[str], completions: list[str]
) -> Iterator[Row]:
    header = {"model": model["name"], **{key: model[key] for key in _HEADER}}
    for document, hit, completion in zip(documents, hits, completions, strict=True):
        marks = iter(hit)
        needles = [n | ({"hit": next(marks) == "1"} if n["asked"] else {}) for n in document["needles"]]
        score = hit.count("1") / len(hit)
        yield {**document, **header, "needles": needles, "score": score, "completion": completion}


def main() -> None:
    ap = argparse.ArgumentParser(prog="python -m scripts.replicate.results", description=__doc__)
    ap.add_argument("--plan", required=True)
    ap.add_argument("--work", type=Path, required=True)
    ap.add_argument("--out", type=Path)
    ap.add_argument("--with", dest="old", type=Path, help="results of an earlier run with the same teacher")
    args = ap.parse_args()
    print(pack(Work(args.plan, args.work.resolve()), args.out, args.old))


if __name__ == "__main__":
    main()
