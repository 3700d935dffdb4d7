"""What this machine and its Python packages are."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

PACKAGES = (
    "regraft",
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "safetensors",
    "accelerate",
    "datasets",
    "huggingface-hub",
    "lm-eval",
    "peft",
    "flash-linear-attention",
    "fla-core",
    "tilelang",
    "torchvision",
    "numpy",
)


@dataclass(frozen=True)
class Gpu:
    """A GPU: its name, memory in GiB and compute capability such as `9.0`."""

    name: str
    memory: float
    capability: str

    @property
    def generation(self) -> int:
        """The first number of the compute capability: 8 is Ampere or Ada, 9 Hopper, 10 and 12 Blackwell."""
        return int(self.capability.split(".")[0])


@dataclass(frozen=True)
class Facts:
    """Everything that is judged; tests put in other versions and GPUs.

    Args:
        versions: installed packages among `PACKAGES`.
        requirements: what each of them asks of others, as in its metadata.
        gpus: those that torch can use, or if it sees none, those that the driver lists.
        seen: how many GPUs torch can use.
        driver: version of NVIDIA's driver, None without one.
        torch_cuda: CUDA version that torch was built for; None for a build without CUDA.
        architectures: what torch was compiled for, such as `sm_90`.
        hub_cache: where models from the Hub are kept; `offline`: whether the Hub may be asked.
        free: free disk space in GiB of the folders that regraft writes to.
        settings: environment variables that change what runs.
    """

    versions: dict[str, str]
    requirements: dict[str, list[str]] = field(default_factory=dict)
    gpus: tuple[Gpu, ...] = ()
    seen: int = 0
    driver: str | None = None
    torch_cuda: str | None = None
    architectures: tuple[str, ...] = ()
    python: str = platform.python_version()
    system: str = platform.platform(terse=True)
    processors: int = os.cpu_count() or 1
    hub_cache: str = ""
    offline: bool = False
    free: dict[str, float] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)

    def has(self, package: str, versions: str = "") -> bool:
        """Whether a package is installed in one of these versions, written as pip takes them."""
        found = self.versions.get(package)
        # 2.13.0+cpu is 2.13.0, and a release candidate of 5.24 is 5.24 here
        return found is not None and SpecifierSet(versions).contains(Version(found).base_version)

    @cached_property
    def generations(self) -> set[int]:
        """First numbers of the GPUs' compute capabilities."""
        return {gpu.generation for gpu in self.gpus}


def packages(names: Iterable[str] = PACKAGES) -> Facts:
    """The packages alone; imports none of them."""
    versions, asked = {}, {}
    for name in names:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
        asked[name] = [line for line in requires(name) or () if _applies(line)]
    return Facts(versions, asked)


def gather() -> Facts:
    """Packages, GPUs, caches and disks of this machine."""
    import torch
    from huggingface_hub import constants

    from regraft.files import user_cache

    found, listed = packages(), _listed_by_driver()
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    folders = {"hub cache": Path(constants.HF_HUB_CACHE), "regraft cache": user_cache(), "here": Path.cwd()}
    names = ("CUDA_VISIBLE_DEVICES", "HF_HOME", "REGRAFT_CACHE", "REGRAFT_KERNELS", "TRITON_INTERPRET")
    return Facts(
        versions=found.versions,
        requirements=found.requirements,
        gpus=tuple(_seen(i) for i in range(seen)) or tuple(gpu for gpu, _ in listed),
        seen=seen,
        driver=listed[0][1] if listed else None,
        torch_cuda=torch.version.cuda,
        architectures=tuple(torch.cuda.get_arch_list()) if seen else (),
        hub_cache=str(constants.HF_HUB_CACHE),
        offline=constants.HF_HUB_OFFLINE,
        free={f"{name} ({folder})": _free(folder) for name, folder in folders.items()},
        settings={name: os.environ[name] for name in names if name in os.environ},
    )


def _applies(line: str) -> bool:
    """Whether a requirement holds here: not one of an extra, of another Python or another system."""
    requirement = Requirement(line)
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


def _seen(index: int) -> Gpu:
    import torch

    properties = torch.cuda.get_device_properties(index)
    capability = f"{properties.major}.{properties.minor}"
    return Gpu(properties.name, round(properties.total_memory / 2**30, 1), capability)


def _listed_by_driver() -> list[tuple[Gpu, str]]:
    """GPUs and driver version as `nvidia-smi` has them; it works where torch does not."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,memory.total,compute_cap,driver_version"]
    try:
        done = subprocess.run(
            [*query, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    return [
        (Gpu(name, round(float(memory) / 1024, 1), capability), driver)
        for name, memory, capability, driver in (row for row in rows if len(row) == 4)
        if memory.replace(".", "").isdigit() and capability[:1].isdigit()
    ]


def _free(folder: Path) -> float:
    """Free GiB on the disk of a folder, which need not be there yet."""
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.is_dir())
    return round(shutil.disk_usage(existing).free / 2**30, 1)
