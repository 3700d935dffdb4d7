"""Distillation and its control: data, losses, stages, the one training loop, runs."""

from regraft.distill.run import control, distill

__all__ = ["control", "distill"]
