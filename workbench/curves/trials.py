"""The trials of a record as curves, the scale of their study, and the stability verdict of each."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from workbench.curves.classify import classify_curve, ignorance
from workbench.curves.rises import USUAL, CurveThresholds, CurveVerdict
from workbench.record.roles import POINTS

FloatArray = NDArray[np.float64]

_MEMORY = dict.fromkeys(("momentum", "nesterov", "rmsprop"), "momentum") | dict.fromkeys(
    ("adam", "nadam", "adamw"), "beta1"
)

FREE_FIELDS = frozenset(
    [
        "peak_lr",
        "shared_seed",
        "per_host_seed",
        "eval_every_steps",
        "eval_batch_size",
        "select",
        "select_mode",
        "keep_best",
        "checkpoint_every_steps",
    ]
)
"""Config fields that may differ between the trials of one learning-rate sweep."""


class RecordLike(Protocol):
    """What a diagnosis reads of a study or of a single trial."""

    @property
    def trials(self) -> pd.DataFrame: ...  # noqa: D102
    @property
    def steps(self) -> pd.DataFrame: ...  # noqa: D102
    @property
    def evals(self) -> pd.DataFrame: ...  # noqa: D102
    @property
    def workload(self) -> str: ...  # noqa: D102
    @property
    def command(self) -> str | None: ...  # noqa: D102
    @property
    def config(self) -> dict[str, Any]: ...  # noqa: D102
    @property
    def facts(self) -> dict[str, Any]: ...  # noqa: D102
    @property
    def path(self) -> Path: ...  # noqa: D102


@dataclass(frozen=True, kw_only=True)
class TrialCurve:
    """One trial's training curve.

    Attributes:
        trial: its number.
        stage: what it was run for.
        state: "complete", "diverged", "failed", "stopped" or "running".
        lr: peak learning rate.
        seed: shared seed.
        config: every config field.
        total_steps: planned updates.
        full_batch: a step sees all training examples.
        loss: training loss before each update, shape (steps,).
        loss_se: its standard error, shape (steps,), NaN where unknown.
        chance: loss of guessing, None where unknown; who starts above it has learned nothing before being below it.
        steps: the trial's rows of the record, for what else was measured.
    """

    trial: int
    stage: str
    point: bool
    state: str
    lr: float
    seed: int
    config: Mapping[str, Any]
    total_steps: int
    full_batch: bool
    loss: FloatArray
    loss_se: FloatArray
    steps: pd.DataFrame
    chance: float | None = None

    @property
    def memory(self) -> float:
        """Momentum or beta1 of the optimizer; 0.9 for an optimizer of the user's own."""
        name = str(self.config.get("optimizer", "sgd"))
        field = memory_field(name)
        return (0.0 if name == "sgd" else 0.9) if field is None else float(self.config.get(field, 0.9))

    @property
    def diverged(self) -> bool:
        """The run ended non-finite."""
        return self.loss.size > 0 and not math.isfinite(self.loss[-1])

    @property
    def finished(self) -> bool:
        """The run reached its planned length or became non-finite."""
        return self.diverged or self.loss.size >= self.total_steps


@dataclass(frozen=True, kw_only=True)
class TrialVerdict:
    """A trial with the verdict on its curve."""

    curve: TrialCurve
    verdict: CurveVerdict

    def is_lasting(self, lr_star: float | None = None) -> bool:
        """Tell whether the run did not come back; above lr* a run that never trained counts as well."""
        never = self.verdict.high and lr_star is not None and self.curve.lr > lr_star
        return self.verdict.is_lasting or never


def memory_field(optimizer: Any) -> str | None:
    """Return the config field that says how long an update rule averages gradients, None where it has none that is known."""
    return _MEMORY.get(optimizer) if isinstance(optimizer, str) else None


def curves_of(
    trials: pd.DataFrame, steps: pd.DataFrame, *, chance: float | None, points: Collection[str] = POINTS
) -> list[TrialCurve]:
    """Return every trial that has rows and did not crash, in order of its number.

    Args:
        trials: frame of a record.
        steps: another.
        chance: loss of guessing, None where unknown.
        points: roles whose trials are points of a sweep.
    """
    if not len(trials) or not len(steps):
        return []
    rows = {int(str(number)): frame for number, frame in steps.groupby("trial")}
    kept = [row for row in trials.to_dict("records") if int(row["trial"]) in rows and row["state"] != "failed"]
    found = [_curve({str(k): v for k, v in row.items()}, rows[int(row["trial"])], chance, points) for row in kept]
    return sorted(found, key=lambda c: c.trial)


def _curve(row: Mapping[str, Any], steps: pd.DataFrame, chance: float | None, points: Collection[str]) -> TrialCurve:
    if not steps["step"].is_monotonic_increasing:  # a record's are sorted, and sorting takes longer than all else here
        steps = steps.sort_values("step")
    loss = steps["loss"].to_numpy(dtype=np.float64)
    known = "loss_se" in steps.columns
    return TrialCurve(
        trial=int(row["trial"]),
        stage=str(row["stage"]),
        point=str(row["stage"]) in points,
        state=str(row["state"]),
        lr=float(row["peak_lr"]),
        seed=int(row["seed"]),
        config=row,
        total_steps=int(row["total_steps"]),
        full_batch=float(row["batch_size"]) >= float(row.get("train_examples", math.inf)),
        loss=loss,
        loss_se=steps["loss_se"].to_numpy(dtype=np.float64) if known else np.full(loss.size, np.nan),
        steps=steps,
        chance=chance,
    )


def full_length(curves: Sequence[TrialCurve], config: Mapping[str, Any] | None = None) -> list[TrialCurve]:
    """Return the trials that the sweep compares: full length, equal config but for the lr and the seeds.

    Args:
        curves: all trials of the record.
        config: the baseline's; None, or one that no trial has, takes the config that most of the longest trials share.
    """
    usable = [c for c in curves if c.point and c.finished]
    wanted = [c for c in usable if config and _same_config(c.config, config)]
    if wanted or not usable:
        return wanted
    longest = max(c.total_steps for c in usable)
    long = [c for c in usable if c.total_steps == longest]
    groups = [[c for c in long if _same_config(c.config, d.config)] for d in long]
    return max(groups, key=len)


def _same_config(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    bookkeeping = {
        "trial",
        "stage",
        "state",
        "seed",
        "train_examples",
        "steps_run",
        "best_step",
        "best_value",
        "seconds",
    }
    shared = (set(one) & set(other)) - FREE_FIELDS - bookkeeping
    return all(_plain(one[k]) == _plain(other[k]) for k in shared)


def _plain(value: Any) -> Hashable:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    return float(value) if isinstance(value, (bool, int, float, np.number)) else str(value)


@dataclass(frozen=True, kw_only=True)
class StudyScale:
    """What a study shows can be learned in a given number of steps.

    Attributes:
        best_end: lowest end loss of its full-length trials at that length.
        steps: the length.
    """

    best_end: float
    steps: int


def study_scale(curves: Sequence[TrialCurve], steps: int, *, tail_frac: float = 0.1) -> StudyScale | None:
    """Return the lowest loss that the trials reach in `steps` steps; None if none of them ran that long.

    Args:
        tail_frac: the end loss is the median of this share of the steps.
    """
    tail = max(1, round(tail_frac * steps))
    ends = [float(np.median(c.loss[steps - tail : steps])) for c in curves if c.loss.size >= steps]
    finite = [e for e in ends if math.isfinite(e)]
    return StudyScale(best_end=min(finite), steps=steps) if finite else None


def judge(
    curves: Sequence[TrialCurve], peers: Sequence[TrialCurve], thresholds: CurveThresholds = USUAL
) -> list[TrialVerdict]:
    """Classify every curve against the scale that its study sets at its length; a longer one has to learn as much at least.

    Args:
        peers: the full-length trials of the study; fewer than two set no scale.
    """
    verdicts = []
    longest = max((c.loss.size for c in peers), default=0)
    lengths = {min(curve.total_steps, longest) for curve in curves}
    scales = {steps: study_scale(peers, steps) if len(peers) > 1 else None for steps in lengths}
    starts = _starts(peers)
    for curve in curves:
        scale = scales[min(curve.total_steps, longest)]
        start = _initial_loss(curve, starts)
        verdict = classify_curve(
            curve.loss, loss_se=curve.loss_se, full_batch=curve.full_batch, total_steps=curve.total_steps,
            memory=curve.memory, loss_ref=start,
            chance=curve.chance,
            study_progress=None if scale is None else ignorance(start, curve.chance) - scale.best_end,
            study_best_end=None if scale is None else scale.best_end,
            thresholds=thresholds,
        )  # fmt: skip
        verdicts.append(TrialVerdict(curve=curve, verdict=verdict))
    return verdicts


def initial_loss(curve: TrialCurve, peers: Sequence[TrialCurve], *, noise_sds: float = 6.0) -> float:
    """Return the loss before the first update: for a minibatch the mean over the seeds, where they agree.

    Args:
        noise_sds: seeds agree when they lie within this many standard errors (rule of thumb).
    """
    return _initial_loss(curve, _starts(peers), noise_sds=noise_sds)


def initial_losses(peers: Sequence[TrialCurve]) -> dict[int, float]:
    """Return `initial_loss` of the last trial under each seed."""
    starts = _starts(peers)
    return {curve.seed: _initial_loss(curve, starts) for curve in peers}


def _starts(peers: Sequence[TrialCurve]) -> dict[int, float]:
    """The first loss under each seed, where it is finite."""
    return {c.seed: float(c.loss[0]) for c in peers if c.loss.size and math.isfinite(c.loss[0])}


def _initial_loss(curve: TrialCurve, starts: Mapping[int, float], *, noise_sds: float = 6.0) -> float:
    own = float(curve.loss[0]) if curve.loss.size else math.nan
    if curve.full_batch or not curve.loss.size or not math.isfinite(curve.loss_se[0]):
        return own
    by_seed = {**starts, curve.seed: own}
    mean = float(np.mean(list(by_seed.values())))
    return mean if abs(mean - own) <= noise_sds * curve.loss_se[0] else own
