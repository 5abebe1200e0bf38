"""Which way to the gradients a stack of lanes takes."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.train.data_stream import DataStream
from workbench.train.gradients import Gradients, LoopGradients
from workbench.train.lanes import LaneStack
from workbench.workloads.base import Workload

__all__ = ["choose_gradients"]


def choose_gradients(
    workload: Workload,
    stack: LaneStack,
    streams: Sequence[DataStream],  # noqa: ARG001
    *,
    wanted: str,  # noqa: ARG001
) -> Gradients:
    """Return the way to the gradients."""
    return LoopGradients(workload, stack)
