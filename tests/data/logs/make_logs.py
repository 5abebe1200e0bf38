"""Writes the logs of this folder with the libraries themselves, and beside them what was really trained.

    python make_logs.py lightning|transformers|tensorboard|tensors|wandb

In an environment of its own: lightning 2.6, transformers 5 with accelerate, tensorboard 2.20, wandb 0.31. What the loop saw goes into
truth.json by lists of its own, not through the library's logger.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

HERE = Path(__file__).parent
STEPS, LR = 60, 0.01
torch.manual_seed(0)
TEACHER = torch.randn(20, 4)


def sample(count: int) -> TensorDataset:
    x = torch.randn(count, 20)
    return TensorDataset(x, (x @ TEACHER + 0.5 * torch.randn(count, 4)).argmax(1))


TRAIN, HELD = sample(512), sample(256)
MODEL = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 4))
SEEN: dict[str, list[float]] = {"step": [], "loss": [], "lr": [], "grad_norm": []}


def saw(**values: float) -> None:
    for name, value in values.items():
        SEEN[name].append(float(value))


def lightning() -> None:
    import lightning
    from lightning.pytorch.callbacks import LearningRateMonitor
    from lightning.pytorch.loggers import CSVLogger
    from lightning.pytorch.utilities import grad_norm

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = MODEL

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.log("train_loss", loss, on_step=True, on_epoch=True)
            saw(step=self.global_step, loss=loss, lr=self.optimizers().param_groups[0]["lr"])
            return loss

        def on_before_optimizer_step(self, _: Any) -> None:
            norm = grad_norm(self.net, 2)["grad_2.0_norm_total"]
            self.log("grad_norm_2.0_total", norm)
            saw(grad_norm=norm)

        def validation_step(self, batch: Any, _: int) -> None:
            self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), LR)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    lightning.Trainer(
        max_steps=STEPS, logger=CSVLogger(HERE, name="lightning"), callbacks=[LearningRateMonitor("step")], log_every_n_steps=2,
        accelerator="cpu", enable_checkpointing=False, val_check_interval=8,
    ).fit(Module(), DataLoader(TRAIN, 32, shuffle=True), DataLoader(HELD, 256))  # fmt: skip


def transformers() -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = MODEL

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            scores = self.net(x)
            loss = nn.functional.cross_entropy(scores, labels)
            if self.training:
                saw(loss=loss)
            return {"loss": loss, "logits": scores}

    class Norms(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            saw(step=len(SEEN["step"]) + 1)

    rows = [{"x": x, "labels": y} for x, y in TRAIN]
    held = [{"x": x, "labels": y} for x, y in HELD]
    arguments = TrainingArguments(
        str(HERE / "transformers"), max_steps=STEPS, learning_rate=LR, logging_steps=2, eval_strategy="steps", eval_steps=10,
        save_steps=30, per_device_train_batch_size=32, report_to="none", warmup_steps=6, lr_scheduler_type="cosine",
    )  # fmt: skip
    Trainer(Model(), arguments, train_dataset=rows, eval_dataset=held, callbacks=[Norms()]).train()


def loop(log: Any) -> None:
    """A loop of one's own, by the one-cycle schedule, whose `log` takes a dict and a step."""
    optimizer = torch.optim.AdamW(MODEL.parameters(), LR)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=STEPS)
    draw = iter([batch for _ in range(10) for batch in DataLoader(TRAIN, 32, shuffle=True)])
    for step in range(STEPS):
        x, y = next(draw)
        loss = nn.functional.cross_entropy(MODEL(x), y)
        optimizer.zero_grad()
        loss.backward()
        norm, lr = nn.utils.clip_grad_norm_(MODEL.parameters(), 1.0), optimizer.param_groups[0]["lr"]
        row = {"train/loss": loss.item(), "train/lr": lr, "train/grad_norm": norm.item()}
        if step % 6 == 0:
            with torch.no_grad():
                row["val/loss"] = nn.functional.cross_entropy(MODEL(HELD.tensors[0]), HELD.tensors[1]).item()
        log(row, step)
        saw(step=step, loss=loss, lr=lr, grad_norm=norm)
        optimizer.step()
        if step < STEPS - 1:
            schedule.step()


def tensorboard(**more: Any) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(HERE / ("tensors" if more else "tensorboard")) as writer:
        loop(lambda row, step: [writer.add_scalar(name, value, step, **more) for name, value in row.items()])


def wandb() -> None:
    import wandb

    quiet = wandb.Settings(
        console="off",
        disable_git=True,
        x_disable_stats=True,
        x_disable_meta=True,
        silent=True,
        host="host",
        username="me",
    )
    with wandb.init(mode="offline", dir=HERE, project="project", config={"lr": LR}, settings=quiet) as run:
        loop(lambda row, step: run.log(row, step=step))


if __name__ == "__main__":
    (which,) = sys.argv[1:]
    os.chdir(HERE)
    {"tensors": lambda: tensorboard(new_style=True)}.get(which, globals().get(which))()
    truth = HERE / "truth.json"
    known = json.loads(truth.read_text()) if truth.exists() else {}
    truth.write_text(json.dumps(known | {which: {k: [float(f"{x:.6g}") for x in v] for k, v in SEEN.items()}}))
