"""`diagnose_periodicity`: a metric that repeats itself by the epoch, and which bug that points to (P2.9, P2.10)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from workbench.curves.trial_curves import RecordLike
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.finding import Codes, Finding
from workbench.topics.data.diagnose import diagnose_data
from workbench.topics.periodicity.period import MIN_CYCLES, MIN_POINTS, Floats, Period, find_period

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
        said = f"Does not apply: the run is {epochs:.1f} epochs long, and a pattern shows over {MIN_CYCLES:g} or more"
        return _finding("ok", f"{said}.", evidence=evidence)
    learned = training is not None and training.found.period is not None and epoch is not None  # full batches have none
    if training is not None and learned and epoch is not None:
        evidence["staircase"] = _staircase(training, epoch)
    periodic = [s for s in held if s.found.period is not None]
    if periodic:
        return _explained(record, min(periodic, key=lambda s: s.found.p), evidence, held=True)
    if training is not None and learned:
        return _explained(record, training, evidence, held=False)
    return _silent(held, training, alpha, evidence)


def _explained(record: RecordLike, series: Series, evidence: dict[str, Any], *, held: bool) -> Finding:
    """Judge a pattern, in a metric of `held` out data or in the training loss alone, by what the record knows of its cause."""
    found, data = series.found, diagnose_data(record)
    codes = ("data.unshuffled", "data.weak_shuffle", *(["data.leakage"] if held else []))
    looked = {code: data[code] for code in codes}
    bad = {code: each for code, each in looked.items() if each.status in ("warn", "fail")}
    said = f"{series.name} repeats every {_every(series)}, p = {found.p:.1g}"
    said = said if held else f"The training loss repeats every {_every(series)}, and validation does not"
    numbers: dict[str, Any] = {"value": found.period, "unit": "steps", "evidence": evidence}
    if _of_schedule(record, series.trial, found):
        evidence["cause"] = "schedule"
        explains = ", which explains it" if held else ""
        return _finding("ok", f"{said}; so does the learning rate{explains}.", **numbers)
    causes = ["leakage"] * ("data.leakage" in bad) + ["shuffling"] * bool(bad.keys() - {"data.leakage"})
    evidence["cause"] = " and ".join(causes) or "unknown"
    if held:
        evidence["found_in_the_data"] = {code: each.status for code, each in looked.items()}
    if causes:
        why = " ".join(each.summary for each in bad.values())
        advice = tuple(line for each in bad.values() for line in each.advice)
        return _finding("fail" if held else "warn", f"{said}{'' if held else ': poor shuffling'}. {why}", advice=advice, **numbers)  # fmt: skip
    if held:
        known = "neither overlap of the splits nor a fault of the order was found"
        if all(each.status == "not_measured" for each in looked.values()):
            known = "the data were not examined"
        advice = (
            "Compare the splits and the order of the loader you train with: wb.data.audit(loader, validation=...).",
            "A pattern at another period than the epoch points to something else that repeats: shards, a sampler, a schedule.",
        )
        return _finding("warn", f"{said}; {known}.", advice=advice, **numbers)
    remembers = found.harmonic is not None and evidence.get("staircase", 0.0) >= STAIRCASE
    if remembers or all(each.status == "ok" for each in looked.values()):
        evidence["cause"] = "memorisation"
        why = "; batches come in another order each epoch, so it is what the model remembers of the last one."
        if remembers:
            why = ": it falls where an epoch begins, as a model does that remembers examples. That is healthy."
        return _finding("ok", said + why, **numbers)
    said += ", and it is no drop at the start of an epoch: do batches come in the same order each time?"
    advice = ("Observe the loader you train with over two epochs: wb.data.audit(loader).",)
    return _finding("warn", said, advice=advice, **numbers)


def _silent(held: Sequence[Series], training: Series | None, alpha: float, evidence: dict[str, Any]) -> Finding:
    """Say of a trial without a pattern whether one could have been seen."""
    epoch, judged = evidence["epoch_steps"], [s for s in held if s.found.reason is None]
    ask = f"Evaluate at least {MIN_POINTS} times, every fixed number of steps."
    if epoch is not None:
        every = max(1, int(epoch / 4.5))
        ask = f"Evaluate {'every step' if every == 1 else f'every {every} steps'}, at least {max(MIN_POINTS, int(np.ceil(MIN_CYCLES * epoch / every)) + 2)} times."
    most = max((len(s.values) for s in held), default=MIN_POINTS)
    if most < MIN_POINTS:
        said = f"Does not apply: {most} evaluations are too few to show a repeating pattern"
        return _finding("ok", f"{said}. To look for one: {ask[0].lower()}{ask[1:]}", evidence=evidence)
    why = None
    if not judged:
        why = held[0].found.reason if held else "validation was not evaluated"
    elif epoch is not None and not any(s.found.epoch_seen for s in judged):
        why = f"evaluations every {np.median(np.diff(judged[0].steps)):g} steps always fall on the same point of each epoch of {epoch:g}"
    if why is not None:
        return _finding("not_measured", f"Not measured: {why}. {ask}", evidence=evidence)
    names = ", ".join(s.name for s in (*judged, *([] if training is None or training.found.reason else [training])))
    least = min(s.found.p for s in judged)
    said = (
        f"Nothing in {names} of trial {evidence['trial']} repeats (smallest p = {least:.2g}; below {alpha:g} it would)."
    )
    return _finding("ok", said, value=least, unit="p", threshold=alpha, evidence=evidence)


def _every(series: Series) -> str:
    """Return the period and its size in words."""
    period, epoch = float(series.found.period or np.nan), series.epoch
    about = f"{period:.3g} steps" if period < 100 else f"{period:,.0f} steps"
    if epoch is not None:
        about += f" (one epoch of {epoch:g})" if abs(period / epoch - 1) < SAME else f" (an epoch is {epoch:g})"
    return f"{about}, up and down by {series.found.size:.2g} (rms)"


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
    steps, values = series.steps[finite], pd.Series(series.values[finite])  # noqa: PD011
    width = max(1, round(epoch / max(float(np.median(np.diff(steps))), 1e-9)))
    if len(values) < 3 * width or min(PHASES, width) < 3:
        return 0.0
    apart = values - values.rolling(width, center=True).mean()
    phase = np.floor(steps % epoch / epoch * min(PHASES, width))
    profile = apart.groupby(phase).mean().to_numpy()
    if not profile.std() > 0:
        return 0.0
    correlation = float(np.corrcoef(profile, np.arange(len(profile)))[0, 1])
    return correlation**2 if correlation > 0 else 0.0  # above its trend at the end of an epoch, below at the start


def _trial(record: RecordLike) -> int | None:
    """Return the trial to look at: the own config's, evaluated often enough; of a record without one, the one evaluated most."""
    trials, evals = record.trials, record.evals
    if not len(trials):
        return None
    sound = trials[trials["state"] != "diverged"]
    rows = sound if len(sound) else trials
    held = evals[evals["split"] != "train"] if len(evals) else evals
    often = {int(t): int(held.loc[held["trial"] == t, "step"].nunique()) for t in rows["trial"]}
    baseline = [int(t) for t in rows.loc[rows["stage"].isin(["baseline", "trial"]), "trial"]]
    if baseline:
        return next((t for t in baseline if often[t] >= MIN_POINTS), baseline[0])
    return max(often, key=lambda t: often[t])


def _curves(record: RecordLike, number: int) -> list[tuple[str, Floats, Floats]]:
    curves, evals, steps = [], record.evals, record.steps
    rows = evals[evals["trial"] == number] if "trial" in evals else evals
    for (split, metric), part in rows.groupby(["split", "metric"], sort=True) if len(rows) else []:
        if split in ("validation", "test"):
            once = part.drop_duplicates("step", keep="last").sort_values("step")
            curves.append((f"{split}/{metric}", once["step"], once["value"]))
    own = steps[steps["trial"] == number] if {"loss", "trial"} <= set(steps) else steps[:0]
    if len(own):
        curves.append(("train/loss", own["step"], own["loss"]))
    return [
        (name, x.to_numpy(dtype=np.float64), y.to_numpy(dtype=np.float64, na_value=np.nan)) for name, x, y in curves
    ]


def _epoch(record: RecordLike, number: int) -> float | None:
    """Return the steps of one epoch, the incomplete last batch dropped; None for full batches and where it is unknown."""
    rows = record.trials[record.trials["trial"] == number]
    names = ("train_examples", "batch_size")
    examples, batch = (rows[name].iloc[0] if len(rows) and name in rows else None for name in names)
    if not examples or not batch or not np.isfinite(float(examples)):
        return None
    epoch = int(examples) // int(batch)
    return float(epoch) if epoch > 1 else None
