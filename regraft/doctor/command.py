"""`regraft doctor` as a user calls it: facts, checks and findings, as tables or as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from regraft.doctor.facts import Facts, gather
from regraft.doctor.kernels import Check, checks
from regraft.doctor.known import Finding, findings

_MARKS = {True: "[green]right[/]", False: "[red]wrong[/]", None: "-"}


def doctor(*, kernels: bool = True, as_json: bool = False) -> bool:
    """Print what is here and what does not go together; returns whether all is well.

    Args:
        kernels: also compute a small problem in every way there is, which compiles kernels on a GPU.
        as_json: print JSON instead of tables.
    """
    console = Console()
    facts = gather()
    if not as_json:
        _print_facts(facts, console)
    done: list[Check] = []
    for check in checks(facts) if kernels else ():
        done.append(check)
        if not as_json:
            console.print(f"{_MARKS[check.ok]:>5}  {check.name}: {check.said}", soft_wrap=True)
    found = findings(facts)
    found += [Finding(check.name, check.said, check.fix) for check in done if check.ok is False]
    well = all(finding.note for finding in found)
    if as_json:
        print(json.dumps(_as_dict(facts, done, found, well), indent=2, sort_keys=True))
    else:
        _print_findings(found, console)
    return well


def _print_facts(facts: Facts, console: Console) -> None:
    table = Table(box=None, show_header=False)
    table.add_row("python", f"{facts.python}, {facts.system}, {facts.processors} processors")
    for name, version in facts.versions.items():
        table.add_row(name, version)
    for gpu in facts.gpus:
        unseen = "" if facts.seen else ", not seen by torch"
        table.add_row("GPU", f"{gpu.name}, {gpu.memory} GiB, compute capability {gpu.capability}{unseen}")
    if not facts.gpus:
        table.add_row("GPU", "none: everything runs on the CPU")
    table.add_row("CUDA", f"torch {facts.torch_cuda or 'without'}, driver {facts.driver or 'none'}")
    table.add_row("Hub", f"{'offline' if facts.offline else 'asked'}; cache {facts.hub_cache}")
    for folder, free in facts.free.items():
        table.add_row("disk", f"{free} GiB free: {folder}")
    for name, value in facts.settings.items():
        table.add_row(name, value)
    console.print(table)


def _print_findings(found: list[Finding], console: Console) -> None:
    for finding in found:
        mark = "[yellow]note[/]" if finding.note else "[red]problem[/]"
        console.print(f"{mark} {finding.what}: {finding.reason}\n  fix: {finding.fix}", soft_wrap=True)
    if not [finding for finding in found if not finding.note]:
        console.print("All is well.")


def _as_dict(facts: Facts, done: list[Check], found: list[Finding], well: bool) -> dict[str, object]:
    here = {key: value for key, value in asdict(facts).items() if key != "requirements"}
    return {
        "facts": here,
        "checks": [asdict(check) for check in done],
        "findings": [asdict(finding) for finding in found],
        "well": well,
    }
