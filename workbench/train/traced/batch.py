"""A batch as a program sees it: its tensors are inputs, everything else is part of the program."""

from __future__ import annotations

import enum
import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from workbench.train.traced.cannot_batch import CannotBatch
from workbench.train.traced.graph.nodes import is_dense

__all__ = ["BatchLayout", "SplitBatch", "split_batch", "stack_batches"]

_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), enum.Enum, torch.dtype, torch.device)


@dataclass(frozen=True)
class BatchLayout:
    """What two batches must have in common for one program to take both.

    Attributes:
        examples: in the batch.
        tensors: shape, strides and type of each tensor.
        constants: where each other value lies among the leaves, its type, and what it is.
        tree: how the leaves are nested.
    """

    examples: int
    tensors: tuple[tuple[torch.Size, tuple[int, ...], torch.dtype], ...]
    constants: tuple[tuple[int, type, Hashable], ...]
    tree: str
    spec: TreeSpec

    def __eq__(self, other: object) -> bool:
        """Compare all but the tree itself, which its text stands for."""
        return isinstance(other, BatchLayout) and self._key() == other._key()

    def __hash__(self) -> int:
        """Hash what `__eq__` compares."""
        return hash(self._key())

    def rebuild(self, tensors: Sequence[Any]) -> Any:
        """Return the batch with these tensors in it."""
        leaves = list(tensors)
        for position, _, value in self.constants:
            leaves.insert(position, value)
        return tree_unflatten(leaves, self.spec)

    def _key(self) -> Hashable:
        return self.examples, self.tensors, self.constants, self.tree


SplitBatch = tuple[list[Tensor], BatchLayout]


def split_batch(batch: Any, examples: int) -> SplitBatch:
    """Return the tensors of a batch and its layout.

    Raises:
        CannotBatch: it holds an object that is neither a tensor nor a plain value.
    """
    leaves, spec, tree = _flatten(batch)
    tensors: list[Tensor] = []
    constants = []
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            tensors.append(leaf if is_dense(leaf.shape, leaf.stride()) else leaf.contiguous())
        elif isinstance(leaf, _CONSTANTS):
            constants.append((position, type(leaf), leaf))
        else:
            raise CannotBatch(f"the batch holds a {type(leaf).__name__}, which a traced step cannot take as an input")
    described = tuple((t.shape, t.stride(), t.dtype) for t in tensors)
    return tensors, BatchLayout(examples, described, tuple(constants), tree, spec)


def stack_batches(batches: Sequence[SplitBatch]) -> SplitBatch:
    """Return the batches of several lanes as one, each tensor with a lane axis, and the layout that they share.

    Raises:
        CannotBatch: they do not look alike.
    """
    layout = batches[0][1]
    if any(other != layout for _, other in batches[1:]):
        raise CannotBatch("trials with different data order get batches of different shapes at the same step")
    return [torch.stack(parts) for parts in zip(*(tensors for tensors, _ in batches), strict=True)], layout


def _flatten(batch: Any) -> tuple[list[Any], TreeSpec, str]:
    """Return the leaves of a batch, how they are nested, and that as text; most batches are a list of tensors."""
    if type(batch) in (list, tuple) and all(type(each) is Tensor for each in batch):
        return list(batch), *_flat_tree(len(batch), as_list=type(batch) is list)
    leaves, spec = tree_flatten(batch)
    return leaves, spec, repr(spec)


@functools.cache
def _flat_tree(length: int, *, as_list: bool) -> tuple[TreeSpec, str]:
    _, spec = tree_flatten([0] * length if as_list else (0,) * length)
    return spec, repr(spec)
