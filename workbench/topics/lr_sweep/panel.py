"""`lr_sweep_panel`: the learning rates of a sweep on a slider, each with its curve and its distance to the edge (F1.6, F1.12)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from workbench.curves.trials import RecordLike
from workbench.findings.diagnosis import Diagnosis
from workbench.panels.controls import Answer, Choice, controls_panel, needs, nothing
from workbench.plots.frames import trials_at
from workbench.plots.render import Draw
from workbench.topics.lr_sweep.diagnose import diagnose_lr_sweep
from workbench.topics.lr_sweep.figures import plot_loss_curves, plot_lr_sweep

ALT = "The objective against the learning rate with one of them marked, and its loss curve over those of the others."


class LRDistance(NamedTuple):
    """One learning rate, held against the findings of its sweep.

    Attributes:
        loss: the objective there; infinite where a seed diverged, NaN where unknown.
        unstable: its runs did not stay stable.
        best: lr*; None where it was not measured.
        edge: the learning rate from which on training is unstable; None where none was found.
    """

    lr: float
    loss: float
    unstable: bool
    best: float | None
    edge: float | None

    @property
    def to_best(self) -> float | None:
        """The lr over lr*."""
        return None if self.best is None else self.lr / self.best

    @property
    def to_edge(self) -> float | None:
        """The lr over the unstable one: 1 is the edge, above it training does not stay stable."""
        return None if self.edge is None else self.lr / self.edge

    @property
    def words(self) -> str:
        """All of it as a sentence."""
        how = "diverged" if math.isinf(self.loss) else "unstable" if self.unstable else "stable"
        how = "not trained" if math.isnan(self.loss) else how
        end = f", training loss at the end {self.loss:.4g}" if math.isfinite(self.loss) else ""
        best = "lr* not measured" if self.to_best is None else f"{self.to_best:.3g} x lr* ({self.best:.4g})"
        edge = (
            "unstable not found" if self.to_edge is None else f"{self.to_edge:.3g} x the unstable lr ({self.edge:.4g})"
        )
        return f"lr {self.lr:.4g}: {how}{end}; {best}; {edge}."


def lr_distance(diagnosis: Diagnosis, lr: float) -> LRDistance:
    """Hold a learning rate against lr* and the unstable one; the objective is unknown where it was not trained."""
    row = next((row for row in _points(diagnosis) if math.isclose(row["lr"], lr, rel_tol=1e-9)), {})
    loss = row.get("loss")

    def known(code: str) -> float | None:
        value = diagnosis[code].value if code in diagnosis else None
        return None if value is None or not math.isfinite(value) else float(value)

    return LRDistance(
        lr=lr,
        loss=math.inf if row.get("state") == "diverged" else math.nan if loss is None else float(loss),
        unstable=bool(row.get("unstable")),
        best=known("lr.best"),
        edge=known("lr.unstable"),
    )


def _points(diagnosis: Diagnosis) -> Sequence[Mapping[str, Any]]:
    found = diagnosis["lr.best"].evidence.get("points") if "lr.best" in diagnosis else None
    return found or ()


def lr_sweep_panel(record: RecordLike, diagnosis: Diagnosis | None = None, *, live: bool | None = None) -> Any:
    """Return the sweep below a slider for the learning rate: its place, its loss curve, and how far it is from the edge.

    The diagnosis is of `diagnose_lr_sweep` or `diagnose`, or made from the record; the slider starts at lr*. `live` None asks the
    environment: `WORKBENCH_LIVE=0` means that nobody is looking. See `controls_panel` for what it returns.

    Source: F1.6, F1.7, F1.12.
    """
    needs("lr_sweep_panel", record, "steps", "trials", "config", "facts")
    said = diagnosis if diagnosis is not None and "lr.best" in diagnosis else diagnose_lr_sweep(record)
    rows = sorted(_points(said), key=lambda row: float(row["lr"]))
    lrs = [float(row["lr"]) for row in rows]
    if not lrs:
        why = (
            "the record has no finished trial of a learning-rate sweep. Run wb.lr_sweep.Study().run(workload, out=...)."
        )
        return nothing("lr_sweep_panel", why, alt=ALT, live=live)
    trials = [int(trial) for row in rows for trial in row.get("trials") or ()]
    trials = trials or [trial for lr in lrs for trial in trials_at(record, lr, "lr_sweep", "baseline")]
    best = said["lr.best"]
    wanted = best.evidence.get("measured_lr") or best.value or lrs[len(lrs) // 2]
    start = min(lrs, key=lambda lr: abs(lr - wanted))

    def answer(lr: float) -> Answer:
        sweep: Draw = lambda ax: plot_lr_sweep(record, said, mark=lr, ax=ax)  # noqa: E731 - an answer holds functions
        curves: Draw = lambda ax: plot_loss_curves(record, trials=trials, mark=lr, ax=ax)  # noqa: E731
        return Answer(lr_distance(said, lr).words, [sweep, curves])

    control = Choice(label="learning rate", options=[(f"{lr:.4g}", lr) for lr in lrs], start=start)
    return controls_panel("lr_sweep_panel", answer, {"lr": control}, alt=ALT, live=live)
