"""`diagnose_checkpoints`: is the best checkpoint the last, is choosing it more than luck, and does training go on from one (P4)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.stats import t as student

from workbench.curves.selected_runs import FEWEST_TO_SEE_NOISE, SelectedRun, read_runs
from workbench.curves.trials import RecordLike
from workbench.findings.diagnosis import Diagnosis, Finding
from workbench.topics.checkpoints.diagnose_resume import resume_finding
from workbench.topics.checkpoints.early_stopping import replay_rules
from workbench.topics.checkpoints.selection_luck import selection_finding

__all__ = ["CODES", "diagnose_checkpoints"]

CODES = ("checkpoints.best_not_last", "checkpoints.resume_jump", "checkpoints.selection")
FEWEST_TESTED = 3
"""Runs with a test split; fewer show no spread from seed to seed (rule of thumb)."""


def diagnose_checkpoints(
    record: RecordLike,
    *,
    min_gain_frac: float = 0.1,
    false_alarm: float = 0.05,
    noise_sds: float = 4.0,
    max_luck_frac: float = 0.2,
) -> Diagnosis:
    """Say whether the last checkpoint may be taken, whether the selected one is more than lucky, and whether training resumes.

    With the test split evaluated under at least three seeds, the best is called better than the last where its mean gain there
    is more than chance: that split had no part in choosing. Without, the gain on the split that chose is held against what the
    best of so many noisy evaluations wins by luck, and from three seeds on against their spread.

    Args:
        record: a study of any kind; runs that are judged are those of the stage "checkpoints", or of the study's own config.
        min_gain_frac: smaller gains, as a share of what training learned, do not matter; the noise of a constant learning rate moves
            the last evaluation by several percent (rule of thumb).
        false_alarm: chance at which a gain is believed by its spread over the seeds, one-sided (rule of thumb).
        noise_sds: without a test split, standard deviations beyond the expected luck; the noise itself is estimated from a
            few evaluations, so this is larger than for a known one (rule of thumb, measured: on plateaus of white noise at most
            4 % false alarms from one run and 1 % from four; noise that lasts over evaluations raises more).
        max_luck_frac: luck above this share of what training learned means that the choice is noise (rule of thumb).

    Returns:
        The codes `checkpoints.best_not_last`, `.resume_jump` and `.selection`, once each.
    """
    runs = read_runs(record)
    findings = (
        _best_not_last(record, runs, min_gain_frac, false_alarm, noise_sds),
        resume_finding(record.facts.get("resume")),
        selection_finding(record, runs, max_luck_frac=max_luck_frac),
    )
    return Diagnosis.of(record, findings)


def _best_not_last(
    record: RecordLike, runs: Sequence[SelectedRun], min_gain_frac: float, false_alarm: float, noise_sds: float
) -> Finding:
    code, clause = CODES[0], "P4.3"
    judged = [run for run in runs if run.judged]
    if not judged:
        why = "no run has finished" if not runs else f"no run has {FEWEST_TO_SEE_NOISE} finite evaluations"
        return Finding(code=code, status="not_measured", clause=clause, summary=f"Not measured: {why}.")
    tested = [run for run in judged if math.isfinite(run.test_gain)]
    broken = [run for run in judged if not math.isfinite(run.gain)]
    evidence = _evidence(record, judged)
    known: dict[str, Any] = {"code": code, "clause": clause, "unit": str(record.config["select"]), "evidence": evidence}
    if broken:
        return Finding(
            status="warn", advice=_advice(judged), **known,
            summary=f"The last evaluation is not finite in {len(broken)} of {len(judged)} runs, so the last checkpoint is useless.",
        )  # fmt: skip
    enough = len(tested) >= FEWEST_TESTED
    judge = _on_test(tested, false_alarm) if enough else _on_validation(judged, noise_sds, false_alarm)
    evidence |= judge
    scale = float(np.mean([r.learned for r in judged]))
    evidence["matters_from"] = judge["matters_from"] = min_gain_frac * scale
    real = judge["gain"] > max(judge["threshold"], judge["matters_from"])
    finding: dict[str, Any] = {"value": judge["gain"], "threshold": judge["threshold"], **known}
    summary = _where(judged)
    if any(run.best < run.costs.size - 1 for run in judged):
        summary += f" {(_on_test_said if enough else _on_validation_said)(judge)}"
    if real:
        return Finding(status="warn", summary=summary, advice=_advice(judged), **finding)
    return Finding(status="ok", summary=summary, **finding)


def _where(runs: Sequence[SelectedRun]) -> str:
    early = sum(run.best < run.costs.size - 1 for run in runs)
    if not early:
        return f"The last checkpoint is the best in {f'each of {len(runs)} runs' if len(runs) > 1 else 'the one run there is'}."
    of = f"{early} of {len(runs)} runs" if len(runs) > 1 else "the one run there is"
    middle = float(np.median([run.best_frac for run in runs]))
    return f"The best checkpoint is not the last in {of} (at {middle:.0%} of the steps{', median' if len(runs) > 1 else ''})."


def _on_test(runs: Sequence[SelectedRun], false_alarm: float) -> dict[str, Any]:
    """Judge the mean gain on the test split by Student's t over the seeds."""
    gains = np.array([run.test_gain for run in runs])
    se = float(gains.std(ddof=1) / math.sqrt(gains.size))
    gain, seen = float(gains.mean()), float(np.mean([run.gain for run in runs]))
    threshold = float(student.ppf(1 - false_alarm, gains.size - 1)) * se
    return {
        "split": "test",
        "gain": gain,
        "se": se,
        "threshold": threshold,
        "selected_gain": seen,
        "runs_tested": gains.size,
    }


def _on_test_said(judge: Mapping[str, Any]) -> str:
    seen, gain = judge["selected_gain"], judge["gain"]
    lost = f", so {min(1.0, max(0.0, 1 - gain / seen)):.0%} of that does not carry over" if seen > 0 else ""
    beyond = "beyond" if gain > judge["threshold"] else "not beyond"
    small = _too_small(judge)
    return (
        f"It is better than the last by {seen:.3g} where it was chosen and by {gain:.3g} +- {judge['se']:.2g} on the test split"
        f"{lost}: {beyond} chance{small}."
    )


def _too_small(judge: Mapping[str, Any]) -> str:
    small = judge["threshold"] < judge["gain"] <= judge["matters_from"]
    return f", but too little to matter ({judge['matters_from']:.2g})" if small else ""


def _on_validation(runs: Sequence[SelectedRun], noise_sds: float, false_alarm: float) -> dict[str, Any]:
    """Judge the mean gain where it was chosen: against the luck of the best of so many draws, their noise, and the seeds' spread.

    One run that ends on a bad evaluation makes a mean gain of its own; only a gain that the seeds share is believed.
    """
    gains = np.array([run.gain for run in runs])
    luck, noise = float(np.mean([run.luck for run in runs])), math.sqrt(sum(run.noise**2 for run in runs)) / len(runs)
    spread = 0.0
    if gains.size >= FEWEST_TESTED:
        se = float(gains.std(ddof=1) / math.sqrt(gains.size))
        spread = float(student.ppf(1 - false_alarm, gains.size - 1)) * se
    threshold = luck + max(noise_sds * noise, spread)
    return {
        "split": "selected",
        "gain": float(gains.mean()),
        "luck": luck,
        "noise": noise,
        "spread": spread,
        "threshold": threshold,
    }


def _on_validation_said(judge: Mapping[str, Any]) -> str:
    by = f"It is better than the last by {judge['gain']:.3g} on the split that chose it"
    if judge["gain"] <= judge["threshold"]:
        return f"{by}, which luck and noise explain ({judge['threshold']:.2g})."
    tested = "how much of that holds on new data was not measured"
    return f"{by}, more than luck and noise explain ({judge['threshold']:.2g}){_too_small(judge)}; {tested}."


def _evidence(record: RecordLike, runs: Sequence[SelectedRun]) -> dict[str, Any]:
    sign = 1.0 if record.config["select_mode"] == "min" else -1.0
    rows = [
        {
            "trial": run.trial, "seed": run.seed, "best_step": int(run.steps[run.best]), "total_steps": run.total_steps,
            "best_frac": run.best_frac, "best": sign * float(run.costs[run.best]), "last": sign * float(run.costs[-1]),
            "gain": run.gain, "test_gain": run.test_gain, "evaluations": int(run.costs.size), "noise": run.noise,
            "luck": run.luck, "learned": run.learned,
        }
        for run in runs
    ]  # fmt: skip
    return {"runs": rows, "early_stopping": replay_rules(runs)}


def _advice(runs: Sequence[SelectedRun]) -> list[str]:
    advice = [
        "Take the selected checkpoint, not the last: record.best().checkpoint, of the N best that are kept (P4.4, P4.5)."
    ]
    if float(np.median([run.best_frac for run in runs])) <= 0.5:
        advice.append("The second half of the run brings nothing here: regularise, or plan fewer steps and tune again.")
    return advice
