"""The memory pass as Triton kernels against the float64 recurrence: on a GPU, or in the interpreter."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
import torch.nn.functional as F
from kernel_problems import DEVICE, on_gpu, poisoned, ratio, results  # noqa: F401
from torch import Tensor

pytest.importorskip("triton")

from triton.runtime.errors import OutOfResources

from regraft.ops.triton import memory, memory_backward, memory_forward
from regraft.ops.triton.chunks import Chunks
from regraft.ops.triton.memory import largest_chunk, memory_pass

pytestmark = pytest.mark.usefixtures("poisoned")
NAMES = ("q", "k", "kappa", "v", "g", "mean")
# RMS of the difference over RMS of the reference: of outputs, of gradients.
TOLERANCE = {torch.float32: (1e-4, 1e-4), torch.bfloat16: (5e-3, 8e-3)}
if DEVICE == "cpu":  # the interpreter cuts bfloat16 off where a GPU rounds
    TOLERANCE[torch.bfloat16] = (1e-2, 1.6e-2)


def recurrence(
    inputs: dict[str, Tensor], ends: list[int], scale: float, innovation: bool
) -> tuple[Tensor, Tensor]:
    """One token after the other; returns what `memory_pass` does."""
    q, k, kappa, v, g, mean = (inputs[name] for name in NAMES)
    H, Hk = v.shape[1], k.shape[1]
    q, k = (x.repeat_interleave(H // Hk, 1)[:, :, None, :, None] for x in (q, k))  # [N,H,1,D,1]
    outputs, finals = [], []
    for M, (start, stop) in zip(mean, pairwise(ends), strict=True):
        for t in range(start, stop):
            M = g[t].exp()[:, None, None, None] * M
            written = v[t][:, :, None] - (k[t].mT @ M if innovation else 0)
            M = M + kappa[t][..., None] * written
            outputs.append(scale * (q[t].mT @ M).squeeze(-2))
        finals.append(M)
    return torch.stack(outputs), torch.stack(finals)


def make_inputs(
    lengths: list[int], *, H: int, Hk: int, G: int, D: int, V: int, g: float = -0.3
) -> dict[str, Tensor]:
    """Write vectors near the keys, as gains are; rounded to bfloat16, so that every dtype holds the same."""
    rng = torch.Generator().manual_seed(0)
    N = sum(lengths)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng)

    k = F.normalize(normal(N, Hk, D), dim=-1)
    near = k.repeat_interleave(H // Hk, 1)[:, :, None] + 0.5 * normal(N, H, G, D) / D**0.5
    inputs = {
        "q": normal(N, Hk, D),
        "k": k,
        "kappa": torch.rand(N, H, G, 1, generator=rng) * near,
        "v": normal(N, H, G, V),
        "g": g * normal(N, H).abs(),
        "mean": normal(len(lengths), H, G, D, V),
    }
    rounded = {
        name: x.bfloat16().double() if x.dim() < 5 and name != "g" else x.double()
        for name, x in inputs.items()
    }
    return {name: x.to(DEVICE) for name, x in rounded.items()}


def compare(
    lengths: list[int],
    *,
    C: int = 16,
    H: int = 2,
    Hk: int = 2,
    G: int = 1,
    D: int = 16,
    V: int = 16,
    innovation: bool = True,
    dtype: torch.dtype = torch.float32,
    edit: dict[str, Tensor] | None = None,
    **settings: object,
) -> None:
    inputs = {**make_inputs(lengths, H=H, Hk=Hk, G=G, D=D, V=V), **(edit or {})}
    ends = [0, *accumulate(lengths)]
    expected = results(inputs, lambda x: recurrence(x, ends, 0.5, innovation), "o")
    chunks = Chunks.of(1, ends[-1], C, ends, torch.device(DEVICE))
    cast = {name: x.to(torch.float32 if name in ("g", "mean") else dtype) for name, x in inputs.items()}
    got = results(
        cast,
        lambda x: memory_pass(*(x[n] for n in NAMES), chunks, scale=0.5, innovation=innovation, **settings),
        "o",
    )
    bounds = TOLERANCE[dtype]
    wrong = {
        name: r for name, x in expected.items() if (r := ratio(got[name], x)) > bounds[name.startswith("d")]
    }
    assert not wrong, wrong


@pytest.mark.parametrize("T", [1, 15, 16, 17, 35])
def test_lengths(T):
    compare([T])


@pytest.mark.parametrize("innovation", [True, False])
def test_packed_documents_with_shared_keys_and_noise_groups(innovation):
    compare([3, 17, 1], H=2, Hk=1, G=2, innovation=innovation)


def test_heads_read_their_key_head():
    compare([2], H=4, Hk=2)


@pytest.mark.parametrize("innovation", [True, False])
def test_bfloat16(innovation):
    compare([16, 21], dtype=torch.bfloat16, innovation=innovation)


def test_more_columns_than_a_block_and_wider_keys():
    compare([18], D=32, V=48, H=1, Hk=1)


@pytest.mark.parametrize("C", [32, 64])
def test_chunk_sizes(C):
    compare([C + 2], C=C, D=C, V=C, H=1, Hk=1)


def test_few_values_are_read_as_a_wide_head(monkeypatch):
    seen, real = set(), memory.forward
    monkeypatch.setattr(memory, "forward", lambda *a, **s: (seen.add(a[3].shape[-1]), real(*a, **s))[1])
    compare([18], D=64, V=48, H=1, Hk=1, G=2)
    assert seen == {64}


def test_strong_decays_and_resets():
    """Beside decays near 1: their gradients stay small, and after a reset no digit is missing."""
    g = -0.01 * torch.rand(35, 2, generator=torch.Generator().manual_seed(2)).double()
    g[3], g[7, 0], g[20] = -30.0, -1e6, -5.0
    compare([35], edit={"g": g.to(DEVICE)})


def test_a_document_does_not_touch_its_neighbours():
    """Bit for bit, whatever stands beside it."""
    inputs = make_inputs([17, 20], H=2, Hk=1, G=1, D=16, V=32)
    apart = {name: x[1:] if name == "mean" else x[17:] for name, x in inputs.items()}
    got = {}
    for name, x, ends in (("packed", inputs, [0, 17, 37]), ("apart", apart, [0, 20])):
        chunks = Chunks.of(1, ends[-1], 16, ends, torch.device(DEVICE))
        got[name] = results(
            {n: y.float() for n, y in x.items()},
            lambda y, chunks=chunks: memory_pass(*(y[n] for n in NAMES), chunks, scale=0.5),
            "o",
        )
    torch.testing.assert_close(got["packed"]["o"][17:], got["apart"]["o"], rtol=0, atol=0)
    torch.testing.assert_close(got["packed"]["final"][1:], got["apart"]["final"], rtol=0, atol=0)


def test_recomputing_changes_nothing():
    """The backward pass then runs the forward pass again, and gets the same bits."""
    inputs = {name: x.float() for name, x in make_inputs([19], H=2, Hk=2, G=1, D=16, V=16).items()}
    chunks = Chunks.of(1, 19, 16, None, torch.device(DEVICE))
    kept, again = (
        results(
            inputs, lambda x, r=r: memory_pass(*(x[n] for n in NAMES), chunks, scale=0.5, recompute=r), "o"
        )
        for r in (False, True)
    )
    for name, x in kept.items():
        torch.testing.assert_close(again[name], x, rtol=0, atol=0)


def test_without_gradients_nothing_is_kept():
    inputs = {name: x.float() for name, x in make_inputs([19], H=2, Hk=2, G=1, D=16, V=16).items()}
    chunks = Chunks.of(1, 19, 16, None, torch.device(DEVICE))
    o, final = memory_pass(*(inputs[n] for n in NAMES), chunks, scale=0.5)
    assert o.grad_fn is None
    expected = recurrence({n: x.double() for n, x in inputs.items()}, [0, 19], 0.5, True)
    assert max(ratio(o, expected[0]), ratio(final, expected[1])) < 1e-5


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("k", lambda x: {**x, "q": x["q"][..., :8], "k": x["k"][..., :8]}),
        ("v", lambda x: {**x, "v": x["v"][..., :8]}),
        ("v", lambda x: {**x, "v": x["v"].repeat(1, 1, 1, 33)}),
        ("kappa", lambda x: {**x, "kappa": x["kappa"][:, :, :0]}),
        ("q", lambda x: {**x, "q": x["q"].double()}),
        ("g", lambda x: {**x, "g": x["g"].double()}),
        ("mean", lambda x: {**x, "mean": x["mean"].bfloat16()}),
        ("mean", lambda x: {**x, "mean": x["mean"][:0]}),
    ],
)
def test_what_the_kernels_do_not_have_is_named(name, change):
    inputs = {n: x.float() for n, x in make_inputs([3], H=1, Hk=1, G=1, D=16, V=16).items()}
    chunks = Chunks.of(1, 3, 16, None, torch.device(DEVICE))
    with pytest.raises(ValueError, match=f"^{name}"):
        memory_pass(*(change(inputs)[n] for n in NAMES), chunks, scale=1.0)


def test_a_chunk_that_is_too_long_for_narrow_keys_is_refused():
    inputs = {n: x.float() for n, x in make_inputs([3], H=1, Hk=1, G=1, D=16, V=16).items()}
    with pytest.raises(ValueError, match=r"^chunks: keys of width 16 .* at most 32 tokens, got 64"):
        memory_pass(*inputs.values(), Chunks.of(1, 3, 64, None, torch.device(DEVICE)), scale=1.0)


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("innovation", [True, False])
@pytest.mark.parametrize(
    ("D", "V"), [(16, 512), (32, 32), (64, 64), (128, 128), (128, 256), (256, 256), (256, 80)]
)
def test_sizes_of_models(D, V, innovation, dtype):
    compare(
        [1, 63, 64, 65, 200], C=largest_chunk(D), H=4, Hk=2, G=2, D=D, V=V, innovation=innovation, dtype=dtype
    )


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("C", [16, 32, 64])
def test_chunk_sizes_at_the_size_of_a_model(C, dtype):
    compare([300, 77], C=C, D=256, V=256, dtype=dtype)


@on_gpu
def test_repeated_runs_give_the_same_bits():
    inputs = make_inputs([513, 2000], H=4, Hk=4, G=1, D=128, V=128)
    inputs = {n: x.float() if n in ("g", "mean") else x.bfloat16() for n, x in inputs.items()}
    chunks = Chunks.of(1, 2513, 64, [0, 513, 2513], torch.device(DEVICE))
    first, second = (
        results(inputs, lambda x: memory_pass(*(x[n] for n in NAMES), chunks, scale=1.0), "o")
        for _ in range(2)
    )
    for name, x in first.items():
        torch.testing.assert_close(second[name], x, rtol=0, atol=0)


@pytest.mark.parametrize("D", [16] if DEVICE == "cpu" else [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "kernel",
    [memory_forward._carry, memory_backward._carry_back, memory_backward._vectors],
    ids=["carry", "carry back", "vectors"],
)
def test_every_choice_of_the_autotuner_is_right(kernel, dtype, D, monkeypatch):
    """A compiler that gets one of them wrong would go unnoticed until that one is the fastest."""
    ran = 0
    for config in list(kernel.configs):
        monkeypatch.setattr(kernel, "configs", [config])
        try:
            compare(
                [16] if DEVICE == "cpu" else [200, 65], C=16 if DEVICE == "cpu" else 64, D=D, V=D, dtype=dtype
            )
        except OutOfResources:
            continue
        except AssertionError as wrong:
            raise AssertionError(f"{config}: {wrong}") from wrong
        ran += 1
    assert ran
