"""What the figures of parameter servers show: bytes by variable, ages by share, rates by workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from tests.helpers.server_facts import UPDATES, block, facts, served, server
from workbench.plots.style import BAD, why_not_measured
from workbench.topics.parameter_server.diagnose import diagnose_parameter_server
from workbench.topics.parameter_server.figures import plot_server_load, plot_staleness, plot_throughput


@pytest.fixture(autouse=True)
def close_figures() -> Iterator[None]:
    yield
    plt.close("all")


def blank() -> Axes:
    return Figure().subplots()


def labels(ax: Axes) -> list[str]:
    return ax.get_legend_handles_labels()[1]


def uneven() -> Any:
    small = block(600, 100, parameters={"1.bias": 10})
    return served(facts(servers=[server(0, lr=block(300, 8, 0.0)), {**server(1), "blocks": {"net@1": small}}]))


def test_bars_are_the_bytes_of_a_step_and_parameters_share_a_block_by_their_values() -> None:
    ax = plot_server_load(uneven(), ax=blank())
    by_label = {bars.get_label(): [bar.get_width() for bar in bars] for bars in ax.containers}  # type: ignore[attr-defined]
    kilobytes = 600 * 1000 / UPDATES / 1e3
    assert by_label["0.weight"] == pytest.approx([kilobytes * 150 / 250, 0])
    assert by_label["0.bias"] == pytest.approx([kilobytes * 100 / 250, 0])
    assert by_label["1.bias"] == pytest.approx([0, 600 * 100 / UPDATES / 1e3])
    assert by_label["lr"] == pytest.approx([300 * 8 / UPDATES / 1e3, 0])
    (mean,) = [line for line in ax.lines if line.get_label() == "mean of the servers"]
    assert next(iter(mean.get_xdata())) == pytest.approx(sum(map(sum, by_label.values())) / 2)
    many = block(parameters={f"{k}.weight": 100 - k for k in range(9)})
    servers = [{**server(k), "blocks": {f"net@{k}": many}} for k in range(2)]
    assert "4 more" in labels(plot_server_load(served(facts(servers=servers)), ax=blank()))


def test_the_overloaded_server_is_marked_where_the_diagnosis_warns_and_nowhere_else() -> None:
    for record, marked in ((uneven(), True), (served(facts()), False)):
        ax = plot_server_load(record, diagnose_parameter_server(record), ax=blank())
        assert any("times the mean" in label for label in labels(ax)) == marked
        assert [line.get_color() for line in ax.lines].count(BAD) == marked


def test_shares_of_the_ages_add_up_and_a_long_tail_shares_the_last_bar() -> None:
    ages = {"0": 60, "2": 30, "500": 10}
    record = served(facts(staleness_steps=[ages, ages]))
    ax = plot_staleness(record, diagnose_parameter_server(record), ax=blank())
    heights = [bar.get_height() for bar in ax.patches]  # type: ignore[attr-defined]
    assert sum(heights) == pytest.approx(1.0)
    assert (heights[0], heights[2], heights[-1]) == pytest.approx((0.6, 0.3, 0.1))
    assert len(heights) == 41
    assert "other workers: 2" in labels(ax)
    assert to_hex(ax.lines[-1].get_color()) == BAD


def test_rates_are_drawn_by_workers_and_saturation_is_ringed() -> None:
    runs = [facts(workers=w, updates=u) for w, u in ((1, 100), (2, 190), (4, 195))]
    ax = plot_throughput(served(*runs, facts(workers=4, updates=600, steps_per_closure="auto")), ax=blank())
    line = next(line for line in ax.lines if line.get_label() == "1 update a closure")
    assert np.allclose(line.get_ydata(), np.array([100, 190, 195]) / 4)
    assert "saturated at 2 workers" in labels(ax)
    assert "as many as pay off (auto)" in labels(ax)
    ideal = next(line for line in ax.lines if line.get_label() == "in proportion to the workers")
    assert list(ideal.get_ydata()) == pytest.approx([25, 100])


@pytest.mark.parametrize("draw", [plot_server_load, plot_staleness, plot_throughput])
def test_without_facts_it_says_so(draw: Any) -> None:
    assert why_not_measured(draw(served(), ax=blank()))


@pytest.mark.parametrize(
    ("draw", "changes"),
    [
        (plot_server_load, {"servers": [{**server(0), "blocks": {"x": block() | {"bytes_in": None}}}]}),
        (plot_server_load, {"servers": []}),
        (plot_staleness, {"staleness_steps": [{}]}),
        (plot_throughput, {"training_s": None}),
        (plot_throughput, {"updates": 0}),
    ],
)  # fmt: skip
def test_unknown_numbers_are_not_measured(draw: Any, changes: dict[str, Any]) -> None:
    assert why_not_measured(draw(served(facts(**changes)), ax=blank()))
