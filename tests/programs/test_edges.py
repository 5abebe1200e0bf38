"""`lr.unstable` of functions on a quadratic, whose lr is changed at the optimizer's boundary, against each rule's exact stability limit."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb

pytestmark = pytest.mark.usefixtures("no_figures")
BETA, FROZEN = 0.9, 1e3
"""Memory of the rules; an eps far above every gradient, so that the preconditioner is 1 / eps throughout."""
TOP = 1.0
"""Largest curvature."""
DECAY = 1e-5
ADAM = {"betas": (BETA, 0.5), "eps": FROZEN}
LIMITS: dict[str, tuple[Any, float, int]] = {
    "sgd, coupled decay": (functools.partial(torch.optim.SGD, weight_decay=0.1), 2 / (TOP + 0.1), 100),
    "momentum": (functools.partial(torch.optim.SGD, momentum=BETA), 2 * (1 + BETA) / TOP, 100),
    "nesterov": (functools.partial(torch.optim.SGD, momentum=BETA, nesterov=True), 2 * (1 + BETA) / (1 + 2 * BETA) / TOP, 100),
    "rmsprop": (functools.partial(torch.optim.RMSprop, alpha=0.5, eps=FROZEN), 2 * FROZEN / TOP, 100),
    "rmsprop, momentum": (functools.partial(torch.optim.RMSprop, alpha=0.5, eps=FROZEN, momentum=BETA), 2 * (1 + BETA) * FROZEN / TOP, 100),
    "adam": (functools.partial(torch.optim.Adam, **ADAM), 2 * (1 + BETA) / (1 - BETA) * FROZEN / TOP, 300),
    "adamw": (functools.partial(torch.optim.AdamW, weight_decay=DECAY, **ADAM), 2 / ((1 - BETA) / (1 + BETA) * TOP / FROZEN + DECAY), 300),
}  # fmt: skip
"""Rule, largest stable lr (Cohen et al. 2021, 2022; decoupled decay from the Jury conditions), updates, a third of which warm Adam's averages up.

Adagrad is left out: beyond the limit of its first steps it recovers by itself, as every excursion shortens all steps that follow.
"""


class Bowl(torch.nn.Module):
    """Takes the curvatures as its batch, which is the same at every update."""

    def __init__(self) -> None:
        super().__init__()
        self.place = torch.nn.Parameter(torch.tensor([1.0, -1.0, 1.0]))

    def forward(self, curvatures: torch.Tensor) -> torch.Tensor:
        return 0.5 * (curvatures * self.place**2).sum()


def quadratic(run: Any, *, rule: Any, lr: float, updates: int) -> None:
    curvature = torch.tensor([TOP, 0.3, 0.01])
    model = Bowl()
    optimizer = rule(model.parameters(), lr=lr)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: min(1.0, (k + 1) / 100) if updates > 100 else 1.0)
    for _ in range(updates):
        optimizer.zero_grad()
        model(curvature).backward()
        optimizer.step()
        warmup.step()


@pytest.mark.slow
@pytest.mark.parametrize("name", LIMITS)
def test_the_unstable_lr_is_the_exact_limit_of_the_rule(name: str, tmp_path: Path) -> None:
    rule, limit, updates = LIMITS[name]
    train = functools.partial(quadratic, rule=rule, lr=0.13 * limit, updates=updates)
    diagnosis = wb.diagnose_function(train, tmp_path / "study", seeds=1, budget="none")
    assert wb.open(tmp_path / "study").facts["full_batch"]
    assert diagnosis["lr.unstable"].value == pytest.approx(limit, rel=0.05)
