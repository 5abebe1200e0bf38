"""What every executor promises: the same study, wherever its trials are trained, and whatever happens to who trains them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.executors import (
    Dies,
    Durable,
    Notes,
    Slow,
    assert_same_study,
    assert_whole,
    begins,
    rates,
    train,
    train_alone,
)
from tests.helpers.pipe_cluster import PipeCluster
from tests.helpers.workloads import small_workload, squared
from workbench.config import TrainConfig
from workbench.errors import (
    ClusterError,
    RecordError,
    StudyInterrupted,
    WorkloadError,
)
from workbench.record.read import StudyRecord, read_events
from workbench.studies.executors import inbox, on_ray
from workbench.studies.executors.on_ray import RayExecutor, plan_chunks
from workbench.workloads.registry import load_workload

Make = Callable[[], RayExecutor | None]
CONFIG = TrainConfig(peak_lr=0.1, total_steps=100, batch_size=8)


def on_pipes(room: int = 2) -> tuple[RayExecutor, PipeCluster]:
    """All of the executor but Ray itself."""
    cluster = PipeCluster(room)
    return RayExecutor(connect=lambda address: cluster), cluster  # type: ignore[arg-type,return-value]


@pytest.fixture(params=["local", "pipes", pytest.param("ray", marks=pytest.mark.slow)])
def make(request: pytest.FixtureRequest) -> Make:
    if request.param == "ray":
        request.getfixturevalue("ray_here")
    return {"local": lambda: None, "pipes": lambda: on_pipes()[0], "ray": RayExecutor}[request.param]


@pytest.mark.parametrize(
    ("name", "lrs", "changes"),
    [
        ("digits_mlp", (0.001, 0.01, 0.1, 1.0, 500.0),
         {"total_steps": 60, "warmup_steps": 5, "max_grad_norm": 1.0, "precision": "float64"}),
        ("dropout", (0.01, 0.02), {}),
    ],
)  # fmt: skip
def test_the_study_is_the_same(make: Make, tmp_path: Path, name: str, lrs: Any, changes: dict[str, Any]) -> None:
    if name == "dropout":  # the same numbers are drawn wherever it is
        workload = small_workload(build_model=lambda: torch.nn.Sequential(torch.nn.Dropout(0.3), torch.nn.Linear(3, 1)))
        configs = [*rates(workload.config, *lrs), *rates(workload.config, 0.01, shared_seed=3, per_host_seed=4)]
    else:
        workload = load_workload(name)
        configs = rates(workload.config, *lrs, **changes)
    train_alone(workload, configs, tmp_path / "reference")
    steps: list[int] = []
    records = train(make(), workload, configs, tmp_path / "s", progress=steps.append)
    assert [(r.number, r.config["peak_lr"]) for r in records] == list(enumerate(c.peak_lr for c in configs))
    assert_same_study(tmp_path / "s", tmp_path / "reference")
    assert_whole(tmp_path / "s")
    assert sum(steps) >= len(StudyRecord(tmp_path / "s").steps)


def test_the_rows_are_those_of_the_same_chunk_here_bit_for_bit(tmp_path: Path) -> None:
    workload = load_workload("digits_mlp")
    configs = rates(workload.config, 0.01, 0.1, total_steps=40)
    train(None, workload, configs, tmp_path / "here")
    train(on_pipes(1)[0], workload, configs, tmp_path / "there")
    here, there = (StudyRecord(tmp_path / name) for name in ("here", "there"))
    assert here.steps["loss"].tolist() == there.steps["loss"].tolist()
    assert here.evals["value"].tolist() == there.evals["value"].tolist()
    for mine, theirs in zip(here, there, strict=True):
        for one, other in zip(mine.checkpoints, theirs.checkpoints, strict=True):
            assert (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()


def test_what_is_finished_is_not_trained_again_and_hooks_see_what_trains(make: Make, tmp_path: Path) -> None:
    workload = small_workload()
    first, second, third = rates(workload.config, 0.01, 0.02, 0.03)
    train(make(), workload, [second], tmp_path / "s")
    notes = [Notes(tmp_path / "notes")]
    records = train(make(), workload, [first, second, third], tmp_path / "s", hooks=notes)
    assert [r.number for r in records] == [1, 0, 2], "numbers stay with their trials"
    assert [len(begins(tmp_path / "s", n)) for n in range(3)] == [1, 1, 1]
    assert_whole(tmp_path / "s")
    before = (tmp_path / "notes").read_text()
    train(make(), workload, [third, first], tmp_path / "s", hooks=notes)
    assert (tmp_path / "notes").read_text() == before
    train(
        make(), workload, rates(workload.config, 0.04, 0.05, 0.06, 0.07), tmp_path / "t", hooks=[Notes(tmp_path / "n")]
    )
    seen = [list(map(int, line.split()))[1:] for line in (tmp_path / "n").read_text().splitlines()]
    assert [sum(column) for column in zip(*seen, strict=True)] == [4, 4 * 40, 4 * 11 * 2]


def test_ctrl_c_keeps_what_was_trained_and_the_same_call_goes_on(make: Make, tmp_path: Path) -> None:
    workload = small_workload(config={"total_steps": 200, "eval_every_steps": 5})
    configs = rates(workload.config, 0.01, 0.02, 0.03)

    def interrupt(steps: int) -> None:
        if not interrupted:
            interrupted.append(steps)
            os.kill(os.getpid(), signal.SIGINT)

    interrupted: list[int] = []
    with pytest.raises(StudyInterrupted, match=r"stopped.*the same command or cell resumes"):
        train(make(), workload, configs, tmp_path / "s", progress=interrupt, hooks=[Durable(), Slow(0.002)])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    stopped = StudyRecord(tmp_path / "s")
    assert "stopped" in set(stopped.trials["state"]) <= {"stopped", "running"}, "running: no worker had begun with it"
    begun = [trial.number for trial in stopped if trial.state == "stopped" and begins(tmp_path / "s", trial.number)]
    assert all(stopped.trial(number).checkpoints for number in begun)
    train(make(), workload, configs, tmp_path / "s")
    assert_whole(tmp_path / "s")
    again = [begins(tmp_path / "s", number)[1] for number in begun]
    assert all(event["event"] == "resumed" for event in again)
    assert max(event["step"] for event in again) > 0
    train_alone(workload, configs, tmp_path / "whole")
    assert_same_study(tmp_path / "s", tmp_path / "whole")


def test_a_broken_loss_is_explained_here(make: Make, tmp_path: Path) -> None:
    def loss(outputs: Tensor, batch: Any) -> Tensor:
        if outputs.requires_grad:
            raise ZeroDivisionError("of my own")
        return squared(outputs, batch)

    workload = small_workload(loss=loss)
    with pytest.raises(WorkloadError, match=r"workload 'small', at step 0.*ZeroDivisionError: of my own"):
        train(make(), workload, rates(workload.config, 0.01, 0.02), tmp_path / "s")
    states = set(StudyRecord(tmp_path / "s").trials["state"])
    assert "failed" in states
    assert states - {"failed", "stopped", "running"} == set()


@pytest.mark.parametrize("kind", ["pipes", pytest.param("ray", marks=pytest.mark.slow)])
def test_the_chunk_of_a_killed_worker_is_trained_again_from_its_checkpoints(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    executor = on_pipes()[0] if kind == "pipes" else (request.getfixturevalue("ray_here"), RayExecutor())[1]
    workload = small_workload(config={"eval_every_steps": 5})
    short = rates(workload.config, 0.01, 0.02, 0.03, total_steps=10)
    configs = [*short, *rates(workload.config, 0.05, 0.06, 0.07)]
    dies = Dies(tmp_path, at=28, arrived=("s/trials/*/checkpoints/step-0000002?", 3))
    train(executor, workload, configs, tmp_path / "s", hooks=[Durable(), dies])
    assert_whole(tmp_path / "s")
    assert [len(begins(tmp_path / "s", n)) for n in range(3)] == [1, 1, 1], "finished trials are not trained again"
    again = [events for n in range(3, 6) if len(events := begins(tmp_path / "s", n)) == 2]
    assert again
    assert all(second["event"] == "resumed" and second["step"] >= 20 for _, second in again)
    assert all(first["pid"] != second["pid"] for first, second in again)
    events = [event for n in range(3, 6) for event in read_events(tmp_path / "s" / "trials" / str(n))]
    lost = [event for event in events if event["event"] == "worker_lost"]
    assert [event["pid"] for event in lost] == [first["pid"] for first, _ in again]
    assert all(event["why"] for event in lost)
    train_alone(workload, configs, tmp_path / "whole")
    assert_same_study(tmp_path / "s", tmp_path / "whole")


def test_a_trial_that_kills_every_worker_is_given_up_and_the_others_are_kept(tmp_path: Path) -> None:
    workload = small_workload()
    good, bad = rates(workload.config, 0.01, total_steps=20)[0], rates(workload.config, 0.02, batch_size=16)[0]
    executor, cluster = on_pipes()
    with pytest.raises(ClusterError, match=r"trials 1 lost their worker 4 times.*out of memory.*executor='local'"):
        train(executor, workload, [good, bad], tmp_path / "s", hooks=[Dies(tmp_path, at=30, times=99)])
    assert len(list(tmp_path.glob("died-*"))) == on_ray.RERUNS + 1
    assert StudyRecord(tmp_path / "s").trial(0).state == "complete"
    assert not cluster.alive()


def test_an_error_in_one_chunk_stops_the_others_and_keeps_them(tmp_path: Path) -> None:
    def loss(outputs: Any, batch: Any) -> Any:
        if len(outputs) == 16 and outputs.requires_grad:
            raise ValueError("only for batches of 16")
        return squared(outputs, batch)

    workload = small_workload(loss=loss)
    slow, broken = rates(workload.config, 0.01, total_steps=2000)[0], rates(workload.config, 0.02, batch_size=16)[0]
    start = time.monotonic()
    with pytest.raises(WorkloadError, match="only for batches of 16") as raised:
        train(on_pipes()[0], workload, [slow, broken], tmp_path / "s", hooks=[Durable(), Slow(0.01)])
    assert time.monotonic() - start < 60
    assert "Traceback" in "".join(raised.value.__notes__)
    assert f"process {begins(tmp_path / 's', 1)[0]['pid']}" in "".join(raised.value.__notes__)
    assert StudyRecord(tmp_path / "s").trial(0).state in ("stopped", "running")


class Broken(PipeCluster):
    def submit(self, *given: Any, **options: Any) -> Any:
        task = super().submit(*given, **options)
        task.process.kill()
        return task


class Asleep(PipeCluster):
    def machines(self, resource: str) -> list[int]:
        return [] if self.tasks else super().machines(resource)

    def _start(self) -> None:
        pass

    def ready(self, calls: list[Any], timeout_s: float) -> list[Any]:
        return []


@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        (PipeCluster(0), r"no CPU\. Add.*ray start"),
        (Broken(), r"no worker can be started.*import workbench"),
        (Asleep(), r"no CPU any more.*asleep.*the same call goes on"),
    ],
)
def test_a_cluster_on_which_nothing_can_start_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: Any, said: str
) -> None:
    monkeypatch.setattr(on_ray, "GONE_S", 0.0)
    with pytest.raises(ClusterError, match=said):
        train(RayExecutor(connect=lambda _: cluster), small_workload(), [CONFIG], tmp_path / "s")
    assert (tmp_path / "s" / "trials").exists() == (cluster.room > 0), "refused before a trial has its folder"


def test_a_full_disk_here_ends_the_workers_and_leaves_no_half_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    workload = small_workload()
    executor, cluster = on_pipes()
    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(RecordError, match=r"cannot write .*No space left on device"):
        train(executor, workload, rates(workload.config, 0.1, 0.2), tmp_path / "s")
    assert not cluster.alive()
    assert not list((tmp_path / "s").rglob("step-*"))
    monkeypatch.undo()
    train(on_pipes()[0], workload, rates(workload.config, 0.1, 0.2), tmp_path / "s")
    assert_whole(tmp_path / "s")


def test_rows_are_on_disk_before_what_rests_on_them_and_no_name_leads_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from workbench.record.write import StudyWriter

    study = StudyWriter.open(tmp_path / "s", kind="sweep", workload="w", config=CONFIG.to_dict())
    study.trial(CONFIG.to_dict(), stage="x", train_examples=8)
    box, files = inbox.Inbox(study), {"meta.json": b"{}"}
    on_disk: list[int] = []

    def rows(first: int, last: int) -> tuple[Any, ...]:
        steps = list(range(first, last))
        return "rows", "steps", {"trial": [0] * len(steps), "step": steps, "loss": [1.0] * len(steps)}

    rename = Path.rename
    monkeypatch.setattr(
        Path, "rename", lambda a, b: (on_disk.append(len(StudyRecord(study.path).steps)), rename(a, b))[1]
    )
    box.apply([rows(0, 5), ("saved", 0, "step-00000005", files), rows(5, 7)], {})
    assert on_disk == [7]
    box.apply([("rewind", 0, 4), rows(4, 9), ("saved", 0, "step-00000009", files), ("dropped", 0, "step-00000005")], {})
    assert StudyRecord(study.path).steps["step"].tolist() == list(range(9))
    assert [p.name for p in (study.path / "trials/0/checkpoints").iterdir()] == ["step-00000009"]
    before = sorted(study.path.rglob("*"))
    for message in (
        ("saved", 0, "../../../x", files), ("saved", 0, "step-00000001", {"../x": b""}), ("dropped", 0, "."),
        ("dropped", 0, ""), ("rows", "lock", {}),
    ):  # fmt: skip
        with pytest.raises(RecordError, match="no name of a table, a checkpoint"):
            box.apply([message], {})
    assert sorted(study.path.rglob("*")) == before
    study.close()


def test_chunks_hold_what_can_train_together_the_longest_first() -> None:
    assert plan_chunks([CONFIG.replace(peak_lr=0.001 * 2**k) for k in range(6)], 2) == [[0, 2, 4], [1, 3, 5]]
    configs = [CONFIG, CONFIG.replace(total_steps=5000), CONFIG.replace(batch_size=16), CONFIG.replace(per_host_seed=5)]
    assert plan_chunks(configs, 4) == [[1], [2], [0], [3]]
    assert plan_chunks([], 4) == []
