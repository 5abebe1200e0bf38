"""How a server updates what it holds: `BlockUpdater`, by the config's optimizer, or the rows of a batch of a table by a `RowRule`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
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


class TableOf(NamedTuple):
    """What a block is that holds a table."""

    width: int  # of a row
    rule: RowRule | None  # None is the config's optimizer, on the whole table


class BlockUpdater:
    """Updates flat values in place, with slots as flat tensors of the same length.

    Of a table without a rule the config's optimizer updates the whole, in which rows that the batch did not have get a gradient of 0.
    """

    def __init__(self, config: TrainConfig, values: Tensor, table: TableOf | None) -> None:
        self._config = config
        self._width, self._rule = table or TableOf(1, None)
        if table is not None and self._rule is None and config.optimizer == "sgd" and not config.weight_decay:
            self._rule = RowRule("sgd")  # the same arithmetic, and no need to look at the other rows
        self._whole = UpdateRule([config], values[None]) if self._rule is None else None
        self._grad = values.new_zeros((0 if table is None or self._rule else len(values),))
        self._slots: dict[str, Tensor] = {}
        if self._rule is not None:
            lazy = _LAZY.get(self._rule.name)
            start = RULES[lazy, "playbook"].initial if lazy else _initial(self._rule)
            self._slots = {key: torch.full_like(values, value) for key, value in start.items()}

    def update(self, values: Tensor, grad: Tensor, rows: NDArray[np.int64] | None, step: int, lr: float) -> None:
        """Apply a flat gradient on all values, or on different rows of a table; `step` counts from 0."""
        if rows is None:
            self._update_whole(values, grad, step, lr)
            return
        here, grad = torch.from_numpy(rows.copy()), grad.view(-1, self._width)
        if self._rule is not None:
            self._update_rows(self._rule, values.view(-1, self._width), here, grad, step=step, lr=lr)
            return
        whole = self._grad.view(-1, self._width)
        whole[here] = grad
        self._update_whole(values, self._grad, step, lr)
        whole[here] = 0.0

    def _update_whole(self, values: Tensor, grad: Tensor, step: int, lr: float) -> None:
        assert self._whole is not None
        lrs = torch.full((1, 1), lr, dtype=values.dtype)
        values -= self._whole.update(values[None], grad[None], lrs, step, [lr])[0]

    def _update_rows(self, own: RowRule, table: Tensor, rows: Tensor, grad: Tensor, *, step: int, lr: float) -> None:
        if not lr:
            return
        here = table[rows]
        slots = {key: slot.view(-1, self._width)[rows] for key, slot in self._slots.items()}
        if self._config.weight_decay:
            grad = grad.add(here, alpha=self._config.weight_decay)
        if own.name in _LAZY:
            shape = (1, grad.numel())
            memory = Memory(
                {key: slot.view(shape) for key, slot in slots.items()},
                torch.empty(shape, dtype=grad.dtype),
                torch.empty(shape, dtype=grad.dtype),
            )
            rule = RULES[_LAZY[own.name], "playbook"]
            lrs = torch.full((1, 1), lr, dtype=grad.dtype)
            here = here - rule.update(
                memory, grad.reshape(shape), lrs, step + 1, Constants([self._config], grad)
            ).view_as(here)
        elif own.name == "adagrad":
            total = slots["sum"].addcmul_(grad, grad)
            here = here - lr * grad / (total.sqrt() + self._config.eps)
        else:
            here = _ftrl(own, here, grad, slots, lr)
        table[rows] = here
        for key, slot in self._slots.items():
            slot.view(-1, self._width)[rows] = slots[key]

    def state(self) -> dict[str, Tensor]:
        """Return the slots by name."""
        return self._slots if self._whole is None else self._whole.state(0)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Put saved slots back."""
        if self._whole is not None:
            self._whole.load(0, state, {})
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
