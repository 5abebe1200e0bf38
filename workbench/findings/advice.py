"""The adviser: what to try against an instability, in which order, for which gain and at which price (F2.9, F2.10).

Early instability calls for warmup and then clipping, one in the middle of training for clipping. What follows is the same for both: another optimizer, the practices of the architecture, and as the last resort a smaller learning rate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["early", "mid"]


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One thing to try.

    Attributes:
        action: what to do, as an order.
        clause: the requirement it follows from.
        gain: what it can be expected to bring.
        cost: what trying it takes, in runs of the length of the baseline.
        study: what tries it, or None where only a person can.
    """

    action: str
    clause: str
    gain: str
    cost: str
    study: str | None = None

    def __str__(self) -> str:
        """Return one line."""
        how = f" with wb.{self.study}" if self.study else ""
        return f"{self.action} ({self.clause}). Expected: {self.gain}. Cost{how}: {self.cost}."


ADVICE: dict[str, Advice] = {
    "warmup": Advice(
        action="Prepend a learning-rate warmup, the shortest that is stable at ten times the unstable lr",
        clause="F2.1, F3.6",
        gain="the best remedy for early instability; it allows larger peak learning rates and lengthens the run by its steps",
        cost="short trials and one full run, about 2 baseline runs",
        study="warmup.Study",
    ),
    "clipping": Advice(
        action="Clip the gradient norm, at first at the 90th percentile of the norms of a stable run",
        clause="F2.2, F4.9",
        gain="helps early and in mid-training, most where single batches have outlier gradients",
        cost="one full run per threshold, trained in parallel",
        study="clipping.Study",
    ),
    "optimizer": Advice(
        action="Try another optimizer: Adam sometimes copes where momentum does not",
        clause="F2.3",
        gain="another range of learning rates that train, which may be wider",
        cost="a learning-rate sweep per optimizer, trained in parallel: about 15 baseline runs each, fewer with steps=...",
        study="optimizers.Study",
    ),
    "architecture": Advice(
        action="Change the architecture: add residual connections, normalise before the addition as in "
        "x + Norm(f(x)), initialise residual branches to zero",
        clause="F2.4 to F2.8",
        gain="a larger stable lr, the more so the deeper the model",
        cost="a change of the model, and another diagnosis",
    ),
    "lower_lr": Advice(
        action="Lower the learning rate only as the last resort: it hides the instability instead of curing it",
        clause="F2.9",
        gain="stable, but slower",
        cost="one run, or none where a sweep has trained it",
    ),
}
_ORDER: dict[Kind, tuple[str, ...]] = {
    "early": ("warmup", "clipping", "optimizer", "architecture", "lower_lr"),
    "mid": ("clipping", "optimizer", "architecture", "lower_lr"),
}
ADAM = ("adam", "adamw", "nadam")  # who trains with one is not told to try Adam


def advise(
    kind: Kind, *, optimizer: str = "", fixes: Mapping[str, float] | None = None, loss: float = 0.0
) -> list[str]:
    """Return what to try, the most promising first and a smaller lr last, one line each.

    Args:
        optimizer: the rule that trains.
        fixes: the losses that some of these were measured to end at; the best of them leads, and what does not end below `loss` is left out.
    """
    ends = fixes or {}
    better = sorted((name for name in ends if ends[name] < loss), key=lambda name: ends[name])
    names = [*better, *(name for name in _ORDER[kind] if name not in ends)]
    return [str(ADVICE[name]) for name in names if not (name == "optimizer" and optimizer in ADAM)]
