"""`explain_rule`: where the playbook's form of an update rule and torch's part, by how much, and why (F7)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from workbench.config import OPTIMIZERS, TrainConfig
from workbench.errors import ConfigError, UsageError
from workbench.schedules import lr_values
from workbench.train.update_rules import RULES, Constants, Memory, Rule

FloatArray = NDArray[np.float64]
NO_SCHEDULE = 1e9
"""psi of torch's NAdam at which its momentum schedule has ended at the first step."""
_WHY: dict[str, tuple[str, str]] = {
    "start": (
        "start of v",
        "the playbook's v starts at 1, torch's at 0, so the playbook's first steps are shorter, most where gradients are small: "
        "a warmup of its own",
    ),
    "root_eps": ("place of eps", "the playbook adds eps within the square root of v, torch outside of it"),
    "buffer_lr": (
        "place of the lr",
        "the playbook's momentum buffer holds steps that were multiplied by the lr of their time, torch multiplies the whole "
        "buffer by the lr of now, so torch follows a change of the lr at once",
    ),
    "bias_eps": (
        "eps and bias correction",
        "the playbook adds eps before the bias correction of v, which makes it larger by 1 / sqrt(1 - beta2^t)",
    ),
    "products": (
        "bias correction of m",
        "the playbook corrects the momentum and the gradient by one common factor, torch each by its own product of betas",
    ),
    "schedule": (
        "momentum schedule",
        "torch raises the momentum from beta1 / 2 to beta1 over thousands of steps, the playbook keeps it at beta1",
    ),
}


def apart(one: FloatArray, other: FloatArray) -> FloatArray:
    """Return the difference of two sequences of updates relative to the larger of the two, from 0 to 2, shape (steps,)."""
    larger = np.maximum(np.abs(one), np.abs(other))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.nan_to_num(np.where(larger > 0, np.abs(one - other) / larger, 0.0), nan=0.0))


@dataclass(frozen=True, kw_only=True)
class Cause:
    """One thing in which the forms differ, and what it does alone, all else made equal.

    Attributes:
        name, text: in short, and what each form does.
        apart: relative difference of the updates that it makes, from 0 to 2, shape (steps,).
        first, largest: of the first updates that differ by more than rounding (0 where none do), and where it is largest.
    """

    name: str
    text: str
    apart: FloatArray
    first: float
    largest: float


@dataclass(frozen=True, kw_only=True, repr=False)
class RuleForms:
    """The updates of both forms from the same gradients and learning rates.

    Attributes:
        playbook, torch: updates of each form for one parameter, shape (steps,).
        apart: their relative difference, from 0 to 2, shape (steps,).
        material_frac: relative difference from which on an update is another one.
        first_step: first step at which they differ, None where they never do.
        first_ratio: update of torch's form over that of the playbook's there.
        way_ratio: sum of all updates of torch's form over that of the playbook's: how much farther it has gone at the end.
        material_steps, last_material_step: how many updates differ by more than `material_frac`, and the last of them.
        causes: the one that does most comes first; () where the formulas are the same.
    """

    optimizer: str
    playbook: FloatArray
    torch: FloatArray
    apart: FloatArray
    material_frac: float
    first_step: int | None
    first_ratio: float | None
    way_ratio: float
    material_steps: int
    last_material_step: int | None
    causes: tuple[Cause, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return what a record keeps: no arrays."""
        names = ("optimizer", "first_step", "first_ratio", "way_ratio", "material_steps", "last_material_step")
        causes = [{name: getattr(c, name) for name in ("name", "text", "first", "largest")} for c in self.causes]
        found = {name: getattr(self, name) for name in names}
        return found | {"steps": len(self.playbook), "largest": float(self.apart.max()), "causes": causes}

    def __repr__(self) -> str:
        """Return where the forms part, by how much, and why, line by line."""
        if self.first_step is None:
            return f"{self.optimizer}: the playbook's form and torch's give the same updates."
        last = self.last_material_step
        many = f"{self.material_steps:,} of {len(self.playbook):,} updates differ by more than {self.material_frac:.0%}"
        many += f", the last at step {last:,}" if last is not None else ""
        times = f"{self.first_ratio:.4g} times the playbook's at step {self.first_step}"
        far = f"torch goes {self.way_ratio:.4g} times as far"
        causes = [f"  {c.name}: {c.text}. Alone: {c.first:.2g} at first, {c.largest:.2g} at most." for c in self.causes]
        return "\n".join([f"{self.optimizer}: torch's update is {times}; {many}; {far}.", *causes])


def explain_rule(
    config: TrainConfig,
    *,
    lrs: ArrayLike | None = None,
    gradients: ArrayLike = 1.0,
    tolerance: float = 1e-9,
    material_frac: float = 0.1,
) -> RuleForms:
    """Compare the playbook's form of a config's update rule with torch's, with the config's own constants and schedule.

    Both are fed the same gradients of one parameter, by the formulas that train; then each cause acts alone. sgd, momentum and
    nesterov are the same in both forms (F7.1 to F7.3), and weight decay plays no part: both forms decay alike.

    Args:
        config: names the rule, and holds its constants and its schedule.
        lrs: learning rate of each step, shape (steps,), as a record's column `lr` holds them; None is the config's own.
        gradients: gradient of one parameter, one number for all steps or one for each. What eps and the start of v do depends
            on its size: the norm of a recorded gradient over the square root of the number of parameters is a typical one.
        tolerance: relative difference from which on two updates differ at all; what is below is rounding.
        material_frac: relative difference from which on an update is another one (rule of thumb).
    """
    if callable(config.optimizer):
        raise ConfigError(
            f"optimizer={config.to_dict()['optimizer']!r} is a function of your own, which has one form only. Rules with two "
            f"forms are known by name: {', '.join(OPTIMIZERS)}."
        )
    rates = lr_values(config) if lrs is None else np.asarray(lrs, dtype=np.float64).ravel()
    given = np.asarray(gradients, dtype=np.float64).ravel()
    sizes = np.full(len(rates), given[0]) if given.size == 1 else given
    if not len(rates) or len(sizes) != len(rates):
        raise UsageError(
            f"lrs holds {len(rates)} steps and gradients {len(sizes)}: give one gradient for all steps, or one for each, and at "
            "least one step."
        )
    for name, values in (("lrs", rates), ("gradients", sizes)):
        bad = np.flatnonzero(~np.isfinite(values))
        if bad.size:
            wrong = f"{name} holds {values[bad[0]]} at step {bad[0]}"
            raise UsageError(f"{wrong}: give finite numbers; leave out what diverged.")
    play = RULES[config.optimizer, "playbook"]
    updates = partial(_updates, config=config, lrs=rates, gradients=sizes)
    playbook, other = updates(play), updates(RULES.get((config.optimizer, "torch"), play))
    differs = apart(playbook, other)
    differing, material = np.flatnonzero(differs > tolerance), np.flatnonzero(differs > material_frac)
    first = int(differing[0]) if differing.size else None
    causes = []
    for key, pair in _causes(config, rates, updates).items():
        alone = apart(*pair)
        seen = alone[alone > tolerance]
        begins = float(seen[0]) if seen.size else 0.0
        causes.append(
            Cause(name=_WHY[key][0], text=_WHY[key][1], apart=alone, first=begins, largest=float(alone.max()))
        )
    return RuleForms(
        optimizer=config.optimizer, playbook=playbook, torch=other, apart=differs, material_frac=material_frac, first_step=first,
        first_ratio=None if first is None else _times(other[first], playbook[first]),
        way_ratio=_times(np.abs(other).sum(), np.abs(playbook).sum()), material_steps=material.size,
        last_material_step=int(material[-1]) if material.size else None,
        causes=tuple(sorted(causes, key=lambda cause: -cause.largest)),
    )  # fmt: skip


def _times(one: float, other: float) -> float:
    return float(one / other) if other else math.inf if one else 1.0


def _updates(
    rule: Rule, eps: Callable[[int], float] | None = None, *, config: TrainConfig, lrs: FloatArray, gradients: FloatArray
) -> FloatArray:  # fmt: skip
    """Return the updates of a rule, shape (steps,); `eps` is that of step t, from 1."""
    like = torch.zeros(1, 1, dtype=torch.float64)
    state = {name: torch.full_like(like, value) for name, value in rule.initial.items()}
    memory, constants = Memory(state, torch.empty_like(like), like.clone()), Constants([config], like)
    found = np.empty(len(lrs))
    for step, (lr, gradient) in enumerate(zip(lrs, gradients, strict=True)):
        if eps is not None:
            constants.eps = eps(step + 1)
        g, rate = torch.full_like(like, gradient), torch.full_like(like, lr)
        found[step] = float(rule.update(memory, g, rate, step + 1, constants))
    return found


def _causes(
    config: TrainConfig, lrs: FloatArray, updates: Callable[..., FloatArray]
) -> dict[str, tuple[FloatArray, FloatArray]]:
    """Return for each cause the updates of two forms that differ in it alone."""
    name = str(config.optimizer)
    if (name, "torch") not in RULES:
        return {}
    play, ours = RULES[name, "playbook"], RULES[name, "torch"]

    none: Callable[[int], float] = lambda _: 0.0  # noqa: E731
    corrected: Callable[[int], float] = lambda t: float(config.eps * (1 - config.beta2**t) ** 0.5)  # noqa: E731

    if name == "rmsprop":
        zero = replace(play, initial={**play.initial, "v": 0.0})
        one = replace(ours, initial={**ours.initial, "v": 1.0})
        level = np.full_like(lrs, lrs.max())
        return {
            "start": (updates(play), updates(zero)),
            "root_eps": (updates(play, lrs=level), updates(one, lrs=level)),
            "buffer_lr": (updates(play, none), updates(one, none)),
        }
    eps = {"bias_eps": (updates(play), updates(play, corrected))}  # the playbook's form with torch's eps
    if name != "nadam":
        return eps
    steady = Rule(ours.initial, partial(ours.update, psi=NO_SCHEDULE))  # type: ignore[call-arg]
    return eps | {
        "products": (updates(play, none), updates(steady, none)),
        "schedule": (updates(steady), updates(ours)),
    }
