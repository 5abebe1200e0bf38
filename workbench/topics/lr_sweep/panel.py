"""`lr_sweep_panel`: the learning rates of a sweep on a slider, each with its curve and its distance to the edge (F1.6, F1.12)."""

from __future__ import annotations

from typing import Any

from workbench.curves.trials import RecordLike
from workbench.findings.diagnosis import Diagnosis
from workbench.panels.controls import Answer, Choice, controls_panel, needs, nothing
from workbench.plots.frames import trials_at
from workbench.topics.lr_sweep.diagnose import diagnose_lr_sweep
from workbench.topics.lr_sweep.distance import lr_distance, swept_lrs, swept_trials
from workbench.topics.lr_sweep.figures import plot_loss_curves, plot_lr_sweep

__all__ = ["lr_sweep_panel"]

ALT = "The objective against the learning rate with one of them marked, and its loss curve over those of the others."


def lr_sweep_panel(record: RecordLike, diagnosis: Diagnosis | None = None, *, live: bool | None = None) -> Any:
    """Return the sweep below a slider for the learning rate: its place, its loss curve, and how far it is from the edge.

    Args:
        record: a study with trials of the stage "lr_sweep".
        diagnosis: of `diagnose_lr_sweep`, or of `diagnose`; made from the record without it. The slider starts at lr*.
        live: None asks the environment: `WORKBENCH_LIVE=0` means that nobody is looking.

    Returns:
        See `controls_panel`.

    Source: F1.6, F1.7, F1.12.
    """
    needs("lr_sweep_panel", record, "steps", "trials", "config", "facts")
    said = diagnosis if diagnosis is not None and "lr.best" in diagnosis else diagnose_lr_sweep(record)
    lrs = swept_lrs(said)
    if not lrs:
        why = "the record has no finished trial of a learning-rate sweep. Run wb.LRSweep().run(workload, out=...)."
        return nothing("lr_sweep_panel", why, alt=ALT, live=live)
    trials = swept_trials(said) or [trial for lr in lrs for trial in trials_at(record, lr, "lr_sweep", "baseline")]
    best = said["lr.best"]
    wanted = best.evidence.get("measured_lr") or best.value or lrs[len(lrs) // 2]
    start = min(lrs, key=lambda lr: abs(lr - wanted))

    def answer(lr: float) -> Answer:
        return Answer(
            lr_distance(said, lr).words,
            [
                lambda ax: plot_lr_sweep(record, said, mark=lr, ax=ax),
                lambda ax: plot_loss_curves(record, trials=trials, mark=lr, ax=ax),
            ],
        )

    control = Choice(label="learning rate", options=[(f"{lr:.4g}", lr) for lr in lrs], start=start)
    return controls_panel("lr_sweep_panel", answer, {"lr": control}, alt=ALT, live=live)
