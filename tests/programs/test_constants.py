"""A constant of a program's optimizer that keeps it from learning: found by a run with the usual one in its place."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import workbench as wb
from workbench.programs.function import FunctionRun, run_function

NOTHING: dict[str, Any] = {"factor": 1.0, "warmup_steps": 0, "max_grad_norm": None, "stop_after": None, "seed": 0}


def decayed(run: FunctionRun, *, rule: type[torch.optim.Optimizer], **constants: Any) -> None:
    """Fits a plane; what keeps it from that is the rule's constants alone."""
    torch.manual_seed(0)
    net, draw = nn.Linear(8, 1), torch.Generator().manual_seed(1)
    optimizer = rule(net.parameters(), **constants)
    for _ in range(120):
        x = torch.randn(32, 8, generator=draw)
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x)[:, 0], x.sum(1) + 0.1 * torch.randn(32, generator=draw)).backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("constants", "code", "usual"),
    [
        ({"rule": torch.optim.Adam, "lr": 0.03, "weight_decay": 300.0}, "optimizers.weight_decay_shrinks", 0.0),
        ({"rule": torch.optim.SGD, "lr": 0.05, "momentum": 0.9995}, "optimizers.constants", 0.9),
        ({"rule": torch.optim.AdamW, "lr": 0.03, "weight_decay": 0.1}, None, None),
    ],
)
def test_a_constant_that_keeps_training_from_learning_is_found_by_a_run_without_it(
    constants: dict[str, Any], code: str | None, usual: float | None, tmp_path: Path
) -> None:
    diagnosis = wb.diagnose_function(partial(decayed, **constants), out=tmp_path / "study", seeds=1)
    found = {f.code for f in diagnosis if f.code.startswith("optimizers.") and f.status in ("warn", "fail")}
    assert found == ({code} - {None})
    if code is not None:
        assert diagnosis.findings[0].code == code, diagnosis
        assert len(wb.open(tmp_path / "study").trials) == 2
        assert diagnosis[code].evidence["replaced"][0]["usual"] == usual


def test_a_replaced_constant_is_what_the_function_would_have_set_itself() -> None:
    runs = [
        run_function(partial(decayed, rule=torch.optim.AdamW, lr=0.1, **own), NOTHING | {"constants": given})
        for own, given in (({"weight_decay": 0.5, "betas": (0.8, 0.9)}, {"weight_decay": 0.0, "betas": [0.9, 0.99]}),
                           ({"weight_decay": 0.0, "betas": (0.9, 0.99)}, {}))
    ]  # fmt: skip
    assert runs[0].columns["loss"] == runs[1].columns["loss"]
