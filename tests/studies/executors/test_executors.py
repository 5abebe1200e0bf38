"""What every executor promises: the same study, wherever its trials are trained."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.executors import Durable, Notes, Slow, assert_same_study, assert_whole, begins, rates, train
from tests.helpers.pipe_cluster import PipeCluster
from tests.helpers.workloads import small_workload, squared
from workbench.config import TrainConfig
from workbench.errors import ConfigError, DataError, StudyInterrupted, UsageError, WorkloadError
from workbench.record.read import StudyRecord
from workbench.studies.executors.base import Executor
from workbench.studies.executors.local import LocalExecutor
from workbench.studies.executors.on_ray import RayExecutor
from workbench.workloads.registry import load_workload

Make = Callable[[], Executor]


@pytest.fixture(params=["local", "pipes", pytest.param("ray", marks=pytest.mark.slow)])
def make(request: pytest.FixtureRequest) -> Make:
    if request.param == "local":
        return LocalExecutor
    if request.param == "pipes":  # all of the executor but Ray itself
        return lambda: RayExecutor(connect=lambda address: PipeCluster())  # type: ignore[arg-type,return-value]
    request.getfixturevalue("ray_here")
    return RayExecutor


@pytest.mark.parametrize(
    ("name", "lrs", "changes"),
    [
        (
            "digits_mlp",
            (0.001, 0.01, 0.1, 1.0, 500.0),
            {"total_steps": 60, "warmup_steps": 5, "max_grad_norm": 1.0, "precision": "float64"},
        ),
        ("quadratic", (0.01, 0.1, 1.0), {"total_steps": 30}),
    ],
)
def test_the_study_is_the_same(
    make: Make, tmp_path: Path, name: str, lrs: tuple[float, ...], changes: dict[str, Any]
) -> None:
    workload = load_workload(name)
    configs = rates(workload.config, *lrs, **changes)
    alone = [train(LocalExecutor(), workload, [c], tmp_path / f"alone-{i}") for i, c in enumerate(configs)]
    train(LocalExecutor(), workload, configs, tmp_path / "reference")
    steps: list[int] = []
    records = train(make(), workload, configs, tmp_path / "s", progress=steps.append)
    assert [r.number for r in records] == list(range(len(lrs)))
    assert [r.config["peak_lr"] for r in records] == list(lrs)
    assert_same_study(tmp_path / "s", tmp_path / "reference")
    assert_whole(tmp_path / "s")
    for record, (single,) in zip(records, alone, strict=True):
        assert record.steps["loss"].to_numpy() == pytest.approx(single.steps["loss"].to_numpy(), rel=1e-5, nan_ok=True)
    assert sum(steps) >= len(StudyRecord(tmp_path / "s").steps)


def test_what_is_finished_is_not_trained_again(make: Make, tmp_path: Path) -> None:
    workload = small_workload()
    first, second, third = rates(workload.config, 0.01, 0.02, 0.03)
    train(make(), workload, [second], tmp_path / "s")
    records = train(make(), workload, [first, second, third], tmp_path / "s", hooks=[Notes(tmp_path / "notes")])
    assert [r.number for r in records] == [1, 0, 2], "numbers stay with their trials"
    assert [len(begins(tmp_path / "s", n)) for n in range(3)] == [1, 1, 1]
    assert_whole(tmp_path / "s")
    before = (tmp_path / "notes").read_text()
    train(make(), workload, [third, first], tmp_path / "s", hooks=[Notes(tmp_path / "notes")])
    assert (tmp_path / "notes").read_text() == before


def test_a_broken_loss_is_explained_here(make: Make, tmp_path: Path) -> None:
    def loss(outputs: Tensor, batch: Any) -> Tensor:
        if outputs.requires_grad:
            raise ZeroDivisionError("of my own")
        return squared(outputs, batch)

    workload = small_workload(loss=loss)
    with pytest.raises(WorkloadError, match=r"workload 'small', at step 0.*ZeroDivisionError: of my own"):
        train(make(), workload, rates(workload.config, 0.01, 0.02), tmp_path / "s")
    assert set(StudyRecord(tmp_path / "s").trials["state"]) <= {"failed", "stopped", "running"}


def test_ctrl_c_keeps_what_was_trained_and_the_same_call_goes_on(make: Make, tmp_path: Path) -> None:
    workload = small_workload(config={"total_steps": 200, "eval_every_steps": 5})
    configs = rates(workload.config, 0.01, 0.02, 0.03)

    def interrupt(steps: int) -> None:
        if not interrupted:
            interrupted.append(steps)
            os.kill(os.getpid(), signal.SIGINT)

    interrupted: list[int] = []
    with pytest.raises(StudyInterrupted, match=r"stopped.*the same call goes on from there"):
        train(make(), workload, configs, tmp_path / "s", progress=interrupt, hooks=[Durable(), Slow(0.002)])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    stopped = StudyRecord(tmp_path / "s")
    assert "stopped" in set(stopped.trials["state"])
    assert set(stopped.trials["state"]) <= {"stopped", "running"}, "running: no worker had begun with it"
    begun = [trial.number for trial in stopped if trial.state == "stopped"]
    assert all(stopped.trial(number).checkpoints for number in begun)
    train(make(), workload, configs, tmp_path / "s")
    assert_whole(tmp_path / "s")
    again = [begins(tmp_path / "s", number)[1] for number in begun]
    assert all(event["event"] == "resumed" for event in again)
    assert max(event["step"] for event in again) > 0
    train(LocalExecutor(), workload, configs, tmp_path / "whole")
    assert_same_study(tmp_path / "s", tmp_path / "whole")


def test_hooks_see_the_trials_that_train_together(make: Make, tmp_path: Path) -> None:
    workload = small_workload()
    train(
        make(), workload, rates(workload.config, 0.01, 0.02, 0.03, 0.04), tmp_path / "s", hooks=[Notes(tmp_path / "n")]
    )
    seen = [list(map(int, line.split()))[1:] for line in (tmp_path / "n").read_text().splitlines()]
    assert [sum(column) for column in zip(*seen, strict=True)] == [4, 4 * 40, 4 * 11 * 2]


@pytest.mark.parametrize(
    ("configs", "error", "said"),
    [
        ([], UsageError, "configs is empty"),
        ([TrainConfig(peak_lr=0.1, total_steps=9, batch_size=8)] * 2, ConfigError, r"configs\[0\] and configs\[1\]"),
        ([TrainConfig(peak_lr=0.1, total_steps=9, batch_size=4096)], DataError, "batch_size=4096"),
    ],
)
def test_wrong_configs_are_refused_before_anything_starts(
    make: Make, tmp_path: Path, configs: list[TrainConfig], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        train(make(), small_workload(), configs, tmp_path / "s")
    assert not (tmp_path / "s" / "trials").exists()


def test_dropout_draws_the_same_numbers_wherever_it_is(make: Make, tmp_path: Path) -> None:
    workload = small_workload(build_model=lambda: torch.nn.Sequential(torch.nn.Dropout(0.3), torch.nn.Linear(3, 1)))
    configs = [*rates(workload.config, 0.01, 0.02), *rates(workload.config, 0.01, shared_seed=3, per_host_seed=4)]
    train(LocalExecutor(), workload, configs, tmp_path / "here")
    train(make(), workload, configs, tmp_path / "there")
    assert_same_study(tmp_path / "here", tmp_path / "there")
