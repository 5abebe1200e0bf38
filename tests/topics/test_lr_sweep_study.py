"""The learning-rate sweep end to end: against exact edges, interrupted, in rounds, and from the scale of the model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import workbench as wb
from tests.helpers import simulated_records as simulated
from tests.helpers.workloads import small_workload
from workbench.topics.lr_sweep.collect import measure_critical_lr
from workbench.train.stacked_weights import build_model
from workbench.workloads.analytic import eigenvalues, quadratic

CPU = torch.device("cpu")
EDGE = {"sgd": 2.0, "momentum": 3.8, "nesterov": 3.8 / 2.8, "adam": 38.0, "nadam": 3.8 / (0.1 * 2.8)}
"""Largest stable lr * curvature (Cohen et al. 2021, 2022; NAdam by the Jury conditions), momentum and beta1 0.9."""


def workload_of(optimizer: Any, scale: float) -> wb.Workload:
    """The set-ups in which the edge of each rule shows within the run's own length.

    adam and nadam: eps far above every gradient, so that the preconditioner is frozen; the bias correction is over
    after 100 warmup steps, or negligible after 1,000.
    """
    workload = quadratic(optimizer=optimizer, loss_scale=scale, total_steps=300)
    if optimizer in ("sgd", "momentum", "nesterov"):
        return workload
    eps = 1e4 * scale
    changes: dict[str, Any] = {"eps": eps, "beta2": 0.5, "peak_lr": 0.01 * eps / scale}
    changes |= {"warmup_steps": 100} if optimizer == "adam" else {"rules": "playbook", "total_steps": 1000}
    return workload.replace(config=workload.config.replace(**changes))


def edge_of(workload: wb.Workload, scale: float) -> float:
    name = str(workload.config.optimizer)
    return EDGE[name] * (workload.config.eps if name in ("adam", "nadam") else 1.0) / scale


def sweep(workload: wb.Workload, out: Path, **settings: Any) -> tuple[wb.StudyRecord, wb.Diagnosis]:
    config = workload.config.replace(eval_every_steps=workload.config.total_steps)
    record = wb.lr_sweep.Study(**settings).run(workload.replace(config=config), wb.Trainer(device="cpu"), out=out)
    return record, wb.lr_sweep.diagnose(record)


@pytest.mark.parametrize(("optimizer", "scale"), [
    ("sgd", 1e4), ("adam", 1.0),
    *(pytest.param(*rule, marks=pytest.mark.slow) for rule in (("momentum", 1e-2), ("nesterov", 1.0), ("nadam", 1.0))),
])  # fmt: skip
def test_lr_unstable_and_lr_best_on_a_quadratic(tmp_path: Path, optimizer: str, scale: float) -> None:
    workload = workload_of(optimizer, scale)
    _, diagnosis = sweep(workload, tmp_path / "s")
    unstable, best = diagnosis["lr.unstable"].value, diagnosis["lr.best"].value
    assert unstable == pytest.approx(edge_of(workload, scale), rel=0.05)
    assert diagnosis["lr.unstable"].evidence["ratio"] <= 1.05 * (1 + 1e-9), "and it is bracketed to 5 %"
    assert best < unstable
    assert diagnosis["lr.grid_edge"].status == "ok"


@pytest.mark.parametrize("total_steps", [400, 2000])
def test_a_loss_without_a_minimum_is_not_followed_upwards(tmp_path: Path, total_steps: int) -> None:
    """Its depth is proportional to the lr: no lr is unstable, and the largest is always the best."""
    workload = small_workload(
        loss=lambda outputs, batch: -outputs.squeeze(-1) * batch[1], metrics={}, build_model=lambda: torch.nn.Linear(3, 1),
        config={"total_steps": total_steps, "batch_size": 16},
    )  # fmt: skip
    record = wb.lr_sweep.Study().run(workload, out=tmp_path / "s")
    assert record.trials["peak_lr"].max() < 1e4
    assert len(record.trials) < 16


LONG = 320
SHORT = wb.lr_sweep.Study(short_frac=0.0625, min_short_steps=20, refinements=0, full_batch_refinements=0)


def first_critical_lr(workload: wb.Workload) -> float:
    """The lr at which one step of gradient descent on a quadratic changes nothing: 2 g'g / g'Hg."""
    curvature = eigenvalues(dimension=4, condition=4.0).numpy()
    gradient = curvature * build_model(workload, workload.config, CPU).theta.detach().numpy()
    return float(2 * (gradient**2).sum() / (curvature * gradient**2).sum())


@pytest.mark.parametrize("peak_lr", [0.1, 0.7])
def test_the_coarse_grid_is_six_short_runs_around_the_critical_lr(tmp_path: Path, peak_lr: float) -> None:
    """At 4, 1, 1/4, ... 1/256 of it, moved to the nearest baseline's lr times a power of 4."""
    workload = quadratic(dimension=4, condition=4.0, total_steps=LONG, peak_lr=peak_lr)
    record, _ = sweep(workload, tmp_path / "s", **settings_of(SHORT))
    critical = first_critical_lr(workload)
    assert record.facts["initial_critical_lr"] == pytest.approx(critical, rel=0.2)
    top = round(math.log(4 * critical / peak_lr, 4))
    expected = [peak_lr * 4.0 ** (top - k) for k in range(6)]
    assert 0.5 < expected[0] / (4 * critical) < 2.0, "the nearest point of the lattice"
    assert record.trials["peak_lr"].iloc[:6].tolist() == pytest.approx(expected)
    short, full = (record.trials[(record.trials["stage"] == "lr_range") == is_short] for is_short in (True, False))
    assert set(short["trial"]) >= set(range(6))
    assert set(short["total_steps"]) == {LONG // 16}
    assert set(full["total_steps"]) == {LONG}
    ends = {
        lr: record.trial(n).steps["loss"].iloc[-2:].mean()
        for n, lr in zip(short["trial"], short["peak_lr"], strict=True)
        if not blown(record, n)
    }
    away = math.log2(full["peak_lr"].iloc[0] / min(ends, key=lambda lr: ends[lr]))
    assert full["peak_lr"].iloc[1] <= max(ends) * (1 + 1e-9), "the other one of the first round was stable when short"
    assert abs(away) <= 0.5, (
        "the first full-length run is at the point of the factor-2 lattice nearest to the best short one"
    )
    assert math.log2(full["peak_lr"].iloc[0] / peak_lr) == pytest.approx(
        round(math.log2(full["peak_lr"].iloc[0] / peak_lr))
    )


def blown(record: wb.StudyRecord, number: int) -> bool:
    return record.trial(number).steps["loss"].iloc[-1] > record.trial(number).steps["loss"].iloc[0]


def settings_of(study: wb.lr_sweep.Study) -> dict[str, Any]:
    return {f.name: getattr(study, f.name) for f in dataclasses.fields(study)}


@pytest.mark.parametrize(("optimizer", "scale"), [("sgd", 1e4), ("momentum", 1e-2), ("nesterov", 1.0), ("adam", 1e4)])
def test_within_ten_percent_of_the_parabola(optimizer: Any, scale: float) -> None:
    """Along u the loss of a quadratic is a parabola that is back at its start at 2 (g.u) / (u.H.u)."""
    workload = quadratic(optimizer=optimizer, loss_scale=scale)
    config, before = workload.config, torch.get_rng_state()
    found = measure_critical_lr(workload, config, CPU)
    assert torch.equal(before, torch.get_rng_state())
    curvature = eigenvalues(loss_scale=scale).numpy()
    gradient = curvature * build_model(workload, config, CPU).theta.detach().numpy()
    update = gradient / (np.abs(gradient) + config.eps) if optimizer == "adam" else gradient
    update = (1.9 if optimizer == "nesterov" else 1.0) * update
    exact = 2 * (gradient @ update) / (update @ (curvature * update))
    assert found.value == pytest.approx(exact, rel=0.1)
    assert found.below <= exact <= found.above
    assert found.forwards < 20


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_loss_that_a_sigmoid_bounds_gives_the_scale_of_its_minimum(optimizer: Any) -> None:
    """Rare targets: outputs of 0 cost less than those of the start, so that no step, however long, raises the loss above it."""
    draw = torch.Generator().manual_seed(0)
    data = TensorDataset(
        0.02 * torch.randn(256, 4, generator=draw), (torch.rand(256, 1, generator=draw) < 0.15).float()
    )
    config = wb.TrainConfig(peak_lr=0.1, total_steps=20, batch_size=256, optimizer=optimizer)
    net = lambda: torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.Sigmoid())  # noqa: E731
    workload = wb.regression(name="rare", build_model=net, train_data=data, validation_data=data, config=config)
    found, model, (x, y) = measure_critical_lr(workload, config, CPU), build_model(workload, config, CPU), data.tensors
    torch.nn.functional.mse_loss(model(x), y).backward()
    along = [p.grad.sign() if optimizer == "adam" else p.grad for p in model.parameters() if p.grad is not None]
    steps, losses = np.geomspace(1e-3, 1e6, 400), []
    for step in steps:
        weight, bias = (p - step * g for p, g in zip(model.parameters(), along, strict=True))
        losses.append(float(((x @ weight.T + bias).sigmoid() - y).square().mean().detach()))
    lowest = steps[int(np.argmin(losses))]
    assert losses[-1] < losses[0]
    assert lowest / 4 <= found.below <= 4 * lowest


def tried(level: Callable[[float], float], **fields: Any) -> list[float]:
    """The lrs that a sweep around a critical lr of 1 asks for, where a run falls from 2 to `level(lr)`."""
    trials: list[Any] = []

    def read() -> Any:
        return simulated.record(trials, total_steps=50, peak_lr=1.0, facts={"chance_loss": 2.0})

    config = wb.TrainConfig(peak_lr=1.0, total_steps=50, batch_size=1000)
    for requests in wb.lr_sweep.Study(**fields).rounds(config, read, critical=lambda: 1.0):
        for request in requests:
            lr = request.config.peak_lr
            loss = np.linspace(2.0, level(lr), 50)
            trials.append(simulated.trial(loss, lr, stage=request.role))
        assert len(trials) < 60, "the search does not end"
    return sorted(trial["lr"] for trial in trials)


@pytest.mark.parametrize("blind_decades", [6.0, 4.0])
def test_where_nothing_learns_the_whole_range_is_searched_and_no_more(blind_decades: float) -> None:
    lrs, reach = tried(lambda lr: 2.0, blind_decades=blind_decades), 10 ** (blind_decades / 2)
    assert reach / 4 < lrs[-1] <= reach
    assert reach / 4 < 1 / lrs[0] <= reach


@pytest.mark.parametrize("decades", [12.0, 4.0])
def test_where_lower_is_better_the_whole_range_is_searched_and_no_more(decades: float) -> None:
    lrs = tried(lambda lr: 1 + 0.05 * math.log10(lr * 1e8), decades=decades)
    assert 10 ** (decades / 2) / 4 < 1 / lrs[0] <= 10 ** (decades / 2)


@pytest.mark.parametrize("far_ratio", [64.0, 8.0])
def test_where_nothing_is_unstable_lrs_far_above_the_best_are_tried(far_ratio: float) -> None:
    best = 0.25
    lrs = tried(lambda lr: 1 + 0.1 * abs(math.log10(lr / best)), far_ratio=far_ratio)
    assert far_ratio / 4 < lrs[-1] <= far_ratio, "above the baseline's lr, which is the larger one"
