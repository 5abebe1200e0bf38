"""What the figures of hosts show: who waits, who trains on what, who reads how much."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from tests.helpers.host_facts import EXAMPLES, Seen, job
from workbench.plots.style import BAD, BASELINE, GOOD, why_not_measured
from workbench.topics.hosts.diagnose import diagnose_hosts
from workbench.topics.hosts.figures import plot_bytes_read, plot_hosts, plot_shards


@pytest.fixture(autouse=True)
def close_figures() -> Iterator[None]:
    yield
    plt.close("all")


def blank() -> Axes:
    return Figure().subplots()


def rank(seen: Seen, number: int) -> dict[str, Any]:
    return seen.facts["hosts"]["ranks"][number]


def widths(ax: Axes) -> list[float]:
    return [patch.get_width() for patch in ax.patches]  # type: ignore[attr-defined]


def test_busy_and_waiting_make_up_the_step() -> None:
    ax = plot_hosts(job(3), ax=blank())
    busy, waiting = widths(ax)[:3], widths(ax)[3:]
    assert np.add(busy, waiting) == pytest.approx([20.0] * 3)  # ms
    assert busy[0] == pytest.approx(1e3 * np.median(rank(job(3), 0)["times"]["busy_s"]))
    assert [t.get_text() for t in ax.get_yticklabels()] == ["0", "1", "2"]


def test_the_straggler_is_red_where_the_diagnosis_warns_of_it_and_nowhere_else() -> None:
    seen = job()
    rank(seen, 1)["times"]["busy_s"] = [0.018] * 19
    colors = [to_hex(p.get_facecolor()) for p in plot_hosts(seen, diagnose_hosts(seen), ax=blank()).patches[:2]]
    assert colors == [GOOD, BAD]
    healthy = plot_hosts(job(), diagnose_hosts(job()), ax=blank()).patches[:2]
    assert {to_hex(p.get_facecolor()) for p in healthy} == {GOOD}


def drawn(ax: Axes) -> dict[tuple[float, str], set[int]]:
    """Positions by row and colour."""
    return {
        (line.get_ydata()[0], str(line.get_color())): {int(x) for x in line.get_xdata()}  # type: ignore[index]
        for line in ax.lines
        if len(line.get_xdata())  # type: ignore[arg-type]
    }


def test_each_example_is_drawn_in_the_row_of_its_host() -> None:
    found = drawn(plot_shards(job(), ax=blank()))
    first = [set(rank(job(), r)["passes"][0]["indices"]) for r in range(2)]
    assert found == {(0.0, GOOD): first[0], (1.0, GOOD): first[1]}


def test_examples_on_two_hosts_are_red_and_those_on_none_have_a_row() -> None:
    seen = job()
    for number in range(2):
        p = rank(seen, number)["passes"][0]
        p["indices"] = [i for i in p["indices"] if i not in (0, 1, 2)] + [0]
    found = drawn(plot_shards(seen, ax=blank()))
    assert found[0.0, BAD] == found[1.0, BAD] == {0}
    assert found[2.0, BASELINE] == {1, 2}


def test_the_legend_of_examples_is_no_hairline() -> None:
    keys = plot_shards(job(), ax=blank()).get_legend().legend_handles  # type: ignore[union-attr]
    assert [(k.get_marker(), k.get_color()) for k in keys] == [("s", GOOD), ("s", BAD)]  # type: ignore[union-attr]


def test_data_sets_of_their_own_cannot_be_drawn() -> None:
    seen = job()
    for number in range(2):
        rank(seen, number)["passes"][0]["dataset"]["hash"] = f"own{number}"
        rank(seen, number)["passes"][2]["dataset"]["hash"] = f"own{number}"
    assert why_not_measured(plot_shards(seen, ax=blank()))


@pytest.mark.parametrize("facts", [{}, {"hosts": {"ranks": []}}])
@pytest.mark.parametrize("figure", [plot_hosts, plot_shards])
def test_nothing_to_draw_says_so(figure: Any, facts: dict[str, Any]) -> None:
    assert why_not_measured(figure(Seen(facts), ax=blank()))


def test_times_that_are_no_numbers_are_left_out() -> None:
    seen = job()
    rank(seen, 0)["times"]["busy_s"] = [float("nan")] * 19
    assert len(widths(plot_hosts(seen, ax=blank()))) == 2
    rank(seen, 1)["times"] = {"busy_s": [], "step_s": []}
    assert why_not_measured(plot_hosts(seen, ax=blank()))


def test_bytes_and_rates_are_those_of_the_table() -> None:
    table = pd.DataFrame({
        "files": ["sharded"] * 2 + ["all"] * 2, "host": [0, 1] * 2, "bytes_read": [1e6, 2e6, 3e6, 3e6],
        "examples": [10, 20, 15, 15], "seconds": [1.0, 2.0, 5.0, 6.0],
    })  # fmt: skip
    ax = plot_bytes_read(table, ax=blank())
    assert widths(ax) == pytest.approx([1.0, 2.0, 3.0, 3.0])  # MB
    labels = [t.get_text() for t in ax.get_legend().get_texts()]  # type: ignore[union-attr]
    assert labels == ["each its own files: 3 MB together", "every host all files: 6 MB together"]
    assert why_not_measured(plot_bytes_read(table[:0], ax=blank()))
    assert EXAMPLES == 40
