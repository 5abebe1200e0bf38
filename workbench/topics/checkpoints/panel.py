"""`checkpoints_panel`: patience on a slider: what early stopping would have kept, and what it costs against the full budget (P4.6)."""

from __future__ import annotations

from typing import Any

import numpy as np

from workbench.curves.selection import read_runs
from workbench.curves.trial_curves import RecordLike
from workbench.findings.diagnosis import Diagnosis
from workbench.panels.controls import Answer, Choice, Control, Slider, controls_panel, needs, nothing
from workbench.topics.checkpoints.diagnose import diagnose_checkpoints
from workbench.topics.checkpoints.early_stopping import stop_with_patience
from workbench.topics.checkpoints.figures import plot_early_stopping, plot_patience

ALT = "One run with the step at which early stopping ends it, beside what each rule of early stopping loses."


def checkpoints_panel(
    record: RecordLike, diagnosis: Diagnosis | None = None, *, patience: int = 3, live: bool | None = None
) -> Any:
    """Return a run below sliders for patience and for the step of a checkpoint: what is kept, and what stopping early costs.

    `patience` is where the slider starts: evaluations in a row without a new best (rule of thumb). See `controls_panel`.

    Source: P4.3, P4.5, P4.6.
    """
    needs("checkpoints_panel", record, "evals", "trials", "config", "facts")
    judged = read_runs(record) if len(record.evals) else []
    runs = stop_with_patience(record, patience, runs=judged).runs
    if not runs:
        why = "no finished run has enough finite evaluations. Run wb.checkpoints.Study().run(workload, out=...), or any trial with a smaller eval_every_steps."
        return nothing("checkpoints_panel", why, alt=ALT, live=live)
    said = diagnosis
    if said is None or "checkpoints.best_not_last" not in said:
        said = diagnose_checkpoints(record)
    most = max(1, max(run.steps.size for run in runs) - 1)
    steps = sorted({int(step) for run in runs for step in run.steps})

    def answer(patience: int, step: int, trial: int) -> Answer:
        stopped = stop_with_patience(record, patience, runs=judged)
        run = next(each for each in stopped.runs if each.trial == trial)
        at, words = np.flatnonzero(run.steps == step), f"Trial {run.trial} was not evaluated at step {step:,}."
        if at.size:
            value = float(run.values[at[0]])
            best = f"has {value:.4g}, the best one {run.best:.4g} (step {run.best_step:,}): {abs(value - run.best):.3g} apart"
            best = f"is the best: {value:.4g}" if step == run.best_step else best
            words = f"The checkpoint of step {step:,} {best}."
        words = f"{run.words}\n{words}"
        if len(stopped.runs) > 1 and (row := stopped.row) is not None:
            words += (
                f"\nOver {len(stopped.runs)} runs: saves {row['steps_saved']:.0%} of the steps, loses {row['lost_frac']:.1%} of what was "
                f"learned, {row['worst_lost_frac']:.1%} in the worst."
            )
        draws = [
            lambda ax: plot_patience(stopped, trial=trial, step=step, ax=ax),
            lambda ax: plot_early_stopping(record, said, stopped=stopped, ax=ax),
        ]
        return Answer(words, draws)

    trials = [(str(run.trial), run.trial) for run in runs]
    controls: dict[str, Control] = {
        "patience": Slider(label="patience", low=1, high=most, start=min(max(patience, 1), most)),
        "step": Choice(label="checkpoint at", options=[(f"{step:,}", step) for step in steps], start=steps[-1]),
        "trial": Choice(label="trial", options=trials, start=runs[0].trial, slides=False),
    }
    return controls_panel("checkpoints_panel", answer, controls, alt=ALT, live=live)
