"""`explain_rule`: where the playbook's form of an update rule and torch's part, by how much, and why (F7).

Both forms are fed the same gradients of one parameter, at the learning rates of a config or of a recorded trace. Each cause is
then let act alone, all else made equal, by the same formulas that train.
"""

from __future__ import annotations

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
        name: short.
        text: what each form does.
        apart: relative difference of the updates that it makes, from 0 to 2, shape (steps,); below `tolerance` it is rounding.
    """

    name: str
    text: str
    apart: FloatArray
    tolerance: float

    @property
    def first(self) -> float:
        """Relative difference of the first updates that differ, 0 where none do."""
        seen = self.apart[self.apart > self.tolerance]
        return float(seen[0]) if seen.size else 0.0

    @property
    def largest(self) -> float:
        """Relative difference where it is largest."""
        return float(self.apart.max())


@dataclass(frozen=True, kw_only=True)
class RuleForms:
    """The updates of both forms from the same gradients and learning rates.

    Attributes:
        playbook, torch: updates of each form for one parameter, shape (steps,).
        first_step: first step at which they differ, None where they never do.
        material_frac: relative difference from which on an update is another one.
        causes: the one that does most comes first; () where the formulas are the same.
    """

    optimizer: str
    playbook: FloatArray
    torch: FloatArray
    first_step: int | None
    material_frac: float
    causes: tuple[Cause, ...]

    @property
    def apart(self) -> FloatArray:
        """Relative difference of the updates, from 0 to 2, shape (steps,)."""
        return apart(self.playbook, self.torch)

    @property
    def first_ratio(self) -> float | None:
        """Update of torch's form over that of the playbook's at `first_step`; None where they never differ."""
        if self.first_step is None:
            return None
        play, torch = float(self.playbook[self.first_step]), float(self.torch[self.first_step])
        return torch / play if play else float("inf")

    @property
    def way_ratio(self) -> float:
        """Sum of all updates of torch's form over that of the playbook's: how much farther it has gone at the end."""
        play, torch = float(np.abs(self.playbook).sum()), float(np.abs(self.torch).sum())
        return torch / play if play else 1.0 if not torch else float("inf")

    @property
    def material_steps(self) -> int:
        """How many updates differ by more than `material_frac`."""
        return int((self.apart > self.material_frac).sum())

    @property
    def last_material_step(self) -> int | None:
        """The last of them."""
        found = np.flatnonzero(self.apart > self.material_frac)
        return int(found[-1]) if found.size else None

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

    It tells what changing `rules` changes before anything is trained. sgd, momentum and nesterov are the same in both forms (F7.1
    to F7.3). Weight decay plays no part: both forms decay alike.

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
    both = updates(play), updates(RULES.get((config.optimizer, "torch"), play))
    differing = np.flatnonzero(apart(*both) > tolerance)
    causes = [
        Cause(name=_WHY[key][0], text=_WHY[key][1], apart=apart(*pair), tolerance=tolerance)
        for key, pair in _causes(config, rates, updates).items()
    ]
    return RuleForms(
        optimizer=config.optimizer, playbook=both[0], torch=both[1], material_frac=material_frac,
        first_step=int(differing[0]) if differing.size else None,
        causes=tuple(sorted(causes, key=lambda cause: -cause.largest)),
    )  # fmt: skip


def _updates(
    rule: Rule,
    eps: Callable[[int], float] | None = None,
    *,
    config: TrainConfig,
    lrs: FloatArray,
    gradients: FloatArray,
) -> FloatArray:
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

    def none(t: int) -> float:  # noqa: ARG001
        return 0.0

    def corrected(t: int) -> float:
        """Return the eps with which the playbook's form gives what torch's gives with the config's."""
        return float(config.eps * (1 - config.beta2**t) ** 0.5)

    if name == "rmsprop":
        zero = replace(play, initial={**play.initial, "v": 0.0})
        one = replace(ours, initial={**ours.initial, "v": 1.0})
        level = np.full_like(lrs, lrs.max())
        return {
            "start": (updates(play), updates(zero)),
            "root_eps": (updates(play, lrs=level), updates(one, lrs=level)),
            "buffer_lr": (updates(play, none), updates(one, none)),
        }
    eps = {"bias_eps": (updates(play), updates(play, corrected))}
    if name != "nadam":
        return eps
    steady = Rule(ours.initial, partial(ours.update, psi=NO_SCHEDULE))  # type: ignore[call-arg]
    return eps | {
        "products": (updates(play, none), updates(steady, none)),
        "schedule": (updates(steady), updates(ours)),
    }
