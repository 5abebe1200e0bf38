"""`diagnose_batch_size`: is a batch size better, or do the other settings fit it better; and how large may it be (F6)?"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
from scipy import stats

from workbench.curves.judged import judged, trials_with
from workbench.curves.selection import selected_by_seed
from workbench.curves.trial_curves import RecordLike, memory_field
from workbench.errors import UsageError
from workbench.findings.audited import why_missing
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.finding import Codes, Finding, p_words
from workbench.record.json_values import number
from workbench.record.read import periodic_rows
from workbench.topics.batch_size.arms import EQUAL, BatchArm, choosing_seeds, comparable, read_arms, tuned_fields
from workbench.topics.optimizers.constants import replaced

Verdict = Literal["equivalent", "different", "undecided"]


class Equivalence(NamedTuple):
    """How two groups of results compare.

    Attributes:
        verdict: "equivalent" where the whole interval lies within the margin, "different" where the whole of it lies beyond,
            else "undecided": neither was shown.
        ratio: of the geometric means, the first group's over the second's.
        low, high: confidence interval of that ratio.
        chance: the larger p-value of the two one-sided tests: how likely results within the margin would be if the groups
            differed by just the margin.
    """

    verdict: Verdict
    ratio: float
    low: float
    high: float
    chance: float


def equivalence(
    ours: Sequence[float], theirs: Sequence[float], *, margin: float = 0.1, alpha: float = 0.05
) -> Equivalence | None:
    """Test whether two groups of losses, or of another metric above 0, are the same up to a margin.

    Two one-sided t-tests (Schuirmann 1987) by Welch's degrees of freedom, over logarithms, so that the margin is a factor.

    Args:
        margin: largest ratio that does not matter, as a share: 0.1 is from 1/1.1 to 1.1 (rule of thumb).
        alpha: level of each of the two tests; the interval holds 1 - 2 alpha.

    Returns:
        None where a group has fewer than two results or one that has no logarithm.
    """
    if not 0 < margin < math.inf:
        raise UsageError(f"margin={margin!r} must be a finite number above 0: 0.1 lets results differ by a tenth.")
    if not 0 < alpha < 0.5:
        raise UsageError(f"alpha={alpha!r} must lie between 0 and 0.5: 0.05 is usual.")
    groups = [np.asarray(list(values), dtype=np.float64) for values in (ours, theirs)]
    if any(len(v) < 2 or not np.isfinite(v).all() or v.min() <= 0 for v in groups):
        return None
    logs, bound = [np.log(v) for v in groups], math.log1p(margin)
    errors = [float(v.var(ddof=1)) / len(v) for v in logs]
    gap, se = float(logs[0].mean() - logs[1].mean()), math.sqrt(sum(errors))
    reach, chance = 0.0, 0.0 if abs(gap) < bound else 1.0
    if se:  # else all seeds agree
        freedom = sum(errors) ** 2 / sum(e**2 / (len(v) - 1) for e, v in zip(errors, logs, strict=True))
        reach = float(stats.t.ppf(1 - alpha, freedom)) * se
        chance = float(stats.t.sf((bound - abs(gap)) / se, freedom))
    verdict: Verdict = "undecided"
    if abs(gap) + reach < bound:
        verdict = "equivalent"
    elif abs(gap) - reach > bound or not se:
        verdict = "different"
    return Equivalence(verdict, math.exp(gap), math.exp(gap - reach), math.exp(gap + reach), chance)


CODES = Codes({
    "batch_size.tuned_directly": "F6.1", "batch_size.retune": "F6.4", "batch_size.equivalence": "F6.8",
    "batch_size.noise_scale": "F6.5", "batch_size.regularisation": "F6.6",
})  # fmt: skip


def diagnose_batch_size(
    record: RecordLike, *, margin: float = 0.1, alpha: float = 0.05, false_adoption: float = 0.1
) -> Diagnosis:
    """Hold the batch sizes of a study against each other, as they were and tuned; in any study: what was not tried is `not_measured`.

    Args:
        margin: batch sizes whose selected metric differs by no more than this share are equally good; and the largest wants more
            weight decay where that gains more than with the smallest by this share (rule of thumb).
        alpha: level of each of the two one-sided tests behind "equally good" (Schuirmann 1987; 0.05 is usual).
        false_adoption: more regularisation helps where its mean gain over fresh seeds would come by chance less often than
            this (rule of thumb).
    """
    record = judged(record)
    arms, config = read_arms(record), record.config
    length = (int(config["batch_size"]), int(config["total_steps"]))
    own = next((arm for arm in arms if (arm.batch_size, arm.total_steps) == length), None)
    if own is None or len({arm.batch_size for arm in arms}) < 2:
        reason = "fewer than two batch sizes were trained; wb.batch_size.Study tries others"
        found = [CODES.not_measured(code, reason) for code in list(CODES)[:3]]
    else:
        found = [
            _tuned_directly(arms, own),
            _retune(record, arms, own, margin),
            _equivalence(record, arms, own, margin, alpha),
        ]
    decays = regularisation_finding(record, arms, margin=margin, false_adoption=false_adoption)
    found += [noise_scale_finding(record), decays]
    return Diagnosis.of(record, found)


def arm_rows(arms: Sequence[BatchArm]) -> list[dict[str, Any]]:
    """Return the arms as JSON values for a table or a figure."""
    return [
        {
            "batch_size": arm.batch_size, "total_steps": arm.total_steps, "examples": arm.examples,
            "best_lr": None if arm.best is None else arm.best.lr,
            "best_memory": None if arm.best is None else arm.best.memory, "at_edge": arm.at_edge, "tried": len(arm.points),
            "fixed": list(arm.fixed.values()), "tuned": list(arm.tuned.values()),
        }
        for arm in arms
    ]  # fmt: skip


def _largest_ratio(groups: Sequence[Sequence[float]]) -> float:
    """Return the largest ratio between the geometric means of any two groups, NaN where fewer than two have one."""
    whole = [values for values in groups if len(values) and np.isfinite(values).all() and min(values) > 0]
    means = [math.exp(float(np.mean(np.log(values)))) for values in whole]
    return max(means) / min(means) if len(means) > 1 else math.nan


def _tuned_directly(arms: Sequence[BatchArm], own: BatchArm) -> Finding:
    factors: list[dict[str, Any]] = [
        {"equal": equal, "batch_sizes": [a.batch_size for a in group], "fixed": _largest_ratio([list(a.fixed.values()) for a in group]),
         "tuned": _largest_ratio([list(a.tuned.values()) for a in group])}
        for equal in EQUAL if len(group := comparable(arms, own, equal)) > 1
    ]  # fmt: skip
    lost = [a.batch_size for a in arms if a.fixed and not np.isfinite(list(a.fixed.values())).all()]
    before, after = (
        " and ".join(f"{f[kind]:.3g} at equal {f['equal']}" for f in factors if math.isfinite(f[kind]))
        for kind in ("fixed", "tuned")
    )
    differ = f"differ by a factor of {before}" if before else "cannot be compared"
    differ += f" (at {', '.join(map(str, dict.fromkeys(lost)))} runs diverge)" if lost else ""
    found = partial(
        CODES.finding, "batch_size.tuned_directly", value=next((f["fixed"] for f in factors if math.isfinite(f["fixed"])), None),
        evidence={"arms": arm_rows(arms), "factors": factors, "diverged_fixed": lost},
    )  # fmt: skip
    if all(len(arm.points) < 2 for arm in arms):
        return found(
            "warn", f"The batch size was changed and nothing else was tuned for it: its validation results {differ}, and that "
            "says how well the other settings fit each batch size, not which one is better.",
            advice=["Choose the batch size by throughput, not by validation performance.",
                    "To compare batch sizes, tune learning rate and momentum for each: wb.batch_size.Study()."],
        )  # fmt: skip
    tuned = f"; each tuned, by {after}" if after else ""
    return replace(found("ok", f"With all other settings fixed, the batch sizes {differ}{tuned}."), clause="F6.2")


def _retune(record: RecordLike, arms: Sequence[BatchArm], own: BatchArm, margin: float) -> Finding:
    code, config = "batch_size.retune", record.config
    memory, best = memory_field(config["optimizer"]), own.best
    if best is None or all(len(arm.points) < 2 for arm in arms):
        return CODES.not_measured(code, "no learning rate was tuned for any batch size")
    rows: list[dict[str, Any]] = []
    for arm in arms:
        if arm is own or arm.best is None:
            continue
        kept = [p.value for p in arm.points if math.isclose(p.lr, best.lr, rel_tol=1e-6) and p.memory == best.memory]
        cost = kept[0] / arm.best.value if kept and arm.best.value > 0 and arm.sign > 0 else math.nan
        change = tuned_fields(arm, config) | {"peak_lr": float(f"{arm.best.lr:.12g}")}
        change |= {} if arm.warmup_steps == config["warmup_steps"] else {"warmup_steps": arm.warmup_steps}
        rows.append({
            "batch_size": arm.batch_size, "total_steps": arm.total_steps, "best_lr": arm.best.lr, "best_memory": arm.best.memory,
            "lr_shift": arm.best.lr / best.lr, "memory_shift": arm.best.memory - best.memory, "cost_of_keeping": cost,
            "at_edge": arm.at_edge, "replace": change,
        })  # fmt: skip
    if not rows:
        return CODES.not_measured(code, "no other batch size learned anything")
    evidence = {"own_lr": best.lr, "own_memory": best.memory, "margin": margin, "rows": rows}
    worst = max(rows, key=lambda r: -math.inf if math.isnan(r["cost_of_keeping"]) else r["cost_of_keeping"])
    moved = memory is not None and any(
        not math.isclose(m, float(config[memory])) for m in (best.memory, *(r["best_memory"] for r in rows))
    )
    at, end = f"lr {{:.3g}}{f', {memory} {{:g}}' if moved else ''}", ", the end of the lrs tried"
    shown = "; ".join(
        f"{r['batch_size']} ({r['total_steps']:,} steps): {at.format(r['best_lr'], r['best_memory'])}{end * r['at_edge']}"
        for r in rows
    )
    head = f"Tuned, batch size {own.batch_size} is best at {at.format(best.lr, best.memory)}; {shown}."
    value = worst["cost_of_keeping"]
    found = partial(
        CODES.finding, code, value=None if math.isnan(value) else value, threshold=1 + margin, evidence=evidence
    )
    if not (math.isinf(value) or value > 1 + margin):
        kept_well = f"Keeping the settings of {own.batch_size} instead cost no more than {margin:.0%}."
        return found("ok", f"{head} {kept_well}")
    price = "the run fails" if math.isinf(value) else f"the selected metric is {value:.3g} times as large"
    advice = ["When the batch size changes, tune the learning rate and momentum again, then the regularisation."]
    for row in (r for r in rows if r["batch_size"] == worst["batch_size"]):
        fields = ", ".join(f"{name}={value!r}" for name, value in row["replace"].items())
        at_length = f"At batch size {row['batch_size']} for {row['total_steps']:,} steps"
        advice.append(f"{at_length} begin with config.replace({fields}).")
    summary = f"{head} With the settings of {own.batch_size} kept, {price} at {worst['batch_size']}."
    return found("warn", summary, advice=advice)


def _equivalence(record: RecordLike, arms: Sequence[BatchArm], own: BatchArm, margin: float, alpha: float) -> Finding:
    code, ours = "batch_size.equivalence", list(own.tuned.values())
    rows: list[dict[str, Any]] = [
        {"equal": equal, "batch_size": arm.batch_size, "total_steps": arm.total_steps, **found._asdict()}
        for equal in EQUAL
        for arm in comparable(arms, own, equal)[1:]
        if arm.best is not None and (found := equivalence(list(arm.tuned.values()), ours, margin=margin, alpha=alpha))
    ]
    if not rows:
        reason = "no two batch sizes were tuned and trained under at least 2 fresh seeds to a metric above 0"
        return CODES.not_measured(code, reason)
    lengths = [
        f"at equal {equal}, {', '.join(_ratio_words(row, own.sign) for row in same)}"
        for equal in EQUAL
        if (same := [row for row in rows if row["equal"] == equal])
    ]
    metric = f"{record.config['select']} ({'lower' if own.sign > 0 else 'higher'} is better)"
    told = f"Each tuned, {metric} as a multiple of that at batch size {own.batch_size}: {'; '.join(lengths)}."
    sizes = [[row for row in rows if row["batch_size"] == size] for size in sorted({r["batch_size"] for r in rows})]
    alike = [[row for row in size if row["verdict"] == "equivalent"] for size in sizes]
    widest = max(abs(math.log(end)) for row in rows for end in (row["low"], row["high"]))
    make = partial(
        CODES.finding, code, value=math.exp(widest), threshold=1 + margin,
        evidence={"margin": margin, "alpha": alpha, "own_batch_size": own.batch_size, "rows": rows},
    )  # fmt: skip
    if all(alike):
        where = dict.fromkeys(f"{row['batch_size']} at equal {row['equal']}" for size in alike for row in size)
        return make("ok", f"Equally good to within {margin:.0%}: {', '.join(where)}. {told}")
    # One that is better at equal steps and worse at equal examples differs by how long it trained.
    apart = [
        all(row["verdict"] == "different" for row in same) and len({row["ratio"] > 1 for row in same}) == 1
        for same in sizes
    ]
    if any(apart):
        advice = "Extend the tuning (regularisation, schedule, number of steps) before the batch size is called better or worse."
        return make("warn", f"Not equally good. {told}", advice=[advice])
    return make(
        "not_measured", f"Neither shown to be equally good to within {margin:.0%}, nor to differ by more. {told}",
        advice=["More seeds narrow the intervals: seeds=... of wb.batch_size.Study."],
    )  # fmt: skip


def _ratio_words(row: Mapping[str, Any], sign: float) -> str:
    word = "" if row["verdict"] != "different" else ", better" if sign * (row["ratio"] - 1) < 0 else ", worse"
    return f"{row['ratio']:.3g} at {row['batch_size']} ({row['low']:.3g} to {row['high']:.3g}{word})"


def diagnose_noise_scale(record: RecordLike) -> Diagnosis:
    """Return the one code `batch_size.noise_scale`, of any study."""
    return Diagnosis.of(record, [noise_scale_finding(record)])


def noise_scale_finding(record: RecordLike) -> Finding:
    """Return `batch_size.noise_scale`: the predicted critical batch size, in examples, the median over the moments that were measured.

    There a run needs about twice as many examples as with small batches and twice as many steps as with large ones (McCandlish et
    al. 2018, arXiv:1812.06162).
    """
    code, facts = "batch_size.noise_scale", record.facts
    rows, found = list(facts.get("noise_scale") or ()), partial(CODES.finding, code)
    seen = facts.get("evaluation") or {}
    if seen.get("unseen"):
        return CODES.not_measured(code, str(seen["unseen"]))
    if seen.get("coupled"):
        said = "Does not apply: the loss couples the examples of a batch, so that batches of another size have another loss."
        return found("ok", said)
    if not rows:
        return found("not_measured", why_missing(facts, "noise_scale", "the noise scale was not measured"))
    own = int(record.config["batch_size"])
    moments = [(int(r["step"]), number(r["value"]), number(r["low"])) for r in rows]
    moments = [moment for moment in moments if math.isfinite(moment[1]) or math.isfinite(moment[2])]
    if not moments:
        return CODES.not_measured(code, "the mean gradient is zero in every sample that was taken")
    known = any(math.isfinite(value) for _, value, _ in moments)
    bounds = sum(not math.isfinite(value) for _, value, _ in moments)
    value = float(np.median([value if math.isfinite(value) else low for _, value, low in moments]))
    shown = f"{'about' if known else 'at least'} {_count(value)} examples"
    span = ", ".join(
        f"{_count(value) if math.isfinite(value) else f'at least {_count(low)}'} at step {step:,}"
        for step, value, low in ([moments[0], moments[-1]] if len(moments) > 1 else moments)
    )
    told = f"{span}, in examples" if 0 < bounds < len(moments) else f"{shown} ({span})"
    evidence = {"rows": rows, "batch_size": own} | ({} if known else {"at_least": value})
    found = partial(found, value=None if bounds else value, unit="examples")  # no one number stands for bounds
    cost = next(iter(replaced(record).get(code, ())), None)
    if cost is not None and cost.costs:
        larger = f"Train with larger batches, {cost.usual:g} for a start"
        advice = [f"{larger}; where memory is short, accumulate_steps splits them."]
        summary = f"Noise dominates the gradient of {own} examples (noise scale {told}): {cost.words}."
        return found("warn", summary, advice=advice, evidence=evidence | {"replaced": cost.to_dict()})
    means = f"{own} is near the point where saving steps and saving examples cost the same"
    if not known:
        means = "noise dominates the mean gradient"
    elif value > 2 * own:
        means = f"batches larger than {own} should save steps"
    elif value < own / 2:
        means = f"batches smaller than {own} should need fewer examples and hardly more steps"
    return found("ok", f"The critical batch size (gradient noise scale) is {told}: {means}.", evidence=evidence)


def regularisation_finding(
    record: RecordLike, arms: Sequence[BatchArm], *, margin: float = 0.1, false_adoption: float = 0.1
) -> Finding:
    """Return `batch_size.regularisation`: a warning where weight decay gains more for the largest batch than for the smallest, by the margin."""
    code, tuned = "batch_size.regularisation", [arm for arm in arms if arm.best is not None]
    gaps = [row for arm in tuned if (row := _mean_gap(record, arm)) is not None]
    tried: list[dict[str, Any]] = []
    for arm in tuned:
        if levels := _decay_levels(record, arm):
            best = min(levels, key=lambda row: arm.sign * row["chosen_by"])
            helps = {"helps": best["gain"] > 0 and best["chance"] < false_adoption}
            same = {name: best[name] for name in ("weight_decay", "gain", "share", "chance")}
            tried.append(
                {"batch_size": arm.batch_size, "total_steps": arm.total_steps, "levels": levels} | same | helps
            )
    evidence: dict[str, Any] = {"gaps": gaps, "tried": tried, "false_adoption": false_adoption, "margin": margin}
    if len({row["batch_size"] for row in gaps}) < 2:
        few = "fewer than two batch sizes have a selected checkpoint of known training loss"
        return CODES.not_measured(code, few, evidence=evidence)
    if not tried or tried[-1]["batch_size"] != max(row["batch_size"] for row in gaps):
        return CODES.not_measured(code, "no weight decay was tried with the largest batch", evidence=evidence)
    ends = [min(gaps, key=lambda r: r["batch_size"]), max(gaps, key=lambda r: r["batch_size"])]
    shown = " and ".join(f"{row['gap']:.3g} at batch size {row['batch_size']}" for row in ends)
    small, large, size = tried[0], tried[-1], tried[-1]["batch_size"]
    of_small = small["share"] if small["helps"] and small["batch_size"] < size else 0.0
    wants, metric = large["helps"] and large["share"] - of_small > margin, str(record.config["select"])
    words = ". ".join(_decay_words(row, metric, tuned[0].sign) for row in tried)
    more = f"{size} wants more of it" if wants else f"{size} gains no more from it, to within {margin:.0%}"
    summary = f"Validation minus training loss is {shown}. {words}. Batch size {more}."
    found = partial(CODES.finding, code, summary=summary, value=large["gain"], unit=metric, evidence=evidence)
    advice = f"Regularise at batch size {size}: weight_decay={large['weight_decay']:g}."
    return found(status="warn", advice=[advice]) if wants else found(status="ok")


def _decay_words(row: Mapping[str, Any], metric: str, sign: float) -> str:
    lowers = "lowers" if sign * row["gain"] > 0 else "raises"
    by = f"by {abs(row['gain']):.3g} ({abs(row['share']):.1%}, {p_words(row['chance'])})"
    return f"At {row['batch_size']}, a weight decay of {row['weight_decay']:g} {lowers} {metric} {by}"


def _mean_gap(record: RecordLike, arm: BatchArm) -> dict[str, Any] | None:
    """Return the mean gap of an arm's fresh seeds at their selected checkpoints, None where it is not known."""
    known: Mapping[str, float] = record.facts.get("train_losses") or {}
    fields = tuned_fields(arm, record.config) | {"weight_decay": record.config["weight_decay"]}
    best, evals = record.trials.set_index("trial")["best_step"], periodic_rows(record.evals)
    evals = evals[(evals["split"] == "validation") & (evals["metric"] == "loss")]
    gaps = []
    for trial in trials_with(record, fields):
        at = evals[(evals["trial"] == trial) & (evals["step"] == best[trial])]["value"]
        if str(trial) in known and len(at):
            gaps.append(float(at.iloc[0]) - float(known[str(trial)]))
    finite = [gap for gap in gaps if math.isfinite(gap)]
    if not finite:
        return None
    return {"batch_size": arm.batch_size, "total_steps": arm.total_steps, "gap": float(np.mean(finite)), "gaps": finite}


def _decay_levels(record: RecordLike, arm: BatchArm) -> list[dict[str, Any]]:
    """Return each weight decay that was tried with an arm as tuned: gain over none, seed by seed, and how likely it is chance."""
    own = float(record.config["weight_decay"])
    fields, choosing = tuned_fields(arm, record.config), set(choosing_seeds(record))
    before = selected_by_seed(record, trials_with(record, fields | {"weight_decay": own}))
    found = []
    for decay in sorted({float(v) for v in record.trials["weight_decay"]} - {own}):
        after = selected_by_seed(record, trials_with(record, fields | {"weight_decay": decay}))
        fresh = sorted((set(before) & set(after)) - choosing)
        chose = [after[seed] for seed in choosing if seed in after]
        if not chose or len(fresh) < 2:
            continue
        gains = np.array([arm.sign * (before[s] - after[s]) for s in fresh])
        gain, se = float(gains.mean()), float(gains.std(ddof=1)) / math.sqrt(len(gains))
        chance = float(stats.t.sf(gain / se, len(gains) - 1)) if se > 0 else float(gain <= 0)
        scale = abs(float(np.mean([before[s] for s in fresh]))) or math.inf
        numbers = {
            "chosen_by": float(np.mean(chose)),
            "gain": gain,
            "share": gain / scale,
            "chance": chance,
            "seeds": len(fresh),
        }
        found.append({"weight_decay": decay} | numbers)
    return found


def _count(examples: float) -> str:
    return f"{float(f'{examples:.3g}'):,.0f}" if examples >= 100 else f"{examples:.3g}"
