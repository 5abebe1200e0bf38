"""Checkpoints: the N best and the latest at every moment, whole or not at all, and damage that is named."""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.workloads import small_net, small_workload
from workbench.errors import CheckpointError, RecordError
from workbench.record.read import TrialRecord, open_record
from workbench.train import checkpoint as checkpoint_store
from workbench.train.checkpoint import (
    Checkpoint,
    CheckpointStore,
    best_steps,
    latest_checkpoint,
    load_checkpoint,
    load_model,
    prune,
    save_checkpoint,
)
from workbench.train.hooks import Hook, Step
from workbench.train.trainer import Trainer

NAN, INF = math.nan, math.inf


def checkpoint(step: int) -> Checkpoint:
    model = {"w": torch.tensor([1.5, NAN, INF, -0.0], dtype=torch.float64), "n": torch.tensor(step)}
    return Checkpoint(
        step, model, {"rng/torch": torch.arange(4, dtype=torch.uint8)}, {"seconds": 1.0, "evaluated": True}
    )


def steps_in(folder: Path) -> list[int]:
    return sorted(int(p.name.removeprefix("step-")) for p in folder.glob("step-*"))


def expected(series: list[float], keep: int, mode: str) -> list[int]:
    """The naive twin: sort what is finite by value, then by step; keep the first ones and the latest."""
    sign = 1 if mode == "min" else -1
    ranked = sorted((sign * v, s) for s, v in enumerate(series) if math.isfinite(v))
    return sorted({s for _, s in ranked[:keep]} | {len(series) - 1})


SCRIPTS = {
    "falling": [5.0, 4.0, 3.0, 2.0, 1.0],
    "rising": [1.0, 2.0, 3.0, 4.0, 5.0],
    "ties": [2.0, 1.0, 1.0, 1.0, 1.0, 2.0],
    "nan first": [NAN, NAN, 3.0, 1.0, 2.0, 4.0],
    "nan between": [3.0, NAN, 1.0, NAN, 2.0, 0.5, NAN],
    "nan only": [NAN, NAN, NAN, NAN, NAN],
    "infinite": [INF, 1.0, -INF, 2.0, INF, 0.5],
    "signed": [0.0, -0.0, -1.0, 1.0, -1.0],
}


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_directory_holds_the_three_best_and_the_latest_at_every_moment(
    tmp_path: Path, name: str, mode: str
) -> None:
    seen: dict[int, float] = {}
    for step, value in enumerate(SCRIPTS[name]):
        seen[step] = value
        save_checkpoint(tmp_path, checkpoint(step))
        prune(tmp_path, seen, keep_best=3, mode=mode)
        assert steps_in(tmp_path) == expected(SCRIPTS[name][: step + 1], 3, mode)
        assert len(list(tmp_path.iterdir())) == len(steps_in(tmp_path)), "nothing else is left"


@pytest.mark.parametrize("series", [[3.0, NAN, 1.0, 1.0, 2.0, NAN, 0.5, 4.0], [1.0, 1.0, 1.0, 1.0, NAN, 0.0, 0.0, 0.0]])
def test_the_same_through_the_trainer(tmp_path: Path, series: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """A metric follows the script, one value an evaluation; the directory is looked at before every step."""
    calls = itertools.count()

    def scripted(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return torch.full((len(batch[1]),), series[next(calls)], dtype=torch.float64)

    looked: list[list[int]] = []

    class Looks(Hook):
        def on_step(self, step: Step) -> None:
            looked.append(steps_in(tmp_path / "run" / "trials" / "0" / "checkpoints"))

    monkeypatch.setattr(checkpoint_store, "WRITE_SECONDS", -1.0)  # nothing waits in memory
    config = {"total_steps": 7, "eval_every_steps": 1, "select": "validation/script", "keep_best": 3}
    workload = small_workload(metrics={"script": scripted}, config=config)
    record = Trainer(hooks=[Looks()]).run(workload, out=tmp_path / "run")
    assert looked == [expected(series[: n + 1], 3, "min") for n in range(7)]
    assert steps_in(record.folder / "checkpoints") == expected(series, 3, "min")
    finite = [v for v in series if math.isfinite(v)]
    assert record.best() == (series.index(min(finite)), min(finite), record.best().checkpoint)
    assert record.best().checkpoint is not None


def test_best_steps_are_in_order() -> None:
    assert best_steps({0: 2.0, 5: 1.0, 9: NAN, 12: 1.0}, 3, mode="min") == [5, 12, 0]
    assert best_steps({0: NAN}, 3, mode="min") == []


def test_a_checkpoint_comes_back_bit_for_bit(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "c", checkpoint(7))
    assert path.name == "step-00000007"
    loaded = load_checkpoint(path)
    assert loaded.step == 7
    for ours, theirs in ((loaded.model, checkpoint(7).model), (loaded.trainer, checkpoint(7).trainer)):
        assert ours.keys() == theirs.keys()
        assert all(ours[k].numpy().tobytes() == theirs[k].numpy().tobytes() for k in ours)
    assert loaded.meta["evaluated"] is True
    assert latest_checkpoint(tmp_path / "c") == path
    assert latest_checkpoint(tmp_path / "nothing") is None


def test_tensors_that_share_memory_are_stored(tmp_path: Path) -> None:
    tied = nn.Linear(3, 3)
    model = nn.Sequential(tied, tied)
    path = save_checkpoint(tmp_path, Checkpoint(0, dict(model.state_dict()), {}, {}))
    other = nn.Linear(3, 3)
    assert torch.equal(load_model(nn.Sequential(other, other), path)[0].weight, tied.weight)


def test_loading_never_unpickles(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, checkpoint(1))

    class Harm:
        def __reduce__(self) -> Any:
            return (pytest.fail, ("unpickled",))

    torch.save({"w": Harm()}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match="checksum"):
        load_checkpoint(path)


DAMAGES = {
    "flipped": lambda p: _flip(p / "model.safetensors"),
    "trainer flipped": lambda p: _flip(p / "trainer.safetensors"),
    "truncated": lambda p: (p / "model.safetensors").write_bytes((p / "model.safetensors").read_bytes()[:-3]),
    "empty": lambda p: (p / "trainer.safetensors").write_bytes(b""),
    "missing": lambda p: (p / "model.safetensors").unlink(),
    "no meta": lambda p: (p / "meta.json").unlink(),
    "meta cut": lambda p: (p / "meta.json").write_bytes((p / "meta.json").read_bytes()[:9]),
    "meta null": lambda p: (p / "meta.json").write_text("null"),
    "meta of another step": lambda p: _edit(p / "meta.json", step=3),
}


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(bytes(content))


def _edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_with_what_is_left(tmp_path: Path, damage: str) -> None:
    save_checkpoint(tmp_path, checkpoint(4))
    path = save_checkpoint(tmp_path, checkpoint(8))
    DAMAGES[damage](path)
    with pytest.raises(CheckpointError, match=r"step-00000008 is damaged: .*there are: step-00000004\)"):
        load_checkpoint(path)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_run_with_a_damaged_checkpoint_says_so_and_goes_on_without_it(tmp_path: Path, damage: str) -> None:
    class Breaks(Hook):
        def on_step(self, step: Step) -> None:
            if step.index == 18:
                raise RuntimeError("planted")

    whole = Trainer().run(small_workload(), out=tmp_path / "whole")
    with pytest.raises(RuntimeError, match="planted"):
        Trainer(hooks=[Breaks()]).run(small_workload(), out=tmp_path / "run")
    record = open_record(tmp_path / "run")
    assert isinstance(record, TrialRecord)
    rows = len(record.steps)
    latest = record.checkpoints[-1]
    DAMAGES[damage](latest)
    with pytest.raises(CheckpointError, match=rf"{latest.name} is damaged.*Delete this folder and run again"):
        Trainer().run(small_workload(), out=tmp_path / "run")
    assert len(open_record(tmp_path / "run").steps) == rows
    shutil.rmtree(latest)
    again = Trainer().run(small_workload(), out=tmp_path / "run")
    assert again.steps["loss"].tolist() == whole.steps["loss"].tolist()


def test_a_full_disk_leaves_the_checkpoint_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, checkpoint(1))
    written = itertools.count()

    def full(_: int) -> None:
        if next(written) >= 1:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RecordError, match="No space left on device"):
        save_checkpoint(tmp_path, checkpoint(2))
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


def test_a_full_disk_is_noticed_without_waiting_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(
        RecordError, match=r"step-00000002: No space left on device\. Nothing that was saved before is lost"
    ):
        save_checkpoint(tmp_path, checkpoint(2), sync=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("sync", "waits"), [(True, 3), (False, 0)])
def test_only_a_synced_checkpoint_waits_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: bool, waits: int
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(os, "fsync", calls.append)
    load_checkpoint(save_checkpoint(tmp_path, checkpoint(2), sync=sync))
    assert len(calls) == waits


@pytest.mark.parametrize("seconds", [math.inf, -1.0])
def test_what_is_superseded_within_seconds_is_never_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    seen: list[tuple[int, bool]] = []

    def spy(folder: Path, saved: Checkpoint, *, sync: bool) -> Path:
        seen.append((saved.step, sync))
        return save_checkpoint(folder, saved, sync=sync)

    monkeypatch.setattr(checkpoint_store, "save_checkpoint", spy)
    monkeypatch.setattr(checkpoint_store, "WRITE_SECONDS", seconds)
    record = Trainer().run(small_workload(config={"eval_every_steps": 5}), out=tmp_path / "run")
    values = record.evals[record.evals["metric"] == "loss"].set_index("step")["value"]
    best = sorted(values.nsmallest(3).index)
    kept = sorted({*best, 40})
    assert sorted(int(path.name.removeprefix("step-")) for path in record.checkpoints) == kept
    assert [step for step, _ in seen] == (kept if seconds == math.inf else list(range(0, 41, 5)))
    assert {sync for _, sync in seen} == {seconds < 0}, "what a few seconds make again is not waited for"


def test_large_checkpoints_do_not_wait_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_store, "WAITING_BYTES", 10)
    store = CheckpointStore(tmp_path, keep_best=1, mode="min")
    assert not store.due
    store.add(checkpoint(3), {3: 1.0})
    assert store.due
    store.write({3: 1.0})
    assert not store.due
    assert store.latest == 3


def test_saving_twice_keeps_the_first(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, checkpoint(1))
    before = (path / "model.safetensors").stat().st_mtime_ns
    assert save_checkpoint(tmp_path, checkpoint(1)) == path
    assert (path / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.parametrize("other", [nn.Linear(4, 4), nn.Sequential(nn.Linear(3, 9))])
def test_weights_that_do_not_fit_are_explained(tmp_path: Path, other: nn.Module) -> None:
    state: Mapping[str, Any] = small_net().state_dict()
    path = save_checkpoint(tmp_path, Checkpoint(0, dict(state), {}, {}))
    with pytest.raises(CheckpointError, match=rf"does not fit {type(other).__name__}.*Build the model with the code"):
        load_model(other, path)


def test_a_workload_whose_model_changed_meanwhile_is_told(tmp_path: Path) -> None:
    class Breaks(Hook):
        def on_step(self, step: Step) -> None:
            if step.index == 18:
                raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        Trainer(hooks=[Breaks()]).run(small_workload(), out=tmp_path / "run")
    wider = small_workload(
        build_model=lambda: nn.Sequential(nn.Linear(3, 9), nn.Tanh(), nn.Dropout(0.0), nn.Linear(9, 1))
    )
    with pytest.raises(RecordError, match="the workload's code or data has changed since"):
        Trainer().run(wider, out=tmp_path / "run")
    study = json.loads((tmp_path / "run" / "study.json").read_text())
    del study["fingerprint"]  # as if the change had gone unseen
    (tmp_path / "run" / "study.json").write_text(json.dumps(study))
    with pytest.raises(CheckpointError, match="does not fit the model.*The code of the workload has changed since"):
        Trainer().run(wider, out=tmp_path / "run")
