"""Screening candidates for a config, and proving one against the baseline over seeds, by selected checkpoints (P4.7, F3.12).

Each seed gives both arms the same initial weights and the same batches, so the difference within a seed is what counts.
How likely a mean gain of that size is where nothing is gained follows from the spread over the seeds (Student's t, one-sided).
Losses are compared by their ratio: they differ by factors, and one seed that blew up would drown the others in a difference.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from workbench.curves.judged import trials_with
from workbench.curves.losses import is_deep
from workbench.curves.selection import metric_sign, selectable, selected_by_seed, spacing, starts_by_seed
from workbench.curves.trial_curves import RecordLike
from workbench.findings.causes import REMARKS, to_mend_first, vetoes_tuning
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.finding import p_words
from workbench.record.metrics import larger_is_better
from workbench.record.read import periodic_rows

MIN_EXAMPLES = 30


def example_chance(
    record: RecordLike, *, candidate: Sequence[int], gain: float, min_examples: int = MIN_EXAMPLES
) -> dict[str, Any] | None:
    """Return how often other examples of the same kind would give such a gain where nothing is gained.

    Args:
        gain: of the candidate in the mean of the selected metric.
        min_examples: fewer do not show how far the difference spreads, for a loss has its rare, large values (rule of thumb).

    Returns:
        examples, enough (whether they are that many), se (of the gain), chance; None where these two models were not compared
        example by example, and where the set is the training set itself, which is no sample.
    """
    facts = record.facts.get("evaluation_sample") or {}
    pair = facts.get("pair") or {}
    compared = {other for _, other in pair.get("trials") or ()}
    sd = pair.get("difference_sd")
    if facts.get("is_train") or sd is None or not compared or not compared <= set(candidate):
        return None
    examples = int(facts["examples"])
    se = float(sd) / math.sqrt(examples)
    chance = float(stats.t.sf(gain / se, df=max(examples - 1, 1))) if se > 0 else float(gain <= 0)
    return {"examples": examples, "enough": examples >= min_examples, "se": se, "chance": chance}


def by_faults(diagnosis: Diagnosis) -> str:
    """Name the fault to mend before any hyperparameter is compared: with a wrong loss or a frozen layer every config is wrong."""
    told = {f.code for f in diagnosis if f.code.startswith(("loop.", "loss.")) and f.code not in REMARKS}
    sure = told | {f.code for f in diagnosis if f.status == "fail"}
    faults = sure.intersection(vetoes_tuning(diagnosis.findings))
    if not faults:
        return ""
    return f"fix {to_mend_first(diagnosis.findings, faults)} first; until then comparisons of configs mean nothing"


def by_room(record: RecordLike, baseline: Sequence[int], candidate: Sequence[int]) -> str:
    """Say that nothing is left to gain: another metric of the examples that select is as good as it can be."""
    metrics = _metrics(record, [*baseline, *candidate])
    perfect = [name for name, (starts, ends) in metrics.items() if (ends == 1).all() and (starts < 1).all()]
    return f"nothing is left to gain: {_split(record)}/{perfect[0]} is 1 in both" if perfect else ""


def by_values(record: RecordLike, candidate: Sequence[int]) -> str:
    """Say that the selected values are too good to be true."""
    select = str(record.config["select"])
    if record.config["select_mode"] != "min" or not select.endswith("/loss"):
        return ""
    curves = [values for number in candidate if (values := selectable(record, number)[0]).size]
    zero = sum(float(values.min()) == 0.0 for values in curves)
    if zero:
        return f"{select} is exactly 0 in {zero} of {len(curves)} runs: find out what makes it 0 before trusting it"
    deep = [float(values.min()) for values in curves if is_deep(values.min(), values[0])]
    return f"{select} falls to {min(deep):.2g}, as if without bound: a loss needs a minimum" if deep else ""


def by_size(gain: float, learned: float | None, *, material_frac: float = 0.02) -> str:
    """Say that a gain is too small to matter, or that it is no gain on knowing nothing.

    Args:
        learned: what the better of the two gained on the untrained model, or on guessing where that is better; None: unknown.
        material_frac: share of it below which a gain does not matter (O1 calls differences of 2 % equal).
    """
    if learned is None:
        return ""
    if learned <= 0:
        by = f"{-learned:.2g} worse than" if learned < 0 else "as good as"
        return f"neither run learned anything: the better one is {by} guessing or the untrained model"
    if gain >= material_frac * learned:
        return ""
    return f"the gain is {max(gain / learned, 0.0):.1%} of what training learned (limit {material_frac:.0%})"


def by_spread(proof: Mapping[str, Any], *, ratio: float = 3.0, sds: float = 3.0) -> str:
    """Say that a candidate depends on the seed much more than the baseline, and that its gain does not outweigh that.

    A baseline that learned less than half of what the candidate did is steady because it does not train. Rules of thumb: the
    `ratio` of the standard deviations over the seeds, and how many of the candidate's the gain has to be (`sds`).
    """
    theirs, arm = float(np.std(proof["candidate"], ddof=1)), proof["arms"][0]
    ours = float(np.std(arm["values"], ddof=1))
    broken = proof["learned"] is not None and arm["gain"] > proof["learned"] / 2
    if broken or theirs <= ratio * ours or arm["gain"] >= sds * theirs:
        return ""
    return f"its standard deviation over the seeds is {theirs:.2g}, the baseline's {ours:.2g}"


def by_metrics(
    record: RecordLike,
    baseline: Sequence[int],
    candidate: Sequence[int],
    *,
    ses: float = 2.0,
    material_frac: float = 0.02,
) -> str:
    """Say which other metric the candidate is worse by, beyond noise. Better is where training moves a metric to.

    Args:
        ses: standard errors of the paired difference that are noise (rule of thumb).
        material_frac: share of what training moved the metric by that does not matter (rule of thumb).
    """
    for name, (starts, ends) in _metrics(record, [*baseline, *candidate]).items():
        moved = float(np.mean(ends - starts))
        before, after = np.split(ends, [len(baseline)])
        worse = np.sign(moved) * (before - after) if before.size == after.size else np.zeros(2)
        se = float(np.std(worse, ddof=1)) / np.sqrt(worse.size)
        if worse.mean() > max(ses * se, material_frac * abs(moved)):
            return f"{_split(record)}/{name} is worse: {after.mean():.4g} against {before.mean():.4g}"
    return ""


def by_printed(
    record: RecordLike, baseline: Sequence[int], candidate: Sequence[int], *, material_frac: float = 0.02
) -> str:
    """Say that no validation metric which a program prints is better, where runs are compared by their training loss: that may be fitted better alone.

    Args:
        material_frac: share of a loss, or of a score or what it leaves, that counts as better (O1 calls differences of 2 % equal).
    """
    runs = [record.facts.get(f"printed/{number}") or {} for number in (*baseline, *candidate)]
    said = []
    for name in sorted(set.intersection(*map(set, runs))) if record.config["select"] == "train/loss" else ():
        before, after = (
            float(np.mean([run[name] for run in some])) for some in (runs[: len(baseline)], runs[len(baseline) :])
        )
        larger = larger_is_better(name.replace(" ", "_"))
        left = (1.0 if max(before, after) <= 1 else 100.0) - before if larger else math.inf
        if (after - before if larger else before - after) > material_frac * min(abs(before), abs(left)):
            return ""
        said.append(f"{name} {after:.4g} against {before:.4g}")
    return f"what the program prints of validation is no better ({', '.join(said)})" if said else ""


def by_examples(found: Mapping[str, Any] | None, limit: float) -> str:
    """Say that other validation examples might take the gain back, by the largest p allowed."""
    if found is None or (found["enough"] and found["chance"] < limit):
        return ""
    if not found["enough"]:
        return f"{found['examples']} validation examples are too few to choose a config by; keep {MIN_EXAMPLES} or more"
    return f"p = {found['chance']:.2g} over these {found['examples']} validation examples (limit {limit:g})"


def _split(record: RecordLike) -> str:
    return str(record.config["select"]).split("/", 1)[0]


def _metrics(record: RecordLike, numbers: Sequence[int]) -> dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Return the values, untrained and at the selected checkpoint, each of shape (trials,), of every other metric of the split that selects."""
    split, own = str(record.config["select"]).split("/", 1)
    evals = periodic_rows(record.evals)
    evals = evals[evals["trial"].isin(numbers) & (evals["split"] == split) & ~evals["metric"].isin(["loss", own])]
    chosen, sign = {}, metric_sign(record)
    for number in numbers:
        values, steps = selectable(record, number)
        if not values.size:
            return {}
        chosen[number] = int(steps[np.argmin(sign * values)])
    found = {}
    for name, rows in evals.groupby("metric"):
        at = {(int(t), int(s)): float(v) for t, s, v in zip(rows["trial"], rows["step"], rows["value"], strict=True)}
        pairs = [(at.get((n, 0), np.nan), at.get((n, chosen[n]), np.nan)) for n in numbers]
        starts, ends = np.array(pairs).T
        if np.isfinite(starts).all() and np.isfinite(ends).all():
            found[str(name)] = (starts, ends)
    return found


LIMIT = 0.05
"""Largest p of one look at the seeds (rule of thumb). The two looks of `worth_more_seeds` adopt 8 % of what is no better (simulated)."""
MOST_FLIPPED = 10  # seeds up to which all signs are tried: 2 ** 10 sums


def prove(
    record: RecordLike,
    *,
    baseline: Mapping[str, Any],
    candidate: Mapping[str, Any],
    limit: float = LIMIT,
    min_seeds: int = 2,
) -> dict[str, Any] | None:
    """Compare a candidate with the baseline over the seeds that both were trained with.

    The baseline's own seed is left out: the candidate was chosen under it, and luck that was chosen is no evidence.
    A candidate that trains longer than the baseline has to win against a baseline of its own length as well, which must
    not lose by its length alone; where that was not trained, nothing is proved. What diverges under every seed has lost to a
    candidate that diverges under none.

    Args:
        limit: a candidate wins where p is below this.
        min_seeds: fewer prove nothing (the fewest that have a spread).

    Returns:
        select, seeds, candidate (its values), arms (each with name, total_steps, values, gains, gain, se, ratios, chance (p), None where it
        diverges under every seed and the candidate under none),
        learned (what the better of candidate and baseline gained on the untrained model, None where that was not evaluated), level
        (the limit), wins, said (the numbers), verdict and test (of which chance is); None where fewer than `min_seeds` seeds were trained. ratios, of a seed's
        loss to that of the arm, are None for other metrics.
    """
    arms = {"baseline": dict(baseline)}
    if candidate["total_steps"] > baseline["total_steps"]:
        arms["baseline of the same length"] = dict(baseline) | {"total_steps": candidate["total_steps"]}
    chosen, numbers = trials_with(record, candidate), {name: trials_with(record, arms[name]) for name in arms}
    every = spacing(record, [*chosen, *itertools.chain(*numbers.values())])
    ours = selected_by_seed(record, chosen, every=every)
    theirs = {name: selected_by_seed(record, found, every=every) for name, found in numbers.items()}
    seeds = sorted(set(ours).intersection(*theirs.values()) - {int(record.config["shared_seed"])})
    if len(seeds) < min_seeds:
        return None
    sign, select = metric_sign(record), str(record.config["select"])
    values = [ours[seed] for seed in seeds]
    held = {name: [found[seed] for seed in seeds] for name, found in theirs.items()}
    by_ratio = sign > 0 and min(itertools.chain(values, *held.values())) > 0
    rows = [_arm(name, int(arms[name]["total_steps"]), held[name], values, sign, by_ratio=by_ratio) for name in arms]
    if not any(_diverged(record, chosen, seeds)):
        rows = [row | {"chance": None} if all(_diverged(record, numbers[row["name"]], seeds)) else row for row in rows]
    starts = [start for seed, start in starts_by_seed(record, chosen).items() if seed in seeds]
    best = min(sign * float(np.mean(found)) for found in (values, held["baseline"]))
    worst = max(rows, key=lambda row: row["chance"] or 0.0)
    wins = (worst["chance"] or 0.0) < limit
    against = "" if wins or len(rows) == 1 else f", against the {worst['name']}"
    verdict = f"the {worst['name']} diverges under each of n = {len(seeds)} seeds, the candidate under none"
    if worst["chance"] is not None:
        verdict = (
            f"{p_words(worst['chance'])}, {test_of(len(seeds))} over {len(seeds)} seeds (limit {limit:g}){against}"
        )
    shown = "; ".join(f"{row['name']} {np.mean(row['values']):.4g}: {_difference(row)}" for row in rows)
    mean = f"{select} of the selected checkpoints, mean over {len(seeds)} fresh seeds: {np.mean(values):.4g}"
    return {
        "select": select, "seeds": seeds, "planned": record.facts.get("proof_seeds"), "candidate": values, "arms": rows,
        "learned": sign * float(np.mean(starts)) - best if starts else None, "level": limit, "wins": wins,
        "said": f"{mean} against {shown}.", "verdict": verdict, "test": test_of(len(seeds)),
    }  # fmt: skip


def worth_more_seeds(proof: Mapping[str, Any] | None, *, min_seeds: int = 3) -> bool:
    """Return whether a candidate that was not adopted gained enough in the mean for more seeds to decide.

    Three seeds leave a gain of 1.5 standard deviations unproven in 22 % of cases, five in 12 % (simulated); fewer than
    `min_seeds` gain together too often where nothing is gained (2 of 2 seeds: one time in four).
    """
    if proof is None or proof["wins"] or len(proof["seeds"]) < min_seeds:
        return False
    gain = min(arm["gain"] for arm in proof["arms"])
    return gain > 0 and not by_size(gain, proof["learned"])


_FLIP_FROM = 5


def test_of(seeds: int) -> str:
    """Return the test that `p_value` makes of so many gains, as people name it."""
    return "one-sided paired t" + " or sign flips" * (_FLIP_FROM <= seeds <= MOST_FLIPPED)


def p_value(gains: Sequence[float], *, flip_from: int = _FLIP_FROM) -> float:
    """Return how likely a mean gain of this size is where nothing is gained, from one gain a seed.

    The smaller of Student's t, one-sided, and, from `flip_from` values on (fewer cannot come below 5 %), the share of all choices
    of their signs that give as large a mean: exact whatever the spread.
    """
    mean, se = _mean_and_se(gains)
    if se == 0:  # seeds that all gain the same leave nothing to chance
        return float(mean <= 0)
    chance = float(stats.t.sf(mean / se, df=len(gains) - 1))
    if not flip_from <= len(gains) <= MOST_FLIPPED:
        return chance
    sums = np.array(list(itertools.product((1.0, -1.0), repeat=len(gains)))) @ np.asarray(gains)
    return min(chance, float((sums >= sum(gains) * (1 - 1e-12)).mean()))


def _diverged(record: RecordLike, numbers: Sequence[int], seeds: Sequence[int]) -> list[bool]:
    """Return for each trial under one of `seeds` whether it ended non-finite."""
    rows = record.trials[record.trials["trial"].isin(numbers) & record.trials["seed"].isin(seeds)]
    return (rows["state"] == "diverged").tolist()


def _arm(
    name: str, total_steps: int, theirs: list[float], ours: list[float], sign: float, *, by_ratio: bool
) -> dict[str, Any]:
    gains = [sign * (their - our) for their, our in zip(theirs, ours, strict=True)]
    gain, se = _mean_and_se(gains)
    ratios = [our / their for their, our in zip(theirs, ours, strict=True)] if by_ratio else None
    return {
        "name": name, "total_steps": total_steps, "values": theirs, "gains": gains, "gain": gain, "se": se, "ratios": ratios,
        "chance": p_value([-math.log(ratio) for ratio in ratios] if ratios else gains),
    }  # fmt: skip


def _mean_and_se(values: Sequence[float]) -> tuple[float, float]:
    return float(np.mean(values)), float(np.std(values, ddof=1)) / math.sqrt(len(values))


def _difference(row: dict[str, Any]) -> str:
    """Return how far the candidate lies from an arm: seed by seed as shares of its loss, or as a mean with its error."""
    if row["ratios"] is None:
        return f"{'better' if row['gain'] >= 0 else 'worse'} by {abs(row['gain']):.2g} +- {row['se']:.2g}"
    return f"seed by seed {', '.join(f'{ratio - 1:+.0%}' for ratio in row['ratios'])}"
