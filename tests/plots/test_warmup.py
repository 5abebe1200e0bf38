"""The marks in the picture are the runs of the record."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tests.helpers.simulated_records import record, trial
from workbench.plots.style import why_not_measured
from workbench.topics.warmup.diagnose import diagnose_warmup
from workbench.topics.warmup.figures import plot_warmup

T = np.arange(400)
FALLING = 2.3 * np.exp(-T / 40)
LATE = np.r_[FALLING, np.full(40, 9.0)]


def blank() -> Axes:
    return Figure().subplots()


def warmup(loss, steps, total, *, lr=1.0, stage="warmup"):
    return trial(loss, lr, stage=stage, warmup_steps=steps, total_steps=total)


def study(*tried):
    facts = {"warmup": {"unstable_lr": 0.1, "cap": 40}}
    return record([trial(FALLING, 0.05, stage="baseline"), trial(FALLING, 0.02), *tried], total_steps=400, facts=facts)


TRIED = (
    warmup(np.r_[2.3, np.inf], 10, 30),
    warmup(FALLING[:60], 20, 60),
    warmup(FALLING[:120], 40, 120),
    warmup(LATE[20:], 20, 420, stage="warmup_full"),
    warmup(np.r_[FALLING, np.full(40, FALLING[-1])], 40, 440, stage="warmup_full"),
    warmup(np.r_[2.3, np.inf], 40, 120, lr=10.0),
)


def drawn(ax: Axes, label: str) -> list[tuple[float, float]]:
    """Points of the one line whose label starts with `label`."""
    (line,) = [line for line in ax.lines if str(line.get_label()).startswith(label)]
    return [(float(x), float(y)) for x, y in zip(*line.get_data(), strict=True)]


@pytest.mark.parametrize("told", [True, False])
def test_every_run_is_marked_by_what_it_showed(told: bool) -> None:
    r = study(*TRIED)
    ax = plot_warmup(r, diagnose_warmup(r) if told else None, ax=blank())
    assert drawn(ax, "short trial trains (2)") == [(20, 1), (40, 1)]
    assert drawn(ax, "short trial does not (2)") == [(10, 1), (40, 10)]
    assert drawn(ax, "full run trains (1)") == [(40, 1)]
    assert drawn(ax, "full run does not (1)") == [(20, 1)]


def test_the_star_stands_at_the_shortest_and_the_gap_reaches_to_the_next_shorter_one() -> None:
    ax = plot_warmup(study(*TRIED), ax=blank())
    assert drawn(ax, "shortest: 40 steps at lr 1") == [(40, 1)]
    assert drawn(ax, "the answer lies between") == [(20, 1), (40, 1)]


def test_the_cap_and_the_unstable_lr_are_drawn() -> None:
    ax = plot_warmup(study(*TRIED), ax=blank())
    assert {x for x, _ in drawn(ax, "cap: 40 steps")} == {40}
    assert {y for _, y in drawn(ax, "unstable without warmup: 0.1")} == {0.1}
    low, high = ax.get_xlim()
    assert low < 10 < 40 < high
    low, high = ax.get_ylim()
    assert low < 0.1 < 10 < high


def test_without_an_answer_there_is_no_star() -> None:
    ax = plot_warmup(study(*TRIED[:1]), ax=blank())
    assert not [line for line in ax.lines if str(line.get_label()).startswith(("shortest", "the answer"))]


def test_no_warmup_has_a_place_and_the_axis_says_so() -> None:
    ax = plot_warmup(
        study(warmup(FALLING[:30], 10, 30), trial(FALLING[:30], 1.0, stage="warmup", total_steps=30)), ax=blank()
    )
    assert drawn(ax, "short trial trains (2)") == [(0.5, 1), (10, 1)]
    assert "0.5 stands for none" in ax.get_xlabel()


def test_a_study_without_warmups_is_not_measured() -> None:
    assert why_not_measured(plot_warmup(study(), ax=blank()))
