"""Logs of a small training in somebody else's loop, healthy or with a planted fault: a frame as `pd.read_csv` would give it."""

from __future__ import annotations

import math
from collections.abc import Callable

import pandas as pd
import torch
from torch import nn

Schedule = Callable[[float], float]


def cosine(p: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * p))


def warmup_cosine(p: float) -> float:
    return p / 0.05 if p < 0.05 else cosine((p - 0.05) / 0.95)


def one_cycle(p: float) -> float:
    return 0.04 + 0.96 * p / 0.3 if p < 0.3 else cosine((p - 0.3) / 0.7)


def train(
    *,
    lr: float = 0.05,
    steps: int = 1000,
    every: int = 1,
    schedule: Schedule = lambda _: 1.0,
    seed: int = 0,
    rule: str = "momentum",
    batch: int = 32,
    examples: int = 2048,
    random_labels: bool = False,
    regression: bool = False,
    bad_batches: tuple[int, int] | None = None,
    detached: bool = False,
    norms: bool = True,
    evaluate: int | None = 50,
    width: int = 32,
) -> pd.DataFrame:
    """Columns step, loss, lr, grad_norm and val_loss; a row every so many steps, and the one of an evaluation.

    Args:
        schedule: factor of the lr by progress.
        bad_batches: first and last step whose inputs come a hundred times too large.
        detached: the optimizer has other parameters than the model.
    """
    draw = torch.Generator().manual_seed(seed)
    teacher = torch.randn(20, 10, generator=draw)

    def sample(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(count, 20, generator=draw)
        scores = x @ teacher + 2.0 * torch.randn(count, 10, generator=draw)
        if regression:
            return x, scores[:, :1]
        return x, torch.randint(10, (count,), generator=draw) if random_labels else scores.argmax(1)

    (x, y), (held_x, held_y) = sample(examples), sample(512)
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(20, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1 if regression else 10)
    )
    cost = nn.functional.mse_loss if regression else nn.functional.cross_entropy
    parameters = (
        [p.detach().clone().requires_grad_() for p in model.parameters()] if detached else list(model.parameters())
    )
    rules = {
        "momentum": lambda: torch.optim.SGD(parameters, lr, momentum=0.9),
        "adam": lambda: torch.optim.Adam(parameters, lr),
    }
    optimizer = rules[rule]()
    rows = []
    for step in range(steps):
        chosen = torch.randint(examples, (batch,), generator=draw)
        scale = 100.0 if bad_batches and bad_batches[0] <= step <= bad_batches[1] else 1.0
        for group in optimizer.param_groups:
            group["lr"] = lr * schedule(step / steps)
        loss = cost(model(scale * x[chosen]), y[chosen])
        optimizer.zero_grad()
        model.zero_grad()
        loss.backward()
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        row = {"step": step}
        if step % every == 0:
            row |= {"loss": loss.item(), "lr": optimizer.param_groups[0]["lr"]} | (
                {"grad_norm": norm.item()} if norms else {}
            )
        if evaluate and step % evaluate == 0:
            with torch.no_grad():
                row["val_loss"] = cost(model(held_x), held_y).item()
        optimizer.step()
        if len(row) > 1:
            rows.append(row)
    return pd.DataFrame(rows)


def resumed(frame: pd.DataFrame, *, at: int, back: int) -> pd.DataFrame:
    """The log of the same run, stopped at one step and gone on from an earlier one: the steps between stand there twice."""
    return pd.concat([frame[frame["step"] < at], frame[frame["step"] >= back]], ignore_index=True)
