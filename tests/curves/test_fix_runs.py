from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.helpers.simulated_records import record, trial
from workbench.curves.judged import is_harmful, judged, judged_runs
from workbench.curves.sweep import LRPoint, SweepTable


def run(level, total=200):
    return level + (2.3 - level) * np.exp(-np.arange(total) / 20)


BLOWN = np.r_[2.3, 50.0, np.inf]


def study(fix_loss=None, lr=1.5):
    trials = [trial(run(0.9), 0.1), trial(run(0.5), 0.5), trial(BLOWN, 1.0)]
    if fix_loss is not None:
        trials.append(trial(fix_loss, lr, stage="fix", warmup_steps=20))
    return record(trials, total_steps=200)


@pytest.mark.parametrize(("loss", "harmful"), [
    (None, None), (run(0.3), True), (run(0.499), False), (run(0.7), False), (BLOWN, False),
])  # fmt: skip
def test_harmful_means_that_a_fix_beats_the_loss_at_lr_star(loss, harmful):
    r = study(loss)
    assert is_harmful(judged(r).sweep(), judged_runs(r, ["fix"], above=0.75)) is harmful


def point(
    loss: float, *, lr: float = 0.5, se: float = 0.0, losses: tuple[float, ...] = (), seeds: tuple[int, ...] = (0,)
) -> LRPoint:
    return LRPoint(
        lr=lr, loss=loss, loss_se=se, above_best=0.0, above_best_se=0.0, seeds=seeds, losses=losses or (loss,),
        outcomes=("none",) * len(seeds), lasting=0, trials=tuple(range(len(seeds))),
    )  # fmt: skip


def table(best: LRPoint, *, progress: float) -> SweepTable:
    return SweepTable(
        points=(best,), noise_free=False, memory=0.0, loss_ref=best.loss + progress, progress=progress, learned=True,
        total_steps=200,
    )  # fmt: skip


def fix(loss: float, *, seed: int = 0, lasting: bool = False) -> dict[str, Any]:
    return {"loss": loss, "seed": seed, "lasting": lasting}


MARGINS = {
    "noise_sds": (point(1.0, se=0.05), 1.5, 0.1),  # 2 standard errors; the others ask for 0.02 and 0.015
    "loss_tolerance": (point(1.0), 1.5, 0.02),  # 2 % of the loss; what was learned asks for 0.015
    "loss_tolerance of little progress": (point(1.0), 0.5, 0.01),  # 2 % of what was learned, where that is less
    "material_frac": (point(1.0), 10.0, 0.1),  # 1 % of what was learned; the loss asks for 0.02
}


@pytest.mark.parametrize("name", MARGINS)
def test_each_margin_alone_decides(name: str) -> None:
    """In each case one margin is the widest: a gain just inside is nothing, a gain just outside is harm."""
    best, progress, margin = MARGINS[name]
    known = table(best, progress=progress)
    assert is_harmful(known, [fix(best.loss - 0.99 * margin)]) is False
    assert is_harmful(known, [fix(best.loss - 1.01 * margin)]) is True
    without = {name.split()[0]: 0.0}
    assert is_harmful(known, [fix(best.loss - 0.99 * margin)], **without) is True, "without it the next one decides"


def test_a_fix_is_held_against_its_own_seed() -> None:
    known = table(point(1.0, losses=(0.8, 1.2), seeds=(0, 1)), progress=1.5)
    assert is_harmful(known, [fix(0.9, seed=0)]) is False
    assert is_harmful(known, [fix(0.9, seed=1)]) is True
    assert is_harmful(known, [fix(0.9, seed=7)]) is True, "a seed that lr* was not run with meets the mean"


def test_one_fix_that_helps_is_enough_and_one_that_stays_unstable_is_none() -> None:
    known = table(point(1.0), progress=1.5)
    assert is_harmful(known, [fix(1.1), fix(0.5)]) is True
    assert is_harmful(known, [fix(0.5, lasting=True)]) is False
