"""`Written`: which loss function of torch a loss is whose call was not seen, as it is written by hand, and the outputs and targets that it compares; `Reproduced`: whether outputs that are to be the inputs follow them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from workbench.instruments.losses.classes import Compared, along, softmax_behind
from workbench.instruments.losses.graphs import constant_of
from workbench.instruments.order import alone_of

_FAR, _MOST = 16, 64
"""Nodes between a loss and what it compares, and differences of an update that are kept (rules of thumb)."""
_OF_TORCH = {
    "NllLossBackward0": "cross_entropy", "MseLossBackward0": "mse_loss", "SmoothL1LossBackward0": "smooth_l1_loss", "HuberLossBackward0": "huber_loss",
    "BinaryCrossEntropyBackward0": "binary_cross_entropy", "BinaryCrossEntropyWithLogitsBackward0": "binary_cross_entropy_with_logits",
}  # fmt: skip
"""Nodes of loss functions that were not seen to be called, as a program had their names before."""
_THROUGH = ("Neg", "Mean", "Sum", "Div", "Mul", "Add", "Log", "Clamp", "View", "Squeeze", "Unsqueeze", "Select", "ToCopy")  # fmt: skip
"""How the names of nodes begin that a mean of losses goes through: none that weighs one example against another."""


class Written:
    """Follows the graph of a loss to the classes that are picked from a softmax, or to a difference that is squared or made absolute."""

    def __init__(self) -> None:
        self._differences: list[tuple[Any, Tensor, Tensor]] = []

    def differs(self, one: Tensor, other: Tensor, result: Tensor) -> None:
        """Take in a difference of two tensors of a shape, of which one is trained."""
        if result.grad_fn is not None and len(self._differences) < _MOST:
            outputs, target = (one, other) if one.requires_grad else (other, one)
            self._differences.append((result.grad_fn, outputs, target))

    def compared(self, losses: Any) -> Compared | None:
        """Return what a loss compares that `backward` is about to be called on; None where they are not seen."""
        differences, self._differences = self._differences, []
        loss = alone_of(losses)
        node: Any = loss.grad_fn if isinstance(loss, Tensor) else None
        for _ in range(_FAR):
            if node is None:
                return None
            parents = [parent for parent, _ in node.next_functions if parent is not None]
            name = node.name()
            if name in _OF_TORCH:
                return _OF_TORCH[name], node._saved_self, node._saved_target, loss
            square = getattr(node, "_saved_exponent", None) == 2 or (
                name == "MulBackward0" and len({*parents}) < len(parents)
            )
            if square or name == "AbsBackward0":
                pairs = [(outputs, target) for made, outputs, target in differences if made is parents[0]]
                return ("mse_loss" if square else "l1_loss", *pairs[0], loss) if pairs else None
            if (picked := _picked(node)) is not None:
                return ("cross_entropy", *picked, loss)
            weights = constant_of(node)
            if len(parents) != 1 or not name.startswith(_THROUGH) or (weights is not None and weights.numel() > 1):
                return None
            node = parents[0]
        return None


_ROWS, _NUMBERS = 16, 2**22
"""Examples of a batch at least, as fewer follow anything by chance, and its numbers at most (rules of thumb)."""


class Reproduced:
    """Asks of a loss that compares outputs with the inputs, as autoencoders have it, how far the outputs follow what the examples of a batch differ by.

    Attributes:
        given: what the model was given last.
    """

    def __init__(self) -> None:
        self.given: Tensor | None = None
        self._looks: list[tuple[int, Tensor]] = []
        self._due = 0

    def trained(self, head: Iterable[Any], update: int) -> None:
        """Take in what a loss that `backward` is about to be called on does to the outputs of the last layer."""
        given, self.given = self.given, None
        if given is None or update < self._due or given.grad_fn is not None or not given.is_floating_point():
            return
        node = next((each for each in head if each.name() in _OF_TORCH and each.name() != "NllLossBackward0"), None)
        if node is None or not given.dim() or len(given) < _ROWS or given.numel() > _NUMBERS:
            return
        with torch.no_grad(), contextlib.suppress(RuntimeError):  # what a node holds may have been changed in place
            parts = [given, node._saved_target, node._saved_self]
            inputs, target, outputs = (part.detach().reshape(len(given), -1).float() for part in parts)
            if inputs.shape == target.shape == outputs.shape:
                self._due = update + max(update // 20, 1)
                self._looks.append((update, torch.stack([_followed(inputs, target), _followed(outputs, target)])))

    def to_dict(self) -> list[tuple[int, float, float]]:
        """Return update and squared correlation of the inputs, and of the outputs, with the targets of each look, as JSON values."""
        return [(update, float(found[0]), float(found[1])) for update, found in self._looks]


def _followed(one: Tensor, other: Tensor) -> Tensor:
    """Return the squared correlation of two tables, the mean of each column left out."""
    one, other = one - one.mean(0), other - other.mean(0)
    return (one * other).sum().square() / (one.square().sum() * other.square().sum()).clamp(min=1e-30)


def _picked(node: Any) -> tuple[Tensor, Tensor] | None:
    """Return log-probabilities, shape (places, classes), and the class that a node picks of each; None where it does not, or a device would have to be waited for."""
    name, found = node.name(), None
    if name == "GatherBackward0":
        axis = along(node._saved_dim, node._saved_index.dim())
        found = node._saved_index.squeeze(axis) if node._saved_index.shape[axis] == 1 else None
    elif name == "IndexBackward0" and len(node._saved_indices) == 2:
        (rows, classes), axis = node._saved_indices, 1
        if rows is not None and classes is not None and rows.is_cpu and torch.equal(rows, torch.arange(len(rows))):
            found = classes
    elif (weights := constant_of(node)) is not None and weights.dim() > 1 and weights.is_cpu:
        axis = weights.dim() - 1
        hot = bool(((weights == 0) | (weights == 1)).all()) and bool((weights.sum(axis) == 1).all())
        found = weights.argmax(axis) if hot else None
    parent = next((each for each in node.next_functions if each[0] is not None), None)
    end = softmax_behind(parent[0], parent[1], axis) if found is not None and parent is not None else None
    if found is None or end is None or end[1] is None:
        return None
    values = end[0]._saved_result.movedim(end[1], -1)
    values = (
        values if end[0].name().startswith("Log") else values.log().clamp(min=-100.0)
    )  # as torch's binary cross-entropy
    return (values.flatten(0, -2), found.flatten()) if values.shape[:-1].numel() == found.numel() else None
