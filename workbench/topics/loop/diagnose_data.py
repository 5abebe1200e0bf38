"""Findings about how a loop gets its data ready: random numbers of its workers, the size of its inputs, and conversions that cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from scipy.stats import binom

from workbench.curves.trial_curves import RecordLike
from workbench.findings.finding import Codes, Finding, named
from workbench.topics.data.diagnose import imbalance, scale_finding
from workbench.topics.data.diagnose_rows import answer_among, by_chance, duplicates, unshuffled, weak_shuffle
from workbench.topics.data.diagnose_shift import label_shift, no_signal, train_validation_shift
from workbench.topics.loop.known import at, rows_of, where_known
from workbench.topics.one_batch.diagnose import range_finding
from workbench.topics.one_batch.diagnose_preflight import MOST_OUTPUTS, empty_classes, wrong_targets

DATA_CODES = Codes({
    "data.nonfinite": "F1.1", "data.labels": "F1.1", "data.no_signal": "F1.1", "data.scale": "F1.1", "data.leakage": "P2.9",
    "data.duplicates": "P2.9", "data.unshuffled": "P2.9", "data.weak_shuffle": "P2.9", "data.worker_rng": "P2.9", "data.label_shift": "P3.2",
    "data.train_validation_shift": "P3.2", "data.imbalance": "P3.6", "loss.output_range": "F1.1", "loop.conversion": "P1.6", "input.unused_features": "F1.1",
})  # fmt: skip
Facts = Mapping[str, Any]
Say = Callable[..., Finding]
_ALPHA = 1e-4
"""Chance at which a random order, or a random split, is called none, as in `diagnose_data`."""
_FAR = {"data.label_shift": 0.8, "data.train_validation_shift": 0.6}
"""Distance of the splits that is an alarm where nobody measured what it costs: noise on numbers that are mostly equal makes 0.5 (rules of thumb)."""
_EACH = 10
"""Examples of the rarest class from which on one that has none is told (rule of thumb)."""
_AT_CHANCE = 0.01
"""Error of a loss that is compared with that of one and the same output, as a share of it (rule of thumb)."""


def data_findings(record: RecordLike, facts: Facts, *, conversion_share: float, least_updates: int) -> list[Finding]:
    """Return the findings of `DATA_CODES`; see `diagnose_loop`."""
    judges: dict[str, Callable[[], Finding]] = {code: partial(_of_sample, code, facts, record) for code in _SAMPLE} | {
        "data.leakage": lambda: answer_among(facts["data"]) or _copied(facts["data"].get("near")) or _evaluated(facts["data"]["evaluated"], facts["data"]),
        "data.labels": lambda: _paired_anew(facts) or _of_sample("data.labels", facts, record),
        "data.imbalance": lambda: _padded(facts) or _imbalance(facts),
        "data.train_validation_shift": lambda: _rewritten(facts) or _of_sample("data.train_validation_shift", facts, record),
        "data.worker_rng": lambda: _workers(facts["workers"]),
        "data.scale": lambda: _scale(facts["modes"]["inputs"], facts["data"]),
        "input.unused_features": lambda: _unused(facts.get("tokens") or []),
        "loop.conversion": lambda: _conversion(record, facts, conversion_share, least_updates),
    }  # fmt: skip
    return [finding for code, judge in judges.items() for finding in where_known(DATA_CODES, [code], judge)]


def _unused(tables: Sequence[Facts], *, least: int = 10, share: float = 0.5, nearly: float = 0.9) -> Finding:
    """Judge whether the tokens of an embedding get gradients, of which there are to be `least`; `share` of them without one warns, `nearly` all fail (rules of thumb)."""
    say: Say = partial(DATA_CODES.finding, "input.unused_features", evidence={"tables": list(tables)})
    known = [each for each in tables if each["tokens"] >= least and each["reached"]]
    if not known:
        return say("ok", "Does not apply: no embedding was seen to be given tokens again and again.")
    worst = min(known, key=lambda each: each["reached"] / each["tokens"])
    part = 1 - worst["reached"] / worst["tokens"]
    say = partial(say, value=part, unit="share of tokens", threshold=share)
    if part < share:
        return say("ok", "The tokens of embeddings reach the loss.")
    return say(
        "fail" if part >= nearly else "warn", f"{worst['tokens'] - worst['reached']:,} of {worst['tokens']:,} tokens of {worst['name']} never got a gradient in the updates that were looked at: what they say does not reach the loss.",
        advice=["Look at the padding mask of attention: key_padding_mask is True where a token is to be ignored.", "Else look at which place the output is taken: it has to have seen the others."],
    )  # fmt: skip


def _of_sample(code: str, facts: Facts, record: RecordLike) -> Finding:
    """Return what the examples that were seen tell of a code."""
    data, (part, judge) = facts["data"], _SAMPLE[code]
    missing = next((name for name in ("examples", part) if not data.get(name)), None)
    if missing is not None:
        return DATA_CODES.finding(code, "ok", f"Does not apply: {_MISSING[missing]}.")
    return judge(data, record)


def _nonfinite(data: Facts, record: RecordLike) -> Finding:
    bad = {name: count for name, count in data["nonfinite"].items() if count}
    say: Say = partial(DATA_CODES.finding, "data.nonfinite", evidence=dict(data["nonfinite"]))
    seen, steps = f"the first {data['examples']['train']:,} examples that are trained on", rows_of(record)
    if not bad:
        return say("ok", f"All values of {seen} are finite.")
    where = " and ".join(f"{count} in the {name}" for name, count in bad.items())
    if "loss" not in steps or np.isfinite(steps["loss"].iloc[-1]):
        return say("ok", f"Of {seen}, {where} are not finite; the loss is.")
    return say(
        "fail", f"NaN or infinite values in {seen}: {where}.", value=float(sum(bad.values())), unit="values",
        advice=["Replace or drop missing values before training."],
    )  # fmt: skip


def _labels(data: Facts, _: RecordLike) -> Finding:
    total = data["examples"]["train"]
    if (found := wrong_targets(data, {})) is not None:
        return found
    if not data["classes"]:
        return DATA_CODES.finding("data.labels", "ok", f"Does not apply: {_MISSING['classes']}.")
    counts, loss = {int(k): n for k, n in data["classes"].items()}, data["range"] or {}
    outputs = loss.get("classes", 0) if loss.get("kind") == "classes" and data["trained"]["constant"] is not None else 0
    empty = [k for k in range(outputs) if k not in counts]
    if empty and outputs <= MOST_OUTPUTS and min(counts.values()) >= _EACH:
        drifts = (data["shift"].get("validation") or {}).get("drifts")
        if drifts or (data["order"] and unshuffled(data, _ALPHA).status != "ok"):
            later = f"class {named(map(str, empty), shown=8)} is not among the first {total:,} training examples, which are no sample of all"
            return DATA_CODES.not_measured("data.labels", later)
        return empty_classes(
            empty, outputs, {"class_counts": data["classes"]}, f"none of the first {total:,} training examples"
        )
    sticks = data["yardsticks"]
    if "reason" in sticks or sticks.get("beside"):
        why = sticks.get("reason", "the model takes several inputs")
        return DATA_CODES.finding("data.labels", "ok", f"Does not apply: {why}.")
    said = (
        f"The labels of the first {total:,} training examples are not wrong at random, as far as a linear model tells."
    )
    return DATA_CODES.finding("data.labels", "ok", said)


def _shift(judge: Callable[..., Finding], code: str, data: Facts, _: RecordLike) -> Finding:
    if data["shift"]["validation"]["drifts"]:
        said = (
            "what is trained on changes in the course of the first updates, so that these examples are no sample of all"
        )
        return DATA_CODES.not_measured(code, said)
    return judge(data, None, alpha=_ALPHA, small=_FAR[code], large=_FAR[code])


def _signal(data: Facts, record: RecordLike) -> Finding:
    found, steps, evals = data["trained"], rows_of(record), record.evals
    constant, losses = found["constant"], steps["loss"].dropna().tolist() if "loss" in steps else []
    trained: dict[str, Any] = {}
    cut = data.get("one_pass") and not record.facts["loop"]["ended"]  # what is not learned yet may be learned later
    if constant and found["alone"] and len(losses) >= 10 and not cut:
        held = [loss for update, loss in found["losses"] if update >= 0.8 * len(losses)]
        if "metric" in evals:
            held += evals["value"][(evals["metric"] == "loss") & (evals["split"] != "train")].tolist()
        end = {"train": float(np.mean(losses[-max(len(losses) // 5, 1) :]))} | (
            {"validation": held[-1]} if held else {}
        )
        known = {split: {"loss": loss, "se": _AT_CHANCE * constant} for split, loss in end.items()}
        trained = {"constant": constant, "last": known, "selected": known}
    return no_signal(data, trained)


_SAMPLE: dict[str, tuple[str, Callable[[Facts, RecordLike], Finding]]] = {
    "data.nonfinite": ("nonfinite", _nonfinite),
    "data.labels": ("yardsticks", _labels),
    "data.no_signal": ("yardsticks", _signal),
    "data.duplicates": ("repeats", lambda data, _: duplicates({**data, "overlap": {"repeats": {"train": data["repeats"]}}}, limit=0.8, blank=0.05)),
    "data.unshuffled": ("order", lambda data, _: unshuffled(data, _ALPHA)),
    "data.weak_shuffle": ("order", lambda data, _: weak_shuffle(data, _ALPHA, unshuffled(data, _ALPHA))),
    "data.label_shift": ("shift", partial(_shift, label_shift, "data.label_shift")),
    "data.train_validation_shift": ("shift", partial(_shift, train_validation_shift, "data.train_validation_shift")),
    "loss.output_range": ("range", lambda data, _: range_finding(data["range"])),
}  # fmt: skip
"""Which part of what is told of the first examples answers a code, and how it is judged."""
_MISSING = {
    "examples": "fewer than 40 examples with inputs of one kind were seen in the first updates",
    "classes": "no target was seen that is one of several classes",
    "repeats": "only a loader that draws each example once an epoch shows which ones are there twice",
    "order": "a loader draws the examples at random, or no target was seen for each of them",
    "shift": "no evaluation on other examples than those of training was seen in the first updates",
    "range": "no loss function of torch was seen to be given outputs and targets",
}


def _evaluated(found: Facts | None, data: Facts, *, least: int = 16) -> Finding:
    """Find examples that agree, where they are more than chance has of data that do not repeat themselves: `least`, and as many times one in so many as are compared.

    Fewer do not tell whether half of what one line evaluates is the training split, meant so, and half is held out (twice `_CLEAR`; rule of thumb).
    """
    say: Say = partial(DATA_CODES.finding, "data.leakage", evidence=dict(found or {}))
    if found is None:
        return say(
            "ok", "Does not apply: no examples were seen both in training and in an evaluation in evaluation mode."
        )
    both, trained, total = found["both"], found["trained"], found["evaluated"]
    if found["clear"] or both < least * (1 + total / trained) or by_chance(data, trained):
        compared = f"{trained:,} and {total:,} were compared"
        return say("ok", f"No evaluation was seen on examples that are trained on, by more than chance; {compared}.")
    return say(
        "warn", f"Of the first {trained:,} examples that are trained on, {both:,} are evaluated on, too{at(found, 'line')}: what is measured there is not how well new ones do.",
        value=float(both), unit="examples", advice=["Train on the training split alone: look at the dataset or the indices that training is given. Where training examples are meant, leave it."],
    )  # fmt: skip


def _copied(found: Facts | None, *, least: int = 16) -> Finding | None:
    """Return a warning where `least` of the examples that are evaluated are near copies (as `_evaluated`, rule of thumb); None where they are not."""
    if found is None or found["clear"] or found["both"] < least:
        return None
    return DATA_CODES.finding(
        "data.leakage", "warn", f"Of {found['evaluated']:,} examples that are evaluated, {found['both']:,} have near copies with the same target among {found['trained']:,} "
        f"that are trained on{at(found, 'line')}: what is measured there is not how well new ones do.", value=float(found["both"]), unit="examples", evidence=dict(found),
        advice=["Split first, by what the copies were made from (a person, a group, a file), and augment the training split alone. Where training examples are meant, leave it."],
    )  # fmt: skip


def _rewritten(facts: Facts, *, most: float = 1.05) -> Finding | None:
    """Return a failure where the numbers that a dataset holds spread ever more, or ever less, by a factor of `most` in all (rule of thumb); None where they do not."""
    for row in facts["stored"]:
        spreads = row["spreads"]
        ratio, ordered = spreads[-1] / max(spreads[0], 1e-30), spreads in (sorted(spreads), sorted(spreads)[::-1])
        if ordered and not 1 / most < ratio < most:
            return DATA_CODES.finding(
                "data.train_validation_shift", "fail", f"The training data change while they are read: what the dataset holds as {row['name']} has a standard deviation of {spreads[0]:.3g} "
                f"before its first pass and of {spreads[-1]:.3g} before pass {row['passes'][-1]}.", value=ratio, unit="times", threshold=most, evidence=dict(row),
                advice=["Let __getitem__ change a copy: image = image + noise, or image.clone() before an operation in place (+=, add_, image[...] = ...)."],
            )  # fmt: skip
    return None


def _paired_anew(facts: Facts, *, most: float = 0.1) -> Finding | None:
    """Return a warning where more than a share of inputs has another class when they come again (rule of thumb); None where they have not.

    Copies in the data with classes of their own meet within a pass as often as rows of two passes do: far fewer contradict each other there.
    """
    found, bits = facts.get("pairs"), facts["data"].get("bits")
    if not found or bits is None or bits < 2 * np.log2(found["rows"]) or found["in_turn"]:
        return None
    both, share = found["contradicting"] + found["within"], found["contradicting"] / found["pairs"]
    if share <= most or binom.cdf(found["within"], both, found["share"]) >= _ALPHA:
        return None
    loader: Facts = max(facts["loaders"]["loaders"], key=lambda row: row["trained"], default={})
    return DATA_CODES.finding(
        "data.labels", "warn", f"Inputs get other labels from pass to pass: of {found['pairs']:,} pairs of equal inputs from two passes over the data, {found['contradicting']:,} ({share:.0%}) differ in their label. "
        f"Pairs within a pass that differ: {found['within']:,}. Copies that are labelled differently would be as common there.",
        value=share, unit="share", threshold=most, evidence=dict(found),
        advice=[
            f"Look at where inputs and labels of a batch are put together{at(loader, 'made', 'line')}: what sorts, shuffles or drops inputs has to do the same to labels, by one and the same order.",
            "Where labels are made anew on purpose, as pseudo-labels or those of another task, leave it.",
        ],
    )  # fmt: skip


def _padded(facts: Facts, *, most: float = 0.5) -> Finding | None:
    """Return a warning where more than this share of the targets that a loss counts is padding (rule of thumb); None where it is not."""
    found, counted = facts["data"].get("padding"), facts["surrogates"].get("counted", [])
    if (
        not found
        or found["share"] <= most
        or not counted
        or any(out == found["class"] or not alike for out, alike in counted)
    ):
        return None
    return DATA_CODES.finding(
        "data.imbalance", "warn", f"{found['share']:.0%} of the targets that the loss counts are padding, class {found['class']} at the end of shorter sequences: loss and accuracy are mostly about where a sequence ends.",
        value=found["share"], unit="share of targets", threshold=most, evidence=dict(found),
        advice=[f"Give ignore_index={found['class']} to the loss, and leave these places out of metrics, too."],
    )  # fmt: skip


def _imbalance(facts: Facts) -> Finding:
    found, data = _weights(facts["loaders"]["loaders"]), facts["data"]
    if found.status != "ok" or not data.get("classes") or not facts["recall"]:
        return found
    return imbalance(data, {"classes": facts["recall"]}, where="in the last batches that were looked at")


def _weights(loaders: list[Facts], *, close: float = 0.02, near: float = 1e-4, merged: int = 4) -> Finding:
    """Find weights that are a power of the number of examples that have them, to a share of `close` (rule of thumb): class weights the wrong way round.

    Where classes are not known, as many examples as have a weight may be several classes of a size: nothing is said where weights that
    fall with the count, or its root, would give these numbers, to a share of `near`, with up to `merged` in the smallest (rules of thumb).
    """
    say: Say = partial(DATA_CODES.finding, "data.imbalance")
    for row in (each for each in loaders if each["trained"] and each["weights"]):
        weights, counts = (np.asarray(side, dtype=np.float64) for side in row["weights"])
        weights, counts = np.log(weights[weights > 0]), np.log(counts[weights > 0])
        if len(weights) < 2 or not np.ptp(counts) > 0:
            continue
        ratios = (np.exp(each - each.min()) for each in (counts + weights, counts + 2 * weights))
        classes = (ratio * k for ratio in ratios for k in range(1, merged + 1))
        if not row.get("by_class") and any(np.allclose(np.rint(each), each, rtol=near, atol=0) for each in classes):
            continue
        power, start = np.polyfit(counts, weights, 1)
        usual = len(weights) > 2 or min(abs(power - 1.0), abs(power - 0.5)) < close  # two points lie on some line
        if power > close and usual and np.abs(weights - start - power * counts).max() < close:
            few, many = (np.exp([counts[k], weights[k]]) for k in (counts.argmin(), counts.argmax()))
            return say(
                "warn", f"The sampler{at(row, 'line')} makes what is common more common: {many[0]:,.0f} examples have a weight of {many[1]:.3g} each, and {few[0]:,.0f} have {few[1]:.3g}.",
                value=float(power), unit="power of the count", advice=["Weights are to fall with the count of a class: weights = (1.0 / counts)[targets]."],
            )  # fmt: skip
    return say("ok", "No sampler was seen whose weights rise with the number of examples that have them.")


def _scale(inputs: Facts, data: Facts) -> Finding:
    known = {"codes": data.get("codes"), "far": data.get("far")}
    found = scale_finding({"scale": dict(inputs) | dict(data.get("scale") or {}), **known})
    if dict(inputs).get("unseen") and found.status == "ok":
        why = "no layer of torch with weights was seen to take the inputs of two examples or more"
        return DATA_CODES.not_measured("data.scale", why)
    return found


def _workers(rows: list[Facts]) -> Finding:
    rows = [row for row in rows if row["trained"]]
    say: Say = partial(DATA_CODES.finding, "data.worker_rng", evidence={"loaders": rows})
    wrong = next((row for row in rows if row["same_in_workers"] or row["same_in_epochs"]), None)
    if not rows:
        return say("ok", "Does not apply: no worker processes load what is trained on.")
    if wrong is None:
        drawn = (
            "random numbers of their own, anew each epoch" if any(row["drawn"] for row in rows) else "no random numbers"
        )
        return say("ok", f"Workers draw {drawn}.")
    said, fix = [], []
    if wrong["same_in_workers"]:
        said.append(
            f"its {wrong['workers']} worker processes draw the same random numbers from {named(wrong['same_in_workers'])}"
        )
        fix.append("Seed in worker_init_fn from torch.initial_seed(), or draw from torch, random or NumPy's global generator, which torch seeds for each worker.")  # fmt: skip
    if wrong["same_in_epochs"]:
        said.append(f"every epoch repeats the draws of the first from {named(wrong['same_in_epochs'])}")
        fix.append("Do not make the generator once in __init__, nor seed with a constant or the worker's number alone: workers start anew each epoch.")  # fmt: skip
    said_of = f"Of a loader{at(wrong, 'line')} {', and '.join(said)}"
    return say("warn", f"{said_of}: augmentation varies less than it seems.", advice=fix)


def _conversion(record: RecordLike, facts: Facts, limit: float, least: int) -> Finding:
    steps = rows_of(record)
    if "step_time_s" not in steps or facts["updates"] < least:
        return DATA_CODES.not_measured(
            "loop.conversion", f"it takes {least} updates, and the run has {facts['updates']}"
        )
    rows = [row | {"share": 0.0} for row in facts["conversions"] if row["count"] >= least]
    total = float(steps["step_time_s"].iloc[: facts["attention"]["window"]].mean()) * facts["near_updates"]
    rows = [row | {"share": row["seconds"] / total if total > 0 else 0.0} for row in rows]
    wasted = [row for row in rows if row["double"] or 2 * row["same"] >= row["count"]]
    say: Say = partial(
        DATA_CODES.finding, "loop.conversion", unit="share of the step", threshold=limit, evidence={"places": rows}
    )
    worst = max(wasted, key=lambda row: row["share"], default=None)
    if worst is None or worst["share"] <= limit:
        none = "No conversion of dtypes that could be left out takes time that matters."
        return say("ok", none, value=worst["share"] if worst else 0.0)
    again = 2 * worst["same"] >= worst["count"]
    what = "the very same tensor is" if again else "tensors are"
    return say(
        "warn", f"In a step {what} converted from {worst['from']} to {worst['to']}{at(worst, 'line')}, {worst['count'] / facts['near_updates']:.3g} times an update: "
        f"{worst['share']:.0%} of its time.", value=worst["share"],
        advice=["Convert it once, before the loop." if again else "Make the data, or the constant that promotes it, of the model's dtype: float64 is rarely needed in a step."],
    )  # fmt: skip
