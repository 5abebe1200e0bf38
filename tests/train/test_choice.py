"""How `auto` decides, what it says of it, and what happens when a traced program fails."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.helpers.workloads import small_net, small_workload
from workbench.errors import ConfigError, WorkloadError
from workbench.record.read import StudyRecord
from workbench.record.write import StudyWriter
from workbench.train.hooks import Activations, Hook, Run, Step
from workbench.train.lanes import backend as choice
from workbench.train.lanes import backend as known_choices
from workbench.train.lanes.backend import Arrangement, Verdict, arrangements, forget_choices, recall, remember
from workbench.train.lanes.recorder import CannotBatch
from workbench.train.lanes.run import VmapGradients
from workbench.train.trainer import Trainer
from workbench.workloads.base import Workload


class Branches(nn.Module):
    """Decides by the values of its activations, as no program that is recorded once can."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small_net().double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net(x)
        return out * 0.5 if bool(out.sum() > 0) else out


class Counts(nn.Module):
    """Behaves otherwise from its thirtieth call on; the number is kept in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.calls = small_net().double(), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        out: torch.Tensor = self.net(x)
        return out * (0.5 if self.calls > 30 else 1.0)


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
def always_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "WORTH_SECONDS", 0.0)
    monkeypatch.setattr(choice, "TIMED_SECONDS", 0.0)
    forget_choices()


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, float], None]:
    """Plant how long a step takes by plain autograd, per lane, and by a traced program."""

    def plant(loop: float, vmap: float) -> None:
        monkeypatch.setattr(
            choice, "_ms", lambda way, *_, **__: vmap if isinstance(way, VmapGradients) else loop
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


def test_a_model_that_cannot_be_traced_still_sweeps_with_the_reason_in_the_record(tmp_path: Path) -> None:
    given = small_workload(build_model=Branches)
    record = sweep(given, tmp_path / "run")
    assert list(record.trials["state"]) == ["complete"] * 3
    assert list(record.trials["gradients"]) == ["loop"] * 3
    assert "what it computes depends on the data" in record.lanes["reason"][0]
    assert "if bool(out.sum() > 0)" in record.lanes["reason"][0], "the line is named"
    alone = Trainer().run(given, given.config.replace(peak_lr=0.02), out=tmp_path / "alone")
    assert record.trial(1).steps["loss"].tolist() == alone.steps["loss"].tolist()


def test_what_a_model_keeps_in_python_is_not_disturbed_by_measuring(tmp_path: Path) -> None:
    given = small_workload(build_model=Counts)
    record = sweep(given, tmp_path / "run")
    assert list(record.trials["gradients"]) == ["loop"] * 3
    assert "calls" in record.lanes["reason"][0]
    alone = Trainer().run(given, given.config.replace(peak_lr=0.02), out=tmp_path / "alone")
    assert record.trial(1).steps["loss"].tolist() == alone.steps["loss"].tolist()


def test_asked_for_explicitly_it_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gradients='vmap' cannot train 'small': .*Use gradients='auto'"):
        sweep(small_workload(build_model=Branches), tmp_path / "run", way="vmap")
    with pytest.raises(ConfigError, match="the hook Activations watches the forward pass"):
        sweep(small_workload(), tmp_path / "hook", way="vmap", hooks=[Activations()])


def test_a_hook_that_watches_the_modules_keeps_plain_autograd(tmp_path: Path) -> None:
    record = sweep(small_workload(), tmp_path / "run", hooks=[Activations()])
    assert list(record.trials["gradients"]) == ["loop"] * 3
    assert record.lanes["reason"][0] == "the hook Activations watches the forward pass"


def test_a_single_lane_is_measured_too(tmp_path: Path, timed: Callable[[float, float], None]) -> None:
    timed(1.0, 0.9)
    record = sweep(small_workload(), tmp_path / "run", lanes=1)
    assert record.lanes[["gradients", "lanes_per_call", "threads"]].values.tolist() == [["vmap", 1, 1]]


@pytest.mark.parametrize(("first", "taken"), [((1.0, 0.1), "vmap"), ((0.1, 1.0), "loop")])
def test_a_resumed_trial_goes_on_in_the_same_way_and_digits_whatever_is_faster_now(
    tmp_path: Path, timed: Callable[[float, float], None], first: tuple[float, float], taken: str
) -> None:
    given = small_workload(config={"checkpoint_every_steps": 8})
    timed(*first)
    whole = sweep(given, tmp_path / "whole", lanes=1)
    with pytest.raises(RuntimeError, match="planted"):
        sweep(given, tmp_path / "run", lanes=1, hooks=[Breaks()])
    forget_choices()
    timed(*reversed(first))
    record = sweep(given, tmp_path / "run", lanes=1)
    assert record.trials["steps_run"].tolist() == [given.config.total_steps]
    assert [event["event"] for event in events(record, 0)].count("resumed") == 1
    assert record.lanes["gradients"].tolist() == [taken]
    assert record.steps["loss"].tolist() == whole.steps["loss"].tolist()


def test_a_short_training_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "WORTH_SECONDS", 1e9)
    assert sweep(small_workload(), tmp_path / "short").lanes["reason"][0].startswith("too short to measure: about")


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
    class Branching(nn.Module):
        """Decides by the values of its activations, in evaluation alone."""

        def __init__(self) -> None:
            super().__init__()
            self.net = small_net().double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.net(x)
            return out if self.training or bool(out.sum() > 0) else out * 0.5

    timed(1.0, 0.1)
    given = small_workload(build_model=Branching)
    whole = sweep(given, tmp_path / "whole", way="loop")
    record = sweep(given, tmp_path / "run")
    assert record.lanes["gradients"].tolist() == ["vmap"] * 3
    said = [event for event in events(record, 1) if event["event"] == "evaluated alone"]
    assert [event["step"] for event in said] == [0]
    assert "what it computes depends on the data" in said[0]["why"]
    np.testing.assert_allclose(record.evals["value"], whole.evals["value"], rtol=1e-9)


def test_a_later_stack_of_the_same_kind_is_not_measured_again(
    tmp_path: Path, timed: Callable[[float, float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    timed(1.0, 0.1)
    given = small_workload()
    sweep(given, tmp_path / "first", lanes=4)
    monkeypatch.setattr(choice, "_measured", lambda *_, **__: pytest.fail("measured again"))
    record = sweep(given, tmp_path / "second", lanes=3)
    assert list(record.trials["gradients"]) == ["vmap"] * 3
    assert record.lanes["lanes_per_call"][0] == 3


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
    remember("kind", small_workload(), verdict, lanes=measured_on)
    assert (recall("kind", lanes=asked_for) is not None) == recalled
    assert recall("another kind", lanes=measured_on) is None


def test_an_exact_match_is_preferred() -> None:
    own, other = (Verdict(Arrangement(1, 2), reason, {"loop": 1.0}) for reason in ("own", "other"))
    remember("kind", small_workload(), other, lanes=16)
    remember("kind", small_workload(), own, lanes=4)
    assert recall("kind", lanes=4) is own


def test_what_was_refused_for_other_lanes_is_tried_again(tmp_path: Path, timed: Callable[[float, float], None]) -> None:
    """Dropout of another rate in every trial cannot share a program; a single trial can have one."""
    timed(1.0, 0.1)
    rates = iter([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7])
    given = small_workload(build_model=lambda: nn.Sequential(small_net().double(), nn.Dropout(next(rates))))
    configs = [given.config.replace(shared_seed=k) for k in range(2)]
    study = StudyWriter.open(tmp_path / "run", kind="lr_sweep", workload=given.name, config=given.config.to_dict())
    trainer = Trainer()
    trainer.run_trials(given, configs, study, stage="lr_sweep")
    trainer.run_trials(given, [given.config.replace(shared_seed=9)], study, stage="lr_sweep")
    study.close()
    lanes = StudyRecord(tmp_path / "run").lanes
    assert lanes["gradients"].tolist() == ["loop", "loop", "vmap"]


def test_a_short_vmap_is_not_remembered_for_long_ones(
    tmp_path: Path, timed: Callable[[float, float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    timed(1.0, 0.1)
    monkeypatch.setattr(choice, "WORTH_SECONDS", 1e9)
    given = small_workload()
    sweep(given, tmp_path / "short", way="vmap")
    assert not known_choices._known


def test_nothing_left_to_train_asks_for_no_way(tmp_path: Path) -> None:
    """A process that is killed between the last checkpoint and the note that the trial has ended goes on with no step."""
    given = small_workload()
    sweep(given, tmp_path / "run", lanes=1, way="vmap")
    path = tmp_path / "run" / "trials" / "0" / "events.jsonl"
    path.write_text("\n".join(path.read_text().splitlines()[:-1]) + "\n")
    record = sweep(given, tmp_path / "run", lanes=1, way="vmap")
    assert record.trials["state"].tolist() == ["complete"]


def test_an_error_of_the_users_own_is_shown_as_it_is(tmp_path: Path) -> None:
    def forward(model: nn.Module, batch: Any) -> torch.Tensor:
        raise IndexError("planted")

    for way in ("vmap", "auto"):
        with pytest.raises(WorkloadError, match=r"forward or loss raised IndexError: planted"):
            sweep(small_workload(forward=forward), tmp_path / way, way=way)


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


@pytest.mark.parametrize(
    ("lanes", "device", "threads", "expected"),
    [
        (32, "cpu", 2, [(32, 1), (1, 2), (16, 2)]),
        (2, "cpu", 2, [(2, 1), (1, 2)]),
        (32, "cpu", 1, [(32, 1)]),
        (32, "cuda", 8, [(32, 1)]),
        (1, "cpu", 2, [(1, 1)]),
    ],
)
def test_what_is_tried(lanes: int, device: str, threads: int, expected: list[tuple[int, int]]) -> None:
    assert arrangements(lanes, torch.device(device), threads) == [Arrangement(*pair) for pair in expected]
