"""What one batch tells of metrics: whether they improve as it is fitted, and whether they want what the loss wants."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

from workbench.findings.finding import Codes, Finding
from workbench.topics.one_batch.diagnose_layers import Facts, has_numbers, part, why_not

METRIC_CODES = Codes({"loss.metric_disagrees": "F1.1"})


def metric_finding(facts: Facts, fitted: float = 0.8, drop: float = 0.05) -> Finding:
    """Judge metrics by a batch that was fitted up to the gap `fitted`: none may fall by more than `drop` (rules of thumb)."""
    code, fit, loss = "loss.metric_disagrees", part(facts, "fit"), part(facts, "loss")
    if fit is None:
        return METRIC_CODES.not_measured(code, why_not(facts, "fit"))
    apart = _leans_apart((loss or {}).get("leans") or {}) or _least_elsewhere((loss or {}).get("astray"))
    if apart is not None:
        return apart
    names = fit["larger_is_better"]
    if not names or not fit["informative"]:
        return METRIC_CODES.finding(code, "ok", "Does not apply: no metric whose name says that larger is better.")
    run = max(fit["runs"], key=lambda r: r["gap"][-1] if has_numbers(r["gap"][-1]) else -1.0)
    gap, first, last = run["gap"][-1], run["metrics"][0], run["metrics"][-1]
    start, end = run["loss"][0], run["loss"][-1]
    say = partial(METRIC_CODES.finding, code, evidence={"gap": gap, "loss": [start, end], "first": first, "last": last})
    logits = loss is not None and loss["kind"] in ("classes", "binary")
    ignorant, floor = (loss["ignorant"], loss["floor"]) if loss is not None and logits else (start, 0.0)
    if not has_numbers(gap) or gap < fitted or not floor <= end < floor + 0.5 * (ignorant - floor):
        return say("ok", "Does not apply: one batch was not fitted so far that a metric has to show it.")
    worse = [n for n in names if last[n] < first[n] - drop or (last[n] < 0.5 and last[n] < first[n] + drop)]
    if not worse:
        return say("ok", f"As one batch is fitted, {', '.join(names)} improves.")
    name = worse[0]
    return say(
        "warn", f"One batch is fitted (loss {start:.3g} to {end:.3g}), but its {name} goes from {first[name]:.3g} to {last[name]:.3g}.",
        value=last[name] - first[name], unit=name,
        advice=["Check that loss and metric read the same target, and that the metric takes the outputs as the loss does."],
    )  # fmt: skip


def _least_elsewhere(found: Facts | None) -> Finding | None:
    """Return a finding where the loss is lower at other outputs than those that a metric calls right; else None."""
    if not found:
        return None
    targets, outputs = found["targets"], found["outputs"]
    return METRIC_CODES.finding(
        "loss.metric_disagrees", "warn", f"{found['metric']} is least where outputs are the targets, and the loss is not: it is {found['at_targets']:.3g} there, and {found['loss']:.3g} at other outputs, "
        f"of mean {outputs:.3g} where the targets have {targets:.3g}.", value=outputs - targets, unit="of the outputs", evidence=dict(found),
        advice=["Give the loss what it takes: poisson_nll_loss takes the logarithm of the rate unless log_input=False. Else have the metric undo what the model predicts, such as a logarithm."],
    )  # fmt: skip


def _leans_apart(leans: Mapping[str, float], *, clear: float = 1.5) -> Finding | None:
    """Return a finding where loss and metrics are asymmetric by the factor `clear` or more (rule of thumb), and no metric to the loss's side; else None."""
    sides = {
        name: math.log(lean) for name, lean in leans.items() if lean > 0 and abs(math.log(lean)) >= math.log(clear)
    }
    own = sides.pop("", 0.0)
    if not own or not sides or any(side * own > 0 for side in sides.values()):
        return None
    name, side = max(sides.items(), key=lambda item: abs(item[1]))
    high, low = ("above", "below") if own > 0 else ("below", "above")
    return METRIC_CODES.finding(
        "loss.metric_disagrees", "warn", f"Outputs {high} their targets cost {math.exp(abs(own)):.3g} times as much as outputs {low} them by the loss, "
        f"and {math.exp(-abs(side)):.3g} times by {name}: the error has the wrong sign in one of the two.", value=math.exp(side), unit=name, evidence={"leans": dict(leans)},
        advice=["Check the sign of the error. A quantile (pinball) loss takes target - output: max(tau * error, (tau - 1) * error)."],
    )  # fmt: skip
