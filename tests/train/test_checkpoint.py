"""Checkpoints: the N best and the latest at every moment, whole or not at all, and damage that is named."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from tests.helpers.hooks import At
from tests.helpers.workloads import small_workload
from workbench.errors import CheckpointError, RecordError, StudyInterrupted
from workbench.train import checkpoint as checkpoints
from workbench.train import gradients
from workbench.train.checkpoint import (
    Checkpoint,
    best_steps,
    latest_checkpoint,
    load_checkpoint,
    prune,
    save_checkpoint,
)

NAN, INF = math.nan, math.inf


def checkpoint(step: int) -> Checkpoint:
    model = {"w": torch.tensor([1.5, NAN, INF, -0.0], dtype=torch.float64), "n": torch.tensor(step)}
    trainer = {"rng/torch": torch.arange(4, dtype=torch.uint8)}
    return Checkpoint(step, model, trainer, {"seconds": 1.0, "evaluated": True})


def steps_in(folder: Path) -> list[int]:
    return sorted(int(p.name.removeprefix("step-")) for p in folder.glob("step-*"))


def expected(series: list[float], mode: str) -> list[int]:
    """The naive twin: sort what is finite by value, then by step; keep the first three and the latest."""
    sign = 1 if mode == "min" else -1
    ranked = sorted((sign * v, s) for s, v in enumerate(series) if math.isfinite(v))
    return sorted({s for _, s in ranked[:3]} | {len(series) - 1})


SCRIPTS = {
    "rising": [1.0, 2.0, 3.0, 4.0, 5.0],
    "ties": [2.0, 1.0, 1.0, 1.0, 1.0, 2.0],
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
        assert steps_in(tmp_path) == expected(SCRIPTS[name][: step + 1], mode)
        assert len(list(tmp_path.iterdir())) == len(steps_in(tmp_path)), "nothing else is left"
    assert best_steps({0: 2.0, 5: 1.0, 9: NAN, 12: 1.0}, 3, mode="min") == [5, 12, 0]


def test_a_checkpoint_comes_back_bit_for_bit_and_is_saved_once(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "c", checkpoint(7))
    before = (path / "model.safetensors").stat().st_mtime_ns
    assert save_checkpoint(tmp_path / "c", checkpoint(7)) == path
    assert (path / "model.safetensors").stat().st_mtime_ns == before
    loaded = load_checkpoint(path)
    assert (path.name, loaded.step, loaded.meta["evaluated"]) == ("step-00000007", 7, True)
    for ours, theirs in ((loaded.model, checkpoint(7).model), (loaded.trainer, checkpoint(7).trainer)):
        assert ours.keys() == theirs.keys()
        assert all(ours[k].numpy().tobytes() == theirs[k].numpy().tobytes() for k in ours)
    assert latest_checkpoint(tmp_path / "c") == path
    assert latest_checkpoint(tmp_path / "nothing") is None


class Harm:
    def __reduce__(self) -> Any:
        return (pytest.fail, ("unpickled",))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(bytes(content))


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


DAMAGES = {
    "flipped": lambda p: flip(p / "model.safetensors"),
    "trainer flipped": lambda p: flip(p / "trainer.safetensors"),
    "pickled": lambda p: torch.save({"w": Harm()}, p / "model.safetensors"),
    "missing": lambda p: (p / "model.safetensors").unlink(),
    "meta cut": lambda p: (p / "meta.json").write_bytes((p / "meta.json").read_bytes()[:9]),
    "meta null": lambda p: (p / "meta.json").write_text("null"),
    "meta of another step": lambda p: edit(p / "meta.json", step=3),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_with_what_is_left(tmp_path: Path, damage: str) -> None:
    save_checkpoint(tmp_path, checkpoint(4))
    path = save_checkpoint(tmp_path, checkpoint(8))
    DAMAGES[damage](path)
    with pytest.raises(CheckpointError, match=r"step-00000008 is damaged: .*there are: step-00000004\)"):
        load_checkpoint(path)


@pytest.mark.parametrize(("sync", "fails", "waits"), [(True, "fsync", 1), (False, "rename", 0), (True, "", 3), (False, "", 0)])  # fmt: skip
def test_a_full_disk_leaves_it_whole_or_absent_and_only_sync_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: bool, fails: str, waits: int
) -> None:
    calls: list[int] = []

    def full(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    def fsync(number: int) -> None:
        if fails == "fsync" and calls:
            full()
        calls.append(number)

    save_checkpoint(tmp_path, checkpoint(1))
    monkeypatch.setattr(os, "fsync", fsync)
    if fails == "rename":
        monkeypatch.setattr(Path, "rename", full)
    if fails:
        with pytest.raises(
            RecordError, match=r"step-00000002: No space left on device\. Nothing that was saved before"
        ):
            save_checkpoint(tmp_path, checkpoint(2), sync=sync)
    else:
        load_checkpoint(save_checkpoint(tmp_path, checkpoint(2), sync=sync))
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["step-00000001", *(["step-00000002"] * (not fails))]
    assert len(calls) == waits


@pytest.mark.parametrize("seconds", [math.inf, -1.0])
def test_what_is_superseded_within_seconds_is_never_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    seen: list[tuple[int, bool]] = []

    def spy(folder: Path, saved: Checkpoint, *, sync: bool) -> Path:
        seen.append((saved.step, sync))
        return save_checkpoint(folder, saved, sync=sync)

    monkeypatch.setattr(checkpoints, "save_checkpoint", spy)
    monkeypatch.setattr(checkpoints, "WRITE_SECONDS", seconds)
    record = wb.Trainer().run(small_workload(config={"eval_every_steps": 5}), out=tmp_path / "run")
    values = record.evals[record.evals["metric"] == "loss"].set_index("step")["value"]
    kept = sorted({*values.nsmallest(3).index, 40})
    assert steps_in(record.folder / "checkpoints") == kept
    assert [step for step, _ in seen] == (kept if seconds == math.inf else list(range(0, 41, 5)))
    assert {sync for _, sync in seen} == {seconds < 0}, "what a few seconds make again is not waited for"


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_large_models_train_and_go_on_as_small_ones_do_and_keep_the_best_and_the_latest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    workload = small_workload(config={"eval_every_steps": 5, "optimizer": optimizer, "peak_lr": 0.05})
    small = wb.Trainer(gradients="loop").run(workload, out=tmp_path / "small")
    assert len(steps_in(small.folder / "checkpoints")) >= 3
    monkeypatch.setattr(gradients, "IN_PLACE_BYTES", 0)
    monkeypatch.setattr(checkpoints, "WAITING_BYTES", 0)
    monkeypatch.setattr(checkpoints, "TRIAL_BYTES", 0)

    with pytest.raises(StudyInterrupted):
        wb.Trainer(gradients="loop", hooks=[At(17, signal.SIGINT)]).run(workload, out=tmp_path / "large")
    large = wb.Trainer(gradients="loop").run(workload, out=tmp_path / "large")
    for name in ("loss", "grad_norm"):
        assert large.steps[name].to_numpy().tobytes() == small.steps[name].to_numpy().tobytes()
    values = small.evals[small.evals["metric"] == "loss"].set_index("step")["value"]
    assert steps_in(large.folder / "checkpoints") == sorted({int(values.idxmin()), 40})
    last = [load_checkpoint(each.folder / "checkpoints" / "step-00000040") for each in (small, large)]
    assert all(torch.equal(last[0].model[name], tensor) for name, tensor in last[1].model.items())


def test_tensors_that_share_memory_are_stored_each_by_itself(tmp_path: Path) -> None:
    flat = torch.arange(12.0)
    model = {
        "a": flat[:6],
        "b": flat[4:].view(2, 4),
        "tied": flat[:6],
        "c": flat.view(3, 4).T,
        "none": flat[:0],
        "one": torch.tensor(3),
    }
    loaded = load_checkpoint(save_checkpoint(tmp_path, Checkpoint(1, model, {}, {}))).model
    assert loaded.keys() == model.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.items())
