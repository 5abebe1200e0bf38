"""The clipping panel: threshold, clipped share and clipped steps are those of NumPy's percentile, counted by hand."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.helpers.panels import said
from tests.helpers.records import falling, one_trial
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
