"""`diagnose_warmup`: is a warmup called for, how short may it be, and what does it ask of the budget (F3)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from workbench.config import is_callable_name
from workbench.curves.judged import judged
from workbench.curves.replaced import replaced
from workbench.curves.selection import compare_selected
from workbench.curves.trials import RecordLike
from workbench.findings.advice import ADVICE
from workbench.findings.diagnosis import Diagnosis, Finding
from workbench.record.roles import Role
from workbench.topics.schedule.diagnose import read_trace
from workbench.topics.warmup.search import Length, WarmupSearch, read_searches
from workbench.topics.warmup.signs import WarmupSigns, warmup_signs

__all__ = ["CODES", "diagnose_warmup"]

CODES = ("warmup.needed", "warmup.shortest", "warmup.over_cap", "warmup.lengthen", "warmup.insufficient")
_CLAUSE = dict(zip(CODES, ("F3.1", "F3.6", "F3.10", "F3.14", "F3.3"), strict=True))


@dataclass(frozen=True, kw_only=True)
class _Study:
    """What the findings are made of.

    Attributes:
        facts: what the study noted: unstable_lr, cap, candidates, dropped, stopped.
        total: the baseline's steps.
        own: the baseline's own warmup steps.
        lead: the search that is reported, and its shortest length that passed on the full budget.
    """

    record: RecordLike
    facts: Mapping[str, Any]
    total: int
    own: int
    signs: WarmupSigns
    unstable_lr: float | None
    searches: Sequence[WarmupSearch]
    lead: tuple[WarmupSearch, Length] | None

    @property
    def exhausted(self) -> list[WarmupSearch]:
        """Searches whose longest allowed warmup fails."""
        cap = self.facts.get("cap")
        failing = [(s, s.longest_failing) for s in self.searches]
        return [s for s, low in failing if cap is not None and low is not None and low.steps >= cap]

    @property
    def dropped(self) -> str:
        """What was not tried because of the cap, as the end of a sentence."""
        steps = self.facts.get("dropped") or ()
        return f" Above the cap and not tried: {', '.join(f'{s:,}' for s in steps)} steps." if steps else ""

    @property
    def unknown(self) -> str:
        """Why no length is known."""
        if self.facts.get("stopped"):
            return f"Not measured: {self.facts['stopped']}.{self.dropped}"
        if self.exhausted:
            return f"Not measured: no warmup up to the cap of {self.facts['cap']:,} steps passes.{self.dropped}"
        if self.searches:
            return "Not measured: no length has passed a run of the full budget so far."
        return "Not measured: no warmup was tried."


def diagnose_warmup(
    record: RecordLike, *, min_multiple: float = 10.0, cap_frac: float = 0.1, lengthen_frac: float = 0.05
) -> Diagnosis:
    """Say whether a warmup is called for, which is the shortest that trains, and what it means for the run's length.

    Shares of the run are shares of the baseline's steps, before a warmup is prepended (O4).

    Args:
        record: a study of warmups, or any study: what was not tried is `not_measured`.
        min_multiple: the learning rate that a warmup has to open, over the one that is unstable without (F3.3).
        cap_frac: largest share of the baseline's steps that a warmup may take (F3.10).
        lengthen_frac: above this share the run may have to grow (F3.14).

    Returns:
        The codes `warmup.needed`, `.shortest`, `.over_cap`, `.lengthen` and `.insufficient`, once each.
    """
    record = judged(record)
    study = _read(record, min_multiple)
    findings = (
        _needed(study),
        _shortest(study),
        _over_cap(study, cap_frac),
        _lengthen(study, lengthen_frac),
        _insufficient(study, min_multiple),
    )
    return Diagnosis.of(record, findings)


def _read(record: RecordLike, min_multiple: float) -> _Study:
    facts: Mapping[str, Any] = record.facts.get("warmup") or {}
    signs = warmup_signs(record)
    unstable = facts.get("unstable_lr") or signs.unstable_lr
    searches = read_searches(record, unstable) if unstable and not facts.get("stopped") else ()
    found = [(search, length) for search in searches if (length := search.confirmed) is not None]
    enough = [one for one in found if one[0].multiple >= min_multiple * (1 - 1e-9)]
    lead = enough[0] if enough else found[-1] if found else None
    return _Study(
        record=record,
        facts=facts,
        total=int(record.config.get("total_steps") or 0),
        own=max(int(record.config.get("warmup_steps") or 0), _climb(record)),
        signs=signs,
        unstable_lr=unstable,
        searches=searches,
        lead=lead,
    )


def _climb(record: RecordLike, *, most: float = 0.5, near: float = 0.95) -> int:
    """Return the steps before the lr of the baseline's run is near its peak, where that is most of the run: a warmup by a schedule of one's own.

    A schedule that rises for a smaller part of the run, such as that of one cycle, is not called a warmup.
    """
    if not is_callable_name(record.config.get("schedule")):
        return 0
    curve = next((c for c in judged(record).curves if c.stage == Role.BASELINE), None)
    trace = None if curve is None else read_trace(curve)
    if curve is None or trace is None:
        return 0
    first = int(trace[0][np.flatnonzero(trace[1] >= near * trace[1].max())[0]])
    return first if first >= most * curve.total_steps else 0


def _unmeasured(code: str, summary: str, **more: Any) -> Finding:
    return Finding(code=code, status="not_measured", clause=_CLAUSE[code], summary=summary, **more)


def _needed(study: _Study) -> Finding:
    code, signs = "warmup.needed", study.signs
    evidence = asdict(signs)
    edge = "the best lr sits at the edge of the unstable region (F1.12)"
    rises = "a run far above the best lr falls and then rises (F1.13)"
    held = [text for text, holds in ((edge, signs.at_edge), (rises, signs.rises)) if holds]
    if study.lead is not None and study.lead[1].steps == 0:
        lr = study.lead[0].lr
        return Finding(
            code=code, status="ok", clause="F3.1", evidence=evidence,
            summary=f"No: lr {lr:.4g} trains without a warmup, so {study.unstable_lr:.4g} is not where instability starts.",
        )  # fmt: skip
    if held:
        return Finding(
            code=code, status="warn", clause="F3.1", summary=f"A warmup is called for: {' and '.join(held)}.",
            evidence=evidence, advice=[str(ADVICE["warmup"])],
        )  # fmt: skip
    if signs.holds is False:
        summary = "No sign of it: the best lr is not at a harmful edge, and no run far above it rises after a decline."
        return Finding(code=code, status="ok", clause="F3.1", summary=summary, evidence=evidence)
    missing = [text for text, holds in (("the sweep", signs.at_edge), ("the runs at 5 and 10 times lr*", signs.rises)) if holds is None]  # fmt: skip
    given = "; the unstable lr was given" if study.facts.get("source") == "given" else ""
    return _unmeasured(code, f"Not measured: this study lacks {' and '.join(missing)}{given}.", evidence=evidence)


def _shortest(study: _Study) -> Finding:
    code = "warmup.shortest"
    evidence = _tried(study)
    if study.lead is None:
        return _unmeasured(code, study.unknown, unit="steps", evidence=evidence)
    search, length = study.lead
    low = search.longest_failing
    evidence |= {
        "lr": search.lr, "multiple": search.multiple, "passes": length.steps, "fails": None if low is None else low.steps,
        "full_trial": length.full_trial, "total_steps": study.total + length.steps,
        "comparison": _compared(study),
    }  # fmt: skip
    shown = f"; {low.steps:,} fail" if low is not None else ""
    at = f"lr {search.lr:.4g}, {search.multiple:.3g} times the unstable one"
    summary = f"The shortest warmup that trains at {at}, takes {length.steps:,} steps{shown}.{study.dropped}"
    advice = [f"prepend_warmup(config.replace(peak_lr={search.lr:.6g}), {length.steps})"] if length.steps else []
    return Finding(
        code=code, status="ok", clause=_CLAUSE[code], value=float(length.steps), unit="steps", summary=summary,
        evidence=evidence, advice=advice,
    )  # fmt: skip


def _tried(study: _Study) -> dict[str, Any]:
    """Return everything that was tried, a table for each multiple (F3.4)."""
    rounds = [
        {
            "multiple": search.multiple,
            "lr": search.lr,
            "lengths": [asdict(one) | {"passes": one.passes} for one in search.lengths],
            "shortest": None if (found := search.confirmed) is None else found.steps,
            "next_shorter": None if (low := search.longest_failing) is None else low.steps,
        }
        for search in study.searches
    ]
    return {
        "unstable_lr": study.unstable_lr, "cap": study.facts.get("cap"), "rounds": rounds,
        "dropped": list(study.facts.get("dropped") or ()),
    }  # fmt: skip


def _compared(study: _Study) -> dict[str, Any] | None:
    """Hold every full run that trained with a warmup against the baseline by their selected checkpoints (F3.12).

    The shortest warmup that trains is not always the one that trains best.
    """
    record, lr = study.record, study.record.config.get("peak_lr")
    if not isinstance(lr, (int, float)) or "select" not in record.config:
        return None
    peers = judged(record).full_length
    baseline = [c.trial for c in peers if math.isclose(c.lr, lr, rel_tol=1e-9)]
    candidates = {
        f"lr {search.lr:.4g}, warmup over {one.steps:,} steps": [one.full_trial]
        for search in study.searches
        for one in search.lengths
        if one.full and one.full_trial is not None
    }
    return compare_selected(record, baseline=baseline, candidates=candidates)


def _over_cap(study: _Study, cap_frac: float, half: float = 0.5) -> Finding:
    code = "warmup.over_cap"
    steps = study.own + (study.lead[1].steps if study.lead else 0)
    cost = next(iter(replaced(study.record).get(code, ())), None)
    evidence = {"total_steps": study.total, "dropped": list(study.facts.get("dropped") or ()), "warmup_steps": steps}
    if study.total and not steps and not study.facts:
        return Finding(
            code=code,
            status="ok",
            clause=_CLAUSE[code],
            summary="No warmup is planned, so none is too long.",
            evidence=evidence,
        )
    if not study.total or (study.lead is None and not study.own):
        return _unmeasured(code, study.unknown, evidence=evidence)
    share, whose = steps / study.total, "The warmup" if study.lead else "The baseline's own warmup"
    known: dict[str, Any] = {
        "code": code, "clause": _CLAUSE[code], "value": share, "unit": "share of the baseline's steps",
        "threshold": cap_frac, "evidence": evidence,
    }  # fmt: skip
    text = f"{whose} of {steps:,} steps takes {share:.3g} of the baseline's {study.total:,}"
    if study.lead is None and share < half and cost is not None and not cost.costs:
        return Finding(status="ok", summary=f"{text}, and costs little: {cost.told}.", **known)
    if share > cap_frac * (1 + 1e-9):
        advice = [f"Train for at least {math.ceil(steps / cap_frac - 1e-9):,} steps, or warm up for fewer."]
        told = "" if study.lead or cost is None else f": {cost.told}"
        return Finding(
            status="warn",
            summary=f"{text}, more than the cap of {cap_frac:g}{told}.{study.dropped}",
            advice=advice,
            **known,
        )
    return Finding(status="ok", summary=f"{text}.{study.dropped}", **known)


def _lengthen(study: _Study, lengthen_frac: float) -> Finding:
    code = "warmup.lengthen"
    if study.lead is None or not study.total:
        return _unmeasured(code, study.unknown)
    steps = study.lead[1].steps
    proposed = study.total + steps
    known: dict[str, Any] = {
        "code": code, "clause": _CLAUSE[code], "value": steps / study.total, "threshold": lengthen_frac,
        "unit": "share of the baseline's steps",
        "evidence": {"total_steps": study.total, "warmup_steps": steps, "proposed_total_steps": proposed},
    }  # fmt: skip
    if steps <= lengthen_frac * study.total * (1 + 1e-9):
        summary = f"{steps:,} steps of warmup are no more than {lengthen_frac:g} of the baseline's {study.total:,}."
        return Finding(status="ok", summary=summary, **known)
    return Finding(
        status="warn", **known,
        summary=f"The warmup takes more than {lengthen_frac:g} of the baseline's steps: plan {study.total:,} + {steps:,} = "
        f"{proposed:,} steps.",
        advice=[f"Raise total_steps to {proposed:,}, so that the schedule after the warmup keeps its {study.total:,}."],
    )  # fmt: skip


def _insufficient(study: _Study, min_multiple: float) -> Finding:
    code = "warmup.insufficient"
    known: dict[str, Any] = {
        "code": code, "clause": _CLAUSE[code], "unit": "lr / unstable lr", "threshold": min_multiple,
        "evidence": _tried(study),
    }  # fmt: skip
    failing = study.exhausted
    others = [str(ADVICE[name]) for name in ("clipping", "optimizer", "architecture", "lower_lr")]
    if study.lead is not None:
        value = study.lead[0].multiple
        if value >= min_multiple * (1 - 1e-9):
            summary = f"A warmup opens {value:.3g} times the unstable lr."
            return Finding(status="ok", value=value, summary=summary, **known)
        return Finding(
            status="warn", value=value, advice=others, **known,
            summary=f"A warmup opens only {value:.3g} times the unstable lr, not {min_multiple:g} times.",
        )  # fmt: skip
    if not failing:
        return _unmeasured(code, study.unknown, evidence=known["evidence"])
    lowest = failing[0].multiple
    return Finding(
        status="warn", value=None, advice=others, **known,
        summary=f"No warmup up to the cap of {study.facts['cap']:,} steps is stable at {lowest:.3g} times the unstable lr or "
        f"above it: the edge is not curable by warmup.{study.dropped}",
    )  # fmt: skip
