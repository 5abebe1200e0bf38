"""How a server updates a table of embeddings from a gradient on some of its rows: `RowRule` says by which rule, `RowUpdater` does it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from workbench.config import TrainConfig
from workbench.errors import UsageError, nearest
from workbench.train.optimizers import UpdateRule
from workbench.train.update_rules import RULES, Constants, Memory

RowRuleName = Literal["sgd", "lazy_momentum", "lazy_adam", "adagrad", "ftrl"]
ROW_RULES: tuple[str, ...] = get_args(RowRuleName)
_LAZY = {"sgd": "sgd", "lazy_momentum": "momentum", "lazy_adam": "adam"}


@dataclass(frozen=True)
class RowRule:
    """The rule by which the rows of a batch are updated, and they alone: other rows keep their values and their slots.

    The learning rate is the config's at this step, momentum, beta1, beta2, eps and weight_decay are the config's as well; weight decay
    is added to the gradient of these rows. "lazy_momentum" and "lazy_adam" leave out what momentum and decaying moments would do to
    all other rows: this is another algorithm than momentum and Adam, and that of `torch.optim.SparseAdam`. "adagrad" is
    `torch.optim.Adagrad`, "ftrl" is FTRL-Proximal (McMahan et al. 2013, algorithm 1, with alpha the learning rate).

    Attributes:
        name: one of "sgd", "lazy_momentum", "lazy_adam", "adagrad", "ftrl".
        initial_accumulator: of adagrad and ftrl, at least 0; TensorFlow's default is 0.1.
        beta: of ftrl.
        l1: of ftrl: rows whose gradients stay small become exactly 0.
        l2: of ftrl.

    Raises:
        UsageError: another name, or a constant below 0.
    """

    name: RowRuleName
    initial_accumulator: float = 0.0
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0

    def __post_init__(self) -> None:
        """Check."""
        if self.name not in ROW_RULES:
            raise UsageError(
                f"RowRule({self.name!r}) is not known. Allowed: {', '.join(map(repr, ROW_RULES))}.{nearest(str(self.name), ROW_RULES)}"
            )
        for field in ("initial_accumulator", "beta", "l1", "l2"):
            if not 0.0 <= getattr(self, field) < float("inf"):
                raise UsageError(f"RowRule {field}={getattr(self, field)!r} must be a number of at least 0.")
        if self.name == "ftrl" and not self.beta + self.initial_accumulator:
            raise UsageError(
                "RowRule('ftrl') divides by beta plus the root of the accumulator: let one of beta and initial_accumulator be above 0."
            )


class RowUpdater:
    """Updates a flat table in place, with its slots as flat tensors of the same length; its methods beside `update` are those of `UpdateRule`.

    Without a rule it is the config's own optimizer on the whole table, in which rows that the batch did not have get a gradient of 0.
    """

    def __init__(self, config: TrainConfig, rule: RowRule | None, values: Tensor, width: int) -> None:
        self._width = width
        if rule is None and config.optimizer == "sgd" and not config.weight_decay:
            rule = RowRule("sgd")  # the same arithmetic, and no need to look at the other rows
        self._rule, self._config = rule, config
        self._whole = UpdateRule([config], values[None]) if rule is None else None
        self._grad = torch.zeros_like(values) if rule is None else None
        self._slots: dict[str, Tensor] = {}
        if rule is not None:
            start = RULES[_LAZY[rule.name], "playbook"].initial if rule.name in _LAZY else _initial(rule)
            self._slots = {key: torch.full_like(values, value) for key, value in start.items()}

    def update(self, values: Tensor, rows: Tensor, grad: Tensor, step: int, lr: float) -> None:
        """Apply a gradient, flat, on different rows of the table; `step` counts from 0."""
        table, grad = values.view(-1, self._width), grad.view(-1, self._width)
        if self._whole is not None and self._grad is not None:
            self._grad.view(-1, self._width)[rows] = grad
            lrs = torch.full((1, 1), lr, dtype=values.dtype)
            values -= self._whole.update(values[None], self._grad[None], lrs, step, [lr])[0]
            self._grad.view(-1, self._width)[rows] = 0.0
            return
        assert self._rule is not None
        if not lr:
            return
        here = table[rows]
        slots = {key: slot.view(-1, self._width)[rows] for key, slot in self._slots.items()}
        if self._config.weight_decay:
            grad = grad.add(here, alpha=self._config.weight_decay)
        if self._rule.name in _LAZY:
            shape = (1, grad.numel())
            memory = Memory(
                {key: slot.view(shape) for key, slot in slots.items()},
                torch.empty(shape, dtype=grad.dtype),
                torch.empty(shape, dtype=grad.dtype),
            )
            rule = RULES[_LAZY[self._rule.name], "playbook"]
            lrs = torch.full((1, 1), lr, dtype=grad.dtype)
            here = here - rule.update(
                memory, grad.reshape(shape), lrs, step + 1, Constants([self._config], grad)
            ).view_as(here)
        elif self._rule.name == "adagrad":
            total = slots["sum"].addcmul_(grad, grad)
            here = here - lr * grad / (total.sqrt() + self._config.eps)
        else:
            here = _ftrl(self._rule, here, grad, slots, lr)
        table[rows] = here
        for key, slot in self._slots.items():
            slot.view(-1, self._width)[rows] = slots[key]

    def state(self, lane: int = 0) -> dict[str, Tensor]:
        """Return the slots by name, flat."""
        return self._slots if self._whole is None else self._whole.state(lane)

    def load(self, lane: int, state: Mapping[str, Tensor], plain: Mapping[str, Any]) -> None:
        """Put saved slots back."""
        if self._whole is not None:
            self._whole.load(lane, state, plain)
        for key, slot in self._slots.items():
            slot.copy_(state[key].reshape(-1))


def _initial(rule: RowRule) -> dict[str, float]:
    names = ("sum",) if rule.name == "adagrad" else ("n",)
    return dict.fromkeys(names, rule.initial_accumulator) | ({"z": 0.0} if rule.name == "ftrl" else {})


def _ftrl(rule: RowRule, values: Tensor, grad: Tensor, slots: dict[str, Tensor], lr: float) -> Tensor:
    n, z = slots["n"], slots["z"]
    before = n.sqrt()
    n.addcmul_(grad, grad)
    root = n.sqrt()
    z.add_(grad).sub_((root - before) / lr * values)
    shrunk = (z.abs() - rule.l1).clamp_min(0.0) * -z.sign()
    return shrunk / ((rule.beta + root) / lr + rule.l2)
