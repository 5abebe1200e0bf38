"""The study of update rules end to end: edges of a quadratic, fresh seeds, forms, memories and decay by training them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import workbench as wb
from workbench.studies.session import open_session
from workbench.topics.optimizers.rule_ranges import read_ranges
from workbench.workloads.analytic import quadratic

EDGE = {"sgd": 2.0, "momentum": 3.8, "nesterov": 3.8 / 2.8, "adam": 38.0, "adamw": 38.0}
"""Largest stable lr * curvature (Cohen et al. 2021, 2022), momentum and beta1 0.9; adam's with a frozen preconditioner."""


def run(
    workload: wb.Workload, out: Path, trainer: wb.Trainer | None = None, **settings: Any
) -> tuple[wb.Diagnosis, wb.StudyRecord]:
    config = workload.config.replace(eval_every_steps=workload.config.total_steps)
    record = wb.optimizers.Study(**settings).run(
        workload.replace(config=config), trainer or wb.Trainer(device="cpu"), out=out
    )
    return wb.optimizers.diagnose(record), record


def count(record: wb.StudyRecord, **fields: Any) -> int:
    rows = record.trials
    for name, value in fields.items():
        rows = rows[rows[name] == value]
    return len(rows)


def test_the_edges_of_a_quadratic_side_by_side(tmp_path: Path) -> None:
    workload = quadratic(dimension=10, condition=10.0, optimizer="momentum", total_steps=100)
    sweep = wb.lr_sweep.Study(tolerance=0.1, refinements=0, full_batch_refinements=0)
    _, record = run(workload, tmp_path / "s", optimizers=("sgd", "nesterov"), seeds=1, sweep=sweep)
    ranges = read_ranges(record)
    assert list(ranges) == ["momentum", "sgd", "nesterov"], "the baseline's rule first, asked for or not"
    for name, found in ranges.items():
        assert found.stable is not None
        assert found.unstable is not None
        assert found.stable <= EDGE[name] <= found.unstable <= 1.11 * found.stable
        assert found.trains_from is not None
        assert found.fails_below is not None
        assert found.trains_from <= 2.0 * found.fails_below * (1 + 1e-9)
    own = wb.lr_sweep.diagnose(record)["lr.unstable"]
    assert own.value == pytest.approx(3.8, rel=0.1), "the baseline's rule is a sweep that the other diagnoses read"


def test_the_best_other_rule_meets_the_baselines_under_fresh_seeds(tmp_path: Path) -> None:
    """Momentum beats gradient descent on an ill-conditioned quadratic from every start."""
    workload = quadratic(condition=1000.0, total_steps=60)
    lrs = {"sgd": (0.5, 1.0), "momentum": (0.1, 0.5)}
    diagnosis, record = run(workload, tmp_path / "s", optimizers=("sgd", "momentum"), lrs=lrs, seeds=3)
    finding = diagnosis["optimizers.better"]
    assert finding.status == "warn"
    assert finding.evidence["change"]["optimizer"] == "momentum"
    assert finding.evidence["contest"]["fresh_seeds"] == 2
    for name in lrs:
        seeds = record.trials["seed"][(record.trials["optimizer"] == name) & (record.trials["seed"] > 0)]
        assert sorted(seeds) == [1, 2]
    swapped = workload.replace(config=workload.config.replace(optimizer="momentum", peak_lr=0.1))
    diagnosis, record = run(swapped, tmp_path / "t", optimizers=("sgd", "momentum"), lrs=lrs, seeds=3)
    assert diagnosis["optimizers.better"].status == "ok"
    assert count(record, seed=1) == 0, "nothing looks better, so nothing is to be proved"


class Pulled(nn.Module):
    """1/2 |x|^2 + 1/2 y^2 + 1000 y in training step `at` alone: one large gradient for a parameter at rest; a buffer counts."""

    seen: Tensor

    def __init__(self, at: int) -> None:
        super().__init__()
        self.x, self.y, self.at = nn.Parameter(torch.ones(20).double()), nn.Parameter(torch.zeros(1).double()), at
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, batch: Tensor) -> Tensor:
        pull = 1000.0 * (self.seen == self.at).double() * self.y.sum()
        if self.training:
            self.seen += 1
        loss: Tensor = 0.5 * self.x.square().sum() + 0.5 * self.y.square().sum() + pull
        return loss.expand(len(batch))


def pulled(at: int, lr: float) -> wb.Workload:
    workload = quadratic(optimizer="adam", peak_lr=lr, total_steps=600)
    config = workload.config.replace(beta2=0.99)
    return workload.replace(build_model=lambda: Pulled(at), loss=lambda outputs, batch: outputs, config=config)


def thrown(beta2: float) -> float:
    """How far a single gradient throws a parameter at rest, in units of lr: the sum of Adam's steps after it."""
    k = np.arange(400)
    return float(np.sum(0.1 * 0.9**k / np.sqrt((1 - beta2) * beta2**k)))


def test_a_second_moment_out_of_date_is_told_from_an_unstable_lr(tmp_path: Path) -> None:
    """A parameter without a gradient for 300 steps is thrown 10.5 lr away by one, and 6.2 lr with a tenth of the memory."""
    assert (thrown(0.99), thrown(0.9)) == pytest.approx((10.5, 6.2), abs=0.1)
    lr, limit = 0.4, 0.5 * 10.0
    risen = 0.5 * (0.9 * thrown(0.99) * lr) ** 2  # a part is made up for on the way
    assert 0.5 * (thrown(0.9) * lr) ** 2 < limit < risen, "a rise with the long memory only, of half of the 10 learned"
    lrs = (lr / 4, lr)
    diagnosis, record = run(pulled(300, lr), tmp_path / "s", optimizers=("adam",), lrs=lrs, seeds=1)
    finding = diagnosis["optimizers.stale_second_moment"]
    assert finding.status == "warn"
    assert finding.step == 300
    assert "beta2 0.9 instead of 0.99" in finding.summary
    (hit,) = finding.evidence["hits"]
    assert hit["lr"] == lr
    assert hit["ratio"] == pytest.approx(1 / math.sqrt(1 - 0.99), rel=0.05)
    assert count(record, beta2=0.9) == 1
    healthy, record = run(pulled(10_000, lr), tmp_path / "t", optimizers=("adam",), lrs=lrs, seeds=1)
    assert healthy["optimizers.stale_second_moment"].status == "ok"
    assert count(record, beta2=0.9) == 0


class Apart(nn.Module):
    """1/2 |theta - 1|^2: weight decay w moves the minimum to 1 / (1 + w)."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(4, dtype=torch.float64))

    def forward(self, batch: Tensor) -> Tensor:
        loss: Tensor = 0.5 * (self.theta - 1).square().sum()
        return loss.expand(len(batch))


@pytest.mark.parametrize(("decay", "status"), [(3.0, "warn"), (0.1, "ok")])
def test_weight_decay_shrinks_by_what_the_formula_says(tmp_path: Path, decay: float, status: str) -> None:
    workload = quadratic(optimizer="sgd", peak_lr=0.1, total_steps=200).replace(build_model=Apart)
    workload = workload.replace(loss=lambda outputs, batch: outputs, config=workload.config.replace(weight_decay=decay))
    diagnosis, record = run(workload, tmp_path / "s", optimizers=("sgd",), lrs=(0.02, 0.1), seeds=1)
    finding = diagnosis["optimizers.weight_decay_shrinks"]
    assert finding.status == status
    assert finding.value == pytest.approx(1 / (1 + decay), rel=0.02)
    assert record.facts["optimizers"]["forms"] == {}
    pair = finding.evidence["pairs"][0]
    assert pair["accumulated_decay"] == pytest.approx(200 * pair["lr"] * decay)
    if status == "warn":
        assert pair["selected_gain"] == pytest.approx(0.5 * 4 * (decay / (1 + decay)) ** 2, rel=0.05)


def test_the_trainer_of_a_session_is_given_back(tmp_path: Path) -> None:
    workload = quadratic(total_steps=40)
    workload = workload.replace(config=workload.config.replace(weight_decay=0.1))
    with open_session(workload, stem="walk", settings={}, out=tmp_path / "s") as session:
        before = session.trainer
        wb.optimizers.Study(optimizers=("sgd",), lrs=(0.1,), seeds=1).extend(session)
        assert session.trainer is before
        assert session.record.steps["param_norm"].notna().any()
