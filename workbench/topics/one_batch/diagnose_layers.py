"""Findings about units and gradients, layer by layer: dead, saturated and equal units, signals that vanish or explode."""

from __future__ import annotations

from typing import Any

from workbench.findings.diagnosis import Finding
from workbench.topics.one_batch.facts import Facts, finding, named, part, unmeasured

__all__ = ["LAYER_CODES", "layer_findings"]

LAYER_CODES = (
    "units.equal",
    "units.dead",
    "units.saturated",
    "units.linear",
    "gradients.vanishing",
    "gradients.exploding",
)


def layer_findings(
    facts: Facts,
    *,
    fits: bool,
    dead: float = 0.8,
    few_units: int = 8,
    saturated: float = 0.8,
    both_sides: float = 0.1,
    vanishing: float = 1e-5,
    exploding: float = 1e3,
    linear: float = 1e-4,
) -> list[Finding]:
    """Return the findings of `LAYER_CODES`.

    Args:
        facts: of one batch.
        fits: whether the model can fit it.
        dead: share of a layer's ReLU units that are 0 for every example (rule of thumb: plain networks of 8 layers begin with 0.6).
        few_units: of a smaller layer all must be dead (rule of thumb).
        saturated: share of a layer's values within 0.01 of the bounds of its activation function (rule of thumb: fresh layers have
            less than 0.05).
        both_sides: of a sigmoid, share at either bound; fewer at one of them are a gate that begins open or closed (rule of thumb).
        vanishing: last layer's signal over the inputs', or first layer's gradient over the last one's (rule of thumb: eight plain
            layers under PyTorch's initialisation have 5e-4).
        exploding: the same, the other way (rule of thumb).
        linear: how far outputs halfway between two examples may be from the mean of theirs, over the largest difference between
            outputs, where only rounding keeps them apart (rule of thumb: float32 gives 1e-6).
    """
    fresh, fitted = part(facts, "layers"), part(facts, "fitted")
    if fresh is None or fitted is None:
        return [unmeasured(code, facts, "layers" if fresh is None else "fitted") for code in LAYER_CODES]
    equal = _equal(fresh, fitted)
    units = [
        {**a, "later": b}
        for a, b in zip(fresh["units"], fitted["units"], strict=False)
        if (a["module"], a["op"]) == (b["module"], b["op"])
    ]
    if equal.status != "ok":
        said = "Does not apply: units that are equal have no gradients of their own."
        both = [finding(f"gradients.{name}", "ok", said) for name in ("vanishing", "exploding")]
    else:
        both = [_vanishing(fresh, vanishing, fits=fits), _exploding(fresh, exploding)]
    return [
        equal, _dead(units, dead, few_units, fits=fits), _saturated(units, saturated, both_sides, fits=fits),
        _linear(part(facts, "affine"), fresh, linear), *both,
    ]  # fmt: skip


def _equal(fresh: Facts, fitted: Facts) -> Finding:
    unused = set(fresh["not_in_graph"])
    later = {each["name"] for each in fitted["equal"]}
    stuck = [each["name"] for each in fresh["equal"] if each["name"] in later - unused]
    alike = [
        each["name"] for each in fresh["equal"] if each["product"] and not each["zero"] and each["name"] not in unused
    ]
    evidence = {"equal_at_first": [each["name"] for each in fresh["equal"]], "equal_after_updates": sorted(later)}
    if not stuck and not alike:
        zeros = " Weights that begin at zero move apart." if fresh["equal"] else ""
        return finding(
            "units.equal", "ok", f"The units of each layer differ.{zeros}", value=0.0, unit="layers", evidence=evidence
        )
    names = stuck or alike
    then = "and stay so after the first updates" if stuck else "and only chance, such as dropout, moves them apart"
    return finding(
        "units.equal", "fail" if stuck else "warn", f"All units of {named(names)} begin with equal weights, {then}: a layer is one unit.",
        value=float(len(names)), unit="layers", evidence=evidence,
        advice=["Initialise weights at random (PyTorch's default will do); zeros are for biases, and for the last layer of a branch or of the model."],
    )  # fmt: skip


def _dead(units: list[dict[str, Any]], limit: float, few: int, *, fits: bool) -> Finding:
    relus = [u for u in units if "dead" in u]
    if not relus:
        return finding("units.dead", "ok", "Does not apply: no ReLU was seen.")
    shares = [(min(u["dead"], u["later"]["dead"]), u) for u in relus]
    share = max(share for share, _ in shares)
    evidence = {"layers": [{"module": u["module"], "units": u["units"], "dead": u["dead"]} for u in relus][:50]}
    numbers: dict[str, Any] = {"value": share, "unit": "share", "threshold": limit, "evidence": evidence}
    off = [u for s, u in shares if s >= limit and (u["units"] >= few or s == 1)]
    if not off:
        return finding(
            "units.dead", "ok", f"At most {share:.0%} of a layer's ReLU units are off for every example.", **numbers
        )
    return finding(
        "units.dead", "warn" if fits else "fail",
        f"{share:.0%} of the ReLU units in {named([u['module'] for u in off])} are off for every example, and get no gradient.", **numbers,
        advice=["Begin biases at 0 and scale inputs and weights to unit size; or use leaky ReLU, GELU, or a norm before the ReLU."],
    )  # fmt: skip


def _saturated(units: list[dict[str, Any]], limit: float, both: float, *, fits: bool) -> Finding:
    bounded = [u for u in units if "saturated" in u]
    if not bounded:
        return finding("units.saturated", "ok", "Does not apply: no sigmoid, tanh or attention weights were seen.")
    share = max(u["saturated"] for u in bounded)
    evidence = {"layers": [{k: u[k] for k in ("module", "op", "saturated")} for u in bounded][:50]}
    numbers: dict[str, Any] = {"value": share, "unit": "share", "threshold": limit, "evidence": evidence}
    off = [u for u in bounded if u["saturated"] >= limit and u.get("one_sided", 1.0) >= both]
    if not off:
        return finding(
            "units.saturated",
            "ok",
            f"At most {share:.0%} of a layer's values lie at the bounds of its activation function.",
            **numbers,
        )
    return finding(
        "units.saturated", "warn" if fits else "fail",
        f"{share:.0%} of the values in {named([u['module'] for u in off])} lie at the bounds of {off[0]['op'].strip('_')}, where the gradient is almost 0.",
        **numbers,
        advice=["Scale the inputs to unit size, and initialise the weights smaller: 1/sqrt(fan_in); attention divides its scores by sqrt(width)."],
    )  # fmt: skip


def _linear(affine: Facts | None, fresh: Facts, limit: float) -> Finding:
    code, layers = "units.linear", [each["module"] for each in fresh["layers"]]
    if affine is None or len(layers) < 2:
        return finding(code, "ok", "Does not apply: fewer than two layers between numbers and outputs that vary.")
    numbers: dict[str, Any] = {"value": affine["deviation"], "unit": "ratio", "threshold": limit, "evidence": {"layers": layers[:50]}}  # fmt: skip
    if not affine["deviation"] <= limit:
        return finding(code, "ok", "The outputs are no linear function of the inputs.", **numbers)
    return finding(
        code, "warn", f"The outputs are a linear function of the inputs: {len(layers)} layers ({named(layers)}) do what one would.", **numbers,
        advice=["Put an activation function (nn.ReLU, nn.GELU) between layers; where a linear model is meant, leave it as it is."],
    )  # fmt: skip


def _ratios(fresh: Facts) -> tuple[float, float] | None:
    """Return last layer's signal over the first, and first layer's gradient over the last, where there are two to compare."""
    layers = [each for each in fresh["layers"] if _positive(each["signal"])]
    gradients = [each["gradient"] for each in layers if _positive(each["gradient"])]
    if len(layers) < 2 or len(gradients) < 2:
        return None
    first = fresh["inputs"] if _positive(fresh["inputs"]) else layers[0]["signal"]
    return layers[-1]["signal"] / first, gradients[0] / gradients[-1]


def _positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and value > 0


def _vanishing(fresh: Facts, limit: float, *, fits: bool) -> Finding:
    ratios = _ratios(fresh)
    if ratios is None:
        return finding(
            "gradients.vanishing", "ok", "Does not apply: fewer than two layers carry a signal and a gradient."
        )
    forward, backward = ratios
    numbers: dict[str, Any] = {
        "value": min(ratios), "unit": "ratio", "threshold": limit,
        "evidence": {"last_signal_over_first": forward, "first_gradient_over_last": backward, "layers": fresh["layers"][:50]},
    }  # fmt: skip
    said = f"the last layer has {forward:.2g} of the first one's signal, and the first {backward:.2g} of the last one's gradient"
    if min(ratios) >= limit:
        return finding("gradients.vanishing", "ok", f"{said[0].upper()}{said[1:]}.", **numbers)
    return finding(
        "gradients.vanishing", "warn" if fits else "fail", f"The signal dies out in the fresh model: {said}.", **numbers,
        advice=["Initialise weights to keep the signal's size (Kaiming for ReLU, Xavier for tanh); replace sigmoids; add norms or residual connections."],
    )  # fmt: skip


def _exploding(fresh: Facts, limit: float) -> Finding:
    ratios = _ratios(fresh)
    if ratios is None:
        return finding(
            "gradients.exploding", "ok", "Does not apply: fewer than two layers carry a signal and a gradient."
        )
    forward, backward = ratios
    numbers: dict[str, Any] = {
        "value": max(ratios), "unit": "ratio", "threshold": limit,
        "evidence": {"last_signal_over_first": forward, "first_gradient_over_last": backward},
    }  # fmt: skip
    if max(ratios) <= limit:
        return finding(
            "gradients.exploding",
            "ok",
            f"Neither signal nor gradient grows by more than {max(ratios):.3g} times through the layers.",
            **numbers,
        )
    return finding(
        "gradients.exploding", "warn",
        f"The fresh model blows up: the signal grows {forward:.2g} times from the inputs to the last layer, the gradient {backward:.2g} times on its way back.",
        **numbers,
        advice=["Initialise weights to keep the signal's size (1/sqrt(fan_in), Kaiming for ReLU), or add norms."],
    )  # fmt: skip
