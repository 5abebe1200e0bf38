"""The clipping panel: threshold, clipped share and clipped steps are those of NumPy's percentile, counted by hand."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.helpers.panels import pixels, said
from tests.helpers.records import MemoryRecord, falling, one_trial
from workbench.topics.clipping.diagnose import diagnose_clipping
from workbench.topics.clipping.panel import clipping_panel

NORMS = np.random.default_rng(0).lognormal(size=200)
STEADY = NORMS[20:]
"""Without the first tenth."""


@pytest.mark.parametrize("percentile", [50.0, 75.0, 90.0])
def test_the_words_are_what_numpy_says(percentile: float) -> None:
    panel = clipping_panel(one_trial(NORMS), percentile=percentile, live=True)
    threshold = np.percentile(STEADY, percentile)
    above = [step for step in range(200) if NORMS[step] > threshold]
    words = said(panel)
    assert f"percentile is {threshold:.4g}; it clips {len(above) / 200:.1%}, {len(above)} of 200 steps" in words
    first = re.search(r"steps: (\d+)", words)
    assert first is not None
    assert int(first[1]) == above[0]


def test_few_steps_are_all_named() -> None:
    norms = np.where(np.isin(np.arange(200), [30, 31, 32, 90]), 50.0, NORMS.clip(max=5.0))
    assert said(clipping_panel(one_trial(norms), percentile=98.0, live=True)).endswith("4 of 200 steps: 30 to 32, 90.")


def test_the_threshold_is_that_of_the_diagnosis() -> None:
    record = one_trial(falling(0.02, 200), total_steps=200)
    record.steps = record.steps.assign(grad_norm=NORMS)
    found = diagnose_clipping(record)["clipping.threshold"]
    panel = clipping_panel(record, diagnose_clipping(record), live=True)
    assert found.value is not None
    assert f"percentile is {found.value:.4g}; it clips {found.evidence['clip_frac']:.1%}" in said(panel)


def test_the_slider_cannot_leave_what_a_percentile_is() -> None:
    slider = clipping_panel(one_trial(NORMS), live=True).controls["percentile"]
    slider.value = 1000.0
    assert slider.value == 100.0
    slider.value = -5.0
    assert slider.value == 1.0


def test_at_the_hundredth_percentile_nothing_is_clipped() -> None:
    assert "it clips 0.0%, 0 of 200 steps." in said(
        clipping_panel(one_trial(np.sort(NORMS)), percentile=100.0, live=True)
    )


@pytest.mark.parametrize("norms", [[np.nan] * 30, [0.0] * 30, [0.7] * 30, [1.0]])
def test_poor_norms_make_a_picture_and_words_that_say_so(norms: list[float]) -> None:
    panel = clipping_panel(one_trial(np.array(norms)), live=True)
    assert pixels(panel.picture.value).std() > 0
    assert "no threshold, because" in said(panel)


def test_a_trial_without_norms_says_what_to_run() -> None:
    record = one_trial(NORMS)
    bare = MemoryRecord(record.trials, record.steps.drop(columns="grad_norm"), record.evals, record.config)
    assert "Run wb.ClippingStudy()" in said(clipping_panel(bare, live=True))
