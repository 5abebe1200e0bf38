"""A small study in memory: frames with the columns of a real record and numbers that a test can work out by hand."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from workbench.config import TrainConfig
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.finding import Finding

STEPS = 120
PROBE_STEPS = 250
LRS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32)
BEST, LASTING, DIVERGED = 0.08, 0.16, 0.32
DIVERGED_AT = 40
CLIPPED_AT = 0.5
WARMUPS = {
    "multiple": 10.0, "lr": 1.6, "shortest": 12, "next_shorter": 6,
    "lengths": [{"steps": 6, "short": False, "full": None}, {"steps": 12, "short": True, "full": True}],
}  # fmt: skip
STEP_COLUMNS = ["trial", "step", "loss", "loss_se", "lr", "grad_norm", "clipped", "update_norm", "param_norm"]
EVAL_COLUMNS = ["trial", "step", "split", "setting", "metric", "value", "num_examples", "num_correct", "seconds"]


@dataclass
class MemoryRecord:
    """Has the attributes of a `StudyRecord`, from frames instead of a folder."""

    trials: pd.DataFrame
    steps: pd.DataFrame
    evals: pd.DataFrame
    config: dict[str, Any]
    workload: str = "digits_mlp"
    command: str | None = "workbench diagnose digits_mlp --steps 120"
    facts: dict[str, Any] = field(default_factory=dict)
    path: Path = Path("runs/study")


BASELINE = TrainConfig(peak_lr=0.02, total_steps=STEPS, batch_size=64)


def falling(lr: float, steps: int = STEPS) -> np.ndarray:
    """Loss of a trained run: 2.3 exp(-lr k), strictly falling and positive."""
    return 2.3 * np.exp(-lr * np.arange(steps))


def losses_of(lr: float) -> np.ndarray:
    """Loss of each run of the sweep: falling, back up for good, or non-finite."""
    curve = falling(min(lr, BEST))
    if lr == LASTING:
        curve[60:] = 2.5
    if lr == DIVERGED:
        curve = np.append(falling(BEST, DIVERGED_AT), np.nan)
    return curve


def excursion(steps: int = PROBE_STEPS) -> np.ndarray:
    """Loss of the probe: starts at 2.3, climbs to 9 at step 20 and is back before step 100; steps + 1 values."""
    k = np.arange(steps + 1)
    return 2.3 * np.exp(-k / 300) + 6.7 * np.exp(-(((k - 20) / 8.0) ** 2))


def study() -> MemoryRecord:
    """Baseline, six lrs, a probe evaluated at every step, two runs far above the best lr, and one with clipping."""
    runs: list[tuple[str, TrainConfig, np.ndarray]] = [("baseline", BASELINE, losses_of(0.02))]
    runs += [("lr_sweep", BASELINE.replace(peak_lr=lr), losses_of(lr)) for lr in LRS]
    probe = BASELINE.replace(peak_lr=2 * BEST, total_steps=PROBE_STEPS, eval_every_steps=1)
    runs.append(("probe", probe, excursion()[:-1]))
    runs += [("confirm", BASELINE.replace(peak_lr=m * BEST), losses_of(DIVERGED)) for m in (5, 10)]
    runs.append(("clipping", BASELINE.replace(peak_lr=LASTING, max_grad_norm=CLIPPED_AT), falling(BEST)))
    trials, steps, evals = [], [], []
    for number, (stage, config, loss) in enumerate(runs):
        ended = "complete" if np.isfinite(loss).all() else "diverged"
        trials.append(_trial(number, stage, ended, config, len(loss)))
        steps.append(_steps(number, config, loss))
        at = np.arange(0, len(loss) + 1, config.eval_interval)
        values = excursion() if stage == "probe" else np.append(loss, loss[-1])[at]
        evals.append(_evals(number, at, values))
    return MemoryRecord(
        pd.DataFrame(trials),
        pd.concat(steps, ignore_index=True),
        pd.concat(evals, ignore_index=True),
        BASELINE.to_dict(),
    )


def empty() -> MemoryRecord:
    """A study that has only just begun: no trial, no row."""
    return MemoryRecord(
        pd.DataFrame([]), pd.DataFrame(columns=STEP_COLUMNS), pd.DataFrame(columns=EVAL_COLUMNS), BASELINE.to_dict()
    )


def one_trial(values: np.ndarray, stage: str = "lr_sweep", **changes: Any) -> MemoryRecord:
    """One trial with these losses and gradient norms."""
    config = BASELINE.replace(**changes)
    state = "complete" if np.isfinite(values).all() else "diverged"
    at = np.arange(len(values))
    return MemoryRecord(
        pd.DataFrame([_trial(0, stage, state, config, len(values))]),
        _steps(0, config, values).assign(grad_norm=values),
        _evals(0, at, values),
        config.to_dict(),
    )


def diagnosis() -> Diagnosis:
    """What a diagnosis of `study` says, with the points of its sweep in the evidence."""
    points = []
    for lr in LRS:
        loss = losses_of(lr)
        bad = not np.isfinite(loss).all()
        tail = float("inf") if bad else float(loss[-12:].mean())
        state = "diverged" if bad else "complete"
        points.append(
            {
                "lr": lr,
                "loss": tail,
                "loss_se": 0.01 * tail,
                "state": state,
                "unstable": bad or lr == LASTING,
                "seeds": [0],
            }
        )
    findings = (
        Finding(code="lr.grid_edge", status="ok", summary="The best lr is inside the grid.", clause="F1.6"),
        Finding(code="lr.best", status="ok", summary="The best lr is 0.08.", value=BEST, unit="lr", clause="F1.6", evidence={"points": points, "low": 0.057, "high": 0.113, "measured_lr": BEST}),
        Finding(code="lr.unstable", status="ok", summary="Unstable from 0.16.", value=LASTING, unit="lr", clause="F3.2", evidence={"lower": 0.152, "upper": 0.16}),
        Finding(code="lr.probabilistic", status="not_measured", summary="One seed cannot disagree.", clause="F1.8"),
        Finding(code="lr.at_edge", status="warn", summary="The next lr is unstable.", value=2.0, threshold=2.0, clause="F1.12", advice=("Try a warmup.", "Try clipping.")),
        Finding(code="stability.mid", status="fail", summary="The loss jumps.", step=40, clause="F1.13", evidence={"confirm": [{"trial": 8, "shape": "rise after decline", "jump_step": 40}]}, advice=("Try a warmup.",)),
        Finding(code="stability.early_recovers", status="warn", summary="It recovers.", step=10, clause="F1.10", evidence={"hits": [{"trial": 7, "onset_step": 10}, {"trial": 7, "onset_step": 90}]}),
        Finding(code="warmup.shortest", status="ok", summary="The shortest warmup takes 12 steps.", value=12.0, unit="steps", clause="F3.6", evidence={"unstable_lr": LASTING, "cap": 12, "rounds": [WARMUPS]}),
        Finding(code="clipping.threshold", status="ok", summary="The 90th percentile is 0.5.", value=0.5, clause="F4.9"),
    )  # fmt: skip
    recommended = BASELINE.replace(peak_lr=BEST, warmup_steps=12, total_steps=132, max_grad_norm=0.5)
    return Diagnosis(
        findings=findings,
        workload="digits_mlp",
        command="workbench diagnose digits_mlp --steps 120",
        cost={"steps": 1150, "seconds": 3.25, "baseline_runs": 9.5},
        recommendation={
            "config": recommended.to_dict(),
            "paste": recommended.paste(),
            "changed": ["peak_lr", "warmup_steps", "total_steps", "max_grad_norm"],
            "baseline": {"best_step": 120, "validation/loss": 0.2114},
            "recommended": {"best_step": 108, "validation/loss": 0.1007},
            "candidate": "lr 0.08, warmup 10",
            "adopted": True,
            "proof": {
                "select": "validation/loss",
                "seeds": [0, 1, 2],
                "candidate": [0.1007, 0.0991, 0.1102],
                "arms": [
                    {"name": "baseline", "values": [0.2114, 0.1907, 0.2301]},
                    {"name": "baseline of the same length", "values": [0.2004, 0.1801, 0.2212]},
                ],
                "wins": True,
            },
        },
    )


def _trial(number: int, stage: str, state: str, config: TrainConfig, steps_run: int) -> dict[str, Any]:
    known = {"trial": number, "stage": stage, "state": state, "seed": 0, "train_examples": 1000, "steps_run": steps_run}
    return known | {"best_step": None, "best_value": np.nan, "seconds": 0.5} | config.to_dict()


def _steps(number: int, config: TrainConfig, loss: np.ndarray) -> pd.DataFrame:
    nothing, norms = np.full(len(loss), np.nan), np.sqrt(np.abs(loss))
    return pd.DataFrame(
        {"trial": number, "step": np.arange(len(loss)), "loss": loss, "loss_se": 0.001, "lr": config.peak_lr,
         "grad_norm": norms, "clipped": (norms > (config.max_grad_norm or np.inf)) * 1, "update_norm": nothing, "param_norm": nothing}
    )  # fmt: skip


def _evals(number: int, at: np.ndarray, values: np.ndarray) -> pd.DataFrame:
    return pd.DataFrame(
        {"trial": number, "step": at, "split": "validation", "setting": "periodic", "metric": "loss", "value": values,
         "num_examples": 100, "num_correct": np.nan, "seconds": 0.01}
    )  # fmt: skip
