"""Folders of studies written without training: losses that are formulas, values that are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from workbench.config import TrainConfig
from workbench.record.write import StudyWriter

CONFIG = TrainConfig(peak_lr=0.1, total_steps=40, batch_size=8)


def write_study(
    path: Path,
    *,
    trials: int = 4,
    seeds: int = 1,
    scale: float = 1.0,
    finish: bool = True,
    index: bool = True,
    **given: Any,
) -> Path:
    """Write a study whose trial k has the learning rate 0.1 * 1.3 ** (k // seeds), 1.005 where there are many, and a best value known in closed form.

    Args:
        path: its folder.
        trials: how many; the last one diverges where there are more than three.
        seeds: trials at each learning rate.
        scale: of the losses.
        finish: whether it is marked as run to its end.
        index: whether the ledger gets its row.
        given: passed to `StudyWriter.open`.
    """
    wanted: dict[str, Any] = {"kind": "lr_sweep", "workload": "digits_mlp", "config": CONFIG.to_dict()}
    writer = StudyWriter.open(path, **{**wanted, "command": f"workbench diagnose digits_mlp --out {path}", **given})
    steps = np.arange(CONFIG.total_steps)
    for number in range(trials):
        lr, seed = 0.1 * (1.3 if trials < 20 else 1.005) ** (number // seeds), number % seeds
        config = CONFIG.replace(peak_lr=lr, shared_seed=seed)
        trial = writer.trial(config.to_dict(), stage="lr_sweep", train_examples=100)
        trial.event("started", state="running", lanes=1, gradients="loop")
        diverges = trials > 3 and number == trials - 1
        loss = scale * 2.3 * np.exp(-lr * steps / 10) * (1 + 0.01 * seed)
        if diverges:
            loss[20:] = np.nan
        nothing = np.full(len(steps), np.nan)
        writer.steps.add(
            {"trial": np.full(len(steps), number), "step": steps, "loss": loss, "loss_se": np.full(len(steps), 0.01),
             "lr": np.full(len(steps), lr), "grad_norm": np.sqrt(np.abs(loss)), "clipped": np.zeros(len(steps)),
             "update_norm": nothing, "param_norm": nothing}
        )  # fmt: skip
        ended = (
            {"state": "diverged"} if diverges else {"state": "complete", "best_step": 40, "best_value": float(loss[-1])}
        )
        trial.event("ended", steps_run=len(steps), seconds=0.5, **ended)
    if finish:
        writer.finish()
    if index:
        writer.close()
    else:
        for parts in (writer.steps, writer.evals, writer.predictions):
            parts.merge()
        writer.lock.close()
    return path
