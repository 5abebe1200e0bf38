"""`stage_view`: the trials of one stage of a study, seen as a study of their own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from workbench.curves.trials import RecordLike

__all__ = ["StageView", "stage_view"]


@dataclass(frozen=True, kw_only=True)
class StageView:
    """The part of a record that belongs to one stage; what a diagnosis reads of a record.

    Attributes:
        trials: the stage's trials, counted as points of a sweep.
        steps: their steps.
        evals: their evaluations.
        workload: name of the workload.
        command: what reproduces the study.
        config: the config that the stage's trials share, by its first trial.
        facts: the study's.
        path: the study's folder.
    """

    trials: pd.DataFrame
    steps: pd.DataFrame
    evals: pd.DataFrame
    workload: str
    command: str | None
    config: dict[str, Any]
    facts: dict[str, Any]
    path: Path


def stage_view(record: RecordLike, stage: str) -> StageView:
    """Return the trials of `stage` as a sweep of their own length."""
    table = record.trials
    trials = table[table["stage"] == stage].assign(stage="lr_sweep").reset_index(drop=True)
    numbers = trials["trial"]
    config = dict(record.config)
    if len(trials):
        config |= {str(k): v for k, v in trials.iloc[0].items() if k in config}
    return StageView(
        trials=trials,
        steps=record.steps[record.steps["trial"].isin(numbers)],
        evals=record.evals[record.evals["trial"].isin(numbers)],
        workload=record.workload,
        command=record.command,
        config=config,
        facts=record.facts,
        path=record.path,
    )
