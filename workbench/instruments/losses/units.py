"""`Units`: units that are off or at the bounds of their activation function, as the graph of a loss holds them, and weights whose units are all alike."""

from __future__ import annotations

import contextlib
import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from workbench.instruments.caller import begins_at
from workbench.instruments.losses.classes import turned_axes
from workbench.instruments.losses.graphs import behind_weights, roots_of, walked
from workbench.instruments.losses.layers import RECURRENT, as_numbers, in_a_row, layers_of, signals
from workbench.instruments.order import alone_of

_PRODUCTS = (nn.Linear, nn.modules.conv._ConvNd, *RECURRENT, nn.MultiheadAttention, nn.Bilinear)
_FIRST = 4
"""Backward passes before the first update that are looked at, as of several losses or an accumulation (rule of thumb)."""
_LATER = (5, 10, 20, 40, 80, 160)
"""Updates from which on one more is looked at (rule of thumb)."""
_FAR, _SOME = 64, 64
"""Nodes among which the layer before a unit is looked for, and units, and weights of each, that are compared (rules of thumb)."""
_OPAQUE = ("CompiledFunction", "CheckpointFunction")
_SAVED = {"ReluBackward0": "relu", "TanhBackward0": "tanh", "SigmoidBackward0": "sigmoid", "SoftmaxBackward0": "_softmax"}  # fmt: skip


def off_for_all(op: str, out: Tensor) -> list[Tensor]:
    """Return which units of what an activation function returns are 0 for every example, in each reading of its axes; nothing where it cannot be off."""
    if out.dim() < 2 or not (op in ("relu", "threshold") or (op == "hardtanh" and bool(out.min() >= 0))):
        return []
    zero = out == 0
    sides = [zero.flatten(2).all(2).all(0) if out.dim() > 2 else zero.all(0)]
    return [*sides, zero.flatten(0, 1).all(0)] if out.dim() == 3 else sides  # either may be the units


def at_bounds(op: str, out: Tensor) -> dict[str, Tensor]:
    """Return "saturated", the share of values within 0.01 of a bound, and for sigmoids "one_sided", the smaller of both bounds' shares; for softmax over at least eight keys the share of rows with a weight above 0.99."""
    if op == "tanh":
        return {"saturated": (out.abs() > 0.99).float().mean()}
    if op == "sigmoid":
        low, high = (out < 0.01).float().mean(), (out > 0.99).float().mean()
        return {"saturated": low + high, "one_sided": torch.minimum(low, high)}
    if op == "_softmax" and out.dim() > 2 and out.shape[-1] >= 8:
        return {"saturated": (out.amax(-1) > 0.99).float().mean()}
    return {}


def unit_count(out: Tensor) -> int:
    """Return how many units an activation function has, by the shape of what it returns."""
    return out.shape[1] if out.dim() != 3 else out.shape[2]


def equal_weights(weights: Iterable[tuple[str, nn.Module, Tensor]]) -> Iterator[tuple[dict[str, Any], Tensor, Tensor]]:
    """Iterate over weights of several units of two values or more: name and "product" (of a layer that multiplies by it, not of a norm), whether all units are alike, and whether all are 0."""
    for name, module, p in weights:
        if p.dim() > 1 and p.shape[0] > 1 and p[0].numel() > 1:
            some = p.detach()[:_SOME].flatten(1)[:, :_SOME]
            yield {"name": name, "product": isinstance(module, _PRODUCTS)}, (some == some[:1]).all(), ~some.any()


class _Layer:
    """What is seen of one activation function behind one layer."""

    def __init__(self) -> None:
        self.units, self.rows = 0, 0
        self.off: list[Tensor | None] = []
        self.bounds: list[dict[str, Tensor]] = []

    def take(self, op: str, out: Tensor) -> None:
        off, units = off_for_all(op, out), unit_count(out)
        if self.rows:  # places of sequences differ in number
            pairs = zip(off, self.off, strict=False)
            self.off = [a & b if b is not None and a.shape == b.shape else None for a, b in pairs]
        else:
            self.off = [*off]
        self.units, self.rows = units, self.rows + out.numel() // max(units, 1)
        self.bounds += [found] if (found := at_bounds(op, out)) else []

    def to_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {"units": self.units, "rows": self.rows}
        if known := [off for off in self.off if off is not None]:
            found["dead"] = min(float(off.float().mean()) for off in known)
        for name in self.bounds[0] if self.bounds else ():
            found[name] = float(torch.stack([each[name] for each in self.bounds]).mean())
        return found


class Units:
    """Reads what activation functions returned off the graph of a loss that `backward` is about to be called on, before the first update and a few times after it.

    What is done to the outputs of the last layer is left out: a loss may well be 0, and probabilities at their bounds. So are recurrent layers,
    whose gates may be open or closed. A unit is off where it is 0 in all that was looked at.
    """

    def __init__(self) -> None:
        self._looks: list[dict[tuple[str, str], _Layer]] = [{}, {}]  # before the first update, and after it
        self._equal: list[dict[str, tuple[dict[str, Any], Tensor, Tensor]]] = [{}, {}]
        self._left, self._due = _FIRST, list(_LATER)
        self._places: dict[str, int] = {}  # the layers, in their order
        self._opaque = False
        self._layers: list[dict[str, Any]] = []
        self._in_a_row: list[str] = []
        self._axes: dict[str, Any] | None = None  # see `turned_axes`
        self._curved: list[Tensor] = []  # of each look whether a derivative of a derivative is not 0 everywhere

    def trained(self, losses: Any, update: int, models: Callable[[], Iterable[nn.Module]]) -> None:
        """Take in a backward pass that is about to begin."""
        later = int(update > 0)
        if not (update >= self._due[0] if later and self._due else self._left and not later):
            return
        self._left, self._due = self._left - 1 + later, [k for k in self._due if k > update]
        roots = list(models())
        weights = list(_weights(roots))
        owners = {id(p): (name.rpartition(".")[0], part) for name, part, p in weights}
        self._places = self._places or {place: k for k, (place, _) in enumerate(owners.values())}
        leaves, nodes = walked(roots_of(losses))
        if self._axes is None and (found := turned_axes(nodes)) is not None:
            place, part = owners.get(_layer_before(found.pop("node")), ("", None))
            inner = [
                each for root in roots for each in root.modules() if any(part is child for child in each.children())
            ]
            self._axes = found | {
                "behind": place,
                "line": begins_at(*(inspect.unwrap(type(each).forward) for each in (*inner, *roots))),
            }
        loss = alone_of(losses)
        own = any(
            isinstance(node, BackwardCFunction) for node in nodes
        )  # a backward pass of the program's own is not run once more
        if not (later or own) and len(self._layers) < 2 and isinstance(loss, Tensor) and loss.numel() == 1:
            layers = layers_of(nodes, owners)
            self._layers, self._in_a_row = signals(loss.sum(), layers), in_a_row(losses, nodes, layers, roots)
        again = [node._saved_self.any() for node in nodes if _goes_back_again(node)]
        self._curved += [torch.stack(again).any()] if again else []
        for node in nodes - behind_weights(losses):
            self._opaque = self._opaque or node.name().startswith(_OPAQUE)
            with (
                contextlib.suppress(RuntimeError),
                torch.no_grad(),
            ):  # what it holds may have been changed in place since
                returned = _returned(node)
                if (
                    returned is None
                    or type(returned[1]) is not Tensor
                    or returned[1].dim() < 2
                    or not returned[1].numel()
                ):
                    continue
                place, part = owners.get(_layer_before(node), ("", None))
                if not isinstance(part, RECURRENT):
                    self._looks[later].setdefault((place, returned[0]), _Layer()).take(*returned)
        plain = {id(p) for p in leaves if type(p) in (Tensor, nn.Parameter)}
        for row, alike, zero in equal_weights(each for each in weights if id(each[2]) in plain):
            self._equal[later][row["name"]] = (row, alike, zero)

    def to_dict(self) -> dict[str, Any]:
        """Return "units", "equal", "equal_later" and "layers", as `find_layers` does of a workload, those "in_a_row", and "opaque" where a part of the graph does not show its units."""
        first, later = self._looks
        units = [
            {"module": key[0], "op": key[1], **seen.to_dict(), "later": later[key].to_dict()} for key, seen in sorted(first.items(), key=lambda each: self._places.get(each[0][0], -1)) if key in later
        ]  # fmt: skip
        equal, after = (
            [row | {"zero": bool(zero)} for row, alike, zero in look.values() if bool(alike)] for look in self._equal
        )
        seen = [_FIRST - self._left, len(_LATER) - len(self._due)]
        return {
            "units": units, "equal": equal, "equal_later": after, "opaque": self._opaque, "looks": seen, "layers": as_numbers(self._layers), "in_a_row": self._in_a_row, "axes": self._axes, "curved": [bool(each) for each in self._curved],
        }  # fmt: skip


def _weights(models: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module, Tensor]]:
    for k, model in enumerate(models):
        whose = f"{type(model).__name__} {k + 1}." if len(models) > 1 else ""
        for place, part in model.named_modules():
            for name, p in part.named_parameters(recurse=False):
                yield whose + f"{place}.{name}".lstrip("."), part, p


def _returned(node: Any) -> tuple[str, Tensor] | None:
    """Return the name of an activation function and what it returned, of its node in a graph; None of others."""
    name = node.name()
    if name in _SAVED:
        return _SAVED[name], node._saved_result
    if name == "HardtanhBackward0" and node._saved_min_val >= 0:
        return "relu", node._saved_self.clamp(node._saved_min_val, node._saved_max_val)
    if name == "ClampMinBackward0" and node._saved_min == 0:
        return "relu", node._saved_self.clamp(min=0)
    return None


def _goes_back_again(node: Any) -> bool:
    """Tell whether a product with weights is of what came back through piecewise linear activation functions twice: what no weights above have made, as those of the last layer make each first derivative."""
    parent = node.next_functions[0][0] if node.name() == "MmBackward0" else None
    if parent is None or node._saved_self is None:
        return False
    first = (
        parent
        if parent.name() != "AddBackward0"
        else next((p for p, _ in parent.next_functions if p is not None), parent)
    )
    return first.name() in _PIECEWISE and any(
        each is None for each, _ in (*parent.next_functions, first.next_functions[0])
    )


_PIECEWISE = ("ThresholdBackwardBackward0", "LeakyReluBackwardBackward0", "HardtanhBackwardBackward0")


def _layer_before(node: Any) -> int:
    """Return the id of the parameter that is nearest before a node; 0 where none is near."""
    queue, seen = deque([node]), 0
    while queue and seen < _FAR:
        seen += 1
        for parent, _ in queue.popleft().next_functions:
            leaf = getattr(parent, "variable", None)
            if isinstance(leaf, nn.Parameter):
                return id(leaf)
            if parent is not None:
                queue.append(parent)
    return 0
