"""Whether a training loss says how far training is: that of a policy, of two players or of targets that a copy of the model makes need not fall."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from workbench.curves.trial_curves import RecordLike
from workbench.findings.diagnosis import Diagnosis
from workbench.record.roles import Role

_BY_LOSS = {
    "lr.*", "stability.*", "warmup.*", "schedule.collapse", "clipping.cures", "clipping.masks_lr", "init.loss", "loss.unbounded",
    "loss.metric_disagrees", "loop.overfit_one_batch", "data.no_signal", "evaluation.generalisation_gap", "batch_size.noise_scale",
}  # fmt: skip
"""Codes whose verdict compares losses of one run or of several."""
_BY_SELECTION = {"checkpoints.*", "evaluation.periodic", "evaluation.bad_proxy", "evaluation.too_small"}
"""Codes that judge the metric that selection compares."""


def without_loss(record: RecordLike) -> bool:
    """Tell whether a study's workload says that its loss is not to be minimised, or its loop shows it."""
    return record.facts.get("minimised") is False or need_not_fall(record.facts.get("loop"), record.steps) is not None


def need_not_fall(
    loop: Mapping[str, Any] | None, columns: Mapping[str, Any] | pd.DataFrame, *, grown: float = 1.5, least: int = 3
) -> str | None:
    """Return why the loss of a loop does not say how far training is, by its facts and the columns of its updates; None where nothing speaks against it.

    Numbers of classes grow where they are `grown` times as many, and nine tenths of those in the second half are more than nine tenths of
    those in the first tenth, of which there are to be `least` (rules of thumb).
    """
    if np.isfinite(np.asarray(columns.get("loss/optimizer1", ()), dtype=float)).any():
        return "several optimizers have losses of their own, of which none has to fall"
    if not loop or "surrogates" not in loop:
        return None
    found, followers = loop["surrogates"], loop["modes"].get("followed_by")
    looks, updates = found["looks"], max(loop["updates"], 1)
    first, half = (
        [classes for update, classes in found["classes"] if a <= update / updates < b]
        for a, b in ((0.0, 0.1), (0.5, 1.0))
    )
    if 2 * found["both_signs"] > looks:
        return "the loss weighs log-probabilities by numbers of both signs, as policy gradients do, and need not fall"
    if 2 * found["chosen"] > looks:
        return "the loss weighs log-probabilities of choices that the model makes itself, and need not fall"
    if followers and not found["classes"]:  # a loss that is given classes is given what no copy makes
        return f"the targets come from a copy of the model ({followers[0]}) that follows it, so that the loss need not fall"
    losses = pd.Series(columns.get("loss", ()), dtype=float).dropna()
    placed = {row["class"] for row in loop.get("recall", ())} == {0} and half and min(half) > 2
    if placed and losses.iloc[-max(len(losses) // 10, 1) :].median() >= losses.iloc[0]:
        return f"all targets are the first of {half[-1]} candidates, as of contrastive losses, which rise as candidates come to resemble each other"
    known = len(first) >= least and len(half) >= least
    grows = known and np.median(half) >= grown * np.median(first)
    if grows and np.quantile(half, 0.1) > np.quantile(first, 0.9):
        return f"the classes that the loss tells apart grow in number, from {np.median(first):.0f} to {np.median(half):.0f}, so that it need not fall"
    return None


def selects_by_loss(record: RecordLike) -> bool:
    """Tell whether a study selects checkpoints by the loss."""
    return str(record.config["select"]).endswith("/loss")


def judged_without_loss(record: RecordLike, diagnosis: Diagnosis) -> Diagnosis:
    """Return the diagnosis with what compares losses as "does not apply", where the loss is not to be minimised.

    Where that was seen and not said ("not_minimised", why), it is not measured. A loss that becomes NaN stays what it is.
    """
    if not without_loss(record):
        return diagnosis
    loop = record.facts.get("loop") or {}
    moot = _BY_LOSS | (_BY_SELECTION if selects_by_loss(record) else set())
    moot -= {"loss.metric_disagrees"} if loop else set()  # of a loop it judges what is logged
    moot |= {"data.labels"} if (loop.get("modes") or {}).get("followed_by") else set()  # targets that a model makes
    trials = record.trials
    gone = bool(len(trials)) and bool(((trials["stage"] == Role.BASELINE) & (trials["state"] == "diverged")).any())

    def spared(code: str) -> bool:
        by_loss = moot & {code, f"{code.partition('.')[0]}.*"} and not code.endswith("_logits")
        return not by_loss or (gone and code == "stability.divergent")

    seen = record.facts.get("not_minimised") or (
        need_not_fall(record.facts.get("loop"), record.steps) if record.facts.get("minimised") is not False else None
    )
    nothing = _NOTHING if seen is None else _NOTHING | {"status": "not_measured", "summary": f"Not measured: {seen}."}
    findings = (finding if spared(finding.code) else replace(finding, **nothing) for finding in diagnosis.findings)
    return replace(diagnosis, findings=tuple(findings))


_NOTHING: dict[str, Any] = {
    "status": "ok",
    "summary": "Does not apply: the loss is not to be minimised (minimised=False), so that no run is judged by it.",
    "value": None, "threshold": None, "step": None, "advice": (),
}  # fmt: skip
