"""Training in plain PyTorch, written without the package's trainer: what a person's own loop would give."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from workbench import TrainConfig, Workload

OWN = {
    "sgd": lambda p, lr, c: torch.optim.SGD(p, lr=lr, weight_decay=c.weight_decay),
    "momentum": lambda p, lr, c: torch.optim.SGD(p, lr=lr, momentum=c.momentum, weight_decay=c.weight_decay),
    "nesterov": lambda p, lr, c: torch.optim.SGD(p, lr=lr, momentum=c.momentum, nesterov=True, weight_decay=c.weight_decay),
    "rmsprop": lambda p, lr, c: torch.optim.RMSprop(p, lr=lr, alpha=c.rho, eps=c.eps, momentum=c.momentum, weight_decay=c.weight_decay),
    "adam": lambda p, lr, c: torch.optim.Adam(p, lr=lr, betas=(c.beta1, c.beta2), eps=c.eps, weight_decay=c.weight_decay),
    "nadam": lambda p, lr, c: torch.optim.NAdam(p, lr=lr, betas=(c.beta1, c.beta2), eps=c.eps, weight_decay=c.weight_decay),
    "adamw": lambda p, lr, c: torch.optim.AdamW(p, lr=lr, betas=(c.beta1, c.beta2), eps=c.eps, weight_decay=c.weight_decay),
}  # fmt: skip


def factor(config: TrainConfig, step: int) -> float:
    """Return the share of the peak lr that a step uses."""
    if step < config.warmup_steps:
        return step / config.warmup_steps
    progress = (step - config.warmup_steps) / (config.total_steps - config.warmup_steps)
    if callable(config.schedule):
        return float(config.schedule(progress))
    return {"constant": 1.0, "linear": 1 - progress, "cosine": 0.5 + 0.5 * math.cos(math.pi * progress)}[
        config.schedule
    ]


def train(workload: Workload, config: TrainConfig, seed: int, *, evaluations: int = 10) -> Mapping[str, Any]:
    """Train once.

    Returns:
        "loss": training loss of each step; "norm": of the gradient; "validation": loss at each evaluation; the same of every
        metric; "best": the lowest finite validation loss, inf where there is none.
    """
    torch.manual_seed(seed)
    model = workload.build_model()
    trained = list(model.parameters())
    make = config.optimizer if callable(config.optimizer) else OWN[config.optimizer]
    optimizer = make(trained, config.peak_lr) if callable(config.optimizer) else make(trained, config.peak_lr, config)
    stream = isinstance(workload.train_data, IterableDataset)
    loader = DataLoader(
        workload.train_data, config.batch_size, shuffle=not stream, drop_last=True, collate_fn=workload.collate
    )
    batches = iter(loader)
    told: dict[str, list[float]] = {name: [] for name in ("loss", "norm", "validation", *workload.metrics)}
    every = max(1, config.total_steps // evaluations)
    for step in range(config.total_steps):
        if step % every == 0:
            _evaluate(workload, model, config, told)
        try:
            batch = next(batches)
        except StopIteration:
            batches = iter(loader)
            batch = next(batches)
        for group in optimizer.param_groups:
            group["lr"] = config.peak_lr * factor(config, step)
        model.train()
        loss = _mean(workload, workload.loss(workload.forward(model, batch), batch), batch)
        optimizer.zero_grad()
        if loss.requires_grad:
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, config.max_grad_norm or math.inf)
        optimizer.step()
        told["loss"].append(float(loss.detach()))
        told["norm"].append(float(norm))
    _evaluate(workload, model, config, told)
    finite = [v for v in told["validation"] if math.isfinite(v)]
    return {**told, "best": min(finite) if finite else math.inf, "model": model}


def _mean(workload: Workload, values: torch.Tensor, batch: Any) -> torch.Tensor:
    weights = torch.ones_like(values) if workload.weights is None else workload.weights(batch)
    return (weights * values).sum() / weights.sum()


@torch.no_grad()
def _evaluate(workload: Workload, model: torch.nn.Module, config: TrainConfig, told: dict[str, list[float]]) -> None:
    model.eval()
    loader = DataLoader(workload.validation_data, config.eval_batch_size or 256, collate_fn=workload.collate)
    sums: dict[str, float] = {}
    for batch in loader:
        outputs = workload.forward(model, batch)
        for name, measure in {"validation": workload.loss, **workload.metrics}.items():
            values = measure(outputs, batch)
            weights = torch.ones_like(values) if workload.weights is None else workload.weights(batch)
            sums[name] = sums.get(name, 0.0) + float((weights * values).sum())
            sums[f"{name} weight"] = sums.get(f"{name} weight", 0.0) + float(weights.sum())
    for name in ("validation", *workload.metrics):
        told[name].append(sums[name] / sums[f"{name} weight"])
