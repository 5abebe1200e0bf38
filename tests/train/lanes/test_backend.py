"""How `auto` decides and what it remembers; a traced step is held against plain autograd first; what happens when one fails."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.helpers.hooks import At, Threads
from tests.helpers.lane_models import MODELS, Caching, lane_workload
from tests.helpers.lane_stacks import lane_stack, updates
from tests.helpers.workloads import small_net, small_workload
from workbench.errors import ConfigError
from workbench.record.read import StudyRecord
from workbench.record.write import StudyWriter
from workbench.train.gradients import LaneLoss, LoopGradients
from workbench.train.hooks import Hook, Run
from workbench.train.lanes import backend
from workbench.train.lanes.recorder import CannotBatch
from workbench.train.lanes.vmap_gradients import VmapGradients, verify
from workbench.train.stacked_weights import LaneStack
from workbench.train.trainer import Trainer
from workbench.workloads.base import Workload


class Branches(nn.Module):
    """Decides by the values of its activations, as no program that is recorded once can; or in evaluation alone."""

    def __init__(self, in_training: bool = True) -> None:
        super().__init__()
        self.net, self.in_training = small_net().double(), in_training

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net(x)
        if self.training and not self.in_training:
            return out
        return out * 0.5 if bool(out.sum() > 0) else out


BREAKS = At(20, RuntimeError("planted"))  # in the middle of training


def sweep(
    given: Workload, out: Path, *, lanes: int = 3, way: str = "auto", hooks: Sequence[Hook] = (), more: Mapping[str, Any] | None = None
) -> StudyRecord:  # fmt: skip
    study = StudyWriter.open(out, kind="lr_sweep", workload=given.name, config=given.config.to_dict())
    configs = [given.config.replace(**{"peak_lr": 0.01 * (k + 1), **(more or {})}) for k in range(lanes)]
    if more:
        configs = [config.replace(shared_seed=k) for k, config in enumerate(configs)]
    try:
        Trainer(gradients=way, hooks=hooks).run_trials(given, configs, study, stage="lr_sweep")  # type: ignore[arg-type]
    finally:
        study.close()
    return StudyRecord(out)


def events(record: StudyRecord, trial: int) -> list[dict[str, Any]]:
    lines = (record.path / "trials" / str(trial) / "events.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(autouse=True)
def always_worth_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(backend, "WORTH_UPDATES", 0)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, float], None]:
    """Plant how long a step of all lanes takes by plain autograd, and by a traced program."""

    def plant(loop: float, vmap: float) -> None:
        monkeypatch.setattr(
            backend, "_ms", lambda way, *_, **__: vmap if isinstance(way, VmapGradients) else loop
        )  # fmt: skip

    return plant


@pytest.mark.parametrize(
    ("vmap", "taken", "why"),
    [
        (2.9, "vmap", "the fastest here"),
        (3.7, "vmap", "about as fast as the others here"),
        (3.8, "loop", "the fastest here"),
    ],
)
def test_the_faster_way_is_taken_and_recorded_and_of_about_the_same_the_traced_one(
    tmp_path: Path, timed: Callable[[float, float], None], vmap: float, taken: str, why: str
) -> None:
    timed(3.0, vmap)
    record = sweep(small_workload(), tmp_path / "run")
    assert list(record.trials["gradients"]) == [taken] * 3
    assert list(record.trials["lanes"]) == [3] * 3
    row = record.lanes.iloc[0]
    assert row["loop_ms"] == 1.0, "per lane"
    step_ms = 3.0 if taken == "loop" else vmap
    assert row["step_ms"] == pytest.approx(step_ms / 3)
    assert row["faster"] == pytest.approx(3.0 / step_ms)
    assert row["reason"] == why


CLOCKS: dict[str, Callable[[float], float]] = {
    "200 times as fast": lambda seconds: 200 * seconds,
    "backwards": lambda seconds: 1e6 - seconds,
    "stopped": lambda _: 5.0,
    "busy": lambda seconds: seconds + 0.05 * int(seconds / 0.002),  # others take their turn every 2 ms
}


def shown(clock: Callable[[float], float], now: Callable[[], float]) -> float:
    return clock(now())


def timed_by_calls(call: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    """Steps that take 0.1 ms a call, those of plain autograd 0.4 ms, by a clock that nothing else moves."""

    def step(gradients: Any, batches: Any) -> Any:
        spent[0] += 1e-4 * gradients.describe().get("calls", 4)
        return call(gradients, batches)

    return step


@pytest.mark.parametrize("lanes", [1, 3])
def test_a_clock_and_the_number_of_threads_decide_neither_the_way_nor_a_digit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lanes: int
) -> None:
    spent = [0.0]
    for way in (LoopGradients, VmapGradients):
        monkeypatch.setattr(way, "__call__", timed_by_calls(way.__call__, spent))
    monkeypatch.setattr(time, "thread_time", lambda: spent[0])

    def trained(name: str) -> tuple[list[Any], list[float]]:
        monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / f"{name} cache"))
        record = sweep(small_workload(), tmp_path / name, lanes=lanes)
        return record.lanes[["gradients", "lanes_per_call"]].to_numpy().tolist(), record.steps["loss"].tolist()

    plain = trained("plain")
    assert plain[0] == [["vmap", lanes]] * lanes
    for name, clock in CLOCKS.items():
        with monkeypatch.context() as patch:
            both = ("process_time", "thread_time") if name in ("200 times as fast", "busy") else ()
            for each in ("perf_counter", "monotonic", *both):
                patch.setattr(time, each, partial(shown, clock, getattr(time, each)))
            assert trained(name) == plain, name
    torch.set_num_threads(2)
    try:
        assert trained("two threads")[0] == plain[0]
    finally:
        torch.set_num_threads(1)


def test_a_model_that_cannot_be_traced_still_sweeps_and_no_bit_of_it_is_disturbed_by_measuring(tmp_path: Path) -> None:
    given, said = (
        small_workload(build_model=Branches),
        r"depends on the data \(test_backend\.py, line \d+: .*if bool\(out\.sum\(\) > 0\)",
    )
    record = sweep(given, tmp_path / "run")
    assert list(record.trials["state"]) == ["complete"] * 3
    assert list(record.trials["gradients"]) == ["loop"] * 3
    assert re.search(said, record.lanes["reason"][0])
    alone = Trainer().run(given, given.config.replace(peak_lr=0.02), out=tmp_path / "alone")
    assert record.trial(1).steps["loss"].tolist() == alone.steps["loss"].tolist()


class Watching(Hook):
    """Looks at the forward pass."""

    def on_start(self, run: Run) -> None:
        self.handle = run.model.register_forward_hook(lambda *_: None)

    def on_end(self, record: object) -> None:
        self.handle.remove()


def test_asked_for_explicitly_it_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gradients='vmap' cannot train 'small': .*Use gradients='auto'"):
        sweep(small_workload(build_model=Branches), tmp_path / "run", way="vmap")
    with pytest.raises(ConfigError, match="the hook Watching watches the forward pass"):
        sweep(small_workload(), tmp_path / "hook", way="vmap", hooks=[Watching()])
    record = sweep(small_workload(), tmp_path / "auto", hooks=[Watching()])
    assert set(record.lanes["gradients"]) == {"loop"}
    assert record.lanes["reason"][0] == "the hook Watching watches the forward pass"


@pytest.mark.parametrize(("first", "taken"), [((1.0, 0.1), "vmap"), ((0.1, 1.0), "loop")])
def test_a_resumed_trial_goes_on_in_the_same_way_and_digits_whatever_is_faster_now(
    tmp_path: Path,
    timed: Callable[[float, float], None],
    monkeypatch: pytest.MonkeyPatch,
    first: tuple[float, float],
    taken: str,
) -> None:
    given = small_workload(config={"checkpoint_every_steps": 8})
    timed(*first)
    whole = sweep(given, tmp_path / "whole", lanes=1)
    with pytest.raises(RuntimeError, match="planted"):
        sweep(given, tmp_path / "run", lanes=1, hooks=[BREAKS])
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "another"))
    timed(*reversed(first))
    record = sweep(given, tmp_path / "run", lanes=1)
    assert record.trials["steps_run"].tolist() == [given.config.total_steps]
    assert [event["event"] for event in events(record, 0)].count("resumed") == 1
    assert record.lanes["gradients"].tolist() == [taken]
    assert record.steps["loss"].tolist() == whole.steps["loss"].tolist()


def test_a_short_training_is_not_measured_but_goes_the_way_of_its_study(
    tmp_path: Path, timed: Callable[[float, float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = small_workload()
    timed(1.0, 0.1)
    monkeypatch.setattr(backend, "WORTH_UPDATES", 3 * given.config.total_steps)
    sweep(given, tmp_path / "long")
    short = given.replace(config=given.config.replace(total_steps=given.config.total_steps - 1))
    record = sweep(short, tmp_path / "short")
    assert set(record.lanes["gradients"]) == {"loop"}
    assert record.lanes["reason"][0].startswith("too short to measure: about")
    record = sweep(given, tmp_path / "long", more={"peak_lr": 0.5, "total_steps": 5})
    assert list(record.lanes["gradients"]) == ["vmap"] * 6


def test_a_program_that_fails_later_hands_over_to_plain_autograd(
    tmp_path: Path, timed: Callable[[float, float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    timed(1.0, 0.1)
    original, calls = VmapGradients.__call__, [0]

    def fails(self: VmapGradients, batches: Any) -> Any:
        calls[0] += 1
        if calls[0] == 25:
            raise CannotBatch("planted: the batches look different now")
        return original(self, batches)

    given = small_workload()
    whole = sweep(given, tmp_path / "whole", way="loop")
    monkeypatch.setattr(VmapGradients, "__call__", fails)
    record = sweep(given, tmp_path / "run")
    assert list(record.trials["state"]) == ["complete"] * 3
    np.testing.assert_allclose(record.steps["loss"], whole.steps["loss"], rtol=1e-10)
    changed = [event for event in events(record, 1) if event["event"] == "changed"]
    assert len(changed) == 1
    assert changed[0]["gradients"] == "loop"
    assert "planted" in changed[0]["reason"]
    assert record.lanes["gradients"][1] == "loop"
    assert record.lanes["faster"][1] == 1.0


def test_calls_that_cannot_be_planned_leave_torchs_threads_as_they_were(
    tmp_path: Path, timed: Callable[[float, float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    timed(1.0, 0.1)
    planned: list[int] = []
    threads = Threads()

    def fails(self: VmapGradients, batches: Any) -> None:
        planned.append(torch.get_num_threads())
        raise CannotBatch("planted: no calls")

    monkeypatch.setattr(VmapGradients, "prepare", fails)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        record = sweep(small_workload(), tmp_path / "run", hooks=[threads])
        assert (planned, threads.seen, torch.get_num_threads()) == ([1], {2}, 2)
    finally:
        torch.set_num_threads(before)
    assert record.lanes["gradients"].tolist() == ["loop"] * 3


def test_what_cannot_be_evaluated_together_is_evaluated_alone_with_the_reason_in_the_record(
    tmp_path: Path, timed: Callable[[float, float], None]
) -> None:
    timed(1.0, 0.1)
    given = small_workload(build_model=lambda: Branches(in_training=False))
    whole, record = sweep(given, tmp_path / "whole", way="loop"), sweep(given, tmp_path / "run")
    assert record.lanes["gradients"].tolist() == ["vmap"] * 3
    (said,) = [event for event in events(record, 1) if event["event"] == "evaluated alone"]
    assert (said["step"], "depends on the data" in said["why"]) == (0, True)
    np.testing.assert_allclose(record.evals["value"], whole.evals["value"], rtol=1e-9)


CONTENTS = {
    "no JSON": b"[broken",
    "no text": b"\xff\x00\x80",
    "a list": b"[1, 2]",
    "another program's": b'{"version": 3}',
    "a folder": None,
}


@pytest.mark.parametrize(("first", "taken"), [((1.0, 0.1), "vmap"), ((0.1, 1.0), "loop")])
def test_a_command_given_twice_takes_the_same_arithmetic_whatever_is_faster_now(
    tmp_path: Path,
    timed: Callable[[float, float], None],
    monkeypatch: pytest.MonkeyPatch,
    first: tuple[float, float],
    taken: str,
) -> None:
    given, other = small_workload(), "loop" if taken == "vmap" else "vmap"
    for number, times in enumerate((first, first[::-1])):
        timed(*times)
        record = sweep(given, tmp_path / str(number))
        assert set(record.lanes["gradients"]) == {taken}
        assert record.lanes["loop_ms"][0] == pytest.approx(first[0] / 3), "what was measured then is recorded again"
    longer = given.replace(config=given.config.replace(total_steps=41))
    assert set(sweep(longer, tmp_path / "longer").lanes["gradients"]) == {taken}
    monkeypatch.delenv("WORKBENCH_CACHE")
    for name, content in CONTENTS.items():
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
        file = tmp_path / name / "workbench" / "gradient_backends.json"
        file.parent.mkdir(parents=True)
        file.mkdir() if content is None else file.write_bytes(content)
        assert set(sweep(given, tmp_path / f"{name} run").lanes["gradients"]) == {other}, name
    record = sweep(given, tmp_path / "0", more={"peak_lr": 0.5})  # of a study that measured before
    assert list(record.lanes["gradients"]) == [taken] * 6


def test_failing_before_a_resumed_trial_begins_keeps_its_best_checkpoints(tmp_path: Path) -> None:
    class Refuses(Hook):
        def on_start(self, run: Run) -> None:
            raise RuntimeError("planted")

    given = small_workload(config={"checkpoint_every_steps": 5, "eval_every_steps": 5, "keep_best": 2})
    with pytest.raises(RuntimeError, match="planted"):
        sweep(given, tmp_path / "run", lanes=1, hooks=[BREAKS])
    folder = tmp_path / "run" / "trials" / "0" / "checkpoints"
    before = sorted(path.name for path in folder.iterdir())
    assert len(before) > 1
    with pytest.raises(RuntimeError, match="planted"):
        sweep(given, tmp_path / "run", lanes=1, hooks=[Refuses()])
    assert sorted(path.name for path in folder.iterdir()) == before


def gradient_of_lane_1(stack: LaneStack, loss: LaneLoss) -> LaneLoss:
    stack.grad[1] *= 1.1
    return loss


def all_gradients_a_little(stack: LaneStack, loss: LaneLoss) -> LaneLoss:
    stack.grad.mul_(1.01)
    return loss


def counter_of_lane_0(stack: LaneStack, loss: LaneLoss) -> LaneLoss:
    stack.buffers["2.num_batches_tracked"][0] += 1
    return loss


def not_a_number(stack: LaneStack, loss: LaneLoss) -> LaneLoss:
    stack.grad[0, 3] = float("nan")
    return loss


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (gradient_of_lane_1, "gradient than plain autograd, in lane 1 of step 0"),
        (all_gradients_a_little, "gradient than plain autograd, in lane 0 of step 0"),
        (
            lambda stack, loss: loss._replace(loss=loss.loss + torch.tensor([0, 0, 0.01])),
            "loss than plain autograd, in lane 2 of step 0",
        ),
        (counter_of_lane_0, "2.num_batches_tracked than plain autograd, in lane 0 of step 0"),
        (not_a_number, "gradient than plain autograd, in lane 0 of step 0"),
    ],
)
def test_what_differs_from_plain_autograd_is_named(
    change: Callable[[LaneStack, LaneLoss], LaneLoss], said: str
) -> None:
    workload = lane_workload(MODELS["batch_norm"], dtype=torch.float32)
    stack = lane_stack(workload, 3)
    loop = LoopGradients(workload, stack)
    with pytest.raises(CannotBatch, match=f"another {said}"):
        verify(stack, loop, lambda step: change(stack, loop(step)), updates(workload, 2))  # type: ignore[arg-type]


def test_a_kink_in_one_gradient_is_no_difference() -> None:
    workload, calls = lane_workload(MODELS["mlp"], dtype=torch.float32), []
    stack = lane_stack(workload, 3)
    loop = LoopGradients(workload, stack)

    def once(step: Any) -> LaneLoss:
        loss = loop(step)
        calls.append(0)
        if len(calls) == 2:
            stack.grad[1] *= 1.01
        return loss

    verify(stack, loop, once, updates(workload, 2))  # type: ignore[arg-type]
    assert len(calls) == 2


@pytest.mark.parametrize(
    "model", [MODELS["batch_norm"], MODELS["dropout"], MODELS["buffered"], MODELS["noisy"], Caching]
)
def test_the_comparison_leaves_no_trace(model: Callable[[], nn.Module]) -> None:
    workload = lane_workload(model, dtype=torch.float32)
    stack = lane_stack(workload, 3)
    values, buffers = stack.values.clone(), {name: t.clone() for name, t in stack.buffers.items()}
    states, before = [stack.rng.state(lane)["torch"] for lane in range(3)], torch.get_rng_state()
    loop, traced = LoopGradients(workload, stack), VmapGradients(workload, stack, lanes_per_call=2)
    verify(stack, loop, traced, updates(workload, 2))
    assert torch.equal(stack.values, values)
    assert all(torch.equal(stack.buffers[name], t) for name, t in buffers.items())
    assert all(torch.equal(stack.rng.state(lane)["torch"], state) for lane, state in enumerate(states))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(module.training for model in stack.models for module in model.modules())
    if model is Caching:
        assert [each.table for each in stack.models] == [None] * 3, "attributes that forward fills are put back"
