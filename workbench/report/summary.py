"""The head of the report: the answers, for a colleague who was not there."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from typing import Any

from workbench.config import shown_name
from workbench.findings.causes import listed
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.finding import MEASUREMENTS, Finding
from workbench.plots.words import counted, number_text
from workbench.record.missing import not_ended
from workbench.report.templates import shown_line

MAX_NAMED = 2
"""Findings that the head names; the others are counted."""


def summarise(record: Any, diagnosis: Diagnosis, *, width: int = 110) -> str:
    """Return the answers, what was trained, and how sure they are: a few lines for a colleague.

    A study that asks for less than the four questions of a whole diagnosis says what was found and what is to be changed.

    Args:
        width: columns after which a line is continued below itself.
    """
    rows = summary_rows(record, diagnosis)
    wide = max(map(len, rows)) + 2
    return "\n".join(
        textwrap.fill(f"{name + ':':<{wide}}{said}", width, subsequent_indent=" " * wide) for name, said in rows.items()
    )


def summary_rows(record: Any, diagnosis: Diagnosis) -> dict[str, str]:
    """Return the lines of `summarise` by their names, without secrets."""
    rows: dict[str, str] = {}
    left = not_ended(record)
    if diagnosis.answers:
        rows |= {answer.question: answer.text for answer in diagnosis.answers}
        if left:
            rows["Config"] = f"Not decided: {left}."
    else:
        rows["Found"] = _found(diagnosis, " so far" * bool(left))
        if left:
            rows["Next"] = f"Not decided: {left}."
        elif not diagnosis.recommendation:
            rows["Next"] = "\n".join(dict.fromkeys(str(f.advice[0]) for f in _trouble(diagnosis) if f.advice))
    rows |= {"Trained": _trained(record), "How sure": _sure(record, diagnosis)}
    return {name: shown_line(said) for name, said in rows.items() if said}


def _trained(record: Any) -> str:
    """How many runs of what, and from which config."""
    trials, config = record.trials, record.config
    if trials.empty or "state" not in trials:
        return "No run was recorded."
    known = "steps_run" in trials and bool(trials["steps_run"].notna().all())
    steps = f", {int(trials['steps_run'].sum()):,} steps together" if known else ""
    states = Counter(str(state) for state in trials["state"])
    lrs = trials["peak_lr"][trials["state"] == "diverged"] if "peak_lr" in trials else trials["state"][:0]
    where = " at larger learning rates" if len(lrs) and lrs.min() > (config.get("peak_lr") or math.inf) else ""
    diverged = f" {counted(states['diverged'], 'run')}{where} ended non-finite." if states["diverged"] else ""
    what = f"{shown_name(str(config.get('optimizer') or 'the optimizer'))}, lr {number_text(config.get('peak_lr'))}, batch size {number_text(config.get('batch_size'))}"
    if len(trials) == 1:
        row = trials.iloc[0]
        best = (
            f" Best {config['select']}: {row['best_value']:.4g}, at step {row['best_step']:,.0f}."
            if math.isfinite(row.get("best_value", math.nan))
            else ""
        )
        return f"1 run{steps.replace(',', ' of', 1).removesuffix(' together')}: {what}.{best}{diverged}"
    base = f"{what}, {number_text(config.get('total_steps'))} steps"
    return f"{counted(len(trials), 'run')}{steps}; the baseline is {base}.{diverged}"


def _found(diagnosis: Diagnosis, so_far: str) -> str:
    """The worst findings by their own sentences; where nothing is wrong, the measurements."""
    trouble = _trouble(diagnosis)
    if not diagnosis.findings:
        return "Nothing was checked."
    if not trouble:
        measured = [f.summary for f in diagnosis.findings if f.code in MEASUREMENTS and f.status == "ok"]
        nothing = all(f.status == "not_measured" for f in diagnosis.findings)
        return " ".join(
            [
                f"Nothing could be measured{so_far}." if nothing else f"No problem was found{so_far}.",
                *measured[:MAX_NAMED],
            ]
        )
    more = [f"{len(trouble) - MAX_NAMED} more below."] * (len(trouble) > MAX_NAMED)
    return "\n".join([*(f.summary for f in trouble[:MAX_NAMED]), *more])


def _sure(record: Any, diagnosis: Diagnosis) -> str:
    """What the answers rest on, but for the p value of a proof, which Config tells; and what nobody looked at."""
    if not diagnosis.findings:
        return ""
    lines = []
    proof = (diagnosis.recommendation or {}).get("proof") or {}
    proven = any(arm.get("chance") is not None for arm in proof.get("arms", ()))
    if proven:
        lines.append(f"The candidate was tested against the baseline over {counted(len(proof['seeds']), 'new seed')}.")
    elif "seed" in record.trials and not record.trials.empty:
        seeds = record.trials["seed"].nunique()
        told = "one seed" if seeds == 1 else f"{seeds} seeds"
        untested = (
            "; no change was tested against it over new seeds, so there is no p value" if diagnosis.answers else ""
        )
        lines.append(f"{'The baseline was trained' if untested else 'Trained'} with {told}{untested}.")
    missing = sum(f.status == "not_measured" for f in diagnosis.findings)
    if missing:
        lines.append(
            f"{missing} of {counted(len(diagnosis.findings), 'question')} could not be answered{' yet' * bool(not_ended(record))} (not measured)."
        )
    lines.append("Verdicts are heuristics: look at the evidence of each.")
    return " ".join(lines)


def _trouble(diagnosis: Diagnosis) -> list[Finding]:
    """What fails or warns and stands for itself, causes first."""
    return [f for f, _ in listed(diagnosis.findings) if f.status in ("fail", "warn")]
