"""One phase in a run of its own: the finished run before it, its student and its place in the data.

Where the phase reads other data than the run before it, its control goes on from that run's control: rows of
the phases before cannot be read again from the recipe.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regraft.errors import UserError
from regraft.files import hash_directory
from regraft.recipes import load_recipe
from regraft.recipes.problems import nearest
from regraft.recipes.schema import Recipe

MANIFEST, EXPORT, CONTROL = "manifest.json", "export", "control"
SPENT = ("tokens", "flops", "flops_of_teacher", "device_seconds")


@dataclass(frozen=True)
class Parent:
    """A finished run that another goes on from."""

    run: str
    sha256: str  # of its export
    phases: list[str]  # done so far, those of its own parents first
    layers: list[int]
    data: dict[str, Any] | None  # position in the data; None at the beginning of other ones
    other_data: bool  # whether it or a run before it changed to other data
    data_sha256: str
    spent: dict[str, float]  # as `spending` counts it

    def record(self) -> dict[str, Any]:
        """What the child's manifest says about it."""
        return {
            "run": self.run,
            "export_sha256": self.sha256,
            "phases": self.phases,
            "data": self.data,
            "other_data": self.other_data,
            "data_sha256": self.data_sha256,
            "spent": self.spent,
        }


def spending(manifest: dict[str, Any]) -> dict[str, float]:
    """Tokens, FLOPs (the teacher's apart) and device-seconds of a finished run and of its parents."""
    finished = manifest["finished"]
    own = {**finished, "device_seconds": finished["seconds"] * finished["processes"]}
    before = (manifest.get("parent") or {}).get("spent", {})
    return {name: own[name] + before.get(name, 0) for name in SPENT}


def chosen_phases(
    recipe: Recipe, phase: str | None, start: Path | None, other_data: bool = False
) -> list[str]:
    """Names of the phases that a run does.

    Raises:
        UserError: no such phase, or one that needs the run before it, or a parent without a phase, or other
            data than those of no parent.
    """
    if other_data and start is None:
        raise UserError(
            "--other-data", "goes with --from.", "leave it out: a first run reads its recipe's data."
        )
    names = [p.name for p in recipe.phases]
    if phase is None:
        if start is not None:
            raise UserError("--from", "goes with --phase.", f"name one of {', '.join(names[1:])}.")
        return names
    if phase not in names:
        raise UserError("--phase", f"{phase!r} is no phase of the recipe.", nearest(phase, names))
    if (start is None) != (phase == names[0]):
        before = names[names.index(phase) - 1]
        reason = "is the first phase." if start is not None else f"follows on {before!r}."
        fix = "leave --from out." if start is not None else f"pass --from RUN, the run that did {before!r}."
        raise UserError(f"--phase {phase}", reason, fix)
    return [phase]


def check_parent(
    run: Path, recipe: Recipe, phase: str, teacher_sha256: str, other_data: bool = False
) -> Parent:
    """The run that did the phase before `phase`, its export as its manifest says it is.

    Args:
        run: its directory.
        recipe: the phase's.
        phase: its name.
        teacher_sha256: hash of the recipe's teacher.
        other_data: whether the recipe's `data` may be another; they are read from their beginning then.

    Raises:
        UserError: it is not finished, did other phases or had another teacher or other data, or its export
            was changed since.
    """
    manifest = read_manifest(run)
    finished = manifest.get("finished")
    if finished is None:
        raise UserError(run, "is not finished.", f"finish it: regraft distill ... --out {run} --resume")
    done = [*(manifest.get("parent") or {}).get("phases", ()), *manifest.get("phases", ())]
    names = [p.name for p in recipe.phases]
    wanted = names[: names.index(phase)]
    if done != wanted:
        reason = f"did the phases {', '.join(done) or 'none'}; {phase!r} follows on {', '.join(wanted)}."
        raise UserError(run, reason, "name the run that did the phase before.")
    if manifest["teacher_sha256"] != teacher_sha256:
        raise UserError(run, "had another teacher.", "use the recipe that it began with.")
    theirs = load_recipe(run / "recipe.yaml")
    for part in ("convert", "data"):
        if getattr(theirs, part) != getattr(recipe, part) and not (part == "data" and other_data):
            fix = "use the recipe that it began with"
            fix += (
                ", or pass --other-data to read this one's from their beginning." if part == "data" else "."
            )
            raise UserError(run, f"had another `{part}` section.", fix)
    check_hash(run / EXPORT, finished["export_sha256"], "the manifest of its run")
    return Parent(
        run=str(run.resolve()),
        sha256=finished["export_sha256"],
        phases=done,
        layers=manifest["layers"],
        data=finished["data"] if theirs.data == recipe.data else None,
        other_data=theirs.data != recipe.data or bool((manifest.get("parent") or {}).get("other_data")),
        data_sha256=finished["data_sha256"],
        spent=spending(manifest),
    )


def control_before(parent: dict[str, Any]) -> Parent:
    """The control that the control of a run goes on from: its parent's, in place of the rows before.

    Args:
        parent: what the run's manifest says of its parent.

    Raises:
        UserError: that control is not there or not finished, took other tokens, or was changed since.
    """
    folder = Path(parent["run"]) / CONTROL
    manifest = read_manifest(folder) if (folder / MANIFEST).is_file() else {}
    finished = manifest.get("finished")
    if finished is None or manifest["match"] != "tokens":
        reason = "is no finished control of equal tokens, and where data change a control goes on from it."
        raise UserError(folder, reason, f"bring it to its end: regraft control {parent['run']}")
    check_hash(folder / EXPORT, finished["export_sha256"], "the manifest of its run")
    return Parent(
        run=str(folder),
        sha256=finished["export_sha256"],
        phases=parent["phases"],
        layers=manifest["layers"],
        data=finished["data"] if parent["data"] is not None else None,
        other_data=True,
        data_sha256=finished["data_sha256"],
        spent=spending(manifest),
    )


def check_start(folder: Path, manifest: dict[str, Any], phase: str | None) -> None:
    """The student that a run began with is still the one in its manifest, and so are its phases.

    Raises:
        UserError: it was changed, or the run does other phases.
    """
    if phase is not None and manifest["phases"] != [phase]:
        reason = f"the run does {', '.join(manifest['phases'])}."
        raise UserError(
            f"--phase {phase}", reason, "leave it out to resume this run, or choose another --out."
        )
    check_hash(folder, manifest["start_sha256"], "the manifest of the run")


def check_hash(folder: Path, expected: str, where: str) -> None:
    """The model in a folder is the one that was written there.

    Raises:
        UserError: its hash is another.
    """
    found = hash_directory(folder)
    if found != expected:
        reason = f"has the hash {found[:12]}, not {expected[:12]} as {where} says."
        raise UserError(folder, reason, "restore the folder, or run what made it again.")


def read_manifest(run: Path) -> dict[str, Any]:
    """The manifest of a run directory.

    Raises:
        UserError: it has none.
    """
    file = run / MANIFEST
    if not file.is_file():
        raise UserError(run, f"is no run directory: it has no {MANIFEST}.", "run `regraft distill` first.")
    return json.loads(file.read_text(encoding="utf-8"))
