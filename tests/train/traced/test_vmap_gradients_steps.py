"""Streams, micro-batches, weights, batches of every form, re-packing, threads and lack of memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.lane_models import CLASSES, MODELS, REFUSED, Dicts, lane_workload, mlp
from tests.helpers.lane_stacks import assert_same, lane_stack, loop, run, updates
from workbench.errors import ConfigError, WorkloadError
from workbench.train.gradients import LoopGradients
from workbench.train.lanes import program as lane_cache
from workbench.train.lanes.recorder import CannotBatch
from workbench.train.lanes.run import VmapGradients
from workbench.train.lanes.run import _Call as LaneCall
from workbench.workloads.base import Workload

PER_CALL = (1, 2, 5)


def noisy_bn() -> nn.Module:
    return mlp(nn.BatchNorm1d(8), nn.Dropout(0.3))


def compare(workload: Workload, *, per_call: int, lanes: int = 5, streams: int = 1, rtol: float = 1e-10) -> None:
    stack = lane_stack(workload, lanes, streams=[k % streams for k in range(lanes)])
    steps = updates(workload, 2, streams=streams)
    expected = loop(workload, stack, steps)
    assert_same(run(stack, VmapGradients(workload, stack, lanes_per_call=per_call), steps), expected, rtol)


@pytest.mark.parametrize("per_call", PER_CALL)
def test_lanes_may_read_different_streams(per_call: int) -> None:
    compare(lane_workload(noisy_bn), per_call=per_call, streams=3)


@pytest.mark.parametrize("per_call", PER_CALL)
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_micro_batches_and_weights(per_call: int, weighted: bool) -> None:
    workload = lane_workload(noisy_bn, accumulate_steps=2, batch_size=8)
    if weighted:
        workload = workload.replace(weights=lambda batch: (batch[1] % 3).double())
    compare(workload, per_call=per_call)
    compare(workload, per_call=per_call, streams=2)


@pytest.mark.parametrize("per_call", PER_CALL)
def test_weights_of_a_single_batch(per_call: int) -> None:
    compare(lane_workload(noisy_bn).replace(weights=lambda batch: 1.0 + batch[1]), per_call=per_call)


@pytest.mark.parametrize("per_call", [1, 3])
def test_wrong_weights_are_explained(per_call: int) -> None:
    workload = lane_workload(mlp).replace(weights=lambda batch: 0.0 * batch[1])
    stack = lane_stack(workload, 3)
    with pytest.raises(WorkloadError, match="gives 0 to all 8 examples of the first batch of the train split"):
        VmapGradients(workload, stack, lanes_per_call=per_call)(updates(workload, 1)[0])


@pytest.mark.parametrize("per_call", PER_CALL)
def test_a_batch_of_one_has_no_standard_error(per_call: int) -> None:
    compare(lane_workload(mlp, batch_size=1), per_call=per_call)


@pytest.mark.parametrize("per_call", PER_CALL)
def test_half_precision_forward_passes(per_call: int) -> None:
    compare(lane_workload(mlp, dtype=torch.float32, precision="bfloat16"), per_call=per_call, rtol=0.02)


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


def with_batches(change: Callable[[int, Any], Any]) -> tuple[Workload, list[Any]]:
    """Return a workload, and updates whose batches went through `change(number, batch)`."""
    workload = lane_workload(mlp).replace(forward=lambda model, batch: model(batch[0]))
    steps = updates(workload, 12)
    steps += updates(workload, 12)
    return workload, [[[(change(i, b), n) for b, n in stream] for stream in step] for i, step in enumerate(steps)]


def test_constants_that_change_with_every_batch_are_refused() -> None:
    workload, steps = with_batches(lambda number, batch: [*batch, number])
    stack = lane_stack(workload, 2)
    way = VmapGradients(workload, stack, lanes_per_call=2)
    for step in steps[:8]:
        way(step)
    with pytest.raises(CannotBatch, match="more than 8 shapes or with changing constants"):
        way(steps[8])


def test_an_object_in_the_batch_is_refused() -> None:
    workload, steps = with_batches(lambda number, batch: [*batch, object()])
    with pytest.raises(CannotBatch, match="the batch holds a object"):
        VmapGradients(workload, lane_stack(workload, 2), lanes_per_call=2)(steps[0])


@pytest.mark.parametrize("per_call", [1, 3])
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_traced_is_refused_with_the_reason(name: str, per_call: int) -> None:
    build, reason = REFUSED[name]
    workload = lane_workload(build)
    stack, step = lane_stack(workload, 3), updates(workload, 1)[0]
    before = [stack.rng.state(lane)["torch"] for lane in range(3)]
    values = stack.values.clone()
    with pytest.raises(CannotBatch, match=reason):
        VmapGradients(workload, stack, lanes_per_call=per_call)(step)
    assert torch.equal(stack.values, values)
    assert all(torch.equal(stack.rng.state(lane)["torch"], state) for lane, state in enumerate(before))
    LoopGradients(workload, stack)(step)  # and plain autograd still works


def test_models_that_differ_in_an_attribute_are_refused() -> None:
    made: list[float] = []

    def build() -> nn.Module:
        made.append(0.0)
        return mlp(nn.Dropout(0.1 * len(made)))

    workload = lane_workload(build)
    with pytest.raises(CannotBatch, match=r"the attribute '2\.p' of the model is not the same in all trials"):
        VmapGradients(workload, lane_stack(workload, 2), lanes_per_call=2)


def test_watched_modules_are_refused() -> None:
    workload = lane_workload(mlp)
    with pytest.raises(CannotBatch, match="a hook watches"):
        VmapGradients(workload, lane_stack(workload, 2), lanes_per_call=2, observed=True)


@pytest.mark.parametrize("arguments", [{"lanes_per_call": 0}, {"lanes_per_call": 2, "threads": 0}])
def test_numbers_below_one_are_refused(arguments: dict[str, int]) -> None:
    workload = lane_workload(mlp)
    with pytest.raises(ConfigError, match="must be an integer of at least 1"):
        VmapGradients(workload, lane_stack(workload, 2), **arguments)


@pytest.mark.parametrize("per_call", PER_CALL)
def test_a_stack_may_be_packed_again(per_call: int) -> None:
    workload = lane_workload(noisy_bn)
    stack, steps = lane_stack(workload, 5), updates(workload, 2)
    way = VmapGradients(workload, stack, lanes_per_call=per_call)
    before = way(steps[0])
    stack.keep([1, 3])
    expected = loop(workload, stack, steps[1:])
    assert_same(run(stack, way, steps[1:]), expected, 1e-10)
    assert before.loss.shape == (5,)
    assert way.describe() == {
        "gradients": "vmap",
        "lanes_per_call": min(2, per_call),
        "calls": 2 if per_call == 1 else 1,
        "threads": 1,
    }


@pytest.mark.parametrize("per_call", [1, 2])
def test_threads_change_no_bit(per_call: int) -> None:
    workload = lane_workload(MODELS["conv"], dtype=torch.float32)
    stack, steps = lane_stack(workload, 5), updates(workload, 3)
    alone = run(stack, VmapGradients(workload, stack, lanes_per_call=per_call), steps)
    threads = torch.get_num_threads()
    spread = VmapGradients(workload, stack, lanes_per_call=per_call, threads=3)
    assert torch.get_num_threads() == 1
    together = run(stack, spread, steps)
    spread.close()
    assert torch.get_num_threads() == threads
    for a, b in zip(alone, together, strict=True):
        assert torch.equal(a.grad, b.grad)
        assert all(torch.equal(a.buffers[name], b.buffers[name]) for name in a.buffers)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("can't allocate memory")])
def test_out_of_memory_halves_the_calls(monkeypatch: pytest.MonkeyPatch, error: Exception, threads: int) -> None:
    """A call of more than two lanes fails after it has drawn and written its buffers."""
    workload = lane_workload(noisy_bn)
    stack, steps = lane_stack(workload, 6), updates(workload, 2)
    expected = loop(workload, stack, steps)
    whole = LaneCall.run

    def small_only(self: LaneCall, *args: Any) -> None:
        whole(self, *args)
        if self.lanes > 2:
            raise error

    monkeypatch.setattr(LaneCall, "run", small_only)
    way = VmapGradients(workload, stack, lanes_per_call=6, threads=threads)
    assert_same(run(stack, way, steps), expected, 1e-10)
    assert way.describe()["lanes_per_call"] == 2
    way.close()


def test_out_of_memory_with_one_lane_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = lane_workload(mlp)
    stack, steps = lane_stack(workload, 2), updates(workload, 1)

    def fails(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(LaneCall, "run", fails)
    with pytest.raises(torch.OutOfMemoryError):
        VmapGradients(workload, stack, lanes_per_call=2)(steps[0])


def test_a_step_that_fails_leaves_everything_for_plain_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = lane_workload(noisy_bn)
    stack, steps = lane_stack(workload, 4), updates(workload, 1)
    expected = loop(workload, stack, steps)
    whole = LaneCall.run

    def last_fails(self: LaneCall, *args: Any) -> None:
        whole(self, *args)
        if self.rows.stop == 4:
            raise IndexError("index 7 is out of bounds")

    monkeypatch.setattr(LaneCall, "run", last_fails)
    with pytest.raises(CannotBatch, match="the traced step failed .IndexError: index 7 is out of bounds"):
        VmapGradients(workload, stack, lanes_per_call=2)(steps[0])
    assert_same(loop(workload, stack, steps), expected, 0.0)


def test_a_wrong_label_is_left_to_plain_autograd_to_explain() -> None:
    workload = lane_workload(mlp)
    stack, steps = lane_stack(workload, 3), updates(workload, 2)
    way = VmapGradients(workload, stack, lanes_per_call=3)
    way(steps[0])
    ((batch, _),) = steps[1][0]
    batch[1][2] = CLASSES + 3
    with pytest.raises(CannotBatch, match="the traced step failed"):
        way(steps[1])
    with pytest.raises(WorkloadError, match=f"target {CLASSES + 3} is out of range"):
        LoopGradients(workload, stack)(steps[1])


def test_programs_are_shared_between_stacks_of_one_workload(monkeypatch: pytest.MonkeyPatch) -> None:
    lane_cache.forget_programs()
    built: list[int] = []
    build = lane_cache.build_program
    monkeypatch.setattr(lane_cache, "build_program", lambda *a, **k: (built.append(k["lanes"]), build(*a, **k))[1])
    workload = lane_workload(noisy_bn)
    step = updates(workload, 1)[0]
    for lanes in (4, 4, 2):
        VmapGradients(workload, lane_stack(workload, lanes), lanes_per_call=2)(step)
    assert built == [2]
    other = lane_workload(lambda: mlp(nn.BatchNorm1d(8), nn.Dropout(0.5)))
    VmapGradients(other, lane_stack(other, 2), lanes_per_call=2)(step)
    assert built == [2, 2]


def test_what_was_refused_once_is_not_traced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    lane_cache.forget_programs()
    workload = lane_workload(REFUSED["branching"][0])
    step = updates(workload, 1)[0]
    with pytest.raises(CannotBatch) as first:
        VmapGradients(workload, lane_stack(workload, 2), lanes_per_call=2)(step)
    monkeypatch.setattr(lane_cache, "build_program", lambda *a, **k: pytest.fail("traced again"))
    with pytest.raises(CannotBatch) as second:
        VmapGradients(workload, lane_stack(workload, 2), lanes_per_call=2)(step)
    assert str(first.value) == str(second.value)
