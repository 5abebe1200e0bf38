"""Records one training step, or one evaluation batch, of one lane or of several lanes together."""

from __future__ import annotations

import contextlib
import inspect
import random
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.func import vmap
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from workbench.train.lane_stack import LaneStack
from workbench.train.lane_stacks import is_out_of_memory
from workbench.train.rng import isolated_rng
from workbench.train.traced.batch import BatchLayout
from workbench.train.traced.cannot_batch import CannotBatch
from workbench.train.traced.graph.draws import global_generator
from workbench.train.traced.graph.nodes import written
from workbench.train.traced.graph.recorder import CannotRecord, Recorder
from workbench.train.traced.module_state import ModuleState, changed, copy_model, module_state
from workbench.train.traced.step import LaneStep, LaneTensors, Objective, lane_tensors
from workbench.workloads.base import Workload

__all__ = ["Recorded", "record"]


_DEFAULTS = {"weight": None, "size_average": None, "reduce": None, "label_smoothing": 0.0}
_signatures = {function: inspect.signature(function) for function in (F.cross_entropy, F.nll_loss)}


class VmapFriendly(TorchFunctionMode):
    """Replaces calls inside its block; whatever it does not know passes through."""

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call `func`, or what stands in for it."""
        kwargs = dict(kwargs or {})
        if func in _signatures:
            replaced = _negative_log_likelihood(func, _signatures[func].bind(*args, **kwargs))
            if replaced is not None:
                return replaced
        return func(*args, **kwargs)


def _negative_log_likelihood(func: Any, bound: inspect.BoundArguments) -> Tensor | None:
    """Return the loss of a call with integer classes and no frills; None for any other."""
    bound.apply_defaults()
    given = bound.arguments
    outputs, targets, reduction = given["input"], given["target"], given["reduction"]
    plain = all(given[name] == default for name, default in _DEFAULTS.items() if name in given)
    if not plain or outputs.dim() < 2 or targets.shape != (outputs.shape[0], *outputs.shape[2:]):
        return None
    if targets.dtype != torch.int64 or reduction not in ("none", "mean", "sum"):
        return None
    log_probabilities = outputs.log_softmax(1) if func is F.cross_entropy else outputs
    counted = targets != given["ignore_index"]
    chosen = log_probabilities.gather(1, torch.where(counted, targets, 0).unsqueeze(1)).squeeze(1)
    losses = torch.where(counted, -chosen, 0.0)
    if reduction == "none":
        return losses
    return losses.sum() / counted.sum() if reduction == "mean" else losses.sum()


@dataclass(frozen=True)
class Recorded:
    """A recorded step.

    The graph returns (gradients, losses, weights, metrics, buffers, prediction): one gradient for each trained parameter, None for one
    that the loss does not reach; losses, weights (None without) and metrics per example; each buffer, None where unchanged; what was predicted, None without.

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
    """Record the step of the first `lanes` lanes together, and of the first alone; neither model nor random state move.

    Args:
        workload: what is computed.
        stack: whose first lanes are used as an example.
        layout: of the batch.
        batch: its tensors, with a lane axis where `stacked`.
        lanes: in one call; with 1 the two records are one.
        stacked: whether each lane has a batch of its own.
        objective: what is computed.

    Raises:
        CannotBatch: lanes cannot be computed together.
    """
    model = copy_model(stack.models[0]).train(objective != "evaluate")
    step = LaneStep(workload, model, stack, layout, objective)
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


def _attempt(
    step: LaneStep, inputs: LaneTensors, leaves: list[Tensor], *, lanes: int = 1, stacked: bool = False
) -> Recorded:
    try:
        return _record(step, inputs, leaves, lanes=lanes, stacked=stacked)
    except CannotRecord as reason:
        raise CannotBatch(str(reason)) from reason
    except Exception as error:
        if is_out_of_memory(error):
            raise
        what = "lanes cannot be batched" if lanes > 1 else "the step cannot be traced"
        message = str(error).strip().splitlines()
        raise CannotBatch(f"{what} ({type(error).__name__}: {message[0] if message else 'no message'})") from error


def _record(step: LaneStep, inputs: LaneTensors, leaves: list[Tensor], *, lanes: int, stacked: bool) -> Recorded:
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
        losses, weights, metrics, after, predictions = function([*trained, *inputs.frozen, *buffers], leaves)
        grads = step.differentiate(losses, weights, trained)
    prediction = predictions[0] if predictions else None
    results = (grads, losses, weights[0] if weights else None, list(metrics), list(after), prediction)
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
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with _plain_cells(model):
                yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _plain_cells(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Return a block in which a recurrent layer is computed cell by cell: oneDNN's own cannot be recorded."""
    if any(isinstance(module, nn.RNNBase) for module in model.modules()):
        block: contextlib.AbstractContextManager[Any] = torch.backends.mkldnn.flags(enabled=False)
        return block
    return contextlib.nullcontext()
