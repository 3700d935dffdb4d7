"""The report as Markdown, as one self-contained HTML page that also prints, and as part of a model card."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path

from regraft.report.statistics import MEAN
from regraft.report.tables import Findings, Grid, Section, sections, summary

_STYLE = """
:root { color-scheme: light; --ink: #1b1f24; --soft: #57606a; --line: #d8dee4; --paper: #ffffff; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.5rem 4rem; max-width: 72rem; background: var(--paper);
  color: var(--ink); font: 16px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { font-size: 1.7rem; margin: 0 0 .6rem; } h2 { font-size: 1.25rem; margin: 2.2rem 0 .6rem; }
h3 { font-size: 1rem; margin: 1.4rem 0 .4rem; }
h2 { border-bottom: 1px solid var(--line); padding-bottom: .25rem; }
p, li { max-width: 46rem; } nav { color: var(--soft); font-size: .9rem; } nav a { margin-right: 1rem; }
a { color: #0b57a4; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .875rem; }
th, td { padding: .3rem .75rem .3rem 0; text-align: left; border-bottom: 1px solid var(--line);
  white-space: nowrap; font-variant-numeric: tabular-nums; }
th { font-weight: 600; border-bottom: 2px solid var(--ink); }
figure { margin: 1rem 0; } figure img { width: 100%; max-width: 60rem; height: auto; }
figcaption { color: var(--soft); font-size: .875rem; }
@media print {
  body { max-width: none; padding: 0; font-size: 10pt; } nav { display: none; }
  table { font-size: 7.5pt; } th, td { padding-right: .35rem; white-space: normal; }
  .scroll { overflow: visible; } figure, tr, h2, h3 { break-inside: avoid; } h2, h3 { break-after: avoid; }
  @page { size: A4; margin: 14mm; }
}
"""


def markdown(parts: Sequence[Section]) -> str:
    """The report as Markdown, with links to the figures' PNG files beside it."""
    blocks = []
    for part in parts:
        blocks.append(f"{'#' * part.level} {part.title}")
        blocks += [part.text] if part.text else []
        blocks += ["\n".join(f"- {item}" for item in part.items)] if part.items else []
        blocks += [_markdown_grid(part.grid)] if part.grid else []
        blocks += [f"![{caption}]({name}.png)" for name, caption in part.figures]
    return "\n\n".join(blocks) + "\n"


def _markdown_grid(grid: Grid) -> str:
    lines = [grid.header, ["---"] * len(grid.header), *grid.rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def html(parts: Sequence[Section], folder: Path) -> str:
    """The report as one page: no script, nothing loaded; figures are the SVG files of `folder`, embedded."""
    title = escape(parts[0].title)
    chapters = [(i, part) for i, part in enumerate(parts) if part.level == 2]
    links = "".join(f'<a href="#s{i}">{escape(part.title)}</a>' for i, part in chapters)
    body = []
    for i, part in enumerate(parts):
        body.append(f'<h{part.level} id="s{i}">{escape(part.title)}</h{part.level}>')
        if part.text:
            body.append(f"<p>{escape(part.text)}</p>")
        if part.items:
            body.append(f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in part.items)}</ul>")
        if part.grid:
            body.append(_html_grid(part.grid))
        body += [_html_figure(folder / f"{name}.svg", caption) for name, caption in part.figures]
        if i == 0:
            body.append(f"<nav>{links}</nav>")
    head = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{title}</title><style>{_STYLE}</style></head>\n<body>\n'
    )
    return head + "\n".join(body) + "\n</body></html>\n"


def _html_grid(grid: Grid) -> str:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in grid.header)
    rows = "\n".join(f"<tr>{''.join(f'<td>{escape(c)}</td>' for c in row)}</tr>" for row in grid.rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{rows}\n</tbody></table></div>'


def _html_figure(svg: Path, caption: str) -> str:
    data = base64.b64encode(svg.read_bytes()).decode()
    text = escape(caption, quote=True)
    image = f'<img alt="{text}" src="data:image/svg+xml;base64,{data}">'
    return f"<figure>{image}<figcaption>{text}</figcaption></figure>"


def model_card(found: Findings) -> str:
    """A fragment for the student's model card: the table by length, the comparison, how it was measured."""
    wanted = {"Mean over tasks", "Paired differences, points", "Perplexity", "Settings"}
    names = dict.fromkeys([MEAN, "depth", "perplexity", *found.settings["tasks"]], "")
    parts = [
        Section(part.title, 3, part.text, part.items, part.grid)
        for part in sections(found, names)
        if part.title in wanted
    ]
    return markdown([Section("Evaluation", 2, items=summary(found)), *parts])
