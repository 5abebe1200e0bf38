"""Matrix products: the same numbers from the form that is fastest for these shapes on a CPU.

What the passes below rest on was measured with torch 2.13 (MKL, oneDNN): a product whose result has fewer than 16 columns
takes two to four times as long as its transpose; adding the bias inside the product is free; one product of stacked weights
with the batch that all lanes share takes half the time of a product per lane, where oneDNN is the faster library.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from workbench.train.traced.graph.nodes import call, is_call, meta, replace, written

__all__ = ["add_inside", "share_operands", "transpose_products", "use_onednn"]

aten = torch.ops.aten
NARROW = 16  # measured: columns of a result below which its transpose is faster; floats in the widest register
LARGE = 4e6  # measured: floating-point operations of a product from which on oneDNN's longer way in pays
PRODUCTS = (aten.bmm.default, aten.baddbmm.default)


def add_inside(graph: fx.Graph) -> None:
    """Turn a product and the addition of a bias into one operation."""
    touched = written(graph)
    for node in list(graph.nodes):
        if not is_call(node, aten.add.Tensor) or node.kwargs or node in touched:
            continue
        for product, bias in (node.args, reversed(node.args)):
            if _addable(product, bias, node):
                with graph.inserting_before(node):
                    new = call(graph, aten.baddbmm.default, bias, *product.args, about=meta(node))
                replace(node, new)
                graph.erase_node(product)
                break


def _addable(product: Any, bias: Any, total: fx.Node) -> bool:
    if not is_call(product, aten.bmm.default) or not isinstance(bias, fx.Node) or len(product.users) != 1:
        return False
    about = meta(total)
    fits = meta(product).shape == about.shape and meta(bias).dtype == about.dtype == meta(product).dtype
    return fits and len(meta(bias).shape) == 3 and meta(bias).numel < about.numel and about.dtype.is_floating_point


def transpose_products(graph: fx.Graph) -> None:
    """Compute every batched product transposed, where one is narrow or shares an operand: layouts then stay alike."""
    products = [node for node in graph.nodes if is_call(node, *PRODUCTS)]
    if not any(_narrow(node) or _shared(node.args[-1]) or _shared(node.args[-2]) for node in products):
        return
    for node in products:
        with graph.inserting_before(node):
            *bias, left, right = (_transposed(graph, argument) for argument in node.args)
            new = call(graph, node.target, *bias, right, left)
            back = call(graph, aten.transpose.int, new, 1, 2, of=new)
        replace(node, back)


def _narrow(node: fx.Node) -> bool:
    _, rows, columns = meta(node).shape
    return columns < NARROW <= rows


def _shared(operand: Any) -> bool:
    return meta(operand).stride[0] == 0 and meta(operand).shape[0] > 1


def _transposed(graph: fx.Graph, node: Any) -> fx.Node:
    if is_call(node, aten.transpose.int) and {d % 3 for d in node.args[1:]} == {1, 2}:
        source: fx.Node = node.args[0]
        return source
    return call(graph, aten.transpose.int, node, 1, 2, of=node)


def share_operands(graph: fx.Graph) -> None:
    """Turn products of many matrices with the same right one into a single product."""
    for node in list(graph.nodes):
        if not is_call(node, *PRODUCTS) or not _shared(node.args[-1]) or not onednn_pays(meta(node)):
            continue
        *bias, left, right = node.args
        lanes, rows, inner = meta(left).shape
        with graph.inserting_before(node):
            flat = call(graph, aten.reshape.default, left, [lanes * rows, inner])
            one = call(graph, aten.select.int, right, 0, 0, of=right)
            product = call(graph, aten.mm.default, flat, one)
            about = meta(node).packed
            new = call(graph, aten.view.default, product, list(about.shape), of=product, about=about)
            if bias:
                new = call(graph, aten.add.Tensor, new, bias[0], about=about)
        replace(node, new)


def use_onednn(graph: fx.Graph) -> None:
    """Let oneDNN compute large products of two matrices, where it is the faster library."""
    for node in list(graph.nodes):
        if not is_call(node, aten.mm.default, aten.addmm.default) or node.kwargs:
            continue
        *bias, left, right = node.args
        (rows, inner), columns = meta(left).shape, meta(node).shape[1]
        if bias and meta(bias[0]).shape != (columns,):
            continue
        if 2 * rows * inner * columns < LARGE or not onednn_pays(meta(node)):
            continue
        with graph.inserting_before(node):
            weight = call(graph, aten.t.default, right, of=right)
            given = bias[0] if bias else None
            new = call(graph, _linear(), left, weight, given, "none", [], "", about=meta(node).packed)
        replace(node, new)


def onednn_pays(about: Any) -> bool:
    """Whether products of such tensors are faster in oneDNN than in the BLAS library that torch was built with."""
    return about.device.type == "cpu" and about.dtype == torch.float32 and _onednn_is_faster()


def _linear() -> Any:
    packet = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    return None if packet is None else packet.default


@functools.cache
def _onednn_is_faster(*, rounds: int = 20, share: float = 0.8) -> bool:
    """Time one product both ways; on processors that MKL holds back oneDNN takes half the time, on others about the same."""
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not available or _linear() is None:
        return False
    left, weight = torch.ones(512, 64), torch.ones(256, 64)
    right = weight.t()
    ways: list[Callable[[], Tensor]] = [
        lambda: torch.mm(left, right),
        lambda: _linear()(left, weight, None, "none", [], ""),
    ]
    best = [float("inf")] * 2
    for _ in range(rounds):
        for number, way in enumerate(ways):
            start = time.perf_counter()
            way()
            best[number] = min(best[number], time.perf_counter() - start)
    return best[1] < share * best[0]
