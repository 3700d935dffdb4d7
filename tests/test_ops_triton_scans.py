"""Diagonal and isotropic gains as Triton kernels against the float64 recurrence."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
import torch.nn.functional as F
from kernel_problems import DEVICE, on_gpu, poisoned, ratio, results  # noqa: F401
from torch import Tensor

pytest.importorskip("triton")

from regraft.ops.triton.chunks import Chunks
from regraft.ops.triton.scans import moebius_gains

pytestmark = pytest.mark.usefixtures("poisoned")
NAMES = ("k", "g", "obs_var", "obs_var_cov", "process_var", "evidence", "cov")
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 8e-3}


def recurrence(x: dict[str, Tensor], ends: list[int], isotropic: bool) -> tuple[Tensor, Tensor]:
    """One token after the other; returns what `moebius_gains` does."""
    H, Hk = x["g"].shape[1], x["k"].shape[1]
    k = x["k"].repeat_interleave(H // Hk, 1)[:, :, None]  # [N,H,1,D]
    writes, finals = [], []
    for p, (start, stop) in zip(x["cov"], pairwise(ends), strict=True):
        for t in range(start, stop):
            p = (2 * x["g"][t]).exp()[:, None, None] * p + x["process_var"][t][:, None, None]
            k2 = k[t].square()
            s = (p * k2).sum(-1, keepdim=True)
            writes.append(p * k[t] / (x["obs_var"][t][..., None] + s))
            if isotropic:
                k2 = k2.mean(-1, keepdim=True)
            p = p / (1 + x["evidence"][:, None, None] / x["obs_var_cov"][t][..., None] * k2 * p)
        finals.append(p)
    return torch.stack(writes), torch.stack(finals)


def make_inputs(lengths: list[int], isotropic: bool, *, H: int, Hk: int, G: int, D: int) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(0)
    N = sum(lengths)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng)

    inputs = {
        "k": F.normalize(normal(N, Hk, D), dim=-1).bfloat16(),
        "g": -0.3 * normal(N, H).abs(),
        "obs_var": 0.05 + normal(N, H, G).exp(),
        "obs_var_cov": 0.05 + normal(N, H, G).exp(),
        "process_var": 0.1 * normal(N, H).abs(),
        "evidence": D * torch.rand(H, generator=rng),
        "cov": normal(len(lengths), H, G, 1 if isotropic else D).exp(),
    }
    return {name: x.double().to(DEVICE) for name, x in inputs.items()}


def compare(
    lengths: list[int],
    isotropic: bool,
    *,
    C: int = 16,
    H: int = 2,
    Hk: int = 2,
    G: int = 1,
    D: int = 16,
    dtype: torch.dtype = torch.float32,
    edit: dict[str, Tensor] | None = None,
) -> None:
    inputs = {**make_inputs(lengths, isotropic, H=H, Hk=Hk, G=G, D=D), **(edit or {})}
    ends = [0, *accumulate(lengths)]
    expected = results(inputs, lambda x: recurrence(x, ends, isotropic), "kappa")
    chunks = Chunks.of(1, ends[-1], C, ends, torch.device(DEVICE))
    cast = {name: x.to(dtype if name == "k" else torch.float32) for name, x in inputs.items()}
    got = results(cast, lambda x: moebius_gains(*(x[n] for n in NAMES), chunks, isotropic), "kappa")
    assert got["kappa"].dtype == dtype
    errors = {n: ratio(got[n], x) for n, x in expected.items()}
    assert not {n: e for n, e in errors.items() if not e < TOLERANCE[dtype]}, errors


both = pytest.mark.parametrize("isotropic", [False, True], ids=["diagonal", "isotropic"])


@both
@pytest.mark.parametrize("T", [1, 15, 16, 17, 35])
def test_lengths(T, isotropic):
    compare([T], isotropic)


@both
def test_packed_documents_with_shared_keys_and_noise_groups(isotropic):
    compare([3, 17, 1], isotropic, H=2, Hk=1, G=2)


@both
def test_heads_read_their_key_head(isotropic):
    compare([2], isotropic, H=4)


@both
def test_bfloat16_and_a_width_that_is_no_power_of_two(isotropic):
    compare([20], isotropic, D=24, dtype=torch.bfloat16)


@both
def test_evidence_zero_keeps_the_variance(isotropic):
    compare([18], isotropic, edit={"evidence": torch.zeros(2, dtype=torch.float64, device=DEVICE)})


@both
def test_strong_decay_and_little_noise(isotropic):
    inputs = make_inputs([35], isotropic, H=2, Hk=2, G=1, D=16)
    g, obs = inputs["g"].clone(), torch.full_like(inputs["obs_var"], 0.01)
    g[3], g[20, 0] = -30.0, -5.0
    compare([35], isotropic, edit={"g": g, "obs_var": obs, "obs_var_cov": obs})


@on_gpu
@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("D", [64, 128, 256])
def test_sizes_of_models(D, isotropic, dtype):
    compare([1, 63, 64, 65, 500], isotropic, C=64, H=4, Hk=2, G=2, D=D, dtype=dtype)
