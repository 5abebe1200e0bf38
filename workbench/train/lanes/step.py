"""A workload's step as a graph: recorded for one lane, or for several lanes together under `vmap`."""

import contextlib
import copy
import enum
import inspect
import warnings
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

from workbench.errors import callers_line, in_one_line
from workbench.train.evaluation import values_of
from workbench.train.forward import FunctionObserver, autocast, is_out_of_memory, per_example
from workbench.train.lanes.recorder import CannotBatch, Recorder, TensorMeta, written
from workbench.train.rng import global_generator, host_random, isolated_rng
from workbench.train.stacked_weights import LaneStack
from workbench.workloads.base import Workload
from workbench.workloads.losses import label_of, prediction_of

Objective = Literal["mean", "sum", "evaluate"]
"""What a step computes: gradients of the mean loss, of the weighted sum, or no gradient but the metrics."""


class BatchLayout(NamedTuple):
    """What two batches must have in common for one program to take both."""

    examples: int
    tensors: tuple[tuple[torch.Size, tuple[int, ...], torch.dtype], ...]
    constants: tuple[tuple[int, type, Hashable], ...]
    tree: TreeSpec

    def rebuild(self, tensors: Sequence[Any]) -> Any:
        """Return the batch with these tensors in it."""
        leaves = list(tensors)
        for position, _, value in self.constants:
            leaves.insert(position, value)
        return tree_unflatten(leaves, self.tree)


SplitBatch = tuple[list[Tensor], BatchLayout]
_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), enum.Enum, torch.dtype, torch.device)


def split_batch(batch: Any, examples: int) -> SplitBatch:
    """Return the tensors of a batch, each without gaps in memory, and its layout."""
    leaves, tree = tree_flatten(batch)
    tensors: list[Tensor] = []
    constants = []
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            tensors.append(leaf if leaf.is_contiguous() or TensorMeta.of(leaf).dense else leaf.contiguous())
        elif isinstance(leaf, _CONSTANTS):
            constants.append((position, type(leaf), leaf))
        else:
            raise CannotBatch(f"the batch holds a {type(leaf).__name__}, which a traced step cannot take as an input")
    return tensors, BatchLayout(
        examples, tuple((t.shape, t.stride(), t.dtype) for t in tensors), tuple(constants), tree
    )


def stack_batches(batches: Sequence[SplitBatch]) -> SplitBatch:
    """Return the batches of several lanes as one, each tensor with a lane axis, and the layout that they share."""
    layout = batches[0][1]
    if any(other != layout for _, other in batches[1:]):
        raise CannotBatch("trials with different data order get batches of different shapes at the same step")
    return [torch.stack(parts) for parts in zip(*(tensors for tensors, _ in batches), strict=True)], layout


class LaneTensors(NamedTuple):
    """Views of the rows of a stack that one call reads; without a lane axis where the call has one lane."""

    trained: list[Tensor]
    frozen: list[Tensor]
    buffers: list[Tensor]

    @property
    def all(self) -> list[Tensor]:
        """All of them, in the order of a program's inputs."""
        return [*self.trained, *self.frozen, *self.buffers]


def lane_tensors(stack: LaneStack, first: int, lanes: int, *, copied: bool = False) -> LaneTensors:
    """Return views of the rows from `first` on, or of a copy of them with the same strides; a row that is left alone is copied to be two."""
    rows: Any = slice(first, first + lanes) if lanes > 1 else first
    lead = (lanes,) if lanes > 1 else ()
    own = [t[rows] for t in (stack.values, *stack.frozen.values(), *stack.buffers.values())]
    if lanes > len(stack) - first:
        own = [torch.cat([t, t]) for t in own]
    values, *others = (t.clone() if copied else t for t in own)
    trained = [values[..., where].view(*lead, *shape) for where, shape in zip(stack.slices, stack.shapes, strict=True)]
    return LaneTensors(trained, others[: len(stack.frozen)], others[len(stack.frozen) :])


class StepResult(NamedTuple):
    """What a step returns, with a lane axis unless it has a single lane; all but gradients and buffers per example."""

    grads: Sequence[Any]  # one for each trained parameter; None is zero
    losses: Any
    weights: Any  # None where every example weighs one
    metrics: Sequence[Any]  # one for each metric of the workload, in evaluation
    buffers: Sequence[Any]  # one for each buffer; None where it is unchanged
    prediction: Any  # in evaluation; None where the outputs say nothing that a table could hold


@dataclass(frozen=True)
class Recorded:
    """A recorded step; its graph returns a `StepResult`."""

    graph: fx.Graph
    example: dict[fx.Node, Any]
    captured: set[int]
    result: StepResult
    random_state: Tensor


def record(
    workload: Workload, stack: LaneStack, layout: BatchLayout, batch: Sequence[Tensor], *, lanes: int, stacked: bool, objective: Objective
) -> tuple[Recorded, Recorded]:  # fmt: skip
    """Record the step of the first `lanes` lanes together, and of the first alone; neither model nor random state move."""
    model = _copied(stack.models[0]).train(objective != "evaluate")
    step = _Step(workload, model, stack, layout, objective)
    with _quiet(model), isolated_rng():
        host = host_random()
        alone = [t[0] for t in batch] if stacked else batch
        # the model fills what it fills at its first call
        single = step.record(lane_tensors(stack, 0, 1, copied=True), alone)
        before = module_state(model)
        found = step.record(lane_tensors(stack, 0, lanes, copied=True), batch, lanes=lanes, stacked=stacked)
        after = module_state(model)
        for name in _changed(before, after):  # a tensor that was written anew before it was read is allowed
            was, now = before.get(name, "nothing"), after.get(name, "nothing")
            if not was[0] == now[0] == "tensor" or was[1] in found.captured:
                raise CannotBatch(f"the attribute {name!r} of the model changes with every step")
        if host != host_random():
            raise CannotBatch("forward or loss draws from Python's or NumPy's random numbers")
        return found, single


class _Step(nn.Module):
    """The workload's step as a function of the tensors that change: `functional_call` puts them into the model."""

    def __init__(
        self, workload: Workload, model: nn.Module, stack: LaneStack, layout: BatchLayout, objective: Objective
    ) -> None:
        super().__init__()
        self.model = model
        self._workload, self._layout, self._objective = workload, layout, objective
        self._device, self._precision = stack.device, stack.precision
        self._buffer_names = list(stack.buffers)
        self._names = [f"model.{name}" for name in (*stack.names, *stack.frozen, *stack.buffers)]

    def forward(self, batch: Any) -> Any:
        """Return (losses, metrics, buffers, weights, predictions) with whatever tensors the model holds now."""
        for module in self.model.modules():
            if isinstance(module, nn.RNNBase):  # it keeps a list of its weights beside their names
                module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]
        examples, prediction = self._layout.examples, None
        metrics: dict[str, Tensor] = {}
        if self._objective == "evaluate":
            how: Any = {"device": self._device, "precision": self._precision}
            outputs, losses, weights, metrics = values_of(self._workload, self.model, batch, examples, **how)
            prediction = prediction_of(outputs, label_of(self._workload.loss, batch, examples), examples)
        else:
            with autocast(self._device, self._precision):
                _, losses, weights = per_example(self._workload, self.model, batch, examples)
                if not losses.dim():
                    raise CannotBatch("the loss is one value per batch")
        buffers = [self.model.get_buffer(name) for name in self._buffer_names]
        optional = ((t,) if t is not None else () for t in (weights, prediction))  # vmap takes no None
        return losses, tuple(metrics.values()), buffers, *optional

    def record(
        self, inputs: LaneTensors, batch: Sequence[Tensor], *, lanes: int = 1, stacked: bool = False
    ) -> Recorded:
        """Record the step on some lanes; with one it has no lane axis."""
        try:
            return self._record(inputs, [t.clone() for t in batch], lanes, stacked)
        except CannotBatch as error:
            raise CannotBatch(f"{error}{callers_line(error)}") from error
        except Exception as error:
            if is_out_of_memory(error):
                raise
            what = "lanes cannot be batched" if lanes > 1 else "the step cannot be traced"
            raise CannotBatch(f"{what} ({in_one_line(error)})") from error

    def _record(self, inputs: LaneTensors, leaves: list[Tensor], lanes: int, stacked: bool) -> Recorded:
        train = self._objective != "evaluate"
        trained = [t.requires_grad_(train) for t in inputs.trained]
        recorder = Recorder(hidden=[*self.model.parameters(), *self.model.buffers()])
        random_state = global_generator(self._device).get_state()
        nodes = [recorder.placeholder(f"lane_{i}", t) for i, t in enumerate(inputs.all)]
        nodes += [recorder.placeholder(f"batch_{i}", t) for i, t in enumerate(leaves)]

        def run(lane: Sequence[Tensor], leaves: Sequence[Tensor]) -> Any:
            return functional_call(self, dict(zip(self._names, lane, strict=True)), (self._layout.rebuild(leaves),))

        with torch.set_grad_enabled(train), contextlib.ExitStack() as batchable, recorder.recording():
            if lanes > 1:  # operations in the form that `vmap` can batch
                batchable.enter_context(sdpa_kernel(SDPBackend.MATH))
                batchable.enter_context(FunctionObserver(class_losses))
            buffers = [t.clone() for t in inputs.buffers]
            clones = [recorder.node_of(t) for t in buffers]
            together = vmap(run, in_dims=(0, 0 if stacked else None), randomness="different") if lanes > 1 else run
            losses, metrics, after, weights, predictions = together([*trained, *inputs.frozen, *buffers], leaves)
            grads = self._differentiate(losses, weights, trained) if train else []
        (weight,), (prediction,) = weights or (None,), predictions or (None,)
        result = StepResult(grads, losses, weight, metrics, list(after), prediction)
        output = tree_map(lambda t: None if t is None else recorder.node_of(t), result)
        touched = written(recorder.graph)
        if touched.intersection(nodes):
            raise CannotBatch("forward or loss writes into a parameter or into the batch")
        if any(node.op == "get_attr" for node in touched):
            raise CannotBatch(
                "forward or loss writes into a tensor that is no buffer of the model: register_buffer makes it one"
            )
        for place, (was, now) in enumerate(zip(inputs.buffers, after, strict=True)):
            if was.shape != now.shape or was.dtype != now.dtype:
                raise CannotBatch(
                    f"a buffer of shape {tuple(was.shape)} becomes one of shape {tuple(now.shape)} in forward"
                )
            if output.buffers[place] is clones[place] and clones[place] not in touched:
                output.buffers[place] = None
        recorder.graph.output(output)
        values = tree_map(lambda t: None if t is None else t.detach(), result)
        example = dict(zip(nodes, [*(t.detach() for t in inputs.all), *leaves], strict=True))
        example |= {n: recorder.constants[str(n.target)] for n in recorder.graph.nodes if n.op == "get_attr"}
        return Recorded(recorder.graph, example, recorder.captured, values, random_state)

    def _differentiate(self, losses: Tensor, weights: tuple[Tensor, ...], trained: list[Tensor]) -> list[Tensor | None]:
        """Return the gradients, with the arithmetic of `LoopGradients`; lanes do not mix, so their sum gives each its own."""
        if self._objective == "mean":
            value = losses.mean(-1, dtype=torch.float32) if losses.dtype == torch.bfloat16 else losses.mean(-1)
        else:
            value = ((weights[0].to(losses.dtype) if weights else torch.ones_like(losses)) * losses).sum(-1)
        return list(torch.autograd.grad(value.sum() if value.dim() else value, trained, allow_unused=True))


@contextlib.contextmanager
def _quiet(model: nn.Module) -> Iterator[None]:
    """Hide warnings, which plain autograd gives as well, and keep to operations that can be taken apart."""
    fast = torch.backends.mha.get_fastpath_enabled()
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())  # oneDNN's own cannot be recorded
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with torch.backends.mkldnn.flags(enabled=False) if recurrent else contextlib.nullcontext():
                yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


_PLAIN = {"weight": None, "size_average": None, "reduce": None, "label_smoothing": 0.0, "reduction": "none"}
_CLASS_LOSSES = {f: inspect.signature(f) for f in (F.cross_entropy, F.nll_loss)}


def class_losses(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Compute plain losses of integer classes by gathering: torch's own rule for them under vmap imports symbolic algebra, a second."""
    if func not in _CLASS_LOSSES:
        return func(*args, **kwargs)
    bound = _CLASS_LOSSES[func].bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    outputs, targets = given["input"], given["target"]
    plain = all(given[name] == value for name, value in _PLAIN.items() if name in given)
    plain = plain and targets.dtype == torch.int64 and outputs.dim() > 1
    if not plain or targets.shape != (outputs.shape[0], *outputs.shape[2:]):
        return func(*args, **kwargs)
    log_probabilities = outputs.log_softmax(1) if func is F.cross_entropy else outputs
    counted = targets != given["ignore_index"]
    chosen = log_probabilities.gather(1, torch.where(counted, targets, 0).unsqueeze(1)).squeeze(1)
    return torch.where(counted, -chosen, 0.0)


_MEMBERS = ("_parameters", "_buffers", "_modules", "_flat_weights", "_flat_weight_refs")
_HOOKS = frozenset(key for key, value in vars(nn.Module()).items() if isinstance(value, dict) and key not in _MEMBERS)
DEPTH = 4  # rule of thumb: containers in containers are looked into this deep


def _copied(model: nn.Module) -> nn.Module:
    """Return a copy with memory of its own: a deep copy of a row would bring the whole stack along."""
    memo: dict[int, Any] = {id(b): b.detach().clone() for b in model.buffers()}
    memo |= {id(p): nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad) for p in model.parameters()}
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise CannotBatch(f"the model cannot be copied ({type(error).__name__}: {error})") from error


def module_state(model: nn.Module, *, by_value: bool = False) -> dict[str, Any]:
    """Return what each module keeps in Python, parameters and buffers aside: `module.attribute` -> a form to compare.

    Args:
        by_value: compare tensors by their values, for two models; else by identity, for one model at two times.
    """
    own = {id(member) for member in (*model.modules(), *model.parameters(), *model.buffers())}

    def tensor(value: Tensor) -> Any:
        if not by_value:
            return "tensor", id(value), value._version
        content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return "tensor", tuple(value.shape), str(value.dtype), hash(content)

    def freeze(value: Any, depth: int = DEPTH) -> Any:
        if isinstance(value, (bool, int, float, complex, str, bytes, type(None))):
            return type(value).__name__, repr(value)  # repr: nan is nan, and 1 is not True
        kind, inside = type(value).__qualname__, getattr(value, "__dict__", None)
        if id(value) in own or depth == 0:
            return kind
        if isinstance(value, Tensor):
            return tensor(value)
        if isinstance(value, nn.Module):  # kept in a list, so that nobody trains it
            return kind, *((name, tensor(t)) for name, t in value.state_dict(keep_vars=True).items())
        if isinstance(value, (set, frozenset)):
            value = sorted(value, key=repr)
        if isinstance(value, (list, tuple, deque)):
            return kind, *(freeze(v, depth - 1) for v in value)
        if not isinstance(value, Mapping) and isinstance(inside, dict) and not callable(value):
            value = inside
        if isinstance(value, Mapping):
            return kind, *((repr(k), freeze(v, depth - 1)) for k, v in value.items())
        return kind if by_value else (kind, id(value))

    return {
        f"{name}.{key}".lstrip("."): freeze(list(value.values()) if key in _HOOKS else value)
        for name, module in model.named_modules()
        for key, value in vars(module).items()  # a hook's key is its number
        if key not in _MEMBERS
    }


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    return [name for name in sorted({*before, *after}) if before.get(name, "nothing") != after.get(name, "nothing")]


def check_alike(models: Sequence[nn.Module]) -> None:
    """Check that models differ in parameters and buffers alone; an attribute that differs is named in a `CannotBatch`."""
    first = module_state(models[0], by_value=True)
    if changed := [name for model in models[1:] for name in _changed(first, module_state(model, by_value=True))]:
        raise CannotBatch(f"the attribute {changed[0]!r} of the model is not the same in all trials")
