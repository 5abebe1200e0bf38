"""Looking on: every row once and in order, whoever trains; and training is bit for bit what it is without anybody there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tests.helpers.hooks import At
from tests.helpers.workloads import small_workload
from workbench.record import watch as record_watch
from workbench.record.read import StudyRecord
from workbench.record.tables import read_parts
from workbench.record.watch import Watcher, watching
from workbench.topics.lr_sweep.study import LRSweep
from workbench.train import loop
from workbench.train.trainer import Trainer

LRS = [0.01, 0.05, 1e20, 0.1]  # the third one is not finite after a few steps
CORE = ["loss", "loss_se", "lr", "grad_norm", "clipped"]


class Notebook(Watcher):
    """Writes down all that it is told."""

    def __init__(self) -> None:
        self.said: list[tuple[Any, ...]] = []
        self.blocks = 0

    def on_study(self, path: Path, *, created: bool) -> None:
        self.said.append(("study", path, created))

    def on_trial(self, path: Path, number: int, *, stage: str, config: Mapping[str, Any]) -> None:
        self.said.append(("trial", path, number, stage, config["peak_lr"]))

    def on_rows(self, path: Path, table: str, columns: Mapping[str, Any]) -> None:
        self.blocks += table == "steps"
        self.said.append(("rows", path, table, pd.DataFrame({k: np.asarray(v) for k, v in columns.items()})))

    def on_event(self, path: Path, number: int, event: Mapping[str, Any]) -> None:
        self.said.append(("event", path, number, event["event"], event.get("state")))

    def on_rewind(self, path: Path, number: int, step: int) -> None:
        self.said.append(("rewind", path, number, step))

    def on_closed(self, path: Path) -> None:
        self.said.append(("closed", path))

    def kinds(self, kind: str) -> list[tuple[Any, ...]]:
        return [said[2:] for said in self.said if said[0] == kind]

    def rows(self, table: str = "steps") -> pd.DataFrame:
        """What is left of the rows when those before a rewind are dropped, in the order of their coming."""
        found = pd.DataFrame()
        for kind, _, *rest in self.said:
            if kind == "rows" and rest[0] == table:
                found = pd.concat([found, rest[1]], ignore_index=True)
            elif kind == "rewind" and len(found):
                last = rest[1] - 1 if table == "steps" else rest[1]
                found = found[(found["trial"] != rest[0]) | (found["step"] <= last)]
        return found.reset_index(drop=True)


class Loud(Watcher):
    def on_rows(self, path: Path, table: str, columns: Mapping[str, Any]) -> None:
        raise ValueError("no ink")


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are shown after each step, not five times a second."""
    monkeypatch.setattr(loop, "SHOW_SECONDS", 0.0)


def same_rows(seen: Notebook, record: StudyRecord) -> None:
    """Every row of the record came once, trial by trial in order, with its very values."""
    rows = seen.rows()
    for _, trial in rows.groupby("trial"):
        assert trial["step"].is_monotonic_increasing
    ordered = rows.sort_values(["trial", "step"], kind="stable", ignore_index=True)
    kept = record.steps
    for name in ("trial", "step", *CORE):
        np.testing.assert_array_equal(ordered[name].to_numpy(float), kept[name].to_numpy(float), err_msg=name)


@pytest.mark.usefixtures("always")
def test_a_trial_is_told_from_its_first_row_to_its_end(tmp_path: Path) -> None:
    seen = Notebook()
    with watching(seen):
        record = Trainer(device="cpu").run(small_workload(), out=tmp_path / "s")
    assert seen.said[0] == ("study", tmp_path / "s", True)
    assert seen.kinds("trial") == [(0, "trial", 0.05)]
    assert seen.kinds("event") == [(0, "started", "running"), (0, "ended", "complete")]
    assert seen.said[-1] == ("closed", tmp_path / "s")
    same_rows(seen, StudyRecord(record.path))
    assert seen.blocks == 40  # each step by itself, none again when it was written
    assert len(seen.rows("evals")) == len(record.evals)


def parts(folder: Path) -> dict[str, pd.DataFrame]:
    """All that training decided and measured, times aside."""
    steps = read_parts(folder / "steps")
    return {
        "steps": steps.drop(columns=["data_wait_s", "step_time_s"]),
        "evals": read_parts(folder / "evals").drop(columns="seconds"),
        "trials": StudyRecord(folder).trials.drop(columns="seconds"),
    }


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("gradients", ["loop", "vmap"])
def test_training_is_bit_for_bit_what_it_is_unwatched(tmp_path: Path, gradients: Any) -> None:
    """With lanes that diverge and leave, dropout's random numbers, and the order in which rows lie on disk."""
    trainer = Trainer(device="cpu", gradients=gradients)
    LRSweep(lrs=LRS).run(small_workload(), trainer, out=tmp_path / "alone")
    seen = Notebook()
    with watching(seen):
        LRSweep(lrs=LRS).run(small_workload(), trainer, out=tmp_path / "watched")
    assert seen.blocks == 40
    same_rows(seen, StudyRecord(tmp_path / "watched"))
    assert (2, "ended", "diverged") in seen.kinds("event")
    for name, alone in parts(tmp_path / "alone").items():
        pd.testing.assert_frame_equal(parts(tmp_path / "watched")[name], alone, check_exact=True)
    for kept in (tmp_path / "alone").rglob("*.safetensors"):
        assert (tmp_path / "watched" / kept.relative_to(tmp_path / "alone")).read_bytes() == kept.read_bytes()


@pytest.mark.usefixtures("always")
def test_a_resumed_study_tells_again_what_comes_again(tmp_path: Path) -> None:
    seen = Notebook()
    with watching(seen):
        with pytest.raises(KeyboardInterrupt):
            Trainer(device="cpu", hooks=[At(29, KeyboardInterrupt())]).run(small_workload(), out=tmp_path / "s")
        first = len(seen.rows())
        record = Trainer(device="cpu").run(small_workload(), out=tmp_path / "s")
    assert first == 29
    assert [said[1] for said in seen.kinds("rewind")] == [28]  # it went on from a checkpoint before
    assert ("study", tmp_path / "s", False) in seen.said
    same_rows(seen, StudyRecord(record.path))


@pytest.mark.usefixtures("always")
def test_a_watcher_that_raises_is_dropped_with_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    seen = Notebook()
    with watching(Loud()), watching(seen):
        record = Trainer(device="cpu").run(small_workload(), out=tmp_path / "s")
    (said,) = [r for r in caplog.records if r.name == record_watch.__name__]
    assert "Loud raised and is not called any more" in said.getMessage()
    assert record.state == "complete"
    same_rows(seen, StudyRecord(record.path))
