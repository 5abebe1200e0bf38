"""The palette on its pages, and figures in notebooks: contrast by the formula of WCAG 2.1, themed SVG by an HTML parser."""

from __future__ import annotations

import io
from xml.etree import ElementTree

import matplotlib.pyplot as plt
import pytest
from IPython.core.formatters import DisplayFormatter
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import workbench as wb
from tests.helpers.records import diagnosis, study
from workbench.plots import palette as style
from workbench.plots.svg import figure_html
from workbench.views.curves import CurvesWidget

LEAST = 3.0
"""WCAG 2.1, 1.4.11: of graphical objects against what is next to them."""
LIGHT, DARK = ("#ffffff", style.PAPER), ("#111111", "#17181c", style.DARK_PAPER)


def luminance(color: str) -> float:
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def test_the_formula_is_the_standards() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize(
    ("colors", "pages"),
    [
        ((*style.PALETTE, *style.SEQUENCE, style.INK), LIGHT),
        ((*style.DARK_PALETTE, *style.DARK_SEQUENCE, style.DARK_INK), DARK),
    ],
    ids=["light", "dark"],
)
def test_every_colour_stands_out_from_every_page(colors: tuple[str, ...], pages: tuple[str, ...]) -> None:
    assert {(color, page) for color in colors for page in pages if contrast(color, page) < LEAST} == set()


def test_a_number_has_one_colour_in_either_variant() -> None:
    assert len(set(style.PALETTE)) == len(set(style.DARK_PALETTE)) == len(style.PALETTE) == len(style.DARK_PALETTE)
    assert all(color in CurvesWidget._esm for color in (*style.SEQUENCE, *style.DARK_SEQUENCE))


def shown(monkeypatch: pytest.MonkeyPatch, live: str, ax: Axes | None = None) -> tuple[Figure, dict[str, str]]:
    monkeypatch.setenv("WORKBENCH_LIVE", live)
    figure = wb.lr_sweep.plot(study(), diagnosis(), ax=ax).get_figure(root=True)
    assert isinstance(figure, Figure)
    data, _ = DisplayFormatter().format(figure)
    plt.close(figure)
    return figure, data


@pytest.mark.parametrize("own_axes", [False, True])
def test_a_notebook_shows_a_figure_as_svg_that_follows_its_page(
    monkeypatch: pytest.MonkeyPatch, own_axes: bool
) -> None:
    figure, data = shown(monkeypatch, "1", plt.figure().add_subplot() if own_axes else None)
    svg = data["text/html"].partition("</p>")[2].removesuffix("</div>")
    root = ElementTree.fromstring(svg)
    used = {color for node in root.iter() for color in style.PALETTE if color in node.get("style", "")}
    assert used
    assert not any(white in node.get("style", "") for node in root.iter() for white in ("#ffffff", "#000000"))
    assert all(f", {color})" in node.get("style", "") for node in root.iter() for color in used if color in node.get("style", ""))  # fmt: skip
    assert root.get("aria-label", "").startswith("Final training loss vs learning rate: training loss")
    assert all(f"--plot-{number}: {color}" in data["text/html"] for number, color in enumerate(style.DARK_PALETTE))
    assert data["text/plain"].startswith("<Figure size ")
    figure.savefig(io.BytesIO(), format="png")


def test_the_same_figure_has_the_same_characters_and_another_has_other_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_LIVE", "1")
    made = [figure_html(wb.lr_sweep.plot(study(), mark=mark).get_figure(root=True)) for mark in (0.1, 0.1, 0.2)]  # type: ignore[arg-type]
    plt.close("all")
    assert made[0] == made[1]
    ids = [{node.get("id") for node in ElementTree.fromstring(str(one).partition("</p>")[2].removesuffix("</div>")).iter()} - {None} for one in made]  # fmt: skip
    assert ids[0].isdisjoint(ids[2])


def test_where_nobody_looks_a_notebook_stores_what_it_always_did(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "text/html" not in shown(monkeypatch, "0")[1]


def test_a_figure_of_somebody_elses_colours_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with plt.style.context("dark_background"):
        ax = plt.figure().add_subplot()
    assert "text/html" not in shown(monkeypatch, "1", ax)[1]
