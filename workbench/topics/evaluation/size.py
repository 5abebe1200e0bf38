"""`too_small`: can the set that is evaluated show what it is used for, in the time that there is (P3.3, P3.4, P3.5)?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from workbench.findings.diagnosis import Finding
from workbench.topics.evaluation.detectable import detectable_difference
from workbench.topics.evaluation.sample_size import SizeBounds, evaluation_sizes, how_models_differ, size_bounds

__all__ = ["too_small"]

CODE = "evaluation.too_small"
Facts = Mapping[str, Any]


class _Wanted(NamedTuple):
    """The difference that the set should show, what it is, and from which one on it does."""

    difference: float | None
    what: str
    shows_from: float


def too_small(
    facts: Facts,
    *,
    false_alarm: float,
    power: float,
    learned_frac: float,
    comparisons: int,
    min_examples: int,
    material_frac: float,
    adopted: bool,
) -> Finding:
    """Return the finding `evaluation.too_small`; the arguments are those of `diagnose_evaluation_sample`.

    Args:
        facts: "evaluation_sample" of a study.
        false_alarm: how often two equal models are called different.
        power: how often a difference is found.
        learned_frac: share of what training gains that the set should show.
        comparisons: models of which the best is taken.
        min_examples: fewer are too few in any case.
        material_frac: a decision by less than this share of what training gains needs no more examples.
        adopted: whether the measured pair of models decided something.
    """
    level: dict[str, Any] = {"false_alarm": false_alarm, "power": power}
    bounds = size_bounds(facts, **level)
    if not how_models_differ(facts):
        return _one_model(facts, bounds, min_examples)
    n = int((facts.get("sample") or {}).get("size") or bounds.proposed or bounds.available)
    row = evaluation_sizes(facts, [n], comparisons=comparisons, **level).iloc[0]
    wanted = _wanted(facts, float(row["detectable"]), n, learned_frac=learned_frac, level=level, adopted=adopted)
    numbers = {name: float(row[name]) for name in ("detectable", "unpaired", "seconds", "selection_gap")}
    known: dict[str, Any] = {
        "code": CODE, "value": wanted.shows_from, "unit": str(facts["metric"]), "threshold": wanted.difference,
        "evidence": bounds._asdict() | numbers | level | {
            "size": n, "comparisons": comparisons, "pair": dict(facts["pair"]), "threshold_is": wanted.what,
            "shows_from": wanted.shows_from,
        },
    }  # fmt: skip
    summary, enough = _said(facts, bounds, wanted, n, numbers["detectable"])
    decided = wanted.what == "what was decided by"
    matters = (wanted.difference or 0.0) >= material_frac * (facts["pair"].get("learned") or 0.0)
    enough = enough or not (facts.get("asked") or (decided and matters))
    if enough and n < min_examples and not facts.get("is_train"):
        few = "1 example does" if n == 1 else f"{n} examples do"
        summary = f"{few} not show how far two models differ by chance, so no difference on them is to be trusted."
        enough = False
    if enough:
        return Finding(status="ok", summary=summary, **known)
    return Finding(status="warn", summary=summary, advice=_advice(bounds, facts.get("asked") or {}), **known)


def _one_model(facts: Facts, bounds: SizeBounds, min_examples: int) -> Finding:
    """Return what can be said of a set on which no two models were compared."""
    if bounds.reason:
        return Finding(
            code=CODE, status="warn", summary=f"No size does: {bounds.reason}.", evidence=bounds._asdict(),
            advice=_advice(bounds, facts.get("asked") or {}),
        )  # fmt: skip
    if facts["examples"] < min_examples and not facts.get("is_train"):
        few = f"{facts['examples']} examples are too few for any comparison of two models to be trusted."
        return Finding(code=CODE, status="warn", summary=few, evidence=bounds._asdict(), advice=_advice(bounds, {}))
    usual = "no two models with finite values were evaluated on the set, so it is unknown how far they differ by chance"
    summary = f"Not measured: {facts.get('reason') or usual}."
    return Finding(code=CODE, status="not_measured", summary=summary, evidence=bounds._asdict())


def _wanted(
    facts: Facts, detectable: float, n: int, *, learned_frac: float, level: dict[str, Any], adopted: bool
) -> _Wanted:
    asked, pair = facts.get("asked") or {}, facts["pair"]
    if asked.get("smallest_difference") is not None:
        return _Wanted(float(asked["smallest_difference"]), "asked for", detectable)
    if adopted and pair.get("difference") is not None:  # it was seen already: no chance of these examples is enough
        seen = detectable_difference(n, sd=float(pair["difference_sd"]), false_alarm=level["false_alarm"], power=0.5)
        return _Wanted(abs(float(pair["difference"])), "what was decided by", seen)
    if pair.get("learned") is not None and pair["learned"] > 0:
        share = f"{learned_frac:.0%} of what training gains"
        return _Wanted(learned_frac * float(pair["learned"]), share, detectable)
    return _Wanted(None, "unknown", detectable)


def _said(facts: Facts, bounds: SizeBounds, wanted: _Wanted, n: int, detectable: float) -> tuple[str, bool]:
    """Return the summary, and whether all is well."""
    asked = facts.get("asked") or {}
    shows = f"{n} examples show a difference of {_short(detectable)} in {facts['metric']}"
    if bounds.reason:
        return f"No size does: {bounds.reason}; {shows}.", False
    enough = wanted.difference is None or wanted.shows_from <= wanted.difference * (1 + 1e-9)
    if wanted.difference is None:
        return f"{shows}.", True
    if wanted.what == "asked for":
        if not enough:
            takes = f"a difference of {wanted.difference:g} takes {bounds.smallest} examples"
            return f"Too small: a sample of {n} was taken, and {takes}; {shows}.", False
        cost = f", within {asked['budget_s']:g} s an evaluation" if asked.get("budget_s") is not None else ""
        return (
            f"{shows}{cost}: sizes from {bounds.smallest} to {bounds.largest or bounds.available} keep both bounds.",
            True,
        )
    if wanted.what == "what was decided by":
        tell = f"{n} examples tell these two models apart where their {facts['metric']} differs by {_short(wanted.shows_from)} or more"
        return f"{tell}; the decision was by {_short(wanted.difference)}.", enough
    return f"{shows}; {_short(wanted.difference)} would be {wanted.what}.", enough


def _advice(bounds: SizeBounds, asked: Facts) -> list[str]:
    said = []
    if bounds.largest is not None and bounds.largest < bounds.available:
        said.append(
            f"Give an evaluation more than {asked['budget_s']:g} s, evaluate less often, or take a larger evaluation batch."
        )
    if bounds.smallest is not None:
        said.append(f"Keep {bounds.smallest} examples or more for validation, or ask for a larger difference.")
    else:
        said.append("Keep more examples for validation, 30 or more, or decide by larger differences only.")
    said.append("Compare models on the same examples, and on a held-out set before a small gain is believed.")
    if asked.get("label_noise"):
        said.append("Correct labels: each wrong one shrinks the difference that is seen.")
    return said


def _short(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "no size"
