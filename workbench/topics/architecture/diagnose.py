"""`diagnose_architecture`: which practices of its architecture a model follows: residual connections, norms, branches of zero.

A practice that is absent is no fault in itself. What each finding warns of grows with depth, so each has a depth below which
it stays silent.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pandas as pd

from workbench.curves.trial_curves import RecordLike
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.finding import Codes, Finding, named

CODES = Codes({
    "architecture.no_residual": "F2.5", "architecture.no_norm": "F2.5", "architecture.norm_after_add": "F2.7",
    "architecture.branch_not_zero": "F2.8",
})  # fmt: skip
_JOIN = [
    "module", "skip", "placement", "norm", "layers", "last_weight", "zero_parameters", "skip_rms", "branch_rms", "sum_rms",
]  # fmt: skip
_DEPTH = ["variant", "depth", "stable_lr", "unstable_lr", "censored", "best_lr", "best_loss", "identity_at_start"]
_NORMED = ("pre", "branch")
"""Placements of a norm by which the size of a branch does not depend on that of its skip: sums grow by addition alone."""
_HOW = "read from one traced forward pass of a fresh model on its first batch, and from the module tree"
NAMED = 8  # names that a sentence or its evidence holds


def diagnose_architecture(record: RecordLike, *, deep_layers: int = 10, growth: float = 4.0) -> Diagnosis:
    """Say which practices of F2.5 to F2.8 a model follows.

    Args:
        record: a study whose facts hold "architecture".
        deep_layers: weight layers on the longest way from which a missing practice is worth a warning (rule of thumb: plain
            networks of 8 to 19 layers were trained before residual connections, with growing care).
        growth: branches that do not begin at zero are worth a warning where the sums grow by more than this factor at
            initialisation, between norms after an addition or over the whole depth (rule of thumb: sixteen branches of equal size under x + Norm(f(x)) reach it;
            without a norm four do).

    Returns:
        `architecture.no_residual`, `architecture.no_norm`, `architecture.norm_after_add` and
        `architecture.branch_not_zero`, once each.
    """
    facts = record.facts.get("architecture") or {
        "reason": "this study has no audit of the model; wb.architecture.Study makes one"
    }
    if facts.get("reason"):
        return Diagnosis.of(record, CODES.missing(record.facts, "architecture", facts["reason"]))
    limit = deep_layers if facts["weight_layers"] >= deep_layers else None
    findings = (
        _no_residual(facts, limit, deep_layers), _no_norm(facts, limit), _norm_after_add(facts, limit, deep_layers),
        _branch_not_zero(facts, deep=limit is not None, growth=growth),
    )  # fmt: skip
    return Diagnosis.of(record, findings)


def architecture_joins(record: RecordLike) -> pd.DataFrame:
    """Return one row a residual connection, in the order in which they ran; empty without an audit.

    module (that adds), skip ("identity" or "projection"), placement (of the norm: "branch" x + Norm(f(x)), "after_add"
    Norm(x + f(x)), "pre" x + f(Norm(x)), "inside", "none"), norm, layers (weight layers of the branch), last_weight,
    zero_parameters (that end the branch), and the root mean squares skip_rms, branch_rms (0: it begins at zero), sum_rms.
    """
    return pd.DataFrame((record.facts.get("architecture") or {}).get("joins", []), columns=_JOIN)


def architecture_depths(record: RecordLike) -> pd.DataFrame:
    """Return one row a variant and depth of an `ArchitectureStudy`; empty where none was trained.

    variant, depth (blocks), stable_lr (largest of the grid below the onset of instability, NaN without), unstable_lr,
    censored ("above": all that were tried are stable; "below": none is; "untrained": none learns anything; None), best_lr,
    best_loss, and identity_at_start: whether the fresh network returns what it returns without its blocks (F2.8).
    """
    table = pd.DataFrame(record.facts.get("architecture_depths") or [], columns=_DEPTH)
    for name in ("stable_lr", "unstable_lr", "best_lr", "best_loss"):
        table[name] = pd.to_numeric(table[name], errors="coerce").astype(float)
    known = table["censored"].notna()
    table["censored"] = table["censored"].astype(object).where(known, None)
    return table


def lr_sensitivity(record: RecordLike) -> pd.DataFrame:
    """Return one row a variant, depth and learning rate of an `ArchitectureStudy`; empty where none was trained.

    variant, depth, lr, loss (mean of the run's last tenth, at most that of the untrained model, which is also that of a run that diverged),
    and sensitivity, the same for all rows of a variant and depth: the mean over the learning rates of how far the loss is above the lowest
    (Wortsman et al. 2023, arXiv:2309.14322, section 2.2). 0 is a loss that does not depend on the learning rate within the range.
    """
    rows = []
    for row in record.facts.get("architecture_depths") or []:
        found = [
            (lr, min(row["initial_loss"] if loss is None else loss, row["initial_loss"]))
            for lr, loss in row.get("losses", [])
        ]
        lowest = min((loss for _, loss in found), default=0.0)
        mean = sum(loss - lowest for _, loss in found) / max(len(found), 1)
        rows += [(row["variant"], row["depth"], lr, loss, mean) for lr, loss in found]
    return pd.DataFrame(rows, columns=["variant", "depth", "lr", "loss", "sensitivity"])


_SIGNS = ("init.", "units.", "gradients.", "stability.", "lr.nothing_learns", "lr.too_high", "lr.at_edge", "lr.probabilistic",
          "loop.overfit_one_batch", "warmup.", "clipping.", "evaluation.underfits")  # fmt: skip
"""Alarms that a missing practice may be the cause of."""


def excused_architecture(diagnosis: Diagnosis) -> Diagnosis:
    """Return the diagnosis without warnings of a practice that is missing where training shows no sign of it."""
    signs = any(f.status in ("warn", "fail") and f.code.startswith(_SIGNS) for f in diagnosis)
    trained = all(f.status != "not_measured" for f in diagnosis if f.code in ("stability.early", "stability.divergent"))
    if signs or not trained:
        return diagnosis
    said = " Nothing in this training asks for it: it starts well, and is stable."
    findings = tuple(
        replace(f, status="ok", summary=f.summary + said, advice=()) if f.code.startswith("architecture.") and f.status == "warn" else f
        for f in diagnosis
    )  # fmt: skip
    return replace(diagnosis, findings=findings)


def _audit_evidence(facts: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"weight_layers": facts["weight_layers"], "residual_connections": facts["num_joins"], **more, "source": _HOW}


def _no_residual(facts: Mapping[str, Any], limit: int | None, deep_layers: int) -> Finding:
    layers, count, modules = facts["weight_layers"], facts["num_joins"], [join["module"] for join in facts["joins"]]
    say = partial(
        CODES.finding, "architecture.no_residual", value=float(layers), unit="weight layers", threshold=float(deep_layers),
        evidence=_audit_evidence(facts, modules=_first(modules)),
    )  # fmt: skip
    if count:
        return say("ok", f"{_times(count, 'residual connection')} over {layers} weight layers: {named(modules)}.")
    if limit is None:
        return say("ok", f"No residual connection, and with {_times(layers, 'weight layer')} on its longest path the model needs none.")  # fmt: skip
    return say(
        "warn", f"No residual connection over {layers} weight layers in a row.",
        advice=(
            "Add what goes into a block to what comes out of it, x + Norm(f(x)), every two or three weight layers.",
            "Where the shapes differ, project x by a single linear layer or a 1x1 convolution.",
        ),
    )  # fmt: skip


def _no_norm(facts: Mapping[str, Any], limit: int | None) -> Finding:
    layers, norms, joins = facts["weight_layers"], facts["norms"], facts["joins"]
    unused = facts["norm_modules"] if not norms else []
    evidence = _audit_evidence(facts, norms=_first(norms), modules_that_did_not_run=_first(unused))
    say = partial(CODES.finding, "architecture.no_norm", value=float(len(norms)), unit="normalisations", evidence=evidence)  # fmt: skip
    if norms:
        return say("ok", f"{_times(len(norms), 'normalisation')}: {named(norms)}.")
    if joins and all(join["branch_rms"] == 0 for join in joins):
        return say("ok", "No normalisation, and none is needed at the start: every residual branch begins at zero.")
    if limit is None:
        return say("ok", f"No normalisation, and with {_times(layers, 'weight layer')} on its longest path the model can do without.")  # fmt: skip
    idle = f" {_times(len(unused), 'norm module')} did not run." if unused else ""
    return say(
        "warn", f"No normalisation over {layers} weight layers, deep from {limit} on.{idle}",
        advice=(
            "Normalise as the last operation of a block before it joins the residual: x + Norm(f(x)).",
            "Or let the branches begin at zero, which needs no norm (ReZero).",
        ),
    )  # fmt: skip


def _norm_after_add(facts: Mapping[str, Any], limit: int | None, deep_layers: int) -> Finding:
    joins = facts["joins"]
    after = [join["norm"] for join in joins if join["placement"] == "after_add"]
    places = dict(Counter(join["placement"] for join in joins))
    say = partial(
        CODES.finding, "architecture.norm_after_add", value=float(len(after)), unit="residual connections",
        evidence=_audit_evidence(facts, placements=places, norms=_first(after)),
    )  # fmt: skip
    if not joins:
        return say("ok", "No residual connection, so no norm after one.")
    if not after:
        where = ", ".join(f"{n} {place}" for place, n in places.items())
        return say("ok", f"No norm follows a residual addition ({where}).")
    said = f"Norm(x + f(x)) in {len(after)} of {_times(len(joins), 'residual connection')}: {named(after)}"
    if limit is None:
        return say("ok", f"{said}; below {deep_layers} weight layers that is rarely a problem.")
    return say(
        "warn", f"{said}. No path through the network bypasses the norms, which can cause trouble.",
        advice=(
            "Move the norm into the branch: x + Norm(f(x)), or x + f(Norm(x)) with one more norm before the head "
            "(norm_first=True in torch's transformer layers).",
            "Where the placement has to stay, as with pretrained weights, warm the learning rate up.",
        ),
    )  # fmt: skip


def _branch_not_zero(facts: Mapping[str, Any], *, deep: bool, growth: float) -> Finding:
    joins, say = facts["joins"], partial(CODES.finding, "architecture.branch_not_zero")
    if not joins:
        return say(
            "ok", "No residual connection, so no branch that could begin at zero.", evidence=_audit_evidence(facts)
        )
    other = _first([join["last_weight"] or join["module"] for join in joins if join["branch_rms"] != 0])
    begin = sum(join["branch_rms"] == 0 for join in joins)
    zeros = [name for join in joins for name in join["zero_parameters"] if join["branch_rms"] == 0]
    measured = _growth(joins)
    evidence = _audit_evidence(
        facts, begin_at_zero=begin, zero_parameters=_first(zeros), not_zero=other, growth=measured
    )
    numbers: dict[str, Any] = {"value": measured, "unit": "times", "threshold": growth, "evidence": evidence}
    if begin == len(joins):
        by = f", by {named(zeros)}" if zeros else ""
        return say("ok", f"All {len(joins)} residual branches begin at zero{by}.", **numbers)
    said = f"{len(joins) - begin} of {_times(len(joins), 'residual branch', 'residual branches')} do not begin at zero"
    if measured is None:
        return say("not_measured", f"{said}, and how the sums grow is unknown: they are not finite.")
    grown = f"at initialisation the sums grow by a factor of {measured:.3g}"
    if not deep or measured <= growth:
        return say("ok", f"{said}; {grown}, so there is little to gain.", **numbers)
    fix = f"Begin each branch at zero: the gain of its last norm, its last weight ({other[0]}, ...), or a scalar in front of it (ReZero)."
    return say("warn", f"{said}, and {grown}.", **numbers, advice=(fix,))


def _growth(joins: Sequence[Mapping[str, Any]]) -> float | None:
    """Return by how much the sums grow between two norms after an addition; None where a size is not finite or a skip 0."""
    grown = largest = 1.0
    for place, join in enumerate(joins):
        skip, total, branch = join["skip_rms"], join["sum_rms"], join["branch_rms"]
        known = all(isinstance(v, (int, float)) for v in (skip, total))
        if not known or not (skip > 0 and 0 < total / skip < float("inf")):
            return None
        first = place == 0 and join["placement"] in _NORMED and isinstance(branch, (int, float))
        grown *= total / max(skip, branch if first else skip)  # a small embedding is no growth
        largest = max(largest, grown)
        if join["placement"] == "after_add":
            grown = 1.0
    return float(f"{largest:.3g}")  # more digits would differ between processors


def _times(count: int, one: str, many: str | None = None) -> str:
    return f"{count} {one if count == 1 else many or one + 's'}"


def _first(names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(names))[:NAMED]
