"""Records of evaluations made by hand: offline rows, a run with a pause, tracked predictions."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd

from tests.helpers.records import MemoryRecord
from tests.helpers.simulated_records import evaluations, record, trial


def with_offline(given: MemoryRecord, noise: float = 0.02) -> MemoryRecord:
    """The same record, its periodic rows evaluated offline as well, a little off."""
    rng = np.random.default_rng(0)
    rows = given.evals[given.evals["setting"] == "periodic"]
    wiggle = 1 + noise * rng.standard_normal(len(rows))
    return replace(given, evals=pd.concat([given.evals, rows.assign(setting="offline", value=rows["value"] * wiggle)]))


def evaluated(periodic: Any, offline: Any = None, *, split: str = "validation", subset: str = "", **config: Any) -> Any:
    """A trial that was evaluated every 10 steps, and its checkpoints offline."""
    steps = 10 * np.arange(len(periodic))
    rows = evaluations(0, steps, periodic, split=split)
    after = [] if offline is None else evaluations(0, steps, offline, split=split)
    rows = [{**row, "subset": subset} for row in rows] + [{**row, "setting": "offline", "subset": ""} for row in after]
    total = int(max(steps[-1], 1)) if len(steps) else 10
    made = record([trial(np.linspace(2, 1, total), 0.1, stage="evaluation")], batch_size=64, full_batch=False, **config)
    made.evals = pd.DataFrame(rows, columns=[*made.evals.columns, "subset"])
    return made


def paused(total: int = 100, step_s: float = 0.01, pause_s: float = 0.25, at: int = 31) -> Any:
    """Two trials of equal steps, the second held up once; both are evaluated every 10 steps."""
    times = np.full(total, step_s)
    late = times.copy()
    late[at] += pause_s
    rows = [
        row
        for number in (0, 1)
        for row in evaluations(number, range(0, total + 1, 10), np.ones(11), split="validation")
    ]
    loss = np.linspace(2, 1, total)
    trials = [trial(loss, 0.1, stage="evaluation"), trial(loss, 0.1, stage="evaluation_pause")]
    made = record(trials, evals=rows)
    made.steps["step_time_s"] = np.concatenate([times, late])
    return made


def predicted(steps: int = 5, **columns: Any) -> Any:
    """Two tracked examples; of the first one (label 4) the prediction becomes right at step 20."""
    rows = []
    for place in range(steps):
        step = 10 * place
        rows.append([0, step, "validation", 3, 4 if step >= 20 else 7, 4, 2.0 / (1 + place)])
        rows.append([0, step, "validation", 8, 1, 1, 0.1])
    names = ["trial", "step", "split", "example", "prediction", "label", "loss"]
    return SimpleNamespace(predictions=pd.DataFrame(rows, columns=names).assign(**columns))
