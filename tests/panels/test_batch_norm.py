"""The panel of batch norm: sizes that can be counted on paper, and what a study measured at them."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.panels import said
from tests.helpers.simulated_norms import study
from workbench.errors import UsageError
from workbench.topics.batch_norm.panel import batch_norm_panel

ARMS: dict[int | None, list[float]] = {8: [0.6, 0.7], 64: [0.5, 0.53], None: [0.5, 0.4]}


@pytest.mark.parametrize(
    ("hosts", "asked", "words"),
    [
        (1, 64, "256 examples on each: 1 statistic a step from 64 examples. No host needs another's"),
        (4, 64, "64 examples on each: 4 statistics a step from 64 examples each. No host needs another's"),
        (4, 16, "4 statistics a step from 16 examples each"),
        (
            16,
            64,
            "16 examples on each: 4 statistics a step from 64 examples each. A host has too few: synchronise 4 at a time",
        ),
        (16, 256, "1 statistic a step from 256 examples. A host has too few: synchronise 16 at a time"),
    ],
)
def test_who_shares_a_statistic(hosts: int, asked: int, words: str) -> None:
    panel = batch_norm_panel(batch_size=256, live=True)
    panel.controls["hosts"].value, panel.controls["stat_examples"].value = hosts, asked
    assert words in said(panel)
    assert ("synchronise" in said(panel)) == (asked > 256 / hosts)


def test_with_a_study_it_says_what_was_measured_at_that_size() -> None:
    panel = batch_norm_panel(study(ARMS), hosts=1, stat_examples=64, live=True)
    mean, se = np.mean(ARMS[64]), np.std(ARMS[64], ddof=1) / np.sqrt(2)
    assert f"validation/loss {mean:.3g} ± {se:.3g} over 2 seeds" in said(panel)
    panel.controls["stat_examples"].value = 16
    assert "No trial had statistics from 16 examples: wb.BatchNormStudy(stat_examples=[16])" in said(panel)


@pytest.mark.parametrize("size", [1, 0, -8, 2.5, True])
def test_a_batch_without_a_variance_is_refused(size: float) -> None:
    with pytest.raises(UsageError, match="must be an integer of at least 2"):
        batch_norm_panel(batch_size=size)  # type: ignore[arg-type]
