"""`collect_one_batch`: the facts for `diagnose_one_batch`, and whether the model can fit one batch at any learning rate."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from workbench.config import TrainConfig
from workbench.errors import WorkloadError
from workbench.record.metrics import larger_is_better
from workbench.topics.one_batch.batch import OneBatch, first_batch
from workbench.topics.one_batch.losses import find_loss
from workbench.topics.one_batch.probes import (
    find_answer,
    find_coupling,
    find_layers,
    find_modes,
    find_spread,
    find_unused,
)
from workbench.train.gradients import LoopGradients, needs_gradient
from workbench.train.optimizers import make_updater
from workbench.train.rng import isolated_rng, seed_all
from workbench.workloads.base import Workload

FACTORS = (1.0, 10.0, 0.1, 100.0, 0.01, 1000.0)  # of the person's own lr, in the order in which they are tried
ADAM_LRS = (1e-3, 1e-2)  # tried last: Adam's step does not depend on the scale of the gradient (rule of thumb)
EXAMPLES, STEPS, EVERY, SHIFTS = 32, 60, 10, 8
SOME = 0.05  # progress that ends the search (rule of thumb: chance gives less than 0.01)
ENOUGH = 0.8  # progress that ends a run: by then a metric has to show it (rule of thumb)


def collect_one_batch(
    workload: Workload, config: TrainConfig, device: torch.device, *, seconds: float = 60.0
) -> dict[str, Any]:
    """Return JSON facts about one batch; the caller's random state is left bit for bit as it was."""
    needs_gradient(workload)
    stages: list[dict[str, Callable[[OneBatch], Any]]] = [
        {"loss": find_loss, "layers": find_layers, "spread": find_spread},
        {"fit": lambda one: _fit(one, config)},
        {
            "answer": find_answer, "modes": find_modes, "coupling": find_coupling, "fitted": find_layers, "fitted_spread": find_spread,
            "unused": find_unused,
        },
    ]  # fmt: skip
    with isolated_rng():
        one = first_batch(workload, config.replace(bn_stat_examples=None), device)
        found: dict[str, Any] = {"examples": one.examples}
        for parts in stages:
            timed = replace(one, until=time.thread_time() + seconds / len(stages))
            for name, find in parts.items():
                try:
                    timed.check_time()
                    found[name] = find(timed)
                except Exception as error:  # the person's own code, on batches that were made for this
                    line = (str(error).splitlines() or ["no message"])[0]
                    found[name] = {"reason": f"{type(error).__name__}: {line[:200]}"}
        return found


def _fit(one: OneBatch, config: TrainConfig) -> dict[str, Any]:
    """Return how far the model fits a few examples of its batch, and leave in it the weights that came furthest.

    Returns:
        "examples", "parameters", "informative" (whether a gap can be seen: not where all targets are alike, or none is read), "runs" in the
        order in which they were made, "cut_short" (time ran out), "larger_is_better" (metrics), and "without_gradient"
        (parameters that never got one).
    """
    stack = one.stack
    count = min(EXAMPLES, one.examples, stack.values.numel())
    few = one.rows(torch.arange(count)) if one.exchangeable and count < one.examples else one
    ladder = [config.replace(peak_lr=config.peak_lr * factor) for factor in FACTORS]
    ladder += [config.replace(optimizer="adam", weight_decay=0.0, peak_lr=lr) for lr in ADAM_LRS]
    tensors = [stack.values, *one.model.buffers()]
    start = best = [t.clone() for t in tensors]
    informative = _pairs_matter(few)
    runs: list[dict[str, Any]] = []
    moved = torch.zeros(len(stack.slices), dtype=torch.bool)
    furthest = -math.inf
    for each in ladder:
        _set(tensors, start)
        runs.append(_train_on_batch(few, each, moved))
        progress = runs[-1]["progress"] = _progress(runs[-1], informative=informative)
        if progress > furthest:
            furthest, best = progress, [t.clone() for t in tensors]
        if progress >= SOME or one.late:
            break
    _set(tensors, best)
    return {
        "examples": few.examples, "parameters": stack.values.numel(), "informative": informative, "runs": runs,
        "cut_short": len(runs) < len(ladder) and furthest < SOME,
        "larger_is_better": list(filter(larger_is_better, one.workload.metrics)),
        "without_gradient": [name for name, seen in zip(stack.names, moved.tolist(), strict=True) if not seen],
    }  # fmt: skip


def _set(tensors: list[Tensor], values: list[Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


def _train_on_batch(one: OneBatch, config: TrainConfig, moved: Tensor) -> dict[str, Any]:
    """Train on the batch at a constant lr; `moved` remembers which parameters ever got a gradient."""
    stack = one.stack
    updater = make_updater([config], stack.values, stack.parameters, stack.models)
    gradients = LoopGradients(one.workload, stack)
    lr = torch.full((1, 1), config.peak_lr, dtype=stack.values.dtype, device=stack.device)
    rule = config.to_dict()["optimizer"]
    found: dict[str, Any] = {"lr": config.peak_lr, "optimizer": rule, "steps": 0, "descent": None}
    looks = [_look(one)]
    seed_all(config.shared_seed, config.per_host_seed)
    for step in range(STEPS):
        one.model.train()
        try:
            gradients([[(one.batch, one.examples)]])
            moved |= torch.stack([stack.grad[0, where].any() for where in stack.slices]).cpu()
            update = updater.update(stack.values, stack.grad, lr, step, [config.peak_lr])
            if step == 0:
                found["descent"] = float((update * stack.grad).sum())
            stack.values.sub_(update)
            found["steps"] = step + 1
            if found["steps"] % EVERY:
                continue
            looks.append(_look(one))
        except (RuntimeError, ValueError, WorkloadError):  # what a loss may say to outputs that are not finite
            if step == 0:
                raise
            looks.append((math.nan, 0.0, looks[-1][2]))
        if not math.isfinite(looks[-1][0]) or looks[-1][1] >= ENOUGH or one.late:
            break
    return found | dict(zip(("loss", "gap", "metrics"), map(list, zip(*looks, strict=True)), strict=True))


def _look(one: OneBatch) -> tuple[float, float, dict[str, float]]:
    """Return loss, gap and metrics of the batch, in training mode."""
    outputs = one.forward(train=True)
    weights = None if one.workload.weights is None else one.workload.weights(one.batch).double()

    def mean(values: Tensor) -> float:
        return float(values.mean() if weights is None else (weights * values).sum() / weights.sum())

    own = mean(one.losses(outputs))
    others = [mean(one.losses(one.rolled(outputs, shift))) for shift in range(1, min(one.examples, SHIFTS + 1))]
    other = sum(others) / len(others) if others else own
    with torch.no_grad():
        metrics = {name: mean(f(outputs, one.batch).double()) for name, f in one.workload.metrics.items()}
    gap = (other - own) / max(abs(other), abs(own), 1e-30) if math.isfinite(own) and math.isfinite(other) else 0.0
    return own, gap, metrics


def _pairs_matter(one: OneBatch) -> bool:
    """Whether the loss tells apart which outputs belong to which example: not where all targets are one, or none is read."""
    outputs = one.forward(train=True)
    if not one.tensors(outputs):
        return False
    noisy = one.unlike(outputs)
    there, apart = one.losses(noisy), one.losses(one.rolled(noisy, 1))
    return one.examples > 1 and bool(((there.roll(1) - apart).abs() > 1e-6 * (1 + there.abs().max())).any())


def _progress(run: dict[str, Any], *, informative: bool) -> float:
    """Return by how much the gap grew, or by how much of itself the loss fell where a gap says nothing; 0 for a run that diverged."""
    (first, *_, last), gaps = run["loss"], run["gap"]
    if not math.isfinite(last) or last > first + SOME * abs(first):  # a loss that blew up depends on everything
        return 0.0
    if informative:
        return float(gaps[-1] - (gaps[0] if abs(gaps[0]) < SOME else 0.0))
    return float((first - last) / max(abs(first), 1e-30))
