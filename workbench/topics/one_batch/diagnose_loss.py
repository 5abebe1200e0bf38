"""Findings about loss and outputs: do they fit each other, is each example compared with its own target, is there a minimum?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from workbench.findings.diagnosis import Finding
from workbench.topics.one_batch.facts import Facts, finding, part, unmeasured

__all__ = ["LOSS_CODES", "loss_findings"]

LOSS_CODES = ("loss.unbounded", "loss.broadcast", "loss.double_softmax", "loss.output_range", "loss.metric_disagrees")


def loss_findings(
    facts: Facts, *, out_of_reach: float = 0.05, escape: float = 10.0, fitted: float = 0.8, metric_drop: float = 0.05
) -> list[Finding]:
    """Return the findings of `LOSS_CODES`.

    Args:
        facts: of one batch.
        out_of_reach: share of what there is to learn that the last activation function may put out of reach (rule of thumb).
        escape: how many times its first value the loss falls, far away from the outputs, before it has no bound (rule of thumb).
        fitted: gap from which on one batch is fitted so far that a metric has to show it (rule of thumb).
        metric_drop: by which a metric may fall meanwhile (rule of thumb).
    """
    loss = part(facts, "loss")
    if loss is None:
        found = [unmeasured(code, facts, "loss") for code in LOSS_CODES[:4]]
    else:
        found = [_unbounded(loss, escape), _broadcast(loss), _double(loss), _range(loss, out_of_reach)]
    return [*found, _metrics(facts, fitted, metric_drop)]


_NEGATE = ("Negate the loss: what is minimised is the error, or the negative log-likelihood.",)


def _unbounded(loss: Facts, limit: float) -> Finding:
    code, found = "loss.unbounded", loss["escape"]
    if loss["reversed"]:
        return finding(
            code,
            "fail",
            "The loss of every example falls as the output of the right class falls: its sign is wrong.",
            advice=_NEGATE,
        )
    if found is None or not all(isinstance(fall, (int, float)) for fall in found["falls"]):
        return finding(code, "ok", "The loss takes no outputs far from those of the model, or is infinite there.")
    falls = found["falls"]
    grows = all(later < 3 * earlier < 0 for earlier, later in pairwise(falls))
    value = -falls[-1] / max(found["start"], 1e-30)
    numbers: dict[str, Any] = {"value": value, "unit": "times", "threshold": limit, "evidence": found}
    if not (grows and value > limit and found["share"] >= 0.9):
        return finding(code, "ok", "The loss does not fall without end as outputs go far away.", **numbers)
    return finding(
        code, "fail", "The loss falls without end as outputs go wrong, for every example and in every direction: its sign is wrong.", **numbers,
        advice=_NEGATE,
    )  # fmt: skip


def _broadcast(loss: Facts) -> Finding:
    if loss["broadcast"] is None:
        return finding("loss.broadcast", "ok", "The loss compares the outputs of an example with its own targets.")
    which = "targets" if loss["broadcast"] == "targets" else "outputs"
    return finding(
        "loss.broadcast", "fail", f"The loss of an example is a mean over the {which} of all examples, which is best at one constant output.",
        evidence={"over": which},
        advice=["Make the shapes equal before they are compared: outputs (batch, 1) against targets (batch,) broadcast to (batch, batch); .squeeze(-1)."],
    )  # fmt: skip


def _double(loss: Facts) -> Finding:
    code, kind = "loss.double_softmax", loss["kind"]
    if kind not in ("classes", "binary"):
        return finding(code, "ok", "Does not apply: the loss is no cross-entropy of logits.")
    evidence = {name: loss[name] for name in ("kind", "head", "floor", "reachable", "ignorant", "classes")}
    numbers: dict[str, Any] = {
        "value": loss["reachable"],
        "unit": "loss",
        "threshold": loss["floor"],
        "evidence": evidence,
    }
    inside = _is_double(loss)
    if inside or (
        loss["head"] in ("Softmax", "Sigmoid") and loss["reachable"] > loss["floor"] + 0.1 * loss["ignorant"]
    ):
        where = (
            "the loss applies softmax or sigmoid twice"
            if inside
            else f"the model ends in a {loss['head'].lower()}, and the loss applies its own"
        )
        return finding(
            code, "fail", f"Probabilities are taken for logits: {where}. The loss cannot fall below {loss['reachable']:.3g}.", **numbers,
            advice=["Give the loss the logits: drop the softmax or sigmoid before it, and use it for predictions alone."],
        )  # fmt: skip
    return finding(code, "ok", "The loss takes logits, and gets them.", **numbers)


def _is_double(loss: Facts) -> bool:
    """Whether ideal logits leave exactly what a second softmax (or sigmoid) leaves: log(C - 1 + e) - 1 of log(C)."""
    low, high = loss["floor_ratios"]
    if (
        loss["kind"] == "binary"
    ):  # a second sigmoid takes 1 and 0 of the first for logits, and 1/2 where nothing is known
        wrong = (math.log1p(math.exp(-1)) / math.log1p(math.exp(-0.5)), math.log(2) / math.log1p(math.exp(0.5)))
        return all(min(abs(ratio - each) for each in wrong) < 1e-3 for ratio in (low, high))
    left = (math.log(loss["classes"] - 1 + math.e) - 1) / math.log(loss["classes"])
    return bool(abs(low - left) < 1e-3 and abs(high - left) < 1e-3)


def _range(loss: Facts, limit: float) -> Finding:
    code = "loss.output_range"
    if loss["kind"] is None or loss["range"] is None:
        why = (
            "the last operation of the model has no bounds"
            if loss["kind"]
            else "what the loss asks of the outputs is unknown"
        )
        return finding(code, "ok", f"Does not apply: {why}.")
    if loss["kind"] != "regression" and loss["head"] in ("Softmax", "Sigmoid"):
        return finding(
            code, "ok", "Does not apply: loss.double_softmax judges probabilities that are taken for logits."
        )
    learnable = loss["ignorant"] - loss["floor"]
    share = (loss["reachable"] - loss["floor"]) / learnable if learnable > 0 else 0.0
    numbers: dict[str, Any] = {"value": share, "unit": "share", "threshold": limit, "evidence": dict(loss)}
    if share <= limit:
        return finding(
            code, "ok", f"The model ends in a {loss['head'].lower()}, whose range reaches the targets.", **numbers
        )
    asked = (
        f"targets go from {loss['target_low']:.3g} to {loss['target_high']:.3g}"
        if loss["kind"] == "regression"
        else "the loss takes logits of any size"
    )
    return finding(
        code, "fail" if share >= 0.5 else "warn",
        f"The model ends in a {loss['head'].lower()}, but {asked}: whatever it learns, the loss of this batch is no "
        f"less than {loss['reachable']:.3g}{', more than' if share > 1 else '; it is'} {loss['ignorant']:.3g} for one and the same output without such bounds.", **numbers,
        advice=["End the model in a linear layer, or scale the targets into the range of its activation function."],
    )  # fmt: skip


def _learned(loss: Facts | None, seen: Sequence[float]) -> bool:
    """Whether a loss came more than halfway from that of knowing nothing to its floor."""
    known = loss is not None and loss["kind"] in ("classes", "binary")
    ignorant, floor = (loss["ignorant"], loss["floor"]) if loss is not None and known else (seen[0], 0.0)
    return bool(floor <= seen[-1] < floor + 0.5 * (ignorant - floor))


def _metrics(facts: Facts, fitted: float, drop: float) -> Finding:
    code, fit = "loss.metric_disagrees", part(facts, "fit")
    if fit is None:
        return unmeasured(code, facts, "fit")
    names = fit["larger_is_better"]
    if not names or not fit["informative"]:
        return finding(code, "ok", "Does not apply: no metric whose name says that larger is better.")
    run = max(fit["runs"], key=lambda r: r["gap"][-1] if isinstance(r["gap"][-1], (int, float)) else -1.0)
    gap, first, last = run["gap"][-1], run["metrics"][0], run["metrics"][-1]
    evidence = {"gap": gap, "loss": [run["loss"][0], run["loss"][-1]], "first": first, "last": last}
    if not isinstance(gap, (int, float)) or gap < fitted or not _learned(part(facts, "loss"), run["loss"]):
        return finding(
            code,
            "ok",
            "Does not apply: one batch was not fitted so far that a metric has to show it.",
            evidence=evidence,
        )
    worse = [n for n in names if last[n] < first[n] - drop or (last[n] < 0.5 and last[n] < first[n] + drop)]
    if not worse:
        return finding(code, "ok", f"As one batch is fitted, {', '.join(names)} improves.", evidence=evidence)
    name = worse[0]
    return finding(
        code, "warn", f"One batch is fitted (loss {run['loss'][0]:.3g} to {run['loss'][-1]:.3g}), but its {name} goes from {first[name]:.3g} to {last[name]:.3g}.",
        value=last[name] - first[name], unit=name, evidence=evidence,
        advice=["Check that loss and metric read the same target, and that the metric takes the outputs as the loss does."],
    )  # fmt: skip
