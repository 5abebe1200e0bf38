"""`show_study`: one figure, one sentence and the verdict table of any study on disk, as ordinary outputs that stay."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from html import escape
from typing import Any

from workbench.curves.trial_curves import same_config
from workbench.errors import UsageError
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.topic import Figure
from workbench.playbook import diagnosis_of
from workbench.plots.render import Picture
from workbench.plots.style import not_measured
from workbench.record.events import read_events
from workbench.record.folder import is_locked, last_change
from workbench.record.read import StudyRecord, TrialRecord, diagnosed, ranked_trials
from workbench.topics.registry import FIGURES, STUDIES


def show_study(record: StudyRecord | TrialRecord) -> None:
    """Show one figure, one sentence and the verdict table in the cell that runs; the last line of a cell does it by itself.

    All three are made from the study's folder, so that a page that was reloaded or a kernel that was restarted loses nothing.

    Args:
        record: a study or a single trial, finished, stopped or running.
    """
    from IPython.display import display

    # read again from disk: it may have been opened while it was being written
    record = record.reload() if isinstance(record, StudyRecord) else TrialRecord(record.path, record.number)
    diagnosis, said = diagnosis_of(record), study_sentence(record)
    display(study_picture(record, diagnosis))  # type: ignore[no-untyped-call]
    display({"text/plain": said, "text/html": f"<p>{escape(said)}</p>"}, raw=True)  # type: ignore[no-untyped-call]
    display(diagnosis)  # type: ignore[no-untyped-call]


def study_picture(record: StudyRecord | TrialRecord, diagnosis: Diagnosis) -> Picture:
    """Return the figures that a study of its kind is looked at with."""
    kind = str(record.study.get("kind")) if isinstance(record, StudyRecord) else "trial"
    figures = {figure.name: figure for figure in FIGURES}
    pictures = STUDIES[kind].pictures if kind in STUDIES else ("loss-curves",)

    def draw(figure: Figure, ax: Any) -> Any:
        try:
            return figure.draw(record, diagnosis, ax=ax)
        except UsageError as error:  # it says what is not there yet
            return not_measured(ax, str(error))

    return Picture(
        [partial(draw, figures[name]) for name in pictures], " ".join(figures[name].shows for name in pictures)
    )


def study_sentence(record: StudyRecord | TrialRecord, *, counts: bool = True) -> str:
    """Return what was trained, how it ended (not without `counts`) and what came out best, in one plain sentence."""
    trials = record.trials
    if trials.empty:
        return f"{record.path}: no trial yet; run the call that began the study again to resume."
    states = trials["state"].value_counts()
    told = ", ".join(f"{states[state]} {state}" for state in _ORDER if state in states)
    many = f"{len(trials)} trial{'s' * (len(trials) > 1)} of {record.workload}: {told}"
    left = set(states.index) & {"stopped", "failed"} or (
        isinstance(record, StudyRecord) and "finished" not in record.study and not is_locked(record.path)
    )
    by = [
        event["error"]
        for row in trials.to_dict("records")
        if row["state"] == "failed"
        for event in read_events(record.path / "trials" / str(row["trial"]))
        if "error" in event
    ]
    ended = f"ended{_when(record)} in an error: {by[-1]}" if by else f"stopped{_when(record)} before its end"
    resumes = "" if record.study.get("kind") == "watch" else "; the same command or cell resumes it"
    go_on = f"Training {ended}{resumes}" if left else ""
    said = "; ".join(part for part in (many * counts, _best(record)) if part)
    return " ".join(f"{part[0].upper()}{part[1:]}." for part in (said, go_on) if part)


def _when(record: StudyRecord | TrialRecord) -> str:
    """Return when the last rows were written, " at 12:15"; "" where there is none."""
    last = last_change(record.path, "part-*")
    at, today = (datetime.fromtimestamp(seconds).astimezone() for seconds in (last, time.time()))
    return f" at {at:{'%H:%M' if at.date() == today.date() else '%Y-%m-%d %H:%M'}}" if last else ""


_ORDER = ("complete", "diverged", "running", "stopped", "failed")


def _best(record: StudyRecord | TrialRecord) -> str:
    """Return the trial with the best selected checkpoint, as the end of a sentence; nothing where none was evaluated."""
    rows = ranked_trials(record).dropna(subset=["best_value"]).to_dict("records")
    if not rows:
        return ""
    best, sign = rows[0], 1.0 if record.config["select_mode"] == "min" else -1.0
    select, own = record.config["select"], record.config.get("peak_lr")
    (_, kept, base), value_of = diagnosed(record.path), {row["trial"]: row["best_value"] for row in rows}
    there, mine = (_by_seed(rows, best, lr) for lr in (best["peak_lr"], own))
    if best["trial"] in kept:
        values = (
            [value_of[trial] for trial in kept if trial in value_of] if len(kept) > 1 else there or [best["best_value"]]
        )
        mine = [value_of[trial] for trial in base if trial in value_of] if len(base) > 1 else mine
        spread = f", mean of {len(values)} seeds ({min(values):.4g} to {max(values):.4g})" * (len(values) > 1)
        lead = f"the config of the verdict has {select} {sum(values) / len(values):.4g} at lr {best['peak_lr']:.4g}{spread}"
    else:
        lead = f"{'lowest' if sign > 0 else 'highest'} {select} {best['best_value']:.4g}"
        if best["state"] in ("running", "stopped"):
            state = "stopped" if best["state"] == "stopped" else "now"
            lead += f", so far and of a run that is {state} at {best['steps_run']:,} of {best['total_steps']:,} steps,"
        elif any(sign * row["best_value"] < sign * best["best_value"] for row in rows):
            lead += ", of the full-length runs that stayed finite,"
        lead += f" in trial {best['trial']} at lr {best['peak_lr']:.4g}, step {best['best_step']:.0f}"
        lead += f" (mean of {len(there)} seeds there: {sum(there) / len(there):.4g})" if len(there) > 1 else ""
    if mine and own != best["peak_lr"]:
        seeds = f" (mean of {len(mine)} seeds)" * (len(mine) > 1)
        lead += f"; at {own:.4g}, the baseline's, {sum(mine) / len(mine):.4g}{seeds}"
        lead += ": one seed each, by itself no reason to change" * (
            len(mine) == len(there) == 1 and best["trial"] not in kept
        )
    return lead


def _by_seed(rows: Sequence[Mapping[Any, Any]], like: Mapping[Any, Any], lr: Any) -> list[float]:
    """Return one value a seed of the runs at a learning rate that were trained to their end, as long as another and as it but for the seed."""
    peers = [r for r in rows if r["peak_lr"] == lr and r["state"] == "complete" and same_config(r, like)]
    return list({row["seed"]: row["best_value"] for row in peers}.values())
