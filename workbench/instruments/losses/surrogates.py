"""`Surrogates`: what the graph of a loss tells of whether it measures progress at all."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from workbench.instruments.losses.graphs import constant_of
from workbench.instruments.order import alone_of

LOOKS, MOST_NODES, MOST_DRAWN, MOST_COUNTS = 20, 2000, 10_000, 200
"""Backward passes whose weights are read, nodes of a graph, choices, and numbers of classes, that are kept (rules of thumb)."""
_LINEAR = (
    "Mean", "Sum", "Neg", "Add", "Sub", "Div", "Mul", "Dot", "Stack", "Cat", "Squeeze", "Unsqueeze", "View", "Reshape", "Select", "Slice", "Index", "Expand",
    "Clone", "Minimum", "Maximum", "NllLoss",
)  # fmt: skip
_LIKELIHOODS = ("LogBackward", "Log1p", "LogSoftmax", "Logsumexp", "LogSigmoid", "NllLoss", "BinaryCrossEntropy")
"""How the names of nodes begin that a log-probability is made of, beside the square of a normal distribution's."""
_SCALARS = 3
"""Single numbers that have to change for it (rule of thumb)."""


class Surrogates:
    """Reads the weights of a sum of log-probabilities, and the number of classes, off the graph that is there anyway.

    A likelihood has no weights below zero; those of a policy gradient, the advantages, have both signs. Where its weights are positive,
    as returns without a baseline, what they weigh are choices that were drawn from the model itself.
    """

    def __init__(self) -> None:
        self._looks: list[
            list[tuple[Tensor, Tensor, bool]]
        ] = []  # least and largest of each tensor of weights, and whether of choices
        self.drawn: list[Tensor] = []  # choices since the last backward pass
        self._classes: list[tuple[int, int]] = []  # with the update
        self._counted = set[tuple[int, bool]]()  # the class that a loss leaves out, and whether all others count alike

    def drew(self, choices: Any) -> None:
        """Take in what `torch.multinomial` gave."""
        if isinstance(choices, Tensor) and len(self.drawn) < MOST_DRAWN:
            self.drawn.append(choices)

    def trained(self, losses: Any, head: set[Any], update: int, *, near: bool) -> None:
        """Take in a loss that `backward` is about to be called on, and what it does to the outputs of the last layer."""
        drawn = {t.untyped_storage().data_ptr() for t in self.drawn}
        root = alone_of(losses)
        seen = []
        for node in _terms(root, head):
            parents = [parent for parent, _ in node.next_functions if parent is not None]
            if node.name().startswith("NllLoss"):
                self._count(parents[0], update)
                alike = node._saved_reduction > 0 and node._saved_weight is None
                self._counted.add((int(node._saved_ignore_index), alike))
            elif near and len(self._looks) < LOOKS and (weights := constant_of(node)) is not None:
                behind = _behind(parents[0], head)
                squares = _behind(parents[0], head, norms=False)
                if any(each.name().startswith(_LIKELIHOODS) for each in behind) or any(
                    getattr(each, "_saved_exponent", None) == 2 for each in squares
                ):
                    chosen = any(index in drawn for each in behind for index in _indices(each))
                    seen.append((*weights.detach().aminmax(), chosen))
        if near and len(self._looks) < LOOKS:
            self._looks.append(seen)

    def _count(self, node: Any, update: int) -> None:
        found: Any = node._saved_result.shape if node.name() == "LogSoftmaxBackward0" else ()
        if len(found) > 1:
            self._classes.append((update, int(found[1])))
            if len(self._classes) > MOST_COUNTS:
                del self._classes[1::2]

    def to_dict(self) -> dict[str, Any]:
        """Return in how many looks log-probabilities had weights of both signs, or of the model's own choices, and the numbers of classes, as JSON values."""
        looks = [{(float(least), float(most), own) for least, most, own in look} for look in self._looks]
        often = Counter(row for look in looks for row in look)
        # that come again are coefficients
        alone = [row for row, count in often.items() if row[0] == row[1] and count == 1]
        below, above = (sum(sign * weight > 0 for weight, *_ in alone) for sign in (-1, 1))
        signs, chosen = min(below, above) >= _SCALARS, sum(own for *_, own in alone) >= _SCALARS
        return {
            "looks": len(looks), "both_signs": sum(signs or any(least < 0 < most for least, most, _ in look) for look in looks),
            "chosen": sum(chosen or any(own and least < most for least, most, own in look) for look in looks), "classes": self._classes,
            "counted": sorted(self._counted),
        }  # fmt: skip


def _terms(loss: Any, head: set[Any]) -> Iterator[Any]:
    """Iterate over the nodes that a loss is a sum of products of numbers with."""
    stack: list[Any] = [loss.grad_fn] if isinstance(loss, Tensor) else []
    seen = set[Any]()
    while stack:
        node = stack.pop()
        if node in seen or node not in head or not node.name().startswith(_LINEAR):
            continue
        seen.add(node)
        yield node
        name, parents = node.name(), [parent for parent, _ in node.next_functions]
        both = None not in parents
        if name.startswith(("Maximum", "Minimum")) == both or not name.startswith(("Mul", "Div", "Dot", "Max", "Min")):
            stack += [parent for parent in parents if parent is not None]


def _behind(node: Any, head: set[Any], *, norms: bool = True) -> set[Any]:
    """Return the nodes behind this one; without `norms` none under a root, or that is divided by."""
    stack, seen = [node], set[Any]()
    while stack:
        node = stack.pop()
        if node in seen or node not in head or (not norms and node.name().startswith(("Sqrt", "Rsqrt", "Reciprocal"))):
            continue
        seen.add(node)
        divides = node.name().startswith("Div") and not norms
        stack += [parent for parent, _ in node.next_functions[: 1 if divides else None] if parent is not None]
    return seen


def _indices(node: Any) -> list[int]:
    """Return where the indices lie by which a node takes numbers out of others."""
    given = [getattr(node, name, None) for name in ("_saved_index", "_saved_target", "_saved_indices")]
    flat = itertools.chain.from_iterable(each if isinstance(each, (tuple, list)) else (each,) for each in given)
    return [each.untyped_storage().data_ptr() for each in flat if isinstance(each, Tensor)]
