"""`JudgedStudy`: a study with its frames read once and each of its curves judged once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from workbench.curves.sweep import SweepTable, sweep_of_curves
from workbench.curves.trials import RecordLike, TrialCurve, TrialVerdict, curves_of, full_length, judge
from workbench.record.roles import POINTS, Role

__all__ = ["JudgedStudy", "judged"]


class JudgedStudy:
    """What a diagnosis reads: the frames of a study, its curves, their verdicts and its learning-rate sweep, each computed once.

    Attributes:
        trials, steps, evals, workload, command, config, facts, path: the record's.
        points: roles whose trials are points of the sweep.
    """

    def __init__(
        self,
        record: RecordLike,
        *,
        trials: pd.DataFrame | None = None,
        config: Mapping[str, Any] | None = None,
        points: Collection[str] = POINTS,
    ) -> None:
        """See a record, or only some of its trials with another config as their baseline's."""
        self.record, self.points = record, frozenset(points)
        self.trials = record.trials if trials is None else trials.reset_index(drop=True)
        self.config = dict(record.config) | dict(config or {})
        self.facts, self.workload, self.command = record.facts, record.workload, record.command
        self._part = trials is not None
        self._verdicts: dict[int, TrialVerdict] = {}
        self._sweeps: dict[tuple[tuple[str, float], ...], SweepTable] = {}

    @property
    def path(self) -> Path:
        """The study's folder."""
        return self.record.path

    @cached_property
    def steps(self) -> pd.DataFrame:
        """One row a step and trial."""
        return self._rows(self.record.steps)

    @cached_property
    def evals(self) -> pd.DataFrame:
        """One row an evaluated metric."""
        return self._rows(self.record.evals)

    def _rows(self, frame: pd.DataFrame) -> pd.DataFrame:
        return frame[frame["trial"].isin(self.trials["trial"] if len(self.trials) else ())] if self._part else frame

    @cached_property
    def curves(self) -> list[TrialCurve]:
        """Every trial that has rows and did not crash, in order of its number."""
        return curves_of(self.trials, self.steps, chance=self.facts.get("chance_loss"), points=self.points)

    @cached_property
    def full_length(self) -> list[TrialCurve]:
        """The trials that the sweep compares: full length, equal config but for the lr and the seeds."""
        return full_length(self.curves, self.config)

    def curve(self, trial: int) -> TrialCurve | None:
        """Return the curve of a trial; None where it has no rows or crashed."""
        return next((curve for curve in self.curves if curve.trial == trial), None)

    def verdicts(self, where: Callable[[TrialCurve], bool]) -> list[TrialVerdict]:
        """Return the curves for which `where` holds, each judged against what the full-length trials show can be learned."""
        wanted = [curve for curve in self.curves if where(curve)]
        new = [curve for curve in wanted if curve.trial not in self._verdicts]
        self._verdicts |= {item.curve.trial: item for item in judge(new, self.full_length)}
        return [self._verdicts[curve.trial] for curve in wanted]

    def sweep(self, **settings: float) -> SweepTable:
        """Return the points of the learning-rate sweep; see `sweep_of_curves` for the settings."""
        key = tuple(sorted(settings.items()))
        if key not in self._sweeps:
            self._sweeps[key] = sweep_of_curves(self.full_length, **settings)  # type: ignore[arg-type]
        return self._sweeps[key]

    def role(self, role: Role) -> JudgedStudy:
        """Return the trials of `role` as a sweep of their own length, their config that of the first of them."""
        trials = self.trials[self.trials["stage"] == role]
        first = {str(k): v for k, v in trials.iloc[0].items() if k in self.config} if len(trials) else {}
        return JudgedStudy(self.record, trials=trials, config=first, points={role})


def judged(record: RecordLike) -> JudgedStudy:
    """Return a record as a `JudgedStudy`; one that is already comes back as it is."""
    return record if isinstance(record, JudgedStudy) else JudgedStudy(record)
