"""`LaneProgram`: one training step, or one evaluation batch, of some lanes as a list of tensor operations, recorded once per batch shape."""

import functools
import re
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from workbench.train.forward import peak_bytes
from workbench.train.lanes.passes import clean_up, constants, dead_code
from workbench.train.lanes.recorder import CannotBatch, TensorMeta, arguments, is_random, meta
from workbench.train.lanes.step import BatchLayout, Objective, Recorded, StepResult, module_state, record
from workbench.train.rng import global_generator
from workbench.train.stacked_weights import LaneStack
from workbench.workloads.base import Workload

aten = torch.ops.aten
TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-3}
"""Rule of thumb: norm of the difference that is allowed, as a share of the norm of what is expected."""
SHORT = 0.1  # rule of thumb: the same for types of fewer digits, and for forward passes in them
KINK = 0.05  # rule of thumb: the same for a gradient in which rounding switched one unit of a ReLU on or off
KEPT_PROGRAMS = 32  # rule of thumb: a program is small, but holds on to its workload
MAX_LAYOUTS = 8  # rule of thumb: batches of more shapes than this cost more in tracing than a traced step saves

Function = Callable[..., Any]


class LaneProgram:
    """A recorded step as a function."""

    def __init__(self, recorded: Recorded, single: Recorded, *, lanes: int, device: torch.device) -> None:
        graph, example = recorded.graph, recorded.example
        dead_code(graph)
        self.lanes = lanes
        self.draws = draw_per_lane(graph, single.graph, lanes=lanes, device=device)
        generators = [torch.Generator(device) for _ in range(lanes)]
        example |= {n: generators for n in graph.nodes if n.op == "placeholder" and n.name == GENERATORS}
        with torch.no_grad():
            clean_up(graph, lambda: _run(_calls(graph), dict(example), kept=set()), lanes=lanes, device=device)
            generators[0].set_state(recorded.random_state)
            self._call, result = _lower(graph, example)
            inputs = [value for node, value in example.items() if node.op == "placeholder"]
            # of one lane; how many lanes share a call is decided by it
            self.peak_bytes = peak_bytes(lambda: self._call(*inputs), device) if lanes == 1 else None
        if not self.draws or lanes == 1:  # several lanes drew from one generator while they were recorded
            _check(recorded.result, result)
        self.changes = [place for place, buffer in enumerate(result.buffers) if buffer is not None]

    def __call__(
        self, lane: Sequence[Tensor], batch: Sequence[Tensor], generators: Sequence[torch.Generator]
    ) -> StepResult:
        """Run the step; nothing but the generators, one per lane, is written to."""
        return StepResult(*self._call(*lane, *batch, *((generators,) if self.draws else ())))


def _lower(graph: fx.Graph, example: Mapping[fx.Node, Any]) -> tuple[Function, StepResult]:
    """Return a graph as a function of its inputs, and what it returns for the example; constants are computed here."""
    once, output = constants(graph), graph.output_node()
    results, values = set(output.all_input_nodes), dict(example)
    nodes = [node for node in _calls(graph) if node not in once]
    calls = [*(node for node in _calls(graph) if node in once), *nodes]
    for node, function in _run(calls, values, kept={*once, *results}).items():
        node.target = function
    result: Any = fx.node.map_arg(output.args[0], lambda n: values[n])
    known = [node for node in once if node in results or any(user not in once for user in node.users)]
    with graph.inserting_before(next(iter(graph.nodes))):
        for number, node in enumerate(known):
            node.replace_all_uses_with(graph.placeholder(f"known_{number}"))
    for node in [node for node in reversed(graph.nodes) if node in once]:
        graph.erase_node(node)
    code = graph.python_code("self")  # it frees each tensor after its last use
    dotted = r"\btorch(?:\.\w+)+"  # looked up once, not at every call
    world = code.globals | {n.replace(".", "_"): eval(n, code.globals) for n in re.findall(dotted, code.src)}
    exec(re.sub(dotted, lambda found: found[0].replace(".", "_"), code.src), world)
    return partial(world["forward"], None, *(values[node] for node in known)), result


def _calls(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "call_function"]


def _run(nodes: Sequence[fx.Node], values: dict[fx.Node, Any], *, kept: set[fx.Node]) -> dict[fx.Node, Function]:
    """Run nodes in order, put the values of those in `kept` into `values`, and return what each can be called by."""
    callables: dict[fx.Node, Function] = {}
    last = {each: node for node in nodes for each in (node, *node.all_input_nodes)}
    for node in nodes:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: values[n])
        callables[node], values[node] = _first_that_works(node, args, kwargs)
        if isinstance(values[node], Tensor):
            node.meta["tensor"] = TensorMeta.of(values[node])
        for each in (node, *node.all_input_nodes):
            if last[each] is node and each not in kept:
                del values[each]
    return callables


def _first_that_works(node: fx.Node, args: Any, kwargs: Any) -> tuple[Function, Any]:
    """Return the fastest callable for an operation, and its result: torch's Python binding reads its arguments in half the time."""
    target: Any = node.target
    if target in (aten.view.default, aten._unsafe_view.default):
        try:
            return torch.Tensor.view, args[0].view(args[1])
        except RuntimeError:  # what was a view before the graph was changed may need a copy now
            return torch.reshape, torch.reshape(*args)
    if isinstance(target, torch._ops.OpOverload) and target.namespace == "aten":
        for place in (torch, torch.Tensor, functional):
            binding: Any = getattr(place, target.overloadpacket.__name__, None)
            if isinstance(binding, (BuiltinFunctionType, MethodDescriptorType)):
                try:
                    return binding, binding(*args, **kwargs)
                except Exception:  # it takes the arguments in another order, or not at all
                    break
    return target, target(*args, **kwargs)


def _check(expected: StepResult, found: StepResult) -> None:
    """Check that a program returns what the recorded step did, predictions aside: rounding decides between equal logits."""
    pairs = [(expected.losses, found.losses), (expected.weights, found.weights)]
    pairs += [*zip(expected.metrics, found.metrics, strict=True), *zip(expected.buffers, found.buffers, strict=True)]
    checked = [(a, b, TOLERANCES.get(a.dtype, SHORT)) for a, b in pairs if a is not None and b is not None]
    grads = [(a, b) for a, b in zip(expected.grads, found.grads, strict=True) if a is not None]
    wrong = any(a.shape != b.shape for a, b in grads)
    if grads and not wrong:  # together: some are zero but for rounding
        plain, ours = (torch.cat([each.reshape(-1) for each in side]) for side in zip(*grads, strict=True))
        checked.append((plain, ours, KINK))
    if wrong or any(a.shape != b.shape or differing_rows(a[None], b[None], allowed) for a, b, allowed in checked):
        raise CannotBatch("the recorded step gives other numbers than the step itself")


def differing_rows(expected: Tensor, found: Tensor, tolerance: float) -> list[int]:
    """Return the rows in which two tensors (rows, ...) differ by more than a share of the norm; where both are not finite they agree."""
    expected, found = (value.reshape(len(value), -1) for value in (expected, found))
    if expected.is_floating_point():
        finite = expected.isfinite()
        difference = torch.where(finite, expected - found, 0).norm(dim=1)
        allowed = tolerance * torch.where(finite, expected, 0).norm(dim=1)
        wrong = ~(difference <= allowed) | (~finite & found.isfinite()).any(1)
    else:
        wrong = (expected != found).any(1)
    rows: list[int] = wrong.nonzero().flatten().tolist()
    return rows


_built: OrderedDict[Hashable, tuple[Workload, LaneProgram | CannotBatch]] = OrderedDict()


class LanePrograms:
    """The programs of one stack, shared with other stacks of the same workload and model in this process."""

    def __init__(self, workload: Workload, stack: LaneStack) -> None:
        self._workload, self._stack = workload, stack
        model = stack.models[0]
        tensors = chain(model.named_parameters(), model.named_buffers())
        attributes = module_state(model, by_value=True).items()
        self._kind = (
            id(workload),
            stack.device,
            stack.precision,
            tuple((name, t.shape, t.dtype, t.requires_grad) for name, t in tensors),
            tuple((name, type(module)) for name, module in model.named_modules()),
            tuple(each for each in attributes if not f".{each[0]}".endswith(".training")),
        )
        self._layouts: dict[Objective, set[BatchLayout]] = defaultdict(set)
        self._recent: dict[Hashable, LaneProgram] = {}

    def get(
        self, layout: BatchLayout, batch: Sequence[Tensor], *, lanes: int, stacked: bool, objective: Objective
    ) -> LaneProgram:
        """Return the program for such a batch, built now where there is none."""
        key = (layout, lanes, stacked, objective)
        if key not in self._recent:
            self._layouts[objective].add(layout)
            if len(self._layouts[objective]) > MAX_LAYOUTS:
                raise CannotBatch(
                    f"batches come in more than {MAX_LAYOUTS} shapes or with changing constants, and each would be traced anew"
                )
            full = (self._kind, *key)
            if full not in _built:
                found: LaneProgram | CannotBatch
                try:
                    how: dict[str, Any] = {"lanes": lanes, "stacked": stacked, "objective": objective}
                    recorded = record(self._workload, self._stack, layout, batch, **how)
                    found = LaneProgram(*recorded, lanes=lanes, device=self._stack.device)
                except CannotBatch as reason:
                    found = reason.with_traceback(None)
                _built[full] = (self._workload, found)
                while len(_built) > KEPT_PROGRAMS:
                    _built.popitem(last=False)
            _built.move_to_end(full)
            found = _built[full][1]
            if isinstance(found, CannotBatch):
                raise CannotBatch(str(found))
            self._recent[key] = found
        return self._recent[key]


GENERATORS = "generators"  # name of the input that holds the generators, one per lane

_global_state = threading.Lock()


@dataclass(frozen=True, eq=False)
class _Draw:
    """A random operation lane by lane, each with its own generator."""

    __name__ = "draw"  # a graph asks what it calls for its name

    op: Any  # as a single trial calls it, with `args` and `kwargs`
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    # place of each tensor among them, and its strides in a single trial, which decide which number lands where
    tensors: tuple[tuple[int, tuple[int, ...]], ...]
    fills: bool  # whether the first tensor is filled in place

    def __call__(self, generators: Sequence[torch.Generator], *tensors: Tensor) -> Any:
        """Return the result, stacked where there is a lane axis; the first tensor where it is filled."""
        if len(generators) == 1:
            return self._draw(generators[0], tensors)
        rows = [self._lane(lane, generator, tensors) for lane, generator in enumerate(generators)]
        if self.fills:
            return tensors[0]
        if isinstance(rows[0], Tensor):
            return torch.stack(rows)
        return tuple(torch.stack(parts) for parts in zip(*rows, strict=True))

    def _lane(self, lane: int, generator: torch.Generator, tensors: Sequence[Tensor]) -> Any:
        rows = [tensor[lane] for tensor in tensors]
        for place, (_, stride) in enumerate(self.tensors):
            if rows[place].stride() != stride or (self.op._schema.is_mutable and not self.fills):
                row = rows[place]
                rows[place] = torch.empty_strided(row.shape, stride, dtype=row.dtype, device=row.device).copy_(row)
        result = self._draw(generator, rows)
        if self.fills and rows[0].data_ptr() != tensors[0][lane].data_ptr():
            tensors[0][lane].copy_(rows[0])
        return result

    def _draw(self, generator: torch.Generator, tensors: Sequence[Tensor]) -> Any:
        args = list(self.args)
        for (place, _), tensor in zip(self.tensors, tensors, strict=True):
            args[place] = tensor
        if _takes_generator(self.op.overloadpacket):
            return self.op.overloadpacket(*args, **self.kwargs, generator=generator)
        with _global_state:  # another lane must not draw from it at the same time
            shared = global_generator(generator.device)
            if shared is generator:
                return self.op(*args, **self.kwargs)
            before = shared.get_state()
            shared.set_state(generator.get_state())
            try:
                return self.op(*args, **self.kwargs)
            finally:
                generator.set_state(shared.get_state())
                shared.set_state(before)


@functools.cache
def _takes_generator(packet: Any) -> bool:
    overloads = (getattr(packet, name) for name in packet.overloads())
    return any(argument.name == "generator" for each in overloads for argument in each._schema.arguments)


def draw_per_lane(graph: fx.Graph, alone: fx.Graph, *, lanes: int, device: torch.device) -> bool:
    """Let every random node of `graph` draw from the lanes' generators, the last input, and return whether there is one."""
    nodes, single = ([node for node in each.nodes if is_random(node)] for each in (graph, alone))
    if len(nodes) != len(single):
        raise CannotBatch(f"a single lane draws {len(single)} times and {lanes} lanes together {len(nodes)} times")
    if not nodes:
        return False
    with graph.inserting_after(next(node for node in reversed(graph.nodes) if node.op == "placeholder")):
        generators = graph.placeholder(GENERATORS)
    generators.meta["base"] = generators
    for node, plain in zip(nodes, single, strict=True):
        result = node if "tensor" in node.meta else next(iter(node.users))
        if meta(result).device.type != device.type:
            raise CannotBatch(f"random numbers are drawn on {meta(result).device}, the model is on {device}")
        theirs = [value for a, value in arguments(plain) if not a.kwarg_only and a.name != "generator"]
        tensors = [value for a, value in arguments(node) if isinstance(value, fx.Node)]
        one = [(place, meta(value)) for place, value in enumerate(theirs) if isinstance(value, fx.Node)]
        ours, fills = node.target._schema.name, node.target._schema.is_mutable
        same = plain.target._schema.name in (ours, f"{ours}_") and fills <= plain.target._schema.is_mutable
        shapes = [(lanes, *about.shape) if lanes > 1 else about.shape for _, about in one]
        if not same or shapes != [meta(each).shape for each in tensors]:
            raise CannotBatch(f"{node.target} draws random numbers in a way that lanes cannot do together")
        kwargs = {name: value for name, value in plain.kwargs.items() if name != "generator"}
        places = tuple((place, about.stride) for place, about in one)
        with graph.inserting_before(node):
            draw = _Draw(plain.target, tuple(theirs), kwargs, places, fills=fills)
            new = graph.call_function(draw, (generators, *tensors))
        new.meta = dict(node.meta) | {"random": True}
        if fills:
            new.meta["writes"] = (node.args[0],)
        for each in (new, *graph.nodes):
            if each.meta.get("base") is node:
                each.meta["base"] = new
        node.replace_all_uses_with(new)
        graph.erase_node(node)
    return True
