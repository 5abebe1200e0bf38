"""`diagnose_periodicity`: a metric that repeats itself by the epoch, and which bug that points to (P2.9, P2.10)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.curves.trials import RecordLike
from workbench.findings.diagnosis import Diagnosis, Finding, Status
from workbench.topics.data.diagnose import diagnose_data
from workbench.topics.periodicity.period import MIN_CYCLES, MIN_POINTS, Period, find_period

__all__ = ["Series", "diagnose_periodicity", "periodic_series"]

Floats = NDArray[np.float64]

CODE, CLAUSE = "evaluation.periodic", "P2.9"
PHASES = 24
STAIRCASE = 0.5
"""Share of the pattern within an epoch that a drop at its start and a straight way from there explains (rule of thumb)."""
SAME = 0.1
"""Two periods within a tenth of each other are one (rule of thumb)."""


@dataclass(frozen=True)
class Series:
    """One curve that was looked at.

    Attributes:
        name: "validation/loss" or "train/loss".
        trial: whose.
        steps: shape (points,).
        values: shape (points,).
        epoch: steps per epoch; None where it is unknown.
        found: what `find_period` says.
    """

    name: str
    trial: int
    steps: Floats
    values: Floats
    epoch: float | None
    found: Period


def periodic_series(record: RecordLike, *, alpha: float = 0.01, trial: int | None = None) -> list[Series]:
    """Return the curves of one trial that can show a period: validation and test metrics, then the training loss.

    Args:
        record: a study or a trial.
        alpha: false-alarm rate of all curves together.
        trial: whose; None is the baseline, or the trial with most evaluations where the baseline has too few.
    """
    number = _trial(record) if trial is None else trial
    curves = [] if number is None else _curves(record, number)
    epoch = None if number is None else _epoch(record, number)
    count = max(1, len(curves))
    return [
        Series(
            name, int(number or 0), steps, values, epoch, find_period(steps, values, epoch=epoch, alpha=alpha / count)
        )
        for name, steps, values in curves
    ]


def diagnose_periodicity(record: RecordLike, *, alpha: float = 0.01, trial: int | None = None) -> Diagnosis:
    """Tell whether a metric repeats itself, by how many steps, and why.

    With shuffled data the metrics of a run have no period. A pattern in a validation or test metric points to training data
    that are not shuffled, or to evaluated rows among them; the overlap and the order that `audit_data` or `diagnose` found
    tell which. A pattern in the training loss alone, falling at the start of each epoch, is memory of examples seen before:
    healthy. A schedule with that period explains it as well.

    Args:
        record: a study or a trial.
        alpha: chance of calling a clean run periodic, all its curves together (measured: tests/benchmarks/periodicity.py).
        trial: whose curves; None is the baseline, or the trial with most evaluations where the baseline has too few.

    Returns:
        `evaluation.periodic`.
    """
    series = periodic_series(record, alpha=alpha, trial=trial)
    finding = _judge(record, series, alpha)
    return Diagnosis.of(record, (finding,))


def _judge(record: RecordLike, series: Sequence[Series], alpha: float) -> Finding:
    if not series:
        return _finding("not_measured", "Not measured: the record has no trial with a curve.")
    number = series[0].trial
    epoch = _epoch(record, number)
    held = [s for s in series if s.name != "train/loss"]
    periodic = [s for s in held if s.found.period is not None]
    training = next((s for s in series if s.name == "train/loss"), None)
    evidence: dict[str, Any] = {
        "trial": number, "epoch_steps": epoch, "alpha": alpha,
        "series": {s.name: _shown(s.found) for s in series},
    }  # fmt: skip
    epochs = max(float(np.ptp(s.steps)) if len(s.steps) else 0.0 for s in series) / epoch if epoch else np.inf
    if epochs < MIN_CYCLES:
        said = f"Does not apply: {epochs:.1f} epochs, and a pattern has to repeat {MIN_CYCLES:g} times to be one"
        return _finding("ok", f"{said}.", evidence=evidence)
    if training is not None and training.found.period is not None and epoch is not None:
        evidence["staircase"] = _staircase(training, epoch)
    if periodic:
        strongest = min(periodic, key=lambda s: s.found.p)
        return _of_validation(record, strongest, epoch, evidence)
    if training is not None and training.found.period is not None and epoch is not None:  # full batches have no order
        finding = _of_training(record, training, epoch, evidence)
        if finding is not None:
            return finding
    return _silent(held, training, epoch, alpha, evidence)


def _of_validation(record: RecordLike, series: Series, epoch: float | None, evidence: dict[str, Any]) -> Finding:
    """Judge a pattern in a metric of validation or test data."""
    found = series.found
    said = f"{series.name} repeats every {_steps(found, epoch)}, {_size(found)}, p = {found.p:.1g}"
    numbers: dict[str, Any] = {"value": found.period, "unit": "steps"}
    if _of_schedule(record, series.trial, found):
        said += "; so does the learning rate, which explains it"
        return _finding("ok", f"{said}.", evidence=evidence | {"cause": "schedule"}, **numbers)
    data = diagnose_data(record)
    bad = {
        code: data[code].status in ("warn", "fail") for code in ("data.unshuffled", "data.weak_shuffle", "data.leakage")
    }
    looked = any(data[code].status != "not_measured" for code in bad)
    causes = ["leakage"] * bad["data.leakage"] + ["shuffling"] * (bad["data.unshuffled"] or bad["data.weak_shuffle"])
    evidence |= {
        "cause": " and ".join(causes) or "unknown",
        "found_in_the_data": {code: data[code].status for code in bad},
    }
    if causes:
        why = " ".join(data[code].summary for code, is_bad in bad.items() if is_bad)
        advice = tuple(line for code, is_bad in bad.items() if is_bad for line in data[code].advice)
        return _finding("fail", f"{said}. {why}", evidence=evidence, advice=advice, **numbers)
    advice = (
        "Compare the splits and the order of the loader you train with: audit_data(loader, validation=...).",
        "A pattern at another period than the epoch points to something else that repeats: shards, a sampler, a schedule.",
    )
    known = (
        "neither overlap of the splits nor a fault of the order was found"
        if looked
        else "nobody has looked at the data"
    )
    return _finding("warn", f"{said}; {known}.", evidence=evidence, advice=advice, **numbers)


def _of_training(record: RecordLike, series: Series, epoch: float | None, evidence: dict[str, Any]) -> Finding | None:
    """Judge a pattern in the training loss alone."""
    found = series.found
    said = f"The training loss repeats every {_steps(found, epoch)}, {_size(found)}, and validation does not"
    numbers: dict[str, Any] = {"value": found.period, "unit": "steps"}
    order = diagnose_data(record)
    if _of_schedule(record, series.trial, found):
        return _finding(
            "ok", f"{said}; so does the learning rate.", evidence=evidence | {"cause": "schedule"}, **numbers
        )
    if order["data.unshuffled"].status in ("warn", "fail") or order["data.weak_shuffle"].status in ("warn", "fail"):
        code = "data.unshuffled" if order["data.unshuffled"].status in ("warn", "fail") else "data.weak_shuffle"
        return _finding(
            "warn", f"{said}: poor shuffling. {order[code].summary}", evidence=evidence | {"cause": "shuffling"},
            advice=tuple(order[code].advice), **numbers,
        )  # fmt: skip
    if found.harmonic is not None and evidence.get("staircase", 0.0) >= STAIRCASE:
        return _finding(
            "ok", f"{said}: it falls where an epoch begins, as a model does that remembers examples. That is healthy.",
            evidence=evidence | {"cause": "memorisation"}, **numbers,
        )  # fmt: skip
    if order["data.unshuffled"].status == order["data.weak_shuffle"].status == "ok":
        return _finding(
            "ok", f"{said}; batches come in another order each epoch, so it is what the model remembers of the last one.",
            evidence=evidence | {"cause": "memorisation"}, **numbers,
        )  # fmt: skip
    return _finding(
        "warn", f"{said}, and it is no drop at the start of an epoch: do batches come in the same order each time?",
        evidence=evidence | {"cause": "unknown"},
        advice=("Observe the loader you train with over two epochs: audit_data(loader).",), **numbers,
    )  # fmt: skip


def _silent(
    held: Sequence[Series], training: Series | None, epoch: float | None, alpha: float, evidence: dict[str, Any]
) -> Finding:
    judged = [s for s in held if s.found.reason is None]
    if held and max(len(s.values) for s in held) < MIN_POINTS:
        said = f"Does not apply: {max(len(s.values) for s in held)} evaluations are too few for a pattern to show or to mislead"
        return _finding("ok", f"{said}. {_ask(epoch)}", evidence=evidence)
    if not judged:
        why = held[0].found.reason if held else "validation was not evaluated"
        return _finding("not_measured", f"Not measured: {why}. {_ask(epoch)}", evidence=evidence)
    if epoch is not None and not any(s.found.epoch_seen for s in judged):
        why = f"evaluations every {np.median(np.diff(judged[0].steps)):g} steps see the same place of each epoch of {epoch:g}"
        return _finding("not_measured", f"Not measured: {why}. {_ask(epoch)}", evidence=evidence)
    names = ", ".join(s.name for s in (*judged, *([] if training is None or training.found.reason else [training])))
    least = min(s.found.p for s in judged)
    return _finding(
        "ok", f"No period in {names} of trial {evidence['trial']} (p = {least:.2g}).", value=least, unit="p", threshold=alpha,
        evidence=evidence,
    )  # fmt: skip


def _ask(epoch: float | None) -> str:
    if epoch is None:
        return f"Evaluate at least {MIN_POINTS} times, every fixed number of steps."
    every = max(1, int(epoch / 4.5))
    return (
        f"Evaluate every {every} steps, at least {max(MIN_POINTS, int(np.ceil(MIN_CYCLES * epoch / every)) + 2)} times."
    )


def _finding(status: Status, summary: str, **fields: Any) -> Finding:
    return Finding(code=CODE, status=status, summary=summary, clause=CLAUSE, **fields)


def _shown(found: Period) -> dict[str, Any]:
    kept = ("reason", "p", "period", "harmonic", "epoch_seen", "share", "size")
    return {name: getattr(found, name) for name in kept}


def _steps(found: Period, epoch: float | None) -> str:
    period = float(found.period or np.nan)
    about = f"{period:.3g} steps" if period < 100 else f"{period:,.0f} steps"
    if epoch is None:
        return about
    near = f"one epoch of {epoch:g}" if abs(period / epoch - 1) < SAME else f"an epoch is {epoch:g}"
    return f"{about} ({near})"


def _size(found: Period) -> str:
    return f"moving by {found.size:.2g} (root mean square)"


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
