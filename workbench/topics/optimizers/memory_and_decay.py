"""Signs of two faults of a rule's own: a second moment out of date when the loss rose, and weights that decay shrinks.

Adam divides by the root of an average of squared gradients that reaches 1 / (1 - beta2) steps back. Where gradients grow at once, the
average is out of date and the step longer than the learning rate says (Wortsman et al. 2023, arXiv:2304.13013). The sign alone is
no proof, because any instability makes gradients grow: the same run with a shorter memory is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from workbench.curves.classify import Rise
from workbench.curves.trial_curves import RecordLike, TrialCurve, TrialVerdict, judge
from workbench.topics.optimizers.rule_ranges import Twin, read_twins, rule_view, rules_in

FloatArray = NDArray[np.float64]
MEMORY_FIELD = {"adam": "beta2", "nadam": "beta2", "adamw": "beta2", "rmsprop": "rho"}
"""The config field that says how far back a rule's second moment reaches."""


@dataclass(frozen=True, kw_only=True)
class StaleMoment:
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
        hits = (
            StaleMoment(trial=item, rise=rise, field=field, memory=memory, step=step, ratio=longer)
            for item in trials
            for rise, step, longer in _stale(item, memory, before_steps)
            if longer >= ratio
        )
        found += [hit for hit in [next(hits, None)] if hit is not None]
    return found


def _stale(item: TrialVerdict, memory: float, before_steps: int) -> Iterator[tuple[Rise, int, float]]:
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
            yield rise, low + at, float(window[at])


REACHES_ALL = ("sgd", "momentum", "nesterov", "adamw")
"""Rules whose decay takes the same share of every weight; the others divide it by the size of the gradients first."""


@dataclass(frozen=True, kw_only=True)
class DecayPair:
    """One run with weight decay and its control run without.

    Attributes:
        ratio: norm of the weights at the end with decay over that without; None where the norms were not recorded.
        accumulated: the decay that the run adds up to, see `accumulated`.
    """

    twin: Twin
    ratio: float | None
    accumulated: float | None

    @property
    def gain(self) -> float:
        """How much better the selected checkpoint is without decay, or where none was selected, how much lower the end loss."""
        return self.twin.gain if self.twin.selected_gain is None else self.twin.selected_gain

    def to_dict(self) -> dict[str, Any]:
        """Return the pair as JSON values."""
        return self.twin.to_dict() | {"norm_ratio": self.ratio, "accumulated_decay": self.accumulated}


def decay_pairs(record: RecordLike) -> list[DecayPair]:
    """Return every run with weight decay that has a twin without, in order of the twin's number."""
    return [
        DecayPair(twin=twin, ratio=_ratio(twin), accumulated=accumulated(twin.own.curve))
        for twin in read_twins(record, "weight_decay")
        if twin.after == 0
    ]


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


def _ratio(twin: Twin) -> float | None:
    norms = []
    for curve in (twin.own.curve, twin.twin.curve):
        recorded = curve.steps.get("param_norm")
        found = np.empty(0) if recorded is None else recorded.to_numpy(dtype=np.float64)
        norms += found[np.isfinite(found)][-1:].tolist()
    return norms[0] / norms[1] if len(norms) == 2 and norms[1] > 0 else None
