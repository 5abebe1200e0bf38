"""`diagnose_periodicity`: a metric that repeats itself by the epoch, and which bug that points to (P2.9, P2.10)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.curves.trial_curves import RecordLike
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.finding import Codes, Finding
from workbench.topics.data.diagnose import diagnose_data
from workbench.topics.periodicity.period import MIN_CYCLES, MIN_POINTS, Period, find_period

Floats = NDArray[np.float64]

CODES = Codes({"evaluation.periodic": "P2.9"})
_finding = partial(CODES.finding, "evaluation.periodic")
PHASES = 24
STAIRCASE = 0.5
"""Share of the pattern within an epoch that a drop at its start and a straight way from there explains (rule of thumb)."""
SAME = 0.1
"""Two periods within a tenth of each other are one (rule of thumb)."""


@dataclass(frozen=True)
class Series:
    """One curve that was looked at: "validation/loss" or "train/loss", say; `epoch` in steps, None where it is unknown."""

    name: str
    trial: int
    steps: Floats
    values: Floats
    epoch: float | None
    found: Period


def periodic_series(record: RecordLike, *, alpha: float = 0.01, trial: int | None = None) -> list[Series]:
    """Return the curves of one trial that can show a period: validation and test metrics, then the training loss.

    Args:
        alpha: false-alarm rate of all curves together.
        trial: whose; None is the baseline, or the trial with most evaluations where the baseline has too few.
    """
    number = _trial(record) if trial is None else trial
    if number is None:
        return []
    curves, epoch = _curves(record, number), _epoch(record, number)
    return [
        Series(name, number, steps, values, epoch, find_period(steps, values, epoch=epoch, alpha=alpha / len(curves)))
        for name, steps, values in curves
    ]


def diagnose_periodicity(record: RecordLike, *, alpha: float = 0.01, trial: int | None = None) -> Diagnosis:
    """Tell whether a metric repeats itself, by how many steps, and why.

    With shuffled data the metrics of a run have no period. A pattern in a validation or test metric points to training data
    that are not shuffled, or to evaluated rows among them; the overlap and the order that `audit_data` or `diagnose` found
    tell which. A pattern in the training loss alone, falling at the start of each epoch, is memory of examples seen before:
    healthy. A schedule with that period explains it as well.

    Args:
        alpha: chance of calling a clean run periodic, all its curves together (measured: tests/benchmarks/periodicity.py).
        trial: whose curves; None is the baseline, or the trial with most evaluations where the baseline has too few.

    Returns:
        `evaluation.periodic`.
    """
    finding = _judge(record, periodic_series(record, alpha=alpha, trial=trial), alpha)
    return Diagnosis.of(record, (finding,))


def _judge(record: RecordLike, series: Sequence[Series], alpha: float) -> Finding:
    if not series:
        return CODES.not_measured("evaluation.periodic", "the record has no trial with a curve")
    epoch = series[0].epoch
    held = [s for s in series if s.name != "train/loss"]
    training = next((s for s in series if s.name == "train/loss"), None)
    kept = ("reason", "p", "period", "harmonic", "epoch_seen", "share", "size")
    evidence: dict[str, Any] = {
        "trial": series[0].trial, "epoch_steps": epoch, "alpha": alpha,
        "series": {s.name: {name: getattr(s.found, name) for name in kept} for s in series},
    }  # fmt: skip
    epochs = max(float(np.ptp(s.steps)) if len(s.steps) else 0.0 for s in series) / epoch if epoch else np.inf
    if epochs < MIN_CYCLES:
        said = f"Does not apply: {epochs:.1f} epochs, and a pattern has to repeat {MIN_CYCLES:g} times to be one"
        return _finding("ok", f"{said}.", evidence=evidence)
    learned = (
        training is not None and training.found.period is not None and epoch is not None
    )  # full batches have no order
    if training is not None and learned and epoch is not None:
        evidence["staircase"] = _staircase(training, epoch)
    periodic = [s for s in held if s.found.period is not None]
    if periodic:
        return _of_validation(record, min(periodic, key=lambda s: s.found.p), evidence)
    if training is not None and learned:
        return _of_training(record, training, evidence)
    return _silent(held, training, epoch, alpha, evidence)


def _of_validation(record: RecordLike, series: Series, evidence: dict[str, Any]) -> Finding:
    """Judge a pattern in a metric of validation or test data."""
    found = series.found
    said = f"{series.name} repeats every {_every(series)}, p = {found.p:.1g}"
    numbers: dict[str, Any] = {"value": found.period, "unit": "steps", "evidence": evidence}
    if _of_schedule(record, series.trial, found):
        evidence["cause"] = "schedule"
        return _finding("ok", f"{said}; so does the learning rate, which explains it.", **numbers)
    data = diagnose_data(record)
    looked = {code: data[code] for code in ("data.unshuffled", "data.weak_shuffle", "data.leakage")}
    bad = {code: each for code, each in looked.items() if each.status in ("warn", "fail")}
    causes = ["leakage"] * ("data.leakage" in bad) + ["shuffling"] * bool(bad.keys() - {"data.leakage"})
    evidence |= {
        "cause": " and ".join(causes) or "unknown",
        "found_in_the_data": {code: each.status for code, each in looked.items()},
    }
    if causes:
        why, advice = (
            " ".join(each.summary for each in bad.values()),
            [line for each in bad.values() for line in each.advice],
        )
        return _finding("fail", f"{said}. {why}", advice=tuple(advice), **numbers)
    unknown = all(each.status == "not_measured" for each in looked.values())
    known = (
        "nobody has looked at the data"
        if unknown
        else "neither overlap of the splits nor a fault of the order was found"
    )
    return _finding(
        "warn", f"{said}; {known}.",
        advice=(
            "Compare the splits and the order of the loader you train with: wb.data.audit(loader, validation=...).",
            "A pattern at another period than the epoch points to something else that repeats: shards, a sampler, a schedule.",
        ), **numbers,
    )  # fmt: skip


def _of_training(record: RecordLike, series: Series, evidence: dict[str, Any]) -> Finding:
    """Judge a pattern in the training loss alone."""
    said = f"The training loss repeats every {_every(series)}, and validation does not"
    numbers: dict[str, Any] = {"value": series.found.period, "unit": "steps", "evidence": evidence}
    if _of_schedule(record, series.trial, series.found):
        evidence["cause"] = "schedule"
        return _finding("ok", f"{said}; so does the learning rate.", **numbers)
    data = diagnose_data(record)
    order = [data[code] for code in ("data.unshuffled", "data.weak_shuffle")]
    bad = next((each for each in order if each.status in ("warn", "fail")), None)
    if bad is not None:
        evidence["cause"] = "shuffling"
        return _finding("warn", f"{said}: poor shuffling. {bad.summary}", advice=tuple(bad.advice), **numbers)
    evidence["cause"] = "memorisation"
    if series.found.harmonic is not None and evidence.get("staircase", 0.0) >= STAIRCASE:
        return _finding("ok", f"{said}: it falls where an epoch begins, as a model does that remembers examples. That is healthy.", **numbers)  # fmt: skip
    if all(each.status == "ok" for each in order):
        return _finding("ok", f"{said}; batches come in another order each epoch, so it is what the model remembers of the last one.", **numbers)  # fmt: skip
    evidence["cause"] = "unknown"
    return _finding(
        "warn", f"{said}, and it is no drop at the start of an epoch: do batches come in the same order each time?",
        advice=("Observe the loader you train with over two epochs: wb.data.audit(loader).",), **numbers,
    )  # fmt: skip


def _silent(
    held: Sequence[Series], training: Series | None, epoch: float | None, alpha: float, evidence: dict[str, Any]
) -> Finding:
    judged = [s for s in held if s.found.reason is None]
    ask = f"Evaluate at least {MIN_POINTS} times, every fixed number of steps."
    if epoch is not None:
        every = max(1, int(epoch / 4.5))
        ask = f"Evaluate every {every} steps, at least {max(MIN_POINTS, int(np.ceil(MIN_CYCLES * epoch / every)) + 2)} times."
    most = max((len(s.values) for s in held), default=MIN_POINTS)
    if most < MIN_POINTS:
        said = f"Does not apply: {most} evaluations are too few for a pattern to show or to mislead"
        return _finding("ok", f"{said}. {ask}", evidence=evidence)
    why = None
    if not judged:
        why = held[0].found.reason if held else "validation was not evaluated"
    elif epoch is not None and not any(s.found.epoch_seen for s in judged):
        why = f"evaluations every {np.median(np.diff(judged[0].steps)):g} steps see the same place of each epoch of {epoch:g}"
    if why is not None:
        return _finding("not_measured", f"Not measured: {why}. {ask}", evidence=evidence)
    names = ", ".join(s.name for s in (*judged, *([] if training is None or training.found.reason else [training])))
    least = min(s.found.p for s in judged)
    return _finding(
        "ok", f"No period in {names} of trial {evidence['trial']} (p = {least:.2g}).", value=least, unit="p", threshold=alpha,
        evidence=evidence,
    )  # fmt: skip


def _every(series: Series) -> str:
    """Return the period and its size in words."""
    period, epoch = float(series.found.period or np.nan), series.epoch
    about = f"{period:.3g} steps" if period < 100 else f"{period:,.0f} steps"
    if epoch is not None:
        about += f" (one epoch of {epoch:g})" if abs(period / epoch - 1) < SAME else f" (an epoch is {epoch:g})"
    return f"{about}, moving by {series.found.size:.2g} (root mean square)"


def _of_schedule(record: RecordLike, number: int, found: Period) -> bool:
    """Tell whether the learning rate has the period, too."""
    steps = record.steps
    if "lr" not in steps or found.period is None:
        return False
    rows = steps[steps["trial"] == number]
    lrs = rows["lr"].to_numpy(dtype=np.float64)
    if len(lrs) < MIN_POINTS or not np.isfinite(lrs).all() or np.ptp(lrs) <= 1e-9 * np.abs(lrs).max():
        return False
    same = find_period(rows["step"].to_numpy(dtype=np.float64), lrs, epoch=found.period)
    return same.period is not None and abs(same.period / found.period - 1) < SAME


def _staircase(series: Series, epoch: float) -> float:
    """Return the share of the pattern within an epoch that a drop at its start explains: 1 is a staircase, 0 none."""
    finite = np.isfinite(series.values)
    steps, values = series.steps[finite], series.values[finite]
    width = max(1, round(epoch / max(float(np.median(np.diff(steps))), 1e-9)))
    if len(values) < 3 * width:
        return 0.0
    kernel = np.ones(width) / width
    trend = np.convolve(values, kernel, mode="valid")
    offset = (width - 1) // 2
    rest = values[offset : offset + len(trend)] - trend
    phase = np.floor(steps[offset : offset + len(trend)] % epoch / epoch * min(PHASES, width)).astype(int)
    profile = np.array([rest[phase == k].mean() for k in range(min(PHASES, width)) if (phase == k).any()])
    if len(profile) < 3 or profile.std() == 0:
        return 0.0
    ramp = np.arange(len(profile)) - (len(profile) - 1) / 2
    correlation = float(np.corrcoef(profile, ramp)[0, 1])
    return correlation**2 if correlation > 0 else 0.0  # above its trend at the end of an epoch, below at the start


def _trial(record: RecordLike) -> int | None:
    """Return the trial to look at: the own config's, evaluated often enough; of a record without one, the one evaluated most.

    A run at another learning rate may swing for reasons of its own.
    """
    trials = record.trials
    if not len(trials):
        return None
    sound = trials[trials["state"] != "diverged"]
    rows = sound if len(sound) else trials
    evals = record.evals
    held = evals[evals["split"] != "train"] if len(evals) else evals
    often = [(int(t), int(held.loc[held["trial"] == t, "step"].nunique())) for t in rows["trial"]]
    enough = [t for t, count in often if count >= MIN_POINTS]
    baseline = [int(t) for t in rows.loc[rows["stage"].isin(["baseline", "trial"]), "trial"]]
    if baseline:
        return next((t for t in baseline if t in enough), baseline[0])
    return max(often, key=lambda pair: pair[1])[0]


def _curves(record: RecordLike, number: int) -> list[tuple[str, Floats, Floats]]:
    curves = []
    evals = record.evals
    rows = evals[evals["trial"] == number] if "trial" in evals else evals
    for (split, metric), part in rows.groupby(["split", "metric"], sort=True) if len(rows) else []:
        if split in ("validation", "test"):
            once = part.drop_duplicates("step", keep="last").sort_values("step")
            curves.append((f"{split}/{metric}", *_numbers(once["step"], once["value"])))
    steps = record.steps
    if "loss" in steps and "trial" in steps:
        own = steps[steps["trial"] == number]
        if len(own):
            curves.append(("train/loss", *_numbers(own["step"], own["loss"])))
    return curves


def _numbers(steps: Any, values: Any) -> tuple[Floats, Floats]:
    return steps.to_numpy(dtype=np.float64), values.to_numpy(dtype=np.float64, na_value=np.nan)


def _epoch(record: RecordLike, number: int) -> float | None:
    """Return the steps of one epoch, the incomplete last batch dropped; None for full batches and where it is unknown."""
    rows = record.trials[record.trials["trial"] == number]
    examples, batch = (
        rows[name].iloc[0] if len(rows) and name in rows else None for name in ("train_examples", "batch_size")
    )
    if not examples or not batch or not np.isfinite(float(examples)):
        return None
    epoch = int(examples) // int(batch)
    return float(epoch) if epoch > 1 else None
