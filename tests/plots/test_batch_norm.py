"""The figures of batch norm: what they draw, and what they say where there is nothing."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import pytest

from tests.helpers.simulated_norms import row, study
from tests.helpers.simulated_records import record
from workbench.findings.diagnosis import Diagnosis, Finding
from workbench.plots.style import why_not_measured
from workbench.record.json_values import to_json
from workbench.topics.batch_norm.diagnose import diagnose_batch_norm
from workbench.topics.batch_norm.figures import plot_batch_norm, plot_batch_norm_devices

ARMS: dict[int | None, list[float]] = {8: [0.6, 0.7], 32: [0.5, 0.52], None: [0.55, 0.55]}
DEVICES = [row(k, shards=kind, spread=0.01 * k) for kind in ("dealt", "sorted") for k in (1, 2, 8)]


@pytest.fixture(autouse=True)
def close_figures() -> Any:
    yield
    plt.close("all")


def test_each_arm_lies_at_its_mean_and_the_whole_batch_is_marked() -> None:
    ax = plot_batch_norm(study(ARMS))
    bars = next(c for c in ax.containers if c.get_label() == "statistics from a subsample")
    line: Any = bars[0]
    assert line.get_ydata().tolist() == pytest.approx([0.65, 0.51, 0.55])
    assert [round(x / 0.95) for x in line.get_xdata()] == [8, 32, 128]
    assert [t.get_text() for t in ax.get_xticklabels()] == ["8", "32", "128"]
    assert next(x for x in ax.get_lines() if x.get_label() == "whole batch").get_ydata()[0] == pytest.approx(0.55)


def test_the_distance_of_the_devices_is_drawn_for_each_way_to_shard() -> None:
    ax = plot_batch_norm_devices(study(batch_norm_devices=DEVICES))
    lines = {str(line.get_label()): line for line in ax.get_lines()}
    assert len(lines) == 6
    loss: Any = lines["validation loss, sorted shards"]
    assert list(loss.get_xdata()) == [2, 8]
    assert list(loss.get_ydata()) == pytest.approx([0.02, 0.08])
    assert ax.get_yscale() == "log"


@pytest.mark.parametrize("plot", [plot_batch_norm, plot_batch_norm_devices])
def test_from_a_diagnosis_that_was_read_back(plot: Any) -> None:
    r = study(ARMS, batch_norm_devices=DEVICES)
    found = diagnose_batch_norm(r)
    fields = Finding.__dataclass_fields__
    again = Diagnosis(findings=tuple(Finding(**{n: to_json(getattr(f, n)) for n in fields}) for f in found))
    one, other = plot(r, found), plot(r, again)
    assert [list(a.get_ydata()) for a in one.get_lines()] == [list(b.get_ydata()) for b in other.get_lines()]


@pytest.mark.parametrize("plot", [plot_batch_norm, plot_batch_norm_devices])
def test_where_there_is_nothing_it_says_so(plot: Any) -> None:
    for r in (record([]), study(), record([], facts={"batch_norm": {"layers": 0}})):
        assert why_not_measured(plot(r))
    lost = [float("nan")] * 2
    assert why_not_measured(plot(study({None: lost, 8: lost})))
