"""Trials of a study by role or by config, and whether each trained stably."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from workbench.curves.sweep import SweepTable, objective, sweep_of_curves
from workbench.curves.trial_curves import (
    FREE_FIELDS,
    RecordLike,
    TrialCurve,
    TrialVerdict,
    constant_loss,
    curves_of,
    equal,
    full_length,
    judge,
    one_batch,
    plain_cell,
)
from workbench.record.roles import POINTS, Role


class JudgedStudy:
    """What a diagnosis reads: the frames of a study, its curves, their verdicts and its sweep, each computed once."""

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
        self._sweeps: dict[float, SweepTable] = {}

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
        loop = self.facts.get("loop")
        known = self.facts.get("chance_loss")
        chance = constant_loss(loop) if known is None else known
        return curves_of(self.trials, self.steps, chance=chance, points=self.points, same_batch=one_batch(loop))

    @cached_property
    def full_length(self) -> list[TrialCurve]:
        """The trials that the sweep compares."""
        return full_length(self.curves, self.config)

    def curve(self, trial: int) -> TrialCurve | None:
        """Return the curve of a trial; None where it has no rows or crashed."""
        return next((curve for curve in self.curves if curve.trial == trial), None)

    def verdicts(self, where: Callable[[TrialCurve], bool]) -> list[TrialVerdict]:
        """Return the curves for which `where` holds, judged against what the full-length trials show can be learned."""
        wanted = [curve for curve in self.curves if where(curve)]
        new = [curve for curve in wanted if curve.trial not in self._verdicts]
        self._verdicts |= {item.curve.trial: item for item in judge(new, self.full_length)}
        return [self._verdicts[curve.trial] for curve in wanted]

    def sweep(self, tail_frac: float = 0.1) -> SweepTable:
        """Return the learning-rate sweep, its objective averaged over this share of the steps (O1)."""
        if tail_frac not in self._sweeps:
            self._sweeps[tail_frac] = sweep_of_curves(self.full_length, tail_frac=tail_frac)
        return self._sweeps[tail_frac]

    def role(self, role: Role) -> JudgedStudy:
        """Return the trials of `role` as a sweep of their own length, their config that of the first of them."""
        trials = self.trials[self.trials["stage"] == role]
        first = {str(k): v for k, v in trials.iloc[0].items() if k in self.config} if len(trials) else {}
        return JudgedStudy(self.record, trials=trials, config=first, points={role})


def judged(record: RecordLike) -> JudgedStudy:
    """Return a record as a `JudgedStudy`; one that is already comes back as it is."""
    return record if isinstance(record, JudgedStudy) else JudgedStudy(record)


def is_harmful(
    table: SweepTable,
    fixes: Sequence[Mapping[str, Any]],
    *,
    noise_sds: float = 2.0,
    loss_tolerance: float = 0.02,
    material_frac: float = 0.01,
) -> bool | None:
    """Tell whether a fix makes an unstable lr train well, to a loss clearly below the one at lr*; None when none was tried.

    Args:
        noise_sds: standard errors of the loss at lr* that count as equal.
        loss_tolerance: relative difference that counts as equal (O1).
        material_frac: a gain below this share of what lr* learned costs nobody anything (rule of thumb).
    """
    if not fixes or table.best is None:
        return None
    lowest = table.points[table.best]
    se = lowest.loss_se if math.isfinite(lowest.loss_se) else 0.0
    margin = max(noise_sds * se, loss_tolerance * table.loss_scale, material_frac * table.progress)
    by_seed = dict(zip(lowest.seeds, lowest.losses, strict=True))
    return any(not fix["lasting"] and fix["loss"] < by_seed.get(fix["seed"], lowest.loss) - margin for fix in fixes)


def trials_with(record: RecordLike, fields: Mapping[str, Any], *, seeds: Collection[int] | None = None) -> list[int]:
    """Return the numbers of the trials with these config fields, as far as they have them, under any seed, or one of `seeds`, in order of their seeds."""
    if not len(record.trials):
        return []
    known = set(record.trials) - {"shared_seed", "per_host_seed"}  # a log has few of them
    wanted = {name: value for name, value in fields.items() if name in known}
    rows = [row for row in record.trials.to_dict("records") if seeds is None or int(row["seed"]) in seeds]
    same = [row for row in rows if all(equal(plain_cell(row[n]), v) for n, v in wanted.items())]
    return [int(row["trial"]) for row in sorted(same, key=lambda row: int(row["seed"]))]


def own_trials(record: RecordLike) -> list[int]:
    """Return the numbers of the trials that a person would call theirs: the record's own config, under any seed, however evaluated."""
    fixed = {name: value for name, value in record.config.items() if name not in FREE_FIELDS - {"peak_lr"}}
    return trials_with(record, fixed)


def judged_runs(record: RecordLike, stages: Collection[str], *, above: float = 0.0) -> list[dict[str, Any]]:
    """Return the finished trials of some stages above an lr, in order of their number, as JSON values.

    Each holds trial, stage, seed, lr, warmup_steps, max_grad_norm, total_steps, when and outcome of its loss curve,
    onset_step, lasting (it did not come back, or never trained) and loss (the objective).
    """
    items = judged(record).verdicts(lambda c: c.stage in stages and c.finished and c.lr > above)
    return [
        {
            "trial": item.curve.trial, "stage": item.curve.stage, "seed": item.curve.seed, "lr": item.curve.lr,
            "warmup_steps": int(item.curve.config.get("warmup_steps") or 0),
            "max_grad_norm": None if (clip := plain_cell(item.curve.config.get("max_grad_norm"))) is None else float(clip),
            "total_steps": item.curve.total_steps, "when": item.verdict.when, "outcome": item.verdict.outcome,
            "onset_step": item.verdict.onset_step, "lasting": item.lost, "loss": objective(item.curve),
        }
        for item in items
    ]  # fmt: skip


def failed_when_proved(record: RecordLike) -> float:
    """Return the lowest lr above the baseline's that learned nothing under a fresh seed of a proof; infinite where none did.

    Its best checkpoint is the untrained model there, and that of the baseline is not.
    """
    trials, own = record.trials, record.config
    if "best_step" not in trials or Role.PROOF not in set(trials["stage"]):
        return math.inf
    untrained, baseline = trials["best_step"] == 0, trials["trial"].isin(trials_with(record, own))
    same = trials["trial"].isin(trials_with(record, {k: v for k, v in own.items() if k != "peak_lr"}))
    learned = trials["seed"].isin(trials["seed"][baseline & ~untrained])
    failed = same & untrained & learned & (trials["stage"] == Role.PROOF) & (trials["peak_lr"] > own["peak_lr"])
    return float(trials["peak_lr"][failed].min()) if failed.any() else math.inf
