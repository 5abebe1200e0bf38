"""Why a config whose selected checkpoints look better is not adopted all the same (F3.12).

Each function returns the reason as the end of a sentence, "" where it has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.curves.example_chance import MIN_EXAMPLES
from workbench.curves.selection import selectable
from workbench.curves.trials import RecordLike
from workbench.curves.unbounded_loss import DEEP, is_deep
from workbench.findings.causes import vetoes_tuning
from workbench.findings.diagnosis import Diagnosis
from workbench.record.read import periodic_rows

__all__ = ["by_examples", "by_faults", "by_metrics", "by_room", "by_size", "by_spread", "by_values"]


def by_faults(diagnosis: Diagnosis) -> str:
    """Name the fault to mend before any hyperparameter is compared: with a wrong loss or a frozen layer every config is wrong.

    A warning about the data, the model or its first step is no proof of a fault; one about the loop or the loss is.

    Args:
        diagnosis: of the study.
    """
    sure = {f.code for f in diagnosis if f.status == "fail" or f.code.startswith(("loop.", "loss."))}
    first = next((code for code in vetoes_tuning(diagnosis.findings) if code in sure), None)
    return f"mend {first} first; until then no comparison of configs holds" if first else ""


def by_room(record: RecordLike, baseline: Sequence[int], candidate: Sequence[int]) -> str:
    """Say that nothing is left to gain: another metric of the examples that select is as good as it can be.

    Args:
        record: a study.
        baseline: trial numbers.
        candidate: trial numbers.
    """
    metrics = _metrics(record, [*baseline, *candidate])
    perfect = [name for name, (starts, ends) in metrics.items() if (ends == 1).all() and (starts < 1).all()]
    return f"nothing is left to gain: {_split(record)}/{perfect[0]} is 1 in both" if perfect else ""


def by_values(record: RecordLike, candidate: Sequence[int], *, deep: float = DEEP) -> str:
    """Say that the selected values are too good to be true.

    Args:
        record: a study.
        candidate: trial numbers.
        deep: a loss so many times as far below zero as that of the untrained model is above or below, and at least 1, has no
            minimum (rule of thumb).
    """
    select = str(record.config["select"])
    if record.config["select_mode"] != "min" or not select.endswith("/loss"):
        return ""
    curves = [values for number in candidate if (values := selectable(record, number)[0]).size]
    zero = sum(float(values.min()) == 0.0 for values in curves)
    if zero:
        return f"{select} is exactly 0 in {zero} of {len(curves)} runs: find out what makes it 0 before trusting it"
    lowest = min(
        (low for values in curves if is_deep(low := float(values.min()), float(values[0]), deep=deep)), default=None
    )
    return "" if lowest is None else f"{select} falls to {lowest:.2g}, as if without bound: a loss needs a minimum"


def by_size(gain: float, learned: float | None, *, material_frac: float = 0.02) -> str:
    """Say that a gain is too small to matter, or that it is no gain on knowing nothing.

    Args:
        gain: in the selected metric.
        learned: what the better of the two gained on the untrained model, or on guessing where that is better; None where the
            untrained model was not evaluated.
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

    A baseline that learned less than half of what the candidate did is steady because it does not train.

    Args:
        proof: of `prove`.
        ratio: of the standard deviations over the seeds (rule of thumb).
        sds: a gain of so many of the candidate's standard deviations outweighs any (rule of thumb).
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
        record: a study.
        baseline: trial numbers, one a seed.
        candidate: trial numbers under the same seeds, in the same order.
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


def by_examples(found: Mapping[str, Any] | None, limit: float) -> str:
    """Say that other validation examples might take the gain back.

    Args:
        found: of `example_chance`.
        limit: largest p.
    """
    if found is None or (found["enough"] and found["chance"] < limit):
        return ""
    if not found["enough"]:
        return f"{found['examples']} validation examples are too few to choose a config by; keep {MIN_EXAMPLES} or more"
    return f"p = {found['chance']:.2g} over these {found['examples']} validation examples (limit {limit:g})"


def _split(record: RecordLike) -> str:
    return str(record.config["select"]).split("/", 1)[0]


def _metrics(record: RecordLike, numbers: Sequence[int]) -> dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Return, for each metric of the split that selects but the loss and what selects, its values untrained and at the selected checkpoint.

    Both have the shape (trials,). A metric that some trial lacks is left out.
    """
    split, own = str(record.config["select"]).split("/", 1)
    evals = periodic_rows(record.evals)
    evals = evals[evals["trial"].isin(numbers) & (evals["split"] == split) & ~evals["metric"].isin(["loss", own])]
    sign = 1.0 if record.config["select_mode"] == "min" else -1.0
    chosen = {}
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
