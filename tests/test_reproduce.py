"""What the table says reproduces a study does, where it was run and in a clone, in a fresh process, to the same metric (P5.7)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_repro import git
from workbench.config import TrainConfig
from workbench.ledger.studies import list_studies
from workbench.record.read import StudyRecord
from workbench.record.write import StudyWriter
from workbench.topics.lr_sweep.study import LRSweep
from workbench.train.trainer import Trainer
from workbench.workloads.registry import load_workload

CONFIG = TrainConfig(peak_lr=0.1, total_steps=10, batch_size=8).to_dict()
MINE = """
import torch
from torch.utils.data import TensorDataset
import workbench as wb

x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
data = TensorDataset(x, x.sum(1, keepdim=True))
workload = wb.regression(
    name="mine", build_model=lambda: torch.nn.Linear(3, 1), train_data=data, validation_data=data,
    config=wb.TrainConfig(peak_lr={lr}, total_steps=20, batch_size=8),
)
"""
TRAIN = """
import sys
import workbench as wb
wb.Trainer(device="cpu").run(wb.load_workload("mine.py:workload"), out="runs/" + sys.argv[1], note="by a script")
"""


def shell(line: str, folder: Path) -> None:
    """Run a line as a person would who has the virtual environment on."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        ["bash", "-ec", line], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_reproduction_command_reproduces_the_metric(tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    (here / "mine.py").write_text(MINE.format(lr=0.05))
    (here / "train.py").write_text(TRAIN)
    (here / ".gitignore").write_text("runs/\n")
    git(here, "init", "-q")
    git(here, "add", "-A")
    git(here, "commit", "-q", "-m", "first")
    (here / "mine.py").write_text(MINE.format(lr=0.1))  # an uncommitted change, without which the metric is another one
    (here / "new.py").write_text("x = 1\n")  # an untracked file, which the study's patch holds
    shell("python train.py by-script", here)
    (first,) = list_studies(here / "runs").to_dict("records")
    assert "git worktree add " in first["reproduce"]
    assert " apply - < " in first["reproduce"]
    clone = tmp_path / "elsewhere" / "clone"
    clone.parent.mkdir()
    git(tmp_path, "clone", "-q", str(here), str(clone))
    for place in (here, clone):
        shell(first["reproduce"], place)
        tree = place.parent / "again-by-script"
        (again,) = list_studies(tree / "runs").to_dict("records")
        assert (again["best_value"], again["trials"]) == (first["best_value"], first["trials"])
        losses = [StudyRecord(root / "runs" / "by-script").steps["loss"].tolist() for root in (here, tree)]
        assert losses[0] == losses[1]
        assert (tree / "new.py").read_text() == "x = 1\n"
    assert (here / "mine.py").read_text() == MINE.format(lr=0.1), "the tree of the study is as it was"
    other = tmp_path / "without-the-change"
    git(tmp_path, "clone", "-q", str(here), str(other))
    shell("python train.py by-script", other)
    assert list_studies(other / "runs")["best_value"].iloc[0] != first["best_value"]


def test_the_command_of_a_study_of_a_folder_further_down_runs_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    (here / "deep er").mkdir(parents=True)
    (here / "deep er" / "file.txt").write_text("1\n")
    git(here, "init", "-q")
    git(here, "add", "-A")
    git(here, "commit", "-q", "-m", "first")
    (here / "deep er" / "file.txt").write_text("2\n")
    monkeypatch.chdir(here / "deep er")
    writer = StudyWriter.open(Path("runs/one"), kind="k", workload="w", config=CONFIG, command="cat file.txt > said")
    writer.close()
    (row,) = list_studies("runs").to_dict("records")
    shell(row["reproduce"], here / "deep er")
    assert (here / "again-one" / "deep er" / "said").read_text() == "2\n"


def test_a_study_that_found_its_own_folder_does_so_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    workload = load_workload("quadratic")
    swept = LRSweep(lrs=[0.1], steps=3).run(workload)
    trained = Trainer(device="cpu").run(workload, workload.config.replace(total_steps=3))
    assert [", out=None" in str(record.command) for record in (swept, trained)] == [True, True]
