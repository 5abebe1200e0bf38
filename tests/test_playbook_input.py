"""`workbench input`: a loader, or a workload, by its name; a folder with verdict, trace and pictures; exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from workbench import cli
from workbench.cli.commands import RAN, USAGE, VERDICT
from workbench.errors import UsageError
from workbench.topics.input.command import examine_input

ROOT = Path(__file__).parents[1]
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
QUICK = ["--seconds", "0.5", "--max-workers", "0"]


@pytest.fixture
def mine(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(MINE)
    return str(tmp_path / "mine.py")


def test_a_loader_with_its_step(mine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "deep" / "out"
    words = ["input", f"{mine}:loader", "--step", f"{mine}:step", "--out", str(out), *QUICK, "--fail-on", "warn"]
    assert cli.main(words) == VERDICT
    shown = " ".join(capsys.readouterr().out.split())
    assert "latency in Items.__getitem__" in shown
    assert "- Copy the data next to the training process" in shown
    assert f"Folder: {out}" in shown
    said = json.loads((out / "diagnosis.json").read_text())
    assert (said["verdict"], said["command"].startswith("workbench input")) == ("warn", True)
    assert (tmp_path / "imports.txt").read_text() == "x", "loader and step are of one and the same module"
    assert json.loads((out / "trace.json").read_text())["traceEvents"]
    assert json.loads((out / "facts.json").read_text())["input_pipeline"]["step"] == "function"
    assert (out / "figures" / "input_pipeline.svg").read_text().startswith("<svg")
    assert not (out / "figures" / "input_workers.svg").exists(), "no worker was tried"


def test_a_loader_alone_and_with_seconds(mine: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["input", f"{mine}:fresh", *QUICK]) == RAN
    assert "Not judged without a step" in capsys.readouterr().out
    assert cli.main(["input", f"{mine}:fresh", "--step-s", "0.02", *QUICK, "--fail-on", "warn"]) == RAN


def test_a_generator_function_is_a_loader_too(mine: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert cli.main(["input", f"{mine}:batches", "--step", f"{mine}:step", "--out", str(out), *QUICK]) == RAN
    facts = json.loads((out / "facts.json").read_text())["input_pipeline"]
    assert facts["loader"]["batches"] == 3
    assert facts["trace"]["steps"] == 3, "a generator would be used up by now"


def test_a_workload_becomes_a_study(mine: str, tmp_path: Path) -> None:
    words = ["input", f"{mine}:workload", "--out", str(tmp_path / "s"), "--device", "cpu", *QUICK]
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
        (["{mine}:fresh", "--step", "a", "--step-s", "1"], USAGE, "not allowed with"),
    ],
)
def test_wrong_words(mine: str, words: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["input", *(word.replace("{mine}", mine) for word in words)]) == code
    assert said in capsys.readouterr().err


def test_a_step_of_a_workload_is_refused_in_python_too(mine: str) -> None:
    with pytest.raises(UsageError, match="its own step"):
        examine_input("digits_mlp", step=0.1)
