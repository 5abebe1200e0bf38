"""Lightning's own Trainer, with and without the callback: the same training to the bit, and a record of it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import workbench as wb
from workbench.instruments.taps import TAPS

L = pytest.importorskip("lightning", reason="lightning is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
EPOCHS, BATCHES = 2, 8


def make(*, manual: bool = False, error: BaseException | None = None) -> Any:
    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2))
            self.automatic_optimization = not manual
            self.seen: list[float] = []

        def training_step(self, batch: Any, number: int) -> Any:
            if error is not None and self.global_step == 5:
                raise error
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.log("train_loss", loss)
            self.seen.append(loss.item())
            if manual:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                self.clip_gradients(optimizer, 0.1, "norm")
                optimizer.step()
            return loss

        def validation_step(self, batch: Any, number: int) -> None:
            self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    torch.manual_seed(0)
    return Module()


def fit(module: Any, callbacks: list[Any], **options: Any) -> Any:
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(16 * BATCHES, 6, generator=draw)
    data = TensorDataset(inputs, (inputs[:, 0] > 0).long())
    resumed = {"ckpt_path": options.pop("ckpt_path")} if "ckpt_path" in options else {}
    quiet: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = L.Trainer(**({"max_epochs": EPOCHS, "accelerator": "cpu", "callbacks": callbacks} | quiet | options))
    torch.manual_seed(1)
    trainer.fit(module, DataLoader(data, 16, shuffle=True, generator=draw), DataLoader(data, 32), **resumed)
    return trainer


@pytest.mark.parametrize(
    ("options", "manual"),
    [
        ({}, False),
        ({"accumulate_grad_batches": 4, "gradient_clip_val": 0.1}, False),
        ({"precision": "bf16-mixed", "gradient_clip_val": 0.1}, False),
        ({}, True),
    ],
    ids=["plain", "accumulation", "bf16", "manual"],
)
def test_a_fit_is_recorded_and_not_changed(options: dict[str, Any], manual: bool, tmp_path: Path) -> None:
    alone, watched = make(manual=manual), make(manual=manual)
    fit(alone, [], **options)
    callback = wb.callbacks.lightning(tmp_path / "run")
    fit(watched, [callback], **options)
    assert watched.seen == alone.seen
    assert all(
        torch.equal(a, b) for a, b in zip(alone.state_dict().values(), watched.state_dict().values(), strict=True)
    )
    assert callback.run is not None
    record, passes = callback.run.record, options.get("accumulate_grad_batches", 1)
    means = torch.tensor(watched.seen).reshape(-1, passes).mean(1).tolist()
    assert record.steps["loss"].tolist() == pytest.approx(means, rel=1e-5)
    assert set(record.steps["lr"]) == {1e-2}
    clipped = manual or "gradient_clip_val" in options
    assert (record.steps["grad_norm"] > 0.1).any(), "the norm before clipping"
    assert ("clipped" in record.steps) == clipped
    validated = record.evals
    assert validated[["split", "metric"]].drop_duplicates().to_numpy().tolist() == [["validation", "loss"]]
    assert validated["step"].tolist() == [(epoch + 1) * BATCHES // passes for epoch in range(EPOCHS)]
    found = callback.run.diagnose()
    assert [
        (f.code, f.summary)
        for f in found
        if f.status in ("warn", "fail") and not f.code.startswith(("stability", "clipping.aggressive"))
    ] == []
    assert found["loop.train_mode_in_eval"].summary.startswith(
        "No evaluation on other data than the updates' was seen to drop"
    )
    assert found["loop.eval_mode_in_training"].summary == "Updates are made in training mode."


@pytest.mark.parametrize(("error", "state"), [(ValueError("planted"), "failed"), (KeyboardInterrupt(), "stopped")])
def test_the_record_ends_where_the_training_does(error: BaseException, state: str, tmp_path: Path) -> None:
    callback = wb.callbacks.lightning(tmp_path / "run")
    with pytest.raises((ValueError, SystemExit)):
        fit(make(error=error), [callback])
    assert TAPS.listeners == []
    assert callback.run is not None
    assert len(callback.run.record.steps) == 5
    assert state in (tmp_path / "run" / "trials" / "0" / "events.jsonl").read_text()


def test_validation_alone_records_nothing_and_a_resumed_fit_what_is_left(tmp_path: Path) -> None:
    callback = wb.callbacks.lightning(tmp_path / "run")
    trainer = fit(make(), [], max_epochs=1)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    trainer.callbacks.append(callback)
    (found,) = trainer.validate(
        make(), DataLoader(TensorDataset(torch.zeros(4, 6), torch.zeros(4).long())), verbose=False
    )
    assert math.isfinite(found["val_loss"])
    assert (callback.run, (tmp_path / "run").exists()) == (None, False)
    fit(make(), [callback], max_epochs=3, ckpt_path=tmp_path / "one.ckpt")
    assert callback.run is not None
    assert len(callback.run.record.steps) == callback.run.record.config["total_steps"] == 2 * BATCHES
