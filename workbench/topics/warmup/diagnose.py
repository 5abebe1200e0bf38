"""`diagnose_warmup`: is a warmup called for, how short may it be, and what does it ask of the budget (F3)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from workbench.config import is_callable_name
from workbench.curves.judged import JudgedStudy, judged, judged_runs
from workbench.curves.selection import compare_selected
from workbench.curves.spikes import confirmation
from workbench.curves.trial_curves import RecordLike, judge
from workbench.findings.advice import ADVICE
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.finding import Codes, Finding
from workbench.record.roles import Role
from workbench.topics.lr_sweep.diagnose import diagnose_lr_sweep
from workbench.topics.optimizers.constants import replaced
from workbench.topics.schedule.diagnose import read_trace

CODES = Codes({
    "warmup.needed": "F3.1", "warmup.shortest": "F3.6", "warmup.over_cap": "F3.10", "warmup.lengthen": "F3.14",
    "warmup.insufficient": "F3.3",
})  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class WarmupSigns:
    """The two signs that call for a warmup: the best lr at the edge, and a rise after a decline far above it (F3.1)."""

    # the best lr sits at the edge of the unstable region, and no fix run has shown that this costs nothing (F1.12,
    # F1.4); None where it was not measured, or between lrs too far apart to tell
    at_edge: bool | None
    rises: bool | None  # a run far above the best lr falls steadily and then rises (F1.13); None where none was made
    unstable_lr: float | None  # at which training becomes unstable without recovery, None where it was not found
    # lower, upper: largest lr below it that is stable, and smallest that is not
    lower: float | None
    upper: float | None

    @property
    def holds(self) -> bool | None:
        """Whether one of them holds; None where neither does and one was not looked for."""
        if self.at_edge or self.rises:
            return True
        return None if None in (self.at_edge, self.rises) else False


def warmup_signs(record: RecordLike, *, edge_ratio: float = 2.0, far: tuple[float, float] = (5.0, 10.0)) -> WarmupSigns:
    """Return the two signs, from the sweep and from the runs at 5 and 10 times the best lr.

    Args:
        edge_ratio: lr* is at the edge when instability starts at or below this many times lr*, so a bracket wider than that
            does not tell (rule of thumb).
        far: between these multiples of the best lr a run of the sweep is as good as one made to confirm (F1.13).
    """
    study = judged(record)
    sweep = diagnose_lr_sweep(study)
    edge, unstable = sweep["lr.at_edge"], sweep["lr.unstable"]
    lower, upper = unstable.evidence.get("lower"), unstable.evidence.get("upper")
    told = lower is not None and upper is not None and upper <= edge_ratio * lower * (1 + 1e-9)
    star, rises = study.facts.get("lr_star") or sweep["lr.best"].value, None
    if star is not None:
        peers, (low, high) = study.full_length, (far[0] * star * (1 - 1e-6), far[1] * star * (1 + 1e-6))
        runs = [c for c in peers if c.stage == Role.CONFIRM or low <= c.lr <= high]
        shapes = [confirmation(item, lr_star=star)["shape"] for item in judge(runs, peers)]
        rises = any(shape == "rise after decline" for shape in shapes) if shapes else None
    at_edge = edge.status == "warn" if told and edge.status != "not_measured" else None
    return WarmupSigns(at_edge=at_edge, rises=rises, unstable_lr=unstable.value, lower=lower, upper=upper)


def diagnose_warmup(
    record: RecordLike, *, min_multiple: float = 10.0, cap_frac: float = 0.1, lengthen_frac: float = 0.05
) -> Diagnosis:
    """Say whether a warmup is called for, which is the shortest that trains, and what it means for the run's length.

    Shares of the run are shares of the baseline's steps, before a warmup is prepended (O4). What was not tried is `not_measured`.

    Args:
        min_multiple: the learning rate that a warmup has to open, over the one that is unstable without (F3.3).
        cap_frac: largest share of the baseline's steps that a warmup may take (F3.10).
        lengthen_frac: above this share the run may have to grow (F3.14).
    """
    study = _Warmups(judged(record), min_multiple)
    judgements = (study.over_cap(cap_frac), study.lengthen(lengthen_frac), study.insufficient())
    return Diagnosis.of(record, [study.needed(), study.shortest(), *judgements])


class _Warmups:
    """What a study knows of warmups."""

    def __init__(self, study: JudgedStudy, min_multiple: float) -> None:
        self.study, self.min_multiple = study, min_multiple
        self.facts: Mapping[str, Any] = study.facts.get("warmup") or {}
        self.signs = warmup_signs(study)
        self.unstable_lr = edge = self.facts.get("unstable_lr") or self.signs.unstable_lr
        self.searches = read_searches(study, edge) if edge and not self.facts.get("stopped") else ()
        found = [(search, length) for search in self.searches if (length := search.confirmed) is not None]
        enough = [one for one in found if one[0].multiple >= min_multiple * (1 - 1e-9)]
        self.lead: tuple[WarmupSearch, Length] | None = next(iter(enough or found[-1:]), None)
        self.total = int(study.config.get("total_steps") or 0)
        self.own = max(int(study.config.get("warmup_steps") or 0), _climb(study))
        cap, steps = self.facts.get("cap"), list(self.facts.get("dropped") or ())
        most = math.inf if cap is None else int(cap)
        failing = [(search, search.longest_failing) for search in self.searches]
        self.exhausted = [search for search, low in failing if low is not None and low.steps >= most]
        rounds = [
            {
                "multiple": search.multiple, "lr": search.lr,
                "lengths": [asdict(one) | {"passes": one.passes} for one in search.lengths],
                "shortest": _steps_of(search.confirmed), "next_shorter": _steps_of(search.longest_failing),
            }
            for search in self.searches
        ]  # fmt: skip
        self.tried = {"unstable_lr": edge, "cap": cap, "rounds": rounds, "dropped": steps}
        self.dropped = f" Above the cap and not tried: {', '.join(f'{s:,}' for s in steps)} steps." if steps else ""

    def _unknown(self, code: str, **fields: Any) -> Finding:
        """Return the finding that says why no length is known."""
        summary = "no warmup was tried."
        if self.facts.get("stopped"):
            summary = f"{self.facts['stopped']}.{self.dropped}"
        elif self.exhausted:
            summary = f"no warmup up to the cap of {self.facts['cap']:,} steps passes.{self.dropped}"
        elif self.searches:
            summary = "no length has passed a run of the full budget so far."
        return CODES.finding(code, "not_measured", f"Not measured: {summary}", **fields)

    def needed(self) -> Finding:
        signs, evidence = self.signs, asdict(self.signs)
        found = partial(CODES.finding, "warmup.needed", evidence=evidence)
        edge = "the best lr sits at the edge of the unstable region (F1.12)"
        rises = "a run far above the best lr falls and then rises (F1.13)"
        held = [text for text, holds in ((edge, signs.at_edge), (rises, signs.rises)) if holds]
        if self.lead is not None and self.lead[1].steps == 0:
            lr = f"{self.lead[0].lr:.4g} trains without a warmup, so {self.unstable_lr:.4g}"
            return found("ok", f"No: lr {lr} is not where instability starts.")
        if held:
            return found("warn", f"A warmup is needed: {' and '.join(held)}.", advice=[str(ADVICE["warmup"])])
        if signs.holds is False:
            text = "the best lr is not at a harmful edge, and no run far above it rises after a decline"
            return found("ok", f"No sign that a warmup is needed: {text}.")
        looked = (("the sweep", signs.at_edge), ("the runs at 5 and 10 times lr*", signs.rises))
        missing = " and ".join(text for text, holds in looked if holds is None)
        given = "; the unstable lr was given" if self.facts.get("source") == "given" else ""
        return CODES.not_measured("warmup.needed", f"this study lacks {missing}{given}", evidence=evidence)

    def shortest(self) -> Finding:
        code = "warmup.shortest"
        if self.lead is None:
            return self._unknown(code, unit="steps", evidence=self.tried)
        search, length = self.lead
        low = search.longest_failing
        evidence = self.tried | {
            "lr": search.lr, "multiple": search.multiple, "passes": length.steps, "fails": _steps_of(low),
            "full_trial": length.full_trial, "total_steps": self.total + length.steps, "comparison": self._compared(),
        }  # fmt: skip
        shown = f"; {low.steps:,} fail" if low is not None else ""
        at = f"lr {search.lr:.4g}, {search.multiple:.3g} times the unstable one"
        advice = [f"prepend_warmup(config.replace(peak_lr={search.lr:.6g}), {length.steps})"] if length.steps else []
        return CODES.finding(
            code, "ok", f"The shortest warmup that trains at {at}, takes {length.steps:,} steps{shown}.{self.dropped}",
            value=float(length.steps), unit="steps", evidence=evidence, advice=advice,
        )  # fmt: skip

    def _compared(self) -> dict[str, Any] | None:
        """Hold every full run that trained with a warmup against the baseline by their selected checkpoints (F3.12)."""
        lr = self.study.config.get("peak_lr")
        if not isinstance(lr, (int, float)) or "select" not in self.study.config:
            return None
        baseline = [c.trial for c in self.study.full_length if math.isclose(c.lr, lr, rel_tol=1e-9)]
        candidates = {
            f"lr {search.lr:.4g}, warmup over {one.steps:,} steps": [one.full_trial]
            for search in self.searches
            for one in search.lengths
            if one.full and one.full_trial is not None
        }
        return compare_selected(self.study, baseline=baseline, candidates=candidates)

    def over_cap(self, cap_frac: float, half: float = 0.5) -> Finding:
        code, steps = "warmup.over_cap", self.own + (self.lead[1].steps if self.lead else 0)
        evidence = {"total_steps": self.total, "dropped": self.tried["dropped"], "warmup_steps": steps}
        if self.total and not steps and not self.facts:
            return CODES.finding(code, "ok", "No warmup is planned, so none is too long.", evidence=evidence)
        if not self.total or (self.lead is None and not self.own):
            return self._unknown(code, evidence=evidence)
        share, whose = steps / self.total, "The warmup" if self.lead else "The baseline's own warmup"
        unit = "share of the baseline's steps"
        found = partial(CODES.finding, code, value=share, unit=unit, threshold=cap_frac, evidence=evidence)
        text = f"{whose} of {steps:,} steps takes {share:.3g} of the baseline's {self.total:,}"
        cost = next(iter(replaced(self.study).get(code, ())), None)
        if self.lead is None and share < half and cost is not None and not cost.costs:
            return found("ok", f"{text}, and costs little: {cost.words}.")
        if share <= cap_frac * (1 + 1e-9):
            return found("ok", f"{text}.{self.dropped}")
        price = "" if self.lead or cost is None else f": {cost.words}"
        advice = [f"Train for at least {math.ceil(steps / cap_frac - 1e-9):,} steps, or warm up for fewer."]
        return found("warn", f"{text}, more than the cap of {cap_frac:g}{price}.{self.dropped}", advice=advice)

    def lengthen(self, lengthen_frac: float) -> Finding:
        code, total = "warmup.lengthen", self.total
        if self.lead is None or not total:
            return self._unknown(code)
        steps = self.lead[1].steps
        proposed = total + steps
        found = partial(
            CODES.finding, code, value=steps / total, threshold=lengthen_frac, unit="share of the baseline's steps",
            evidence={"total_steps": total, "warmup_steps": steps, "proposed_total_steps": proposed},
        )  # fmt: skip
        if steps <= lengthen_frac * total * (1 + 1e-9):
            share = f"{lengthen_frac:g} of the baseline's {total:,}"
            return found("ok", f"{steps:,} steps of warmup are no more than {share}.")
        plan = f"plan {total:,} + {steps:,} = {proposed:,} steps"
        advice = [f"Raise total_steps to {proposed:,}, so that the schedule after the warmup keeps its {total:,}."]
        summary = f"The warmup takes more than {lengthen_frac:g} of the baseline's steps: {plan}."
        return found("warn", summary, advice=advice)

    def insufficient(self) -> Finding:
        least = self.min_multiple
        code, unit = "warmup.insufficient", "lr / unstable lr"
        found = partial(CODES.finding, code, unit=unit, threshold=least, evidence=self.tried)
        others = [str(ADVICE[name]) for name in ("clipping", "optimizer", "architecture", "lower_lr")]
        if self.lead is not None:
            value = self.lead[0].multiple
            if value >= least * (1 - 1e-9):
                return found("ok", f"A warmup opens {value:.3g} times the unstable lr.", value=value)
            summary = f"A warmup opens only {value:.3g} times the unstable lr, not {least:g} times."
            return found("warn", summary, value=value, advice=others)
        if not self.exhausted:
            return self._unknown(code, evidence=self.tried)
        reach = f"{self.exhausted[0].multiple:.3g} times the unstable lr or above it"
        summary = f"No warmup up to the cap of {self.facts['cap']:,} steps is stable at {reach}: warmup does not move the edge of stability.{self.dropped}"
        return found("warn", summary, advice=others)


def _steps_of(length: Length | None) -> int | None:
    return None if length is None else length.steps


def _climb(study: JudgedStudy, *, most: float = 0.5, near: float = 0.95) -> int:
    """Return the steps before the lr of the baseline's run is near its peak, where that is most of the run: a warmup of one's own."""
    if not is_callable_name(study.config.get("schedule")):
        return 0
    curve = next((c for c in study.curves if c.stage == Role.BASELINE), None)
    trace = None if curve is None else read_trace(curve)
    if curve is None or trace is None:
        return 0
    first = int(trace[0][np.flatnonzero(trace[1] >= near * trace[1].max())[0]])
    return first if first >= most * curve.total_steps else 0


_OWN = ("warmup", "warmup_full")
_ALL = (*_OWN, "fix", "confirm", "baseline", "lr_sweep", "lr_unstable")


@dataclass(frozen=True, kw_only=True)
class Length:
    """One warmup length at one learning rate, tried by a short trial (F3.7) and by a run of the full budget.

    Attributes:
        steps: of the ramp that is prepended; 0 is no warmup.
        short, full: whether they trained stably; None where they were not run.
        short_trial, full_trial: their numbers.
        outcome: of the loss curve of the longest run: "none" trained without a rise, "recovered" came back from one.
    """

    steps: int
    short: bool | None = None
    full: bool | None = None
    short_trial: int | None = None
    full_trial: int | None = None
    outcome: str | None = field(default=None, compare=False)

    @property
    def passes(self) -> bool | None:
        """What the longest run of this length shows."""
        return self.short if self.full is None else self.full


@dataclass(frozen=True, kw_only=True)
class WarmupSearch:
    """All lengths tried at one learning rate, in order; `multiple` is lr over the one that is unstable without warmup.

    Lengths are taken to be in order: what is shorter than one that fails is not trusted.
    """

    lr: float
    multiple: float
    lengths: tuple[Length, ...]

    @property
    def longest_failing(self) -> Length | None:
        """The longest length that does not train stably."""
        return max((one for one in self.lengths if one.passes is False), key=lambda one: one.steps, default=None)

    @property
    def passing(self) -> Length | None:
        """The shortest length that trains stably, as do all longer ones that were tried."""
        return min(self._above("short") + self._above("full"), key=lambda one: one.steps, default=None)

    @property
    def confirmed(self) -> Length | None:
        """The same, on the full budget."""
        return min(self._above("full"), key=lambda one: one.steps, default=None)

    def _above(self, run: Literal["short", "full"]) -> list[Length]:
        low = self.longest_failing
        return [one for one in self.lengths if getattr(one, run) and (low is None or one.steps > low.steps)]

    def __getitem__(self, steps: int) -> Length:
        """Return what is known of a length; nothing where it was not tried."""
        return next((one for one in self.lengths if one.steps == steps), Length(steps=steps))


NextRun = tuple[Literal["short", "full"], int]
"""The run that answers the next question: its kind and its warmup in steps."""


def next_run(search: WarmupSearch, *, cap: int, refine_ratio: float = 2.0) -> NextRun | None:
    """Return the run to make next, after the short trials of a list of lengths; None when the shortest is known.

    Where no length passes, the cap is tried. Where one does, short trials halve the gap to the longest that fails, and then
    the shortest that is left has to pass on the full budget. Once such a run has failed, short trials have shown that they
    do not see far enough: the cap is run on the full budget, and if it passes, the gap is halved by full-budget runs.
    The shortest that passes and the longest that fails may stay a factor of `refine_ratio` apart.
    """
    low, passing = search.longest_failing, search.passing
    if any(one.full is False for one in search.lengths):
        top = search.confirmed
        if top is None:
            return ("full", cap) if low is not None and low.steps < cap else None
        middle = _between(low, top, refine_ratio)
        return None if middle is None else ("full", middle)
    if passing is None:
        return ("short", cap) if search[cap].short is None else None
    if low is None and passing.steps:
        return ("short", 0)
    middle = _between(low, passing, refine_ratio)
    if middle is not None:
        return ("short", middle)
    return ("full", passing.steps) if passing.full is None else None


def _between(low: Length | None, top: Length, ratio: float) -> int | None:
    """Return the geometric middle of the gap below `top`; None where the gap is narrow."""
    if low is None:
        return None
    bottom = max(low.steps, 1)
    middle = round(math.sqrt(bottom * top.steps))
    wide = top.steps > ratio * bottom * (1 + 1e-9)
    return middle if wide and low.steps < middle < top.steps else None


def read_searches(record: RecordLike, unstable_lr: float) -> tuple[WarmupSearch, ...]:
    """Return what a study tried, one search a learning rate, in order of the rates."""
    config = record.config
    own, total, clip = int(config.get("warmup_steps") or 0), int(config["total_steps"]), config.get("max_grad_norm")
    runs = judged_runs(record, _ALL)
    rows = [row for row in runs if row["max_grad_norm"] == clip and row["outcome"] != "not_measured"]
    searches: dict[str, dict[int, Length]] = {f"{r['lr']:.9e}": {} for r in rows if r["stage"] in _OWN}
    rates: dict[str, float] = {}
    for row in rows:
        key, added, trial = f"{row['lr']:.9e}", row["warmup_steps"] - own, row["trial"]
        if key not in searches:
            continue
        rates.setdefault(key, row["lr"])
        one, passes = searches[key].get(added, Length(steps=added)), not row["lasting"]
        if row["stage"] == Role.WARMUP:
            outcome = row["outcome"] if one.full is None else one.outcome
            searches[key][added] = replace(one, short=passes, short_trial=trial, outcome=outcome)
        elif row["total_steps"] == total + added:
            searches[key][added] = replace(one, full=passes, full_trial=trial, outcome=row["outcome"])
    return tuple(
        WarmupSearch(lr=lr, multiple=lr / unstable_lr, lengths=tuple(one for _, one in sorted(searches[key].items())))
        for key, lr in sorted(rates.items(), key=lambda item: item[1])
    )
