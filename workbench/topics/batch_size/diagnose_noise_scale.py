"""`noise_scale_finding`: what the measured gradient noise scale says about the batch size (F6.5)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from workbench.curves.replaced import replaced
from workbench.curves.trials import RecordLike
from workbench.findings.audited import why_missing
from workbench.findings.diagnosis import Diagnosis, Finding

__all__ = ["diagnose_noise_scale", "noise_scale_finding"]


def diagnose_noise_scale(record: RecordLike) -> Diagnosis:
    """Return the one code `batch_size.noise_scale` of any study that has measured it.

    Args:
        record: a study whose facts hold "noise_scale".
    """
    return Diagnosis.of(record, [noise_scale_finding(record)])


def noise_scale_finding(record: RecordLike) -> Finding:
    """Return `batch_size.noise_scale`: the predicted critical batch size, in examples.

    At a batch of the noise scale, a run needs about twice as many examples as with small batches and twice as many steps as with
    large ones. The value is the geometric mean over the moments of training that were measured.

    Args:
        record: a study whose facts hold "noise_scale".

    Source: McCandlish et al. 2018 (arXiv:1812.06162).
    """
    code, rows = "batch_size.noise_scale", list(record.facts.get("noise_scale") or ())
    if (record.facts.get("evaluation") or {}).get("coupled"):
        said = "Does not apply: the loss couples the examples of a batch, so that batches of another size have another loss."
        return Finding(code=code, status="ok", clause="F6.5", summary=said)
    if not rows:
        reason = why_missing(record.facts, "noise_scale", "the noise scale was not measured")
        return Finding(code=code, status="not_measured", clause="F6.5", summary=reason)
    own = int(record.config["batch_size"])
    evidence: dict[str, Any] = {"rows": rows, "batch_size": own}
    moments = [(int(row["step"]), _number(row["value"]), _number(row["low"])) for row in rows]
    known = any(math.isfinite(value) for _, value, _ in moments)
    value = float(np.median([value if math.isfinite(value) else low for _, value, low in moments]))
    shown = f"{'about' if known else 'at least'} {value:,.3g} examples"
    span = ", ".join(
        f"{f'{value:,.3g}' if math.isfinite(value) else f'at least {low:,.3g}'} at step {step:,}"
        for step, value, low in ([moments[0], moments[-1]] if len(moments) > 1 else moments)
    )
    evidence |= {} if known else {"at_least": value}
    numbers: dict[str, Any] = {"code": code, "clause": "F6.5", "value": value if known else None, "unit": "examples"}
    cost = next(iter(replaced(record).get(code, ())), None)
    if cost is not None and cost.costs:
        return Finding(
            status="warn", evidence=evidence | {"replaced": cost.to_dict()}, **numbers,
            summary=f"Gradients of {own} examples drown in their noise, whose scale is {shown} ({span}): {cost.told}.",
            advice=[f"Train with larger batches, {cost.usual:g} for a start; where memory is short, accumulate_steps splits them."],
        )  # fmt: skip
    if not known:
        means = "the mean gradient drowns in its noise"
    elif value > 2 * own:
        means = f"batches larger than {own} should save steps"
    elif value < own / 2:
        means = f"batches smaller than {own} should need fewer examples and hardly more steps"
    else:
        means = f"{own} is near where steps and examples cost alike"
    return Finding(
        status="ok", evidence=evidence, summary=f"The gradient noise scale is {shown} ({span}): {means}.", **numbers
    )


def _number(value: Any) -> float:
    """Return a stored number; JSON holds infinities as words."""
    return math.nan if value is None else float(value)
