"""Needle retrieval by depth: evaluation through lm-eval, paired statistics, tables, heatmaps, the report."""

from regraft.report.run import report_run

__all__ = ["report_run"]
