"""How much memory a list of operations needs at its peak, known before it runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import fx

from workbench.train.traced.graph.nodes import base_of, meta

__all__ = ["peak_bytes"]


def peak_bytes(nodes: Sequence[fx.Node], results: Iterable[fx.Node | None]) -> int:
    """Return the most bytes that the tensors made by `nodes` take at a time; what an operation needs inside is left out.

    Args:
        nodes: in the order they run in.
        results: what is needed afterwards.
    """
    position = {node: number for number, node in enumerate(nodes)}
    kept = {base_of(node) for node in results if node is not None}
    last: dict[fx.Node, int] = {}
    for node in nodes:
        for each in (node, *node.all_input_nodes):
            last[base_of(each)] = position[node]
    dying: dict[int, list[fx.Node]] = {}
    for base, number in last.items():
        if base not in kept:
            dying.setdefault(number, []).append(base)
    now = peak = 0
    for number, node in enumerate(nodes):
        if base_of(node) is node:
            now += _bytes(node)
        peak = max(peak, now)
        now -= sum(_bytes(base) for base in dying.get(number, ()) if base in position)
    return peak


def _bytes(node: fx.Node) -> int:
    return meta(node).numel * meta(node).dtype.itemsize if "tensor" in node.meta else 0
