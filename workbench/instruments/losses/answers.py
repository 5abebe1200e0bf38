"""`Answers`: whether a model of sequences is shown the token that it has to predict; `Others`: whether an output depends on other examples of its batch."""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from workbench.instruments.caller import own_line
from workbench.instruments.losses.graphs import WEIGHS, walked
from workbench.instruments.surroundings import has_values
from workbench.instruments.taps import TAPS

LAST_CALL = 128
"""Calls of a loss function that are looked at: of these the first, second, fourth, eighth, ... one (rule of thumb)."""
_AGREE = 0.95
_FEWEST = 4
_TINY, _COUPLED = 1e-5, 1e-3


class _Place(NamedTuple):
    """How tokens and targets lie: the axis of positions in the tokens, whether targets come example by example, how many each has, and how much further on the target of one stands."""

    axis: int
    whole: bool
    length: int
    offset: int
    agree: float


class Answers:
    """Asks of a cross-entropy whose targets stand in the tokens of an embedding which tokens one output depends on.

    It is read off the graph that is there anyway, by the gradient of one position's output with respect to what the embedding gave:
    the model is not run again, and no gradient of a parameter is made. Where the outputs of an example depend on the tokens of other
    examples too, as through batch norm in training, nothing is told. A backward pass that runs code of the program's own, as with hooks,
    checkpointing, collectives and functions with a `backward` of their own, is left alone: it may do more than give a gradient.
    """

    def __init__(self) -> None:
        self._calls = 0
        self._found: dict[str, Any] | None = None

    def compared(self, name: str, outputs: Any, target: Any) -> None:
        """Take in a call of a loss function."""
        if name not in ("cross_entropy", "nll_loss") or self._calls >= LAST_CALL or not has_values(outputs):
            return
        if not (isinstance(target, Tensor) and has_values(target) and outputs.grad_fn is not None):
            return
        self._calls += 1
        if self._calls & (self._calls - 1) or target.is_floating_point() or outputs.dim() not in (2, 3):
            return
        try:
            self._look(outputs, target)
        except RuntimeError:  # of a graph that cannot be gone through twice
            self._calls = LAST_CALL

    def _look(self, outputs: Tensor, target: Tensor) -> None:
        nodes = walked([outputs.grad_fn])[1]
        embeddings = [node for node in nodes if node.name() == "EmbeddingBackward0"]
        if embeddings and (TAPS.hooked or any(isinstance(node, BackwardCFunction) for node in nodes)):
            self._found = self._found or {"sees": None}
            return
        for node in embeddings:
            given = getattr(node, "_saved_indices", None)
            if given is None or given.dim() != 2 or not (place := _place(given, target)):
                continue
            found = _looked(node, place, given.movedim(place.axis, 1), outputs)
            if found.get("mixed") and any("BatchNorm" in each.name() for each in nodes):
                continue
            if found:
                before = self._found or {}
                told = {name: value or bool(before.get(name)) for name, value in found.items()}
                place_of = {"offset": place.offset, "agree": place.agree, "line": own_line()}
                self._found = {"sees": None} | before | place_of | told

    def to_dict(self) -> dict[str, Any] | None:
        """Return where targets stand in the tokens, and whether outputs depend on them, as JSON values; None where there are no such targets, and `sees` None where that was not looked up."""
        return self._found


def _place(given: Tensor, target: Tensor) -> _Place | None:
    for turned, axis, offset in itertools.product((False, True), (1, 0), (1, 0)):
        tokens, whole = given.movedim(axis, 1), (axis == 1) != turned
        examples, positions = tokens.shape
        length, odd = divmod(target.numel(), examples)
        if examples < 2 or positions < _FEWEST or odd or length not in (positions, positions - offset):
            continue
        wanted = target.reshape(examples, length) if whole else target.reshape(length, examples).T
        wanted, there = wanted[:, : positions - offset], tokens[:, offset:]
        counted = wanted >= 0  # what is ignored is below 0
        if not counted.any() or bool((wanted == wanted[:1, :1]).all()):
            continue
        agree = float((wanted == there)[counted].float().mean())
        if agree >= _AGREE:
            return _Place(axis, whole, length, offset, agree)
    return None


def _looked(node: Any, place: _Place, tokens: Tensor, outputs: Tensor) -> dict[str, bool]:
    """Tell of the output at the middle of the second example whether it depends on its target ("sees"), on another example alone ("others") or too ("mixed")."""
    middle = tokens.shape[1] // 2
    if outputs.dim() == 2:
        row = outputs[place.length + middle if place.whole else middle * len(tokens) + 1]
    else:
        row = outputs[1, :, middle] if place.whole else outputs[middle, :, 1]
    edge = GradientEdge(node, 0)
    (grad,) = torch.autograd.grad(row.sum(), [edge], retain_graph=True, allow_unused=True)
    if grad is None or not bool(torch.isfinite(grad).all()):
        return {}
    sizes = grad.abs().amax(-1).movedim(place.axis, 1)
    most, own, rest = float(sizes.max()), float(sizes[1].max()), float(sizes[torch.arange(len(sizes)) != 1].max())
    others, mixed = own <= _COUPLED * most, rest > _COUPLED * most
    if not most > 0 or others or mixed:
        return {"others": others, "mixed": mixed and not others} if most > 0 else {}
    later = sizes[1, middle + 1 :] if place.offset else sizes[1, middle : middle + 1]
    return {"sees": float(later.max()) > _TINY * most}


class Others:
    """Asks of the first losses how many rows of what the first layers give one row of the outputs depends on; read off the graph as `Answers` does."""

    def __init__(self, looks: int = 2) -> None:
        self._calls, self._left = 0, looks
        self._found: dict[str, Any] | None = None

    def compared(self, outputs: Any, loader: Mapping[str, Any]) -> None:
        """Take in the outputs that a loss function is given, and what is known of the loader of their examples."""
        self._calls += 1
        asked = self._left and self._calls <= LAST_CALL and not self._calls & (self._calls - 1)
        if not asked or not isinstance(outputs, Tensor) or not has_values(outputs) or outputs.grad_fn is None:
            return
        rows = len(outputs) if outputs.dim() else 0
        apart = [(n + k) % rows > 0 for n in outputs.shape[1:] if n > 1 for k in (-1, 0, 1)] if rows else []
        if rows >= _FEWEST and all(apart):  # else each is held against the others
            with contextlib.suppress(RuntimeError):  # of a graph that cannot be gone through twice
                self._look(outputs, rows, bool(loader.get("random") and loader.get("size") == rows))

    def trained(self, head: set[Any], loader: Mapping[str, Any]) -> None:
        """Take in what a loss that `backward` is about to be called on does to the outputs of the last layer: every softmax of it over the examples, and none over what each of them has."""
        over = [node for node in head if node.name().startswith(("LogSoftmax", "Softmax"))]
        shapes = {tuple(node._saved_result.shape) for node in over if not node._saved_dim}
        rows, columns = shapes.pop() if len(shapes) == 1 and len(max(shapes)) == 2 else (0, 0)
        apart = rows != columns > 1  # else of all pairs, or of one list
        if apart and all(not node._saved_dim for node in over) and loader.get("random") and loader.get("size") == rows:
            name = over[0].name().removesuffix("Backward0")
            self._found = {"rows": rows, "coupled": True, "softmax": name, "norm": False, "drawn": True, "line": own_line()}  # fmt: skip

    def _look(self, outputs: Tensor, rows: int, drawn: bool) -> None:
        nodes = walked([outputs.grad_fn])[1]
        if TAPS.hooked or any(
            isinstance(node, BackwardCFunction) or node.name().startswith(("CudnnRnn", "MiopenRnn")) for node in nodes
        ):
            self._found = self._found or {"rows": None}
            return
        if not (first := _first_rows(nodes, rows)):
            return
        self._left -= 1
        edges, row = [GradientEdge(node, 0) for node in first], outputs[-1].sum()
        grads = [g for g in torch.autograd.grad(row, edges, retain_graph=True, allow_unused=True) if g is not None]
        sizes = [g.abs().reshape(rows, -1).amax(1) for g in grads]
        most = max((int((size > _TINY * size.max()).sum()) for size in sizes), default=0)
        if any("Rnn" in node.name() and _lies(node, rows) for node in first):  # all steps of one at once
            most = rows
        if most >= (self._found or {}).get("rows", 0):
            over = [
                each.name() for each in nodes if "Softmax" in each.name() and _lies(each, rows) and not each._saved_dim
            ]
            self._found = {
                "rows": most, "coupled": most >= _FEWEST, "softmax": over[0].removesuffix("Backward0") if over else None,
                "norm": any("BatchNorm" in node.name() for node in nodes), "drawn": drawn, "line": own_line(),
            }  # fmt: skip

    def to_dict(self) -> dict[str, Any] | None:
        """Return on how many rows one depends, and the softmax over them, as JSON values; None where no loss compares rows, and `rows` None where that was not looked up."""
        return self._found


def _lies(node: Any, rows: int) -> bool | None:
    """Tell whether a node gives something of each row, None where there are as many positions, which may come first."""
    shape = node._input_metadata[0].shape
    if not len(shape) or shape[0] != rows:
        return False
    return None if len(shape) > 2 and shape[1] == rows else True


def _first_rows(nodes: set[Any], rows: int) -> set[Any]:
    """Return the first nodes behind data, where layers with weights take it in, that give something of each row; none where that is not known."""
    above = defaultdict[Any, list[Any]](list)
    for node in nodes:
        for parent, _ in node.next_functions:
            above[parent].append(node)
    weighs = [node for node in nodes if node.name().startswith((*WEIGHS, "MkldnnRnn"))]
    stack = [node for node in weighs if node.name().startswith("Embedding") or any(p is None for p, _ in node.next_functions)]  # fmt: skip
    first, seen = set[Any](), set[Any]()
    while stack:
        node = stack.pop()
        lies = _lies(node, rows)
        if lies is None:
            return set()
        if lies:
            first.add(node)
        elif node not in seen:
            seen.add(node)
            stack += above[node]
    return first
