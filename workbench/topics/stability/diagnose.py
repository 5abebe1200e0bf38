"""`diagnose_instability`: early or in the middle, whether training recovers, and whose run it is (F1.5, F1.8 to F1.13)."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

from workbench.curves.instability import Rise
from workbench.curves.judged import is_harmful, judged, judged_runs, own_trials
from workbench.curves.losses import all_rose, nothing_clear
from workbench.curves.lr_search import lr_best, unstable_bracket
from workbench.curves.spikes import (
    confirmation,
    first_update,
    rise_cause,
    seen_at_interval,
    told,
    told_course,
    told_replay,
)
from workbench.curves.trial_curves import RecordLike, TrialCurve, TrialVerdict, judge
from workbench.findings.advice import Kind, advise
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.finding import Codes, Finding, Status
from workbench.findings.first_look import length_of_runs
from workbench.plots.words import counted
from workbench.record.read import periodic_rows
from workbench.record.roles import Role
from workbench.topics.stability.diagnose_logits import CODES as LOGITS
from workbench.topics.stability.diagnose_logits import judge_logits

Zone = Literal["own", "below", "near", "other", "far"]
ZONES: tuple[Zone, ...] = ("own", "below", "near", "other", "far")
CODES = Codes({
    "stability.headroom": "F1.4", "stability.early": "F1.5", "stability.early_recovers": "F1.10", "stability.mid": "F1.5",
    "stability.divergent": "F1.12", "stability.spike": "F1.9", **LOGITS,
})  # fmt: skip
_LATER = ("stability.mid", "stability.spike")  # of the middle, which a run that was lost early does not have
_BACK = ("recovered", "settling")
_NAME = {
    "stability.early": "Unstable early, without recovery",
    "stability.early_recovers": "The loss spikes early and recovers",
    "stability.mid": "Loss rises in mid-training",
    "stability.divergent": "Diverges: ends non-finite or no better than it began",
    "stability.spike": "Short loss spike in mid-training",
}
KINDS = tuple(_NAME)  # the codes about what a loss curve does


class _Hit(NamedTuple):
    """One trial that shows what a code is about, with the rise that does."""

    item: TrialVerdict
    rise: Rise | None
    zone: Zone

    @property
    def step(self) -> int | None:
        return None if self.rise is None else self.rise.onset_step

    @property
    def back(self) -> bool:
        """Training came back from it, or is coming back as it ends."""
        return self.rise is not None and self.rise.outcome in _BACK

    @property
    def steps(self) -> int:
        """Steps that the loss stood above where it had been."""
        if self.rise is None:
            return self.item.curve.total_steps
        return self.rise.steps_to_recover or self.item.curve.total_steps - self.rise.onset_step


class _Instability:
    """What the verdicts are held against: the trials of the person's `own` config, and all that say something about stability.

    `harmful` says whether a fix has shown that the edge costs something; None where none was tried.
    """

    def __init__(self, record: RecordLike, near_ratio: float, spike_frac: float, limits: dict[str, float]) -> None:
        study = self.record = judged(record)
        self.near_ratio, self.spike_frac, self.noise_sds = near_ratio, spike_frac, limits["noise_sds"]
        own = set(own_trials(study))
        curves = [
            c for c in study.curves
            if (c.point or c.stage == Role.PROBE or c.trial in own) and (c.finished or len(c.loss) > 9)
        ]  # fmt: skip
        self.own = own & {c.trial for c in curves}
        self.table = study.sweep()
        self.best = lr_best(self.table, **limits) if len(self.table.points) > 1 else None
        self.star = None if self.best is None else self.best.measured_lr
        self.bracket = None if self.best is None else unstable_bracket(self.table)
        fixes = [] if self.bracket is None else judged_runs(study, ["fix"], above=self.bracket.middle)
        self.harmful = is_harmful(self.table, fixes, **limits)
        baseline = study.config.get("peak_lr")
        self.baseline = float(baseline) if isinstance(baseline, (int, float)) else 0.0
        self.items = judge(curves, study.full_length)
        self.judged = [item for item in self.items if item.verdict.outcome != "not_measured"]
        self.listed = {"lr_star": self.star, "baseline_lr": self.baseline, "harmful": self.harmful}

    def unreadable(self) -> str | None:
        """Return why no loss curve says anything; None where one does."""
        if not self.items:
            return "no trial has enough steps to be judged"
        if not self.judged:
            return self.items[0].verdict.reason.rstrip(".")
        flat = len(self.table.points) > 1 and self.best is None and not all_rose(self.table)
        return nothing_clear(self.table) if flat and not any(item.curve.diverged for item in self.items) else None

    def zone(self, curve: TrialCurve) -> Zone:
        """ "own": the person's config; "other": any other beside it. Without such a run, by lr: "own" at or below the
        baseline's, "below" up to lr*, "near" up to `near_ratio` lr*, "far" beyond.
        """
        if self.own:
            return "own" if curve.trial in self.own else "other"
        limits = (self.baseline, self.star or 0.0, self.near_ratio * (self.star or 0.0))
        return next((zone for zone, limit in zip(ZONES, limits, strict=False) if curve.lr <= limit * (1 + 1e-9)), "far")

    def standing(self) -> tuple[list[TrialCurve], list[TrialCurve]]:
        """Return the runs of the person's config, or those that stand for it, and all others."""
        curves = [item.curve for item in self.items]
        return [c for c in curves if self.zone(c) in ZONES[:2]], [c for c in curves if self.zone(c) not in ZONES[:2]]

    def hits(self) -> dict[str, list[_Hit]]:
        """Sort every rise of every trial under its code."""
        hits: dict[str, list[_Hit]] = {code: [] for code in KINDS}
        for item in self.items:
            zone, verdict = self.zone(item.curve), item.verdict
            for rise in verdict.rises:
                if verdict.is_lasting and rise.outcome in _BACK:  # no news, where the run did not come back
                    continue
                took = rise.steps_to_recover
                soon = took is not None and took <= self.spike_frac * item.curve.total_steps
                code = "stability.spike" if rise.outcome == "recovered" and soon else "stability.mid"
                if rise.when == "early":
                    code = "stability.early_recovers" if rise.outcome in _BACK else "stability.early"
                hits[code].append(_Hit(item, rise, zone))
            never = verdict.outcome not in ("lasting", "divergent") and item.is_lasting(self.star)
            if verdict.outcome == "divergent" or never:
                last = verdict.rises[-1] if verdict.rises and not never else None
                hits["stability.divergent"].append(_Hit(item, last, zone))
            if verdict.outcome == "divergent" and not verdict.rises:
                hits["stability.early"].append(_Hit(item, None, zone))
        return hits

    def lost(self, hits: Sequence[_Hit], material_frac: float = 0.01) -> str | None:
        """Return what coming back has cost, None where that is nothing.

        A smaller lr ends lower by more than the noise and `material_frac` of what was learned (rule of thumb); where none was
        run, the rises take more than `spike_frac` of the steps.
        """
        mine = next((p for p in self.table.points if math.isclose(p.lr, self.baseline, rel_tol=1e-9)), None)
        smaller = [p for p in self.table.points if p.lr < self.baseline * (1 - 1e-9) and not p.unstable]
        if mine is None or not smaller:
            worst = max(hits, key=lambda h: h.steps)
            total = worst.item.curve.total_steps
            return f"{worst.steps} of {total} steps" if worst.steps > self.spike_frac * total else None
        best = min(smaller, key=lambda p: p.loss)
        noise, gain = self.noise_sds * math.hypot(mine.loss_se, best.loss_se), mine.loss - best.loss
        margin = max(noise if math.isfinite(noise) else 0.0, material_frac * self.table.progress)
        return f"{gain:.3g} of loss against lr {best.lr:.4g}" if gain > margin else None

    def vouching(self, code: str) -> list[TrialVerdict]:
        """Return the judged trials from the baseline's lr to lr*, or back, that ran long enough to have shown the code."""
        low, *_, high = sorted([self.baseline, self.baseline if self.star is None else self.star])
        limits = low * (1 - 1e-9), high * (1 + 1e-9)
        here = [i for i in self.judged if i.curve.trial in self.own or limits[0] <= i.curve.lr <= limits[1]]
        return [item for item in here if not (code in _LATER and item.curve.diverged and item.verdict.when == "early")]


def diagnose_instability(
    record: RecordLike,
    *,
    near_ratio: float = 2.0,
    spike_frac: float = 0.1,
    headroom_ratio: float = 1.5,
    usual_interval: int = 100,
    noise_sds: float = 2.0,
    loss_tolerance: float = 0.02,
    large_logit: float = 100.0,
    lost_logit: float = 1e4,
) -> Diagnosis:
    """Say when training becomes unstable, at which lr, and what came of it.

    Every workload is unstable at some lr (F1.4). So a code fails where a run of the study's own config, under any seed, does not
    recover, and warns where it recovers and that costs something. What other configs do says how far away that is,
    `stability.headroom`, and is listed. A study that never ran its own config, as a sweep of lrs given, is judged by lr: fail at or
    below the baseline's, warn up to `near_ratio` times lr* unless fix runs show that nothing is lost by it, `ok` beyond.
    What was not seen is `ok` only where a trial from the baseline's lr to lr* could be judged, else `not_measured`.

    Args:
        near_ratio: "just above lr*" (O2), the multiple that the early probe runs at (F1.11).
        spike_frac: a mid-run rise that is back within this share of the steps is a spike; where no smaller lr was run, a rise that
            takes longer costs something (rule of thumb).
        headroom_ratio: an unstable lr below this many times the baseline's is near (rule of thumb: other data or another seed move
            the edge by some ten per cent).
        usual_interval: evaluation interval that an early excursion is held against (F1.10).
        large_logit: attention logit from which softmax's weights are all but one-hot; Kimi Team 2025 (arXiv:2507.20534) keep it below. The same for
            |log Z|, as beyond it bfloat16, with 8 bits, is off by half a nat.
        lost_logit: beyond it all runs of Wortsman et al. 2023 (arXiv:2309.14322, section 3.3) were lost.
    """
    limits = {"noise_sds": noise_sds, "loss_tolerance": loss_tolerance}
    study = _Instability(record, near_ratio, spike_frac, limits)
    findings, reason = [_headroom(study, headroom_ratio)], study.unreadable()
    if reason:
        findings += [CODES.not_measured(code, reason, evidence=study.listed) for code in KINDS]
    else:
        hits = study.hits()
        findings += [_finding(study, code, hits[code], usual_interval) for code in KINDS]
    findings += judge_logits(study.record, *study.standing(), large=large_logit, lost=lost_logit)
    return Diagnosis.of(study.record, findings)


def _finding(study: _Instability, code: str, hits: Sequence[_Hit], usual_interval: int) -> Finding:
    evidence = _evidence(study, code, hits, usual_interval)
    lead = min(hits, key=lambda h: (ZONES.index(h.zone), h.back, h.item.curve.lr), default=None)
    own = [h for h in hits if h.zone == "own"]
    if (lead is None or lead.zone in ("other", "far")) and not study.vouching(code):
        return CODES.not_measured(code, _silent(study, lead), evidence=evidence)
    if lead is None:
        said, jump = f"Not seen in {counted(len(study.judged), 'trial')}.", study.record.facts.get("replay")
        rises = [item.curve.trial for item in study.items if item.verdict.rises]
        if jump and code == "stability.spike" and jump["trial"] not in rises:
            said += f" The loss of a single update jumps, {jump['update']}, and no stretch of high losses follows.{told_replay(jump)}"
            evidence["replay"] = jump
        return CODES.finding(code, "ok", said, evidence=evidence)
    status: Status = "warn" if lead.zone in ("below", "near") and study.harmful is not False else "ok"
    cost = ""
    if own and lead.back:
        lost = study.lost(own)
        status = "warn" if lost else "ok"
        times = sum(h.item.curve.trial == lead.item.curve.trial for h in own)
        course = told_course(lead.rise, times) if lead.rise else ""
        cost = f"{course}; it costs {lost or 'nothing measurable'}"
    elif own:
        status = "fail"
    kind: Kind = "early" if lead.rise is None or lead.rise.when == "early" else "mid"
    return CODES.finding(
        code, status, _summary(study, code, lead, evidence, cost), value=lead.item.curve.lr, unit="lr", step=lead.step,
        threshold=study.star if study.star is not None else study.baseline, evidence=evidence,
        advice=(*_look_at(evidence), *advise(kind)) if status != "ok" else (),
    )  # fmt: skip


def _look_at(evidence: Mapping[str, Any]) -> list[str]:
    again = evidence.get("replay") or {}
    shown = ", ".join(map(str, again.get("examples", ())[:3]))
    return [f"Look at examples {shown} of the training data."] if again.get("cause") in ("data", "both") else []


def _silent(study: _Instability, far: _Hit | None) -> str:
    """Return why a code that was not seen at the lrs that matter may be there nevertheless."""
    star = "" if study.star is None else f"at the best lr, {study.star:.4g}"
    base = f"at the baseline's lr {study.baseline:.4g}" if study.baseline else ""
    reason = (
        f"no trial {' or '.join(w for w in (base, star) if w) or 'at a learning rate that matters'} could be judged"
    )
    short = next((item.verdict.reason for item in study.items if item.verdict.outcome == "not_measured"), None)
    if study.vouching("stability.early"):
        reason += ", unless it was lost early"
    if short is not None:
        reason += f" ({short[0].lower()}{short[1:].rstrip('.')})"
    return reason if far is None else f"{reason}; it was seen{_at_lr(far.item.curve.lr)}"


def _at_lr(lr: float) -> str:
    """Name a learning rate; a log may not know it."""
    return f" at lr {lr:.4g}" if math.isfinite(lr) else ""


def _summary(study: _Instability, code: str, lead: _Hit, evidence: Mapping[str, Any], cost: str) -> str:
    at = f" from step {lead.step}" if lead.step is not None else ""
    where = {
        "own": cost, "other": "", "below": f", above the baseline's {study.baseline:.4g}" if study.baseline else ", no higher than the best lr",
        "near": f", just above the best lr, {study.star or math.nan:.4g}", "far": ", as expected this far above the useful range",
    }[lead.zone]  # fmt: skip
    if lead.zone in ("below", "near") and study.harmful is False:
        where += "; no fix improved the result, so this costs nothing"
    more = _where_else(study, lead, evidence["hits"])
    at = f"{_at_lr(lead.item.curve.lr)}{at}"
    text = f"{_NAME[code]}{at and ','}{at}{where}{more}."
    if lead.zone == "other":
        runs = sum(item.curve.trial in study.own for item in study.judged)
        own = f"{'the one run' if runs == 1 else f'{runs} runs'} of the baseline's own config (lr {study.baseline:.4g})"
        return f"Not seen in {own}. In other runs: {text[0].lower()}{text[1:]}"
    missed = evidence.get("seen_at_interval")
    if missed and missed["missed"]:
        text += f" Evaluating every {missed['interval']} steps would have missed it."
    short = (evidence.get("update") or {}).get("short") and lead.zone == "own"
    if code == "stability.spike" and not short:
        cause = evidence.get("cause")
        text += f" Likely cause: {cause}." if cause else " Cause: not known."
    if evidence.get("update") and lead.zone == "own":
        text += told(evidence["update"])
    if evidence.get("replay") and lead.zone == "own":
        text += told_replay(evidence["replay"])
    return text


def _where_else(study: _Instability, lead: _Hit, hits: Sequence[Mapping[str, Any]]) -> str:
    """Return in how many runs of the person's own config it was seen, and at how many other learning rates."""
    own = {row["trial"] for row in hits} & study.own
    others = {row["lr"] for row in hits} - {lead.item.curve.lr}
    parts = [f"in {len(own)} of {len(study.own)} runs of the baseline"] if own and len(study.own) > 1 else []
    if others:
        larger = all(lr > lead.item.curve.lr for lr in others)
        parts.append(f"and at {counted(len(others), 'larger lr' if larger else 'other lr')}")
    elif not parts and (trials := len({row["trial"] for row in hits})) > 1:
        parts.append(f"in {trials} trials")
    return f" ({' '.join(parts)})" if parts else ""


def _evidence(study: _Instability, code: str, hits: Sequence[_Hit], usual_interval: int) -> dict[str, Any]:
    evidence: dict[str, Any] = dict(study.listed)
    if code == "stability.divergent":  # the others name their hits alone
        evidence["trials"] = [_trial_row(item) for item in study.items]
    evidence["hits"] = [_trial_row(h.item) | {"zone": h.zone, "onset_step": h.step} for h in hits]
    with_rise = [h for h in hits if h.rise is not None]
    lead = min(with_rise, key=lambda h: ZONES.index(h.zone), default=None)
    if code in _LATER:
        empty = {"cause": None, "lead_steps": None}
        evidence |= rise_cause(lead.item.curve, lead.rise) if lead and lead.rise else empty
    facts = study.record.facts
    again = facts.get("replay") or {}
    if lead and lead.rise and (facts.get("loop") or (code in _LATER and again.get("trial") == lead.item.curve.trial)):
        evidence["update"] = first_update(lead.item.curve, lead.rise, facts)
        if again and (evidence["update"] or {}).get("update") == again["update"]:
            evidence["replay"] = again
    if code == "stability.mid":
        confirm = [i for i in study.items if i.curve.stage == Role.CONFIRM]
        star = study.record.facts.get("lr_star") or study.star  # the study's own, of which it took multiples
        evidence["confirm"] = [confirmation(i, lr_star=star) for i in confirm]
    if code == "stability.early_recovers":
        probed = next((h for h in with_rise if h.item.curve.stage == Role.PROBE), lead)
        evals = periodic_rows(study.record.evals)
        evidence["seen_at_interval"] = probed and seen_at_interval(probed.item, evals, usual_interval)
    return evidence


def _trial_row(item: TrialVerdict) -> dict[str, Any]:
    of_curve, of_verdict = ("trial", "stage", "lr", "seed"), (
        "when", "outcome", "onset_step", "peak_step", "peak_loss", "end_loss", "high", "reason",
    )  # fmt: skip
    return {n: getattr(item.curve, n) for n in of_curve} | {n: getattr(item.verdict, n) for n in of_verdict}


def _headroom(study: _Instability, near: float) -> Finding:
    code, bracket, base, facts = "stability.headroom", study.bracket, study.baseline, study.record.facts
    critical = facts.get("critical_lr")
    lr, source = None if bracket is None else bracket.middle, "lr.unstable"
    if lr is None and isinstance(critical, (int, float)) and math.isfinite(critical):
        lr, source = float(critical), "critical_lr"
    evidence = {"initial_critical_lr": facts.get("initial_critical_lr"), "baseline_lr": base}
    found = partial(CODES.finding, code, threshold=near, unit="unstable lr / baseline lr")
    top = max((p.lr for p in study.table.points if not p.unstable), default=0.0)
    rising = _explosions(study)
    if lr is None and study.best is not None and top > near * base > 0:
        summary = f"{rising}No {'lasting ' * bool(rising)}instability up to {_times(top / base)} times the baseline's lr, the largest that was trained {length_of_runs(facts)}."
        return found("ok", summary, value=top / base, evidence=evidence | {"lower": top, "upper": None})
    if lr is None or base <= 0:
        reason = "no unstable learning rate was found, and the critical lr, at which a step stops lowering the loss of its batch, was not measured"
        if all(p.lr <= base for p in study.table.points):
            rows = study.record.trials.to_dict("records")
            cut = sum(row["peak_lr"] > base and row["state"] in ("running", "stopped") for row in rows)
            ended = f" to its end; {cut} that were begun are not there yet" if cut else ""
            reason = f"no larger learning rate than the baseline's was trained{ended or ', so unstable ones were not looked for'}"
        return CODES.not_measured(code, reason, evidence=evidence)
    value = lr / base
    ends = (lr, lr) if bracket is None or bracket.lower is None else (bracket.lower, bracket.upper)
    near_by = bracket is not None and not bracket.stable_above and ends[1] < near * base
    small = near_by or (value <= 1 and any(i.curve.trial in study.own and i.is_lasting() for i in study.items))
    shown = f"at {_times(value)} times the baseline's lr ({'' if source == 'lr.unstable' else f'{source} '}{lr:.4g})"
    if value <= 0.5:
        shown += f": the baseline's {base:.4g} is {1 / value:.3g} times too high"
    if ends[1] > 1.1 * ends[0]:  # too wide to name one number (rule of thumb)
        shown = f"between {_times(ends[0] / base)} and {_times(ends[1] / base)} times the baseline's lr"
    evidence |= {"source": source, "lr": lr, "lower": ends[0], "upper": ends[1]}
    status: Status = "warn" if small else "ok"
    advice = advise("early") if small else []
    kind = "Instability without recovery" if source == "lr.unstable" else "Instability"
    return found(status, f"{rising}{kind} starts {shown}.", value=value, evidence=evidence, advice=advice)


def _explosions(study: _Instability) -> str:
    """Say from which lr on the loss rises far above its start and comes back, which is no instability that lasts; "" where none was seen."""
    point = next((p for p in study.table.points if p.lr > study.baseline > 0 and study.table.exploded(p)), None)
    if point is None:
        return ""
    from_on = f"From {_times(point.lr / study.baseline)} times the baseline's lr on ({point.lr:.4g})"
    return f"{from_on} the loss rises from {study.table.loss_ref:.4g} to {point.peak:,.4g} or more and recovers. "


def _times(ratio: float) -> str:
    return f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.3g}"
