"""Signs of two faults of a rule's own: a second moment out of date when the loss rose, and weights that decay shrinks.

Where gradients grow at once, Adam's average of squares, which reaches 1 / (1 - beta2) steps back, is out of date and the step longer than
the learning rate says (Wortsman et al. 2023, arXiv:2304.13013). That alone is no proof; the same run with a shorter memory is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from workbench.curves.classify import Rise
from workbench.curves.trial_curves import RecordLike, TrialCurve, TrialVerdict, judge
from workbench.topics.optimizers.rule_ranges import Twin, read_twins, rule_view, rules_in

FloatArray = NDArray[np.float64]
MEMORY_FIELD = {"adam": "beta2", "nadam": "beta2", "adamw": "beta2", "rmsprop": "rho"}
"""The config field that says how far back a rule's second moment reaches."""


class StaleMoment(NamedTuple):
    """A rise of the loss that began with a second moment out of date.

    Attributes:
        field, memory: the config field of the memory, and its value.
        step, ratio: where the gradient stood farthest above what the second moment remembers, and how many times too long the
            step was there.
    """

    trial: TrialVerdict
    rise: Rise
    field: str
    memory: float
    step: int
    ratio: float


def staleness(grad_norm: ArrayLike, memory: float) -> FloatArray:
    """Return by which factor an out-of-date second moment makes each step longer, shape (steps,); NaN where a gradient is not finite.

    It is |g| over the root of the bias-corrected average of |g|^2 that the update divides by: 1 for steady gradients and at the
    first step, at most 1 / sqrt(1 - memory). `memory` is beta2 of adam, nadam and adamw, rho of rmsprop; of the norm over all parameters,
    shape (steps,), it is smaller than of a single tensor's.
    """
    squares = np.square(np.asarray(grad_norm, dtype=np.float64).ravel())
    found = np.full(squares.size, np.nan)
    average, weight = 0.0, 0.0
    for step, square in enumerate(squares):
        if not np.isfinite(square):
            continue
        average, weight = memory * average + (1 - memory) * square, memory * weight + (1 - memory)
        found[step] = np.sqrt(square * weight / average) if average > 0 else 1.0
    return found


def shorter(memory: float, factor: float) -> float:
    """Return the decay whose memory reaches back `factor` times fewer steps: 0.999 and 10 give 0.99."""
    return round(1.0 - factor * (1.0 - memory), 12)


def stale_moments(
    record: RecordLike, *, ratio: float = 2.3, before_steps: int = 8, min_memory_steps: float = 50.0
) -> list[StaleMoment]:
    """Return for each adaptive rule the rise at its smallest learning rate that began with an out-of-date second moment.

    Args:
        ratio: from which factor on a second moment is out of date (the threshold of Wortsman et al. for single tensors; for the
            norm over all parameters a rule of thumb).
        before_steps: how many steps before the rise to look (the same source: spikes follow within 1 to 8 steps).
        min_memory_steps: a rule that reaches back fewer steps has no long memory (rule of thumb).
    """
    found = []
    for name in (n for n in rules_in(record) if n in MEMORY_FIELD):
        view, field = rule_view(record, name), MEMORY_FIELD[name]
        memory = float(view.config[field])
        if 1.0 / (1.0 - memory) < min_memory_steps:
            continue
        trials = sorted(judge(view.full_length, view.full_length), key=lambda item: (item.curve.lr, item.curve.seed))
        hits = (hit for item in trials for hit in _rises(item, field, memory, before_steps) if hit.ratio >= ratio)
        found += [hit for hit in [next(hits, None)] if hit is not None]
    return found


def _rises(item: TrialVerdict, field: str, memory: float, before_steps: int) -> Iterator[StaleMoment]:
    """Yield each rise with the step about its onset at which the second moment was most out of date, and by how much."""
    steps, half = item.curve.steps, item.verdict.width // 2
    if "grad_norm" not in steps.columns or not item.verdict.rises:
        return
    ratios = staleness(steps["grad_norm"].to_numpy(dtype=np.float64), memory)
    for rise in item.verdict.rises:
        low = max(rise.onset_step - before_steps - half, 0)
        window = ratios[low : rise.onset_step + 2 + half]
        if np.isfinite(window).any():
            at = int(np.nanargmax(window))
            yield StaleMoment(item, rise, field, memory, low + at, float(window[at]))


REACHES_ALL = ("sgd", "momentum", "nesterov", "adamw")
"""Rules whose decay takes the same share of every weight; the others divide it by the size of the gradients first."""


def decay_pairs(record: RecordLike) -> list[tuple[Twin, float | None, float | None]]:
    """Return every run with weight decay that has a twin without, in order of the twin's number.

    With each the norm of its weights at the end over the twin's (None where norms were not recorded), and the decay it adds up to.
    """
    twins = [twin for twin in read_twins(record, "weight_decay") if twin.after == 0]
    return [(twin, _norm_ratio(twin), accumulated(twin.own.curve)) for twin in twins]


def accumulated(curve: TrialCurve) -> float | None:
    """Return the sum of lr * weight_decay over a run, momentum counted: without gradients weights would shrink to exp of minus that.

    None for the rules that divide coupled decay by the size of the gradients, where no such number exists.
    """
    name = str(curve.config["optimizer"])
    if name not in REACHES_ALL:
        return None
    longer = 1.0 / (1.0 - float(curve.config["momentum"])) if name in ("momentum", "nesterov") else 1.0
    lrs = curve.steps["lr"].to_numpy(dtype=np.float64)
    return float(np.nansum(lrs) * float(curve.config["weight_decay"]) * longer)


def _norm_ratio(twin: Twin) -> float | None:
    own, other = (last_norm(verdict.curve, finite=True) for verdict in (twin.own, twin.twin))
    return own / other if math.isfinite(own) and other > 0 else None


def last_norm(curve: TrialCurve, *, finite: bool = False) -> float:
    """Return the last norm of the weights that was recorded, or the last finite one; NaN without one."""
    norms = curve.steps["param_norm"].dropna().tolist() if "param_norm" in curve.steps.columns else []
    known = [norm for norm in norms if math.isfinite(norm) or not finite]
    return float(known[-1]) if known else math.nan
