"""`Graphs`: which graphs of past losses are still held, and which parameters a loss depends on."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from workbench.instruments.order import SCALED

MAX_NODES = 50_000
WALKS = 8
"""Backward passes whose whole graph is walked; every power of two of those that keep theirs is walked as well, to see it grow."""
_DEPTH = 8
_NEAR = 64
"""Nodes of a loss's graph among which a GradScaler's is looked for (rule of thumb)."""
WEIGHS = ("Addmm", "Mm", "Bmm", "Addbmm", "Baddbmm", "Mv", "Convolution", "Embedding", "ScaledDot")
"""How the names of nodes begin that give what layers with weights give."""
_SHAPES = (
    "View", "UnsafeView", "Reshape", "Squeeze", "Unsqueeze", "Select", "Slice", "Transpose", "TBackward", "Permute", "ToCopy", "Add",
)  # fmt: skip
"""How those begin that hand on the range of what they are given; a sum does where it is the bias of a layer."""
_KEY, _UPDATE = "workbench", "workbench update"


class _Mark:
    """Stands in the graph of one loss and lives as long as it."""

    __slots__ = ("__weakref__",)


class Graphs:
    """Marks the graphs of losses that are trained on.

    A loss whose graph is freed takes its mark along; `total += loss` keeps them all. The parameters that the first losses depend on
    are the leaves of their graphs, whatever module they belong to.
    """

    def __init__(self) -> None:
        self._alive: weakref.WeakSet[_Mark] = weakref.WeakSet()
        self._walks = 0
        self.marked = self.most = 0
        self.leaves: dict[int, nn.Parameter] = {}
        self.lookups: list[Any] = []  # nodes of embeddings, of the graph that is walked just now
        self._passes = self._retained = 0
        self._sizes: list[list[int]] = []  # of graphs that are kept: number of the pass, and nodes
        self._earlier = 0  # updates whose graphs are part of the last of them

    def backward(self, losses: Any, *, retained: bool, update: int) -> set[int] | None:
        """Take in the losses of a backward pass that is about to begin in an update, and return the leaves of their graph where it is walked."""
        roots = roots_of(losses)
        if not roots:
            return None
        self._passes += 1
        self._retained += retained
        self.most = max(self.most, len(self._alive))
        if _mark(roots[0], self._alive):
            self.marked += 1
        if self._walks >= WALKS and not (retained and self._retained & (self._retained - 1) == 0):
            return None
        self._walks += 1
        leaves, nodes = walked(roots)
        self.lookups = [node for node in nodes if node.name() == "EmbeddingBackward0"]
        count = len(nodes)
        self.leaves |= {id(leaf): leaf for leaf in leaves if isinstance(leaf, nn.Parameter)}
        if retained:
            self._sizes.append([self._passes, count])
            earlier = _stamped(nodes, update)
            if count < MAX_NODES:  # else the walk ends before it is there
                self._earlier = earlier
        return {id(leaf) for leaf in leaves}

    def to_dict(self) -> dict[str, Any]:
        """Return how many graphs were marked, how many of them were held at once, and how many were kept by their own backward pass."""
        return {
            "marked": self.marked, "held": max(self.most, len(self._alive)), "passes": self._passes, "retained": self._retained,
            "sizes": self._sizes, "earlier_updates": self._earlier,
        }  # fmt: skip


def is_unbounded(value: Tensor) -> bool:
    """Tell whether a layer with weights gives this, in another shape at most: any number can come out of it, whatever did so far."""
    nodes = [value.grad_fn]
    for _ in range(_DEPTH):
        names = [node.name() for node in nodes if node is not None]
        if any(name.startswith(WEIGHS) for name in names):
            return True
        if not any(name.startswith(_SHAPES) for name in names):
            return False
        nodes = [
            parent
            for node in nodes
            if node is not None and node.name().startswith(_SHAPES)
            for parent, _ in node.next_functions
        ]
    return False


def roots_of(losses: Any) -> list[Any]:
    """Return the nodes of losses, given one by one or in a list, that have a graph."""
    given = losses if isinstance(losses, (list, tuple)) else [losses]
    return [loss.grad_fn for loss in given if isinstance(loss, Tensor) and loss.grad_fn is not None]


def _mark(node: Any, alive: weakref.WeakSet[_Mark]) -> bool:
    """Put one mark into a loss's node and those before it; False where one of them was there already, as in a graph that is used again."""
    mark = _Mark()
    chain = []
    for _ in range(_DEPTH):
        if node is None or not node.next_functions:  # a leaf lives as long as its parameter
            break
        chain.append(node)
        node = node.next_functions[0][0]
    if any(_KEY in link.metadata for link in chain):
        return False
    for link in chain:
        link.metadata[_KEY] = mark
    alive.add(mark)
    return True


def walked(roots: list[Any]) -> tuple[list[Tensor], set[Any]]:
    """Return the leaves of a graph, and its nodes, up to `MAX_NODES`."""
    seen: set[Any] = set()
    leaves, stack = [], list(roots)
    while stack and len(seen) < MAX_NODES:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor):
            leaves.append(leaf)
        stack += [parent for parent, _ in node.next_functions if parent is not None]
    return leaves, seen


def note_scaled(losses: Any, results: Any, scale: Callable[[Tensor], Tensor]) -> None:
    """Note in the graphs of losses that a GradScaler scaled what they were; `scale` does it once more."""
    several = isinstance(losses, (list, tuple))
    for loss, result in zip(losses, results, strict=True) if several else [(losses, results)]:
        node: Any = result.grad_fn if isinstance(result, Tensor) else None
        if node is not None:
            node.metadata[SCALED] = (loss, scale)


def unscaled(loss: Any) -> Any:
    """Return a loss as it was before a GradScaler scaled it, or the parts that it was made of since."""
    node: Any
    stack, seen = roots_of(loss), 0
    while stack and seen < _NEAR:
        node, seen = stack.pop(0), seen + 1
        if SCALED in node.metadata:
            before, scale = node.metadata[SCALED]
            if node is loss.grad_fn:
                return before
            with torch.enable_grad():
                whole: Tensor = loss / scale(torch.ones((), device=loss.device))
            node = whole.grad_fn
            node.metadata[SCALED] = (loss, scale)
            return whole
        stack += [parent for parent, _ in node.next_functions if parent is not None]
    return loss


def behind_weights(losses: Any, *, most: int = MAX_NODES) -> set[Any]:
    """Return the nodes of a graph that no product with weights, nor lookup, stands behind: what is done to the outputs of the last layer."""
    return unweighed(roots_of(losses), most=most)


def unweighed(nodes: Iterable[Any], *, most: int = MAX_NODES) -> set[Any]:
    """Return these nodes and those behind them that no product with weights, nor lookup, stands between."""
    seen: set[Any] = set()
    stack = list(nodes)
    while stack and len(seen) < most:
        node = stack.pop()
        if node not in seen and not node.name().startswith(WEIGHS):
            seen.add(node)
            stack += [parent for parent, _ in node.next_functions if parent is not None]
    return seen


def constant_of(node: Any) -> Tensor | None:
    """Return what a product multiplies with, where that is not trained."""
    names = {"MulBackward0": ("_saved_self", "_saved_other"), "DotBackward0": ("_saved_self", "_saved_tensor")}
    trained = [parent for parent, _ in node.next_functions if parent is not None]
    given = [getattr(node, name, None) for name in names.get(node.name(), ())] if len(trained) == 1 else []
    return next((each for each in given if isinstance(each, Tensor) and not each.requires_grad), None)


def _stamped(nodes: set[Any], update: int) -> int:
    """Note in the nodes of a graph in which update they were seen first, and return in how many updates before this one some were."""
    earlier = set()
    for node in nodes:
        if node.next_functions:  # a leaf lives as long as its parameter
            first = node.metadata.setdefault(_UPDATE, update)
            if first < update:
                earlier.add(first)
    return len(earlier)
