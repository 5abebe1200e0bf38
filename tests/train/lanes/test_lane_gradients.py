"""A traced step is plain autograd in another form: every model, any division into calls, and nothing left behind by a failure."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.lane_models import MODELS, REFUSED, Dicts, lane_workload, mlp
from tests.helpers.lane_stacks import assert_same, lane_stack, loop, run, updates
from workbench.train.evaluation import evaluate
from workbench.train.gradients import LoopGradients
from workbench.train.lane_stack import LaneStack
from workbench.train.lanes import program
from workbench.train.lanes.recorder import CannotBatch
from workbench.train.lanes.run import VmapGradients, _Call
from workbench.workloads.base import Workload
from workbench.workloads.registry import load_workload

ALONE = ("lstm", "gru", "spectral_norm")  # torch.func.vmap knows no rule for what these call
PER_CALL = (1, 2, 5)


def noisy_bn() -> nn.Module:
    return mlp(nn.BatchNorm1d(8), nn.Dropout(0.3))


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
            assert a.value == pytest.approx(
                b.value, rel=rtol, abs=0.05 if workload.config.precision == "bfloat16" else 0
            )
            assert a.seconds > 0


@pytest.mark.parametrize(
    ("lanes", "per_call", "dtype", "rtol"),
    [(1, 1, torch.float32, 1e-5), (2, 1, torch.float64, 1e-10), (5, 2, torch.float64, 1e-10), (3, 3, torch.float32, 1e-5)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_plain_autograd(
    name: str, lanes: int, per_call: int, dtype: torch.dtype, rtol: float
) -> None:
    program.forget_programs()
    workload = lane_workload(MODELS[name], dtype=dtype)
    if name in ALONE and per_call > 1:
        with pytest.raises(CannotBatch, match="lanes cannot be batched"):
            compare(workload, per_call=per_call)
        return
    compare(workload, per_call=per_call, lanes=lanes, rtol=rtol)
    built = [found for _, found in program._built.values() if isinstance(found, program.LaneProgram)]
    assert built
    assert all(found.clean for found in built)


@pytest.mark.parametrize("name", ["digits_mlp", "digits_cnn", "digits_resnet", "source_text", "quadratic"])
@pytest.mark.parametrize("lanes", [1, 2])
def test_every_bundled_workload(name: str, lanes: int) -> None:
    workload = load_workload(name)
    steps, stack = updates(workload, 1), lane_stack(workload, lanes)
    way = VmapGradients(workload, stack, lanes_per_call=lanes)
    (found,), (expected,) = run(stack, way, steps), loop(workload, stack, steps)
    assert way._calls[0].planned
    assert all(built.clean for built, _ in way._calls[0].planned)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=0)
    wrong = (found.grad - expected.grad).abs() > 2e-5 * expected.grad.abs().max()
    assert wrong.double().mean() < 0.1  # rounding switches a unit on or off now and then


@pytest.mark.parametrize("per_call", PER_CALL)
@pytest.mark.parametrize("weights", [None, lambda batch: (batch[1] % 3).double()], ids=["plain", "weighted"])
@pytest.mark.parametrize(("steps", "streams"), [(1, 3), (2, 1), (2, 2)])
def test_streams_micro_batches_and_weights(per_call: int, weights: Any, steps: int, streams: int) -> None:
    workload = lane_workload(noisy_bn, accumulate_steps=steps).replace(weights=weights)
    compare(workload, per_call=per_call, streams=streams)


@pytest.mark.parametrize("per_call", PER_CALL)
def test_batches_may_be_nested_and_hold_constants(per_call: int) -> None:
    plain = lane_workload(mlp)
    x, y = plain.train_data.tensors

    def collate(items: list[dict[str, Any]]) -> dict[str, Any]:
        inputs, labels = torch.stack([i["input"]["x"] for i in items]), torch.stack([i["label"] for i in items])
        return {"scale": 2.0, "input": {"x": inputs}, "labels": (labels, "class"), "mask": None}

    nested = plain.replace(
        train_data=Dicts(x, y),
        validation_data=Dicts(x[:20], y[:20]),
        collate=collate,
        forward=lambda model, batch: model(batch["scale"] * batch["input"]["x"]),
        loss=lambda outputs, batch: plain.loss(outputs, (None, batch["labels"][0])),
        metrics={},
    )
    compare(nested, per_call=per_call)


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


def test_weights_splits_and_chosen_rows_of_an_evaluation() -> None:
    workload = lane_workload(MODELS["batch_norm"]).replace(weights=lambda batch: (batch[1] % 3).double())
    stack = lane_stack(workload, 5)
    way = VmapGradients(workload, stack, lanes_per_call=2, threads=2)
    for split, rows in (("train", range(5)), ("validation", [4, 1])):
        evaluated(way, stack, rows, workload, split)
    way.close()


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


@pytest.mark.parametrize("per_call", PER_CALL)
def test_a_stack_may_be_packed_again(per_call: int) -> None:
    workload = lane_workload(noisy_bn)
    stack, steps = lane_stack(workload, 5, streams=[0, 1, 0, 0, 1]), updates(workload, 2, streams=2)
    way = VmapGradients(workload, stack, lanes_per_call=per_call)
    assert way(steps[0]).loss.shape == (5,)
    stack.keep([1, 3])
    assert_same(run(stack, way, steps[1:]), loop(workload, stack, steps[1:]), 1e-10)
    calls = {"lanes_per_call": min(2, per_call), "calls": 2 if per_call == 1 else 1}
    assert way.describe() == {"gradients": "vmap", "threads": 1} | calls


@pytest.mark.parametrize("per_call", [1, 2])
def test_threads_change_no_bit_and_are_put_back(monkeypatch: pytest.MonkeyPatch, per_call: int) -> None:
    workload = lane_workload(MODELS["conv"], dtype=torch.float32)
    stack, steps = lane_stack(workload, 6), updates(workload, 2)
    alone = run(stack, VmapGradients(workload, stack, lanes_per_call=per_call), steps)
    monkeypatch.setattr(torch, "set_num_threads", lambda n, set_to=torch.set_num_threads: set_to(n))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        spread = VmapGradients(workload, stack, lanes_per_call=per_call, threads=3)
        assert torch.get_num_threads() == 1
        meet = threading.Barrier(3, timeout=20)  # breaks unless three calls run at the same time
        whole = _Call.run
        monkeypatch.setattr(_Call, "run", lambda *args: (meet.wait(), whole(*args)))
        together = run(stack, spread, steps)
        spread.close()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    for a, b in zip(alone, together, strict=True):
        assert torch.equal(a.grad, b.grad)
        assert all(torch.equal(a.buffers[name], b.buffers[name]) for name in a.buffers)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("can't allocate memory")])
def test_out_of_memory_halves_the_calls(monkeypatch: pytest.MonkeyPatch, error: Exception, threads: int) -> None:
    """A call of more than `fit` lanes fails after it has drawn and written its buffers."""
    workload = lane_workload(noisy_bn)
    stack, steps = lane_stack(workload, 6), updates(workload, 2)
    expected, whole, fit = loop(workload, stack, steps), _Call.run, 2

    def small_only(self: _Call, *args: Any) -> None:
        whole(self, *args)
        if self.lanes > fit:
            raise error

    monkeypatch.setattr(_Call, "run", small_only)
    way = VmapGradients(workload, stack, lanes_per_call=6, threads=threads)
    assert_same(run(stack, way, steps), expected, 1e-10)
    assert way.describe()["lanes_per_call"] == 2
    fit = 0
    with pytest.raises(type(error), match="memory"):  # a single lane does not fit
        way(steps[0])
    way.close()


@pytest.mark.parametrize("threads", [1, 2])
def test_a_step_that_fails_leaves_everything_for_plain_autograd(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    workload = lane_workload(noisy_bn)
    stack, steps = lane_stack(workload, 4), updates(workload, 1)
    expected, whole = loop(workload, stack, steps), _Call.run

    def last_fails(self: _Call, *args: Any) -> None:
        whole(self, *args)
        if self.rows.stop == 4:
            raise IndexError("index 7 is out of bounds")

    monkeypatch.setattr(_Call, "run", last_fails)
    way = VmapGradients(workload, stack, lanes_per_call=2, threads=threads)
    with pytest.raises(CannotBatch, match="the traced step failed .IndexError: index 7 is out of bounds"):
        way(steps[0])
    way.close()
    assert_same(loop(workload, stack, steps), expected, 0.0)


def test_a_buffer_that_the_model_replaced_stays_when_the_stack_is_packed_again() -> None:
    workload = lane_workload(MODELS["buffered"])
    stack = lane_stack(workload, 3)
    LoopGradients(workload, stack)(updates(workload, 1)[0])
    scales = [model.scale.clone() for model in stack.models]
    assert not torch.equal(scales[2], torch.ones_like(scales[2]))
    stack.keep([2, 0])
    assert torch.equal(stack.buffers["scale"], torch.stack([scales[2], scales[0]]))
