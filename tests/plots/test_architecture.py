"""The picture of variants over depth: every point where the table has it, and every end of the grid marked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tests.helpers.records import empty
from workbench.plots.style import why_not_measured
from workbench.topics.architecture.figures import plot_architecture


def row(
    variant: str, depth: int, stable: float | None, unstable: float | None = None, censored: str | None = None
) -> dict[str, Any]:
    best = {"best_lr": None, "best_loss": None, "identity_at_start": False}
    return {
        "variant": variant,
        "depth": depth,
        "stable_lr": stable,
        "unstable_lr": unstable,
        "censored": censored,
        **best,
    }


ROWS = [
    row("plain", 2, 0.03, 0.06), row("plain", 6, 0.01, 0.02), row("plain", 24, None, None, "untrained"),
    row("pre", 2, 2.0, None, "above"), row("pre", 6, 0.5, 1.0), row("pre", 24, 0.25, 0.5),
    row("none", 2, 0.06, 0.12), row("none", 6, 0.01, 0.02), row("none", 24, None, 1e-4, "below"),
]  # fmt: skip


def drawn(rows: list[dict[str, Any]]) -> Axes:
    record = empty()
    record.facts = {"architecture_depths": rows}
    ax: Axes = Figure().subplots()
    return plot_architecture(record, ax=ax)


def test_each_variant_is_a_line_with_its_points() -> None:
    lines = {str(line.get_label()): line for line in drawn(ROWS).lines}
    for variant in ("plain", "pre", "none"):
        x, y = (np.asarray(values, dtype=float) for values in lines[variant].get_data())
        wanted = [(r["depth"], r["stable_lr"]) for r in ROWS if r["variant"] == variant]
        assert x == pytest.approx([depth for depth, _ in wanted], rel=0.05)
        np.testing.assert_array_equal(y, np.array([lr for _, lr in wanted], dtype=float))
    styles = {(lines[v].get_color(), lines[v].get_marker(), lines[v].get_linestyle()) for v in ("plain", "pre", "none")}
    assert len(styles) == 3


@pytest.mark.parametrize(("marker", "label", "point"), [("^", "lies above", (2, 2.0)), ("v", "lies below", (24, 1e-4))])
def test_the_ends_of_the_grid_are_marked(marker: str, label: str, point: tuple[float, float]) -> None:
    ax = drawn(ROWS)
    marks = [
        (float(x), float(y))
        for line in ax.lines
        if line.get_marker() == marker and line.get_linestyle() == "None" and line.get_markersize() == 11
        for x, y in zip(*line.get_data(), strict=True)
    ]
    assert marks == [pytest.approx(point, rel=0.05)]
    legend = ax.get_legend()
    assert legend is not None
    assert any(label in text.get_text() for text in legend.get_texts())


def test_where_nothing_is_learned_a_cross_stands_at_the_top() -> None:
    crosses = [line for line in drawn(ROWS).lines if "learns at no lr" in str(line.get_label())]
    assert [list(line.get_xdata()) for line in crosses] == [[24.0]]
    assert not any("learns at no lr" in str(line.get_label()) for line in drawn(ROWS[:2]).lines)


@pytest.mark.parametrize("rows", [[], [row("plain", 2, None, None, "untrained")], [row("plain", 2, float("nan"))]])
def test_nothing_to_draw_is_said(rows: list[dict[str, Any]]) -> None:
    assert why_not_measured(drawn(rows))


@pytest.mark.parametrize(
    "rows", [[row("plain", 2, 0.5, 1.0)], [row("plain", 2, 1.0, None, "above")], [row("x", 2, None, 0.1, "below")]]
)
def test_a_single_point_is_enough(rows: list[dict[str, Any]]) -> None:
    assert why_not_measured(drawn(rows)) is None
