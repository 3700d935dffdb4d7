"""Needle retrieval by depth: evaluation through lm-eval, paired statistics, tables, heatmaps, the report."""
