"""`diagnose_evaluation`: is the model measured often enough, cheaply enough, exactly, and on what counts? (P2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from workbench.curves.trials import RecordLike
from workbench.findings.audited import why_missing
from workbench.findings.diagnosis import Diagnosis, Finding
from workbench.record.read import periodic_rows
from workbench.record.roles import Role
from workbench.topics.evaluation.cases import NOBODY_LOOKED, judge_cases
from workbench.topics.evaluation.proxy import judge_proxy

__all__ = ["diagnose_evaluation", "diagnose_evaluation_cases"]

TOLERANCE = 1e-4
"""Rule of thumb: float32 values of the same examples in other batches differ by less than this share of their spread."""


def diagnose_evaluation(
    record: RecordLike,
    *,
    min_evaluations: int = 5,
    max_time_frac: float = 0.3,
    min_seconds: float = 5.0,
    offline_split: str | None = None,
    min_correlation: float = 0.8,
    min_checkpoints: int = 8,
    confidence: float = 0.95,
    resolution: float = 0.02,
    tolerance: float = TOLERANCE,
) -> Diagnosis:
    """Judge how a study evaluates while it trains.

    Args:
        record: a study; what it says of its first trial of the baseline's config, or else of its first trial.
        min_evaluations: after the initial one, for retrospective selection to have something to choose from (rule of thumb).
        max_time_frac: share of a trial's time that evaluation may take (rule of thumb).
        min_seconds: a trial that evaluates for less than this in all is not told to save time (rule of thumb).
        offline_split: whose offline rows the periodic ones are held against; None is the split that selection compares.
        min_correlation: Spearman's correlation that a proxy should have with the offline metric (rule of thumb).
        min_checkpoints: fewer say nothing (rule of thumb).
        confidence: of the correlation's interval.
        resolution: checkpoints whose metric differs by less than this share of its range over the run are as good as equal: on a
            plateau the ranks are noise, whatever the proxy (rule of thumb).
        tolerance: see `diagnose_evaluation_cases`.

    Returns:
        `evaluation.interval`, `.batch_size`, `.weighting`, `.coverage`, `.bad_proxy`, once each.
    """
    missing = why_missing(record.facts, "evaluation", NOBODY_LOOKED)
    findings = (
        _interval(record, min_evaluations=min_evaluations, max_time_frac=max_time_frac, min_seconds=min_seconds),
        _batch_size(record),
        *judge_cases(record.facts.get("evaluation"), tolerance=tolerance, missing=missing),
        judge_proxy(
            record,
            offline_split=offline_split,
            min_correlation=min_correlation,
            min_checkpoints=min_checkpoints,
            confidence=confidence,
            resolution=resolution,
        ),
    )
    return Diagnosis.of(record, findings)


def diagnose_evaluation_cases(
    facts: Mapping[str, Any], *, workload: str | None = None, tolerance: float = TOLERANCE
) -> Diagnosis:
    """Judge what `collect_cases` saw of an evaluation function.

    Args:
        facts: values and weights of the examples, and the cases.
        workload: its name.
        tolerance: two values are the same within this share of the spread of the examples' values (rule of thumb).

    Returns:
        `evaluation.weighting` and `evaluation.coverage`.
    """
    return Diagnosis(findings=judge_cases(facts, tolerance=tolerance), workload=workload)


def _interval(record: RecordLike, *, min_evaluations: int, max_time_frac: float, min_seconds: float) -> Finding:
    code, clause = "evaluation.interval", "P2.8"
    trial, rows = _first_trial(record)
    if trial is None or rows.empty:
        return Finding(
            code=code, status="not_measured", clause=clause, summary="Not measured: no trial has been evaluated."
        )
    steps = np.unique(rows["step"].to_numpy(dtype=np.int64))
    gaps = np.diff(steps[:-1]) if len(steps) > 2 else np.empty(0)
    seconds = float(rows.drop_duplicates(["step", "split"])["seconds"].sum())
    whole = float(trial["seconds"]) if "seconds" in trial else float("nan")
    share = seconds / whole if whole > 0 else float("nan")
    count = int((steps > 0).sum())
    evidence: dict[str, Any] = {"trial": int(trial["trial"]), "steps": steps[:50].tolist()}
    common: dict[str, Any] = {
        "code": code,
        "clause": clause,
        "value": float(count),
        "unit": "evaluations",
        "threshold": float(min_evaluations),
        "evidence": evidence,
    }
    if len(gaps) and gaps.min() != gaps.max():
        return Finding(
            **common, status="warn",
            summary=f"Evaluations are {gaps.min()} to {gaps.max()} steps apart: not every fixed number of steps.",
            advice=["Evaluate every fixed number of steps, never of seconds: a pause of the machine then moves no point of the curve."],
        )  # fmt: skip
    if count < min_evaluations and trial["state"] == "complete":
        return Finding(
            **common, status="warn",
            summary=f"{count} evaluations after the initial one leave retrospective selection little to choose from.",
            advice=[f"Set eval_every_steps so that a run has at least {min_evaluations} evaluations; None makes ten."],
        )  # fmt: skip
    if share > max_time_frac and seconds > min_seconds:
        evidence |= {"evaluation_seconds": seconds, "trial_seconds": whole, "time_frac": share}
        return Finding(
            **common, status="warn", summary=f"Evaluation takes {share:.0%} of the trial's time.",
            advice=["Evaluate less often, or on a named subset (periodic_subset), and check the subset by evaluate_offline."],
        )  # fmt: skip
    every = f"every {gaps[0]} steps" if len(gaps) else "at the ends"
    return Finding(**common, status="ok", summary=f"{count} evaluations after the initial one, {every}.")


def _batch_size(record: RecordLike) -> Finding:
    code, clause = "evaluation.batch_size", "P2.7"
    train, given = record.config.get("batch_size"), record.config.get("eval_batch_size")
    if not train:
        return Finding(
            code=code, status="not_measured", clause=clause, summary="Not measured: the batch size is unknown."
        )
    coupled = bool((record.facts.get("evaluation") or {}).get("coupled"))
    own = int(train) // int(record.config.get("accumulate_steps") or 1)
    size = int(given or (own if coupled else 4 * train))
    memory = record.facts.get("memory") or {}
    evidence = {"batch_size": int(train), "eval_batch_size": size, "memory": memory}
    common: dict[str, Any] = {
        "code": code,
        "clause": clause,
        "value": float(size),
        "unit": "examples",
        "threshold": float(train),
        "evidence": evidence,
    }
    bytes_ = [memory.get(name) for name in ("training_bytes_per_example", "evaluation_bytes_per_example")]
    cost = (
        f"; an example takes {bytes_[0]:,.0f} bytes in training and {bytes_[1]:,.0f} in evaluation"
        if all(bytes_)
        else ""
    )
    if coupled:
        said = (
            f"The loss of an example depends on the others in its batch: evaluated in batches of {size}, as in training"
        )
        if size == own:
            return Finding(**common, status="ok", summary=f"{said}.")
        return Finding(
            **common, status="warn", summary=f"{said.removesuffix(', as in training')}, trained in batches of {own}, it is another loss.",
            advice=[f"Set eval_batch_size={own}, or leave it out, so that training and validation loss can be compared."],
        )  # fmt: skip
    if size < train:
        return Finding(
            **common, status="warn", summary=f"Evaluation batches of {size} are smaller than training batches of {train}{cost}.",
            advice=[f"Set eval_batch_size to at least {train}: no activations are kept, so a larger batch fits and takes less time."],
        )  # fmt: skip
    return Finding(
        **common,
        status="ok",
        summary=f"Evaluation batches of {size} are at least the training batches of {train}{cost}.",
    )


def _first_trial(record: RecordLike) -> tuple[Mapping[str, Any] | None, pd.DataFrame]:
    """Return the trial to look at and its periodic rows."""
    trials, evals = record.trials, record.evals
    if not len(trials) or evals.empty:
        return None, evals
    rows = periodic_rows(evals)
    there = trials[trials["trial"].isin(rows["trial"])]
    if there.empty:
        return None, rows
    first = there[there["stage"] == Role.BASELINE] if (there["stage"] == Role.BASELINE).any() else there
    row: dict[str, Any] = {str(k): v for k, v in first.iloc[0].items()}
    return row, rows[rows["trial"] == row["trial"]]
