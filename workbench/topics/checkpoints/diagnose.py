"""`diagnose_checkpoints`: is the best checkpoint the last, is choosing it more than luck, and does training go on from one (P4)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from scipy.stats import t as student

from workbench.curves.judged import own_trials
from workbench.curves.selection import FEWEST_TO_SEE_NOISE, SelectedRun, metric_sign, read_runs
from workbench.curves.trial_curves import RecordLike
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.finding import Codes, Finding, Status
from workbench.record.read import periodic_rows
from workbench.topics.checkpoints.early_stopping import replay_rules

CODES = Codes({
    "checkpoints.best_not_last": "P4.3", "checkpoints.resume_jump": "P4.2", "checkpoints.selection": "P4.5",
})  # fmt: skip
_LAST, _RESUME, _SELECTION = CODES
FEWEST_TESTED = 3  # runs with a test split; fewer show no spread from seed to seed (rule of thumb)
FEWEST_DISTINCT = 32
"""Training rows; with fewer, as in a problem whose loss is no sample of anything, a split may well be all of it (rule of thumb)."""
_NAN_ADVICE = "Find out what makes the evaluation NaN or infinite: an empty batch, a logarithm of 0, half precision."
_NOISE_ADVICE = (
    "Evaluate on more examples, on the same ones every time, in evaluation mode (P3.4).",
    "Until then compare the mean of several evaluations, and quote the test split and not the selected value.",
)
_RESUME_ADVICE = {
    "parameters": "Save the model's state dict, and load it before the first step.",
    "buffers": "Save the whole state dict of the model, not its parameters alone: batch-norm statistics are buffers.",
    "random state": "Save and restore the random state of Python, NumPy and torch (torch.get_rng_state and the like).",
}


def diagnose_checkpoints(
    record: RecordLike,
    *,
    trials: Sequence[int] = (),
    min_gain_frac: float = 0.1,
    false_alarm: float = 0.05,
    noise_sds: float = 4.0,
    max_luck_frac: float = 0.2,
) -> Diagnosis:
    """Say whether the last checkpoint may be taken, whether the selected one is more than lucky, and whether training resumes.

    With the test split evaluated under at least three seeds, the best is called better than the last where its mean gain there
    is more than chance: that split had no part in choosing. Without, the gain on the split that chose is held against what the
    best of so many noisy evaluations wins by luck, and from three seeds on against their spread.

    Args:
        record: a study of any kind; runs that are judged are those of the stage "checkpoints", or of the study's own config.
        trials: of a changed config, which are judged instead.
        min_gain_frac: smaller gains, as a share of what training learned, do not matter; the noise of a constant learning rate moves
            the last evaluation by several percent (rule of thumb).
        false_alarm: chance at which a gain is believed by its spread over the seeds, one-sided (rule of thumb).
        noise_sds: without a test split, standard deviations beyond the expected luck; the noise itself is estimated from a
            few evaluations, so this is larger than for a known one (rule of thumb, measured: on plateaus of white noise at most
            4 % false alarms from one run and 1 % from four; noise that lasts over evaluations raises more).
        max_luck_frac: luck above this share of what training learned means that the choice is noise (rule of thumb).

    Returns:
        The codes `checkpoints.best_not_last`, `.resume_jump` and `.selection`, once each.
    """
    runs = read_runs(record, trials)
    own = {*own_trials(record)}.issuperset(run.trial for run in runs) and len(runs) < len(record.trials)
    whose = "the changed config's " if trials else "the baseline's " if own else ""
    last = _best_not_last(record, runs, min_gain_frac, false_alarm, noise_sds, whose=whose)
    chosen = _with_others(record, runs, _selection(record, runs, max_luck_frac))
    return Diagnosis.of(record, (last, resume_finding(record.facts.get("resume")), chosen))


def _best_not_last(
    record: RecordLike,
    runs: Sequence[SelectedRun],
    min_gain_frac: float,
    false_alarm: float,
    noise_sds: float,
    *,
    whose: str,
) -> Finding:
    judged = [run for run in runs if run.judged]
    if not judged:
        why = "no run has finished" if not runs else f"no run has {FEWEST_TO_SEE_NOISE} finite evaluations"
        return CODES.not_measured(_LAST, why)
    sign, many = metric_sign(record), len(judged) > 1
    rows = [
        {
            "trial": run.trial, "seed": run.seed, "best_step": int(run.steps[run.best]), "total_steps": run.total_steps,
            "best_frac": run.best_frac, "best": sign * float(run.costs[run.best]), "last": sign * float(run.costs[-1]),
            "gain": run.gain, "test_gain": run.test_gain, "evaluations": int(run.costs.size), "noise": run.noise,
            "luck": run.luck, "learned": run.learned,
        }
        for run in judged
    ]  # fmt: skip
    evidence: dict[str, Any] = {"runs": rows, "early_stopping": replay_rules(runs)}
    known: dict[str, Any] = {"unit": str(record.config["select"]), "evidence": evidence}
    advice = ["Take the selected checkpoint, not the last: record.best().checkpoint (P4.4, P4.5)."]
    middle = float(np.median([run.best_frac for run in judged]))
    if middle <= 0.5:
        advice.append("The second half of the run gains nothing here: regularise, or plan fewer steps and tune again.")
    if sum(run.best <= int(run.steps[0] == 0) for run in judged) > len(judged) / 2:
        advice.append("The best is the first evaluation of training: evaluate more often to find where it is best.")
    if broken := sum(not math.isfinite(run.gain) for run in judged):
        said = (
            f"The last evaluation is not finite in {broken} of {len(judged)} runs, so the last checkpoint is useless."
        )
        return CODES.finding(_LAST, "warn", said, advice=advice, **known)
    matters_from = min_gain_frac * float(np.mean([run.learned for run in judged]))
    tested = [run for run in judged if math.isfinite(run.test_gain)]
    if len(tested) >= FEWEST_TESTED:
        numbers, better = _gain_on_test(tested, false_alarm)
    else:
        numbers, better = _gain_where_chosen(judged, noise_sds, false_alarm)
    gain, threshold = numbers["gain"], numbers["threshold"]
    little = (
        f", but less than {matters_from:.2g}, {min_gain_frac:.0%} of what training learned, and so too little to matter"
        if threshold < gain <= matters_from
        else ""
    )
    evidence |= numbers | {"matters_from": matters_from}
    of = f"{whose}{len(judged)} runs" if many else f"{whose or 'the only '}run"
    said = f"The last checkpoint is the best in {'each of ' * many}{of}."
    if early := sum(run.best < run.costs.size - 1 for run in judged):
        of = f"{early} of {of}" if many else of
        at = f"at {middle:.0%} of the steps{', median' * many}"
        said = f"The best checkpoint is not the last in {of} ({at}). {better.format(little=little)}"
    known |= {"value": gain, "threshold": threshold}
    if gain > max(threshold, matters_from):
        return CODES.finding(_LAST, "warn", f"{said}{_overfits(record, judged)}", advice=advice, **known)
    return CODES.finding(_LAST, "ok", said, **known)


def _overfits(record: RecordLike, runs: Sequence[SelectedRun], *, window: float = 0.1) -> str:
    """Say so where the training loss of every run falls on while validation gets worse; a loss is the mean over a `window` of the run."""
    losses: list[list[float]] = []
    for run in runs:
        rows, ends = record.steps[record.steps["trial"] == run.trial], (run.steps[run.best], run.total_steps)
        spans = [rows["loss"][rows["step"].between(end - window * run.total_steps, end)] for end in ends]
        losses.append([float(span.mean()) for span in spans])
    if not all(late < early for early, late in losses):
        return ""
    early, late = np.mean(losses, axis=0)
    step = int(np.median([run.steps[run.best] for run in runs]))
    return f" The training loss falls on, from {early:.3g} to {late:.3g}: the model overfits from step {step:,} on."


def _over_seeds(gains: Sequence[float], false_alarm: float) -> tuple[float, float]:
    """Return the standard error of the mean gain over the seeds, and how far chance reaches by Student's t."""
    se = float(np.std(gains, ddof=1)) / math.sqrt(len(gains))
    return se, float(student.ppf(1 - false_alarm, len(gains) - 1)) * se


def _gain_on_test(runs: Sequence[SelectedRun], false_alarm: float) -> tuple[dict[str, Any], str]:
    """Judge the mean gain on the test split over the seeds; `{little}` in the words is for a gain that does not matter."""
    gains = [run.test_gain for run in runs]
    gain, seen = float(np.mean(gains)), float(np.mean([run.gain for run in runs]))
    se, threshold = _over_seeds(gains, false_alarm)
    lost = f", so {min(1.0, max(0.0, 1 - gain / seen)):.0%} of that does not carry over" if seen > 0 else ""
    said = (
        f"It is better than the last by {seen:.3g} on the split that chose it and by {gain:.3g} ± {se:.2g} on the test split"
        f"{lost}: {'beyond' if gain > threshold else 'not beyond'} chance{{little}}."
    )
    numbers = {"gain": gain, "se": se, "threshold": threshold, "selected_gain": seen, "runs_tested": len(runs)}
    return {"split": "test"} | numbers, said


def _gain_where_chosen(runs: Sequence[SelectedRun], noise_sds: float, false_alarm: float) -> tuple[dict[str, Any], str]:
    """Judge the mean gain where it was chosen: against the luck of the best of so many draws, their noise, and the seeds' spread."""
    gains = [run.gain for run in runs]
    gain, luck = float(np.mean(gains)), float(np.mean([run.luck for run in runs]))
    noise = math.sqrt(sum(run.noise**2 for run in runs)) / len(runs)
    spread = _over_seeds(gains, false_alarm)[1] if len(gains) >= FEWEST_TESTED else 0.0
    threshold = luck + max(noise_sds * noise, spread)
    by = f"It is {gain:.3g} better than the last on the split that chose it"
    said = f"{by}; selection and noise explain {threshold:.2g}{{little}}. How much of that holds on new data was not measured."
    if gain <= threshold:
        said = f"{by}; selection and noise explain {threshold:.2g}, so it may be noise."
    numbers = {"gain": gain, "luck": luck, "noise": noise, "spread": spread, "threshold": threshold}
    return {"split": "selected"} | numbers, said


def resume_finding(facts: Mapping[str, Any] | None) -> Finding:
    """Judge the `resume_facts` of an audit; None where nobody looked."""
    if not facts:
        return CODES.not_measured(
            _RESUME, "no run was resumed here. wb.checkpoints.audit_resume does it with your own save and load"
        )
    allowed, changed, missing = facts["allowed"], facts["changed"], list(facts["missing"])
    known: dict[str, Any] = {
        "value": facts["jump"], "unit": "loss", "threshold": allowed or 0.0, "evidence": dict(facts),
    }  # fmt: skip
    if not changed and allowed is not None:
        return CODES.not_measured(
            _RESUME, f"two runs that were not stopped differ by {facts['floor']:.2g} already, and the resumed one lies "
            f"within {allowed:.2g} (ten times that): what is smaller cannot be seen", **known,
            advice=["Make training repeat itself (seeds, torch.use_deterministic_algorithms), and audit again."],
        )  # fmt: skip
    if not changed:
        after = f"the next {facts['after']} are bit for bit those of an uninterrupted run"
        return CODES.finding(_RESUME, "ok", f"Resumed after {facts['steps']} steps, {after}.", **known)
    known["step"] = None if facts["first_step"] is None else int(facts["steps"] + facts["first_step"])
    jump = f"the losses agree, but {', '.join(changed)} end with other values"
    if "loss" in changed:
        jump = f"from step {known['step']} on the loss differs by up to {facts['jump']:.2g}"
    if missing:
        said = f"The checkpoint loses {', '.join(missing)}: {jump}. Restoring it by hand removes the difference."
        return CODES.finding(_RESUME, "fail", said, advice=list(map(_how_to_keep, missing)), **known)
    return CODES.finding(
        _RESUME, "warn", f"A resumed run differs from an uninterrupted one: {jump}. The lost state is in none of the parts "
        "that could be restored by hand.", **known,
        advice=[
            "Look for state outside of them: a dataset or an augmentation with random numbers of its own, counters in the model that "
            "are no buffers, worker processes that draw."
        ],
    )  # fmt: skip


def _how_to_keep(name: str) -> str:
    other = f"Save {name}, by its state_dict where it has one, and load it after the object was built."
    return next((advice for kind, advice in _RESUME_ADVICE.items() if name.endswith(kind)), other)


def _with_others(record: RecordLike, runs: Sequence[SelectedRun], found: Finding) -> Finding:
    """Add every metric but the selected one that is NaN or infinite in a judged run."""
    if not runs:
        return found
    rows = periodic_rows(record.evals)
    rows = rows[rows["trial"].isin([run.trial for run in runs])]
    others, told = {}, []
    for (split, metric), each in rows.groupby(["split", "metric"]):
        bad = each[~np.isfinite(each["value"].to_numpy(dtype=np.float64, na_value=np.nan))]
        if len(bad) and (name := f"{split}/{metric}") != record.config["select"]:
            first = int(bad["step"].min())
            others[name] = {"not_finite": len(bad), "evaluations": len(each), "first_step": first}
            told.append(f"{name} was not finite in {len(bad)} of {len(each)} evaluations, first at step {first:,}")
    if not others:
        return found
    return replace(
        found, status="fail" if found.status == "fail" else "warn",
        summary=f"{'; '.join(told)}: it selects nothing here, but its curve cannot be read. {found.summary}",
        evidence=dict(found.evidence) | {"others_not_finite": others}, advice=list(dict.fromkeys([*found.advice, _NAN_ADVICE])),
    )  # fmt: skip


def _unusable(record: RecordLike, runs: Sequence[SelectedRun], select: str) -> tuple[str, str, list[str]] | None:
    """Return why nothing may be selected by a metric, whatever its values are, what to do, and what was evaluated instead."""
    split = select.split("/", maxsplit=1)[0]
    if split == "test":
        said = f"Checkpoints and configs are chosen by {select}, so the test split is no independent test any more."
        return said, 'Write select="validation/...", and look at the test split once, at the end.', []
    overlap = (record.facts.get("data") or {}).get("overlap") or {}
    distinct = overlap.get("train_rows", 0) - overlap.get("train_duplicates", 0)
    same = ((overlap.get("splits") or {}).get(split) or {}).get("same", False) and distinct >= FEWEST_DISTINCT
    if split == "train" or same:
        what = "the training split" if split == "train" else "a copy of the training split"
        said = f"Checkpoints and configs are chosen by {select}, on {what}, which picks the one that memorises most."
        return said, 'Write select="validation/...", with examples that are never trained on.', []
    evals = record.evals
    there = sorted({f"{s}/{m}" for s, m in zip(evals["split"], evals["metric"], strict=True)}) if len(evals) else []
    if runs or not there or select in there or not (record.trials["state"] == "complete").any():
        return None
    said = f"{select} was never evaluated, so no checkpoint could be selected by it; evaluated: {', '.join(there)}."
    return said, "Select by one that is evaluated, or add the metric to the workload.", there


def _selection(record: RecordLike, runs: Sequence[SelectedRun], max_luck_frac: float) -> Finding:
    """Judge the metric by which the best checkpoint of each run is chosen."""
    select = str(record.config.get("select", ""))
    known: dict[str, Any] = {"unit": "luck / learned", "threshold": max_luck_frac}
    evidence: dict[str, Any] = {"select": select}

    def told(status: Status, summary: str, *advice: str, **more: Any) -> Finding:
        return CODES.finding(_SELECTION, status, summary, evidence=evidence, advice=advice, **known, **more)

    if (unusable := _unusable(record, runs, select)) is not None:
        said, advice, there = unusable
        evidence |= {"evaluated": there} if there else {}
        return told("fail", said, advice)
    if not runs:
        return CODES.not_measured(_SELECTION, "no run has finished", **known)
    bad, evaluations = [int((~np.isfinite(run.costs)).sum()) for run in runs], [int(run.costs.size) for run in runs]
    evidence |= {"not_finite": bad, "evaluations": evaluations}
    if nothing := sum(not run.finite.size for run in runs):
        return told(
            "fail", f"{select} was never finite in {nothing} of {len(runs)} runs: no checkpoint could be selected.",
            "Look at one evaluation by hand: where does the first NaN come from?",
        )  # fmt: skip
    if any(bad):
        return told(
            "warn", f"{select} was not finite in {sum(bad)} of {sum(evaluations)} evaluations; checkpoints made there "
            "cannot be selected, however good they are.", _NAN_ADVICE,
        )  # fmt: skip
    judged = [run for run in runs if run.judged]
    if not judged:
        few = f"no run has {FEWEST_TO_SEE_NOISE} finite evaluations"
        return CODES.not_measured(_SELECTION, few, evidence=evidence, **known)
    if tied := sum(run.finite.max() == run.finite.min() for run in judged):
        return told(
            "warn", f"{select} has the same value at every evaluation in {tied} of {len(judged)} runs: it cannot "
            "rank checkpoints, and the earliest is taken.", "Select by a metric that moves, such as the loss, or by more digits of this one.",
        )  # fmt: skip
    if all(run.steps[run.best] == 0 for run in judged):  # it may be read the wrong way round
        evidence["select_mode"] = mode = str(record.config["select_mode"])
        better, worse, other = ("smaller", "larger", "max") if mode == "min" else ("larger", "smaller", "min")
        many = f"{'all ' * (len(judged) > 1)}{len(judged)} run{'s' * (len(judged) > 1)}"
        advice = f"If it is better when it is {worse}, write select_mode={other!r}."
        if select.endswith("/loss"):
            advice = "Look at the learning rate and at the targets of this split: training makes its loss worse from the first steps on."
        return told("fail", f"{select}, where {better} is better, selects the untrained model in {many}.", advice)
    luck, learned, noise = (float(np.mean([getattr(run, n) for run in judged])) for n in ("luck", "learned", "noise"))
    share = luck / learned if learned > 0 else (0.0 if luck == 0 else math.inf)
    rivals = float(np.median([run.contenders.sum() for run in judged]))
    chosen, tested = np.mean([run.carried for run in judged], axis=0)  # the lead over the contenders, on either split
    carried = float(tested / chosen) if math.isfinite(tested) and chosen > 0 else None
    evidence |= {"luck": luck, "learned": learned, "noise": noise, "contenders": rivals, "carried_over": carried}
    head = f"{select} moves by {noise:.2g} from one evaluation to the next, and {rivals:g} of them might be the best"
    head += f": selection makes the chosen value look better by about {luck:.2g}"
    much = f"as much as {share:.0%} of what training learned" if share <= 1 else "more than all that training learned"
    much = much if math.isfinite(share) else "and training learned nothing"
    flatters = share > max_luck_frac
    said = f"{head}, {much if flatters else f'{share:.2%} of what training learned'}."
    return told("warn" if flatters else "ok", said, *_NOISE_ADVICE * flatters, value=share)
