"""`Criteria`: what a loop's loss functions are given, in its first updates."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import median
from typing import Any

import torch
from torch import Tensor

from workbench.instruments.caller import own_line
from workbench.instruments.conversions import DIFFERENCE, PAIRED, line_of
from workbench.instruments.losses.graphs import behind_weights, constant_of, is_unbounded
from workbench.instruments.order import alone_of, plain_part
from workbench.instruments.surroundings import has_values

MAX_CALLS, MAX_BOUNDS, MAX_NUMBERS = 20, 200, 64
_FAR = 4
_GUARD = 0.01
"""Of the first loss: a bound of its values that is lower keeps them off zero, and no training comes there (rule of thumb)."""
_KEY = "workbench value"
_BOUNDS = ("ClampBackward0", "ClampBackward1", "ClampMinBackward0", "MaximumBackward0")
_ALONG = (
    "Logsumexp", "LogSoftmax", "Softmax", "Amax", "Amin", "MaxBackward0", "MinBackward0", "Diagonal", "Gather", "Sort", "Topk", "NllLoss", "Cumsum",
)  # fmt: skip
"""How the names of nodes begin that tell the rows or columns of a matrix apart."""
_SWAPPED = ("cross_entropy", "binary_cross_entropy", "binary_cross_entropy_with_logits")
"""Functions that are another loss where outputs and targets change places; `kl_div` is the other divergence then."""
_ELEMENTWISE = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "poisson_nll_loss")


class Criteria:
    """Looks at the first calls of each loss function: probabilities where logits belong, and shapes that broadcast.

    What stands between a loss function and `backward` is read from the graph: a constant that is added, and a bound from below.
    """

    def __init__(self) -> None:
        self._shifts: list[tuple[Tensor, Tensor]] = []  # with the loss that has it
        # below the loss or each of its values, below what it was multiplied to, and which share lay there
        self._bounds: list[tuple[float, float, Tensor]] = []
        self._of_values: Tensor | None = None  # the first loss, where each of its values is bounded
        self._last = ""  # line of the loss function that was called last
        self._calls: dict[str, dict[str, Any]] = {}
        self._crossed: list[
            tuple[Any, str, dict[str, Any]]
        ] = []  # node of each since the last backward pass, and what it would be called
        self._targets: dict[
            tuple[str, int], list[Tensor]
        ] = {}  # some numbers of each that outputs were paired with, by its place in the pass
        self._values: dict[str, list[Tensor]] = {}
        self._several: dict[str, list[Tensor]] = {}  # whether targets are classes, and some rows have several
        self.dropped: dict[str, Any] = {"p": 0.0, "line": ""}  # the highest rate of a dropout
        self.settled = False

    def compared(self, name: str, inputs: Any, target: Any, loss: Any) -> None:
        """Take in a call; only those that are trained on count, and of these not the ones within `torch.func`, whose tensors have no values."""
        if name == "dropout" and target > self.dropped["p"] and torch.is_grad_enabled():
            self.dropped = {"p": float(target), "line": own_line()}
        if self.settled or name == "dropout" or not all(map(has_values, (inputs, target, loss))):
            return
        by_hand = name in PAIRED.values()
        if (name in _ELEMENTWISE or by_hand) and not _trained(inputs) and _trained(target):
            inputs, target = target, inputs  # mse_loss(x, model(x)): the same either way round
        swapped = name in _SWAPPED and not _trained(inputs) and _trained(target)
        if not (_trained(inputs) or swapped):
            return
        if by_hand:
            # with each other, as where they are ranked, or the same of every example
            pair = _trained(target)
            # of two that are trained, as parts of a residual are, a view of one of them asks for all pairs
            apart = name == DIFFERENCE and inputs.data_ptr() != target.data_ptr()
            compared = (pair and not apart) or inputs.is_leaf
            longer = max(inputs, target, key=Tensor.dim) if pair else inputs
            further = longer.dim() == min(inputs.dim(), target.dim()) + 1
            asked = further and str(longer.grad_fn).startswith(("<Unsqueeze", "<View")[: 1 + pair])
            if not (compared or asked) and len(self._crossed) < MAX_CALLS:
                given = self._targets.setdefault((name, len(self._crossed)), [])
                given += [target.detach().flatten()[:MAX_NUMBERS].clone()] if len(given) < MAX_CALLS else []
                shapes = [list(inputs.shape), list(target.shape)]
                self._crossed.append(
                    (loss.grad_fn, name, {"calls": 1, "line": own_line(), "broadcast": shapes, "classes": None})
                )
            return
        row = self._calls.setdefault(name, {"calls": 0, "line": own_line(), "broadcast": None, "classes": None})
        row["calls"], row["swapped"] = row["calls"] + 1, row.get("swapped", False) or swapped
        row["made"] = row.get("made") or line_of(inputs)
        self._last = row["line"]
        node: Any = loss.grad_fn if isinstance(loss, Tensor) and loss.numel() == 1 else None
        if node is not None:
            node.metadata[_KEY] = loss.detach()
        if row["calls"] > MAX_CALLS:
            return
        if name in (*_ELEMENTWISE, "kl_div") and isinstance(target, Tensor) and inputs.shape != target.shape:
            both = torch.Size(torch.broadcast_shapes(inputs.shape, target.shape))  # type: ignore[no-untyped-call]
            if both.numel() > max(inputs.numel(), target.numel()):
                row["broadcast"] = [list(inputs.shape), list(target.shape)]
        self._several.setdefault(name, []).extend(_have_several(name, inputs, target))
        if name == "binary_cross_entropy_with_logits" and inputs.numel() > 1 and inputs.is_floating_point():
            with torch.no_grad():
                least, most = inputs.detach().float().aminmax()
                unit = (least >= 0) & (most <= 1) & (least < most) & (not is_unbounded(inputs))
                self._values.setdefault(name, []).append(torch.stack([unit, torch.zeros_like(unit), unit]).float())
        if (
            name in ("cross_entropy", "nll_loss", "kl_div")
            and inputs.ndim >= 2
            and min(inputs.shape[1] - 1, inputs.numel()) > 0
            and inputs.is_floating_point()
        ):
            row["classes"] = inputs.shape[1]
            row["mixed"] = row.get("mixed") or _mixed(inputs)
            with torch.no_grad():
                values = inputs.detach().float()
                axes = (1, -1) if name == "kl_div" else (1,)
                off = torch.stack([(values.sum(axis) - 1).abs().max() for axis in axes]).min()
                least, most = values.aminmax()
                probabilities = (off < 1e-3) & (least >= 0)
                logs = (values.exp().sum(1) - 1).abs().max() < 1e-3
                self._values.setdefault(name, []).append(torch.stack([probabilities, logs, most <= 1]).float())

    def trained(self, losses: Any) -> None:
        """Take in a loss that `backward` is called on: follow its graph through what has one part with a gradient."""
        if self._crossed:
            crossed, self._crossed = self._crossed, []
            near = behind_weights(losses)
            self._calls |= {name: row for node, name, row in crossed if node in near and not _told_apart(node, near)}
        loss = alone_of(losses)
        node, factor = (
            plain_part(loss) if not self.settled and isinstance(loss, Tensor) and loss.numel() == 1 else (None, None)
        )
        added = False
        for _ in range(_FAR):
            if node is None or factor is None:
                return
            value, name = node.metadata.get(_KEY), node.name()
            if value is not None:
                if added and len(self._shifts) < MAX_CALLS:
                    whole = loss.detach() / factor
                    self._shifts.append((whole - value, whole))
                return
            bound = _bound(node, name)
            room = factor > 0 and not added and len(self._bounds) < MAX_BOUNDS
            if name == "MeanBackward0" and room:
                clamp = node.next_functions[0][0]
                values, least = getattr(clamp, "_saved_self", None), _bound(clamp, clamp.name()) if clamp else None
                if isinstance(values, Tensor) and least is not None and least > 0:
                    self._of_values = loss.detach() / factor if self._of_values is None else self._of_values
                    self._bounds.append((least, least * factor, (values.detach() <= least).float().mean()))
                return
            if bound is not None and bound > 0 and room:
                self._bounds.append((bound, bound * factor, loss.detach() / factor <= bound * (1 + 1e-6)))
            elif name not in ("AddBackward0", "SubBackward0"):
                return
            added = added or bound is None
            trained = [parent for parent, _ in node.next_functions if parent is not None]
            node = trained[0] if len(trained) == 1 else None

    def floor(self) -> dict[str, Any]:
        """Return by which constant the loss is shifted, its median there, the bound below it, as it is and as `backward` is given it, and in how many passes it lay there, as JSON values."""
        shifts, losses = [float(shift) for shift, _ in self._shifts], [abs(float(loss)) for _, loss in self._shifts]
        guard = self._of_values is not None and self._bounds[0][0] < _GUARD * float(self._of_values)
        at = [] if guard else [float(reached) for *_, reached in self._bounds]
        return {
            "shifts": [min(shifts), max(shifts)] if shifts else None, "shifted_loss": median(losses) if losses else None, "bound": self._bounds[-1][0] if at else None,
            "bound_given": self._bounds[-1][1] if at else None, "passes": len(at), "at_bound": sum(at), "of_values": self._of_values is not None, "line": self._last,
        }  # fmt: skip

    def settle(self) -> None:
        """Look no more."""
        self.settled = True

    def to_dict(self) -> dict[str, Any]:
        """Return one row a loss function, as JSON values."""
        found = {}
        for name, row in self._calls.items():
            seen = (
                torch.stack(self._values[name]).cpu().all(0).tolist() if self._values.get(name) else [None, None, None]
            )
            targets = [given for (whose, _), given in self._targets.items() if whose == name]
            same = bool(targets) and all(
                len(given) > 1 and all(torch.equal(given[0], each) for each in given) for given in targets
            )
            sums = torch.stack(self._several[name]).cpu() if self._several.get(name) else None
            several = sums is not None and bool(sums[:, 0].all() and sums[:, 1].any())
            found[name] = row | {"several": several, "same_target": same, "probabilities": seen[0], "log_probabilities": seen[1]}  # fmt: skip
        return found


def _told_apart(node: Any, near: set[Any]) -> bool:
    """Tell whether what a matrix of all pairs goes through tells its rows or columns apart: it is asked for, by whoever picks, masks or weighs some pairs."""
    users: dict[Any, list[Any]] = {}
    for user in near:
        for parent, _ in user.next_functions:
            users.setdefault(parent, []).append(user)
    pairs, stack, seen = _numbers(node), [node], set[Any]()
    while stack:
        above = [user for user in users.get(stack.pop(), ()) if user not in seen]
        seen.update(above)
        stack += above
    masks = (constant_of(user) for user in seen)
    products = (
        parent for user in seen for parent, _ in user.next_functions if parent is not None and parent not in near
    )
    return (
        any(user.name().startswith(_ALONG) for user in seen)
        or any(mask is not None and mask.numel() >= pairs for mask in masks)
        or any(_numbers(product) >= pairs for product in products)
    )


def _mixed(rows: Tensor) -> list[list[int]] | None:
    """Return the shape before and after a view of (examples, classes, places) as (rows, classes), which mixes places and classes; None where there is none."""
    node: Any = rows.grad_fn
    before = [*getattr(node, "_saved_self_sym_sizes", ())] if rows.dim() == 2 and "View" in type(node).__name__ else []
    classes = rows.shape[-1]
    mixes = before[1:2] == [classes] != before[-1:] and math.prod(before[2:]) > 1
    return [before, list(rows.shape)] if mixes else None


def _have_several(name: str, inputs: Tensor, target: Any, *, most: int = 100) -> Iterator[Tensor]:
    """Return whether targets are 0 or 1 and the loss makes classes exclude each other, and whether some example has several of them.

    Of more than `most` classes (rule of thumb) they may be items that a multinomial counts, and of as many as there are examples pairs of these.
    """
    known = (
        name in _SWAPPED and isinstance(target, Tensor) and target.is_floating_point() and inputs.shape == target.shape
    )
    if not known or inputs.dim() < 2 or not 2 < inputs.shape[1] <= most or len(inputs) == inputs.shape[1]:
        return
    sums = inputs.detach().float().sum(1)
    ones = torch.full_like(sums, name == "cross_entropy") + (name == "binary_cross_entropy") * ((sums - 1).abs() < 1e-3)
    classes = ((target == 0) | (target == 1)).all()
    yield torch.stack([classes & ones.bool().all(), (target.sum(1) > 1).any()])


def _numbers(node: Any) -> int:
    return max((math.prod(each.shape) for each in node._input_metadata), default=0)


def _trained(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _bound(node: Any, name: str) -> float | None:
    """Return the number below which a node lets nothing pass; None where it has none, or it lies on a device that would have to be waited for."""
    found = getattr(node, "_saved_min", getattr(node, "_saved_other", None)) if name in _BOUNDS else None
    if isinstance(found, Tensor):
        return float(found) if found.numel() == 1 and found.device.type == "cpu" and not found.requires_grad else None
    return float(found) if isinstance(found, (int, float)) else None
