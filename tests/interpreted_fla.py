"""fla's own kernels in Triton's interpreter, without a GPU: `test_transformers_fla.py` runs it in a process.

Each kernel takes the first of its configurations, for timing them would need a device, and loops count in the
interpreter's own numbers, for the kernels call their methods. The interpreter is wrong in bfloat16, so all is
in float32.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import builtins
import sys
from collections.abc import Iterator
from typing import Any

import torch
from triton.runtime.autotuner import Autotuner
from triton.runtime.interpreter import _implicit_cvt


def run(self: Any, *arguments: Any, **settings: Any) -> Any:
    return self.fn.run(*arguments, **{**settings, **self.configs[0].kwargs})


def number(x: Any) -> int:
    return int(x.handle.data.reshape(-1)[0]) if hasattr(x, "handle") else int(getattr(x, "value", x))


def counted(*bounds: Any) -> Iterator[Any]:
    for i in builtins.range(*map(number, bounds)):
        yield _implicit_cvt(i)


def main() -> None:
    import fla.ops.gated_delta_rule
    from fla.ops.utils.cache import CachedAutotuner
    from test_layers import make_model, tokens

    from regraft.layers import fla_kernels

    assert fla.__version__ and torch.set_num_threads(1) is None
    Autotuner.run = CachedAutotuner.run = run
    for name, module in list(sys.modules.items()):
        if name.startswith("fla.ops"):
            module.range = counted  # type: ignore[attr-defined]
    for shape in ((1, 1, 16, 16), (1, 2, 16, 32)):
        found = fla_kernels.differences(torch.device("cpu"), torch.float32, shape, True)
        print(shape, found)
        assert set(found) == {"output", "state", "decoded", "d_q", "d_k", "d_v", "d_g", "d_beta"}
        assert max(found.values()) < 1e-5, found
    model = make_model(mixers=[{"kind": "gated_deltanet"}] * 2, head_dim=16, num_v_heads=4)
    ids, mask = tokens(2, 70), torch.ones(2, 70, dtype=torch.long)
    mask[0, :9] = 0
    results = []
    for kernels in ("regraft", "fla"):
        model.set_kernels(kernels)
        with torch.no_grad():
            out = model(ids, attention_mask=mask, use_cache=True)
            step = model(ids[:, :1], cache=out.cache).logits
            packed = model(ids[:1], cu_seqlens=torch.tensor([0, 3, 70])).logits
        results.append((out.logits[mask.bool()], step, packed))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4)
    print("the same")


if __name__ == "__main__":
    main()
