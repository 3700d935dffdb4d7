"""The op as Triton kernels against the float64 reference: on a GPU, or small in Triton's interpreter."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from filter_problems import hard_problem, make_problem, results_and_gradients, run
from kernel_problems import DEVICE, on_gpu
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")

import triton
import triton.language as tl

from regraft.ops.triton import dense_backward, dense_forward
from regraft.ops.triton.chunks import Chunks
from regraft.ops.triton.linalg import ldl


def errors(problem: dict[str, torch.Tensor], **settings: Any) -> dict[str, float]:
    """RMS of the difference from the float64 reference over the RMS of the reference, of everything."""
    problem = {name: x.to(DEVICE) for name, x in problem.items()}
    exact = results_and_gradients(problem, **{**settings, "backend": "reference"})
    problem = {name: x.float() for name, x in problem.items()}
    found = results_and_gradients(problem, backend="triton", **settings)
    return {
        name: float((found[name].double() - x).norm() / x.norm())
        for name, x in exact.items()
        if float(x.norm()) > 0
    }


def check(problem: dict[str, torch.Tensor], limit: float = 1e-4, **settings: Any) -> None:
    found = errors(problem, **settings)
    assert all(error < limit for error in found.values()), found


@pytest.mark.parametrize("family", ["dense", "diagonal", "isotropic", "reset", "none"])
@pytest.mark.parametrize(("T", "evidence"), [(1, 1.0), (15, 0.0), (16, 0.5), (17, 1.0), (37, 3.0)])
def test_kernels_equal_the_reference(family: str, T: int, evidence: float) -> None:
    problem = make_problem(T, family, B=2, H=2, D=16, V=32, G=2, key_heads=1, evidence=evidence)
    check(problem, covariance=family, chunk_size=16)


@pytest.mark.parametrize("family", ["dense", "isotropic"])
def test_packed_documents(family: str) -> None:
    problem = make_problem(40, family, B=1, H=1, D=16, V=16, G=1)
    bounds = torch.tensor([0, 1, 18, 40])
    problem["mean"] = problem["mean"].expand(3, -1, -1, -1)
    problem["cov"] = problem["cov"].expand(3, *problem["cov"].shape[1:])
    check(problem, covariance=family, chunk_size=16, cu_seqlens=bounds)


@pytest.mark.parametrize("family", ["dense", "isotropic", "reset"])
def test_a_reset_by_decay_leaves_the_digits_of_the_others(family: str) -> None:
    problem = make_problem(40, family, B=1, H=1, D=16, V=16, G=1)
    problem["g"][:, [3, 21]] = -1e6
    check(problem, covariance=family, chunk_size=32)


@pytest.mark.parametrize("C", [32, 64])
def test_chunks_of_several_blocks(C: int) -> None:
    check(make_problem(C + 3, B=1, H=1, D=C, V=C, G=1), chunk_size=C)


def test_narrow_keys_take_shorter_chunks() -> None:
    """Else a product is a warp group's and may read beyond shared memory."""
    problem = make_problem(67, B=1, H=1, D=16, V=16, G=1)
    check(problem, chunk_size=64)
    single = {name: x.to(DEVICE, torch.float32) for name, x in problem.items()}
    half, whole = (run(single, backend="triton", chunk_size=size) for size in (32, 64))
    assert all(torch.equal(x, y) for x, y in zip(half, whole, strict=True))


@triton.jit
def _factors(a, x, d, work, C: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, C)
    at = tl.program_id(0) * (C * C) + i[:, None] * C + i[None, :]
    X, pivots = ldl(tl.load(a + at), work + tl.program_id(0) * (C * C + C + 512), C)
    tl.store(x + at, X)
    tl.store(d + tl.program_id(0) * C + i, pivots)


@pytest.mark.parametrize("C", [16, 32, 64])
def test_the_factorisation_is_the_one_of_cholesky(C: int) -> None:
    A = torch.randn(3, C, C, generator=torch.Generator().manual_seed(C)).to(DEVICE)
    A = A @ A.mT / C + torch.eye(C, device=DEVICE)
    x, d = torch.empty_like(A), A.new_empty(3, C)
    _factors[(3,)](A, x, d, A.new_full((3, C * C + C + 512), float("nan")), C=C, num_stages=1)
    L = torch.linalg.cholesky(A.double())
    pivots = L.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(d.double(), pivots.square(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(x.double(), torch.linalg.inv(L / pivots[:, None]), atol=2e-6, rtol=1e-5)


def test_the_floor_acts_on_the_covariance_alone() -> None:
    problem = make_problem(20, B=1, H=1, D=16, V=16, G=1)
    problem["obs_var"] = problem["obs_var"] * 0.1
    check(problem, chunk_size=16, obs_var_floor=0.05)


def test_narrow_keys_are_read_in_float32() -> None:
    problem = make_problem(20, B=1, H=1, D=16, V=64, G=1)
    dtypes = dict.fromkeys("qkv", torch.bfloat16)
    half = {name: x.to(DEVICE, dtypes.get(name, torch.float32)) for name, x in problem.items()}
    here = run(half, backend="triton", chunk_size=16, check=False)
    there = run({name: x.float() for name, x in half.items()}, backend="triton", chunk_size=16, check=False)
    assert here[0].dtype == torch.bfloat16
    assert torch.equal(here[0], there[0].bfloat16()) and torch.equal(here[1], there[1])


def test_unwritten_places_are_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything the kernels allocate starts as NaN, and nothing of it comes out."""

    def poisoned(make: Any) -> Any:
        def made(*arguments: Any, **settings: Any) -> torch.Tensor:
            x: torch.Tensor = make(*arguments, **settings)
            return x.fill_(float("nan")) if x.is_floating_point() else x

        return made

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))
    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    check(make_problem(19, B=1, H=1, D=16, V=16, G=1), chunk_size=16)


@pytest.mark.parametrize("family", ["dense", "isotropic", "none"])
def test_under_activation_checkpointing_gradients_are_the_same(family: str) -> None:
    problem = {n: x.to(DEVICE, torch.float32) for n, x in make_problem(20, family, D=16, V=16, G=1).items()}

    def gradients(wrap: Any) -> list[torch.Tensor]:
        leaves = {n: x.clone().requires_grad_() for n, x in problem.items()}
        out = wrap(lambda *x: run(dict(zip(leaves, x, strict=True)), backend="triton", covariance=family)[0])
        asked = [x for n, x in leaves.items() if n in ("q", "k", "v", "g", "obs_var")]
        return list(torch.autograd.grad(out(*leaves.values()).square().sum(), asked))

    plain = gradients(lambda call: call)
    again = gradients(lambda call: lambda *x: checkpoint(call, *x, use_reentrant=False))
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


@pytest.mark.skipif(DEVICE == "cuda" or not hasattr(os, "fork"), reason="processes stand in for programs")
@pytest.mark.parametrize("D", [32, 64])
def test_programs_that_share_a_covariance(monkeypatch: pytest.MonkeyPatch, D: int) -> None:
    """A covariance split by columns; in the interpreter processes stand in for a launch's programs."""

    class Forked:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int]) -> Any:
            def launch(*arguments: Any, **settings: Any) -> None:
                for x in arguments:
                    if isinstance(x, torch.Tensor):
                        x.share_memory_()
                children = []
                for _ in range(grid[0]):
                    child = os.fork()
                    if child == 0:
                        code = 1
                        try:
                            self.kernel[(1,)](*arguments, **settings)
                            code = 0
                        finally:
                            os._exit(code)
                    children.append(child)
                assert [os.waitpid(child, 0)[1] for child in children] == [0] * grid[0]

            return launch

    for module in (dense_forward, dense_backward):
        launch = {"BR": D // 2, "BD": 16, "num_warps": 4, "num_stages": 1}
        monkeypatch.setattr(module, "launch_of", lambda *_, launch=launch: launch)
        monkeypatch.setattr(module, "_chain", Forked(module._chain))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a process that was forked has no other threads
    try:
        check(make_problem(20, B=1, H=1, D=D, V=16, G=1), chunk_size=16)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("q, k", {"D": 24}),
        ("v", {"V": 24}),
        ("g", {"channel_decay": True}),
        ("process_var", {"channel_noise": True}),
        ("rotation", {"rotation": True}),
    ],
)
def test_what_the_kernels_lack_is_named(argument: str, change: dict[str, Any]) -> None:
    problem = make_problem(8, **{"D": 16, "V": 32, "G": 2, **change}, dtype=torch.float32)
    with pytest.raises(ValueError, match=rf"^{argument}:"):
        run(problem, backend="triton")


def test_an_unknown_precision_is_named() -> None:
    problem = make_problem(8, D=16, V=32, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"^precision:"):
        run(problem, precision="fp8")


def test_chunk_tables() -> None:
    chunks = Chunks.of(1, 10, 4, [0, 1, 10], torch.device("cpu"))
    assert chunks.start.tolist() == [0, 1, 5, 9]
    assert chunks.stop.tolist() == [1, 5, 9, 10]
    assert chunks.first.tolist() == [0, 1, 4]
    rows = Chunks.of(2, 5, 4, None, torch.device("cpu"))
    assert rows.start.tolist() == [0, 4, 5, 9]


@on_gpu
@pytest.mark.parametrize(("D", "V", "G"), [(64, 64, 1), (128, 256, 2), (256, 256, 1), (256, 512, 4)])
@pytest.mark.parametrize("T", [1, 63, 64, 65, 200])
def test_widths_on_a_gpu(D: int, V: int, G: int, T: int) -> None:
    check(make_problem(T, D=D, V=V, G=G, H=2, key_heads=1))


@on_gpu
@pytest.mark.parametrize("family", ["diagonal", "isotropic", "reset", "none"])
def test_families_on_a_gpu(family: str) -> None:
    check(make_problem(150, family, D=128, V=128, G=1, H=2), covariance=family)


@on_gpu
@pytest.mark.parametrize("D", [128, 256])
def test_bfloat16_on_a_gpu(D: int) -> None:
    problem = make_problem(200, D=D, V=D, G=1, H=2)
    half = {name: x.bfloat16().double() if name in "qkv" else x for name, x in problem.items()}
    half["k"] = torch.nn.functional.normalize(half["k"], dim=-1).bfloat16().double()
    half = {name: x.to(DEVICE) for name, x in half.items()}
    exact = results_and_gradients(half, backend="reference", check=False)
    there = {name: x.to(torch.bfloat16 if name in "qkv" else torch.float32) for name, x in half.items()}
    found = results_and_gradients(there, backend="triton", check=False)
    for name, x in exact.items():
        if not float(x.norm()):  # of the prior's variance, where a state is given
            continue
        error = float((found[name].double() - x).norm() / x.norm())
        assert error < (5e-3 if name in ("o", "mean", "cov") else 8e-3), (name, error)


@on_gpu
@pytest.mark.parametrize("l2", [1e-5, 1e-4])
def test_repeated_keys_over_a_long_sequence_on_a_gpu(l2: float) -> None:
    problem = hard_problem(32768, 256, 0.05, l2)
    exact = run({n: x.to(DEVICE) for n, x in problem.items()}, state=False, backend="chunk")
    found = run({n: x.to(DEVICE, torch.float32) for n, x in problem.items()}, state=False, backend="triton")
    for name, x, y in zip(("o", "mean", "cov"), exact, found, strict=True):
        assert float((y.double() - x).norm() / x.norm()) < 1e-3, name
    assert float(torch.linalg.eigvalsh(found[2].double()).min()) > 0


@on_gpu
def test_two_runs_are_equal_to_the_bit_on_a_gpu() -> None:
    problem = {n: x.float().to(DEVICE) for n, x in make_problem(300, D=256, V=256, G=1, H=4).items()}
    first, second = (results_and_gradients(problem, backend="triton") for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@on_gpu
def test_auto_takes_the_kernels_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from regraft.ops.triton import filter as kernels

    called = []
    real = kernels.triton_filter
    monkeypatch.setattr(kernels, "triton_filter", lambda *a: called.append(1) or real(*a))
    problem = {n: x.float().to(DEVICE) for n, x in make_problem(70, D=64, V=64, G=1).items()}
    run(problem)
    assert called
