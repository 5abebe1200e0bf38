"""Reading a study: every moment a process may die at leaves something readable, or an error that says what to do."""

from __future__ import annotations

import math
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import workbench as wb
from tests.helpers.study_folders import PLAIN as CONFIG
from tests.helpers.study_folders import edited, filled, opened
from tests.helpers.workloads import small_workload
from workbench.errors import RecordError
from workbench.record.folder import lock
from workbench.record.read import StudyRecord, TrialRecord, open_record, read_events, select_best
from workbench.train.trainer import Trainer

ROOT = str(Path(__file__).parents[2])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("record") / "run"
    Trainer().run(small_workload(), out=folder)
    return folder


@pytest.fixture
def copy(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "copy"))


def test_a_trial_trained_alone_opens_as_a_trial(trained: Path) -> None:
    record = wb.open(trained)
    assert isinstance(record, TrialRecord)
    assert record.config == small_workload().config.to_dict()
    assert record.state == "complete"
    assert repr(record) == "TrialRecord(0, complete, lr=0.05, steps=40)"
    assert [t.number for t in StudyRecord(trained)] == [0]


def test_a_record_may_be_restricted_to_some_trials(tmp_path: Path) -> None:
    filled(tmp_path / "s", trials=3).close()
    record = StudyRecord(tmp_path / "s", frozenset({0, 2}))
    assert record.trials["trial"].tolist() == [0, 2]
    assert record.steps["trial"].unique().tolist() == [0, 2]
    assert record.evals["trial"].tolist() == [0, 2]
    assert record.reload().trials["trial"].tolist() == [0, 2]
    assert StudyRecord(tmp_path / "s", frozenset()).steps.empty
    assert record.trial(2).steps["trial"].tolist() == [2] * 6
    with pytest.raises(RecordError, match=r"has no trial 7; it has: 0, 2\."):
        record.trial(7)
    with pytest.raises(RecordError, match=r"no finite 'validation/loss' yet; evaluated: test/loss\."):
        record.trial(2).best()


def test_non_finite_values_are_kept(tmp_path: Path) -> None:
    study = opened(tmp_path / "s")
    trial = study.trial(CONFIG, stage="lr_sweep", train_examples=8)
    losses = np.array([1.0, np.inf, -np.inf, np.nan])
    study.steps.add({"trial": [0] * 4, "step": range(4), "loss": losses})
    trial.event("ended", state="diverged", best_value=math.nan, best_step=None)
    study.close()
    record = open_record(tmp_path / "s")
    assert record.steps["loss"].to_numpy().tobytes() == losses.tobytes()
    assert math.isnan(record.trials["best_value"][0])
    with pytest.raises(RecordError, match="no finished evaluation yet"):
        record.best()


@pytest.mark.parametrize("mode", ["min", "max"])
def test_selection_passes_over_nan_and_takes_the_earliest_of_equals(mode: str) -> None:
    sign = 1.0 if mode == "min" else -1.0
    values = [sign * v for v in (math.nan, 3.0, 1.0, 1.0, math.inf, -math.inf)]
    assert select_best([0, 5, 10, 15, 20, 25], values, mode=mode) == (10, sign * 1.0)
    assert select_best([0, 1], [math.nan, math.inf], mode=mode) is None
    assert select_best([], [], mode=mode) is None


def test_a_study_of_a_newer_version_is_refused_and_says_so(copy: Path) -> None:
    edited(copy, schema=2, versions={"workbench": "9.1"})
    for opens in (wb.open, lambda path: wb.StudyRecord(path).workload):
        with pytest.raises(RecordError, match=r"newer version of workbench \(9\.1\).*schema is 2.*up to 1\. Update"):
            opens(copy)


def test_a_trial_runs_only_as_long_as_somebody_writes_its_study(copy: Path) -> None:
    (copy / "trials/0/events.jsonl").write_text('{"event": "started", "state": "running"}\n')
    with lock(copy):
        assert [wb.open(copy).state, *open_record(copy).trials["state"]] == ["running", "running"]
    assert [wb.open(copy).state, *open_record(copy).trials["state"]] == ["stopped", "stopped"]


@pytest.mark.parametrize("name", ["study.json", "trials/0/config.json"])
@pytest.mark.parametrize("share", [0.0, 0.99])
def test_truncated_json_is_named(copy: Path, name: str, share: float) -> None:
    """Cannot come from a crash, because these files are renamed into place, but from a copy that was cut off."""
    content = (copy / name).read_bytes()
    (copy / name).write_bytes(content[: int(share * len(content))])
    with pytest.raises(RecordError, match=rf"{Path(name).name} is damaged .*Delete the study's folder"):
        _ = wb.open(copy).trials, wb.open(copy).workload


def test_events_cut_off_at_any_byte_are_read_up_to_there(copy: Path) -> None:
    folder = copy / "trials" / "0"
    path = folder / "events.jsonl"
    content = path.read_bytes()
    whole = read_events(folder)
    assert len(whole) == 2
    for cut in range(len(content)):
        path.write_bytes(content[:cut])
        events = read_events(folder)
        assert events == whole[: len(events)]
        assert open_record(copy).trials["state"].tolist() == ["complete" if len(events) == 2 else "stopped"]
    path.unlink()
    assert open_record(copy).state == "stopped"


@pytest.mark.parametrize("cut", [1, -1])
def test_a_truncated_part_names_itself_and_takes_nothing_else_away(copy: Path, cut: float) -> None:
    (part,) = (copy / "steps").glob("*.parquet")
    content = part.read_bytes()
    part.write_bytes(content[: int(cut * len(content)) if 0 < cut < 1 else int(cut)])
    record = open_record(copy)
    with pytest.raises(RecordError, match=rf"{part.name} is truncated or damaged"):
        _ = record.steps
    assert len(record.evals) == 22
    assert record.trials["state"].tolist() == ["complete"]
    assert record.best().checkpoint is not None


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from tests.helpers.study_folders import PLAIN as CONFIG
from tests.helpers.study_folders import filled, opened
from tests.helpers.workloads import small_workload
from workbench.train import checkpoint
from workbench.record.folder import lock
from workbench.train.trainer import Trainer
checkpoint.WRITE_SECONDS = -1.0  # every checkpoint reaches the disk, as in a long run
counted = [0]
def dying(function):
    def wrapped(*args, **kwargs):
        counted[0] += 1
        if counted[0] == int(sys.argv[3]):
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return wrapped
os.fsync, Path.replace, Path.rename, Path.unlink = map(dying, (os.fsync, Path.replace, Path.rename, Path.unlink))
Trainer().run(small_workload(), out=sys.argv[2])
"""


@pytest.mark.parametrize("call", [2, 8, 15, pytest.param(0, marks=[pytest.mark.slow, pytest.mark.nightly])])
def test_killed_before_any_touch_of_the_disk_it_goes_on(tmp_path: Path, trained: Path, call: int) -> None:
    """The process dies just before its n-th flush, rename or deletion; slow: every seventh n up to the end."""
    expected = open_record(trained)
    for n in range(1, 200, 7) if call == 0 else [call]:
        out = tmp_path / str(n)
        words = [sys.executable, "-c", KILLED, ROOT, str(out), str(n)]
        done = subprocess.run(words, check=False, timeout=120, capture_output=True, cwd=tmp_path)
        if (out / "study.json").exists():
            record = open_record(out)
            assert record.steps["step"].tolist() == list(range(len(record.steps))), f"killed at {n}"
            assert record.steps["loss"].tolist() == expected.steps["loss"].tolist()[: len(record.steps)]
            assert record.evals["step"].is_monotonic_increasing
        again = Trainer().run(small_workload(), out=out)
        assert again.steps["loss"].tolist() == expected.steps["loss"].tolist(), f"killed at {n}"
        assert again.evals[["step", "metric", "value"]].equals(expected.evals[["step", "metric", "value"]]), f"{n}"
        assert again.best()[:2] == expected.best()[:2]
        assert not list(out.rglob("*.tmp")) or done.returncode, f"killed at {n}"
        if done.returncode == 0:
            assert n > 60, "most of the calls must have been tried"
            return
        assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert call
