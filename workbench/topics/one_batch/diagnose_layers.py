"""Findings layer by layer: dead, saturated and equal units, signals that vanish or explode, parameters that stay as chance made them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from workbench.curves.trial_curves import RecordLike
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.finding import Codes, Finding, Status, named

LAYER_CODES = Codes({
    "units.equal": "F2.4", "units.dead": "F2.4", "units.saturated": "F2.4", "units.dropped": "F2.4", "units.linear": "F2.4", "gradients.vanishing": "F2.4",
    "gradients.exploding": "F2.4",
})  # fmt: skip
CONSTANT_CODES = Codes({"init.constant_output": "F2.4"})
PARAMETER_CODES = Codes({"loop.frozen_random": "F1.1", "loop.unowned_parameters": "F1.1"})
Facts = Mapping[str, Any]
DEAD, FEW_UNITS = 0.8, 8
"""Share of a layer's ReLU units that are 0 for every example; of a smaller layer all must be (rules of thumb: plain networks of 8 layers
begin with 0.6)."""
SATURATED, BOTH_SIDES = 0.8, 0.1
"""Share of a layer's values within 0.01 of the bounds of its activation function; of a sigmoid, at either bound: fewer at one of them are a
gate that begins open or closed (rules of thumb: fresh layers have less than 0.05)."""
VANISHING, EXPLODING = 1e-5, 1e3
"""What the last layer gives over what the first is given, or first layer's gradient over the last one's (rules of thumb: eight plain layers under PyTorch's
initialisation have 5e-4)."""


MOST_DROPPED = 0.9
"""Rate of dropout from which a network hardly learns (Srivastava et al. 2014, figure 9a: the training error rises, too, where a tenth of the units is left)."""


def part(facts: Facts, name: str) -> Facts | None:
    """Return what one probe found; None where it could not look."""
    found = facts.get(name)
    return None if not isinstance(found, Mapping) or "reason" in found else found


def why_not(facts: Facts, name: str) -> str:
    """Return why a probe could not look."""
    found = facts.get(name)
    return str(found.get("reason", "")) if isinstance(found, Mapping) else "nobody looked"


def has_numbers(*values: Any) -> bool:
    """Tell whether values are finite numbers."""
    return all(isinstance(value, (int, float)) and math.isfinite(value) for value in values)


def constant_output(before: Facts, after: Facts, limit: float, later: str) -> Finding:
    """Judge the spread of the outputs between examples, of the fresh model and later."""
    code = "init.constant_output"
    if not before["outputs"] or not before["inputs_vary"]:
        said = "Does not apply: inputs do not vary, or outputs have no row for each example."
        return CONSTANT_CODES.finding(code, "ok", said, evidence=before)
    say = partial(CONSTANT_CODES.finding, code, evidence={"fresh": before, "fitted": after})
    finite = [each for each in (before, after) if has_numbers(each["spread"], each["size"])]
    if not finite:
        return say("ok", "Does not apply: the outputs are not finite, as other findings say.")
    ratio = max(each["spread"] / each["size"] if each["size"] else 0.0 for each in finite)
    say = partial(say, value=ratio, unit="ratio", threshold=limit)
    if ratio > limit:
        return say("ok", "The outputs differ from example to example.")
    return say(
        "fail", f"The outputs are the same for all examples, in the fresh model and {later}.",
        advice=["Check that the forward pass uses its input, and that no layer returns a constant: units that are off for all examples, or weights of zero."],
    )  # fmt: skip


def layer_findings(facts: Facts, *, fits: bool) -> list[Finding]:
    """Return the findings of `LAYER_CODES` from the facts of one batch; `fits` says whether the model can fit it."""
    fresh, fitted = part(facts, "layers"), part(facts, "fitted")
    if fresh is None or fitted is None:
        reason = why_not(facts, "layers" if fresh is None else "fitted")
        return [LAYER_CODES.not_measured(code, reason) for code in LAYER_CODES]
    equal = equal_units(fresh, fitted)
    bad: Status = "warn" if fits else "fail"
    pairs = zip(fresh["units"], fitted["units"], strict=False)
    units = [{**a, "later": b} for a, b in pairs if (a["module"], a["op"]) == (b["module"], b["op"])]
    rest = [linear_layers(fresh.get("in_a_row", ())), *signals(fresh, bad, apart=equal.status == "ok")]
    p, module = fresh.get("dropped", (0.0, ""))
    dropped = dropped_units(p, f"module {module}")
    return [equal, dead_units(units, bad), saturated_units(units, bad), dropped, *rest]


def equal_units(fresh: Facts, fitted: Facts) -> Finding:
    """Judge weights whose units are all alike, of the fresh model and later."""
    unused, later = set(fresh["not_in_graph"]), {each["name"] for each in fitted["equal"]}
    first = [each["name"] for each in fresh["equal"]]
    stuck = [name for name in first if name in later - unused]
    alike = [each["name"] for each in fresh["equal"] if each["product"] and not each["zero"]]
    names = stuck or [name for name in alike if name not in unused]
    evidence = {"equal_at_first": first, "equal_after_updates": sorted(later)}
    say = partial(LAYER_CODES.finding, "units.equal", value=float(len(names)), unit="layers", evidence=evidence)
    if not names:
        return say("ok", f"The units of each layer differ.{' Weights that begin at zero move apart.' if first else ''}")
    then = "and stay so after the first updates" if stuck else "and only chance, such as dropout, moves them apart"
    return say(
        "fail" if stuck else "warn", f"All units of {named(names)} begin with equal weights, {then}: a layer is one unit.",
        advice=["Initialise weights at random (PyTorch's default will do); zeros are for biases, and for the last layer of a branch or of the model."],
    )  # fmt: skip


def dead_units(units: Sequence[Facts], bad: Status, *, where: str = "in") -> Finding:
    """Judge units that are off for all examples, of the fresh model and later; `bad` is the status that is an alarm."""
    relus, say = [u for u in units if "dead" in u], partial(LAYER_CODES.finding, "units.dead")
    if not relus:
        return say("ok", "Does not apply: no ReLU was seen.")
    shares = [(min(u["dead"], u["later"]["dead"]), u) for u in relus]
    share = max(share for share, _ in shares)
    layers = [{"module": u["module"], "units": u["units"], "dead": u["dead"]} for u in relus][:50]
    say = partial(say, value=share, unit="share", threshold=DEAD, evidence={"layers": layers})
    off = [(s, u["module"]) for s, u in shares if s >= DEAD and (u["units"] >= FEW_UNITS or s == 1)]
    if not off:
        most = f"At most {share:.0%} of a layer's ReLU units are" if share else "No ReLU unit is"
        return say("ok", f"{most} off for every example.")
    fix = "Begin biases at 0 and scale inputs and weights to unit size; or use leaky ReLU, GELU, or a norm before the ReLU."
    least = min(off)[0]
    said = f"{f'{least:.0%} to ' * (least < share)}{share:.0%} of the ReLU units {where} {named([module for _, module in off])}"
    return say(bad, f"{said} are off for every example, and get no gradient.", advice=[fix])


def saturated_units(units: Sequence[Facts], bad: Status, *, where: str = "in") -> Finding:
    """Judge values of the fresh model at the bounds of their activation function."""
    bounded, say = [u for u in units if "saturated" in u], partial(LAYER_CODES.finding, "units.saturated")
    if not bounded:
        return say("ok", "Does not apply: no sigmoid, tanh or attention weights were seen.")
    share = max(u["saturated"] for u in bounded)
    layers = [{k: u[k] for k in ("module", "op", "saturated")} for u in bounded][:50]
    say = partial(say, value=share, unit="share", threshold=SATURATED, evidence={"layers": layers})
    off = [u for u in bounded if u["saturated"] >= SATURATED and u.get("one_sided", 1.0) >= BOTH_SIDES]
    if not off:
        return say("ok", f"At most {share:.0%} of a layer's values lie at the bounds of its activation function.")
    names, op = named([u["module"] for u in off]), off[0]["op"].strip("_")
    return say(
        bad, f"{share:.0%} of the values {where} {names} lie at the bounds of {op}, where the gradient is almost 0.",
        advice=["Scale the inputs to unit size, and initialise the weights smaller: 1/sqrt(fan_in); attention divides its scores by sqrt(width)."],
    )  # fmt: skip


def dropped_units(p: float, place: str, *, most: float = MOST_DROPPED) -> Finding:
    """Judge the highest rate of a dropout, and where it is."""
    say = partial(LAYER_CODES.finding, "units.dropped", value=p, unit="share of units", threshold=most)
    if not p:
        return say("ok", "Does not apply: no dropout was seen.")
    if p < most:
        return say("ok", f"Dropout leaves more than {1 - most:.0%} of the units in each pass.")
    return say(
        "fail", f"Dropout sets {p:.0%} of the values to zero in each pass{place and f' ({place})'}: too few are left to learn from.",
        advice=["p is the share that is dropped, not the one that is kept: 0.1 to 0.5 is usual."],
    )  # fmt: skip


def linear_layers(layers: Sequence[str]) -> Finding:
    """Judge the layers that have no activation function between them."""
    if not layers:
        return LAYER_CODES.finding("units.linear", "ok", "No layers in a row do what one would.")
    return LAYER_CODES.finding(
        "units.linear", "warn", f"The outputs are a linear function of the inputs: {len(layers)} layers ({named(layers)}) do what one would.", value=float(len(layers)),
        unit="layers", advice=["Put an activation function (nn.ReLU, nn.GELU) between layers; where a linear model is meant, leave it as it is."],
    )  # fmt: skip


def signals(fresh: Facts, bad: Status, *, apart: bool) -> list[Finding]:
    """Judge last layer's signal over the first, and first layer's gradient over the last, where there are two to compare."""
    vanishing, exploding = (
        partial(LAYER_CODES.finding, f"gradients.{name}", unit="ratio") for name in ("vanishing", "exploding")
    )
    layers = [each for each in fresh["layers"] if _positive(each["signal"])]
    gradients = [each["gradient"] for each in layers if _positive(each["gradient"])]
    if not apart or len(layers) < 2 or len(gradients) < 2:
        few = "fewer than two layers carry a signal and a gradient"
        why = few if apart else "units that are equal have no gradients of their own"
        return [LAYER_CODES.finding(code, "ok", f"Does not apply: {why}.") for code in list(LAYER_CODES)[-2:]]
    forward, backward = layers[-1]["signal"] / layers[0]["signal"], gradients[0] / gradients[-1]
    least, most = min(forward, backward), max(forward, backward)
    both = {"last_signal_over_first": forward, "first_gradient_over_last": backward}
    said = f"he last layer has {forward:.2g} of the first one's signal, and the first {backward:.2g} of the last one's gradient"
    low = partial(vanishing, value=least, threshold=VANISHING, evidence={**both, "layers": fresh["layers"][:50]})
    high = partial(exploding, value=most, threshold=EXPLODING, evidence=both)
    found = [low("ok", f"T{said}."), high("ok", f"Neither signal nor gradient grows by more than {most:.3g} times through the layers.")]  # fmt: skip
    if least < VANISHING:
        found[0] = low(
            bad, f"The signal dies out in the fresh model: t{said}.",
            advice=["Initialise weights to keep the signal's size (Kaiming for ReLU, Xavier for tanh); replace sigmoids; add norms or residual connections. "
                    "Take a recurrent layer's state at the last token, not at the end of the padding behind it."],
        )  # fmt: skip
    if not most <= EXPLODING:
        found[1] = high(
            "warn", f"The fresh model blows up: the signal grows {forward:.2g} times from the inputs to the last layer, the gradient "
            f"{backward:.2g} times on its way back.",
            advice=["Initialise weights to keep the signal's size (1/sqrt(fan_in), Kaiming for ReLU), or add norms."],
        )  # fmt: skip
    return found


def _positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and value > 0


def diagnose_parameters(record: RecordLike, *, small_frac: float = 0.05) -> Diagnosis:
    """Say whether parameters that are not trained, frozen or never given to the optimizer, hold anything but their random initialisation.

    Loaded weights are frozen for good reasons; random ones are features that nobody chose.

    Args:
        small_frac: frozen random parameters up to this share of all are taken for a design, such as random features or fixed
            positions (rule of thumb).
    """
    facts = record.facts.get("parameters")
    if not facts:
        otherwise = "the parameters that are not trained were not examined"
        return Diagnosis.of(record, PARAMETER_CODES.missing(record.facts, "parameters", otherwise))
    total = max(int(facts["numbers"]), 1)
    return Diagnosis.of(record, [frozen(facts["frozen"], total, small_frac), _unowned(facts, total)])


def frozen(rows: Sequence[Facts], total: int, small: float) -> Finding:
    """Return `loop.frozen_random`: `rows` are the frozen parameters, `total` the numbers of all."""
    random, share = _random([row for row in rows if not row.get("waves")], total)
    waves, few = _random(rows, total)[0], "No parameter is frozen."
    if random:
        said = f"{share:.0%} of the parameters are frozen at their random initialisation: {named(random, shown=4)}."
    elif waves:
        said = f"{named(waves, shown=4)}: frozen at random, and only a sine or cosine takes what they make, as in random Fourier features."
    else:
        said = f"{len(rows)} parameter tensors are frozen, none at a random initialisation." if rows else few
    wrong = bool(random) and share > small
    return PARAMETER_CODES.finding(
        "loop.frozen_random", "warn" if wrong else "ok", said, value=share, unit="share of all parameters", threshold=small,
        evidence={"parameters": random},
        advice=[
            "Load the weights that should be kept (load_state_dict), or train them: requires_grad_(True).",
            "Where random features are meant, hold them as buffers (register_buffer), which say so.",
        ] if wrong else (),
    )  # fmt: skip


def _unowned(facts: Facts, total: int) -> Finding:
    """Judge random parameters that the optimizer cannot train because the model does not know them, or was not given."""
    unit, code = "share of all parameters", "loop.unowned_parameters"
    random, share = _random(facts["outside"], total)
    if random:
        rows = facts["outside"]
        by_loss = all(row.get("by_loss") for row in rows if row["random"])
        kept = "Keep layers in nn.ModuleList or nn.ModuleDict, and parameters in nn.ParameterList: a plain list or dict is not searched."
        return PARAMETER_CODES.finding(
            code, "warn", f"The {'loss' if by_loss else 'forward pass'} uses {named(random, shown=4)}, which model.parameters() does not hold: "
            f"{share:.0%} of all parameters are never trained.",
            value=share, unit=unit, evidence={"parameters": [str(row["name"]) for row in rows], "random": random, "outside": True},
            advice=["Make what the loss trains a part of the model; freeze or load what it only measures with." if by_loss else kept],
        )  # fmt: skip
    names, (random, share) = [str(row["name"]) for row in facts["unowned"]], _random(facts["unowned"], total)
    evidence = {"parameters": names, "random": random}
    say = partial(PARAMETER_CODES.finding, code, value=share, unit=unit, evidence=evidence)
    said = f"The optimizer was not given {named(names, shown=4)}"
    if not random:
        return say("ok", f"{said}, which hold no random initialisation." if names else "The optimizer has every parameter that is not frozen.")  # fmt: skip
    fix = "Give the optimizer model.parameters(), or freeze by requires_grad_(False) what is not to be trained."
    return say("warn", f"{said}: they stay as they are initialised, {share:.0%} of all parameters at random.", advice=[fix])  # fmt: skip


def _random(rows: Sequence[Facts], total: int) -> tuple[list[str], float]:
    found = [row for row in rows if row["random"]]
    return [str(row["name"]) for row in found], sum(int(row["numbers"]) for row in found) / total
