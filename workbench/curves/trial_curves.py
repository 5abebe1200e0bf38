"""The trials of a record as loss curves, those that a sweep compares, and the stability verdict of each."""

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from workbench.curves.instability import CurveVerdict, classify_curve, ignorance, planned_rows
from workbench.record.json_values import number
from workbench.record.roles import POINTS

FloatArray = NDArray[np.float64]
_MEMORY = dict.fromkeys(("momentum", "nesterov", "rmsprop"), "momentum") | dict.fromkeys(
    ("adam", "nadam", "adamw"), "beta1"
)
FREE_FIELDS = frozenset({
    "peak_lr", "shared_seed", "per_host_seed", "eval_every_steps", "eval_batch_size", "select", "select_mode", "keep_best",
    "checkpoint_every_steps",
})  # fmt: skip
"""Config fields that may differ between the trials of one learning-rate sweep."""
_BOOKKEEPING = {
    "trial",
    "stage",
    "state",
    "seed",
    "train_examples",
    "steps_run",
    "best_step",
    "best_value",
    "seconds",
    "lanes",
    "gradients",
}


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
        total_steps: planned updates.
        loss, loss_se: training loss before each update and its standard error (NaN where unknown), shape (steps,).
        chance: loss of guessing, None where unknown; who starts above it has learned nothing before being below it.
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

    @cached_property
    def at_steps(self) -> NDArray[np.int64]:
        """The step of each row: 0, 1, 2, ... of our own trainers, fewer of them where a log was written every so many steps."""
        return self.steps["step"].to_numpy(dtype=np.int64)

    @cached_property
    def planned_rows(self) -> int:
        """Rows that a run of the planned length has."""
        return planned_rows(self.at_steps, self.total_steps)

    def column(self, name: str) -> FloatArray:
        """Return a column of `steps`, shape (steps,), NaN where it was not recorded."""
        if name not in self.steps:
            return np.full(len(self.steps), math.nan)
        return self.steps[name].to_numpy(dtype=np.float64, na_value=np.nan)

    def row(self, step: int) -> int:
        """Return the first row that is not before a step."""
        return int(np.searchsorted(self.at_steps, step))

    @property
    def diverged(self) -> bool:
        """The run ended non-finite."""
        return self.loss.size > 0 and not math.isfinite(self.loss[-1])

    @property
    def finished(self) -> bool:
        """The run reached its planned length or became non-finite."""
        return self.diverged or self.loss.size >= self.planned_rows


@dataclass(frozen=True, kw_only=True)
class TrialVerdict:
    """A trial with the verdict on its curve."""

    curve: TrialCurve
    verdict: CurveVerdict

    @property
    def lost(self) -> bool:
        """The run did not come back, or never trained."""
        return self.verdict.is_lasting or self.verdict.high

    def is_lasting(self, lr_star: float | None = None) -> bool:
        """Tell whether the run did not come back; above lr* a run that never trained counts as well."""
        never = self.verdict.high and lr_star is not None and self.curve.lr > lr_star
        return self.verdict.is_lasting or never


def memory_field(optimizer: Any) -> str | None:
    """Return the config field that says how long an update rule averages gradients, None where none is known."""
    return _MEMORY.get(optimizer) if isinstance(optimizer, str) else None


def plain_cell(value: Any) -> Any:
    """Return a cell of a frame as the config had it: pandas writes None as NaN."""
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and math.isnan(value) else value


def equal(one: Any, other: Any) -> bool:
    """Whether two config values are the same, numbers to rounding."""
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return math.isclose(one, other, rel_tol=1e-9)
    return bool(one == other)


def comparable(value: Any) -> Hashable:
    """Return a config value by which trials are grouped: numbers as floats, missing ones as None, all else as text."""
    value = plain_cell(value)
    return float(value) if isinstance(value, (bool, int, float)) else None if value is None else str(value)


def one_batch(loop: Mapping[str, Any] | None) -> bool:
    """Whether a watched loop's facts say that every update saw the same batch, so that its losses have no sampling noise."""
    seen = (loop or {}).get("loaders") or {}
    return bool(seen.get("compared", 0) > 1 and seen["same"] == seen["compared"])


def constant_loss(loop: Mapping[str, Any] | None) -> float | None:
    """Return what the best constant output costs by a watched loop's facts; None where the losses are others, as sums over several passes."""
    loop = loop or {}
    windows = ((loop.get("order") or {}).get("optimizers") or {}).get("0", {}).get("windows") or {}
    trained = (loop.get("data") or {}).get("trained") or {}
    single = bool(windows) and max(windows, key=lambda window: windows[window]).split()[0] == "1"
    return trained.get("constant") if single and trained.get("alone") else None


def curves_of(
    trials: pd.DataFrame, steps: pd.DataFrame, *, chance: float | None, points: Collection[str] = POINTS, same_batch: bool = False
) -> list[TrialCurve]:  # fmt: skip
    """Return every trial that has rows and did not crash, in order of its number.

    Args:
        same_batch: every update saw the same examples, where the trials do not say how many there are (`train_examples` of 0).
    """
    if not len(trials) or not len(steps):
        return []
    frames = {int(str(number)): frame for number, frame in steps.groupby("trial")}
    curves = []
    for row in trials.to_dict("records"):
        rows = frames.get(int(row["trial"]))
        if rows is None or row["state"] == "failed":
            continue
        if not rows["step"].is_monotonic_increasing:  # sorting takes longer than all else here
            rows = rows.sort_values("step")
        loss = rows["loss"].to_numpy(dtype=np.float64)
        known = "loss_se" in rows.columns
        examples = number(row.get("train_examples", math.inf))
        curves.append(TrialCurve(
            trial=int(row["trial"]), stage=str(row["stage"]), point=str(row["stage"]) in points, state=str(row["state"]),
            lr=number(row["peak_lr"]), seed=int(row["seed"]), config={str(k): v for k, v in row.items()}, total_steps=int(row["total_steps"]),
            full_batch=number(row["batch_size"]) >= examples if examples > 0 else same_batch, loss=loss,
            loss_se=rows["loss_se"].to_numpy(dtype=np.float64) if known else np.full(loss.size, np.nan), steps=rows, chance=chance,
        ))  # fmt: skip
    return sorted(curves, key=lambda c: c.trial)


def full_length(curves: Sequence[TrialCurve], config: Mapping[str, Any] | None = None) -> list[TrialCurve]:
    """Return the trials that the sweep compares: full length, equal config but for the lr and the seeds."""
    usable = [c for c in curves if c.point and c.finished]
    wanted = [c for c in usable if config and same_config(c.config, config)]
    if wanted or not usable:
        return wanted
    longest = max(c.total_steps for c in usable)
    long = [c for c in usable if c.total_steps == longest]
    groups = [[c for c in long if same_config(c.config, d.config)] for d in long]
    return max(groups, key=len)


def same_config(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two trials differ in nothing but learning rates and seeds."""
    shared = (set(one) & set(other)) - FREE_FIELDS - _BOOKKEEPING
    return all(comparable(one[k]) == comparable(other[k]) for k in shared)


def judge(curves: Sequence[TrialCurve], peers: Sequence[TrialCurve]) -> list[TrialVerdict]:
    """Classify every curve against what its study shows can be learned in its steps; a longer one has to learn as much at least.

    That is the lowest median loss of the last tenth of so many steps among the `peers`, the full-length trials; fewer than two set no scale.
    """
    longest = max((c.loss.size for c in peers), default=0)
    best_ends: dict[int, float] = {}
    for steps in {min(curve.planned_rows, longest) for curve in curves} if len(peers) > 1 else ():
        tail = max(1, round(0.1 * steps))
        ends = [float(np.median(c.loss[steps - tail : steps])) for c in peers if c.loss.size >= steps]
        best_ends |= {steps: min(finite)} if (finite := [e for e in ends if math.isfinite(e)]) else {}
    verdicts = []
    for curve, start in zip(curves, initial_losses(curves, peers), strict=True):
        best_end = best_ends.get(min(curve.planned_rows, longest))
        verdict = classify_curve(
            curve.loss, loss_se=curve.loss_se, full_batch=curve.full_batch, total_steps=curve.total_steps, memory=curve.memory,
            loss_ref=start, chance=curve.chance, study_best_end=best_end, at=curve.at_steps,
            study_progress=None if best_end is None else ignorance(start, curve.chance) - best_end,
        )  # fmt: skip
        verdicts.append(TrialVerdict(curve=curve, verdict=verdict))
    return verdicts


def initial_losses(curves: Sequence[TrialCurve], peers: Sequence[TrialCurve], *, noise_sds: float = 6.0) -> list[float]:
    """Return each curve's loss before the first update: on minibatches the mean over the seeds of the peers, where they agree.
    Seeds agree when they lie within `noise_sds` standard errors (rule of thumb).
    """
    by_seed = {c.seed: float(c.loss[0]) for c in peers if c.loss.size and math.isfinite(c.loss[0])}
    found = []
    for curve in curves:
        own = float(curve.loss[0]) if curve.loss.size else math.nan
        if not curve.full_batch and curve.loss.size and math.isfinite(curve.loss_se[0]):
            mean = float(np.mean(list({**by_seed, curve.seed: own}.values())))
            own = mean if abs(mean - own) <= noise_sds * curve.loss_se[0] else own
        found.append(own)
    return found
