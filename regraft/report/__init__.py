"""Needle retrieval by depth and perplexity by length: evaluation, paired statistics, figures, the report."""
