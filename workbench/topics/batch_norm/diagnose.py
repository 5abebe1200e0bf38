"""`diagnose_batch_norm`: whose examples make batch norm's statistics, how many, and does evaluation use the right ones (P6)?"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from workbench.curves.seed_comparison import p_value
from workbench.curves.selection import metric_sign, selected_by_seed
from workbench.curves.trial_curves import RecordLike
from workbench.findings.audited import Audited
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.finding import Finding, p_words
from workbench.record.json_values import number
from workbench.topics.batch_norm.replicas import CODES, judge_processes


def diagnose_batch_norm(
    record: Audited, *, few_examples: int = 16, warm: float = 0.9, shift: float = 0.5, harm: float = 0.05,
    missing_share: float = 0.05, large_shift: float = 1.0, alpha: float = 0.05,
) -> Diagnosis:  # fmt: skip
    """Judge a model's batch norm by the facts that were collected about it, and a study's trials where there are some.

    Args:
        record: a study whose facts hold "batch_norm", or what `audit_batch_norm` returns.
        few_examples: in a statistic, or independent values that it is as steady as, below which its noise costs (Wu and He
            2018, arXiv:1803.08494, figure 1: the error of a ResNet-50 rises below 16).
        warm: share of what it averages that a running statistic has to hold; the rest is its initial 0 or 1 (rule of thumb).
        shift: root mean square over channels, in standard deviations, by which stored statistics may differ from those of the
            training data now (rule of thumb).
        harm: share of a loss that may depend on whose statistics are used, and of what training learned, that stored statistics
            may cost (rule of thumb).
        missing_share: of a variance that averaging may leave out (rule of thumb).
        large_shift: distance of the processes' statistics, in standard deviations of a channel, from which harm is taken for
            granted where nobody gave their metrics: the channel moves by as much as it varies (rule of thumb).
        alpha: chance at which a virtual batch counts as better, or another norm as different, over all that were tried (0.05 is usual).

    Returns:
        `batch_norm.rank_local`, `.first_device_ema`, `.variance_of_means`, `.ghost_size`, `.small_batch`, `.cold_ema` and
        `.stale`, once each; "ok" with the reason where the model has no batch norm, or only such as is frozen or not used.
    """
    facts = record.facts.get("batch_norm")
    if not facts:
        otherwise = (
            "batch norm was not examined; `workbench diagnose`, wb.batch_norm.Study and wb.batch_norm.audit do that"
        )
        return Diagnosis.of(record, CODES.missing(record.facts, "batch_norm", otherwise))
    if not facts["layers"]:
        said = "Does not apply: the model has no batch norm layer."
        return Diagnosis.of(record, [CODES.finding(code, "ok", said) for code in CODES])
    devices = record.facts.get("batch_norm_devices") or []
    of_processes = judge_processes(facts, devices, harm=harm, large_shift=large_shift, missing_share=missing_share)
    said = f"Does not apply: none of {facts['layers']} batch norm layers uses the statistics of a batch in training; they are frozen or not reached."
    ghost, small, cold, stale = (CODES.finding(code, "ok", said) for code in list(CODES)[3:])
    if facts.get("unused", 0) < facts["layers"]:
        ghost, small = _ghost_size(record, facts, alpha), _small_batch(record, facts, few_examples, alpha)
        cold, stale = _cold_ema(facts, warm, harm), _stale(facts, shift, warm, harm)
    if facts.get("frozen_new"):
        cold = _frozen_new(facts)
    return Diagnosis.of(record, (*of_processes, ghost, small, cold, stale))


def _cost(facts: Mapping[str, Any]) -> tuple[float, str] | None:
    """Return what stored statistics cost, as a share of what training learned, and that in words; None where it is not known."""
    loss = facts.get("loss")
    if not loss or not all(value is not None and math.isfinite(float(value)) for value in loss.values()):
        return None
    start, stored, anew = (float(loss[name]) for name in ("start", "stored", "anew"))
    share = (stored - anew) / max(start - anew, 0.1 * abs(start), 1e-12)
    return share, f" The validation loss is {stored:.4g} with them and {anew:.4g} with those of training batches now."


def _frozen_new(facts: Mapping[str, Any]) -> Finding:
    names = facts["frozen_new"]
    return CODES.finding(
        "batch_norm.cold_ema", "warn", f"{len(names)} of {facts['layers']} batch norm layers are in evaluation mode while the model trains, with the "
        f"initial statistics, mean 0 and variance 1: they normalise nothing ({', '.join(names[:4])}).",
        value=0.0, unit="share", evidence={"layers": list(names)},
        advice=["Let them train: call .train() on them too, or load the statistics that were to be frozen."],
    )  # fmt: skip


def read_norm_arms(record: RecordLike, stage: str) -> list[dict[str, Any]]:
    """Return the arms of a stage, in the order of batch size, devices and statistic examples, the whole batch last.

    Returns:
        JSON rows: stat_examples, statistic (examples that one is made of), batch_size, devices, seeds, and the selected metric's values,
        their mean and standard error "se", NaN for one seed.
    """
    asked = record.facts.get(stage)
    if not asked:
        return []
    trials, lost, rows = record.trials, metric_sign(record) * math.inf, list[dict[str, Any]]()
    trials = trials[trials["trial"].isin(asked) & trials["state"].isin(["complete", "diverged"])]
    setting = ["batch_size", "accumulate_steps", "bn_stat_examples"]
    for _, arm in trials.groupby(setting, dropna=False):
        size, devices, examples = arm[setting].iloc[0]
        found = selected_by_seed(record, arm.loc[arm["state"] == "complete", "trial"].tolist())
        seeds = [int(seed) for seed in arm["seed"]]
        values = [found.get(seed, lost) for seed in seeds]
        examples, whole = None if pd.isna(examples) else int(examples), int(size) // int(devices)
        rows.append({
            "stat_examples": examples, "statistic": min(whole, examples or whole), "batch_size": int(size), "devices": int(devices),
            "seeds": seeds, "values": values, "mean": float(np.mean(values)), "se": _standard_error(values),
        })  # fmt: skip
    return rows


def _standard_error(values: Sequence[float]) -> float:
    known = len(values) > 1 and np.isfinite(values).all()
    return float(np.std(values, ddof=1)) / math.sqrt(len(values)) if known else math.nan


def better_arms(arms: Sequence[Mapping[str, Any]], own: Mapping[str, Any], *, sign: float) -> dict[int, float]:
    """Return statistic examples -> how likely it is by chance that one of so many arms is better than `own` by as much as this one.

    `p_value` over the seeds that both have, times the number of arms (Bonferroni). Arms that diverged are left out; `sign` is 1
    where a smaller metric is better, else -1.
    """
    tried = [arm for arm in arms if np.isfinite(arm["values"]).all()]
    found = {}
    for arm in tried:
        theirs, ours = (dict(zip(each["seeds"], each["values"], strict=True)) for each in (arm, own))
        gains = [sign * (ours[seed] - theirs[seed]) for seed in ours.keys() & theirs.keys()]
        if len(gains) > 1 and np.isfinite(gains).all():
            found[arm["statistic"]] = min(len(tried) * p_value(gains), 1.0)
    return found


def _ghost_size(record: Any, facts: Mapping[str, Any], alpha: float) -> Finding:
    code, asked, given = "batch_norm.ghost_size", facts.get("asked"), facts.get("examples")
    arms, held, split = (read_norm_arms(record, f"batch_norm_{stage}") for stage in ("virtual", "held", "split"))
    evidence: dict[str, Any] = {"asked": asked, "examples": given, "arms": arms, "held": held, "split": split}
    numbers: dict[str, Any] = {"value": given, "unit": "examples", "threshold": asked, "evidence": evidence}
    if given is None:
        return CODES.not_measured(code, "no forward pass over training data was made", **numbers)
    if asked is not None and given < asked:
        return CODES.finding(
            code, "warn", f"Statistics are to come from {asked} examples, but a device's batch has {given}.",
            advice=[f"Give a device at least {asked} examples (batch_size / accumulate_steps / hosts), or take statistics over several: "
                    "wb.batch_norm.synchronise(model)."], **numbers,
        )  # fmt: skip
    head = f"Each statistic comes from {given} examples" + ("" if asked is None else ", as asked for")
    own = next((arm for arm in arms if arm["stat_examples"] == asked), None)
    if own is None:
        return CODES.finding(code, "ok", f"{head}.", **numbers)
    told = ", ".join(f"{arm['statistic']} examples {_with_se(arm)}" for arm in arms)
    said = f"{head}. At batch size {own['batch_size']}, selected metric: {told}.{_held_words(held)}"
    better = better_arms([arm for arm in arms if arm is not own], own, sign=metric_sign(record))
    evidence["chance"] = better
    best = min((size for size in better if better[size] < alpha), key=lambda size: better[size], default=None)
    if best is None:
        return CODES.finding(code, "ok", f"{said} None is significantly better.", **numbers)
    return CODES.finding(
        code, "warn", f"{said} {best} is better ({p_words(better[best])}).",
        advice=[f"Train with bn_stat_examples={best}, and confirm it under fresh seeds."], **numbers,
    )  # fmt: skip


def _with_se(row: Mapping[str, Any]) -> str:
    return f"{row['mean']:.4g}" + ("" if math.isnan(row["se"]) else f" ± {row['se']:.2g}")


def _held_words(rows: Sequence[Mapping[str, Any]]) -> str:
    """Tell how far batch sizes lie apart with statistics from a set number of examples, and from the whole batch."""
    fixed = {row["batch_size"]: row for row in rows if row["stat_examples"] is not None}
    if not fixed:
        return ""
    whole = sorted((row["batch_size"], row) for row in rows if row["stat_examples"] is None)
    told = [f"{n}: {f'{_with_se(fixed[n])} against ' if n in fixed else ''}{_with_se(row)}" for n, row in whole]
    asked = next(iter(fixed.values()))["stat_examples"]
    return f" By batch size, held at {asked} against the whole batch: {'; '.join(told)}."


def diagnose_seen_batches(record: RecordLike, *, few_values: int = 4) -> Diagnosis:
    """Say whether the batch norm layers of a loop that was watched normalise by next to nothing, or evaluate without statistics; no finding where none was seen.

    Args:
        few_values: of a channel, rows times places, in a statistic up to which its noise costs for certain (measured: four examples cost
            an MLP 70 % against layer norm, docs/findings.md; how steady more values are is not known from outside).
    """
    modes = record.facts.get("loop", {}).get("modes", {})
    values, found = modes.get("norm_values"), []
    if (line := modes.get("norm_unset")) is not None:
        found = [CODES.finding(
            "batch_norm.cold_ema", "fail", f"A model is evaluated with the running statistics that it was made with, mean 0 and variance 1, while its weights train ({line}).",
            advice=["Copy the buffers too, where a copy of the model averages the weights: `copy.buffers()` beside `copy.parameters()`, or torch.optim.swa_utils.update_bn(loader, copy).",
                    "Of the model that trains: leave batch norm's momentum above 0, and train in training mode."],
        )]  # fmt: skip
    if values is None:
        return Diagnosis.of(record, found)
    said = f"A batch norm layer takes each statistic from {values:,} values of a channel"
    known: dict[str, Any] = {"value": float(values), "unit": "values", "threshold": float(few_values)}
    if values > few_values:
        return Diagnosis.of(
            record, [*found, CODES.finding("batch_norm.small_batch", "ok", f"{said} or more.", **known)]
        )
    advice = [
        "Train on larger batches, or normalise each example by itself: nn.LayerNorm or nn.GroupNorm in place of batch norm."
    ]
    told = CODES.finding(
        "batch_norm.small_batch", "warn", f"{said}: their noise costs accuracy.", advice=advice, **known
    )
    return Diagnosis.of(record, [*found, told])


def _small_batch(record: Any, facts: Mapping[str, Any], few: int, alpha: float) -> Finding:
    code = "batch_norm.small_batch"
    given, independent, refused = facts.get("examples"), facts.get("independent"), facts.get("refused", 0)
    rows = list(getattr(record, "facts", {}).get("batch_norm_swap") or [])
    evidence = {"examples": given, "values": facts.get("values"), "independent": independent, "refused": refused, "swap": rows}  # fmt: skip
    numbers: dict[str, Any] = {"value": given, "unit": "examples", "threshold": few, "evidence": evidence}
    if refused:
        return CODES.finding(
            code, "fail", f"{refused} of the training batches give a batch norm layer a single value per channel, which "
            "has no variance: training stops there with an error.",
            advice=["Leave the incomplete last batch out: DataLoader(..., drop_last=True), or take larger batches."], **numbers,
        )  # fmt: skip
    if given is None:
        return CODES.not_measured(code, "no forward pass over training data was made", **numbers)
    said = f"A statistic comes from {given} examples ({facts['values']:,} values"
    said += ")" if independent is None else f", as steady as {independent:,.0f} independent ones)"
    norms = compare_norms(rows, sign=metric_sign(record) if hasattr(record, "config") else 1.0)
    evidence["norms"], swapped = norms, _swap(norms, alpha)
    if max(given, independent or 0) >= few:
        return CODES.finding(code, "ok", f"{said}: enough.{swapped}", **numbers)
    return CODES.finding(
        code, "warn", f"{said}: below {few}, their noise costs accuracy.{swapped}",
        advice=["Take statistics over several devices: wb.batch_norm.synchronise(model).",
                "Or normalise each example by itself: wb.batch_norm.replace(model, 'group'), or 'layer'."], **numbers,
    )  # fmt: skip


def compare_norms(rows: Sequence[Mapping[str, Any]], *, sign: float) -> list[dict[str, Any]]:
    """Return each norm at each batch size at the best of its learning rates, beside batch norm at the best of its own.

    `chance` is how likely so large a difference from batch norm, either way, is by chance: `p_value` over the seeds, times the number of
    such comparisons (Bonferroni); None for batch norm, and where fewer than two seeds tell. `sign` is 1 where a smaller metric is better.
    """
    best: dict[tuple[int, str], Mapping[str, Any]] = {}
    for row in sorted(rows, key=lambda row: sign * float(row["mean"])):
        if math.isfinite(float(row["mean"])):
            best.setdefault((int(row["batch_size"]), str(row["norm"])), row)
    others = sum(norm != "batch" for _, norm in best)
    found: list[dict[str, Any]] = []
    for (size, norm), row in sorted(best.items(), key=lambda item: (item[0][0], item[0][1] != "batch")):
        values, batch, chance = row["values"], best.get((size, "batch"), row)["values"], None
        gains = [sign * (b - v) for b, v in zip(batch, values, strict=False)] if len(batch) == len(values) else []
        if norm != "batch" and len(gains) > 1:
            chance = min(2 * others * min(p_value(gains), p_value([-gain for gain in gains])), 1.0)
        found.append({
            "batch_size": size, "norm": norm, "lr": row["lr"], "mean": float(row["mean"]), "se": _standard_error(values),
            "better": sum(gains) > 0, "chance": chance,
        })  # fmt: skip
    return found


def _swap(norms: Sequence[Mapping[str, Any]], alpha: float) -> str:
    """Tell the mean of each norm at each batch size, and which ones differ from batch norm by more than chance."""
    if not norms:
        return ""
    by_size: dict[int, list[str]] = {}
    for row in norms:
        by_size.setdefault(row["batch_size"], []).append(f"{row['norm']} {_with_se(row)}")
    told = "; ".join(f"{size}: {', '.join(means)}" for size, means in by_size.items())
    apart = [
        f"{r['norm']} is {'better' if r['better'] else 'worse'} at {r['batch_size']} ({p_words(r['chance'])})"
        for r in norms
        if r["chance"] is not None and r["chance"] < alpha
    ]
    held = any(r["chance"] is not None for r in norms)
    said = (
        f" Against batch norm, {', '.join(apart)}." if apart else " None differs significantly from batch norm." * held
    )
    return f" Norms at equal budgets, by batch size: {told}.{said}"


def _cold_ema(facts: Mapping[str, Any], warm: float, harm: float) -> Finding:
    code, layers = "batch_norm.cold_ema", facts["ema"]
    if facts.get("reason"):
        return CODES.not_measured(code, facts["reason"])
    if not layers:
        said = "Does not apply: no layer keeps running statistics; evaluation uses those of its batches."
        return CODES.finding(code, "ok", said)
    coldest = min(layers, key=lambda row: float(row["warm"]))
    value, momentum, batches = float(coldest["warm"]), coldest["momentum"], int(coldest["batches"])
    if not math.isfinite(value):
        return CODES.not_measured(code, "the momentum is not a number", evidence={"layers": layers})
    numbers: dict[str, Any] = {
        "value": value, "unit": "share", "threshold": warm, "step": facts.get("step"), "evidence": {"layers": layers},
    }  # fmt: skip
    told = str(momentum) if momentum is None else f"{momentum:.3g}"
    said = f"After {batches:,} batches at momentum {told}, {value:.1%} of the running statistics comes from data"
    cost = _cost(facts)
    if value >= warm or (cost is not None and cost[0] < harm):
        return CODES.finding(code, "ok", f"{said}.{cost[1] if cost and value < warm else ''}", **numbers)
    if momentum is not None and 0 < momentum < 1:
        needed = math.ceil(math.log(1 - warm) / math.log1p(-momentum))
        fix = f"Train for at least {needed:,} batches before evaluating, or raise the momentum"
    else:
        fix = "Let them see training batches in training mode (a momentum of 0 never does)"
    return CODES.finding(
        code, "warn" if value > 0.5 else "fail",
        f"{said} (layer {coldest['layer']!r}); the rest is the initial values, mean 0 and variance 1 in a new model.{cost[1] if cost else ''}",
        advice=[f"{fix}; momentum=None takes the plain average of all batches."], **numbers,
    )  # fmt: skip


def _stale(facts: Mapping[str, Any], limit: float, warm: float, harm: float) -> Finding:
    code, estimate = "batch_norm.stale", facts.get("estimate")
    if not estimate:
        cold = "running statistics are cold, which batch_norm.cold_ema judges" if facts.get("loss") else ""
        if why := cold if facts["ema"] else "no layer keeps running statistics":
            return CODES.finding(code, "ok", f"Does not apply: {why}.")
        why = "there are no statistics of training data to compare with, or the stored ones are still cold"
        return CODES.not_measured(code, why)
    worst = max(estimate["layers"], key=lambda row: float(np.nan_to_num(number(row["shift"]), nan=np.inf)))
    value, noise = number(worst["shift"]), number(worst["noise"])
    if not math.isfinite(value):
        return CODES.not_measured(code, "statistics are not finite", evidence=dict(estimate))
    numbers: dict[str, Any] = {
        "value": value, "unit": "standard deviations", "threshold": limit, "step": facts.get("step"), "evidence": dict(estimate),
    }  # fmt: skip
    cost = _cost(facts)
    told = cost[1] if cost else ""
    said = (
        f"Stored running statistics lie {value:.3g} standard deviations from those of {estimate['batches']} training batches now "
        f"(layer {worst['layer']!r}; noise explains {noise:.2g})"
    )
    still_cold = min((float(row["warm"]) for row in facts["ema"]), default=1.0) < warm  # another finding's business
    if not (value > limit and value > 3 * noise and (cost is None or (cost[0] >= harm and not still_cold))):
        return CODES.finding(code, "ok", f"{said}.{told}", **numbers)
    return CODES.finding(
        code, "warn", f"{said}: evaluation normalises with statistics of other weights or of too little data.{told}",
        advice=["Estimate them anew before evaluating: reset the running statistics, set momentum=None, and run training batches through "
                "the model in training mode without updates.",
                "Look for layers whose input differs between training and evaluation, and for weights changed after training (averaged, fine-tuned "
                "with frozen statistics)."], **numbers,
    )  # fmt: skip
