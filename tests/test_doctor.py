"""`regraft doctor`: every known-bad pair through versions put in, and what is said of what is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import regraft as package
from regraft.doctor import command, facts, kernels
from regraft.doctor.facts import Facts, Gpu
from regraft.doctor.known import KNOWN_BAD, findings
from regraft.layers import fla_kernels

HOPPER, AMPERE, TURING = Gpu("H200", 139.8, "9.0"), Gpu("A100", 79.2, "8.0"), Gpu("T4", 14.6, "7.5")
BLACKWELL = Gpu("B200", 179.1, "10.0")
WELL = Facts(
    {"regraft": "0.1.0", "torch": "2.13.0+cu130", "triton": "3.7.1", "transformers": "5.23.0"},
    gpus=(HOPPER,),
    seen=1,
    driver="580.82",
    torch_cuda="13.0",
    architectures=("sm_80", "sm_90", "sm_120", "compute_120"),
)


def having(versions: dict[str, str] | None = None, **changes: Any) -> Facts:
    """The healthy machine with other versions or hardware."""
    return replace(WELL, versions=WELL.versions | (versions or {}), **changes)


def fla(version: str = "0.6.0", **others: str) -> dict[str, str]:
    return {"flash-linear-attention": version, **others}


# A row of the table, facts that have it, and the nearest ones that do not.
PAIRS = [
    ("transformers before 5.20", having({"transformers": "5.19.2"}), having({"transformers": "5.20.0"})),
    ("flash-linear-attention before 0.6", having(fla("0.5.1")), having(fla("0.6.0"))),
    *(
        ("Triton 3.4 to 3.7.0 with flash-linear-attention on Hopper", bad, good)
        for bad, good in [
            (having(fla(triton="3.4.0")), having(fla(triton="3.3.1"))),
            (having(fla(triton="3.7.0")), having(fla(triton="3.7.1"))),
            (having(fla(triton="3.6.0")), having(fla(triton="3.6.0"), gpus=(AMPERE,))),
            (having(fla(triton="3.6.0")), having(fla(triton="3.6.0", tilelang="0.1.8"))),
            (having(fla(triton="3.6.0")), having({"triton": "3.6.0"})),
        ]
    ),
    *(
        ("Triton 3.4 to 3.5.0 with flash-linear-attention on Blackwell", bad, good)
        for bad, good in [
            (having(fla(triton="3.4.0"), gpus=(BLACKWELL,)), having(fla(triton="3.3.1"), gpus=(BLACKWELL,))),
            (having(fla(triton="3.5.0"), gpus=(BLACKWELL,)), having(fla(triton="3.5.1"), gpus=(BLACKWELL,))),
            (having(fla(triton="3.5.0"), gpus=(BLACKWELL,)), having(fla(triton="3.5.0"), gpus=(AMPERE,))),
        ]
    ),
    (
        "lm-eval before 0.4.10 with transformers 5",
        having({"lm-eval": "0.4.9"}),
        having({"lm-eval": "0.4.10"}),
    ),
    (
        "flash-linear-attention 0.6.0 with transformers from 5.24",
        having(fla(transformers="5.24.0")),
        having(fla(transformers="5.23.0")),
    ),
    (
        "a GPU, and torch built without CUDA",
        having({"torch": "2.13.0+cpu"}, seen=0, torch_cuda=None),
        having({"torch": "2.13.0+cpu"}, seen=0, torch_cuda=None, gpus=(), driver=None),
    ),
    ("torch for CUDA 13 with a driver before 580", having(driver="570.12", seen=0), having(driver="580.1")),
    (
        "torch for CUDA 12 with a driver before 525",
        having(torch_cuda="12.8", driver="515.9", seen=0),
        having(torch_cuda="12.8", driver="525.60"),
    ),
    (
        "a GPU that torch does not see",
        having(seen=0),
        having(seen=0, settings={"CUDA_VISIBLE_DEVICES": ""}),
    ),
    (
        "a GPU that torch was not compiled for",
        having(gpus=(TURING,)),
        having(gpus=(Gpu("next", 200.0, "13.0"),)),  # compiled from compute_120
    ),
    ("a GPU before compute capability 8", having(gpus=(TURING,)), having(gpus=(AMPERE,))),
]


@pytest.mark.parametrize(("row", "bad", "good"), PAIRS)
def test_known_bad_pairs(row, bad, good) -> None:
    (found,) = [finding for finding in findings(bad) if finding.what == row]
    assert found.reason.endswith(".") and found.fix
    assert row not in [finding.what for finding in findings(good)]


def test_every_row_of_the_table_has_a_pair_and_a_healthy_machine_none() -> None:
    assert {row.what for row in KNOWN_BAD} == {row for row, _, _ in PAIRS}
    assert findings(WELL) == []
    assert findings(Facts({"regraft": "0.1.0", "torch": "2.11.0", "transformers": "5.20.0"})) == []


@pytest.mark.parametrize("triton", ["3.3.1", "3.4.0", "3.6.0", "3.7.0", "3.7.1", "3.8.0"])
def test_the_table_and_the_layers_know_the_same_tritons(triton, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(fla_kernels.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(
        fla_kernels.importlib, "import_module", lambda _: type("triton", (), {"__version__": triton})
    )
    said = fla_kernels._known_problem(torch.device("cuda"))
    assert bool(said) == bool(findings(having(fla(triton=triton))))


def test_requirements_of_packages_on_each_other() -> None:
    asked = {
        "torch": ["triton==3.7.1"],
        "torchvision": ["torch==2.11.0"],
        "regraft": ["torch>=2.4", "typer>=1"],
    }
    versions = {"torchvision": "0.26.0", "triton": "3.6.0"}
    found = findings(having(versions, requirements=asked))
    triton, torchvision = found
    assert (torchvision.what, torchvision.fix) == ("torch 2.13.0+cu130", "pip install 'torch==2.11.0'")
    assert triton.what == "triton 3.6.0" and triton.note and "pip install" not in triton.fix
    # what the table names is not said twice
    old = having({"transformers": "4.57.1"}, requirements={"regraft": ["transformers>=5.20"]})
    assert [f.what for f in findings(old)] == ["transformers before 5.20"]


def test_the_machine_of_the_benchmarks_is_well_though_torch_asks_for_another_triton() -> None:
    """torch 2.11 with Triton 3.7.1 on an H200: the Triton that torch asks for is the one that fla refuses."""
    here = having(fla(torch="2.11.0", triton="3.7.1"), requirements={"torch": ["triton==3.6.0"]})
    assert [finding.note for finding in findings(here)] == [True]
    there = having(fla(torch="2.11.0", triton="3.6.0"), requirements={"torch": ["triton==3.6.0"]})
    assert [finding.note for finding in findings(there)] == [False]


def test_a_full_disk_is_a_note() -> None:
    (found,) = findings(having(free={"here (/x)": 0.4, "hub cache (/y)": 50.0}))
    assert found.note and "0.4 GiB free for here (/x)" in found.what


def test_on_this_machine(regraft) -> None:
    code, out, err = regraft("doctor", "--json")
    said = json.loads(out)
    assert torch.__version__.startswith(
        said["facts"]["versions"]["torch"]
    )  # +cu130 is not in every wheel's name
    assert said["facts"]["processors"] >= 1
    assert all(free > 0 for free in said["facts"]["free"].values())
    assert said["checks"][0]["ok"] and "recurrence" in said["checks"][0]["said"]
    if "triton" in said["facts"]["versions"]:  # on a GPU or, without one, in the interpreter (conftest.py)
        assert said["checks"][1]["ok"], said["checks"][1]
    problems = [finding for finding in said["findings"] if not finding["note"]]
    assert (code, said["well"]) == ((2, False) if problems else (0, True)), err


@pytest.fixture
def machine(monkeypatch):
    """Let the doctor look at a machine of our choice, without a GPU's kernels unless told otherwise."""

    def choose(here: Facts) -> None:
        monkeypatch.setattr(command, "gather", lambda: here)

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return choose


def test_a_bad_pair_exits_with_2_and_the_fix(regraft, machine) -> None:
    machine(having(fla(triton="3.6.0")))
    code, out, _ = regraft("doctor", "--no-kernels")
    assert (code, "pip install 'triton>=3.7.1'" in out, "All is well" in out) == (2, True, False)
    machine(having(fla(transformers="5.24.0")))
    code, out, _ = regraft("doctor", "--no-kernels")
    assert (code, "note" in out, "All is well" in out) == (0, True, True)


def test_without_gpu_fla_and_triton(regraft, machine, monkeypatch) -> None:
    machine(Facts({"regraft": "0.1.0", "torch": "2.13.0"}))
    monkeypatch.setattr(kernels, "find_spec", lambda _: None)
    monkeypatch.setattr(fla_kernels, "installed", lambda: False)
    code, out, _ = regraft("doctor")
    assert (code, "Triton is not installed" in out, "not installed; delta-rule" in out) == (0, True, True)
    assert "everything runs on the CPU" in out


@pytest.mark.parametrize("problem", ["", "its output differs from ours by 0.4. Fix: another version of fla."])
def test_fla_is_asked_on_a_gpu(problem, machine, regraft, monkeypatch) -> None:
    machine(WELL)
    monkeypatch.setattr(kernels, "_triton", lambda _: kernels.Check("Triton kernels", True, "right"))
    monkeypatch.setattr(fla_kernels, "installed", lambda: True)
    asked = []
    monkeypatch.setattr(fla_kernels, "problem_with", lambda *what: asked.append(what) or problem)
    code, out, _ = regraft("doctor")
    assert asked == [(torch.device("cuda"), torch.bfloat16, (2, 2, 64, 64), True)]
    assert (code, "fix: another version of fla." in out) == ((2, True) if problem else (0, False))


@pytest.mark.parametrize("fault", ["wrong", "none", "raises"])
def test_what_computes_wrongly_is_a_problem(fault, regraft, machine, monkeypatch) -> None:
    machine(Facts({"torch": "2.13.0"}))
    right = kernels._results

    def results(backend: str, *where: Any) -> list[torch.Tensor]:
        if backend == "reference":
            return right(backend, *where)
        if fault == "raises":
            raise RuntimeError("no kernel image")
        return [x * (float("nan") if fault == "none" else 1.001) for x in right(backend, *where)]

    monkeypatch.setattr(kernels, "_results", results)
    code, out, _ = regraft("doctor")
    assert (code, "problem chunk form" in out) == (2, True)


def test_the_driver_is_asked_where_torch_sees_nothing(tmp_path, monkeypatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771, 9.0, 570.86.15'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert facts._listed_by_driver() == [(Gpu("NVIDIA H200", 140.4, "9.0"), "570.86.15")]
    program.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed' && exit 9\n")
    assert facts._listed_by_driver() == []


def test_an_import_that_fails_says_which_package_and_the_fix(tmp_path) -> None:
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").write_text("")
    (tmp_path / "transformers-4.57.1.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: transformers\nVersion: 4.57.1\n"
    (tmp_path / "transformers-4.57.1.dist-info" / "METADATA").write_text(metadata)
    paths = os.pathsep.join([str(tmp_path), str(Path(package.__file__).parents[1])])
    done = subprocess.run(
        [sys.executable, "-m", "regraft", "doctor"],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "regraft cannot be imported" in done.stderr
    assert "transformers before 5.20" in done.stderr and "pip install 'transformers>=5.20'" in done.stderr
