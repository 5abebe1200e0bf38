"""What all callbacks stand on: one run after another, metrics by their split, an end in any case; no library is needed for it."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import workbench as wb
from workbench.adapters.watching import Watching
from workbench.instruments.taps import TAPS


def begun(out: Path) -> tuple[Watching, nn.Linear, torch.optim.Optimizer]:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watching = Watching(out, name=None, note=None, every=50, share=None)
    watching.begin(model, [optimizer])
    return watching, model, optimizer


def update(model: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 3)).square().mean().backward()
    optimizer.step()


def state(path: Path) -> str:
    events = (path / "trials" / "0" / "events.jsonl").read_text().splitlines()
    return str(next(e["state"] for e in map(json.loads, reversed(events)) if e["event"] == "end"))


def test_metrics_are_filed_under_the_split_that_their_name_says(tmp_path: Path) -> None:
    watching, model, optimizer = begun(tmp_path / "run")
    update(model, optimizer)
    watching.log(
        {
            "val_loss": torch.tensor(0.5),
            "eval/f1": 0.25,
            "accuracy": 1,
            "test_loss": 2.0,
            "note": "text",
            "value": 3.0,
            "each": torch.ones(2),
        }
    )
    watching.log({"seen_tokens": 7}, split="train")
    update(model, optimizer)
    watching.end()
    watching.log({"val_loss": 0.1})
    assert watching.run is not None
    rows = watching.run.record.evals
    found = {(row.split, row.metric): (row.value, row.step) for row in rows.itertuples()}
    assert found == {
        ("validation", "loss"): (0.5, 1), ("validation", "f1"): (0.25, 1), ("validation", "accuracy"): (1.0, 1), ("test", "loss"): (2.0, 1),
        ("validation", "value"): (3.0, 1), ("train", "seen_tokens"): (7.0, 1),
    }  # fmt: skip
    assert len(rows) == len(found), "what comes after the end is not recorded"


def test_a_second_training_has_a_folder_of_its_own_and_ends_one_that_was_left_open(tmp_path: Path) -> None:
    watching, model, optimizer = begun(tmp_path / "run")
    update(model, optimizer)
    watching.begin(model, [optimizer])
    for _ in range(2):
        update(model, optimizer)
    watching.end(KeyboardInterrupt())
    watching.end()
    assert TAPS.listeners == []
    assert [len(wb.open(tmp_path / name).steps) for name in ("run", "run-2")] == [1, 2]
    assert [state(tmp_path / name) for name in ("run", "run-2")] == ["complete", "stopped"]


@pytest.mark.parametrize("name", ["lightning", "transformers"])
def test_a_library_that_is_not_there_is_named_in_one_sentence(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("lightning", "lightning.pytorch", "pytorch_lightning", "transformers"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, f"workbench.adapters.{name}", raising=False)
    monkeypatch.delattr(importlib.import_module("workbench.adapters"), name, raising=False)
    with pytest.raises(wb.errors.WorkbenchError, match=f"needs {name}.*not installed: pip install {name}[.]$"):
        getattr(wb.callbacks, name)()


def test_a_training_that_cannot_be_recorded_goes_on_and_is_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("taken")
    watching = Watching(tmp_path / "file" / "run", name=None, note=None, every=50, share=None)
    model = nn.Linear(3, 1)
    for optimizers in ([torch.optim.SGD(model.parameters(), lr=0.1)], []):
        watching.begin(model, optimizers)
        watching.log({"loss": 1.0})
        watching.plan(3)
        watching.end()
    assert watching.run is None
    assert [r.getMessage().count("nothing is recorded") for r in caplog.records] == [1]
