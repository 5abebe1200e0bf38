"""`diagnose_clipping`: a threshold for the gradient norm, and what clipping at it does to training (F4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from workbench.curves.clip_threshold import ClipThreshold, choose_threshold, ordinal
from workbench.curves.clipped_runs import ReferenceNorms, clipped_runs, reference_norms
from workbench.curves.judged import judged
from workbench.curves.lr_search import unstable_bracket
from workbench.curves.replaced import LOST_FRAC, lost_by
from workbench.curves.sweep import objective
from workbench.curves.trials import RecordLike
from workbench.findings.codes import Codes
from workbench.findings.diagnosis import Diagnosis, Finding
from workbench.topics.clipping.ladder import Rung, is_calm, is_cured, leading, masks, read_ladder
from workbench.topics.clipping.nonfinite_norms import nonfinite_norms

__all__ = ["CODES", "diagnose_clipping"]

CODES = Codes({
    "clipping.threshold": "F4.9", "clipping.cures": "F4.10", "clipping.aggressive": "F4.12", "clipping.masks_lr": "F4.11",
    "clipping.nonfinite": "F4.6",
})  # fmt: skip
LONGER_WARMUP = "Try a longer warmup: sometimes it repairs what clipping does not (F4.4)."


@dataclass(frozen=True, kw_only=True)
class _Study:
    """What the verdicts are made of."""

    record: RecordLike
    reference: ReferenceNorms | None
    threshold: ClipThreshold
    rows: Sequence[Mapping[str, Any]]
    ladder: Sequence[Rung]
    lead: Rung | None
    why: str
    unstable_lr: float | None
    aggressive_frac: float
    lost_frac: float

    @property
    def evidence(self) -> dict[str, Any]:
        """What every finding about clipped runs carries."""
        return {"runs": [dict(row) for row in self.rows], "unstable_lr": self.unstable_lr}


def diagnose_clipping(
    record: RecordLike,
    *,
    percentile: float = 90.0,
    aggressive_frac: float = 0.5,
    drift_ratio: float = 2.0,
    parked_frac: float = 0.5,
    skip_frac: float = 0.1,
    lost_frac: float = LOST_FRAC,
) -> Diagnosis:
    """Propose a clipping threshold, and say what the clipped runs of a record show.

    Healthy: the threshold lies a little above the typical norm, a tenth of the steps is clipped, and what was unstable
    without clipping is stable with it. Sick: half of the steps or more have to be clipped, or the run stays bounded only
    because nearly every step is clipped: then the learning rate is too high, and clipping hides it.

    Args:
        record: a study, or a single trial.
        percentile: of the norms of a steady stretch without clipping (F4.9).
        aggressive_frac: share of clipped steps from which clipping is a lower lr in disguise (F4.11, F4.12).
        drift_ratio: norms whose median moves by more than this factor have no one threshold (rule of thumb).
        parked_frac: see `clipped_runs`.
        skip_frac: see `steady_stretch`.
        lost_frac: a baseline that clips most of its steps loses something by it where it lacks this share of what the same run learns
            without (rule of thumb).

    Returns:
        The codes `clipping.threshold`, `.cures`, `.aggressive`, `.masks_lr` and `.nonfinite`, once each.
    """
    record = judged(record)
    reference = reference_norms(record, skip_frac=skip_frac)
    rows = clipped_runs(record, parked_frac=parked_frac)
    bracket = unstable_bracket(judged(record).sweep())
    unstable_lr = None if bracket is None else bracket.middle
    lead, why = leading(record, rows, aggressive_frac=aggressive_frac, unstable_lr=unstable_lr)
    study = _Study(
        record=record,
        reference=reference,
        threshold=choose_threshold([], percentile=percentile) if reference is None else reference.threshold(percentile),
        rows=rows,
        ladder=read_ladder(record, rows),
        lead=lead,
        why=why,
        unstable_lr=unstable_lr,
        aggressive_frac=aggressive_frac,
        lost_frac=lost_frac,
    )
    findings = (
        _threshold(study, drift_ratio),
        _cures(study),
        _aggressive(study),
        _masks(study),
        nonfinite_norms(record),
    )
    return Diagnosis.of(record, findings)


def _threshold(study: _Study, drift_ratio: float) -> Finding:
    chosen, found = study.threshold, study.reference
    evidence: dict[str, Any] = chosen.to_dict() | {
        "trial": None if found is None else found.item.curve.trial,
        "lr": None if found is None else found.item.curve.lr,
        "loss": None if found is None else objective(found.item.curve),
        "reference_clipped": None if found is None else found.clipped,
        "reference_outcome": None if found is None else found.item.verdict.outcome,
    }
    if chosen.threshold is None or found is None:
        return CODES.not_measured("clipping.threshold", str(chosen.reason), evidence=evidence)
    typical = f", {chosen.ratio:.3g} times the median {chosen.median:.3g}" if chosen.ratio else ""
    where = f"steps {chosen.first_step:,} to {chosen.last_step:,} at lr {found.item.curve.lr:.4g}"
    notes = ""
    if chosen.all_steps is not None and not 1 / drift_ratio <= chosen.all_steps / chosen.threshold <= drift_ratio:
        notes += f" Over all steps, the first ones included, it is {chosen.all_steps:.3g}."
    if chosen.drift is not None and chosen.drift > drift_ratio:
        notes += (
            f" The median drifts by a factor of {chosen.drift:.3g} within them: no one threshold fits the whole run."
        )
    if found.clipped:
        notes += " The run was itself clipped; its path differs from one without."
    return Finding(
        code="clipping.threshold", status="ok", value=chosen.threshold, unit="gradient norm", clause="F4.9",
        evidence=evidence,
        summary=f"The {ordinal(chosen.percentile)} percentile of the gradient norms is {chosen.threshold:.4g}{typical} "
        f"({where}); {chosen.clip_frac:.0%} of all its steps, from the first on, lie above it.{notes}",
    )  # fmt: skip


def _cures(study: _Study) -> Finding:
    code, lead = "clipping.cures", study.lead
    rows = () if lead is None else tuple(row for row in lead.rows if row["twin"] is not None)
    if lead is None or not rows:
        missing = "no run was clipped" if lead is None else f"lr {lead.lr:.4g} was not run without clipping"
        return _not_measured(study, code, missing)
    lead = replace(lead, rows=rows, cured=sum(map(is_cured, rows)), lasting=sum(row["lasting"] for row in rows))
    evidence = study.evidence | {"ladder": [_rung_row(study, rung) for rung in study.ladder]}
    common: dict[str, Any] = {"code": code, "clause": "F4.10", "evidence": evidence}
    if all(is_calm(row, "twin_outcome") for row in lead.rows):
        still = all(is_calm({**row, "lasting": False}) for row in lead.rows)  # no rise: it ends where it began
        worse = "learns next to nothing" if still else "unstable"
        hurt = f", and {worse} with it at {lead.max_grad_norm:.3g}" if lead.lasting else ""
        above = study.unstable_lr is not None and lead.lr > study.unstable_lr
        chance = (
            f" Other runs turned unstable from {study.unstable_lr:.4g} on: this near the edge it is chance."
            if above
            else ""
        )
        summary = f"Nothing to cure: at lr {lead.lr:.4g} training is stable without clipping{hurt}.{chance}"
        return Finding(status="warn" if hurt else "ok", summary=summary, **common)
    common |= {"value": lead.max_grad_norm, "unit": "gradient norm"}
    share = "An unknown share" if lead.clip_frac is None else f"{lead.clip_frac:.0%}"
    if not lead.passes:
        some = f" for all of {len(lead.rows)} seeds ({lead.cured} cured)" if len(lead.rows) > 1 else ""
        several = len(study.ladder) > 1 and study.why != "own"
        tried = f"any of {len(study.ladder)} thresholds down to" if several else "at"
        summary = f"Clipping {tried} {lead.max_grad_norm:.3g} does not let lr {lead.lr:.4g} train{some}. {share} of the steps are clipped."
        return Finding(status="warn", summary=summary, advice=[LONGER_WARMUP, _lower(study, lead)], **common)
    beyond = not lead.cures(aggressive_frac=study.aggressive_frac, unstable_lr=study.unstable_lr)
    sick = any(row["twin_lasting"] for row in lead.rows)
    without = "without it training is not" if sick else "without it the loss rises and comes back"
    summary = (
        f"Clipping at {lead.max_grad_norm:.3g}{_percentile_name(study, lead)} keeps lr {lead.lr:.4g} stable; {without}. "
        f"{share} of the steps are clipped{': no cure but a smaller step' if beyond else ''}."
    )
    advice = [LONGER_WARMUP, _lower(study, lead)] if beyond else ()
    return Finding(
        status="warn" if beyond else "ok", summary=summary + _against_reference(study, lead), advice=advice, **common
    )


def _against_reference(study: _Study, lead: Rung) -> str:
    """Say in a sentence where the runs end against the one at a stable lr: a cure may gain nothing."""
    if study.reference is None or study.reference.clipped or study.reference.item.verdict.is_lasting:
        return ""
    curve = study.reference.item.curve
    end, stable = float(np.mean([row["loss"] for row in lead.rows])), objective(curve)
    than = "lower than" if end < stable else "stable, and no gain: no lower than"
    return f" The loss ends at {end:.3g}, {than} at lr {curve.lr:.4g} without clipping ({stable:.3g})."


def _aggressive(study: _Study) -> Finding:
    code, lead = "clipping.aggressive", study.lead
    if lead is None or lead.clip_frac is None:
        return _not_measured(study, code, "no run was clipped")
    common: dict[str, Any] = {
        "code": code, "clause": "F4.12", "value": lead.clip_frac, "unit": "share of steps clipped",
        "threshold": study.aggressive_frac, "evidence": study.evidence | {"lead": study.why},
    }  # fmt: skip
    shown = f"{lead.clip_frac:.1%} of the steps are clipped at {lead.max_grad_norm:.3g}, lr {lead.lr:.4g}"
    if lead.clip_frac < study.aggressive_frac:
        return Finding(status="ok", summary=f"{shown}.", **common)
    if study.why == "own" and all(row["twin_lasting"] is False for row in lead.rows):
        return _slowed(study, lead, shown, common)
    several = len(study.ladder) > 1
    needed = {"own": "", "passes": ", and no larger threshold tried lets it train" if several else "",
              "tightest": ", and not even that lets it train" if lead.lasting else ""}  # fmt: skip
    summary = f"{shown}{needed[study.why]}: an odd way to lower the learning rate."
    return Finding(status="warn", advice=[_lower(study, lead)], summary=summary, **common)


def _slowed(study: _Study, lead: Rung, shown: str, common: Mapping[str, Any]) -> Finding:
    """Say what a clipping that training does not need takes from it; an adaptive rule hardly feels one that is always on."""
    curves = {c.trial: c for c in judged(study.record).curves}
    lost = min(lost_by(study.record, curves[row["trial"]], curves[row["twin"]])[0] for row in lead.rows)
    ends = [float(np.mean([row[name] for row in lead.rows])) for name in ("twin_loss", "loss")]
    told = f"{shown}, and training is stable without: there the loss ends at {ends[0]:.3g} instead of {ends[1]:.3g}"
    if lost < study.lost_frac:
        return Finding(status="ok", summary=f"{told}: harmless.", **common)
    to = (
        ""
        if study.threshold.threshold is None
        else f" to about {study.threshold.threshold:.3g}, the 90th percentile of the norms,"
    )
    return Finding(
        status="warn", summary=f"{told}.", **common,
        advice=[f"Raise max_grad_norm{to} or leave it out: what it does now is to shorten every step."],
    )  # fmt: skip


def _masks(study: _Study) -> Finding:
    code, lead = "clipping.masks_lr", study.lead
    if lead is None:
        return _not_measured(study, code, "no run was clipped")
    said = [masks(row, study.unstable_lr) for row in lead.rows]
    if all(answer is None for answer in said):
        known = study.unstable_lr is not None or any(row["twin"] is not None for row in lead.rows)
        why = f"whether lr {lead.lr:.4g} is stable without clipping is not known; run it without, or sweep"
        return _not_measured(
            study, code, f"at lr {lead.lr:.4g} training still comes down when it ends" if known else why
        )
    every = [dict(row) | {"masks": masks(row, study.unstable_lr)} for row in study.rows]
    late = [row["late_clip_frac"] for row in lead.rows if row["late_clip_frac"] is not None]
    common: dict[str, Any] = {
        "code": code, "clause": "F4.11", "value": float(np.mean(late)) if late else None,
        "unit": "share clipped at the end", "evidence": {"runs": every, "unstable_lr": study.unstable_lr},
    }  # fmt: skip
    if not any(said):
        return Finding(status="ok", summary=_no_mask(lead), **common)
    swings = [row["alternation"] for row in lead.rows if row["alternation"] is not None]
    cycle = ", swinging to and fro from step to step" if swings and min(swings) < -0.9 else ""
    return Finding(
        status="warn", advice=[_lower(study, lead)], **common,
        summary=f"Clipping at {lead.max_grad_norm:.3g} hides that lr {lead.lr:.4g} is too high: the run stays bounded only "
        f"because {np.mean(late):.0%} of its last steps are clipped{cycle}.",
    )  # fmt: skip


def _no_mask(lead: Rung) -> str:
    if lead.lasting:
        return f"Nothing is hidden: lr {lead.lr:.4g} is unstable with clipping, too."
    if any(row["twin_lasting"] for row in lead.rows):
        return f"At lr {lead.lr:.4g} the gradient norm comes down below the threshold: the run does not live by its clipping."
    return f"Nothing to hide: lr {lead.lr:.4g} is stable without clipping."


def _not_measured(study: _Study, code: str, reason: str) -> Finding:
    return CODES.not_measured(code, reason, evidence=study.evidence)


def _rung_row(study: _Study, rung: Rung) -> dict[str, Any]:
    return {
        "max_grad_norm": rung.max_grad_norm, "lr": rung.lr, "percentile": _asked(study, rung)[0],
        "percentile_of": _asked(study, rung)[1],
        "clip_frac": rung.clip_frac, "passes": rung.passes, "cured": rung.cured, "lasting": rung.lasting,
        "cures": rung.cures(aggressive_frac=study.aggressive_frac, unstable_lr=study.unstable_lr), "seeds": len(rung.rows),
        "masks": any(masks(row, study.unstable_lr) for row in rung.rows), "trials": [row["trial"] for row in rung.rows],
    }  # fmt: skip


def _asked(study: _Study, rung: Rung) -> tuple[float | None, str | None]:
    """Return which percentile of the reference norms the study asked this threshold to be, and over which steps."""
    for percentile, threshold, *where in study.record.facts.get("clipping_thresholds") or ():
        if np.isclose(threshold, rung.max_grad_norm, rtol=1e-9, atol=0.0):
            return float(percentile), str(where[0]) if where else None
    return None, None


def _percentile_name(study: _Study, rung: Rung) -> str:
    percentile, where = _asked(study, rung)
    over = " over all steps" if where == "all" else ""
    return "" if percentile is None else f" (the {ordinal(percentile)} percentile{over})"


def _lower(study: _Study, lead: Rung) -> str:
    """Return the advice of F4.12, with the lr that clipping amounts to where that is one and is a stable one."""
    known = [row["effective_lr"] for row in lead.rows if row["effective_lr"] is not None]
    edge = study.unstable_lr
    to = f" to about {np.mean(known):.2g}, the mean length of its steps" if known else ""
    masked = any(masks(row, edge) for row in lead.rows)
    if edge is not None and lead.lr >= edge and (masked or not known or np.mean(known) >= edge):
        to = f" below {edge:.4g}, where training becomes unstable"
    elif masked:
        to = ""
    return f"Reduce peak_lr from {lead.lr:.4g}{to}, instead of clipping (F4.12)."
