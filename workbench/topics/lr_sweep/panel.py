"""`lr_sweep_panel`: the learning rates of a sweep on a slider, each with its curve and its distance to the edge (F1.6, F1.12)."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from workbench.curves.trial_curves import RecordLike
from workbench.findings.diagnosis import Diagnosis, read_diagnosis
from workbench.panels.controls import Answer, Choice, controls_panel, needs, nothing
from workbench.plots.frames import curve, finding, recommended, trials_at
from workbench.plots.render import Draw
from workbench.plots.words import four_digits
from workbench.record.json_values import number
from workbench.topics.lr_sweep.diagnose import diagnose_lr_sweep
from workbench.topics.lr_sweep.figures import plot_loss_curves, plot_lr_sweep

ALT = "The objective against the learning rate with one of them marked, and its loss curve over those of the others."


def _rise(record: RecordLike, row: Mapping[str, Any]) -> str:
    """Say how a run that stayed stable in the end got there."""
    if not set(row.get("outcomes") or ()) & {"recovered", "settling"}:
        return "stable"
    curves = [curve(record, int(trial), "loss") for trial in row["trials"]]
    steps, losses = max(curves, key=lambda found: np.nanmax(found[1]))
    at, high = int(steps[np.nanargmax(losses)]), float(np.nanmax(losses))
    peak = f"{high:,.0f}" if 1e3 <= high < 1e6 else four_digits(high)
    return f"rises to {peak} at step {at:,} and recovers"


def _distance(record: RecordLike, diagnosis: Diagnosis, row: Mapping[str, Any]) -> str:
    """Say how one trained learning rate did, and how far it is from the best and from the unstable one."""
    lr, loss = float(row["lr"]), number(row.get("loss"))

    def held_against(code: str, name: str, unknown: str) -> str:
        found = finding(diagnosis, code)
        value = number(found.value if found else None)
        lowest = float(found.evidence.get("measured_lr") or value) if found else value
        why = f", as good as {lowest:.4g}, which has the lowest loss" if lowest != value else ""
        return f"{lr / value:.3g}× {name} ({value:.4g}{why})" if math.isfinite(value) else unknown

    how = "unstable" if row.get("unstable") else _rise(record, row)
    how = "diverged" if row.get("state") == "diverged" else "not trained" if math.isnan(loss) else how
    end = f", training loss at the end {loss:.4g}" if math.isfinite(loss) else ""
    best = held_against("lr.best", "the best lr", "best lr not measured")
    edge = held_against("lr.unstable", "the unstable lr", "unstable not found")
    chosen, _, word = recommended(diagnosis)
    advised = "" if math.isnan(chosen) else f"; {word}: {chosen:.4g}" if chosen != lr else f"; {word}"
    return f"lr {lr:.4g}: {how}{end}; {best}; {edge}{advised}."


def lr_sweep_panel(record: RecordLike, diagnosis: Diagnosis | None = None, *, live: bool | None = None) -> Any:
    """Return the sweep below a slider for the learning rate: its place, its loss curve, and how far it is from the edge.

    The diagnosis is of `diagnose_lr_sweep` or `diagnose`, or the one kept with the study, or made from the record; the slider starts at lr*.
    `live` None asks the environment, see `controls_panel`.

    Source: F1.6, F1.7, F1.12.
    """
    needs("lr_sweep_panel", record, "steps", "trials", "config", "facts")
    kept = record.path / "diagnosis.json"
    found = read_diagnosis(record.path) if diagnosis is None and kept.exists() else diagnosis
    found = found if found is not None and "lr.best" in found else diagnose_lr_sweep(record)
    best = found["lr.best"]
    rows = {float(row["lr"]): row for row in best.evidence.get("points") or ()}
    lrs = sorted(rows)
    if not lrs:
        why = (
            "the record has no finished trial of a learning-rate sweep. Run wb.lr_sweep.Study().run(workload, out=...)."
        )
        return nothing("lr_sweep_panel", why, alt=ALT, live=live)
    trials = [int(trial) for lr in lrs for trial in rows[lr].get("trials") or ()]
    trials = trials or [trial for lr in lrs for trial in trials_at(record, lr, "lr_sweep", "baseline")]
    wanted = best.evidence.get("measured_lr") or best.value or lrs[len(lrs) // 2]

    def answer(lr: float) -> Answer:
        sweep: Draw = lambda ax: plot_lr_sweep(record, found, mark=lr, ax=ax)  # noqa: E731 - an answer holds functions
        curves: Draw = lambda ax: plot_loss_curves(record, trials=trials, mark=lr, ax=ax)  # noqa: E731
        return Answer(_distance(record, found, rows[lr]), [sweep, curves])

    start = min(lrs, key=lambda lr: abs(lr - wanted))
    control = Choice(label="learning rate", options=[(f"{lr:.4g}", lr) for lr in lrs], start=start)
    return controls_panel("lr_sweep_panel", answer, {"lr": control}, alt=ALT, live=live)
