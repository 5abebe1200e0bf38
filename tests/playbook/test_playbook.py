"""`diagnose` on a real workload: one verdict, one folder, the same answer again, and no work lost on the way."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import workbench as wb
from tests.helpers.workloads import small_workload
from workbench.errors import StudyInterrupted
from workbench.findings.diagnosis import Diagnosis
from workbench.record.read import open_record
from workbench.topics.lr_sweep.study import LRSweep
from workbench.topics.one_batch.diagnose import CODES as ONE_BATCH
from workbench.topics.stability.study import InstabilityStudy
from workbench.train.batches import train_batches
from workbench.train.hooks import Hook, Step

pytestmark = pytest.mark.usefixtures("no_figures")
ROOT = str(Path(__file__).parents[2])
STEPS = 200
CODES = {
    "data.nonfinite", "data.labels", "init.loss", "loop.no_gradient", "loop.no_update", *ONE_BATCH,
    "lr.best", "lr.grid_edge", "lr.unstable", "lr.too_high", "lr.too_low", "lr.at_edge", "lr.probabilistic", "lr.nothing_learns",
    "stability.early", "stability.early_recovers", "stability.mid", "stability.divergent", "stability.spike",
    "stability.headroom",
    "architecture.no_residual", "architecture.no_norm", "architecture.norm_after_add", "architecture.branch_not_zero",
    "schedule.discontinuity", "schedule.restarts", "schedule.collapse",
    "evaluation.skew", "evaluation.too_small", "evaluation.minority_counts", "evaluation.generalisation_gap",
    "data.duplicates", "data.no_signal", "data.label_shift", "data.train_validation_shift",
    "loop.frozen_random", "loop.unowned_parameters", "optimizers.constants", "optimizers.weight_decay_shrinks", "warmup.over_cap",
    "batch_norm.ghost_size", "batch_norm.small_batch", "batch_norm.cold_ema", "batch_norm.stale",
    "input.bound",
}  # fmt: skip
ELSEWHERE = (
    "batch_norm.rank_local", "batch_norm.first_device_ema", "batch_norm.variance_of_means", "checkpoints.resume_jump",
)  # fmt: skip


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Diagnosis:
    return wb.diagnose("digits_mlp", out=tmp_path_factory.mktemp("playbook") / "s", steps=STEPS, device="cpu")


@pytest.fixture(scope="module")
def written(done: Diagnosis) -> dict[str, Any]:
    def refused(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    assert done.path is not None
    found = dict(json.loads((done.path / "diagnosis.json").read_text(), parse_constant=refused))
    assert isinstance(found.pop("crc32"), int)
    return found


def test_every_code_once(done: Diagnosis) -> None:
    codes = [f.code for f in done]
    assert len(codes) == len(set(codes))
    assert set(codes) >= CODES
    assert not set(codes) & set(ELSEWHERE), "what cannot warn here is no reassurance"


def test_the_file_says_what_the_call_returned(done: Diagnosis, written: dict[str, Any]) -> None:
    assert written == done.to_dict()
    assert written["schema"] == 1
    assert written["workload"] == "digits_mlp"
    assert written["verdict"] == done.verdict
    assert isinstance(written["command"], str)


def test_the_recommendation_can_be_trained_with(written: dict[str, Any]) -> None:
    recommendation = written["recommendation"]
    baseline = wb.load_workload("digits_mlp").config  # its own length, not that of the study
    config = wb.TrainConfig.from_dict(recommendation["config"])
    changed = {name for name, value in config.to_dict().items() if value != baseline.to_dict()[name]}
    assert changed == set(recommendation["changed"])
    assert recommendation["adopted"] is bool(changed)
    assert eval(recommendation["paste"], {"wb": wb}) == config
    for run in ("baseline", "recommended"):
        assert 0 <= recommendation[run]["best_step"] <= STEPS
        assert recommendation[run]["validation/loss"] > 0
    better = recommendation["recommended"]["validation/loss"] < recommendation["baseline"]["validation/loss"]
    assert better or not recommendation["adopted"]


def events(path: Path) -> dict[str, bytes]:
    return {p.parent.name: p.read_bytes() for p in path.glob("trials/*/events.jsonl")}


def test_the_same_call_again_trains_nothing_and_says_the_same(done: Diagnosis, written: dict[str, Any]) -> None:
    assert done.path is not None
    before = events(done.path)
    again = wb.diagnose("digits_mlp", out=done.path, steps=STEPS, device="cpu")
    assert events(done.path) == before
    assert again.to_dict() == written


QUICK: dict[str, Any] = {
    "sweep": LRSweep(lrs=(0.01, 0.1, 1.0)),
    "instability": InstabilityStudy(probe_steps=20, fixes=()),
}
INTERRUPTED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from tests.helpers.workloads import small_workload
from tests.playbook.test_playbook import QUICK
from workbench.playbook.diagnose import diagnose
from workbench.train.hooks import Hook
from workbench.train.trainer import Trainer
counted = [0]
class Stops(Hook):
    def on_step(self, step):
        counted[0] += 1
        if counted[0] == int(sys.argv[3]):
            os.kill(os.getpid(), getattr(signal, sys.argv[4]))
diagnose(small_workload(), out=sys.argv[2], trainer=Trainer(device="cpu", hooks=[Stops()]), command="c", **QUICK)
"""


def comparable(diagnosis: Diagnosis) -> dict[str, Any]:
    """All that is said but what was timed: the cost, and how long steps waited for data."""
    found = {k: v for k, v in diagnosis.to_dict().items() if k != "cost"}
    timed = {"summary", "value", "evidence"}
    found["findings"] = [
        {k: v for k, v in f.items() if f["code"] != "input.bound" or k not in timed} for f in found["findings"]
    ]
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Diagnosis:
    return wb.diagnose(small_workload(), out=tmp_path_factory.mktemp("whole") / "s", command="c", **QUICK)


@pytest.mark.parametrize("name", ["SIGINT", pytest.param("SIGKILL", marks=pytest.mark.slow)])
def test_interrupted_it_goes_on_and_says_the_same(tmp_path: Path, whole: Diagnosis, name: str) -> None:
    words = [sys.executable, "-c", INTERRUPTED, ROOT, str(tmp_path / "s"), "100", name]
    stopped = subprocess.run(words, check=False, timeout=120, capture_output=True, text=True)
    assert stopped.returncode != 0
    assert name == "SIGKILL" or "the same command or cell resumes" in stopped.stderr
    states = open_record(tmp_path / "s").trials["state"].tolist()
    complete = [str(trial) for trial, state in enumerate(states) if state == "complete"]
    assert complete[:4] == ["0", "1", "2", "3"], "the baseline and the round before"
    assert set(states) - {"complete"} == {"stopped"}
    assert not (tmp_path / "s" / "diagnosis.json").exists()
    before = events(tmp_path / "s")
    again = wb.diagnose(small_workload(), out=tmp_path / "s", command="c", **QUICK)
    after = events(tmp_path / "s")
    assert all(after[trial] == before[trial] for trial in complete), "what was complete is not trained again"
    assert comparable(again) == comparable(whole)


def studies(root: Path) -> list[Path]:
    return sorted(p.parent for p in root.glob("runs/*/study.json"))


class StopsAt(Hook):
    """Presses Ctrl-C at the nth update that is made."""

    def __init__(self, count: int) -> None:
        self.left = count

    def on_step(self, step: Step) -> None:
        self.left -= 1
        if self.left == 0:
            signal.raise_signal(signal.SIGINT)


def test_without_a_folder_an_interrupted_diagnosis_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Diagnosis
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StudyInterrupted):
        wb.diagnose(small_workload(), trainer=wb.Trainer(hooks=[StopsAt(100)], device="cpu"), command="c", **QUICK)
    (begun,) = studies(tmp_path)
    states = open_record(begun).trials["state"].tolist()
    assert states[:4] == ["complete"] * 4
    assert "stopped" in states
    before = events(begun)
    again = wb.diagnose(small_workload(), command="c", **QUICK)
    assert studies(tmp_path) == [begun]
    assert all(events(begun)[trial] == before[trial] for trial in ("0", "1", "2", "3")), (
        "what was complete is not trained again"
    )
    assert comparable(again) == comparable(whole)


def test_without_a_folder_only_the_same_unfinished_study_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    workload, stops = small_workload(), [StopsAt(30)]
    with pytest.raises(StudyInterrupted):
        LRSweep(lrs=(0.01, 0.1)).run(workload, wb.Trainer(hooks=stops, device="cpu"))
    (begun,) = studies(tmp_path)
    before = events(begun)
    for other, changes in ((LRSweep(lrs=(0.01, 0.2)), {}), (LRSweep(lrs=(0.01, 0.1)), {"momentum": 0.8})):
        found = other.run(workload.replace(config=workload.config.replace(**changes)), wb.Trainer(device="cpu"))
        assert found.path.resolve() != begun
    assert events(begun) == before
    assert LRSweep(lrs=(0.01, 0.1)).run(workload, wb.Trainer(device="cpu")).path.resolve() == begun
    assert len(studies(tmp_path)) == 3
    anew = LRSweep(lrs=(0.01, 0.1)).run(workload, wb.Trainer(device="cpu"))
    assert anew.path.resolve() != begun, "the one that is finished is left as it is"
    assert len(studies(tmp_path)) == 4


MINE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from workbench import TrainConfig, Workload
x = torch.randn(48, 3, generator=torch.Generator().manual_seed(0))
data = TensorDataset(x, x.sum(1).sin())
workload = Workload(
    name="mine", build_model=lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)),
    train_data=data, validation_data=data, loss=lambda outputs, batch: (outputs.squeeze(-1) - batch[1]) ** 2,
    config=TrainConfig(peak_lr=0.05, total_steps=20, batch_size=16),
)
"""


def test_the_command_of_a_workload_from_a_file_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Called from a session, whose own command line says nothing: the command names the file."""
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["ipykernel_launcher.py"])
    first = wb.diagnose("mine.py:workload", out="s", steps=15, device="cpu", **QUICK)
    (tmp_path / "kept").mkdir()
    (tmp_path / "s").rename(tmp_path / "kept" / "first")  # beside each other two studies may not have one name
    words = shlex.split(str(first.command))
    assert words[0] == "python"
    done = subprocess.run([sys.executable, *words[1:]], check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    one, other = open_record(tmp_path / "kept" / "first"), open_record(tmp_path / "s")
    assert other.trials["peak_lr"].tolist() == one.trials["peak_lr"].tolist()
    assert other.steps["loss"].tolist() == one.steps["loss"].tolist()


def separable(optimizer: Any, batch_size: int, seed: int) -> wb.Workload:
    """Logistic regression on two classes with a gap between them: convex, and nothing to memorise."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(160, 2, generator=generator, dtype=torch.float64)
    y = (x.sum(1) > 0).long()
    x = x + 0.5 * (2 * y[:, None] - 1)
    config = {"optimizer": optimizer, "peak_lr": 0.1, "total_steps": 60, "batch_size": batch_size}
    return small_workload(
        name="separable",
        build_model=lambda: torch.nn.Linear(2, 2),
        train_data=torch.utils.data.TensorDataset(x[:128], y[:128]),
        validation_data=torch.utils.data.TensorDataset(x[128:], y[128:]),
        loss=lambda outputs, batch: torch.nn.functional.cross_entropy(outputs, batch[1], reduction="none"),
        metrics={},
        config=config | {"shared_seed": seed, "per_host_seed": seed},
    )


def test_a_baseline_that_is_far_too_low_is_raised(tmp_path: Path) -> None:
    config = {"peak_lr": 1e-4, "total_steps": 150, "batch_size": 48}
    workload = small_workload(config=config, validation_data=small_workload(examples=64).train_data)
    diagnosis = wb.diagnose(workload, out=tmp_path / "s", instability=QUICK["instability"])
    recommendation = diagnosis.recommendation
    assert recommendation is not None
    assert diagnosis["lr.too_low"].status in ("warn", "fail")
    assert recommendation["adopted"] is True
    assert recommendation["config"]["peak_lr"] > 1e-2
    assert (recommendation["proof"]["wins"], recommendation["proof"]["seeds"]) == (True, [1, 2, 3])
    proved = wb.open(tmp_path / "s").trials.query("stage == 'proof'")
    assert set(proved["seed"]) == {1, 2, 3}, "nothing is adopted without a proof over seeds that were not looked at"
    assert recommendation["recommended"]["validation/loss"] < recommendation["baseline"]["validation/loss"]


@pytest.mark.parametrize("steps", [1, pytest.param(9, marks=pytest.mark.slow)])
def test_too_few_steps_are_not_called_healthy(tmp_path: Path, steps: int) -> None:
    diagnosis = wb.diagnose(small_workload(), out=tmp_path / "s", steps=steps)
    assert diagnosis["stability.mid"].status == "not_measured"
    assert diagnosis.verdict != "ok"


@pytest.mark.parametrize("inside", [False, True], ids=["a later batch", "the first batch"])
def test_data_with_nan_are_found_before_training_is_blamed(tmp_path: Path, inside: bool) -> None:
    workload = small_workload()
    ((batch, _),) = next(train_batches(workload, workload.config, torch.device("cpu")))
    first = torch.isin(workload.train_data.tensors[1], batch[1].float())
    assert 0 < int(first.sum()) < len(first)
    workload.train_data.tensors[0][int(torch.nonzero(first == inside)[0]), 1] = np.nan
    diagnosis = wb.diagnose(workload, out=tmp_path / "s", **QUICK)
    assert diagnosis["data.nonfinite"].status == "fail"
    assert diagnosis["data.nonfinite"].evidence["nonfinite_values"]["train"] == 1
    assert diagnosis.verdict == "fail"
