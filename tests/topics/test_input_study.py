"""The study of a workload, and `workbench input`: a folder with verdict, trace and pictures; exit codes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import workbench as wb
from tests.helpers.workloads import small_net, small_workload, squared
from workbench import cli
from workbench.cli.commands import RAN, USAGE, VERDICT
from workbench.record.read import StudyRecord, open_record
from workbench.topics.input.diagnose import CODES
from workbench.train.rng import capture_rng

QUICK: dict[str, Any] = {"steps": 40, "seconds": 1.0, "max_workers": 1}


class Masked(torch.utils.data.Dataset[Any]):
    """Items with a feature that only a metric reads, and one that nothing reads."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Any:
        x = torch.linspace(0, 1, 3) + index / 48
        return {"x": x.double(), "y": x.sum().double(), "shown": torch.ones(1), "mask": torch.ones(200)}


def masked() -> wb.Workload:
    return small_workload(
        train_data=Masked(), validation_data=Masked(), forward=lambda model, batch: model(batch["x"]),
        loss=lambda outputs, batch: squared(outputs, (None, batch["y"])),
        metrics={"shown": lambda outputs, batch: batch["shown"].double().squeeze(-1)},
    )  # fmt: skip


def test_a_workload_in_memory_is_healthy_and_the_folder_holds_all(tmp_path: Path) -> None:
    before = capture_rng()
    record = wb.input.Study(**QUICK).run(small_workload(), out=tmp_path / "s")
    after = capture_rng()
    assert all(torch.equal(before[name], after[name]) for name in before)
    diagnosis = wb.input.diagnose(record)
    assert [f.code for f in diagnosis] == list(CODES)
    assert {f.status for f in diagnosis} == {"ok"}
    assert record.trials["stage"].tolist() == ["input_pipeline"]
    trace = json.loads((tmp_path / "s" / "trace.json").read_text())
    assert trace["traceEvents"]
    again = open_record(tmp_path / "s")
    assert isinstance(again, StudyRecord)
    assert again.facts["input_pipeline"]["trace"]["path"] == "trace.json"
    assert wb.input.Study(**QUICK).run(small_workload(), out=tmp_path / "s").facts == again.facts


def test_what_a_metric_reads_is_used_and_what_nothing_reads_is_named(tmp_path: Path) -> None:
    record = wb.input.Study(**{**QUICK, "max_workers": 0}).run(masked(), out=tmp_path / "s")
    finding = wb.input.diagnose(record)["input.unused_features"]
    assert finding.status == "warn"
    assert finding.evidence["unread"] == {"mask": 8 * 200 * 4}
    assert finding.evidence["read"] == ["shown", "x", "y"]
    assert "bytes_per_example" in finding.evidence
    assert finding.summary.endswith("each of an example).")


def test_an_iterable_workload_is_read(tmp_path: Path) -> None:
    class Rows(torch.utils.data.IterableDataset[Any]):
        def __len__(self) -> int:
            return 32

        def __iter__(self) -> Any:
            yield from zip(torch.randn(32, 3).double(), torch.zeros(32).double(), strict=True)

    held = TensorDataset(torch.zeros(8, 3).double(), torch.zeros(8).double())
    workload = small_workload(train_data=Rows(), validation_data=held, build_model=small_net)
    record = wb.input.Study(**{**QUICK, "trace": False}).run(workload, out=tmp_path / "s")
    found = wb.input.diagnose(record)
    assert found["input.example_count"].status == "ok"
    assert found["data.worker_rng"].status == "not_measured"


ROOT = Path(__file__).parents[2]
MINE = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from tests.helpers.input_loaders import Items, TrainStep, loader as make
from tests.helpers.workloads import small_workload as workload

loader = make(Items(sleep_s=0.001))
step = TrainStep(0.004)
nothing = 3


def fresh():
    return make(Items())


with Path(__file__).with_name("imports.txt").open("a") as file:
    file.write("x")


def batches():
    for _ in range(3):
        yield next(iter(fresh()))
"""
ASKED = ["--seconds", "0.5", "--max-workers", "0"]


@pytest.fixture
def mine(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(MINE)
    return str(tmp_path / "mine.py")


def test_a_loader_with_its_step(mine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "deep" / "out"
    words = ["input", f"{mine}:loader", "--step", f"{mine}:step", "--out", str(out), *ASKED, "--fail-on", "warn"]
    assert cli.main(words) == VERDICT
    shown = " ".join(capsys.readouterr().out.split())
    assert "latency in Items.__getitem__" in shown
    assert re.search(r"What to try next: 1\. .*Copy the data next to the training process", shown)
    assert f"Folder: {out}" in shown
    said = json.loads((out / "diagnosis.json").read_text())
    assert (said["verdict"], said["command"].startswith("workbench input")) == ("warn", True)
    assert (tmp_path / "imports.txt").read_text() == "x", "loader and step are of one and the same module"
    assert json.loads((out / "trace.json").read_text())["traceEvents"]
    assert json.loads((out / "facts.json").read_text())["input_pipeline"]["step"] == "function"
    assert (out / "figures" / "input_pipeline.svg").read_text().startswith("<svg")
    assert not (out / "figures" / "input_workers.svg").exists(), "no worker was tried"


def test_a_loader_alone_a_generator_and_seconds(mine: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["input", f"{mine}:batches", *ASKED]) == RAN
    assert "Not judged without a step" in capsys.readouterr().out
    assert cli.main(["input", f"{mine}:fresh", "--step-s", "0.02", *ASKED, "--fail-on", "warn"]) == RAN


def test_a_workload_becomes_a_study(mine: str, tmp_path: Path) -> None:
    words = ["input", f"{mine}:workload", "--out", str(tmp_path / "s"), "--device", "cpu", *ASKED]
    assert cli.main(words) == RAN
    assert (tmp_path / "s" / "study.json").is_file()
    assert (tmp_path / "s" / "trace.json").is_file()
    assert json.loads((tmp_path / "s" / "diagnosis.json").read_text())["findings"]
    (tmp_path / "s" / "diagnosis.json").unlink()  # as after a study that ran in a notebook
    assert cli.main(["report", str(tmp_path / "s")]) == RAN
    page = (tmp_path / "s" / "report.html").read_text()
    assert "<code>input.bound</code>" in page
    assert 'id="figure-input-pipeline"' in page
    assert "<code>lr.best</code>" not in page


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["{mine}:nothing"], USAGE, "must be a DataLoader, not int"),
        (["{mine}:lodaer"], USAGE, "no attribute 'lodaer'. Did you mean 'loader'?"),
        (["no_such"], USAGE, "'no_such' is not known"),
        (["{mine}:workload", "--step-s", "1"], USAGE, "a workload has its own step"),
        (["{mine}:fresh", "--step", "{mine}:nothing"], USAGE, "must be a function"),
        (["{mine}:fresh", "--seconds", "-1"], USAGE, "seconds=-1"),
        (["{mine}:fresh", "--max-workers", "-1"], USAGE, "max_workers=-1"),
        (["{mine}:fresh", "--step", "a", "--step-s", "1"], USAGE, "not allowed with"),
    ],
)
def test_wrong_words(mine: str, words: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["input", *(word.replace("{mine}", mine) for word in words)]) == code
    assert said in capsys.readouterr().err
