"""The filter as a function: one op behind every layer, with a reference and fast paths."""

from regraft.ops.kalman import kalman_delta_rule

__all__ = ["kalman_delta_rule"]
