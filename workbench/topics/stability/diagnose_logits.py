"""`judge_logits`: whether attention logits grow and output logits drift in the runs of the person's own config."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from workbench.curves.judged import JudgedStudy
from workbench.curves.trial_curves import TrialCurve
from workbench.findings.finding import Codes, Finding, Status

CODES = Codes({"stability.attention_logits": "F1.5", "stability.output_logits": "F1.5"})
_ABOUT = {
    "stability.attention_logits": ("attention_logit", "attention logit", "no attention over positions was seen", (
        "Normalise each head's queries and keys (qk-norm), which bounds their product.",
        "Lower peak_lr, or lengthen the warmup, under which they grow less.",
    )),
    "stability.output_logits": ("output_log_z", "|log Z| of the output logits", "no logits over a vocabulary were seen", (
        "Add a z-loss, 1e-4 times log Z squared (wb.language_model(..., z_loss=1e-4)).",
        "Start the output layer smaller, or set a weight_decay; an embedding that is the output layer too starts at about 0.02, not at 1.",
    )),
}  # fmt: skip


def judge_logits(
    record: JudgedStudy, own: Sequence[TrialCurve], others: Sequence[TrialCurve], *, large: float, lost: float
) -> list[Finding]:
    """Return both findings; see `diagnose_instability` for the thresholds.

    Args:
        own: runs of the person's own config, or those that stand for it.
        others: runs of other configs, whose largest value is evidence.
    """
    return [_judge(record, code, own, others, large=large, lost=lost) for code in CODES]


def _judge(
    record: JudgedStudy,
    code: str,
    own: Sequence[TrialCurve],
    others: Sequence[TrialCurve],
    *,
    large: float,
    lost: float,
) -> Finding:
    name, what, missing, advice = _ABOUT[code]
    known, there = _late(own, name), _late(others, name)
    if not known:
        return _unseen(record, code, (*own, *others), missing)
    value, curve, step = max(known, key=lambda found: found[0])
    layers = _layers(curve, name)
    evidence: dict[str, Any] = {"trial": curve.trial, "first": _first(curve, name), "layers": layers}
    if there:
        most = max(there, key=lambda found: found[0])
        evidence["others"] = {"value": most[0], "lr": most[1].lr}
    status: Status = "fail" if value > lost else "warn" if value > large else "ok"
    at = f", in {max(layers, key=lambda layer: layers[layer])}" if layers and status != "ok" else ""
    summary = (
        f"The largest {what} in the second half of training is {value:.3g}{at}; it began at {evidence['first']:.3g}."
    )
    if status == "ok" and there and most[0] > large:
        summary += f" At lr {most[1].lr:.4g} it reaches {most[0]:.3g}."
    return CODES.finding(
        code, status, summary, value=value, unit="nats" if name == "output_log_z" else "logit", step=step, evidence=evidence,
        threshold=lost if status == "fail" else large, advice=advice if status != "ok" else (),
    )  # fmt: skip


def _unseen(record: JudgedStudy, code: str, curves: Sequence[TrialCurve], missing: str) -> Finding:
    def had(name: str) -> bool:
        return any(name in curve.steps and curve.steps[name].notna().any() for curve in curves)

    looked = (record.facts.get("loop") or {}).get("logits", {})
    seen = looked.get("looks")
    if had(_ABOUT[code][0]):
        return CODES.not_measured(code, "the own config was looked into once, and growth takes two looks: more updates")
    if seen == 0 or (seen is None and (record.evals["metric"] == "token_accuracy").any()):
        return CODES.not_measured(code, "no forward pass was looked into; that of a compiled model shows nothing")
    if seen is None and not len(record.evals):
        return CODES.not_measured(code, "nothing was looked into")
    softmaxes = looked.get("softmaxes", (record.facts.get("architecture") or {}).get("softmaxes"))
    if had("output_log_z") and softmaxes == 0:
        return CODES.finding(code, "ok", "Does not apply: nothing in the model attends, as there is no softmax in it.")
    if had("output_log_z"):
        return CODES.not_measured(code, "no attention was seen: there is none, or its softmax was imported by name")
    return CODES.finding(code, "ok", f"Does not apply: {missing}.")


def _late(curves: Sequence[TrialCurve], name: str) -> list[tuple[float, TrialCurve, int]]:
    """Return the largest size in the second half of the looks at each run, and its step; a run that was looked at once, before its first update, has none."""
    found = []
    for curve in curves:
        if name not in curve.steps or curve.steps[name].count() < 2:
            continue
        late = _second_half(curve, name)
        values = late[name].abs().to_numpy(dtype=np.float64)
        at = int(values.argmax())
        found.append((float(values[at]), curve, int(late["step"].iloc[at])))
    return found


def _second_half(curve: TrialCurve, name: str) -> pd.DataFrame:
    seen = curve.steps.dropna(subset=name)
    return seen.iloc[len(seen) // 2 :]


def _first(curve: TrialCurve, name: str) -> float:
    return abs(float(curve.steps[name].dropna().iloc[0]))


def _layers(curve: TrialCurve, name: str) -> dict[str, float]:
    """Return the largest value, in the second half of the looks, of each layer that has a column of its own."""
    late = _second_half(curve, name)
    columns = [column for column in map(str, curve.steps) if column.startswith(f"{name}/")]
    return {c.split("/", 1)[1]: float(v) for c in columns if math.isfinite(v := late[c].abs().max())}
