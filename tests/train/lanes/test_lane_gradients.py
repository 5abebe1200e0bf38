"""A traced step is plain autograd in another form: every model, any division into calls, each lane's own random draws; what cannot be traced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.helpers.lane_models import MODELS, REFUSED, Doing, lane_workload, mlp
from tests.helpers.lane_stacks import assert_same, lane_stack, loop, run, updates
from workbench.train.evaluation import evaluate
from workbench.train.forward import FunctionObserver
from workbench.train.gradients import LoopGradients
from workbench.train.lanes import program
from workbench.train.lanes.recorder import CannotBatch, Recorder
from workbench.train.lanes.step import check_alike, class_losses
from workbench.train.lanes.vmap_gradients import VmapGradients, _Call
from workbench.train.stacked_weights import LaneStack
from workbench.workloads.base import Workload

ALONE = ("lstm", "spectral_norm")  # torch.func.vmap knows no rule for what these call


def compare(workload: Workload, *, per_call: int, lanes: int = 5, streams: int = 1, rtol: float = 1e-10) -> None:
    stack = lane_stack(workload, lanes, streams=[k % streams for k in range(lanes)])
    steps, way = updates(workload, 2, streams=streams), VmapGradients(workload, stack, lanes_per_call=per_call)
    expected = loop(workload, stack, steps)
    assert_same(run(stack, way, steps), expected, rtol)
    way(steps[0])  # so that running statistics differ
    evaluated(way, stack, range(lanes), workload, rtol=max(rtol, 1e-10))


def evaluated(
    way: VmapGradients, stack: LaneStack, rows: Sequence[int], workload: Workload, split: str = "validation", rtol: float = 1e-10
) -> None:  # fmt: skip
    """Hold the evaluation of some lanes together against that of each alone, and see that nothing moves."""
    torch.manual_seed(4)
    before, buffers = torch.get_rng_state(), {name: t.clone() for name, t in stack.buffers.items()}
    states = [stack.rng.state(lane)["torch"] for lane in range(len(stack))]
    found = way.evaluate(split, 12, rows=rows)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(stack.buffers[name], t) for name, t in buffers.items())
    assert all(torch.equal(stack.rng.state(lane)["torch"], state) for lane, state in enumerate(states))
    assert all(module.training for model in stack.models for module in model.modules())
    how: Any = {"split": split, "batch_size": 5, "device": stack.device, "precision": workload.config.precision}
    for ours, row in zip(found, rows, strict=True):
        for a, b in zip(ours, evaluate(workload, stack.models[row], **how), strict=True):
            assert a._replace(value=0, num_correct=0, seconds=0) == b._replace(value=0, num_correct=0, seconds=0)
            assert (a.num_correct is None) == (b.num_correct is None)
            assert a.value == pytest.approx(b.value, rel=rtol)


@pytest.mark.parametrize(
    ("lanes", "per_call", "dtype", "rtol"),
    [(1, 1, torch.float32, 1e-5), (5, 2, torch.float64, 1e-10), (3, 3, torch.float32, 1e-5)],
    ids=str,
)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_plain_autograd(
    name: str, lanes: int, per_call: int, dtype: torch.dtype, rtol: float
) -> None:
    program._built.clear()
    workload = lane_workload(MODELS[name], dtype=dtype)
    if name in ALONE and per_call > 1:
        with pytest.raises(CannotBatch, match="lanes cannot be batched"):
            compare(workload, per_call=per_call)
        return
    compare(workload, per_call=per_call, lanes=lanes, rtol=rtol)
    assert program._built
    assert all(isinstance(found, program.LaneProgram) for _, found in program._built.values())


# Random draws: each lane draws, bit for bit, what the same trial draws when it is trained alone

DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda h: F.dropout(torch.ones_like(h), 0.4),
    "after_one_that_nobody_needs": lambda h: (torch.rand(3), F.dropout(torch.ones_like(h), 0.4))[1],
    "channel_dropout": lambda h: F.dropout2d(torch.ones_like(h)[..., None, None], 0.4)[..., 0, 0],
    "transposed": lambda h: F.dropout(torch.ones_like(h).t(), 0.4).t(),
    "randn": lambda h: torch.randn(8, dtype=h.dtype) + 0 * h,
    "rand_like": torch.rand_like,
    "normal": lambda h: torch.empty_like(h).normal_(1.0, 2.0),
    "randint": lambda h: torch.randint(3, 9, h.shape) + 0 * h,
    "multinomial": lambda h: torch.multinomial(torch.softmax(h.detach(), -1), 8, replacement=True).to(h.dtype),
    "poisson": lambda h: torch.poisson(torch.ones_like(h)),
}


@pytest.mark.parametrize(("per_call", "dtype"), [(1, torch.float64), (3, torch.float32)], ids=str)
@pytest.mark.parametrize("name", DRAWS)
def test_every_kind_of_draw(name: str, per_call: int, dtype: torch.dtype) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:  # what it drew is kept where it can be read
        h = m.body(x)
        drawn = DRAWS[name](h)
        with torch.no_grad():
            m.drawn.copy_(drawn)
        return m.head(h * drawn)

    workload = lane_workload(lambda: Doing(forward, 8, body=nn.Linear(16, 8), drawn=torch.zeros(8, 8)), dtype=dtype)
    stack, steps = lane_stack(workload, 3), updates(workload, 2)
    if name == "multinomial" and per_call > 1:  # vmap draws for all lanes as if they were one
        with pytest.raises(CannotBatch, match="in a way that lanes cannot do together"):
            VmapGradients(workload, stack, lanes_per_call=per_call)(steps[0])
        return
    expected, before = loop(workload, stack, steps), torch.get_rng_state()
    found = run(stack, VmapGradients(workload, stack, lanes_per_call=per_call), steps)
    assert torch.equal(torch.get_rng_state(), before), "the global generator is left alone"
    assert_same(found, expected, 1e-5)
    for ours, plain in zip(found, expected, strict=True):
        assert torch.equal(ours.buffers["drawn"], plain.buffers["drawn"])
    assert not torch.equal(found[0].buffers["drawn"][0], found[0].buffers["drawn"][1])


# What cannot be traced, and what fails

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Own(Tensor):
    pass


@pytest.mark.parametrize("per_call", [1, 3])
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_traced_is_refused_with_the_reason(name: str, per_call: int) -> None:
    build, reason = REFUSED[name]
    workload = lane_workload(build)
    stack, step = lane_stack(workload, 3), updates(workload, 1)[0]
    before, values = [stack.rng.state(lane)["torch"] for lane in range(3)], stack.values.clone()
    with pytest.raises(CannotBatch, match=reason):
        VmapGradients(workload, stack, lanes_per_call=per_call)(step)
    assert torch.equal(stack.values, values)
    assert all(torch.equal(stack.rng.state(lane)["torch"], state) for lane, state in enumerate(before))
    LoopGradients(workload, stack)(step)  # and plain autograd still works


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: x * float(torch.zeros(()).add_(x.sum())), "reads the value"),  # a constant that was written into
        (lambda x: x * x.sum(1).tolist()[0], "reads the value"),
        (lambda x: x * x.detach().numpy().sum(), "reads the value"),
        (lambda x: x.nonzero(), "a shape depends on the values"),
        (lambda x: torch.rand(3, generator=torch.Generator()), "a generator of its own"),
        (lambda x: x * torch.ones(()).as_subclass(Own), "a tensor type of its own"),
        (lambda x: x * torch.linspace(1, 2, 3).sum().item(), None),
        (lambda x: x.sum(1)[torch.arange(3)], None),
    ],
)
def test_what_depends_on_values_is_refused_and_what_depends_on_no_input_is_not(
    function: Callable[[Tensor], Any], reason: str | None
) -> None:
    recorder = Recorder()
    recorder.placeholder("x", X)
    with torch.no_grad(), recorder.recording():
        if reason is None:
            function(X)
        else:
            with pytest.raises(CannotBatch, match=reason):
                function(X)


@pytest.mark.parametrize("part", ["losses", "grads"])
def test_a_program_that_gives_other_numbers_than_the_step_is_refused(
    monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    lower = program._lower

    def off(*args: Any) -> Any:
        function, result = lower(*args)
        value = getattr(result, part)
        changed = value + 0.01 if part == "losses" else [1.1 * g for g in value]
        return function, result._replace(**{part: changed})

    monkeypatch.setattr(program, "_lower", off)
    workload = lane_workload(MODELS["mlp"])
    with pytest.raises(CannotBatch, match="gives other numbers than the step itself"):
        VmapGradients(workload, lane_stack(workload, 3), lanes_per_call=3)(updates(workload, 1)[0])


@pytest.mark.parametrize(
    ("make", "alike"),
    [
        (lambda k: torch.arange(4), True),
        (lambda k: float("nan"), True),
        (lambda k: [torch.arange(4) + k], False),
        (lambda k: [nn.Linear(2, 2)], False),  # a module that nobody trains
        (lambda k: 0.1 * k, False),
    ],
)
def test_models_that_differ_in_more_than_parameters_are_named(make: Callable[[int], Any], alike: bool) -> None:
    models = [nn.Sequential(nn.Linear(2, 2)) for _ in range(2)]
    for k, model in enumerate(models):
        vars(model[0])["kept"] = make(k)
    if alike:
        return check_alike(models)
    with pytest.raises(CannotBatch, match=r"'0\.kept' of the model is not the same in all trials"):
        check_alike(models)


@pytest.mark.parametrize(
    ("extra", "taken", "said"),
    [
        (lambda number: number, 8, "more than 8 shapes or with changing constants"),
        (lambda number: object(), 0, "the batch holds a object"),
    ],
)
def test_batches_that_no_program_can_take_are_refused(extra: Callable[[int], Any], taken: int, said: str) -> None:
    workload = lane_workload(mlp)
    steps = [
        [[([*b, extra(i)], n) for b, n in stream] for stream in step] for i, step in enumerate(updates(workload, 3) * 3)
    ]
    way = VmapGradients(workload, lane_stack(workload, 2), lanes_per_call=2)
    for step in steps[:taken]:
        way(step)
    with pytest.raises(CannotBatch, match=said):
        way(steps[taken])


def test_a_cleaned_graph_adds_the_bias_inside_the_product_and_masks_by_numbers_even_where_a_score_is_infinite() -> None:
    generator = torch.Generator().manual_seed(3)
    inputs = [torch.randn(shape, generator=generator) for shape in ((2, 40, 16), (2, 16, 40), (2, 1, 40))]
    inputs[2][..., -1] = torch.inf
    recorder, aten = Recorder(), torch.ops.aten
    graph, example = recorder.graph, {recorder.placeholder(f"lane_{i}", t): t for i, t in enumerate(inputs)}
    with recorder.recording():
        masked = torch.arange(40) > 38
        scores = (inputs[0].bmm(inputs[1]) + inputs[2] * 1).masked_fill(masked, -torch.inf).softmax(-1)
        result = scores.masked_fill(masked, 0.0)
    graph.output(recorder.node_of(result))
    program.clean_up(
        graph,
        lambda: program._run(program._calls(graph), dict(example), kept=set()),
        lanes=2,
        device=torch.device("cpu"),
    )
    found = [node.target for node in graph.nodes]
    assert (
        found.count(aten.baddbmm.default) == found.count(aten.mul.Tensor) == 1
    )  # times 1 is gone, times the mask is there
    assert not {aten.bmm.default, aten.masked_fill.Scalar, aten.add.Tensor}.intersection(found)
    torch.testing.assert_close(program._lower(graph, example)[1], result)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), IndexError("index 7 is out of bounds")]
)
def test_a_call_that_fails_leaves_everything_as_it_was_and_out_of_memory_halves_the_calls(
    monkeypatch: pytest.MonkeyPatch, error: Exception, threads: int
) -> None:
    """A call of more than `fit` lanes fails after it has drawn and written its buffers."""
    workload = lane_workload(lambda: mlp(nn.BatchNorm1d(8), nn.Dropout(0.3)))
    stack, steps = lane_stack(workload, 6), updates(workload, 2)
    expected, whole, fit = loop(workload, stack, steps), _Call.run, 2

    def small_only(self: _Call, *args: Any) -> None:
        whole(self, *args)
        if self.lanes > fit:
            raise error

    monkeypatch.setattr(_Call, "run", small_only)
    way = VmapGradients(workload, stack, lanes_per_call=6, threads=threads)
    if isinstance(error, IndexError):
        with pytest.raises(CannotBatch, match="the traced step failed .IndexError: index 7 is out of bounds"):
            way(steps[0])
        assert_same(loop(workload, stack, steps), expected, 0.0)
    else:
        assert_same(run(stack, way, steps), expected, 1e-10)
        assert way.describe()["lanes_per_call"] == 2
        fit = 0
        with pytest.raises(type(error), match="memory"):  # a single lane does not fit
            way(steps[0])
    way.close()


@pytest.mark.parametrize("form", [{"reduction": "none"}, {}, {"ignore_index": 3}, {"weight": torch.arange(1.0, 5).double()}], ids=str)  # fmt: skip
@pytest.mark.parametrize("shape", [(5, 4), (5, 4, 3)])
@pytest.mark.parametrize("function", [F.cross_entropy, F.nll_loss])
def test_losses_of_classes_are_torchs(function: Any, shape: tuple[int, ...], form: dict[str, Any]) -> None:
    targets = torch.tensor([0, 3, 3 if "ignore_index" in form else -100, 2, 1])
    targets = targets if len(shape) == 2 else targets.unsqueeze(1).expand(5, 3)
    leaf = torch.randn(shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64).requires_grad_()
    expected = function(leaf, targets, **form)
    with FunctionObserver(class_losses):
        found = function(leaf, targets, **form)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
    grads = [torch.autograd.grad(loss.sum(), leaf)[0] for loss in (found, expected)]
    torch.testing.assert_close(*grads, rtol=1e-13, atol=1e-13)
