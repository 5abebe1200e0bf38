"""How `auto` decides and what it remembers; a traced step is held against plain autograd first; what happens when one fails."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.helpers.lane_models import MODELS, Caching, lane_workload
from tests.helpers.lane_stacks import lane_stack, updates
from tests.helpers.workloads import small_net, small_workload
from workbench.errors import ConfigError
from workbench.record.read import StudyRecord
from workbench.record.write import StudyWriter
from workbench.train.gradients import LaneLoss, LoopGradients
from workbench.train.hooks import Activations, Hook, Run, Step
from workbench.train.lanes import backend
from workbench.train.lanes.backend import Arrangement, Verdict, recall, remember
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


class Breaks(Hook):
    """Fails in the middle of training."""

    def on_step(self, step: Step) -> None:
        if step.index == 20:
            raise RuntimeError("planted")


def sweep(given: Workload, out: Path, *, lanes: int = 3, way: str = "auto", hooks: Sequence[Hook] = ()) -> StudyRecord:
    study = StudyWriter.open(out, kind="lr_sweep", workload=given.name, config=given.config.to_dict())
    configs = [given.config.replace(peak_lr=0.01 * (k + 1)) for k in range(lanes)]
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
    monkeypatch.setattr(backend, "WORTH_SECONDS", 0.0)
    monkeypatch.setattr(backend, "TIMED_SECONDS", 0.0)
    backend._lasting.clear()


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, float], None]:
    """Plant how long a step takes by plain autograd, per lane, and by a traced program."""

    def plant(loop: float, vmap: float) -> None:
        monkeypatch.setattr(
            backend, "_ms", lambda way, *_, **__: vmap if isinstance(way, VmapGradients) else loop
        )  # fmt: skip

    return plant


@pytest.mark.parametrize(("loop", "vmap", "taken"), [(1.0, 2.9, "vmap"), (1.0, 3.1, "loop")])
def test_the_faster_way_is_taken_and_recorded(
    tmp_path: Path, timed: Callable[[float, float], None], loop: float, vmap: float, taken: str
) -> None:
    timed(loop, vmap)
    record = sweep(small_workload(), tmp_path / "run")
    assert list(record.trials["gradients"]) == [taken] * 3
    assert list(record.trials["lanes"]) == [3] * 3
    row = record.lanes.iloc[0]
    assert row["loop_ms"] == 1.0, "per lane"
    assert row["step_ms"] == pytest.approx(min(3.0, vmap) / 3)
    assert row["faster"] == pytest.approx(3.0 / min(3.0, vmap))
    assert row["reason"] == "the fastest here"


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


def test_asked_for_explicitly_it_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gradients='vmap' cannot train 'small': .*Use gradients='auto'"):
        sweep(small_workload(build_model=Branches), tmp_path / "run", way="vmap")
    with pytest.raises(ConfigError, match="the hook Activations watches the forward pass"):
        sweep(small_workload(), tmp_path / "hook", way="vmap", hooks=[Activations()])
    record = sweep(small_workload(), tmp_path / "auto", hooks=[Activations()])
    assert set(record.lanes["gradients"]) == {"loop"}
    assert record.lanes["reason"][0] == "the hook Activations watches the forward pass"


@pytest.mark.parametrize(("first", "taken"), [((1.0, 0.1), "vmap"), ((0.1, 1.0), "loop")])
def test_a_resumed_trial_goes_on_in_the_same_way_and_digits_whatever_is_faster_now(
    tmp_path: Path, timed: Callable[[float, float], None], first: tuple[float, float], taken: str
) -> None:
    given = small_workload(config={"checkpoint_every_steps": 8})
    timed(*first)
    whole = sweep(given, tmp_path / "whole", lanes=1)
    with pytest.raises(RuntimeError, match="planted"):
        sweep(given, tmp_path / "run", lanes=1, hooks=[Breaks()])
    backend._lasting.clear()
    timed(*reversed(first))
    record = sweep(given, tmp_path / "run", lanes=1)
    assert record.trials["steps_run"].tolist() == [given.config.total_steps]
    assert [event["event"] for event in events(record, 0)].count("resumed") == 1
    assert record.lanes["gradients"].tolist() == [taken]
    assert record.steps["loss"].tolist() == whole.steps["loss"].tolist()


def test_a_short_training_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "WORTH_SECONDS", 1e9)
    record = sweep(small_workload(), tmp_path / "short")
    assert set(record.lanes["gradients"]) == {"loop"}
    assert record.lanes["reason"][0].startswith("too short to measure: about")
    sweep(small_workload(), tmp_path / "vmap", way="vmap")
    assert not backend._lasting, "what a short training took is not for long ones"


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


@pytest.mark.parametrize(
    ("measured_on", "arrangement", "asked_for", "recalled"),
    [
        (8, (1, 2), 3, True),  # a call for each lane, for fewer lanes
        (8, (1, 2), 1, False),  # for one there is nothing to spread over the cores
        (3, (1, 2), 8, False),  # for more, sharing a call may pay
        (8, (8, 1), 3, False),
        (8, (8, 1), 5, True),  # about as many
        (8, None, 3, False),
    ],
)
def test_what_is_known_for_another_number_of_lanes(
    measured_on: int, arrangement: tuple[int, int] | None, asked_for: int, recalled: bool
) -> None:
    verdict = Verdict(None if arrangement is None else Arrangement(*arrangement), "planted", {"loop": 1.0})
    remember(("kind",), verdict, lanes=measured_on, steps=1)
    assert (recall(("kind",), lanes=asked_for, steps=2) is not None) == recalled
    assert recall(("another kind",), lanes=measured_on, steps=1) is None
    own = verdict._replace(reason="own")
    remember(("kind",), own, lanes=asked_for, steps=1)
    assert recall(("kind",), lanes=asked_for, steps=2).reason == "own", "an exact match is preferred"


@pytest.mark.parametrize(("first", "taken"), [((1.0, 0.1), "vmap"), ((0.1, 1.0), "loop")])
def test_a_command_given_twice_takes_the_same_arithmetic_whatever_is_faster_now(
    tmp_path: Path, timed: Callable[[float, float], None], first: tuple[float, float], taken: str
) -> None:
    given = small_workload()
    for number, times in enumerate((first, first[::-1])):
        backend._lasting.clear()  # another process
        timed(*times)
        record = sweep(given, tmp_path / str(number))
        assert set(record.lanes["gradients"]) == {taken}
        assert record.lanes["loop_ms"][0] == pytest.approx(first[0]), "what was measured then is recorded again"
    backend._lasting.clear()
    longer = given.replace(config=given.config.replace(total_steps=41))
    assert set(sweep(longer, tmp_path / "longer").lanes["gradients"]) == {"loop" if taken == "vmap" else "vmap"}
    (tmp_path / "cache" / "gradient_backends.json").write_text("[broken")
    backend._lasting.clear()
    assert set(sweep(given, tmp_path / "broken").lanes["gradients"]) == {"loop" if taken == "vmap" else "vmap"}


def test_failing_before_a_resumed_trial_begins_keeps_its_best_checkpoints(tmp_path: Path) -> None:
    class Refuses(Hook):
        def on_start(self, run: Run) -> None:
            raise RuntimeError("planted")

    given = small_workload(config={"checkpoint_every_steps": 5, "eval_every_steps": 5, "keep_best": 2})
    with pytest.raises(RuntimeError, match="planted"):
        sweep(given, tmp_path / "run", lanes=1, hooks=[Breaks()])
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
