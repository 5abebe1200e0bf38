"""Findings about how a loop gets its data ready: random numbers of its workers, the size of its inputs, and conversions that cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from workbench.curves.trial_curves import RecordLike
from workbench.findings.finding import Codes, Finding, named
from workbench.topics.data.diagnose import scale_finding
from workbench.topics.loop.known import at, rows_of, where_known

DATA_CODES = Codes(
    {
        "data.leakage": "P2.9",
        "data.imbalance": "P3.6",
        "data.worker_rng": "P2.9",
        "data.scale": "F1.1",
        "loop.conversion": "P1.6",
    }
)
Facts = Mapping[str, Any]
Say = Callable[..., Finding]


def data_findings(record: RecordLike, facts: Facts, *, conversion_share: float, least_updates: int) -> list[Finding]:
    """Return the findings of `DATA_CODES`; see `diagnose_loop`."""
    return [
        *where_known(DATA_CODES, ["data.leakage"], lambda: _leaks(facts["columns"], facts["evaluated"])),
        *where_known(DATA_CODES, ["data.imbalance"], lambda: _weights(facts["loaders"]["loaders"])),
        *where_known(DATA_CODES, ["data.worker_rng"], lambda: _workers(facts["workers"])),
        *where_known(DATA_CODES, ["data.scale"], lambda: _scale(facts["modes"]["inputs"])),
        *where_known(
            DATA_CODES, ["loop.conversion"], lambda: _conversion(record, facts, conversion_share, least_updates)
        ),
    ]


def _leaks(columns: Facts | None, evaluated: Facts | None) -> Finding:
    if not columns or not columns["columns"]:
        return _evaluated(evaluated)
    which = named([f"column {k}" for k in columns["columns"]])
    return DATA_CODES.finding(
        "data.leakage", "warn", f"{which[0].upper()}{which[1:]} of the inputs, of {columns['of']}, can be told from the target without error in all of the first {columns['examples']:,} examples: the answer is among the features.",
        value=float(len(columns["columns"])), unit="columns", evidence=dict(columns), advice=["Leave the target, and what is computed from it, out of the inputs. Where the task is as easy as that, leave it."],
    )  # fmt: skip


def _evaluated(found: Facts | None, *, least: int = 5) -> Finding:
    """Find examples that agree, where they are more than chance has of data that do not repeat themselves: `least`, and as many times one in so many as are compared (rule of thumb)."""
    say: Say = partial(DATA_CODES.finding, "data.leakage", evidence=dict(found or {}))
    if found is None:
        return say(
            "ok", "Does not apply: no examples were seen both in training and in an evaluation in evaluation mode."
        )
    both, trained, total = found["both"], found["trained"], found["evaluated"]
    if found["clear"] or both < least * (1 + total / trained):
        return say(
            "ok",
            f"No evaluation was seen on examples that are trained on, by more than chance; {trained:,} and {total:,} were compared.",
        )
    return say(
        "warn", f"Of the first {trained:,} examples that are trained on, {both:,} are evaluated on, too{at(found, 'line')}: what is measured there is not how well new ones do.",
        value=float(both), unit="examples", advice=["Train on the training split alone: look at the dataset or the indices that training is given. Where training examples are meant, leave it."],
    )  # fmt: skip


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


def _scale(inputs: Facts) -> Finding:
    if dict(inputs).get("unseen"):
        return DATA_CODES.not_measured(
            "data.scale", "no layer of torch with weights was seen to take the inputs of two examples or more"
        )
    return scale_finding({"scale": dict(inputs)})


def _workers(rows: list[Facts]) -> Finding:
    rows = [row for row in rows if row["trained"]]
    say: Say = partial(DATA_CODES.finding, "data.worker_rng", evidence={"loaders": rows})
    wrong = next((row for row in rows if row["same_in_workers"] or row["same_in_epochs"]), None)
    if not rows:
        return say("ok", "Does not apply: no worker processes load what is trained on.")
    if wrong is None:
        drawn = any(row["drawn"] for row in rows)
        return say(
            "ok",
            "Workers draw random numbers of their own, anew each epoch."
            if drawn
            else "Workers draw no random numbers.",
        )
    said, fix = [], []
    if wrong["same_in_workers"]:
        said.append(
            f"its {wrong['workers']} worker processes draw the same random numbers from {named(wrong['same_in_workers'])}"
        )
        fix.append("Seed in worker_init_fn from torch.initial_seed(), or draw from torch, random or NumPy's global generator, which torch seeds for each worker.")  # fmt: skip
    if wrong["same_in_epochs"]:
        said.append(f"every epoch repeats the draws of the first from {named(wrong['same_in_epochs'])}")
        fix.append("Do not make the generator once in __init__, nor seed with a constant or the worker's number alone: workers start anew each epoch.")  # fmt: skip
    return say(
        "warn",
        f"Of a loader{at(wrong, 'line')} {', and '.join(said)}: augmentation varies less than it seems.",
        advice=fix,
    )


def _conversion(record: RecordLike, facts: Facts, limit: float, least: int) -> Finding:
    steps = rows_of(record)
    if "step_time_s" not in steps or facts["updates"] < least:
        return DATA_CODES.not_measured("loop.conversion", f"{facts['updates']} updates were seen, {least} are needed")
    rows = [row | {"share": 0.0} for row in facts["conversions"] if row["count"] >= least]
    total = float(steps["step_time_s"].iloc[: facts["attention"]["window"]].mean()) * facts["near_updates"]
    rows = [row | {"share": row["seconds"] / total if total > 0 else 0.0} for row in rows]
    wasted = [row for row in rows if row["double"] or 2 * row["same"] >= row["count"]]
    say: Say = partial(
        DATA_CODES.finding, "loop.conversion", unit="share of the step", threshold=limit, evidence={"places": rows}
    )
    worst = max(wasted, key=lambda row: row["share"], default=None)
    if worst is None or worst["share"] <= limit:
        return say(
            "ok",
            "No conversion of dtypes that could be left out takes time that matters.",
            value=worst["share"] if worst else 0.0,
        )
    again = 2 * worst["same"] >= worst["count"]
    what = "the very same tensor is" if again else "tensors are"
    return say(
        "warn", f"In a step {what} converted from {worst['from']} to {worst['to']}{at(worst, 'line')}, {worst['count'] / facts['near_updates']:.3g} times an update: "
        f"{worst['share']:.0%} of its time.", value=worst["share"],
        advice=["Convert it once, before the loop." if again else "Make the data, or the constant that promotes it, of the model's dtype: float64 is rarely needed in a step."],
    )  # fmt: skip
