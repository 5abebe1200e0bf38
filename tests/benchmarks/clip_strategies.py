"""When to clip, and at which threshold: fixed, only in or after the warmup, rolling, AutoClip and ZClip (F4.Q1, F4.Q2).

    python tests/benchmarks/clip_strategies.py                 # every case, three seeds: about two minutes
    python tests/benchmarks/clip_strategies.py outlier --seeds 5

The trainer clips at one threshold for a whole run. What changes it from step to step is an optimizer of the user's own
here, which shortens the gradient right before its step; the trainer is not touched, and its norms are the unclipped ones.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from workbench.config import TrainConfig
from workbench.curves.clipping import choose_threshold
from workbench.curves.instability import classify_curve
from workbench.record.read import TrialRecord
from workbench.schedules import prepend_warmup
from workbench.train.trainer import Trainer
from workbench.workloads.analytic import valley
from workbench.workloads.base import Workload
from workbench.workloads.sklearn_data import digits_mlp
from workbench.workloads.sklearn_data import mlp as build_model
from workbench.workloads.source_text import source_text

STEPS, WARMUP = 600, 60
Rule = Callable[[int, list[float]], float]
"""(step, unclipped norms so far, this one included) -> the length that this gradient is shortened to."""


def fixed(limit: float, *, first: int = 0, end: float = math.inf) -> Rule:
    """One threshold, in some of the steps."""
    return lambda step, norms: limit if first <= step < end else math.inf


def rolling(percentile: float = 90.0, window: int = 100, least: int = 20) -> Rule:
    """A percentile of the last norms."""
    return lambda step, norms: math.inf if step < least else float(np.percentile(norms[-window - 1 : -1], percentile))


def autoclip(percentile: float = 10.0) -> Rule:
    """A percentile of all norms so far (Seetharaman et al. 2020, arXiv 2007.14469)."""
    return lambda step, norms: float(np.percentile(norms, percentile))


class ZClip:
    """Shortens outliers of a moving mean and deviation (Kumar et al. 2025, arXiv 2504.02507)."""

    def __init__(self, alpha: float = 0.97, z: float = 2.5, warm: int = 25) -> None:
        self.alpha, self.z, self.warm, self.mean, self.variance = alpha, z, warm, math.nan, math.nan

    def __call__(self, step: int, norms: list[float]) -> float:
        norm = norms[-1]
        if step < self.warm:
            self.mean, self.variance = float(np.mean(norms)), float(np.var(norms))
            return math.inf
        deviation = math.sqrt(self.variance) + 1e-12
        z = (norm - self.mean) / deviation
        limit = self.mean + self.z**2 / z * deviation if z > self.z else math.inf
        kept = min(norm, limit)
        self.variance = self.alpha * self.variance + (1 - self.alpha) * (kept - self.mean) ** 2
        self.mean = self.alpha * self.mean + (1 - self.alpha) * kept
        return limit


class Arm(NamedTuple):
    """One way to train: which rule, and with a warmup in front or not."""

    name: str
    rule: Callable[[float], Rule | None]
    warmup: bool = False


ARMS = (
    Arm("no clipping", lambda limit: None),
    Arm("warmup", lambda limit: None, warmup=True),
    Arm("fixed 90th", fixed),
    Arm("fixed 90th + warmup", fixed, warmup=True),
    Arm("only in warmup", lambda limit: fixed(limit, end=WARMUP), warmup=True),
    Arm("only after warmup", lambda limit: fixed(limit, first=WARMUP), warmup=True),
    Arm("rolling 90th", lambda limit: rolling()),
    Arm("AutoClip 10th", lambda limit: autoclip()),
    Arm("AutoClip 90th", lambda limit: autoclip(90.0)),
    Arm("ZClip", lambda limit: ZClip()),
)


class Case(NamedTuple):
    """A workload, a stable lr that the norms come from, and the lr to train at."""

    workload: Workload
    stable_lr: float
    lr: float


class Outlier(nn.Module):
    """A model that in one training step sees its batch against the labels of others, and `factor` times as strongly."""

    seen: Tensor

    def __init__(self, at: int, factor: float) -> None:
        super().__init__()
        self.model, self.at, self.factor = build_model(), at, factor
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        wrong = self.factor * self.model(x.flip(0))
        out: Tensor = torch.where(self.seen == self.at + 1, wrong, self.model(x))
        return out


def badly_initialised() -> nn.Module:
    """Weights and biases ten times too large."""
    model = build_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10.0)
    return model


def cases() -> dict[str, Case]:
    mlp = digits_mlp()
    mlp = mlp.replace(config=mlp.config.replace(total_steps=STEPS))
    return {
        "healthy": Case(mlp, 0.05, 0.05),
        "unstable": Case(mlp, 0.05, 0.4),
        "outlier": Case(mlp.replace(build_model=lambda: Outlier(300, 1000.0)), 0.05, 0.05),
        "bad_init": Case(mlp.replace(build_model=badly_initialised), 0.001, 0.05),
        "valley": Case(valley(total_steps=STEPS), 0.005, 0.1),
        "transformer": Case(source_text(layers=2, total_steps=STEPS), 0.002, 0.016),
        "post_norm": Case(source_text(layers=4, norm="after_add", total_steps=STEPS), 0.0005, 0.002),
    }


def train(case: Case, arm: Arm, limit: float, seed: int, out: Path) -> tuple[TrialRecord, list[bool]]:
    """Train one arm, and say which steps were clipped."""
    hits: list[bool] = []

    def factory(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        optimizer = _optimizer(case.workload.config, parameters, lr)
        rule, norms = arm.rule(limit), list[float]()

        def clip(*_: Any) -> None:
            norm = math.sqrt(sum(float(p.grad.square().sum()) for p in parameters if p.grad is not None))
            norms.append(norm)
            length = math.inf if rule is None or not math.isfinite(norm) else rule(len(norms) - 1, norms)
            hits.append(norm > length)
            if norm > length:
                for p in parameters:
                    assert p.grad is not None
                    p.grad.mul_(length / norm)

        optimizer.register_step_pre_hook(clip)
        return optimizer

    config = case.workload.config.replace(optimizer=factory, peak_lr=case.lr, shared_seed=seed, per_host_seed=seed)
    config = prepend_warmup(config, WARMUP) if arm.warmup else config
    return _run(case, config, out), hits


def _run(case: Case, config: TrainConfig, out: Path) -> TrialRecord:
    config = config.replace(eval_every_steps=config.total_steps, checkpoint_every_steps=config.total_steps)
    return Trainer(device="cpu", gradients="loop").run(case.workload, config, out=out)


def _optimizer(config: TrainConfig, parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    if config.optimizer == "adam":
        return torch.optim.Adam(parameters, lr=lr)
    return torch.optim.SGD(parameters, lr=lr, momentum=0.0 if config.optimizer == "sgd" else config.momentum)


def reference(case: Case, seed: int, out: Path) -> float:
    """Return the 90th percentile of the norms at the stable lr."""
    record = _run(case, case.workload.config.replace(peak_lr=case.stable_lr, shared_seed=seed, per_host_seed=seed), out)
    found = choose_threshold(record.steps["grad_norm"].to_numpy()).threshold
    assert found is not None
    return found


def rows(name: str, seeds: int) -> Iterator[str]:
    """One line a way to train: end losses, verdicts and clipped shares over the seeds."""
    case = cases()[name]
    with tempfile.TemporaryDirectory() as folder:
        limits = [reference(case, seed, Path(folder) / f"reference-{seed}") for seed in range(seeds)]
        yield f"{name}: lr {case.lr:g}, norms at {case.stable_lr:g}, 90th percentile {', '.join(f'{v:.3g}' for v in limits)}"
        curves = [
            [train(case, arm, limit, seed, Path(folder) / f"{number}-{seed}") for seed, limit in enumerate(limits)]
            for number, arm in enumerate(ARMS)
        ]
        best = min(end for runs in curves for record, _ in runs if math.isfinite(end := _end(record)))
        for arm, runs in zip(ARMS, curves, strict=True):
            ends = sorted(_end(record) for record, _ in runs)
            spread = f"{statistics.median(ends):.3g} ({ends[0]:.3g} to {ends[-1]:.3g})"
            clipped, early = (np.mean([np.mean(hits[:upto]) for _, hits in runs]) for upto in (None, WARMUP))
            verdicts = ", ".join(_outcome(record, best) for record, _ in runs)
            yield f"  {arm.name:<20} {spread:<28} {clipped:>5.0%} {early:>5.0%}  {verdicts}"


def _outcome(record: TrialRecord, best: float) -> str:
    loss, loss_se = record.steps["loss"].to_numpy(), record.steps["loss_se"].to_numpy()
    verdict = classify_curve(loss, loss_se=loss_se, memory=0.9, study_progress=loss[0] - best, study_best_end=best)
    return "high" if verdict.high and verdict.outcome == "none" else verdict.outcome


def _end(record: TrialRecord) -> float:
    loss = record.steps["loss"].to_numpy()
    return float(np.mean(loss[-STEPS // 10 :])) if np.isfinite(loss).all() else math.inf


def main() -> None:
    """Print a table for each case: end loss over the seeds, share clipped in all and in the first tenth, verdicts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="*", default=[], help=f"of {', '.join(cases())}; all without one")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.case or cases():
        for line in rows(name, arguments.seeds):
            print(line, flush=True)


if __name__ == "__main__":
    main()
