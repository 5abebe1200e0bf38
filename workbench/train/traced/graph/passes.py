"""Clean-up of a graph: the same result from fewer and faster operations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from workbench.train.traced.graph.images import channels_last
from workbench.train.traced.graph.nodes import meta
from workbench.train.traced.graph.products import add_inside, share_operands, transpose_products, use_onednn
from workbench.train.traced.graph.reuse import reuse_memory
from workbench.train.traced.graph.running import refresh
from workbench.train.traced.graph.softmax import add_masks, widen_softmax
from workbench.train.traced.graph.stages import Stage, stage_of
from workbench.train.traced.graph.tidy import tidy

__all__ = ["clean_up"]


def clean_up(graph: fx.Graph, inputs: Mapping[fx.Node, Stage], example: Mapping[fx.Node, Any], *, lanes: int) -> None:
    """Change `graph` in place.

    Layouts in memory change on the way, so the graph is run on the example after the passes that change them.

    Args:
        graph: of one call, with what is known about its tensors up to date.
        inputs: stage of each placeholder.
        example: value of each placeholder and constant; generators among them advance.
        lanes: of the call.
    """
    tidy(graph)
    on_cpu = all(meta(node).device.type == "cpu" for node in graph.nodes if "tensor" in node.meta)
    if on_cpu:
        add_masks(graph, stage_of(graph, dict(inputs)))
        add_inside(graph)
        transpose_products(graph)
        if lanes == 1:
            channels_last(graph)
        _again(graph, example)
        share_operands(graph)
        widen_softmax(graph)
        _again(graph, example)
        use_onednn(graph)
        _again(graph, example)
    reuse_memory(graph, stage_of(graph, dict(inputs)))


def _again(graph: fx.Graph, example: Mapping[fx.Node, Any]) -> None:
    refresh(graph, example)
    tidy(graph)
