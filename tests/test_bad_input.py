"""Bad input as a person meets it: one clear error, early, and nothing left behind or lost."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import workbench as wb
from tests.helpers.hooks import At
from tests.helpers.workloads import small_net, small_workload, squared
from workbench import cli
from workbench.errors import CheckpointError, ConfigError, DataError, UnknownNameError, UsageError, WorkloadError

pytestmark = pytest.mark.usefixtures("no_figures")
X = torch.randn(48, 3, generator=torch.Generator().manual_seed(0))
Y = X.sum(1)


class ItemRaises(Dataset[Any]):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise OSError("truncated image")
        return X[index].double(), Y[index].double()


class Items(Dataset[Any]):
    def __init__(self, item: Any) -> None:
        self.item = item

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Any:
        if self.item == "exit" and index >= 40 and torch.utils.data.get_worker_info() is not None:
            os._exit(9)
        return self.item(index) if callable(self.item) else (X[index].double(), Y[index].double())


def meta_net() -> nn.Module:
    with torch.device("meta"):
        return nn.Linear(3, 1)


def classes(targets: Tensor) -> wb.Workload:
    return wb.classification(
        name="c", build_model=lambda: nn.Linear(3, 4), train_data=TensorDataset(X, targets),
        validation_data=TensorDataset(X[:9], torch.zeros(9, dtype=torch.long)),
        config=wb.TrainConfig(peak_lr=0.1, total_steps=20, batch_size=8),
    )  # fmt: skip


def shared() -> wb.Workload:
    model = small_net()
    return small_workload(build_model=lambda: model)


WORKLOADS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "one example": (
        lambda: small_workload(examples=1, config={"batch_size": 1}), WorkloadError,
        r"train_data has 1 example; a diagnosis needs at least 2.*Repeat it",
    ),
    "empty": (
        lambda: small_workload(train_data=TensorDataset(X[:0], Y[:0])), DataError,
        r"the train split has 0 examples; it needs at least 1.*train_data",
    ),
    "batch too large": (
        lambda: small_workload(config={"batch_size": 100}), ConfigError,
        r"batch_size=100 is more than the 48 examples of the train split\. Allowed is 1 to 48",
    ),
    "reduced loss": (
        lambda: small_workload(loss=lambda o, b: squared(o, b).mean(), weights=lambda b: torch.ones(len(b[0]))), WorkloadError,
        r'the loss has shape \(\).*reduction="none".*no weights',
    ),
    "None among the items": (
        lambda: small_workload(train_data=Items(lambda index: None if index == 5 else (X[index], Y[index]))), DataError,
        r"default_collate could not make a batch of the train split .*Its items are .*None.*collate=",
    ),
    "items of several shapes": (
        lambda: small_workload(train_data=Items(lambda index: (X[index].repeat(1 + index % 2), Y[index]))), DataError,
        r"batch of the train split .*\(Tensor\[3\], Tensor\[\]\), \(Tensor\[6\], Tensor\[\]\).*collate=",
    ),
    "a worker process that exits": (
        lambda: small_workload(train_data=Items("exit"), num_workers=1), DataError,
        r"worker process that reads the train split ended without a word \(num_workers=1.*num_workers=0",
    ),
    "meta device": (
        lambda: small_workload(build_model=meta_net), WorkloadError, r"Linear has parameters on the meta device.*to_empty"
    ),
    "no parameters": (
        lambda: small_workload(build_model=nn.Identity), WorkloadError, r"Identity has no parameters.*nn\.ModuleList"
    ),
    "all frozen": (
        lambda: small_workload(build_model=lambda: small_net().requires_grad_(False)), WorkloadError,
        r"all 4 parameters of Sequential are frozen.*Leave at least one",
    ),
    "shared model": (shared, WorkloadError, r"same parameters twice.*build_model=lambda: Net\(\)"),
    "item raises": (
        lambda: small_workload(train_data=ItemRaises()), DataError,
        r"item 5 of the train split.*OSError: truncated image.*train_data\[5\]",
    ),
    "target too large": (
        lambda: classes(torch.full((48,), 4)), WorkloadError, r"target 4 is out of range.*classes are 0 to 3"
    ),
    "unknown selection": (
        lambda: small_workload(config={"select": "validation/acc"}), UnknownNameError,
        r"no select='validation/acc'.*Allowed: .*validation/loss",
    ),
    "model function raises": (
        lambda: small_workload(build_model=lambda: 1 / 0), WorkloadError, "build_model raised ZeroDivisionError"
    ),
    "no workload": (lambda: 3, UsageError, r"workload must be a Workload, not int \(3\)"),
    "unknown name": (lambda: "digits_cn", UnknownNameError, "Did you mean 'digits_cnn'"),
}  # fmt: skip


FOUND = {"target too large"}
"""What `diagnose` makes a finding of: `data.labels`."""


@pytest.mark.parametrize("case", sorted(WORKLOADS.keys() - FOUND))
def test_diagnose_refuses_it_and_leaves_no_folder(tmp_path: Path, case: str) -> None:
    workload, error, message = WORKLOADS[case]
    with pytest.raises(error, match=message):
        wb.diagnose(workload(), out=tmp_path / "runs" / "s")
    assert not (tmp_path / "runs" / "s").exists()


@pytest.mark.parametrize("case", ["reduced loss", "no parameters", "all frozen", "item raises", "target too large"])
def test_the_trainer_says_so_and_keeps_a_row_that_failed(tmp_path: Path, case: str) -> None:
    workload, error, message = WORKLOADS[case]
    with pytest.raises(error, match=message):
        wb.Trainer().run(workload(), out=tmp_path / "s")
    assert wb.open(tmp_path / "s").trials["state"].tolist() == ["failed"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "fine.py").write_text(
        "from tests.helpers.workloads import small_workload\nw = small_workload()\nnot_one = 3\n"
    )
    (tmp_path / "broken.py").write_text("import nonexistent_package\n")
    (tmp_path / "script.py").write_text("raise RuntimeError('imported')\n")
    (tmp_path / "raises.py").write_text("def w():\n    raise ValueError('planted')\n")
    return tmp_path


NAMES = [
    ("digits_cn", 2, "workload 'digits_cn' is not known. Did you mean 'digits_cnn'"),
    ("{}/fin.py:w", 2, "Did you mean 'fine.py'"),
    ("{}/fine.py:ww", 2, "has no attribute 'ww'. Did you mean 'w'"),
    ("{}/fine.py:not_one", 1, "is int, but must be a Workload or a function"),
    ("{}/broken.py:w", 1, "importing {}/broken.py failed at broken.py:1: ModuleNotFoundError"),
    ("{}/script.py", 2, "holds no workload. To diagnose it as a script: workbench diagnose -- python {}/script.py"),
    ("{}/raises.py:w", 1, "raised ValueError: planted"),
    ("no_such_package.module:w", 2, "there is no module 'no_such_package'"),
]


@pytest.mark.parametrize(("name", "code", "said"), NAMES)
def test_names_on_the_command_line(
    source: Path, capsys: pytest.CaptureFixture[str], name: str, code: int, said: str
) -> None:
    assert cli.main(["diagnose", name.format(source), "--out", str(source / "s")]) == code
    err = capsys.readouterr().err
    assert said.format(source) in err
    assert len(err.splitlines()) == 1, "one line, no traceback"
    assert not (source / "s").exists()


def test_a_corrupt_checkpoint_is_named_by_the_call_that_resumes(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="planted"):
        wb.Trainer(hooks=[At(25, RuntimeError("planted"))]).run(small_workload(), out=tmp_path / "s")
    latest = wb.open(tmp_path / "s").checkpoints[-1]
    (latest / "model.safetensors").write_bytes(b"")
    with pytest.raises(
        CheckpointError, match=rf"{latest.name} is damaged.*Delete this folder and run again .*there are: s"
    ):
        wb.Trainer().run(small_workload(), out=tmp_path / "s")
    shutil.rmtree(latest)
    assert wb.Trainer().run(small_workload(), out=tmp_path / "s").state == "complete"


@pytest.mark.parametrize(("factor", "said"), [(math.nan, "The loss is nan before any update"), (math.inf, "The loss is inf before any update")])  # fmt: skip
def test_a_loss_that_is_not_finite_from_the_start_is_a_finding(tmp_path: Path, factor: float, said: str) -> None:
    diagnosis = wb.diagnose(small_workload(loss=lambda o, b: squared(o, b) * factor), out=tmp_path / "s")
    assert diagnosis["init.loss"].status == "fail"
    assert diagnosis["init.loss"].summary.startswith(said)
    assert not len(wb.open(tmp_path / "s").trials)
    assert {f.status for f in diagnosis if f.code.startswith(("lr.", "stability."))} == {"not_measured"}
