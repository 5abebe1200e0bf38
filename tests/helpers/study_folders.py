"""Folders of studies written without training: losses that are formulas, values that are known."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from workbench.config import TrainConfig
from workbench.record.folder import read_json, write_json
from workbench.record.write import StudyWriter

CONFIG = TrainConfig(peak_lr=0.1, total_steps=40, batch_size=8)
PLAIN = TrainConfig(peak_lr=0.1, total_steps=10, batch_size=4).to_dict()


def opened(path: Path, **changes: Any) -> StudyWriter:
    """Return the writer of a study with the baseline `PLAIN`."""
    given = {"kind": "lr_sweep", "workload": "w", "config": PLAIN}
    return StudyWriter.open(path, **(given | changes))


def filled(path: Path, trials: int = 2, steps: int = 6) -> StudyWriter:
    """Return the writer of a study with complete trials, their rows not flushed yet."""
    study = opened(path)
    for number in range(trials):
        trial = study.trial(PLAIN | {"peak_lr": 0.1 * (number + 1)}, stage="lr_sweep", train_examples=32)
        trial.event("started", state="running")
        study.steps.add({"trial": [number] * steps, "step": range(steps), "loss": np.linspace(1, 0, steps)})
        study.evals.add({"trial": [number], "step": [0], "split": ["test"], "metric": ["loss"], "value": [1.0]})
        trial.event("ended", state="complete", best_step=0, best_value=1.0, steps_run=steps, seconds=0.1)
    return study


def edited(path: Path, **changes: Any) -> None:
    """Change entries of a study's `study.json` as the package would."""
    write_json(path / "study.json", read_json(path / "study.json") | changes)


def study(path: Path, *, mode: str = "min", values: tuple[float, ...] = (0.5, 0.25, math.nan)) -> Path:
    """Write a study with one complete trial per value, one that diverged, one that failed and one that was stopped."""
    config = PLAIN | {"select_mode": mode}
    writer = opened(path, config=config, note="a note", command="workbench diagnose w")
    ends = [("complete", v) for v in values] + [("diverged", 0.9), ("failed", None), ("stopped", None)]
    for number, (state, value) in enumerate(ends):
        trial = writer.trial(config | {"peak_lr": 0.1 * (number + 1)}, stage="lr_sweep", train_examples=32)
        trial.event("ended", state=state, best_value=value, best_step=3, steps_run=10, seconds=1.0)
    writer.close()
    return path


def write_study(
    path: Path, *, trials: int = 4, seeds: int = 1, scale: float = 1.0, finish: bool = True, **given: Any
) -> Path:
    """Write a study whose trial k has the learning rate 0.1 * 1.3 ** (k // seeds), 1.005 where there are many, and a best value known in closed form.

    Args:
        path: its folder.
        trials: how many; the last one diverges where there are more than three.
        seeds: trials at each learning rate.
        scale: of the losses.
        finish: whether it is marked as run to its end.
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
    writer.close()
    return path
