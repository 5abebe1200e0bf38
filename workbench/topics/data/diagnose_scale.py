"""`data.scale`: are the numbers that a model starts from, and those that it has to reach, of about unit size (F1.1)?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workbench.findings.diagnosis import Finding
from workbench.topics.data.diagnose_order import data_finding

__all__ = ["scale"]

Facts = Mapping[str, Any]
_STANDARDISE = (
    "Standardise the inputs by the mean and deviation of the training split, and every other split by the same two."
)


def scale(
    facts: Facts,
    *,
    largest: float,
    smallest: float,
    feature_ratio: float,
    target: float,
    output_ratio: float,
    far_ratio: float,
    far_share: float,
) -> Finding:
    """Judge the size of inputs and targets.

    Args:
        facts: of the data.
        largest: size of the inputs (root mean square).
        smallest: size of the inputs.
        feature_ratio: the largest feature over a quarter of the features, where these are as good as invisible.
        target: size of targets, or one over it.
        output_ratio: of targets to what a new model says, or the other way round, for that to matter.
        far_ratio: distance of a row from the middle, in units of the median row's.
        far_share: of the rows that may lie so far and still be single ones.
    """
    found = facts["scale"]
    single = _code(facts.get("codes") or ()) or _far(facts.get("far") or {}, far_ratio, far_share)
    if single is not None:
        return single
    targets = _targets(found.get("targets"), target, output_ratio)
    if "size" not in found:
        if targets is not None:
            return targets
        return data_finding("scale", "ok", f"Does not apply: {found.get('reason', 'nothing was read')}.")
    where = f" where they reach {_layer(found['layer'])}" if found["layer"] else ""
    size, ratio = found["size"], found["largest"] / found["smallest"]
    numbers: dict[str, Any] = {"value": size, "unit": "input", "threshold": largest, "evidence": dict(found)}
    if size > largest:
        far = f"; feature {found['largest_at']} is {found['largest']:.3g}, half of the features less than {found['median']:.3g}" if found["largest"] > feature_ratio**0.5 * found["median"] else ""  # fmt: skip
        return data_finding("scale", "warn", f"Inputs are of size {size:.3g}{where}, far from 1{far}: gradients of the first layer are as many times too large, and the loss is steeper by the square.", advice=(_STANDARDISE,), **numbers)  # fmt: skip
    if found["median"] < smallest and size < 100 * smallest:
        return data_finding("scale", "warn", f"Half of the inputs are smaller than {found['median']:.2g}{where}: the first layer hardly sees them beside its bias.", advice=(_STANDARDISE,), **{**numbers, "value": found["median"], "threshold": smallest})  # fmt: skip
    if found["quarter"] * feature_ratio < found["largest"]:
        return data_finding(
            "scale", "warn", f"A quarter of the features is smaller than {found['quarter']:.2g}{where}, and feature {found['largest_at']} "
            f"is {found['largest']:.3g}: a model sees little but the large ones.", advice=(_STANDARDISE,), **numbers,
        )  # fmt: skip
    if targets is not None:
        return targets
    return data_finding("scale", "ok", f"Inputs are of size {size:.3g}{where}; no feature is more than {ratio:.3g} times another.", **numbers)  # fmt: skip


def _code(codes: Sequence[Facts]) -> Finding | None:
    """Return the finding on values that stand for missing ones, if there are some."""
    if not codes:
        return None
    first = codes[0]
    columns = first["columns"]
    where = f" of {columns} column{'s' if columns > 1 else ''} of the inputs" if columns else " of the inputs"
    others = ", ".join(f"{code['value']:g}" for code in codes[1:4])
    more = f"; {others} too" if others else ""
    return data_finding(
        "scale", "warn", f"{first['value']:g} stands in {first['share']:.1%} of the cells{where}, {first['deviations']:.3g} deviations from "
        f"the others and none between: a code for a missing value{more}. To a model it is a number like any other.",
        value=first["deviations"], unit="deviations", evidence={"codes": list(codes)},
        advice=("Replace it by the mean of the training split, with a column that tells that it was missing, before anything is standardised.",),
    )  # fmt: skip


def _far(facts: Facts, ratio: float, share: float) -> Finding | None:
    """Return the finding on single rows that lie far from all others, if there are some."""
    for kind, known in facts.items():
        far = [(place, away) for place, away in known["far"] if away > ratio]
        if far and len(far) <= max(1, share * known["rows"]):
            few = f"{len(far)} of {known['rows']:,} training examples that were looked at have {kind}"
            return data_finding(
                "scale", "warn", f"{few} more than {ratio:g} times as far from the middle as the median example: example {far[0][0]} "
                f"lies {far[0][1]:.3g} times as far. Each of them is a spike of the gradient.",
                value=far[0][1], unit="times the median", threshold=ratio, evidence={kind: far},
                advice=("Look at these examples for wrong units and codes of missing values; drop or clip them before training.",),
            )  # fmt: skip
    return None


def _layer(layer: Any) -> str:
    name, kind = layer
    return f"the first layer ({name or 'the model'}, {kind})"


def _targets(found: Facts | None, limit: float, output_ratio: float) -> Finding | None:
    """Return the finding on targets that are far from unit size and from what the model says before training, if they are."""
    if not found or "size" not in found:
        return None
    size, outputs = found["size"], found["outputs"]
    large = size > limit and size > output_ratio * outputs
    if not large and not (size < 1 / limit and outputs > output_ratio * size):
        return None
    effect = (
        "the loss and its gradients start at the square of it"
        if large
        else "any error that matters is lost in the loss"
    )
    return data_finding(
        "scale", "warn", f"Targets are of size {size:.3g}, what the untrained model says of {outputs:.2g}: {effect}.", value=size,
        unit="target", threshold=limit if large else 1 / limit, evidence=dict(found),
        advice=("Standardise the targets by their mean and deviation over the training split, and undo it for predictions.",),
    )  # fmt: skip
