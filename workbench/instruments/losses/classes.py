"""`Classes`: whether the probabilities that a loss picks a class from sum to 1 over the classes, or over something else; `Recall`: how many of each class are right; `turned_axes`: views and attention that take one axis for another."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections import deque
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor

from workbench.instruments.caller import own_line
from workbench.instruments.losses.graphs import constant_of, unweighed

Compared = tuple[str, Tensor, Tensor, Tensor]
"""Loss function, outputs, targets and loss."""
LOOKS, _FAR, _LAST, _MOST = 5, 16, 20, 2**20
"""Backward passes that are looked at, nodes between a softmax and the choice of a class, last batches in which classes are counted, and numbers of outputs of one (rules of thumb)."""
_SHAPED = ("View", "UnsafeView", "Reshape", "Unsqueeze", "Squeeze")
_KEPT = ("Neg", "Log", "Add", "Sub", "Mul", "Div", "Clamp", "ToCopy", "Clone", "Alias", "Expand", "Slice", "NativeDropout")  # fmt: skip
"""How the names of nodes begin that lay numbers out anew, and that leave each axis where it is."""


class Classes:
    """Follows, in a loss's graph, the axis along which it picks a class back to the softmax, which has an axis of its own."""

    def __init__(self) -> None:
        self._looks: list[list[Tensor]] = []  # of each softmax that a class is picked from, whether over another axis
        self._found: dict[str, Any] = {}

    def trained(self, head: set[Any]) -> None:
        """Take in what a loss that `backward` is about to be called on does to the outputs of the last layer."""
        if len(self._looks) < LOOKS:
            self._looks.append([wrong for node in head for wrong in self._wrong(node)])

    def _wrong(self, node: Any) -> Iterator[Tensor]:
        picked, above = (
            _picked(node),
            next(((parent, k) for parent, k in node.next_functions if parent is not None), None),
        )
        ends = [] if above is None else [softmax_behind(*above, axis) for axis in range(len(picked))]
        if picked and ends and ends[0] is not None:
            softmax, rights = ends[0][0], torch.stack(picked)
            shape = softmax._saved_result.shape
            own = along(softmax._saved_dim, len(shape))
            fits = torch.tensor([end is None or end[1] in (own, None) for end in ends])
            self._found |= {"log": "Log" in softmax.name(), "shape": list(shape), "axis": own, "line": own_line()}
            yield rights.any() & ~(rights & fits.to(rights.device)).any() & (shape[own] > 1)

    def to_dict(self) -> dict[str, Any] | None:
        """Return in how many of the passes a softmax runs over another axis than the classes, as JSON values; None where no class is picked from one."""
        looks = [[bool(wrong) for wrong in look] for look in self._looks if look]
        return self._found | {"looks": len(looks), "wrong": sum(map(any, looks))} if looks else None


class Recall:
    """Counts how many of each class are right in the batches of the later half of the updates that were looked at, as far as a loss shows its targets."""

    def __init__(self) -> None:
        self._last: deque[tuple[int, Tensor]] = deque(maxlen=_LAST)  # update; targets, and what was said
        self._due = 0

    def trained(self, compared: Compared | None, update: int) -> None:
        """Take in what a loss compares that `backward` is about to be called on, as `Written` reads it."""
        if compared is None or update < self._due or not compared[0].endswith(("cross_entropy", "with_logits")):
            return
        self._due, (_, outputs, target, _) = update + max(update // (2 * _LAST), 1), compared
        if target.dim() and 0 < len(target) == target.numel() and outputs.numel() <= _MOST:
            logits = outputs.detach().reshape(len(target), -1)
            said = logits.argmax(1) if logits.shape[1] > 1 else (logits[:, 0] > 0).long()
            self._last.append((update, torch.stack([target.flatten().long(), said])))

    def to_dict(self, updates: int) -> list[dict[str, Any]]:
        """Return "class", "total" and "correct" of each class, as JSON values."""
        late = [each.cpu() for update, each in self._last if 2 * update >= updates]
        targets, said = torch.cat(late, 1) if late else torch.zeros(2, 0)
        right = targets == said
        return [{"class": c, "total": int((targets == c).sum()), "correct": int((right & (targets == c)).sum())} for c in targets.unique().tolist()]  # fmt: skip


def turned_axes(nodes: Collection[Any], *, near: int = 64) -> dict[str, Any] | None:
    """Return the first node of a graph that takes one axis for another, and what it does to which shape; None where none does.

    It may be a view that gives the shape of a permutation, as `out.reshape(B, N, C)` of (B, heads, N, C / heads) without a transpose. What is filled up
    before or cut off after it, as for relative positions, is shifted so on purpose, and what is viewed back before a product takes it, as in blocks of a
    norm, is where it was. Or it is a softmax of as many queries as keys that weighs, as it is, a sum over its last axis and has another one. Fewer clusters, slots or
    features that places are shared out among compete on purpose, as do learned ones. `near` is the number of nodes that are looked at before a product (rule of thumb).
    """
    cut = {parent for node in nodes if node.name().startswith(("Slice", "Index")) for parent, _ in node.next_functions}
    for node in sorted(nodes, key=lambda each: each._sequence_nr()):
        name, parent = node.name(), next((parent for parent, _ in node.next_functions if parent is not None), None)
        if parent is None:
            continue
        if name in _VIEWS and node not in cut and not parent.name().startswith(("Cat", "ConstantPad", "Slice")):
            before, after = _sizes(node)
            back = (each for each in nodes if each.name() in _VIEWS and _sizes(each) == (after, before))
            if turns(before, after) and not any(
                node in unweighed([each], most=near) or each in unweighed([node], most=near) for each in back
            ):
                return {"node": node, "before": [*before], "after": [*after]}
        elif name == "BmmBackward0" and not _is_learned(node.next_functions[1][0]):
            weights, place = node.next_functions[0]
            found, axis = (weights and softmax_behind(weights, place, 2)) or (None, None)
            if found is None or "Log" in found.name() or not _of_products(found):
                continue
            shape = found._saved_result.shape
            own = along(found._saved_dim, len(shape))
            if own != axis == len(shape) - 1 and shape[own] > 1 and shape[-1] == shape[-2]:
                return {"node": node, "shape": [*shape], "axis": own, "summed": axis}
    return None


def _sizes(view: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(view._saved_self_sym_sizes), tuple(view._input_metadata[0].shape)


def _is_learned(node: Any) -> bool:
    """Tell whether a factor is a parameter, laid out anew, or not trained."""
    while node is not None and node.name().startswith(
        (*_SHAPED, "Expand", "Transpose", "TBackward", "Permute", "Clone")
    ):
        node = node.next_functions[0][0]
    return node is None or node.name() == "torch::autograd::AccumulateGrad"


_VIEWS = ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0")


@functools.lru_cache(maxsize=4096)
def turns(before: tuple[int, ...], after: tuple[int, ...], *, most: int = 5) -> bool:
    """Tell whether a view gives the shape of a permutation of up to `most` axes, and none that merges or splits neighbours.

    Where sizes divide each other it may also stack neighbours, as frames in pairs, so that only heads, or places, that go in or out of an axis are told then.
    """
    few, many = sorted(([n for n in shape if n > 1] for shape in (before, after)), key=len)
    if len(few) < 2 or len(many) > most:
        return False
    cuts, others = (set(itertools.accumulate(sizes, operator.mul)) for sizes in (few, many))
    every = sorted(cuts | others)
    sides = itertools.groupby(every, key=lambda cut: cut in cuts and cut in others)
    apart = [{cut in cuts for cut in run} for both, run in sides if not both]
    stacks = all(not b % a for a, b in itertools.pairwise(every)) and (len(few), len(many)) != (3, 4)
    if all(len(side) < 2 for side in apart) or stacks:
        return False
    return any(cuts <= set(itertools.accumulate(order, operator.mul)) for order in itertools.permutations(many))


def _of_products(softmax: Any) -> bool:
    """Tell whether what a softmax is given are products of what is trained, as of queries and keys."""
    nodes = [softmax]
    for _ in range(_FAR):
        nodes = [parent for node in nodes for parent, _ in node.next_functions if parent is not None]
        if any(node.name() == "BmmBackward0" for node in nodes):
            return not any(_is_learned(p) for node in nodes for p, _ in node.next_functions)
        nodes = [node for node in nodes if node.name().startswith((*_KEPT, *_SHAPED, "MaskedFill", "Where", "Transpose", "Permute"))]  # fmt: skip
    return False


def _picked(node: Any) -> list[Tensor]:
    """Return of each axis of what a node is given whether classes may be picked along it; nothing where none are."""
    name = node.name()
    if name in ("NllLossBackward0", "NllLoss2DBackward0"):
        dims = node._saved_self.dim()
        return [torch.tensor(axis == min(1, dims - 1)) for axis in range(dims)]
    if name == "GatherBackward0":
        index = node._saved_index
        axis = along(node._saved_dim, index.dim())
        return [torch.tensor(k == axis) for k in range(index.dim())] if index.shape[axis] == 1 else []
    if name == "IndexBackward0":  # of two the one that has no row of its own for each example
        given = [each for each in node._saved_indices if each is not None]
        if len(given) != 2 or any(each.dim() != 1 or each.dtype == torch.bool for each in given):
            return []
        own = iter(torch.stack([(each.sort().values.diff() > 0).all() for each in given]))
        alone = [next(own) if each is not None else torch.tensor(False) for each in node._saved_indices]
        alone += [torch.tensor(False)] * (len(node._saved_self_sym_sizes) - len(alone))
        return [~each for each in alone]
    weights = constant_of(node)  # targets, where they sum to 1 along some axis
    if weights is None or weights.dim() < 2 or tuple(weights.shape) != tuple(node._input_metadata[0].shape):
        return []
    totals = [weights.sum(axis) for axis in range(weights.dim())]
    sums = torch.stack([((t == 0) | ((t - 1).abs() < 1e-3)).all() & (size > 1) for t, size in zip(totals, weights.shape, strict=True)])  # fmt: skip
    return list(sums | ~sums.any())


def along(value: int, dims: int) -> int:
    """Return an axis that a node has saved, which counts from the end where it is below 0."""
    return (value - 2**64 if value >= 2**63 else value) % max(dims, 1)


def softmax_behind(node: Any, place: int, at: int) -> tuple[Any, int | None] | None:
    """Return the softmax behind output number `place` of a node, and which of its axes is axis `at` there, None where that is one of several; None where something else stands between."""
    axis: int | None = at
    for _ in range(_FAR):
        name, shape = node.name(), node._input_metadata[place].shape
        if name in ("LogSoftmaxBackward0", "SoftmaxBackward0"):
            return node, axis
        parents = [pair for pair in node.next_functions if pair[0] is not None]
        if len(parents) != 1 or not parents[0][0].next_functions:
            return None
        below, place = parents[0]
        before = below._input_metadata[place].shape
        if name.startswith(("Transpose", "TBackward")):
            one, other = (along(getattr(node, f"_saved_dim{k}", k), len(shape)) for k in (0, 1))
            axis = {one: other, other: one}.get(axis, axis) if axis is not None else None
        elif name.startswith("Permute"):
            axis = None if axis is None else along(node._saved_dims[axis], len(shape))
        elif name.startswith(_SHAPED):
            key = None if axis is None else (shape[axis], math.prod(shape[axis + 1 :]))
            axis = next((k for k, size in enumerate(before) if (size, math.prod(before[k + 1 :])) == key), None)
        elif not name.startswith(_KEPT) or len(before) != len(shape):
            return None
        node = below
    return None
