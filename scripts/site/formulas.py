"""Formulas of a page, from the LaTeX that pymdownx.arithmatex leaves to MathML."""

from __future__ import annotations

import html
import re

from latex2mathml.converter import convert

# What arithmatex (generic) makes of $...$ and $$...$$.
FORMULA = re.compile(
    r'<(span|div) class="arithmatex">\s*(?:\\\((?P<inline>.*?)\\\)|\\\[(?P<block>.*?)\\\])\s*</\1>', re.DOTALL
)


def with_mathml(page: str) -> str:
    """The page's HTML with each formula as a `<math>` element."""
    return FORMULA.sub(lambda found: mathml(found["inline"] or found["block"], bool(found["block"])), page)


def mathml(latex: str, block: bool) -> str:
    """One formula; `block` sets it apart from the text.

    `aligned`, which GitHub and TeX know, is `align*` to the converter; and browsers take the alignment of a
    column from a style, no longer from MathML's attribute.
    """
    text = html.unescape(latex).replace("{aligned}", "{align*}").strip()
    made = convert(text, display="block" if block else "inline")
    made = re.sub(r'columnalign="(\w+)"', r'style="text-align: \1"', made)
    return f'<div class="formula">{made}</div>' if block else made
