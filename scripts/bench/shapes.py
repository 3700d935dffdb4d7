"""The shape of the published 340M Gated DeltaNet checkpoints, and the layers that the paper converts."""

from __future__ import annotations

from typing import Any

SHAPE_340M: dict[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_heads": 4,
    "head_dim": 256,
    "expand_v": 1.0,
    "intermediate_size": 2816,
    "vocab_size": 32000,
}
LAYERS = (5, 11, 17, 23)
