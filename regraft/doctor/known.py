"""Versions, drivers and GPUs that are known not to go together, as one table; and requirements not met."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from regraft.doctor.facts import Facts, packages

SCARCE = 2.0  # GiB of free disk below which a run of the demo's size may not end


@dataclass(frozen=True)
class Finding:
    """Something that does not go together, and what to do about it. A note alone is no reason to stop."""

    what: str
    reason: str
    fix: str
    note: bool = False


@dataclass(frozen=True)
class KnownBad:
    """A row of the table.

    Args:
        what: the pair, in a few words.
        when: whether the facts have it.
        reason: what goes wrong, and where that is known from.
        fix: what to do.
        note: it does not touch what regraft does.
    """

    what: str
    when: Callable[[Facts], bool]
    reason: str
    fix: str
    note: bool = False


KNOWN_BAD = (
    KnownBad(
        "transformers before 5.20",
        lambda f: f.has("transformers", "<5.20"),
        "regraft is tested on 5.20 to 5.24; transformers 4 cannot be imported by it.",
        "pip install 'transformers>=5.20'",
    ),
    KnownBad(
        "flash-linear-attention before 0.6",
        lambda f: f.has("flash-linear-attention", "<0.6"),
        "its gated delta rule takes no more value heads than key heads; regraft does not use it.",
        "pip install 'flash-linear-attention>=0.6.0'",
    ),
    KnownBad(
        "Triton 3.4 to 3.7.0 with flash-linear-attention on Hopper",
        lambda f: (
            f.has("flash-linear-attention")
            and f.has("triton", ">=3.4,<3.7.1")
            and 9 in f.generations
            and not f.has("tilelang")
        ),
        "gradients of the gated delta rule are wrong (fla issue 640); fla refuses, and training runs in "
        "regraft's own op.",
        "pip install 'triton>=3.7.1', which torch 2.13 brings, or pip install tilelang",
    ),
    KnownBad(
        "Triton 3.4 to 3.5.0 with flash-linear-attention on Blackwell",
        lambda f: (
            f.has("flash-linear-attention") and f.has("triton", ">=3.4,<=3.5.0") and 10 in f.generations
        ),
        "the backward of the gated delta rule does not compile (fla issues 607 and 638, Triton's 8459 and "
        "8695); training runs in regraft's own op.",
        "install a newer triton, and look here again whether the kernels agree",
    ),
    KnownBad(
        "lm-eval before 0.4.10 with transformers 5",
        lambda f: f.has("lm-eval", "<0.4.10") and f.has("transformers", ">=5"),
        "it imports a class that transformers 5 no longer has (vLLM pull request 33994).",
        "pip install 'lm-eval>=0.4.13'",
    ),
    KnownBad(
        "flash-linear-attention 0.6.0 with transformers from 5.24",
        lambda f: f.has("flash-linear-attention", "==0.6.0") and f.has("transformers", ">=5.24"),
        "fla's own model classes generate from an empty state, for they do not read the keyword `cache`. "
        "regraft's decoder is not touched.",
        "load Gated DeltaNet folders through regraft, or use transformers 5.23 with fla's classes",
        note=True,
    ),
    KnownBad(
        "a GPU, and torch built without CUDA",
        lambda f: bool(f.gpus) and not f.seen and f.torch_cuda is None,
        "torch cannot use it, so everything runs on the CPU.",
        "install the CUDA build of torch: https://pytorch.org/get-started/locally",
    ),
    KnownBad(
        "torch for CUDA 13 with a driver before 580",
        lambda f: _cuda(f) == 13 and _driver(f) < 580,
        "the driver is too old for it (NVIDIA's table of CUDA 13).",
        "update the driver to 580 or newer, or install torch for CUDA 12",
    ),
    KnownBad(
        "torch for CUDA 12 with a driver before 525",
        lambda f: _cuda(f) == 12 and _driver(f) < 525,
        "the driver is too old for it (NVIDIA's table of CUDA 12).",
        "update the driver to 525 or newer",
    ),
    KnownBad(
        "a GPU that torch does not see",
        lambda f: bool(f.gpus) and not f.seen and f.torch_cuda is not None and not _hidden(f),
        "the driver lists it, and torch finds none it can use.",
        "look at what `python -c 'import torch; torch.zeros(1).cuda()'` says",
    ),
    KnownBad(
        "a GPU that torch was not compiled for",
        lambda f: bool(f.architectures) and any(not _compiled_for(f, gpu.generation) for gpu in f.gpus),
        "its kernels do not start there (no kernel image).",
        "install a torch whose build lists this GPU, newer or older as the case may be",
    ),
    KnownBad(
        "a GPU before compute capability 8",
        lambda f: bool(f.seen) and any(generation < 8 for generation in f.generations),
        "it has no bfloat16 of its own, which the shipped recipes for GPUs train in.",
        "set teacher.dtype=float32, and expect less speed",
        note=True,
    ),
)


def findings(facts: Facts) -> list[Finding]:
    """What of the table is the case here, which requirements are not met, which disk is nearly full."""
    rows = [row for row in KNOWN_BAD if row.when(facts)]
    found = [Finding(row.what, row.reason, row.fix, row.note) for row in rows]
    named = " ".join(row.fix for row in rows)
    found += [finding for finding in _unmet(facts) if finding.fix not in named]
    for folder, free in facts.free.items():
        if free < SCARCE:
            what = f"{free} GiB free for {folder}"
            found.append(Finding(what, "a run may stop at a full disk.", "make room", note=True))
    return found


def why(error: BaseException) -> str:
    """What to tell a user whose packages could not be imported."""
    lines = [
        f"{found.what}: {found.reason} Fix: {found.fix}" for found in findings(packages()) if not found.note
    ]
    return "\n".join([f"regraft cannot be imported: {error}", *lines])


def _unmet(facts: Facts) -> list[Finding]:
    """What installed packages ask of each other and do not get."""
    found = []
    for package, lines in facts.requirements.items():
        for requirement in map(Requirement, lines):
            name = canonicalize_name(requirement.name)
            installed = facts.versions.get(name)
            if installed is None or requirement.specifier.contains(Version(installed).base_version, True):
                continue
            wanted = f"{requirement.name}{requirement.specifier}"
            reason = f"{package} {facts.versions[package]} asks for {wanted}."
            if (package, name) == ("torch", "triton"):  # for torch.compile; a newer one has what fla needs
                fix = "nothing, while the kernels' checks are right; torch.compile may want the other"
                found.append(Finding(f"{name} {installed}", reason, fix, note=True))
            else:
                found.append(Finding(f"{name} {installed}", reason, f"pip install '{wanted}'"))
    return found


def _cuda(facts: Facts) -> int:
    return int((facts.torch_cuda or "0").split(".")[0])


def _hidden(facts: Facts) -> bool:
    """Whether the user hides all GPUs on purpose."""
    return facts.settings.get("CUDA_VISIBLE_DEVICES") in ("", "-1")


def _driver(facts: Facts) -> int:
    """The driver's branch; without a driver none is too old."""
    return int(facts.driver.split(".")[0]) if facts.driver else 10**6


def _compiled_for(facts: Facts, generation: int) -> bool:
    """Whether a build has code of this generation, or code of an older one to compile from."""
    built = [(a.startswith("compute_"), int(a.split("_")[1].rstrip("af")) // 10) for a in facts.architectures]
    return any(g == generation or (portable and g <= generation) for portable, g in built)
