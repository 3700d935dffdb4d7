"""`scripts/bench/convert_340m.py` on a smaller model: every step, and memory near one copy."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "bench" / "convert_340m.py"
MIDDLE = {
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_heads": 4,
    "head_dim": 128,
    "expand_v": 1,
    "intermediate_size": 1408,
    "vocab_size": 16_000,
}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="os.wait4")
def test_a_conversion_holds_the_weights_about_once(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("convert_340m", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    rows = {row["step"]: row for row in script.measure(tmp_path, MIDDLE, "1,3", "bfloat16")}
    assert "tensors and the logits are bit-equal" in rows["reload, bit-equal"]["said"]
    assert json.loads((tmp_path / "student" / "verify.json").read_text())["passed"]
    weights = 2 * (tmp_path / "teacher" / "model.safetensors").stat().st_size / 1e9  # in float32
    grown = rows["convert"]["peak_gb"] - rows["python and libraries alone"]["peak_gb"]
    assert 0.1 < weights < grown < 1.6 * weights + 0.15, (weights, grown)
