"""A constant of a program's optimizer that keeps it from learning: found by a run with the usual one in its place."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
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


def clipped(run: FunctionRun, *, limit: float) -> None:
    """Fits a plane by plain descent, where a shorter gradient is a shorter step."""
    torch.manual_seed(0)
    net, draw = nn.Linear(8, 1), torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for _ in range(120):
        x = torch.randn(32, 8, generator=draw)
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x)[:, 0], x.sum(1) + 0.1 * torch.randn(32, generator=draw)).backward()
        nn.utils.clip_grad_norm_(net.parameters(), max_norm=limit)
        optimizer.step()


def test_a_threshold_far_below_the_norms_is_named_with_its_line_and_what_to_use(tmp_path: Path) -> None:
    diagnosis = wb.diagnose_function(partial(clipped, limit=0.01), out=tmp_path / "study", seeds=1)
    record, finding = wb.open(tmp_path / "study"), diagnosis.findings[0]
    assert (finding.code, finding.status, finding.value) == ("clipping.aggressive", "fail", 1.0)
    assert len(record.trials) == 2
    alone = run_function(partial(clipped, limit=1e9), NOTHING)  # as if the line were not there
    steps = record.steps[record.steps["trial"] == 1]
    assert steps["loss"].tolist() == pytest.approx(alone.columns["loss"])
    line = next(k for k, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "clip_grad_norm_(net" in text)
    wanted = np.percentile(alone.columns["grad_norm"][12:], 90)  # of what is left after the start
    paste = diagnosis.recommendation["paste"].splitlines()
    assert (
        paste[0]
        == f"clip_grad_norm_: max_norm 0.01 -> {wanted:.3g}, or leave it out (tests/programs/test_constants.py:{line})"
    )
    assert not any(text.startswith("lr:") for text in paste)
    assert f"Lines to change:\n{paste[0]}\n" in repr(diagnosis), "the verdict refers to it"
    assert "<h2>Lines to change</h2>" in (tmp_path / "study" / "report.html").read_text()


@pytest.mark.parametrize(("limit", "most", "runs"), [(1.5, 0.31, False), (0.7, 0.8, True)])
def test_a_threshold_that_costs_nothing_is_no_alarm(limit: float, most: float, runs: bool, tmp_path: Path) -> None:
    diagnosis = wb.diagnose_function(partial(clipped, limit=limit), out=tmp_path / "study", seeds=1)
    record = wb.open(tmp_path / "study")
    norms = record.steps[record.steps["trial"] == 0]["grad_norm"]
    assert 0.28 < (norms > limit).mean() < most
    assert not [f.code for f in diagnosis if f.code.startswith("clipping.") and f.status in ("warn", "fail")]
    assert ("replaced" in set(record.trials["stage"])) == runs
