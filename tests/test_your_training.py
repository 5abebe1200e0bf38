"""The examples of docs/your_training.md run as they stand, on a small training."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb

PAGE = (Path(__file__).parents[1] / "docs" / "your_training.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
SCRIPT = """
import torch
torch.manual_seed(0)
net = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(12):
    inputs = torch.randn(16, 4)
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(net(inputs), (inputs[:, 0] > 0).long())
    loss.backward()
    optimizer.step()
    print(f"val loss {loss.item():.4f}")
"""


def block(heading: str) -> str:
    (found,) = re.findall(r"```python\n(.*?)```", SECTIONS[heading], re.DOTALL)
    return str(found)


def training() -> dict[str, Any]:
    """The names that the examples take for granted."""
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(96, 4, generator=draw)
    data = torch.utils.data.TensorDataset(inputs, (inputs[:, 0] > 0).long())
    model = torch.nn.Linear(4, 2)
    criterion = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {
        "wb": wb, "torch": torch, "epochs": 2, "model": model, "optimizer": optimizer, "criterion": criterion, "make_model": lambda: torch.nn.Linear(4, 2),
        "loader": torch.utils.data.DataLoader(data, 16), "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0),
        "evaluate": lambda model: criterion(model(inputs), data.tensors[1]),
    }  # fmt: skip


def run(heading: str, names: dict[str, Any]) -> dict[str, Any]:
    exec(block(heading), names)
    return names


def test_a_loop_and_a_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    watched = run("A loop", training())["run"]
    assert watched.diagnose()["loop.no_zero_grad"].status == "ok"
    names = run("A function", training() | {"wb": Once(wb)})
    assert "lr.best" in names["diagnosis"]
    wb.open("runs/mine").steps.to_csv("metrics.csv")
    assert "stability.divergent" in run("A log of a finished run", training())["diagnosis"]


def test_a_step_of_ones_own(tmp_path: Path) -> None:
    section = SECTIONS["As a workload"].split("### A step of your own")[1]
    (text,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    names = training()
    data = torch.utils.data.TensorDataset(names["loader"].dataset.tensors[0])
    made = {"make_generator": lambda: torch.nn.Linear(8, 4), "make_critic": lambda: torch.nn.Linear(4, 1)}
    names |= made | {"train_data": data, "validation_data": data}
    exec(text, names)
    workload = names["workload"]
    record = wb.Trainer().run(workload, workload.config.replace(total_steps=20), out=tmp_path / "s")
    assert {"loss/critic", "loss/generator"} <= set(record.steps)
    assert record.best() is not None


@pytest.mark.slow
def test_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    names = run("A script, from the command line", training() | {"wb": Once(wb)})
    assert wb.open(names["diagnosis"].path).config["select"] == "validation/loss"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
def test_a_loop_with_accelerate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate import Accelerator

    monkeypatch.chdir(tmp_path)
    names = training() | {"Accelerator": lambda **given: Accelerator(cpu=True, **given)}
    names["loader"] = torch.utils.data.DataLoader(names["loader"].dataset, 2)  # 12 updates of four passes
    watched = run("A loop with Accelerate", names)["run"]
    assert watched.diagnose()["loop.no_step"].status == "ok"


class Once:
    """The package, but that a diagnosis proves nothing: the shortest walk."""

    def __init__(self, package: Any) -> None:
        self._package = package

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._package, name)
        return (lambda *given, **named: found(*given, seeds=1, **named)) if name.startswith("diagnose_") else found
