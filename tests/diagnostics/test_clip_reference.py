"""Whose norms a threshold is taken from: a stable run without clipping, at the lr that was asked for."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.simulated_records import record, trial
from workbench.curves.clipped_runs import reference_norms, reference_threshold

STEPS = 200
FALLING = 2.3 * np.exp(-np.arange(STEPS) / 40)
BLOWN = np.concatenate([FALLING[:120], np.full(80, 9.0)])


def run(loss=FALLING, lr=0.1, *, scale=1.0, **more):
    norms = scale * (1 + np.random.default_rng(0).pareto(3.0, size=len(loss)))
    return trial(loss, lr, columns={"grad_norm": norms}, **more)


def chosen(trials, **more) -> int | None:
    found = reference_norms(record(trials, **more))
    return None if found is None else found.item.curve.trial


def test_the_baselines_lr_comes_first_and_a_study_may_ask_for_another() -> None:
    trials = [run(lr=0.2), run(lr=0.1), run(lr=0.05)]
    assert chosen(trials, peak_lr=0.1) == 1
    assert chosen(trials, peak_lr=0.1, facts={"clipping_reference_lr": 0.05}) == 2
    assert chosen(trials, peak_lr=0.1, facts={"clipping_reference_lr": 7.0}) == 1


def test_stable_comes_before_the_wanted_lr_and_unclipped_before_clipped() -> None:
    assert chosen([run(BLOWN, lr=0.1), run(lr=0.05)], peak_lr=0.1) == 1
    clipped = run(lr=0.1, max_grad_norm=1.0, stage="clipping")
    assert chosen([clipped, run(lr=0.05)], peak_lr=0.1) == 1
    assert chosen([clipped], peak_lr=0.1, max_grad_norm=1.0) == 0
    found = reference_norms(record([clipped]))
    assert found is not None
    assert found.clipped


def test_short_runs_and_empty_records_have_nothing_to_say() -> None:
    assert chosen([run(stage="lr_range"), run(stage="probe")]) is None
    assert chosen([]) is None
    assert reference_threshold(record([])).reason == "no gradient norm was recorded"


def test_of_a_run_that_blows_up_only_the_steps_before_count() -> None:
    trials = [run(BLOWN, lr=0.1)]
    trials[0]["columns"]["grad_norm"][120:] = 1e6
    found = reference_norms(record(trials))
    assert found is not None
    assert found.first == 20
    assert 115 <= found.end <= 121
    threshold = found.threshold(90.0).threshold
    assert threshold == pytest.approx(np.percentile(found.norms[20 : found.end], 90))
    assert threshold < 10


def test_warmup_is_left_out() -> None:
    found = reference_norms(record([run(warmup_steps=70)], warmup_steps=70))
    assert found is not None
    assert (found.first, found.end) == (70, STEPS)


def test_of_several_seeds_the_first_counts_and_elsewhere_the_lowest_loss() -> None:
    trials = [run(FALLING + 0.1, lr=0.1), run(lr=0.1, seed=1), run(FALLING + 0.1, lr=0.05), run(lr=0.02)]
    assert chosen(trials, peak_lr=0.1) == 0
    assert chosen(trials[2:], peak_lr=0.7) == 1
