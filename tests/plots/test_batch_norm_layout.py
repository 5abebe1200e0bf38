"""The picture of one step: a row a host, as long as its examples, one look a statistic."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from workbench.topics.batch_norm.figures import plot_batch_norm_layout
from workbench.topics.batch_norm.replicas import statistics_layout


def rows(ax: Axes) -> list[Rectangle]:
    return [patch for patch in ax.patches if isinstance(patch, Rectangle) and patch.get_x() == 0]


def blank() -> Axes:
    return Figure().subplots()


def test_hosts_that_share_a_statistic_look_alike() -> None:
    ax = plot_batch_norm_layout(statistics_layout(64, 8, 16), ax=blank())
    by_host = sorted(rows(ax), key=lambda row: row.get_y())
    looks = [(row.get_facecolor(), row.get_hatch()) for row in by_host]
    assert [row.get_width() for row in by_host] == [8] * 8
    assert [looks[k] == looks[k + 1] for k in range(0, 8, 2)] == [True] * 4
    assert len(set(looks)) == 4


def test_examples_in_no_statistic_are_pale() -> None:
    ax = plot_batch_norm_layout(statistics_layout(64, 2, 8), ax=blank())
    assert [row.get_width() for row in rows(ax)] == [8, 8]
    pale = [patch for patch in ax.patches if isinstance(patch, Rectangle) and patch.get_x() == 8]
    assert [patch.get_width() for patch in pale] == [24, 24]
    assert ax.get_legend() is not None


def test_the_title_counts() -> None:
    assert (
        plot_batch_norm_layout(statistics_layout(64, 8, 16), ax=blank()).get_title(loc="left")
        == "4 statistics of 16 examples, 2 hosts together"
    )
    assert (
        plot_batch_norm_layout(statistics_layout(64, 1, None), ax=blank()).get_title(loc="left")
        == "1 statistic of 64 examples"
    )
