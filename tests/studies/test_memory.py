"""Memory of an example, against closed forms and against torch's own profiler (P2.7)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.helpers.workloads import small_workload
from workbench.topics.evaluation.collect import memory_per_example, peak_bytes
from workbench.workloads.registry import load_workload

CPU = torch.device("cpu")
WIDTH, DEPTH = 1000, 10


def chain(examples: int, *, train: bool) -> Callable[[], None]:
    """x * w, then DEPTH tanh: each is saved for the backward pass, and two more live at its start."""
    layers = nn.Sequential(*(nn.Tanh() for _ in range(DEPTH)))
    w, x = nn.Parameter(torch.ones(1)), torch.randn(examples, WIDTH)

    def step() -> None:
        with torch.set_grad_enabled(train):
            total = layers(x * w).sum()
        if train:
            total.backward()
            w.grad = None

    return step


@pytest.mark.parametrize(("train", "live"), [(True, DEPTH + 1), (False, 3)])
def test_a_chain_of_saved_activations_has_the_closed_form(train: bool, live: int) -> None:
    """Training keeps DEPTH outputs and one gradient; evaluation the argument, one input and one output."""
    peaks = [peak_bytes(chain(n, train=train), CPU) for n in (8, 16)]
    assert (peaks[1] - peaks[0]) / 8 == live * WIDTH * 4


def profiled(function: Callable[[], Any]) -> int:
    activity = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity], profile_memory=True, acc_events=True) as profile:
        function()
    assert profile.profiler is not None
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


@pytest.mark.slow
@pytest.mark.parametrize("train", [True, False])
def test_the_profiler_sees_the_same_bytes(train: bool) -> None:
    assert peak_bytes(chain(8, train=train), CPU) == profiled(chain(8, train=train))


def test_an_example_costs_less_in_evaluation() -> None:
    for name in ("digits_mlp", "digits_cnn", "source_text"):
        workload = load_workload(name)
        found = memory_per_example(workload, workload.config, CPU)
        assert 0 < found["evaluation_bytes_per_example"] < found["training_bytes_per_example"]


@pytest.mark.parametrize("width", [64, 96])
def test_evaluation_keeps_no_activations_however_deep_the_network(width: int) -> None:
    """A layer more is an activation more in training, shape (width,) in float32, and none in evaluation."""

    def bytes_of(depth: int) -> dict[str, float]:
        layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())]
        workload = small_workload(
            build_model=lambda: nn.Sequential(nn.Linear(3, width), *layers, nn.Linear(width, 1)),
            validation_data=TensorDataset(torch.randn(512, 3), torch.randn(512)), config={"precision": None},
        )  # fmt: skip
        return memory_per_example(workload, workload.config, CPU, examples=512)

    shallow, deep = bytes_of(2), bytes_of(12)
    assert deep["evaluation_bytes_per_example"] == shallow["evaluation_bytes_per_example"]
    more = deep["training_bytes_per_example"] - shallow["training_bytes_per_example"]
    assert more == 10 * width * 4


def test_nothing_is_left_behind() -> None:
    workload = small_workload(validation_data=TensorDataset(torch.randn(2, 3), torch.randn(2)))
    state = torch.get_rng_state()
    found = memory_per_example(workload, workload.config, CPU)
    assert found["examples"] == 1
    assert torch.equal(state, torch.get_rng_state())
    assert peak_bytes(lambda: None, CPU) == 0
