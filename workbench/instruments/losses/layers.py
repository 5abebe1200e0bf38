"""What the graph of a loss tells of the layers that it goes through: what each is given, its gradient, and whether anything stands between them."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from workbench.instruments.losses.graphs import behind_weights

RECURRENT = (nn.RNNBase, nn.RNNCellBase)
_GIVEN = {"AddmmBackward0": "_saved_mat1", "MmBackward0": "_saved_self", "ConvolutionBackward0": "_saved_input"}
_ROWS, _FEW = 256, 64
_AFFINE = frozenset({
    "Addmm", "Mm", "Convolution", "NativeBatchNorm", "CudnnBatchNorm", "NativeDropout", "Add", "Sub", "Neg", "Sum", "Mean", "AvgPool1D", "AvgPool2D",
    "AvgPool3D", "View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Select", "Slice", "Transpose", "T", "Permute", "ToCopy", "Clone",
    "Alias", "Expand", "Cat", "Stack", "ConstantPadNd", "torch::autograd::AccumulateGrad",
})  # fmt: skip
"""Nodes whose output is an affine function of what they are given, batch norm by its running statistics."""


class _Layer(NamedTuple):
    node: Any
    weight: Tensor
    place: str

    def given(self) -> Tensor:
        """Return the first rows of what the layer is given; of an embedding what it gives, as tokens have no size."""
        if self.node.name() == "EmbeddingBackward0":
            return nn.functional.embedding(self.node._saved_indices.flatten()[:_ROWS], self.weight.detach())
        rows: Tensor = getattr(self.node, _GIVEN[self.node.name()])[:_ROWS]
        return rows

    def gives(self) -> int:
        """Return how many numbers it gives for each row."""
        return math.prod(self.node._input_metadata[0].shape[1:])


def layers_of(nodes: Iterable[Any], owners: Mapping[int, tuple[str, nn.Module]]) -> list[_Layer]:
    """Return the layers among the nodes of a graph whose weight is a parameter of `owners`, in the order in which they ran, recurrent ones left out."""
    found = []
    for node in nodes:
        weight = _weight(node) if node.name() in (*_GIVEN, "EmbeddingBackward0") else None
        place, part = owners.get(id(weight), ("", None))
        if weight is not None and part is not None and not isinstance(part, RECURRENT):
            found.append(_Layer(node, weight, place))
    return sorted(found, key=lambda layer: layer.node._sequence_nr())


def signals(loss: Tensor, layers: list[_Layer]) -> list[dict[str, Any]]:
    """Return "module", "signal" (root mean square of what differs between the rows that a layer is given) and "gradient" (norm of the loss's by what the layer gives) of each layer, and once more of the last one with what it gives, where it is a product of rows.

    It takes a backward pass, which keeps the graph and makes no gradient of a parameter.
    """
    rows: list[dict[str, Any]] = []
    with contextlib.suppress(RuntimeError):  # of a graph that cannot be gone through twice
        edges = [GradientEdge(layer.node, 0) for layer in layers]
        gradients = torch.autograd.grad(loss, edges, retain_graph=True, allow_unused=True)
        for layer, gradient in zip(layers, gradients, strict=True):
            norm = None if gradient is None else gradient.float().norm()
            rows.append({"module": layer.place, "signal": _spread(layer.given()), "gradient": norm})
        given, weight = (
            (layers[-1].given()[:_FEW].detach().float(), layers[-1].weight.detach().float()) if rows else (None, None)
        )
        if given is not None and weight is not None and given.shape[1:] == weight.shape[1:]:
            rows.append(rows[-1] | {"signal": _spread(given @ weight.T)})
    return rows


def _spread(given: Tensor) -> Tensor:
    values = given.detach().float()
    return (values - values.mean(0)).square().mean().sqrt()


def as_numbers(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what `signals` found as JSON values."""
    return [{name: float(value) if isinstance(value, Tensor) else value for name, value in row.items()} for row in rows]


def in_a_row(losses: Any, nodes: set[Any], layers: list[_Layer], models: Iterable[nn.Module]) -> list[str]:
    """Return the layers of one model, where they are several in a row and nothing but affine functions stands between and before them; else nothing.

    A layer between wider ones, as of a linear autoencoder, leaves something out, and one that is used again and again, as for steps of time, is meant.
    """
    behind = behind_weights(losses)
    heads = {parent for node in behind for parent, _ in node.next_functions}
    inner, outer = ([layer for layer in layers if (layer.node in heads) == last] for last in (False, True))
    own = [{id(p) for p in model.parameters()} for model in models]
    if not inner or not any({id(layer.weight) for layer in layers} <= ids for ids in own):
        return []
    if max(Counter(id(layer.weight) for layer in layers).values()) > 1 or not all(map(_is_affine, nodes - behind)):
        return []
    narrow = min(layer.gives() for layer in inner)
    wide = min(*(layer.gives() for layer in outer), *(layer.given()[0].numel() for layer in inner))
    return [] if narrow < wide else [layer.place for layer in layers]


def _weight(node: Any) -> Tensor | None:
    """Return the parameter that a node multiplies with or looks up, which may be converted and transposed."""
    for link, _ in node.next_functions:
        parent = link
        while parent is not None and parent.name().startswith(("TBackward", "ToCopy", "Transpose")):
            parent = parent.next_functions[0][0]
        leaf = getattr(parent, "variable", None)
        if isinstance(leaf, nn.Parameter) and leaf.dim() > 1:
            return leaf
    return None


def _is_affine(node: Any) -> bool:
    kind = node.name().partition("Backward")[0]
    trained = [parent is not None for parent, _ in node.next_functions]
    if kind in ("Addmm", "Mm", "Convolution"):
        return _weight(node) is not None or sum(trained) == 1
    return kind in _AFFINE or (kind in ("Mul", "Div") and sum(trained) == 1 and trained[0])
