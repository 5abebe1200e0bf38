"""`judged_runs`: the trials of one stage, each with what was changed and whether it trained stably."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from workbench.curves.judged import judged
from workbench.curves.lr_points import objective
from workbench.curves.trials import RecordLike, TrialVerdict

__all__ = ["judged_runs"]


def judged_runs(record: RecordLike, stages: Collection[str], *, above: float = 0.0) -> list[dict[str, Any]]:
    """Return the finished trials of some stages, in order of their number, as JSON values.

    Each holds trial, stage, seed, lr, warmup_steps, max_grad_norm, total_steps, when and outcome of its loss curve,
    onset_step, lasting (it did not come back, or never trained) and loss (the mean over the last tenth of its steps, O1).
    What can be learned is what the study's full-length trials of the baseline's config show.

    Args:
        record: a study.
        stages: of the trials.
        above: only trials whose lr is larger.
    """
    return [_row(item) for item in judged(record).verdicts(lambda c: c.stage in stages and c.finished and c.lr > above)]


def _row(item: TrialVerdict) -> dict[str, Any]:
    curve = item.curve
    clip = curve.config.get("max_grad_norm")
    return {
        "trial": curve.trial,
        "stage": curve.stage,
        "seed": curve.seed,
        "lr": curve.lr,
        "warmup_steps": int(curve.config.get("warmup_steps") or 0),
        "max_grad_norm": None if clip is None or math.isnan(float(clip)) else float(clip),
        "total_steps": curve.total_steps,
        "when": item.verdict.when,
        "outcome": item.verdict.outcome,
        "onset_step": item.verdict.onset_step,
        "lasting": item.verdict.is_lasting or item.verdict.high,
        "loss": objective(curve),
    }
