"""A figure as text or as pixels: inline SVG that follows the colours of the page around it, and PNG."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from html import escape

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from workbench.plots.redraw import Draw, Redrawn
from workbench.plots.style import GRID, INK, PALETTE, PAPER, house_style, why_not_measured

__all__ = ["inline_svg", "png", "standalone_svg"]

_ROLES = {INK: "currentColor", PAPER: f"var(--paper, {PAPER})", GRID: f"var(--grid, {GRID})"} | {
    color: f"var(--plot-{index}, {color})" for index, color in enumerate(PALETTE)
}


def inline_svg(
    draw: Callable[[Axes], Axes], *, key: str, alt: str, size: tuple[float, float] = (6.8, 3.9)
) -> tuple[str | None, str | None]:
    """Draw a figure and return (svg, None), or (None, the reason) when it says "not measured".

    The SVG is made for pasting into HTML: no header, no reference to another file, ids that start with `key`, text as
    text. Ink, paper, grid and palette become CSS variables with the printed colours as defaults, so that a dark page
    can set them. The same numbers give the same characters.

    Args:
        draw: draws into the axes it is given.
        key: prefix of every id, different for each figure on the page.
        alt: what the figure shows, in words, for those who do not see it.
        size: width and height in inches.

    Returns:
        The SVG element, or the reason why there is none; the other one is None.
    """
    with house_style({"svg.fonttype": "none", "svg.hashsalt": "workbench", "font.family": "sans-serif"}):
        ax = draw(Figure(figsize=size, layout="constrained", facecolor="none").subplots())
        if (reason := why_not_measured(ax)) is not None:
            return None, reason
        figure = ax.get_figure(root=True)
        assert figure is not None
        buffer = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(buffer, format="svg", facecolor="none", dpi=144, metadata=nothing)
    return _embed(buffer.getvalue(), key).replace("<svg", f'<svg role="img" aria-label="{escape(alt)}"', 1), None


def png(draws: Sequence[Draw], *, size: tuple[float, float] = (5.5, 4.0), dpi: int = 100) -> bytes:
    """Draw figures side by side and return them as one PNG; nothing stays open.

    Args:
        draws: each draws into the axes it is given.
        size: width and height of each, in inches.
        dpi: pixels per inch.
    """
    return Redrawn(size=size, dpi=dpi).png(draws)


def standalone_svg(svg: str) -> str:
    """Return an SVG of `inline_svg` as a file of its own: named as SVG, with a size, on paper, the printed colours."""
    svg = re.sub(r"var\(--[\w-]+, ([^)]*)\)", r"\1", svg).replace("currentColor", INK)
    found = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    assert found is not None
    size = f'width="{found[1]}pt" height="{found[2]}pt" style="background: {PAPER}"'
    return svg.replace("<svg", f'<svg xmlns="http://www.w3.org/2000/svg" {size}', 1) + "\n"


def _embed(svg: str, key: str) -> str:
    """Cut the header, prefix the ids, hand the colours to the page."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", svg).replace("xlink:href=", "href=")
    svg = re.sub(r'\bid="', f'id="{key}-', svg)
    svg = re.sub(r'href="#', f'href="#{key}-', svg)
    svg = svg.replace("url(#", f"url(#{key}-")
    for color, role in _ROLES.items():
        svg = re.sub(rf"(?<=[ :]){color}(?![0-9a-f])", role, svg)
    svg = re.sub(r"font-family: [^;\"]*", "font-family: var(--sans, sans-serif)", svg)
    head, rest = svg.split(">", 1)
    return re.sub(r'\s(width|height|version)="[^"]*"', "", head) + ">" + rest
