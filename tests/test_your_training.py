"""The examples of docs/your_training.md run as they stand, on a small training."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import workbench as wb
from tests.helpers.pages import block

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


def run(source: str, names: dict[str, Any]) -> dict[str, Any]:
    exec(source, names)
    return names


def test_a_loop_and_a_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    watched = run(block("your_training.md", "model.train()"), training())["run"]
    assert watched.diagnose()["loop.no_zero_grad"].status == "ok"
    names = run(block("your_training.md", "def train(run)"), training() | {"wb": Once(wb)})
    assert "lr.best" in names["diagnosis"]
    wb.open("runs/mine").steps.to_csv("metrics.csv")
    assert "stability.divergent" in run(block("your_training.md", "read_log("), training())["diagnosis"]


def test_a_step_of_ones_own(tmp_path: Path) -> None:
    names = training()
    data = torch.utils.data.TensorDataset(names["loader"].dataset.tensors[0])
    made = {"make_generator": lambda: torch.nn.Linear(8, 4), "make_critic": lambda: torch.nn.Linear(4, 1)}
    names |= made | {"train_data": data, "validation_data": data}
    workload = run(block("your_training.md", "def nearest("), names)["workload"]
    record = wb.Trainer().run(workload, workload.config.replace(total_steps=20), out=tmp_path / "s")
    assert {"loss/critic", "loss/generator"} <= set(record.steps)
    assert record.best() is not None


@pytest.mark.slow
def test_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    names = run(block("your_training.md", "diagnose_program("), training() | {"wb": Once(wb)})
    assert wb.open(names["diagnosis"].path).config["select"] == "validation/loss"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
def test_a_loop_with_accelerate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate import Accelerator

    monkeypatch.chdir(tmp_path)
    names = training() | {"Accelerator": lambda **given: Accelerator(cpu=True, **given)}
    names["loader"] = torch.utils.data.DataLoader(names["loader"].dataset, 2)  # 12 updates of four passes
    watched = run(block("your_training.md", "Accelerator("), names)["run"]
    assert watched.diagnose()["loop.no_step"].status == "ok"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_lightning_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")
    monkeypatch.chdir(tmp_path)
    names = training()

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = names["model"]

        def training_step(self, batch: Any, _: int) -> Any:
            return names["criterion"](self.net(batch[0]), batch[1])

        def validation_step(self, batch: Any, _: int) -> None:
            self.log("val_loss", names["criterion"](self.net(batch[0]), batch[1]))

        def configure_optimizers(self) -> Any:
            return names["optimizer"]

    names |= {"L": lightning, "module": Module(), "train_loader": names["loader"], "validation_loader": names["loader"]}
    watched = run(block("your_training.md", "callbacks.lightning("), names)["watched"]
    assert watched.run.diagnose()["loop.no_step"].status == "ok"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_transformers_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    monkeypatch.chdir(tmp_path)
    ids = torch.randint(0, 32, (48, 8), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in ids]
    size = transformers.GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2)
    args = transformers.TrainingArguments(
        "out", per_device_train_batch_size=4, num_train_epochs=1, report_to=[], use_cpu=True, save_strategy="no"
    )
    names = training() | {"Trainer": transformers.Trainer, "args": args, "data": data, "held_out": data[:8]}
    names["model"] = transformers.GPT2LMHeadModel(size)
    watched = run(block("your_training.md", "callbacks.transformers("), names)["watched"]
    assert watched.run.diagnose()["loop.no_step"].status == "ok"


def test_a_workload_with_an_optimizer_of_another_library(tmp_path: Path) -> None:
    """A stand-in for timm's function, which takes the same arguments."""

    class Outputs(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(4, 2)

        def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> Any:
            return SimpleNamespace(loss=torch.nn.functional.cross_entropy(self.net(inputs), labels, reduction="none"))

    def create_optimizer_v2(model: torch.nn.Module, *, opt: str, lr: float, layer_decay: float) -> Any:
        assert (opt, layer_decay) == ("adamw", 0.75)
        return torch.optim.AdamW(model.parameters(), lr=lr)

    def collate(rows: Any) -> dict[str, torch.Tensor]:
        inputs, labels = (torch.stack(each) for each in zip(*rows, strict=True))
        return {"inputs": inputs, "labels": labels}

    data = training()["loader"].dataset
    names = training() | {"build_model": Outputs, "create_optimizer_v2": create_optimizer_v2, "collate": collate}
    names |= {"train_data": data, "validation_data": data}
    workload = run(block("your_training.md", "create_optimizer_v2("), names)["workload"]
    record = wb.Trainer().run(workload, workload.config.replace(total_steps=20), out=tmp_path / "s")
    assert record.steps["loss"].iloc[-1] < record.steps["loss"].iloc[0]


class Once:
    """The package, but that a diagnosis proves nothing: the shortest walk."""

    def __init__(self, package: Any) -> None:
        self._package = package

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._package, name)
        return (lambda *given, **named: found(*given, seeds=1, **named)) if name.startswith("diagnose_") else found
