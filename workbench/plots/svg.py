"""A figure as SVG that follows the colours of its page."""

from __future__ import annotations

import hashlib
import io
import os
import re
from collections.abc import Sequence
from functools import partial
from html import escape
from typing import Any

from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from workbench.plots.palette import (
    DARK_GRID,
    DARK_INK,
    DARK_PALETTE,
    DARK_PAPER,
    GRID,
    INK,
    PALETTE,
    PAPER,
    house_style,
)

CHARACTERS_AN_INCH = 15
"""Of a legend in letters of 8.5 points; more would leave the figure."""
SMALLEST = 0.65
"""Of its size, down to which a figure shrinks on a narrow page: its letters stay legible, and it is moved sideways (rule of thumb)."""
SVG: dict[str, Any] = {"svg.fonttype": "none", "svg.hashsalt": "workbench", "font.family": "sans-serif"}

_ROLES = {INK: "currentColor", PAPER: f"var(--paper, {PAPER})", GRID: f"var(--grid, {GRID})"} | {
    color: f"var(--plot-{index}, {color})" for index, color in enumerate(PALETTE)
}
_FOREIGN = {"#000000": "currentColor", "#ffffff": f"var(--paper, {PAPER})", "#b0b0b0": f"var(--grid, {GRID})"}
"""Ink, paper and grid as matplotlib has them by default: what somebody else's axes were made with."""
DARK_COLORS = "; ".join(f"--plot-{index}: {color}" for index, color in enumerate(DARK_PALETTE))
"""What a dark page sets, as CSS; the light colours are the defaults."""
_DARK = f"color: {DARK_INK}; --paper: {DARK_PAPER}; --grid: {DARK_GRID}; {DARK_COLORS}"
_THEMED = f"""<style>
.wb-figures {{ color: {INK}; display: flex; flex-wrap: wrap; gap: 8px 16px; align-items: flex-start; overflow-x: auto }}
.wb-figures svg {{ display: block; flex: 0 1 auto; max-width: 100%; min-width: var(--least); height: auto }}
@media print {{ .wb-figures svg {{ min-width: 0 }} }}
.wb-figures .wb-untrusted {{ display: none }}
[data-jp-theme-light="false"] .wb-figures, .vscode-dark .wb-figures {{ {_DARK} }}
@media screen and (prefers-color-scheme: dark) {{ body:not([data-jp-theme-light], .vscode-light) .wb-figures {{ {_DARK} }} }}
</style>"""
"""JupyterLab and VS Code say on the page's body which theme it has; any other page follows the reader's setting."""
_UNTRUSTED = "This figure is shown once the cell has run here, or the notebook is trusted."
"""What is left of a figure in a notebook of which JupyterLab takes style and SVG away; its letters are outlines, of which nothing is left."""


def is_live(live: bool | None = None) -> bool:
    """Return whether a page is there that controls can be used on.

    Args:
        live: None asks the environment: `WORKBENCH_LIVE=0`, as papermill, nbval and make set it, means that nobody is looking.
    """
    return os.environ.get("WORKBENCH_LIVE") != "0" if live is None else live


def show_themed(figure: Figure | None) -> None:
    """Let a notebook show a figure that the workbench did not make, but drew into, as it shows its own; one on coloured paper stays."""
    if type(figure) is Figure and to_hex(figure.get_facecolor()) == "#ffffff":
        figure._repr_html_ = partial(figure_html, figure)  # type: ignore[method-assign]


def figure_html(figure: Figure) -> str | None:
    """Return a figure as a notebook shows it on a page, None where there will be none: there the PNG is enough."""
    return block([sized(figure, said_of(figure))], said_of(figure)) if has_page() else None


def has_page() -> bool:
    """Return whether what a cell shows will be seen on a page: somebody looks, or `workbench notebook` writes one."""
    return is_live() or os.environ.get("WORKBENCH_FIGURES") == "html"


def block(svgs: Sequence[str], alt: str) -> str:
    """Return figures as HTML, side by side where there is room."""
    said = f'<p class="wb-untrusted">{escape(alt)} {_UNTRUSTED}</p>'
    return (
        f'<div class="wb-figures" role="group" aria-label="Figures" tabindex="0">{_THEMED}{said}{"".join(svgs)}</div>'
    )


def said_of(figure: Figure) -> str:
    """Return what a figure shows, from its own words."""
    titles = (f"{ax.get_title(loc='left')}: {ax.get_ylabel()} against {ax.get_xlabel()}." for ax in figure.axes[:1])
    return " ".join(" ".join(titles).split())


def sized(figure: Figure, alt: str) -> str:
    """Return a figure as SVG of its own size, with ids that no other figure has."""
    svg = themed(figure, key="KEY", alt=alt, letters="path")
    key = "f" + hashlib.sha256(svg.encode()).hexdigest()[:10]
    width, height = (round(96 * side) for side in figure.get_size_inches())
    size = f'style="--least: {SMALLEST * width:.0f}px" width="{width}" height="{height}"'
    return svg.replace("KEY-", f"{key}-").replace("<svg", f"<svg {size}", 1)


def themed(figure: Figure, *, key: str, alt: str, letters: str = "none") -> str:
    """Return a figure as SVG for pasting into HTML, its letters as text (`"none"`) or as outlines (`"path"`)."""
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with house_style({**getattr(figure, "house", {}), **SVG, "svg.fonttype": letters}):
        Figure.savefig(figure, buffer, format="svg", facecolor="none", dpi=144, metadata=nothing)
    named = f'role="img" aria-label="{escape(alt)}"' if alt else 'aria-hidden="true"'
    return _embed(buffer.getvalue(), key).replace("<svg", f"<svg {named}", 1)


def _embed(svg: str, key: str) -> str:
    """Cut the header, prefix the ids, hand the colours to the page."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", svg).replace("xlink:href=", "href=")
    svg = re.sub(r'\bid="', f'id="{key}-', svg)
    svg = re.sub(r'href="#', f'href="#{key}-', svg)
    svg = svg.replace("url(#", f"url(#{key}-")
    for color, role in (_ROLES | _FOREIGN).items():
        svg = re.sub(rf"(?<=[ :]){color}(?![0-9a-f])", role, svg)
    svg = re.sub(r"font-family: [^;\"]*", "font-family: var(--sans, sans-serif)", svg)
    head, rest = svg.split(">", 1)
    return re.sub(r'\s(width|height|version)="[^"]*"', "", head) + ' fill="currentColor">' + rest
