"""`explain_rule`: where the playbook's form of an update rule and torch's part, by how much, and why (F7)."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from workbench.config import OPTIMIZERS, TrainConfig
from workbench.errors import ConfigError, UsageError
from workbench.schedules import lr_values
from workbench.train.update_rules import RULES, Constants, Memory, Rule

FloatArray = NDArray[np.float64]
ROUNDING = 1e-9  # relative difference up to which two updates are the same
MATERIAL = 0.1  # relative difference from which on an update is another one (rule of thumb)
_EPS = "the playbook adds eps before the bias correction of v, which makes it larger by 1 / sqrt(1 - beta2^t)"
_WHY = {
    "rmsprop": (
        "the playbook's v starts at 1, torch's at 0, so the playbook's first steps are shorter, most where gradients are small",
        "the playbook adds eps within the square root of v, torch outside of it",
        "the playbook's momentum buffer holds steps multiplied by the lr of their time; torch multiplies the whole buffer by the "
        "lr of now, and so follows a change of the lr at once",
    ),
    "adam": (_EPS,),
    "adamw": (_EPS,),
    "nadam": (
        "torch raises the momentum from beta1 / 2 to beta1 over thousands of steps, the playbook keeps it at beta1",
        "the playbook corrects the momentum and the gradient by one common factor, torch each by its own product of betas",
        _EPS,
    ),
}


@dataclass(frozen=True, kw_only=True, repr=False)
class RuleForms:
    """The updates of both forms from the same gradients and learning rates."""

    optimizer: str
    # playbook, torch: updates of each form for one parameter, shape (steps,)
    playbook: FloatArray
    torch: FloatArray
    first_step: int | None  # first step at which they differ, None where they never do
    first_ratio: float | None  # update of torch's form over that of the playbook's there
    # sum of all updates of torch's form over that of the playbook's: how much farther it has gone at the end
    way_ratio: float
    material_steps: int  # how many updates differ by more than a tenth
    why: tuple[str, ...]  # in what the formulas differ; () where they are the same

    def to_dict(self) -> dict[str, Any]:
        """Return what a record keeps: no arrays."""
        names = ("optimizer", "first_step", "first_ratio", "way_ratio", "material_steps", "why")
        return {name: getattr(self, name) for name in names} | {"steps": len(self.playbook)}

    def __repr__(self) -> str:
        """Return where the forms part, by how much, and why, line by line."""
        if self.first_step is None:
            return f"{self.optimizer}: the playbook's form and torch's give the same updates."
        many = f"{self.material_steps:,} of {len(self.playbook):,} updates differ by more than {MATERIAL:.0%}"
        times = f"{self.first_ratio:.4g} times the playbook's at step {self.first_step}"
        line = f"{self.optimizer}: torch's update is {times}; {many}; torch goes {self.way_ratio:.4g} times as far."
        return "\n".join([line, *(f"  {reason}" for reason in self.why)])


def explain_rule(config: TrainConfig, *, lrs: ArrayLike | None = None, gradients: ArrayLike = 1.0) -> RuleForms:
    """Compare the playbook's form of a config's update rule with torch's, with the config's own constants and schedule.

    Both are fed the same gradients of one parameter, by the formulas that train. sgd, momentum and nesterov are the same in both
    forms (F7.1 to F7.3), and weight decay plays no part: both forms decay alike.

    Args:
        config: names the rule, and holds its constants and its schedule.
        lrs: learning rate of each step, shape (steps,), as a record's column `lr` holds them; None is the config's own.
        gradients: gradient of one parameter, one number for all steps or one for each. What eps and the start of v do depends
            on its size: the norm of a recorded gradient over the square root of the number of parameters is a typical one.
    """
    if callable(config.optimizer):
        raise ConfigError(
            f"optimizer={config.to_dict()['optimizer']!r} is a function of your own, which has one form only. Rules with two "
            f"forms are known by name: {', '.join(OPTIMIZERS)}."
        )
    rates = lr_values(config) if lrs is None else np.asarray(lrs, dtype=np.float64).ravel()
    given = np.asarray(gradients, dtype=np.float64).ravel()
    sizes = np.full(len(rates), given[0]) if given.size == 1 else given
    if not len(rates) or len(sizes) != len(rates) or not np.isfinite([rates, sizes]).all():
        raise UsageError(
            f"lrs holds {len(rates)} steps and gradients {len(sizes)}: give one gradient for all steps, or one for each, at "
            "least one step, and finite numbers; leave out what diverged."
        )
    play = RULES[config.optimizer, "playbook"]
    playbook, other = (
        _updates(rule, config, rates, sizes) for rule in (play, RULES.get((config.optimizer, "torch"), play))
    )
    larger = np.maximum(np.abs(playbook), np.abs(other))
    apart = np.divide(np.abs(playbook - other), larger, out=np.zeros_like(larger), where=larger > 0)
    first = int(np.argmax(apart > ROUNDING)) if (apart > ROUNDING).any() else None
    return RuleForms(
        optimizer=config.optimizer, playbook=playbook, torch=other, first_step=first,
        first_ratio=None if first is None else _times(other[first], playbook[first]),
        way_ratio=_times(np.abs(other).sum(), np.abs(playbook).sum()), material_steps=int((apart > MATERIAL).sum()),
        why=_WHY.get(config.optimizer, ()),
    )  # fmt: skip


def _times(one: float, other: float) -> float:
    return float(one / other) if other else math.inf if one else 1.0


def _updates(rule: Rule, config: TrainConfig, lrs: FloatArray, gradients: FloatArray) -> FloatArray:
    """Return the updates of a rule, shape (steps,)."""
    like = torch.zeros(1, 1, dtype=torch.float64)
    state = {name: torch.full_like(like, value) for name, value in rule.initial.items()}
    memory, constants = Memory(state, torch.empty_like(like), like.clone()), Constants([config], like)
    steps = enumerate(zip(lrs, gradients, strict=True), start=1)
    return np.array([
        float(rule.update(memory, torch.full_like(like, g), torch.full_like(like, lr), step, constants))
        for step, (lr, g) in steps
    ])  # fmt: skip
