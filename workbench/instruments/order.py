"""`Order`: the calls of a loop between two updates, how often each order occurs, and in which line each call is made."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from statistics import median
from typing import Any

import torch
from torch import Tensor

from workbench.instruments.caller import own_line

MAX_ORDERS = 40
MAX_TOKENS = 400
SCALED = "workbench scaled"
"""Where the node of a loss that a GradScaler scaled says so."""
_LINES = 3


class Order:
    """Counts the orders in which a loop makes its calls, one order an update of the first optimizer.

    Calls are "draw", "forward", "evaluate", "scale", "backward", "unscale", "clip", "clip_value", "schedule", and "zero" and "step" with
    the number of the optimizer; the same call several times in a row is one with its count, as in "backward*4".
    """

    def __init__(self) -> None:
        self._tokens: list[str] = []
        self._folds: dict[tuple[str, ...], str] = {}
        self._orders: Counter[str] = Counter()
        self._lines: dict[str, dict[str, int]] = {}
        self.backwards = 0
        self.last_backward = self._last_zero = ""  # lines; of a zeroing that no backward pass follows yet
        self._sites: set[str] = set()  # lines of the backward passes of this update
        self._touched: set[int] = set()  # optimizers whose gradients something changed since their last step
        self._limits: Counter[str] = Counter()
        self._value_limit: float | None = None  # of this update
        self._at_limit: list[Tensor] = []
        self._steps: dict[int, _Steps] = {}
        self._factors: list[float | None] = []
        self.scaled = False  # whether a GradScaler took part since the last update
        self.repeats = False  # whether some step followed another one without a backward pass between them
        self._weight = 1  # updates that this one stands for
        self.awake = True  # whether the order of this update is noted
        self.pending: Any = None  # the losses that wait for a step

    def __contains__(self, number: int) -> bool:
        """Tell whether an optimizer has stepped."""
        return number in self._steps

    def look(self, *, awake: bool, weight: int = 1) -> None:
        """Note the order of the updates from now on, or no more; the steps of other optimizers than the first count when they began within a look."""
        self._weight = weight
        if awake != self.awake:
            self.awake = awake
            self._touched.clear()
            for number, steps in self._steps.items():
                steps.whole = awake and number == 0

    def add(self, token: str, *, line: bool) -> None:
        """Take in a call; `line` looks up where it is made."""
        if token in ("scale", "unscale"):
            self.scaled = True
        if not self.awake:
            return
        if len(self._tokens) < MAX_TOKENS:
            self._tokens.append(token)
        if line or token not in self._lines:
            where = self._note(token)
            if token.startswith("zero"):
                self._last_zero = where
                if "backward" in self._tokens:
                    self._lines["zeroed between"] = {where: 1}

    def _note(self, token: str) -> str:
        seen = self._lines.setdefault(token, {})
        where = own_line()
        if where in seen or len(seen) < _LINES:
            seen[where] = seen.get(where, 0) + 1
        return where

    def backward(self, losses: Any, *, touched: Iterable[int], near: bool) -> None:
        """Take in of a backward pass that begins what is not its number; `touched` are the optimizers whose gradients were changed since the last one ended."""
        self._touched.update(touched)
        if near:
            if len(self._factors) < MAX_TOKENS:
                self._factors.append(scalar_factor(losses))
            self.last_backward, self._last_zero = self._note("backward"), ""
            self._sites.add(self.last_backward)

    def clipped(self, kind: str, limit: float, *, line: bool) -> None:
        """Take in a clipping of the gradients."""
        token = "clip" if kind == "clip_grad_norm_" else "clip_value"
        self.add(token, line=line)
        self._limits[f"{token} {float(limit):g}"] += 1
        self._value_limit = limit if kind == "clip_grad_value_" else self._value_limit

    def clipped_values(self, gradients: Iterable[Tensor]) -> None:
        """Take in the gradients of an update: which share of their values that are not 0 lies at the limit of `clip_grad_value_`."""
        limit, self._value_limit = self._value_limit, None
        if limit is None or len(self._at_limit) >= MAX_TOKENS:
            return
        counts = [torch.stack([(g.abs() >= limit).sum(), (g != 0).sum()]) for g in gradients if type(g) is Tensor]
        if counts:
            at, values = torch.stack([each.to(counts[0].device) for each in counts]).sum(0)
            self._at_limit.append(at / values.clamp(min=1))

    def step(self, number: int, *, empty: bool, line: bool, altered: bool = False) -> None:
        """Take in that an optimizer's step begins.

        Args:
            empty: it has no gradient at all.
            altered: gradients were changed after the last backward pass, by something that is not told of.
        """
        steps = self._steps.get(number)
        if steps is None:
            steps = self._steps[number] = _Steps(self._steps[0].total if 0 in self._steps else 0)
            steps.line = "" if line else own_line()
        passes, whole = self.backwards - steps.at_backward, steps.whole
        steps.at_backward, steps.whole = self.backwards, self.awake
        if whole:
            weight = self._weight
            steps.total += weight
            again = steps.total > 1 and passes == 0
            self.repeats |= again
            steps.repeated += weight * again
            steps.empty += weight * empty
            steps.kept += weight * (steps.total > 2 and passes > 0 and number not in self._touched)
            steps.altered += weight * altered
        elif number and steps.begun == self._steps[0].total:
            steps.total += 1  # in a phase of its own: the first optimizer makes no steps any more
        if line:
            steps.line = self.last_backward
            if number == 0 and self._last_zero:
                self._lines["zeroed late"] = {self._last_zero: 1}
        if line and number == 0:
            draws = self._tokens.count("draw")
            steps.windows[f"{passes} {draws} {self._tokens.count('forward')} {len(self._sites)}"] += 1
            known = [f for f in self._factors if f is not None]
            if len(known) == passes and passes:
                steps.factors[f"{passes} {sum(known):.4g}"] += 1
        if number == 0:
            self._factors, self._sites = [], set()
        self._touched.discard(number)
        self.add(f"step{number}", line=line)

    def pass_over(self, backwards: int, open_passes: int) -> None:
        """Take in backward passes of updates that are not noted, some of them in an open one."""
        self.backwards += backwards
        self._steps[0].at_backward = self.backwards - open_passes

    def stepped(self, number: int) -> None:
        """Take in that an optimizer's step has ended; a closure's backward passes count to it."""
        self._steps[number].at_backward = self.backwards
        if number == 0:
            self.scaled = False
        if number == 0 and self.awake:
            self._factors, self._sites = [], set()
            key = tuple(self._tokens)
            order = self._folds.get(key)
            if order is None:
                order = _folded(self._tokens)
                if len(self._folds) < MAX_ORDERS:
                    self._folds[key] = order
            if order in self._orders or len(self._orders) < MAX_ORDERS:
                self._orders[order] += self._weight
            self._tokens = []

    def to_dict(self) -> dict[str, Any]:
        """Return orders, lines and counts, as JSON values."""
        return {
            "orders": dict(self._orders.most_common()),
            "open": _folded(self._tokens),
            "lines": {token: max(seen, key=lambda line: seen[line]) for token, seen in self._lines.items() if seen},
            "limits": dict(self._limits.most_common(10)),
            "at_limit": median(float(share) for share in self._at_limit) if self._at_limit else None,
            "backwards": self.backwards,
            # nobody sees when gradients are zeroed of an optimizer that is not observed, below 0
            "mixed": [[n, self.pending.alone[n], count] for n, count in self.pending.mixed.items() if n >= 0]
            if self.pending
            else [],
            "optimizers": {str(number): steps.to_dict() for number, steps in self._steps.items()},
        }


class _Steps:
    def __init__(self, begun: int = 0) -> None:
        self.begun = begun  # updates of the first optimizer before
        self.whole = True  # whether everything since its last step was seen
        self.total = self.repeated = self.empty = self.kept = self.altered = self.at_backward = 0
        self.line = ""
        self.windows: Counter[str] = Counter()
        self.factors: Counter[str] = Counter()

    def to_dict(self) -> dict[str, Any]:
        return {
            "steps": self.total, "begun": self.begun, "repeated": self.repeated, "empty": self.empty, "kept": self.kept, "altered": self.altered, "line": self.line,
            "windows": dict(self.windows.most_common(10)), "factors": dict(self.factors.most_common(10)),
        }  # fmt: skip


def _folded(tokens: list[str]) -> str:
    """Return calls with repetitions counted; what an accumulation repeats is one group, "(draw forward backward)*4"."""
    found, i = [], 0
    while i < len(tokens):
        best, times = 1, 1
        for size in range(1, 9):
            group, count = tokens[i : i + size], 1
            while tokens[i + count * size : i + (count + 1) * size] == group:
                count += 1
            if count > 1 and count * size > best * times:
                best, times = size, count
        text = " ".join(tokens[i : i + best])
        found.append(text if times == 1 else f"{text}*{times}" if best == 1 else f"({text})*{times}")
        i += best * times
    return " ".join(found)


def scalar_factor(losses: Any) -> float | None:
    """Return the product of the numbers by which a loss was multiplied or divided last, read from its graph; None where it has none."""
    return plain_part(losses)[1]


def alone_of(losses: Any) -> Any:
    """Return a loss that is given in a list by itself, else what is given."""
    return losses[0] if isinstance(losses, (list, tuple)) and len(losses) == 1 else losses


def plain_part(losses: Any) -> tuple[Any, float | None]:
    """Return the node of a loss's graph before it was multiplied or divided by numbers, other than a GradScaler's, and their product; both None without a graph."""
    loss = alone_of(losses)
    node: Any = loss.grad_fn if isinstance(loss, Tensor) else None
    if node is None:
        return None, None
    factor = 1.0
    for _ in range(6):
        name = node.name()
        parent = next((parent for parent, _ in node.next_functions if parent is not None), None)
        if SCALED in node.metadata:
            node = parent
            continue
        other = getattr(node, "_saved_other", None) if name in ("DivBackward0", "MulBackward0") else None
        if not isinstance(other, Tensor) or other.numel() != 1 or other.requires_grad or other.device.type != "cpu":
            break
        value = float(other)
        if not value or not math.isfinite(value) or parent is None:
            return node, None
        factor *= 1.0 / value if name == "DivBackward0" else value
        node = parent
    return node, factor
