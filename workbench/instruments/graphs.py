"""`Graphs`: which graphs of past losses are still held, and which parameters a loss depends on."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

MAX_NODES = 50_000
WALKS = 3
_DEPTH = 8
_KEY = "workbench"


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

    def backward(self, losses: Any) -> None:
        """Take in the losses of a backward pass that is about to begin."""
        roots = _nodes(losses)
        if not roots:
            return
        self.most = max(self.most, len(self._alive))
        if _mark(roots[0], self._alive):
            self.marked += 1
        if self._walks < WALKS:
            self._walks += 1
            self.leaves |= {id(p): p for p in _parameters(roots)}

    def to_dict(self) -> dict[str, Any]:
        """Return how many graphs were marked, and how many of them were held at once."""
        return {"marked": self.marked, "held": max(self.most, len(self._alive))}


def _nodes(losses: Any) -> list[Any]:
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


def _parameters(roots: list[Any]) -> Iterator[nn.Parameter]:
    seen: set[Any] = set()
    stack = list(roots)
    while stack and len(seen) < MAX_NODES:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter):
            yield leaf
        stack += [parent for parent, _ in node.next_functions if parent is not None]
