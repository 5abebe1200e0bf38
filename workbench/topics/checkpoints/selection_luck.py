"""`checkpoints.selection`: is the metric that chooses the checkpoint there, finite, and more than noise (P4.4, P4.5)?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from workbench.curves.selected_runs import FEWEST_TO_SEE_NOISE, SelectedRun
from workbench.curves.trials import RecordLike
from workbench.findings.diagnosis import Finding
from workbench.record.read import periodic_rows

__all__ = ["selection_finding"]

CODE, CLAUSE = "checkpoints.selection", "P4.5"
FEWEST_DISTINCT = 32
"""Training rows; with fewer, as in a problem whose loss is no sample of anything, a split may well be all of it (rule of thumb)."""
_NAN_ADVICE = "Find out what makes the evaluation NaN or infinite: an empty batch, a logarithm of 0, half precision."
_NOISE_ADVICE = (
    "Evaluate on more examples, on the same ones every time, in evaluation mode (P3.4).",
    "Until then compare the mean of several evaluations, and quote the test split and not the selected value.",
)


def selection_finding(record: RecordLike, runs: Sequence[SelectedRun], *, max_luck_frac: float) -> Finding:
    """Judge the metric by which the best checkpoint of each run is chosen, and name every other one that is NaN or infinite.

    Args:
        record: a study.
        runs: its finished runs.
        max_luck_frac: largest luck of the best of so many noisy evaluations, over what training learned.
    """
    found = _of_selected(record, runs, max_luck_frac)
    others = _not_finite(record, runs)
    if not others:
        return found
    told = "; ".join(
        f"{name} was not finite in {row['not_finite']} of {row['evaluations']} evaluations, first at step {row['first_step']:,}"
        for name, row in others.items()
    )
    return replace(
        found,
        status="fail" if found.status == "fail" else "warn",
        summary=f"{told}: it selects nothing here, but nothing can be read off it. {found.summary}",
        evidence=dict(found.evidence) | {"others_not_finite": others},
        advice=list(dict.fromkeys([*found.advice, _NAN_ADVICE])),
    )


def _not_finite(record: RecordLike, runs: Sequence[SelectedRun]) -> dict[str, dict[str, int]]:
    """Return every other metric that was not finite at an evaluation of a finished run: how often, of how many, and where first."""
    if not runs:
        return {}
    rows = periodic_rows(record.evals)
    rows = rows[rows["trial"].isin([run.trial for run in runs])]
    found = {}
    for (split, metric), ours in rows.groupby(["split", "metric"]):
        bad = ours[~np.isfinite(ours["value"].to_numpy(dtype=np.float64, na_value=np.nan))]
        name = f"{split}/{metric}"
        if len(bad) and name != record.config["select"]:
            found[name] = {"not_finite": len(bad), "evaluations": len(ours), "first_step": int(bad["step"].min())}
    return found


def _of_selected(record: RecordLike, runs: Sequence[SelectedRun], max_luck_frac: float) -> Finding:
    select = str(record.config.get("select", ""))
    known: dict[str, Any] = {"code": CODE, "clause": CLAUSE, "unit": "luck / learned", "threshold": max_luck_frac}
    wrong = _wrong_split(record, select)
    if wrong is not None:
        said, advice = wrong
        return Finding(status="fail", summary=said, evidence={"select": select}, advice=[advice], **known)
    if not runs:
        return _without_runs(record, select, known)
    bad = [int((~np.isfinite(run.costs)).sum()) for run in runs]
    evidence: dict[str, Any] = {"select": select, "not_finite": bad, "evaluations": [int(r.costs.size) for r in runs]}
    nothing = [run for run in runs if not run.finite.size]
    if nothing:
        return Finding(
            status="fail", evidence=evidence, **known,
            summary=f"{select} was never finite in {len(nothing)} of {len(runs)} runs: no checkpoint could be selected.",
            advice=["Look at one evaluation by hand: where does the first NaN come from?"],
        )  # fmt: skip
    if any(bad):
        return Finding(
            status="warn", evidence=evidence, **known,
            summary=f"{select} was not finite in {sum(bad)} of {sum(evidence['evaluations'])} evaluations; checkpoints made there "
            "cannot be selected, however good they are.",
            advice=[_NAN_ADVICE],
        )  # fmt: skip
    judged = [run for run in runs if run.judged]
    if not judged:
        few = f"no run has {FEWEST_TO_SEE_NOISE} finite evaluations"
        return Finding(status="not_measured", summary=f"Not measured: {few}.", evidence=evidence, **known)
    tied = [run for run in judged if run.finite.max() == run.finite.min()]
    if tied:
        return Finding(
            status="warn", evidence=evidence, **known,
            summary=f"{select} has the same value at every evaluation in {len(tied)} of {len(judged)} runs: it tells no checkpoint "
            "from another, and the earliest is taken.",
            advice=["Select by a metric that moves, such as the loss, or by more digits of this one."],
        )  # fmt: skip
    if all(run.steps[run.best] == 0 for run in judged):
        return _untrained(record, len(judged), select, evidence, known)
    return _by_luck(judged, select, evidence, known)


def _wrong_split(record: RecordLike, select: str) -> tuple[str, str] | None:
    """Return what is wrong with choosing on this split, and what to do; None where nothing is, or nobody knows the splits."""
    split = select.split("/", maxsplit=1)[0]
    overlap = (record.facts.get("data") or {}).get("overlap") or {}
    distinct = overlap.get("train_rows", 0) - overlap.get("train_duplicates", 0)
    same = ((overlap.get("splits") or {}).get(split) or {}).get("same", False) and distinct >= FEWEST_DISTINCT
    if split == "test":
        return (
            f"Checkpoints and configs are chosen by {select}: the test split is then no test of what was chosen.",
            'Write select="validation/...", and look at the test split once, at the end.',
        )
    if split == "train" or same:
        what = "the training split" if split == "train" else "a copy of the training split"
        return (
            f"Checkpoints and configs are chosen by {select}, on {what}: the one that memorises most is taken.",
            'Write select="validation/...", with examples that are never trained on.',
        )
    return None


def _untrained(record: RecordLike, runs: int, select: str, evidence: dict[str, Any], known: dict[str, Any]) -> Finding:
    """Return the finding where no update made the selected metric better: it may be read the wrong way round."""
    mode = str(record.config["select_mode"])
    better, other = ("smaller", "max") if mode == "min" else ("larger", "min")
    advice = [f"If it is better when it is {'larger' if mode == 'min' else 'smaller'}, write select_mode={other!r}."]
    if select.endswith("/loss"):
        advice = [
            "Look at the learning rate and at the targets of this split: training makes its loss worse from the first steps on."
        ]
    return Finding(
        status="fail", evidence=evidence | {"select_mode": mode}, advice=advice, **known,
        summary=f"{select}, where {better} is better, selects the untrained model in {'all ' * (runs > 1)}{runs} run{'s' * (runs > 1)}.",
    )  # fmt: skip


def _without_runs(record: RecordLike, select: str, known: dict[str, Any]) -> Finding:
    evals = record.evals
    there = sorted({f"{s}/{m}" for s, m in zip(evals["split"], evals["metric"], strict=True)}) if len(evals) else []
    if there and select not in there and (record.trials["state"] == "complete").any():
        return Finding(
            status="fail", evidence={"select": select, "evaluated": there}, **known,
            summary=f"{select} was never evaluated, so no checkpoint could be selected by it; evaluated: {', '.join(there)}.",
            advice=["Select by one that is evaluated, or add the metric to the workload."],
        )  # fmt: skip
    return Finding(status="not_measured", summary="Not measured: no run has finished.", **known)


def _by_luck(runs: Sequence[SelectedRun], select: str, evidence: dict[str, Any], known: dict[str, Any]) -> Finding:
    luck, learned, noise = (float(np.mean([getattr(run, n) for run in runs])) for n in ("luck", "learned", "noise"))
    share = luck / learned if learned > 0 else (0.0 if luck == 0 else math.inf)
    rivals = float(np.median([run.contenders.sum() for run in runs]))
    evidence |= {"luck": luck, "learned": learned, "noise": noise, "contenders": rivals, "carried_over": _carried(runs)}
    head = f"{select} moves by {noise:.2g} from one evaluation to the next, and {rivals:g} of them might be the best"
    if share > known["threshold"]:
        much = "and training learned nothing"
        if math.isfinite(share):
            much = (
                f"as much as {share:.0%} of what training learned"
                if share <= 1
                else "more than all that training learned"
            )
        return Finding(
            status="warn", value=share, evidence=evidence, advice=_NOISE_ADVICE, **known,
            summary=f"{head}: the selected value flatters by about {luck:.2g}, {much}.",
        )  # fmt: skip
    return Finding(
        status="ok", value=share, evidence=evidence, **known,
        summary=f"{head}: the selected value flatters by about {luck:.2g}, {share:.2%} of what training learned.",
    )  # fmt: skip


def _carried(runs: Sequence[SelectedRun]) -> float | None:
    """Return the share of the selected checkpoint's lead over the contenders that is there on the test split too."""
    leads = np.array([run.carried for run in runs])
    chosen, tested = leads.mean(axis=0)
    return float(tested / chosen) if math.isfinite(tested) and chosen > 0 else None
