"""What lanes need in memory, against what torch says it holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.helpers.lane_models import MODELS, lane_workload
from tests.helpers.lane_stacks import CPU, lane_stack, updates
from workbench.train.gradients import LoopGradients
from workbench.train.lanes import memory as lane_memory
from workbench.train.lanes.memory import available_bytes, lane_bytes, lanes_that_fit, room_for_calls
from workbench.train.lanes.program import LaneProgram, build_program
from workbench.train.lanes.run import VmapGradients
from workbench.train.lanes.step import split_batch


def program(lanes: int, width: int = 64) -> LaneProgram:
    workload = lane_workload(lambda: nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 4)))
    ((batch, examples),) = updates(workload, 1)[0][0]
    tensors, layout = split_batch(batch, examples)
    stack = lane_stack(workload, lanes)
    return build_program(workload, stack, layout, tensors, lanes=lanes, stacked=False, objective="mean")


def test_a_lane_counts_parameters_gradient_optimizer_frozen_ones_and_buffers() -> None:
    frozen, buffered = (lane_stack(lane_workload(MODELS[name]), 2) for name in ("frozen", "batch_norm"))
    trained = sum(p.numel() for p in frozen.models[0].parameters() if p.requires_grad)
    assert lane_bytes(frozen) == 8 * (trained * 6 + 16 * 8 + 8)
    trained = sum(p.numel() for p in buffered.models[0].parameters())
    assert lane_bytes(buffered, optimizer_copies=0) == 8 * (trained * 2 + 8 + 8 + 1)


def test_the_peak_of_a_call_holds_its_results_and_grows_with_the_lanes() -> None:
    one, four, eight = (program(lanes) for lanes in (1, 4, 8))
    results = 8 * (16 * 64 + 64 + 64 * 4 + 4)
    activations = 8 * 8 * 64  # the hidden layer of eight examples in float64
    assert results < one.peak_bytes < results + 6 * activations
    assert eight.peak_bytes == pytest.approx(2 * four.peak_bytes, rel=0.1)


def test_available_memory_is_what_linux_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda self: "MemTotal: 900 kB\nMemAvailable:   123 kB\n")
    assert available_bytes(CPU) == 123 * 1024


@pytest.mark.parametrize("text", ["", "MemTotal: 900 kB\n", "nonsense"])
def test_without_that_it_is_half_of_the_machine(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(Path, "read_text", lambda self: text)
    monkeypatch.setattr(lane_memory.os, "sysconf", lambda name: {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1000}[name])
    assert available_bytes(CPU) == 4096 * 500


def test_on_a_gpu_what_torch_holds_unused_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 9000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 500)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 200)
    assert available_bytes(torch.device("cuda")) == 1300


def test_how_many_lanes_fit() -> None:
    assert lanes_that_fit(1000, lane=10) == 100
    assert lanes_that_fit(1000, lane=10, share=0.8) == 80
    assert lanes_that_fit(5, lane=10) == 1  # a single lane is always tried


def test_a_bound_leaves_for_the_calls_what_the_state_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = lane_stack(lane_workload(MODELS["mlp"]), 4)
    state = 4 * lane_bytes(stack)
    assert room_for_calls(stack, bound=state + 123) == 123
    assert room_for_calls(stack, bound=state // 2) == 0
    monkeypatch.setattr(lane_memory, "available_bytes", lambda device: 1000)
    assert room_for_calls(stack, bound=None) == 800


@pytest.mark.parametrize(("lanes_of_room", "threads", "expected"), [(8.5, 1, 8), (3.5, 1, 3), (3.5, 2, 1), (0.1, 1, 1)])
def test_calls_take_as_many_lanes_as_there_is_room_for(lanes_of_room: float, threads: int, expected: int) -> None:
    workload = lane_workload(lambda: nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)))
    stack, (step,) = lane_stack(workload, 8), updates(workload, 1)
    room = int(lanes_of_room * program(1).peak_bytes)
    way = VmapGradients(workload, stack, lanes_per_call=8, threads=threads, room=room)
    try:
        way(step)
        assert way.describe()["lanes_per_call"] == expected
        found = stack.grad.clone()
        evaluated = way.evaluate("validation", 8)
    finally:
        way.close()
    loop = LoopGradients(workload, stack)
    loop(step)
    torch.testing.assert_close(found, stack.grad, rtol=1e-10, atol=1e-12)
    assert [[e.value for e in lane] for lane in evaluated] == [
        [pytest.approx(e.value, rel=1e-9) for e in lane] for lane in loop.evaluate("validation", 8, rows=range(8))
    ]
