"""The ledger: an index over study folders that Optuna can read and that can always be made again."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest

from tests.helpers.workloads import small_workload
from tests.test_record_writer import CONFIG, opened
from workbench.errors import RecordError
from workbench.record.ledger.index import COLUMNS, LEDGER, index, list_studies, rebuild
from workbench.train.hooks.base import Hook, Step
from workbench.train.trainer import Trainer

STATES: dict[str, float | None] = {"complete": 0.5, "diverged": 0.7, "failed": None, "stopped": None, "running": None}


def study(path: Path, *, mode: str = "min", values: tuple[float, ...] = (0.5, 0.25, math.nan)) -> None:
    """A study with one complete trial per value, one that diverged, one that failed and one that was stopped."""
    config = CONFIG | {"select_mode": mode}
    writer = opened(path, config=config, note="a note", command="workbench diagnose w")
    ends = [("complete", v) for v in values] + [("diverged", 0.9), ("failed", None), ("stopped", None)]
    for number, (state, value) in enumerate(ends):
        trial = writer.trial(config | {"peak_lr": 0.1 * (number + 1)}, stage="lr_sweep", train_examples=32)
        trial.event("ended", state=state, best_value=value, best_step=3, steps_run=10, seconds=1.0)
    writer.close()


def stored(root: Path) -> dict[str, list[tuple[Any, ...]]]:
    """Everything that the ledger holds but ids and times."""
    storage = f"sqlite:///{root / LEDGER}"
    found = {}
    for name in optuna.get_all_study_names(storage):
        loaded = optuna.load_study(study_name=name, storage=storage)
        rows = [(t.state.name, t.value, t.params, t.user_attrs) for t in loaded.get_trials()]
        found[name] = [(loaded.direction.name,), *rows]
    return found


def test_the_table_has_the_six_columns_and_one_row_a_study(tmp_path: Path) -> None:
    study(tmp_path / "one")
    study(tmp_path / "two", mode="max")
    table = list_studies(tmp_path)
    assert table.columns.tolist() == COLUMNS
    assert len(COLUMNS) == 6
    assert table["study"].tolist() == ["one", "two"]
    assert table["note"].tolist() == ["a note"] * 2
    assert table["trials"].tolist() == [6, 6], "failed ones included"
    assert table["best_value"].tolist() == [0.25, 0.9]
    assert all(Path(link).is_file() for link in table["config"])
    assert table["reproduce"].str.endswith("workbench diagnose w").all()


def test_reproduction_names_commit_and_patch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.record.repro.git_state", lambda _: ("c0ffee" * 6, b"diff"))
    study(tmp_path / "one")
    said = list_studies(tmp_path)["reproduce"].iloc[0]
    apply = f"git -C ../again-one apply - < {tmp_path / 'one' / 'repro.patch'}"
    assert said.startswith(f"git worktree add --detach ../again-one c0ffeec0ffee && {apply} && cd ../again-one")
    assert (tmp_path / "one" / "repro.patch").read_bytes() == b"diff"


def test_optuna_loads_a_study(tmp_path: Path) -> None:
    study(tmp_path / "one")
    loaded = optuna.load_study(study_name="one", storage=f"sqlite:///{tmp_path / LEDGER}")
    assert loaded.best_value == 0.25
    assert loaded.best_params == pytest.approx({"peak_lr": 0.2})
    assert [t.state.name for t in loaded.trials] == ["COMPLETE", "COMPLETE", "FAIL", "FAIL", "FAIL"]
    assert loaded.best_trial.user_attrs["row"]["batch_size"] == CONFIG["batch_size"]


def test_rebuilding_gives_what_was_there(tmp_path: Path) -> None:
    study(tmp_path / "one")
    study(tmp_path / "two", mode="max", values=())
    before = stored(tmp_path)
    assert rebuild(tmp_path) == 2
    assert stored(tmp_path) == before
    (tmp_path / LEDGER).unlink()
    assert rebuild(tmp_path) == 2
    assert stored(tmp_path) == before


def test_indexing_twice_is_as_good_as_once(tmp_path: Path) -> None:
    study(tmp_path / "one")
    before = stored(tmp_path)
    index(tmp_path / "one")
    assert stored(tmp_path) == before


def test_a_failed_trial_that_is_trained_again_is_entered_anew(tmp_path: Path) -> None:
    class Breaks(Hook):
        def on_step(self, step: Step) -> None:
            if step.index == 5:
                raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        Trainer(hooks=[Breaks()]).run(small_workload(), out=tmp_path / "one")
    assert [row[0] for row in stored(tmp_path)["one"]] == ["MINIMIZE", "FAIL"]
    record = Trainer().run(small_workload(), out=tmp_path / "one")
    direction, row = stored(tmp_path)["one"]
    assert row[:2] == ("COMPLETE", record.best().value)
    rebuild(tmp_path)
    assert stored(tmp_path)["one"] == [direction, row]


def test_a_damaged_ledger_stops_nobody_and_can_be_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    (tmp_path / LEDGER).write_bytes(b"this is no database" * 100)
    record = Trainer().run(small_workload(), out=tmp_path / "one")
    assert record.state == "complete"
    assert "is whole; make the ledger again with: workbench studies" in caplog.text
    with pytest.raises(RecordError, match="cannot write the ledger"):
        index(tmp_path / "one")
    assert len(list_studies(tmp_path)) == 1, "the table is read from the folders"
    assert rebuild(tmp_path) == 1
    assert [row[0] for row in stored(tmp_path)["one"]] == ["MINIMIZE", "COMPLETE"]


def test_no_folder_of_studies(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"nowhere is no folder of studies\. Run a diagnosis first"):
        list_studies(tmp_path / "nowhere")
    assert list_studies(tmp_path).columns.tolist() == COLUMNS
    assert list_studies(tmp_path).empty


def test_processes_may_index_at_once(tmp_path: Path) -> None:
    code = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from tests.test_ledger import study
study(Path(sys.argv[2]) / sys.argv[3])
"""
    root = str(Path(__file__).parents[1])
    words = [sys.executable, "-W", "error::UserWarning", "-c", code, root, str(tmp_path)]
    processes = [subprocess.Popen([*words, f"s{i}"], stderr=subprocess.PIPE) for i in range(3)]
    said = [process.communicate(timeout=120)[1].decode() for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], said
    assert sorted(stored(tmp_path)) == ["s0", "s1", "s2"], said
    assert np.unique([len(rows) for rows in stored(tmp_path).values()]).tolist() == [6]
