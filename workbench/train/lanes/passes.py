"""Clean-up of a recorded step: the same result from fewer and faster operations.

A pass stays where it gains 1.2 times on a row of `tests/benchmarks/bench_lanes.py` (CPU, torch 2.13, one thread; the time of a step
without it over the time with it): `_tidy` 1.36 and `_transpose_products` 1.41 on MLPs, `_widen_softmax` 1.58 on one of 32 lanes,
`_channels_last` 1.33 on `digits_cnn`; `_add_inside`, `_mask_by_numbers` and
`_reuse_memory` together 1.02 to 1.2 on rows of 8 and 32 lanes. The table of all is in docs/findings.md.
"""

import math
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import fx

from workbench.train.lanes.recorder import base_of, is_call, is_random, meta, written, written_by

aten = torch.ops.aten
FILLS: dict[Any, float | None] = {
    aten.ones_like.default: 1,
    aten.zeros_like.default: 0,
    aten.full_like.default: None,
    aten.new_zeros.default: 0,
    aten.new_ones.default: 1,
    aten.new_full.default: None,
}
"""Operation that fills a tensor with a constant -> the constant; None: its last argument."""
PRODUCTS = (aten.bmm.default, aten.baddbmm.default)
SOFTMAX = {
    aten._softmax.default: 1,
    aten._log_softmax.default: 1,
    aten._softmax_backward_data.default: 2,
    aten._log_softmax_backward_data.default: 2,
}
"""Operation -> how many tensors it takes; its dimension is the argument after them."""
IN_PLACE: dict[Any, Any] = {
    aten.relu.default: aten.relu_.default,
    aten.neg.default: aten.neg_.default,
    aten.exp.default: aten.exp_.default,
    aten.sqrt.default: aten.sqrt_.default,
    aten.tanh.default: aten.tanh_.default,
    aten.sigmoid.default: aten.sigmoid_.default,
    aten.add.Tensor: aten.add_.Tensor,
    aten.clamp_max.Tensor: aten.clamp_max_.Tensor,
    aten.sub.Tensor: aten.sub_.Tensor,
    aten.mul.Tensor: aten.mul_.Tensor,
    aten.mul.Scalar: aten.mul_.Scalar,
    aten.div.Tensor: aten.div_.Tensor,
    aten.div.Scalar: aten.div_.Scalar,
    aten.threshold_backward.default: aten.threshold_backward.grad_input,
}
"""Elementwise operation -> the same in the memory of its first argument."""
LEAST = 4096  # rule of thumb: below so many elements new memory costs nothing
NARROW = 16  # measured: floats in the widest register; a product or softmax over fewer columns is taken value by value


def clean_up(graph: fx.Graph, refresh: Callable[[], Any], *, lanes: int, device: torch.device) -> None:
    """Clean up a graph in place."""
    _tidy(graph)
    if device.type != "cpu":
        return
    for change in (
        _add_inside,
        _mask_by_numbers,
        _transpose_products,
        *([_channels_last] if lanes == 1 else []),
        _widen_softmax,
    ):
        change(graph)
        refresh()
        _tidy(graph)
    _reuse_memory(graph)


def constants(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that depend on no input and are never written into."""
    touched = written(graph)
    found: set[fx.Node] = set()
    for node in graph.nodes:
        still = node.op == "call_function" and not is_random(node) and not written_by(node)
        still = still and base_of(node) not in touched and found.issuperset(node.all_input_nodes)
        if still or node.op == "get_attr":
            found.add(node)
    return found


def dead_code(graph: fx.Graph) -> None:
    """Remove what nobody needs, random draws aside."""
    live: set[fx.Node] = set()
    read: set[fx.Node] = set()  # memory that a live node further down reads
    for node in reversed(graph.nodes):
        needed = node.op == "output" or any(user in live for user in node.users)
        if needed or is_random(node) or read.intersection(written_by(node)):
            live.add(node)
            read.update(base_of(n) for n in node.all_input_nodes)
    for node in reversed(graph.nodes):
        if node not in live and node.op != "placeholder":
            graph.erase_node(node)


def _call(graph: fx.Graph, target: Any, *args: Any, of: fx.Node | None = None, **kwargs: Any) -> fx.Node:
    """Insert a call whose result is a view of `of`, or new memory."""
    node = graph.call_function(target, args, kwargs)
    node.meta["base"] = node if of is None else base_of(of)
    return node


def _replace(node: fx.Node, other: fx.Node) -> None:
    """Replace `node` by `other`, also as the owner of memory."""
    for each in node.graph.nodes:
        if each is not node and each.meta.get("base") is node:
            each.meta["base"] = base_of(other)
    node.replace_all_uses_with(other)
    node.graph.erase_node(node)


def _tidy(graph: fx.Graph) -> None:
    """Remove repeated views, copies and dead code; tensors filled with a constant become constants."""
    dead_code(graph)
    touched = written(graph)
    returned = {base_of(node) for node in graph.output_node().all_input_nodes}
    seen: dict[Hashable, fx.Node] = {}
    moved: set[fx.Node] = set()  # memory whose views see other strides than noted, until the graph is run again
    for node in list(graph.nodes):
        if "tensor" not in node.meta:
            continue
        about, source = meta(node), node.args[0] if node.args else None
        key = (base_of(node), about)
        if node.target in FILLS and about.contiguous and base_of(node) is node:
            value: Any = FILLS[node.target]
            with graph.inserting_before(node):
                how: dict[str, Any] = {"dtype": about.dtype, "device": about.device}
                new = _call(
                    graph, aten.full.default, list(about.shape), node.args[-1] if value is None else value, **how
                )
            new.meta["tensor"] = about
            if node in touched:
                touched.add(new)
            _replace(node, new)
        elif (
            base_of(node) is not node
            and key in seen
            and not (about.dtype.is_complex or written_by(node) or base_of(node) in moved)
        ):
            # a view of the same memory that sees the same
            _replace(node, seen[key])
        elif (
            isinstance(source, fx.Node)
            and _copies(node, source)
            and not touched & {node, base_of(source)}
            and (node not in returned or base_of(source).op != "placeholder")  # the caller may write into what it gave
        ):
            if meta(source).stride != about.stride:
                moved.add(base_of(source))
            _replace(node, source)
        else:
            seen.setdefault(key, node)
    dead_code(graph)


def _copies(node: fx.Node, source: fx.Node) -> bool:
    """Whether `node` gives the values of `source` in new memory; who only reads can as well read the old."""
    was: Any = source.meta.get("tensor")
    now = meta(node)
    if is_call(node, aten.mul.Scalar, aten.mul.Tensor, aten.div.Scalar, aten.div.Tensor):
        one = isinstance(node.args[1], (int, float)) and node.args[1] == 1 and not node.kwargs
        return one and (was.shape, was.dtype) == (now.shape, now.dtype)
    return was == now and is_call(node, aten.clone.default, aten._to_copy.default)


def _add_inside(graph: fx.Graph) -> None:
    """Let a batched product add the bias that is added to it, which saves one pass over its memory."""
    touched = written(graph)
    for node in [node for node in graph.nodes if is_call(node, aten.add.Tensor) and not node.kwargs]:
        for product, bias in (node.args, node.args[::-1]):
            if not is_call(product, aten.bmm.default) or len(product.users) > 1 or not isinstance(bias, fx.Node):
                continue
            (lanes, rows, columns), added = meta(product).shape, meta(bias)
            fits = added.shape in ((lanes, 1, columns), (lanes, rows, 1)) and added.dtype == meta(product).dtype
            if fits and not touched.intersection(map(base_of, (node, product, *product.all_input_nodes))):
                with graph.inserting_before(node):
                    new = _call(graph, aten.baddbmm.default, bias, *product.args)
                new.meta["tensor"] = meta(node)
                _replace(node, new)
                break


def _mask_by_numbers(graph: fx.Graph) -> None:
    """Fill where a constant mask says so by numbers made once: a minimum with minus infinity, a product with 0, in a tenth of the time."""
    once, touched = constants(graph), written(graph)
    for node in [node for node in graph.nodes if is_call(node, aten.masked_fill.Scalar) and node not in touched]:
        source, mask, value = node.args
        about = meta(node)
        if mask in once and source not in once and value in (0, -math.inf) and about.dtype.is_floating_point:
            how: dict[str, Any] = {"dtype": about.dtype, "device": about.device}
            with graph.inserting_before(node):
                filled, kept = (
                    _call(graph, aten.full.default, [], v, **how) for v in (value, math.inf if value else 1)
                )
                numbers = _call(graph, aten.where.self, mask, filled, kept)
                new = _call(graph, aten.clamp_max.Tensor if value else aten.mul.Tensor, source, numbers)
            new.meta["tensor"] = about
            _replace(node, new)


def _transpose_products(graph: fx.Graph) -> None:
    """Compute all batched products transposed where one is narrow, which takes 2 to 4 times as long, or shares an operand."""
    products = [node for node in graph.nodes if is_call(node, *PRODUCTS)]
    shapes = [meta(node).shape for node in products]
    operands = [meta(operand) for node in products for operand in node.args[-2:]]
    shared = any(about.stride[0] == 0 and about.shape[0] > 1 for about in operands)
    if not shared and not any(columns < NARROW <= rows for _, rows, columns in shapes):
        return

    def transposed(node: Any) -> fx.Node:
        if is_call(node, aten.transpose.int) and {d % 3 for d in node.args[1:]} == {1, 2}:
            source: fx.Node = node.args[0]
            return source
        return _call(graph, aten.transpose.int, node, 1, 2, of=node)

    for node in products:
        with graph.inserting_before(node):
            *bias, left, right = (transposed(argument) for argument in node.args)
            new = _call(graph, node.target, *bias, right, left)
            back = _call(graph, aten.transpose.int, new, 1, 2, of=new)
        back.meta["tensor"] = meta(node)
        _replace(node, back)


def _channels_last(graph: fx.Graph) -> None:
    """Put the channels of the images of the first convolutions last; pooling and batch norm take 1/15 and 1/3 of the time."""
    convolved: set[fx.Node] = set()
    for node in list(graph.nodes):
        after = convolved.intersection(node.all_input_nodes)
        first = is_call(node, aten.convolution.default)
        if first or after:
            convolved.add(node)
        images: Any = node.args[0] if first else None
        if not first or after or len(meta(images).shape) != 4 or meta(images).dtype != torch.float32:
            continue
        count, channels, height, width = meta(images).shape
        with graph.inserting_before(node):
            if channels == 1 and meta(images).contiguous:  # in memory it is the same, but only the strides can tell
                strides = [height * width, 1, width, 1]
                new = _call(graph, aten.as_strided.default, images, [count, 1, height, width], strides, of=images)
            else:
                new = _call(graph, aten.clone.default, images, memory_format=torch.channels_last)
            node.replace_input_with(images, new)


def _widen_softmax(graph: fx.Graph) -> None:
    """Compute a softmax over fewer than 16 values along another dimension than the last, which is 4 to 10 times as fast."""
    for node in list(graph.nodes):
        if not is_call(node, *SOFTMAX):
            continue
        tensors = SOFTMAX[node.target]
        about = meta(node.args[tensors - 1])
        axis = int(node.args[tensors]) % max(1, len(about.shape))
        if not about.dense or len(about.shape) < 2:
            continue
        order = sorted(range(len(about.shape)), key=lambda d: -about.stride[d])
        if order[-1] == axis and about.shape[axis] < NARROW:
            order[-1], order[-2] = order[-2], order[-1]
        elif order[-1] == axis or about.contiguous:
            continue
        with graph.inserting_before(node):
            given = [_laid_out(graph, argument, order) for argument in node.args[:tensors]]
            new = _call(graph, node.target, *given, order.index(axis), *node.args[tensors + 1 :])
            back = [order.index(d) for d in range(len(order))]
            result = _call(graph, aten.permute.default, new, back, of=new)
        stride = tuple(math.prod(about.shape[d] for d in order[place + 1 :]) for place in back)
        result.meta["tensor"] = about._replace(stride=stride, offset=0)
        _replace(node, result)


def _laid_out(graph: fx.Graph, node: Any, order: list[int]) -> fx.Node:
    """Return `node` with its dimensions in this order, copied where they do not lie so."""
    permuted = _call(graph, aten.permute.default, node, order, of=node)
    about = meta(node)
    if about._replace(
        shape=tuple(about.shape[d] for d in order), stride=tuple(about.stride[d] for d in order)
    ).contiguous:
        return permuted
    return _call(graph, aten.clone.default, permuted, memory_format=torch.contiguous_format)


def _reuse_memory(graph: fx.Graph) -> None:
    """Let elementwise operations write into the memory of an operand that nobody reads afterwards. No pass may follow."""
    once = constants(graph)
    position = {node: number for number, node in enumerate(graph.nodes)}
    last: dict[fx.Node, int] = dict.fromkeys(graph.nodes, -1)  # base -> position of the last node that reads its memory
    for node in graph.nodes:
        for each in node.all_input_nodes:
            last[base_of(each)] = position[node]
    for node in list(graph.nodes):
        if (
            node.target not in IN_PLACE
            or node.kwargs
            or base_of(node) is not node
            or math.prod(meta(node).shape) < LEAST
        ):
            continue
        for place in (0, 1) if node.target in (aten.add.Tensor, aten.mul.Tensor) else (0,):
            operand: Any = node.args[place]
            if not isinstance(operand, fx.Node) or meta(operand)._replace(offset=0) != meta(node):
                continue
            base = base_of(operand)
            others = [base_of(each) for each in node.all_input_nodes if each is not operand]
            free = base.op == "call_function" and base not in once and last[base] == position[node]
            if not free or base in others or not meta(operand).dense:
                continue
            if node.target is aten.threshold_backward.default:
                node.kwargs = {"grad_input": operand}
            else:
                node.args = (operand, *(a for number, a in enumerate(node.args) if number != place))
            node.target = IN_PLACE[node.target]
            for each in graph.nodes:
                if each.meta.get("base") is node:
                    each.meta["base"] = base
            last[base] = last[node]
            break
