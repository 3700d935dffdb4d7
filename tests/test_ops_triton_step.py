"""Decoding kernels against the recurrence, one token and a few, from a given state."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from filter_problems import FAMILIES, TOKENS, make_problem, relative_error
from kernel_problems import DEVICE, on_gpu, poisoned  # noqa: F401

pytest.importorskip("triton")

from regraft.ops.inputs import FilterInputs, prepare
from regraft.ops.reference import reference_filter
from regraft.ops.triton.step import decode_step

pytestmark = pytest.mark.usefixtures("poisoned")


def inputs_of(T: int, family: str, **settings: object) -> FilterInputs:
    p = {name: x.to(DEVICE) for name, x in make_problem(T, family, **settings).items()}
    arguments = [p.get(name) for name in TOKENS[:-1]]
    state = (p["mean"], p.get("cov"))
    return prepare(
        *arguments, family, p["evidence"], p["prior_var"], p.get("rotation"), None, state, None, 0.1
    )


def single(x: FilterInputs) -> FilterInputs:
    """In float32."""
    tensors = {f.name: y for f in fields(x) if isinstance(y := getattr(x, f.name), torch.Tensor)}
    return replace(x, **{name: y.float() for name, y in tensors.items()})


def assert_like_recurrence(x: FilterInputs, tolerance: float = 1e-5) -> None:
    for got, expected in zip(decode_step(single(x)), reference_filter(x), strict=True):
        if expected is None:
            assert got is None
        else:
            assert got.shape == expected.shape
            assert relative_error(got, expected) < tolerance


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("T", [1, 4])
@pytest.mark.parametrize("channels", [False, True], ids=["scalar", "per channel"])
def test_every_family(family, T, channels):
    """Widths that are no powers of two, shared keys and noise groups."""
    settings = {"channel_decay": channels, "channel_noise": channels}
    assert_like_recurrence(
        inputs_of(T, family, B=2, H=2, key_heads=1, G=2, D=20, V=36, evidence=0.7, **settings)
    )


def test_more_rows_and_columns_than_a_block():
    assert_like_recurrence(inputs_of(2, "dense", B=1, H=1, G=1, D=40, V=80))


def test_many_steps_from_the_state_of_the_last():
    """The covariance stays symmetric to the bit."""
    T = 40
    x = inputs_of(T, "dense", B=1, H=1, G=1, D=8, V=4)
    o, mean, cov = reference_filter(x)
    state, outputs = single(x), []
    for t in range(T):
        step = state.map_tokens(lambda _, y, t=t: y[:, t : t + 1])
        out, m, P = decode_step(step)
        state = replace(state, mean=m, cov=P)
        outputs.append(out)
    assert relative_error(torch.cat(outputs, 1), o) < 1e-5
    assert relative_error(state.mean, mean) < 1e-5
    assert relative_error(state.cov, cov) < 1e-5
    assert torch.equal(state.cov, state.cov.mT)


def test_what_the_kernels_do_not_have_is_named():
    x = single(inputs_of(1, "dense", D=4, V=4))
    for name, change in (
        ("rotation", {"rotation": x.k[..., :2]}),
        ("cu_seqlens", {"boundaries": [0, 1]}),
        ("k", {"k": x.k.double()}),
        ("k", {"k": x.k.repeat(1, 1, 1, 1, 65)}),
    ):
        with pytest.raises(ValueError, match=f"^{name}"):
            decode_step(replace(x, **change))


@on_gpu
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("D", "V"), [(64, 64), (128, 128), (256, 256), (256, 512)])
@pytest.mark.parametrize("T", [1, 3])
def test_sizes_of_models(D, V, T, family):
    assert_like_recurrence(inputs_of(T, family, B=3, H=4, G=2, D=D, V=V))
