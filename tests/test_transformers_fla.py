"""The same folder through flash-linear-attention's own model class, with its naive functions as kernels.

Skipped where fla or triton is not installed: fla's kernels need a GPU, its classes and naive functions
do not.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from folders import write_teacher
from test_layers_fla import plain_rule
from torch import Tensor

from regraft.convert import load_model

torch.set_num_threads(1)
pytest.importorskip("triton")
layer = pytest.importorskip("fla.layers.gated_deltanet")
mlp = pytest.importorskip("fla.modules.mlp")
models = pytest.importorskip("fla.models")
attention = pytest.importorskip("fla.layers.attn")
rotary_module = pytest.importorskip("fla.modules.rotary.ops")
rules = pytest.importorskip("fla.ops.gated_delta_rule")
naive = pytest.importorskip("fla.ops.gated_delta_rule.naive")


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **settings: Any
) -> tuple[Tensor, None]:
    """What fla's kernel is asked to do around its rule, then the naive rule."""
    repeats = v.shape[2] // q.shape[2]
    q, k = (y.repeat_interleave(repeats, dim=2) for y in (q, k))
    q, k = (y * (y.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for y in (q, k))
    g = -settings["A_log"].exp() * F.softplus(g + settings["dt_bias"])
    beta = beta.sigmoid() * (2 if settings["allow_neg_eigval"] else 1)
    o, _ = naive.naive_recurrent_gated_delta_rule(q, k, v, beta, g)
    return o.to(v.dtype), None


def convolution(self: Any, x: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    padded = F.pad(x.mT, (self.weight.shape[-1] - 1, 0))
    return F.silu(F.conv1d(padded, self.weight, groups=x.shape[-1])).mT, None


def norm(self: Any, x: Tensor, gate: Tensor | None = None) -> Tensor:
    y = F.rms_norm(x.float(), x.shape[-1:], self.weight.float(), self.eps).to(x.dtype)
    return y if gate is None else y * F.silu(gate)


def flash_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, window_size: tuple[int, int]) -> Tensor:
    """What the flash-attn package computes, window to the left included."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    place = torch.arange(q.shape[2])
    distance = place[:, None] - place
    seen = (distance >= 0) & ((window_size[0] < 0) | (distance <= window_size[0]))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True).transpose(1, 2)


def rotary(self: Any, q: Tensor, k: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    """fla's tables and its own reference instead of its kernel."""
    self._update_cos_sin_cache(q.shape[1], device=q.device, dtype=q.dtype)
    cos, sin = self._cos_cached[: q.shape[1]], self._sin_cached[: q.shape[1]]
    reference = rotary_module.rotary_embedding_ref
    return reference(q, cos, sin), reference(k, cos, sin)


@pytest.fixture
def naive_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"):
        monkeypatch.setattr(layer, name, gated_delta_rule)
        monkeypatch.setattr(rules, name, plain_rule)
    monkeypatch.setattr(layer.GatedDeltaNet, "_use_fused_qkv_conv", lambda *_, **__: False)
    monkeypatch.setattr(layer.ShortConvolution, "forward", convolution)
    monkeypatch.setattr(layer.RMSNorm, "forward", norm)
    monkeypatch.setattr(layer.FusedRMSNormGated, "forward", norm)
    monkeypatch.setattr(attention, "flash_attn_func", flash_attention)
    monkeypatch.setattr(attention.RotaryEmbedding, "forward", rotary)
    monkeypatch.setattr(mlp, "swiglu", lambda gate, y: F.silu(gate) * y)


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"num_v_heads": 4, "expand_v": 2},
        {"use_gate": False, "num_heads": 1, "tie_word_embeddings": True},
        {"allow_neg_eigval": True},
        {"attn": {"layers": [1, 3], "num_heads": 4, "num_kv_heads": 2, "qkv_bias": True}},
        {"attn": {"layers": [0], "num_heads": 2, "window_size": 20, "rope_theta": 500.0}},
    ],
    ids=lambda shape: ",".join(shape) or "plain",
)
@torch.no_grad()
def test_logits_are_those_of_flas_own_model(shape: dict[str, Any], naive_kernels, tmp_path: Path) -> None:
    unfused = {"fuse_norm": False, "fuse_swiglu": False, "fuse_cross_entropy": False, "use_cache": False}
    folder = write_teacher(tmp_path / "t", **unfused, **shape)
    theirs = models.GatedDeltaNetForCausalLM.from_pretrained(folder).eval()
    ids = torch.randint(97, (2, 150), generator=torch.Generator().manual_seed(1))
    expected = theirs(ids).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(load_model(str(folder))(ids).logits, expected, rtol=1e-4, atol=3e-4)


def test_the_agreement_script_finds_agreement_and_a_difference(
    naive_kernels, tmp_path: Path, monkeypatch
) -> None:
    """Its parts on a tiny folder; only compilation and speed are left to a GPU."""
    file = Path(__file__).parents[1] / "scripts" / "bench" / "fla_agreement.py"
    spec = importlib.util.spec_from_file_location("fla_agreement", file)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    unfused = {"fuse_norm": False, "fuse_swiglu": False, "fuse_cross_entropy": False, "use_cache": False}
    folder = write_teacher(tmp_path / "t", **unfused)
    results = {name: tmp_path / f"{name}.json" for name in ("float32", "bfloat16")}
    for name, result in results.items():
        assert script.logits_of(folder, name, result.with_suffix(".safetensors"), "cpu") == {}
    rows = script.agreement("tiny", results)
    assert [r["model"] for r in rows[:2]] == ["ours, fla's kernels", "ours, our op (chunk)"]
    for row in rows:
        exact = row["format"] == "float32"
        assert row["relative_rms"] < (1e-5 if exact else 0.3), row
        assert row["max_abs"] > 0 and row["argmax"] > (0.99 if exact else 0.5) and row["logits"] > 1
    monkeypatch.setattr(script, "machine", dict)
    found = {"agreement": rows, "probe": {}, "speed": {}, "failures": {"x": "y"}, "seconds": 1}
    assert len(script.table(found | {"machine": {}}).splitlines()) == len(rows) + 6


@pytest.mark.slow
def test_the_layers_on_flas_own_kernels() -> None:
    """Outputs, states, gradients, padding and packing, by Triton's interpreter."""
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here.parent), str(here), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, here / "interpreted_fla.py"],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0 and done.stdout.endswith("the same\n"), done.stderr[-3000:]
