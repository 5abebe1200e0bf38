"""What can be said of a training whose loss is declared as not to be minimised: adversarial parts, a surrogate of a reward.

Such a loss may rise while the model gets better, and fall to nothing where one player has won. No run is judged by it, and a
config is adopted by the selected metric alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from workbench.curves.trials import RecordLike
from workbench.findings.diagnosis import Diagnosis, Finding
from workbench.record.roles import Role

__all__ = ["judged_without_loss", "selects_by_loss", "without_loss"]

_BY_LOSS = {
    "lr.*", "stability.*", "warmup.*", "schedule.collapse", "clipping.cures", "clipping.masks_lr", "init.loss", "loss.unbounded",
    "loss.metric_disagrees", "loop.overfit_one_batch", "data.no_signal", "evaluation.generalisation_gap", "batch_size.noise_scale",
}  # fmt: skip
"""Codes whose verdict compares losses of one run or of several."""
_BY_SELECTION = {"checkpoints.*", "evaluation.periodic", "evaluation.bad_proxy", "evaluation.too_small"}
"""Codes that judge the metric that selection compares."""


def without_loss(record: RecordLike) -> bool:
    """Tell whether a study's workload says that its loss is not to be minimised."""
    return record.facts.get("minimised") is False


def selects_by_loss(record: RecordLike) -> bool:
    """Tell whether a study selects checkpoints by the loss."""
    return str(record.config["select"]).endswith("/loss")


def judged_without_loss(record: RecordLike, diagnosis: Diagnosis) -> Diagnosis:
    """Return the diagnosis with what compares losses as "does not apply", where the loss is not to be minimised.

    A loss that becomes NaN stays what it is.

    Args:
        record: the study; its facts say so.
        diagnosis: of that study.
    """
    if not without_loss(record):
        return diagnosis
    moot = _BY_LOSS | (_BY_SELECTION if selects_by_loss(record) else set())
    trials = record.trials
    gone = len(trials) and bool(((trials["stage"] == Role.BASELINE) & (trials["state"] == "diverged")).any())

    def judged(finding: Finding) -> Finding:
        if not moot & {finding.code, f"{finding.code.partition('.')[0]}.*"} or (
            gone and finding.code == "stability.divergent"
        ):
            return finding
        return replace(finding, **_NOTHING)

    return replace(diagnosis, findings=tuple(judged(finding) for finding in diagnosis.findings))


_NOTHING: dict[str, Any] = {
    "status": "ok",
    "summary": "Does not apply: the loss is not to be minimised (minimised=False), so that no run is judged by it.",
    "value": None, "threshold": None, "step": None, "advice": (),
}  # fmt: skip
