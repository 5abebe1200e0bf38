"""`role_view`: the trials of one role of a study, seen as a sweep of their own."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from workbench.curves.trials import RecordLike
from workbench.record.roles import Role

__all__ = ["StageView", "role_view", "sweep_of"]


@dataclass(frozen=True, kw_only=True)
class StageView:
    """A part of a record that is a sweep of its own; what a diagnosis reads of a record.

    Attributes:
        trials: of the role, or of the rule.
        steps: their steps.
        evals: their evaluations.
        workload: name of the workload.
        command: what reproduces the study.
        config: the config that the trials share, by its first trial.
        facts: the study's.
        path: the study's folder.
        points: roles whose trials are points of the sweep.
    """

    trials: pd.DataFrame
    steps: pd.DataFrame
    evals: pd.DataFrame
    workload: str
    command: str | None
    config: dict[str, Any]
    facts: dict[str, Any]
    path: Path
    points: frozenset[Role]


def role_view(record: RecordLike, role: Role) -> StageView:
    """Return the trials of `role` as a sweep of their own length."""
    trials = record.trials[record.trials["stage"] == role]
    first = {str(k): v for k, v in trials.iloc[0].items() if k in record.config} if len(trials) else {}
    return sweep_of(record, trials, config=first, points={role})


def sweep_of(
    record: RecordLike, trials: pd.DataFrame, *, config: Mapping[str, Any], points: Collection[Role]
) -> StageView:
    """Return some trials of a record as a sweep of their own.

    Args:
        record: a study.
        trials: rows of its trials.
        config: fields in which they differ from the study's baseline.
        points: roles whose trials are points of the sweep.
    """
    numbers = trials["trial"] if len(trials) else ()
    return StageView(
        trials=trials.reset_index(drop=True),
        steps=record.steps[record.steps["trial"].isin(numbers)],
        evals=record.evals[record.evals["trial"].isin(numbers)],
        workload=record.workload,
        command=record.command,
        config=dict(record.config) | dict(config),
        facts=record.facts,
        path=record.path,
        points=frozenset(points),
    )
