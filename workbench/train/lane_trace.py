"""Records one training step, or one evaluation batch, of one lane or of several lanes together."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

from workbench.train.cannot_batch import CannotBatch
from workbench.train.forward import autocast, per_example
from workbench.train.graph.draws import global_generator
from workbench.train.graph.nodes import written
from workbench.train.graph.recorder import CannotRecord, Recorder
from workbench.train.lane_batch import BatchLayout
from workbench.train.lane_stacks import is_out_of_memory
from workbench.train.lanes import LaneStack
from workbench.train.module_state import ModuleState, changed, copy_model, module_state
from workbench.train.rng import isolated_rng
from workbench.train.vmap_friendly import VmapFriendly
from workbench.workloads.base import Workload
from workbench.workloads.checks import check_loss_shape

__all__ = ["LaneTensors", "Objective", "Recorded", "lane_tensors", "record"]

Objective = Literal["mean", "sum", "evaluate"]
"""What a step computes: gradients of the mean loss, of the weighted sum, or no gradient but the metrics."""


@dataclass(frozen=True)
class LaneTensors:
    """Views of the rows of a stack that one call reads; without a lane axis where the call has one lane."""

    trained: list[Tensor]
    frozen: list[Tensor]
    buffers: list[Tensor]

    @property
    def all(self) -> list[Tensor]:
        """All of them, in the order of a program's inputs."""
        return [*self.trained, *self.frozen, *self.buffers]


@dataclass(frozen=True)
class Recorded:
    """A recorded step.

    The graph returns (gradients, losses, weights, metrics, buffers): one gradient for each trained parameter, None for one
    that the loss does not reach; losses, weights (None without) and metrics per example; each buffer, None where unchanged.

    Attributes:
        graph: the operations.
        constants: tensors that the graph takes from elsewhere, by name.
        captured: their ids, as the model holds them.
        lane_inputs: one for each of `LaneTensors.all`.
        batch_inputs: one for each tensor of the batch.
        example: value of each input.
        results: what the graph returned for it while it was recorded.
        random_state: of the device's global generator when recording began.
    """

    graph: fx.Graph
    constants: dict[str, Tensor]
    captured: set[int]
    lane_inputs: list[fx.Node]
    batch_inputs: list[fx.Node]
    example: dict[fx.Node, Tensor]
    results: tuple[Any, ...]
    random_state: Tensor


def lane_tensors(stack: LaneStack, first: int, lanes: int, *, copy: bool = False) -> LaneTensors:
    """Return views of the rows from `first` on, or of a copy of them with the same strides."""
    rows: Any = slice(first, first + lanes) if lanes > 1 else first
    lead = (lanes,) if lanes > 1 else ()

    def read(tensor: Tensor) -> Tensor:
        return tensor[rows].clone() if copy else tensor[rows]

    values = read(stack.values)
    return LaneTensors(
        [values[..., where].view(*lead, *shape) for where, shape in zip(stack.slices, stack.shapes, strict=True)],
        [read(t) for t in stack.frozen.values()],
        [read(t) for t in stack.buffers.values()],
    )


def record(
    workload: Workload,
    stack: LaneStack,
    layout: BatchLayout,
    batch: Sequence[Tensor],
    *,
    lanes: int,
    stacked: bool,
    objective: Objective,
) -> tuple[Recorded, Recorded]:
    """Record the step of the first `lanes` lanes together, and of the first lane alone; they are one for `lanes` = 1.

    The model itself is not touched, nor is any random state.

    Args:
        workload: what is computed.
        stack: whose first lanes are used as an example.
        layout: of the batch.
        batch: its tensors, with a lane axis where `stacked`.
        lanes: in one call.
        stacked: whether each lane has a batch of its own.
        objective: what is computed.

    Raises:
        CannotBatch: lanes can not be computed together.
    """
    model = copy_model(stack.models[0]).train(objective != "evaluate")
    step = _Step(workload, model, stack, layout, objective)
    alone = [t[0].clone() for t in batch] if stacked else [t.clone() for t in batch]
    with _quiet(model), isolated_rng():
        host = _host_random()
        _attempt(step, lane_tensors(stack, 0, 1, copy=True), alone)  # the model fills what it fills at its first call
        before = module_state(model)
        single = _attempt(step, lane_tensors(stack, 0, 1, copy=True), alone)
        _check_unchanged(before, module_state(model), single)
        if host != _host_random():
            raise CannotBatch("forward or loss draws from Python's or NumPy's random numbers")
        if lanes == 1:
            return single, single
        inputs = lane_tensors(stack, 0, lanes, copy=True)
        return _attempt(step, inputs, [t.clone() for t in batch], lanes=lanes, stacked=stacked), single


class _Step(nn.Module):
    """The workload's step as a function of the tensors that change: `functional_call` puts them into the model."""

    def __init__(
        self, workload: Workload, model: nn.Module, stack: LaneStack, layout: BatchLayout, objective: Objective
    ) -> None:
        super().__init__()
        self.model = model
        self._workload, self._layout, self.objective = workload, layout, objective
        self._device, self._precision = stack.device, stack.precision
        self._buffer_names = list(stack.buffers)
        self._names = [f"model.{name}" for name in (*stack.names, *stack.frozen, *stack.buffers)]

    def own(self) -> list[Tensor]:
        """Return the tensors of the model that the inputs stand for."""
        return [*self.model.parameters(), *self.model.buffers()]

    def run(self, lane: Sequence[Tensor], leaves: Sequence[Tensor]) -> Any:
        """Return (losses, weights, metrics, buffers) of one lane."""
        return functional_call(self, dict(zip(self._names, lane, strict=True)), (self._layout.rebuild(leaves),))

    def forward(self, batch: Any) -> Any:
        """Run with whatever tensors the model holds now."""
        for module in self.model.modules():
            if isinstance(module, nn.RNNBase):  # it keeps a list of its weights beside their names
                module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]
        examples = self._layout.examples
        with autocast(self._device, self._precision):
            outputs, losses, weights = per_example(self._workload, self.model, batch, examples)
        metrics = {}
        if self.objective == "evaluate":
            metrics = {name: metric(outputs, batch) for name, metric in self._workload.metrics.items()}
            for name, value in metrics.items():
                check_loss_shape(value, examples, what=f"metric {name!r}")
        buffers = [self.model.get_buffer(name) for name in self._buffer_names]
        return losses, () if weights is None else (weights,), tuple(metrics.values()), buffers

    def differentiate(self, losses: Tensor, weights: tuple[Tensor, ...], trained: list[Tensor]) -> list[Tensor | None]:
        """Return the gradients, with the arithmetic of `LoopGradients`; lanes do not mix, so their sum gives each its own."""
        if self.objective == "evaluate":
            return []
        if self.objective == "mean":
            value = losses.mean(-1, dtype=torch.float32) if losses.dtype == torch.bfloat16 else losses.mean(-1)
        else:
            value = ((weights[0].to(losses.dtype) if weights else torch.ones_like(losses)) * losses).sum(-1)
        return list(torch.autograd.grad(value.sum() if value.dim() else value, trained, allow_unused=True))


def _attempt(
    step: _Step, inputs: LaneTensors, leaves: list[Tensor], *, lanes: int = 1, stacked: bool = False
) -> Recorded:
    try:
        return _record(step, inputs, leaves, lanes=lanes, stacked=stacked)
    except CannotRecord as reason:
        raise CannotBatch(str(reason)) from reason
    except Exception as error:
        if is_out_of_memory(error):
            raise
        what = "lanes can not be batched" if lanes > 1 else "the step can not be traced"
        message = str(error).strip().splitlines()
        raise CannotBatch(f"{what} ({type(error).__name__}: {message[0] if message else 'no message'})") from error


def _record(step: _Step, inputs: LaneTensors, leaves: list[Tensor], *, lanes: int, stacked: bool) -> Recorded:
    train = step.objective != "evaluate"
    trained = [t.requires_grad_(train) for t in inputs.trained]
    recorder = Recorder(hidden=step.own())
    random_state = global_generator(inputs.trained[0].device).get_state()
    lane_nodes = [recorder.placeholder(f"lane_{i}", t) for i, t in enumerate(inputs.all)]
    batch_nodes = [recorder.placeholder(f"batch_{i}", t) for i, t in enumerate(leaves)]
    with torch.set_grad_enabled(train), _batchable() if lanes > 1 else contextlib.nullcontext(), recorder:
        buffers = [t.clone() for t in inputs.buffers]
        clones = [recorder.node_of(t) for t in buffers]
        function: Any = step.run
        if lanes > 1:
            function = vmap(step.run, in_dims=(0, 0 if stacked else None), randomness="different")
        losses, weights, metrics, after = function([*trained, *inputs.frozen, *buffers], leaves)
        grads = step.differentiate(losses, weights, trained)
    results = (grads, losses, weights[0] if weights else None, list(metrics), list(after))
    nodes = tree_map(lambda t: None if t is None else recorder.node_of(t), results)
    touched = _check_writes(recorder, [*lane_nodes, *batch_nodes])
    for place, clone in enumerate(clones):
        _check_buffer(inputs.buffers[place], after[place])
        if nodes[4][place] is clone and clone not in touched:
            nodes[4][place] = None
    recorder.graph.output(nodes)
    values = tree_map(lambda t: None if t is None else t.detach(), results)
    example = dict(zip([*lane_nodes, *batch_nodes], [*(t.detach() for t in inputs.all), *leaves], strict=True))
    captured = recorder.constants, recorder.captured
    return Recorded(recorder.graph, *captured, lane_nodes, batch_nodes, example, values, random_state)


@contextlib.contextmanager
def _batchable() -> Iterator[None]:
    """Let operations be computed in the form that `vmap` can batch."""
    with sdpa_kernel(SDPBackend.MATH), VmapFriendly():
        yield


def _check_writes(recorder: Recorder, inputs: Sequence[fx.Node]) -> set[fx.Node]:
    touched = written(recorder.graph)
    if touched.intersection(inputs):
        raise CannotRecord("forward or loss writes into a parameter or into the batch")
    if any(node.op == "get_attr" for node in touched):
        raise CannotRecord(
            "forward or loss writes into a tensor that is no buffer of the model: register_buffer makes it one"
        )
    return touched


def _check_buffer(before: Tensor, after: Tensor) -> None:
    if before.shape != after.shape or before.dtype != after.dtype:
        raise CannotRecord(
            f"a buffer of shape {tuple(before.shape)} becomes one of shape {tuple(after.shape)} in forward"
        )


def _check_unchanged(before: ModuleState, after: ModuleState, recorded: Recorded) -> None:
    """Raise where the model's attributes changed, unless one is a tensor that was written anew before it was read."""
    for name in changed(before, after):
        module, _, key = name.rpartition(".")
        was, now = before.get((module, key), "nothing"), after.get((module, key), "nothing")
        if not was[0] == now[0] == "tensor" or was[1] in recorded.captured:
            raise CannotBatch(f"the attribute {name!r} of the model changes with every step")


def _host_random() -> tuple[Any, ...]:
    _, words, *rest = np.random.get_state(legacy=True)  # noqa: NPY002
    return random.getstate(), np.asarray(words).tobytes(), rest


@contextlib.contextmanager
def _quiet(model: nn.Module) -> Iterator[None]:
    """Hide warnings, which plain autograd gives as well, and keep to operations that can be taken apart."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with warnings.catch_warnings(), _plain_cells(model):
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _plain_cells(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Return a block in which a recurrent layer is computed cell by cell: oneDNN's own can not be recorded."""
    if any(isinstance(module, nn.RNNBase) for module in model.modules()):
        block: contextlib.AbstractContextManager[Any] = torch.backends.mkldnn.flags(enabled=False)
        return block
    return contextlib.nullcontext()
