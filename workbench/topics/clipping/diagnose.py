"""`diagnose_clipping`: a threshold for the gradient norm, and what clipping at it does to training (F4)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from workbench.curves.clipping import (
    ADAPTIVE_RULES,
    ClipThreshold,
    ReferenceNorms,
    choose_threshold,
    clipped_runs,
    ordinal,
    reference_norms,
)
from workbench.curves.judged import JudgedStudy, judged, own_trials
from workbench.curves.lr_search import unstable_bracket
from workbench.curves.sweep import objective
from workbench.curves.trial_curves import RecordLike
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.finding import Codes, Finding, Status
from workbench.record.metrics import passed_over
from workbench.record.roles import Role
from workbench.topics.clipping.ladder import Candidate, is_calm, leading, masks, read_ladder
from workbench.topics.optimizers.constants import ALL_FRAC, LOST_FRAC, lost_by

CODES = Codes({
    "clipping.threshold": "F4.9", "clipping.cures": "F4.10", "clipping.aggressive": "F4.12", "clipping.masks_lr": "F4.11",
    "clipping.nonfinite": "F4.6",
})  # fmt: skip
LONGER_WARMUP = "Try a longer warmup: it sometimes fixes what clipping does not (F4.4)."


def diagnose_clipping(
    record: RecordLike,
    *,
    percentile: float = 90.0,
    aggressive_frac: float = 0.5,
    drift_ratio: float = 2.0,
    parked_frac: float = 0.5,
    skip_frac: float = 0.1,
    lost_frac: float = LOST_FRAC,
    far_above: float = 10.0,
) -> Diagnosis:
    """Propose a clipping threshold, and say what the clipped runs of a record show.

    Healthy: the threshold lies a little above the typical norm, a tenth of the steps is clipped, and what was unstable
    without clipping is stable with it. Sick: half of the steps or more have to be clipped, or the run stays bounded only
    because nearly every step is clipped: then the learning rate is too high, and clipping hides it.

    Args:
        percentile: of the norms of a steady stretch without clipping (F4.9).
        aggressive_frac: share of clipped steps from which clipping is a lower lr in disguise (F4.11, F4.12).
        drift_ratio: norms whose median moves by more than this factor have no one threshold (rule of thumb).
        parked_frac: see `clipped_runs`.
        skip_frac: see `steady_stretch`.
        lost_frac: a baseline that clips most of its steps loses something by it where it lacks this share of what the same run learns
            without, or one that needs clipping lacks of what a stable learning rate learns (rule of thumb).
        far_above: a baseline of an adaptive rule that clips most of its steps is an alarm only where its median norm is so many times the
            threshold: the rule divides out a factor that gradients have in common (rule of thumb).
    """
    study = judged(record)
    reference = reference_norms(study, skip_frac=skip_frac)
    rows = clipped_runs(study, parked_frac=parked_frac)
    bracket = unstable_bracket(study.sweep())
    edge = None if bracket is None else bracket.middle
    lead, why = leading(study, rows, aggressive_frac=aggressive_frac, unstable_lr=edge)
    chosen = choose_threshold([], percentile=percentile) if reference is None else reference.threshold(percentile)
    evidence = {"runs": [dict(row) for row in rows], "unstable_lr": edge}
    findings = [_threshold(chosen, reference, drift_ratio)]
    unknown = partial(CODES.not_measured, reason="no run was clipped", evidence=evidence)
    if lead is None:
        findings += [unknown(f"clipping.{name}") for name in ("cures", "aggressive", "masks_lr")]
    else:
        clipped = _Clipped(
            study=study, reference=reference, threshold=chosen.threshold, ladder=read_ladder(study, rows), lead=lead,
            why=why, edge=edge, usual_frac=1 - percentile / 100, aggressive_frac=aggressive_frac, lost_frac=lost_frac,
            far_above=far_above, evidence=evidence,
        )  # fmt: skip
        share = unknown("clipping.aggressive") if lead.clip_frac is None else clipped.aggressive(lead.clip_frac)
        findings += [clipped.cures(), share, clipped.masks()]
    return Diagnosis.of(study, [*findings, nonfinite_norms(study)])


def clipped_values(record: RecordLike, *, aggressive_frac: float = 0.5) -> Finding | None:
    """Return `clipping.aggressive` of a loop that clips its gradients value by value; None of another one."""
    order = record.facts.get("loop", {}).get("order", {})
    share, line = order.get("at_limit"), order.get("lines", {}).get("clip_value")
    if share is None:
        return None
    say = partial(CODES.finding, "clipping.aggressive", value=share, unit="share of values", threshold=aggressive_frac)
    shown = f"In the median update {share:.0%} of the gradient's values are clipped one by one{f' ({line})' if line else ''}"
    if share < aggressive_frac:
        return say("ok", f"{shown}.")
    fix = "Raise clip_value, or clip the norm, which keeps the direction: torch.nn.utils.clip_grad_norm_."
    return say(
        "warn",
        f"{shown}: little but their signs is left, and every step is as long as the limit makes it.",
        advice=[fix],
    )


def tried_only(record: RecordLike) -> Diagnosis:
    """Return the diagnosis of runs with a clipping that nobody trains with: no alarms, but for what they say of the gradients."""
    found, trials = diagnose_clipping(record), ("clipping.cures", "clipping.aggressive", "clipping.masks_lr")
    values = clipped_values(record)
    kept = [
        values if values and f.code == values.code else replace(f, status="ok", advice=()) if f.code in trials else f
        for f in found
    ]
    return replace(found, findings=tuple(kept))


def _named(lr: float) -> str:
    """Name a learning rate; a log may not know it."""
    return f"lr {lr:.4g}" if math.isfinite(lr) else "the learning rate"


def _threshold(chosen: ClipThreshold, found: ReferenceNorms | None, drift_ratio: float) -> Finding:
    evidence: dict[str, Any] = asdict(chosen) | {"windows": list(chosen.windows)}
    evidence |= dict.fromkeys(("trial", "lr", "loss", "reference_clipped", "reference_outcome"))
    if found is not None:
        curve = found.item.curve
        evidence |= {
            "trial": curve.trial, "lr": curve.lr, "loss": objective(curve), "reference_clipped": found.clipped,
            "reference_outcome": found.item.verdict.outcome,
        }  # fmt: skip
    if chosen.threshold is None or found is None:
        return CODES.not_measured("clipping.threshold", str(chosen.reason), evidence=evidence)
    typical = f", {chosen.ratio:.3g} times the median {chosen.median:.3g}" if chosen.ratio else ""
    at = f" at lr {found.item.curve.lr:.4g}" if math.isfinite(found.item.curve.lr) else ""
    where = f"steps {chosen.first_step:,} to {chosen.last_step:,}{at}"
    notes = ""
    if chosen.all_steps is not None and not 1 / drift_ratio <= chosen.all_steps / chosen.threshold <= drift_ratio:
        notes += f" Over all steps, the first ones included, it is {chosen.all_steps:.3g}."
    if chosen.drift is not None and chosen.drift > drift_ratio:
        drifts = f"The median drifts by a factor of {chosen.drift:.3g} within them"
        notes += f" {drifts}: no single threshold fits the whole run."
    if found.clipped:
        notes += " This run was itself clipped, so its norms differ from those of an unclipped run."
    summary = (
        f"The {ordinal(chosen.percentile)} percentile of the gradient norms is {chosen.threshold:.4g}{typical} "
        f"({where}); {chosen.clip_frac:.0%} of all its steps, from the first on, lie above it.{notes}"
    )
    known = {"value": chosen.threshold, "unit": "gradient norm", "evidence": evidence}
    return CODES.finding("clipping.threshold", "ok", summary, **known)


@dataclass(frozen=True, kw_only=True)
class _Clipped:
    """What the clipped runs of a study show."""

    study: JudgedStudy
    reference: ReferenceNorms | None
    threshold: float | None
    ladder: Sequence[Candidate]
    lead: Candidate
    why: str
    edge: float | None
    usual_frac: float  # of the steps that the proposed threshold clips
    aggressive_frac: float
    lost_frac: float
    far_above: float
    evidence: dict[str, Any]

    def cures(self) -> Finding:
        code, lead = "clipping.cures", self.lead
        rows = tuple(row for row in lead.rows if row["twin"] is not None)
        if not rows:
            return CODES.not_measured(code, f"{_named(lead.lr)} was not run without clipping", evidence=self.evidence)
        lead = replace(lead, rows=rows)
        evidence = self.evidence | {"ladder": [self._row(one) for one in self.ladder]}
        found = partial(CODES.finding, code, evidence=evidence)
        limit = f"{lead.max_grad_norm:.3g}"
        if all(is_calm(row, "twin_outcome") for row in rows):
            still = all(is_calm({**row, "lasting": False}) for row in rows)  # no rise: it ends where it began
            worse = "learns next to nothing" if still else "unstable"
            hurt = f", and {worse} with it at {limit}" if lead.lasting else ""
            chance = ""
            if self.edge is not None and lead.lr > self.edge:
                chance = f" Other runs turned unstable from {self.edge:.4g} on: this close to the edge, stability is a matter of chance."
            summary = f"No need to clip: at lr {lead.lr:.4g} training is stable without clipping{hurt}.{chance}"
            return found("warn" if hurt else "ok", summary)
        found = partial(found, value=lead.max_grad_norm, unit="gradient norm")
        share = "An unknown share" if lead.clip_frac is None else f"{lead.clip_frac:.0%}"
        share = f"{share} of the steps are clipped"
        advice = [LONGER_WARMUP, self._lower(lead)]
        if not lead.passes:
            some = f" for all of {len(rows)} seeds ({lead.cured} cured)" if len(rows) > 1 else ""
            several = len(self.ladder) > 1 and self.why != "own"
            tried = f"any of {len(self.ladder)} thresholds down to" if several else "at"
            summary = f"Clipping {tried} {limit} does not let lr {lead.lr:.4g} train{some}. {share}."
            return found("warn", summary, advice=advice)
        percentile, where = self._percentile_of(lead)
        over = " over all steps" if where == "all" else ""
        name = "" if percentile is None else f" (the {ordinal(percentile)} percentile{over})"
        sick = any(row["twin_lasting"] for row in rows)
        without = "without it training is unstable" if sick else "without it the loss rises and recovers"
        beyond = not lead.cures(aggressive_frac=self.aggressive_frac, unstable_lr=self.edge)
        against = self._against_reference(rows)
        gains, behind = None if not against else "no gain" not in against, self._behind_reference()
        price = f"{share}{': that amounts to a smaller step' if beyond else ''}.{against}"
        keeps = f"keeps lr {lead.lr:.4g} stable" if not behind else f"keeps the loss bounded at lr {lead.lr:.4g}"
        summary = f"Clipping at {limit}{name} {keeps}; {without}. {price}"
        found, alarm = partial(found, evidence=evidence | {"gains": gains}), beyond or bool(behind)
        return found("warn" if alarm else "ok", summary, advice=advice if alarm else ())

    def _against_reference(self, rows: Sequence[Mapping[str, Any]]) -> str:
        """Say where the runs end against the one at a stable lr: a cure may gain nothing."""
        if self.reference is None or self.reference.clipped or self.reference.item.verdict.is_lasting:
            return ""
        curve = self.reference.item.curve
        end, stable = float(np.mean([row["loss"] for row in rows])), objective(curve)
        than = "lower than" if end < stable else "no gain: no lower than"
        return f" The loss ends at {end:.3g}, {than} at lr {curve.lr:.4g} without clipping ({stable:.3g})."

    def _behind_reference(self) -> str:
        """Say so where every run is often clipped to its end, and lacks a share of what the one at a stable lr learns; "" else."""
        rows, curves = self.lead.rows, {c.trial: c for c in self.study.curves}
        said = self._against_reference(rows)
        if not said or self.reference is None or min(row["late_clip_frac"] or 0.0 for row in rows) <= self.usual_frac:
            return ""
        lost = [lost_by(self.study, curves[row["trial"]], self.reference.item.curve)[0] for row in rows]
        return said if min(lost) >= self.lost_frac else ""

    def aggressive(self, clip_frac: float) -> Finding:
        """Say how many steps are clipped, and what a clipping that training does not need takes from it."""
        lead, unit = self.lead, "share of steps clipped"
        found = partial(
            CODES.finding, "clipping.aggressive", value=clip_frac, unit=unit, threshold=self.aggressive_frac,
            evidence=self.evidence | {"lead": self.why},
        )  # fmt: skip
        at = f", lr {lead.lr:.4g}" if math.isfinite(lead.lr) else ""
        order = self.study.facts.get("loop", {}).get("order", {}) if self.why == "own" else {}
        line = order.get("lines", {}).get("clip")
        at += f" ({line})" if line else ""
        shown = f"{clip_frac:.1%} of the steps are clipped at {lead.max_grad_norm:.3g}{at}"
        if clip_frac < self.aggressive_frac:
            return found("ok", f"{shown}.")
        if self.why == "own" and all(row["twin_lasting"] is False for row in lead.rows):
            curves = {c.trial: c for c in self.study.curves}
            lost = min(lost_by(self.study, curves[row["trial"]], curves[row["twin"]])[0] for row in lead.rows)
            ends = [float(np.mean([row[name] for row in lead.rows])) for name in ("twin_loss", "loss")]
            shown += f", and training is stable without: there the loss ends at {ends[0]:.3g} instead of {ends[1]:.3g}"
            if lost < self.lost_frac:
                return found("ok", f"{shown}: harmless.")
            return found("fail" if lost >= ALL_FRAC else "warn", f"{shown}.", advice=[self._raise()])
        rule, ratios = str(self.study.config.get("optimizer")), [row["norm_ratio"] or 1.0 for row in lead.rows]
        if self.why == "own" and rule in ADAPTIVE_RULES:
            shown += f", where the median norm is {max(ratios):.2g} times that"
            if max(ratios) < self.far_above:
                return found("ok", f"{shown}: {rule} divides out what shortens all gradients alike.")
            return found("warn", f"{shown}: of each gradient little but its direction is left.", advice=[self._raise()])
        needed = {"own": "", "passes": ", and no larger threshold that was tried stabilises it" if len(self.ladder) > 1 else "",
                  "tightest": ", and even that does not stabilise it" if lead.lasting else ""}  # fmt: skip
        summary = f"{shown}{needed[self.why]}: a roundabout way to lower the learning rate."
        return found("warn", summary, advice=[self._lower(lead)])

    def _raise(self) -> str:
        to = "" if self.threshold is None else f" to about {self.threshold:.3g}, the 90th percentile of the norms,"
        return f"Raise max_grad_norm{to} or leave it out: at present it only shortens every step."

    def masks(self) -> Finding:
        code, lead = "clipping.masks_lr", self.lead
        answers = [masks(row, self.edge) for row in lead.rows]
        if all(answer is None for answer in answers):
            why = f"whether {_named(lead.lr)} is stable without clipping is not known; run it without, or sweep"
            if self.edge is not None or any(row["twin"] is not None for row in lead.rows):
                why = f"at lr {lead.lr:.4g} the loss is still falling when the run ends"
            return CODES.not_measured(code, why, evidence=self.evidence)
        late = [row["late_clip_frac"] for row in lead.rows if row["late_clip_frac"] is not None]
        every = [row | {"masks": masks(row, self.edge)} for row in self.evidence["runs"]]
        found = partial(
            CODES.finding, code, value=float(np.mean(late)) if late else None, unit="share clipped at the end",
            evidence={"runs": every, "unstable_lr": self.edge},
        )  # fmt: skip
        if not any(answers):
            summary = f"Clipping hides nothing: lr {lead.lr:.4g} is stable without clipping."
            if lead.lasting:
                summary = f"Clipping hides nothing: lr {lead.lr:.4g} is unstable with clipping, too."
            elif any(row["twin_lasting"] for row in lead.rows):
                shown = f"At lr {lead.lr:.4g} {np.mean(late or [0]):.0%} of the last steps are clipped"
                if behind := self._behind_reference():
                    high = f"{shown}, and without clipping it is unstable: a learning rate that is too high."
                    return found("warn", f"{high}{behind}", advice=[self._lower(lead)])
                summary = f"{shown}, and the run learns what a stable learning rate does or more."
                if not late or np.mean(late) <= self.usual_frac:
                    summary = f"{shown}: it is earlier that the run needs clipping."
            return found("ok", summary)
        swings = [row["alternation"] for row in lead.rows if row["alternation"] is not None]
        cycle = ", oscillating from step to step" if swings and min(swings) < -0.9 else ""
        high = f"Clipping at {lead.max_grad_norm:.3g} hides that lr {lead.lr:.4g} is too high"
        only = f"the run stays bounded only because {np.mean(late):.0%} of its last steps are clipped{cycle}"
        return found("warn", f"{high}: {only}.", advice=[self._lower(lead)])

    def _row(self, one: Candidate) -> dict[str, Any]:
        percentile, where = self._percentile_of(one)
        return {
            "max_grad_norm": one.max_grad_norm, "lr": one.lr, "percentile": percentile, "percentile_of": where,
            "clip_frac": one.clip_frac, "passes": one.passes, "cured": one.cured, "lasting": one.lasting,
            "loss": float(np.mean([row["loss"] for row in one.rows])),
            "cures": one.cures(aggressive_frac=self.aggressive_frac, unstable_lr=self.edge), "seeds": len(one.rows),
            "masks": any(masks(row, self.edge) for row in one.rows), "trials": [row["trial"] for row in one.rows],
        }  # fmt: skip

    def _percentile_of(self, one: Candidate) -> tuple[float | None, str | None]:
        """Return which percentile of the reference norms the study meant this threshold to be, and over which steps."""
        for percentile, threshold, *where in self.study.facts.get("clipping_thresholds") or ():
            if np.isclose(threshold, one.max_grad_norm, rtol=1e-9, atol=0.0):
                return float(percentile), str(where[0]) if where else None
        return None, None

    def _lower(self, lead: Candidate) -> str:
        """Return the advice of F4.12, with the lr that clipping amounts to where that is one and is a stable one."""
        known = [row["effective_lr"] for row in lead.rows if row["effective_lr"] is not None]
        to = f" to about {np.mean(known):.2g}, the mean length of its steps" if known else ""
        masked = any(masks(row, self.edge) for row in lead.rows)
        if self.edge is not None and lead.lr >= self.edge and (masked or not known or np.mean(known) >= self.edge):
            to = f" below {self.edge:.4g}, where training becomes unstable"
        elif masked:
            to = ""
        return f"Reduce peak_lr from {lead.lr:.4g}{to}, instead of clipping (F4.12)."


def _measured(steps: Any) -> Any:
    """Return the steps that were looked at, without those that a loss scale skipped: to overflow is how it finds its size."""
    steps = steps[~passed_over(steps)]
    return steps[steps["skipped"] != 1] if "skipped" in steps else steps


def nonfinite_norms(study: JudgedStudy) -> Finding:
    """Return `clipping.nonfinite`: fail where the loss of a run of the baseline's config stays finite and its gradients do not (F4.6)."""
    code = "clipping.nonfinite"
    counts = [
        (c, int((~np.isfinite(_measured(c.steps)["grad_norm"].to_numpy(dtype=np.float64, na_value=np.nan))).sum()))
        for c in study.curves
        if "grad_norm" in c.steps
    ]
    if not counts:
        return CODES.not_measured(code, "no gradient norm was recorded")
    hits, mine = [(c, n) for c, n in counts if n], own_trials(study)
    own = [c for c, _ in hits if c.stage == Role.BASELINE or c.trial in mine]
    whole = [c for c, _ in hits if not c.diverged and (c in own or not mine)]
    status: Status = "ok" if not whole else "fail" if own else "warn"
    rows = [{"trial": c.trial, "stage": c.stage, "lr": c.lr, "nonfinite": n, "diverged": c.diverged} for c, n in hits]
    total = sum(n for _, n in counts)
    summary = f"All gradient norms of {len(counts)} trial(s) are finite."
    if hits:
        finite = "in runs whose loss stays finite" if whole else "where runs ended non-finite"
        counted = f"{total} gradient norm(s) in {len(hits)} of {len(counts)} trial(s) are not finite"
        summary = f"{counted}, {'with the baseline config, ' if own else ''}{finite}; they are counted, not averaged."
    causes = "overflow (precision), a division or logarithm of zero, or non-finite data"
    advice = [f"Clipping leaves a non-finite gradient as it is: look for {causes}."] if status != "ok" else []
    evidence = {"trials": rows}
    return CODES.finding(code, status, summary, value=float(total), unit="steps", evidence=evidence, advice=advice)
