"""Where a second moment was out of date when the loss rose: the sign that an adaptive rule's own memory made the step too long.

Adam divides by the root of an average of squared gradients that reaches 1 / (1 - beta2) steps back. Where gradients grow at once, the
average is out of date and the step longer than the learning rate says (Wortsman et al. 2023, arXiv:2304.13013). The sign alone is
no proof, because any instability makes gradients grow: the same run with a shorter memory is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from workbench.curves.classify import Rise
from workbench.curves.rules import rule_view, rules_in
from workbench.curves.trials import RecordLike, TrialVerdict, judge

__all__ = ["MEMORY_FIELD", "StaleMoment", "shorter", "stale_moments", "staleness"]

FloatArray = NDArray[np.float64]
MEMORY_FIELD = {"adam": "beta2", "nadam": "beta2", "adamw": "beta2", "rmsprop": "rho"}
"""The config field that says how far back a rule's second moment reaches."""


@dataclass(frozen=True, kw_only=True)
class StaleMoment:
    """A rise of the loss that began with a second moment out of date.

    Attributes:
        trial: its trial, with the verdict.
        rise: the rise.
        field: the config field of the memory.
        memory: its value.
        step: where the gradient stood farthest above what the second moment remembers.
        ratio: by which factor the step was longer there.
    """

    trial: TrialVerdict
    rise: Rise
    field: str
    memory: float
    step: int
    ratio: float


def staleness(grad_norm: ArrayLike, memory: float) -> FloatArray:
    """Return by which factor an out-of-date second moment makes each step longer, shape (steps,).

    It is |g| over the root of the bias-corrected average of |g|^2 that the update divides by: 1 for steady gradients and at the
    first step, at most 1 / sqrt(1 - memory). It is taken of the norm over all parameters, so a single tensor's may be larger.

    Args:
        grad_norm: norm of each step's gradient, shape (steps,); where it is not finite the result is NaN.
        memory: beta2 of adam, nadam and adamw, rho of rmsprop.
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
        record: a study.
        ratio: from which factor on a second moment is out of date (the threshold of Wortsman et al. for single tensors; for the
            norm over all parameters a rule of thumb).
        before_steps: how many steps before the rise to look (the same source: spikes follow within 1 to 8 steps).
        min_memory_steps: a rule that reaches back fewer steps has no long memory (rule of thumb).
    """
    found = []
    for name in (n for n in rules_in(record) if n in MEMORY_FIELD):
        view = rule_view(record, name)
        memory = float(view.config[MEMORY_FIELD[name]])
        if 1.0 / (1.0 - memory) < min_memory_steps:
            continue
        peers = view.full_length
        trials = sorted(judge(peers, peers), key=lambda item: (item.curve.lr, item.curve.seed))
        hits = [hit for item in trials for hit in _stale(item, name, memory, ratio, before_steps)]
        found += hits[:1]
    return found


def _stale(item: TrialVerdict, name: str, memory: float, ratio: float, before_steps: int) -> list[StaleMoment]:
    steps = item.curve.steps
    if "grad_norm" not in steps.columns or not item.verdict.rises:
        return []
    ratios = staleness(steps["grad_norm"].to_numpy(dtype=np.float64), memory)
    found = []
    for rise in item.verdict.rises:
        reach = before_steps + item.verdict.width // 2
        low, high = max(rise.onset_step - reach, 0), rise.onset_step + 2 + item.verdict.width // 2
        window = ratios[low:high]
        if window.size and np.isfinite(window).any() and np.nanmax(window) >= ratio:
            at = int(np.nanargmax(window))
            hit = StaleMoment(
                trial=item, rise=rise, field=MEMORY_FIELD[name], memory=memory, step=low + at, ratio=float(window[at])
            )
            found.append(hit)
    return found
