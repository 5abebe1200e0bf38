"""Records made of simulated loss curves: the frames of a study, without training anything."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd

from workbench.config import TrainConfig

STEP_COLUMNS = ["loss_se", "lr", "grad_norm", "clipped", "update_norm", "param_norm"]
EVAL_COLUMNS = ["trial", "step", "split", "setting", "metric", "value", "num_examples", "num_correct", "seconds"]


def trial(loss, lr, *, stage="lr_sweep", seed=0, state=None, columns=None, train_examples=1000, **config):
    """One trial as a dict for `record`: its loss curve, its lr, and whatever else differs."""
    loss = np.asarray(loss, dtype=float)
    ended = "complete" if np.isfinite(loss[-1]) else "diverged"
    return {
        "loss": loss,
        "lr": lr,
        "stage": stage,
        "seed": seed,
        "columns": columns or {},
        "config": config,
        "state": state or ended,
        "train_examples": train_examples,
    }


def record(trials, *, evals=(), facts=None, workload="synthetic", full_batch=True, **config):
    """A record with one row a trial; `config` is the baseline's, with defaults for what is left out."""
    total = max(len(t["loss"]) for t in trials) if trials else 100
    base = {"peak_lr": trials[0]["lr"] if trials else 0.1, "total_steps": total, "optimizer": "sgd"}
    baseline = TrainConfig(**(base | {"batch_size": 1000 if full_batch else 50} | config)).to_dict()
    pairs = list(enumerate(trials))
    steps = [_steps(number, t) for number, t in pairs]
    return SimpleNamespace(
        trials=pd.DataFrame([_row(number, t, baseline) for number, t in pairs]),
        steps=pd.concat(steps, ignore_index=True) if steps else pd.DataFrame(columns=["trial", "step", "loss"]),
        evals=pd.DataFrame(list(evals), columns=EVAL_COLUMNS),
        workload=workload,
        command="workbench diagnose synthetic",
        config=baseline,
        facts=facts or {},
        study={},
        path=Path("runs/synthetic"),
    )


def _row(number, t, baseline):
    return {
        "trial": number,
        "stage": t["stage"],
        "state": t["state"],
        "seed": t["seed"],
        "train_examples": t["train_examples"],
        "steps_run": len(t["loss"]),
        "best_step": None,
        "best_value": np.nan,
        "seconds": 1.0,
        **baseline,
        "peak_lr": t["lr"],
        "shared_seed": t["seed"],
        **t["config"],
    }


def _steps(number, t):
    frame = pd.DataFrame({"trial": number, "step": np.arange(len(t["loss"])), "loss": t["loss"]})
    for name in dict.fromkeys((*STEP_COLUMNS, *t["columns"])):
        frame[name] = t["columns"].get(name, t["lr"] if name == "lr" else np.nan)
    return frame


def evaluations(number, steps, values, *, split="train", metric="loss"):
    """Rows of `.evals` for one trial."""
    fixed = {"trial": number, "split": split, "setting": "periodic", "metric": metric, "num_examples": 100}
    pairs = zip(steps, values, strict=True)
    return [{**fixed, "step": int(s), "value": float(v), "num_correct": np.nan, "seconds": 0.0} for s, v in pairs]


def noisy_sweep(levels, *, seeds=3, total=400, sd=0.1, seed_sd=0.0):
    """Runs that fall from 2.3 to `levels[lr]`; runs of one seed share the noise of their batches."""
    trials = []
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        batch_noise, offset = sd * rng.standard_normal(total), seed_sd * rng.standard_normal()
        for lr, level in levels.items():
            loss = level + offset + (2.3 - level) * np.exp(-np.arange(total) / 30) + batch_noise
            loss = loss + 0.01 * rng.standard_normal(total)
            trials.append(trial(loss, lr, seed=seed, columns={"loss_se": np.full(total, sd)}))
    return record(trials, total_steps=total, full_batch=False)
