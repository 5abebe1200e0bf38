"""The learning-rate sweep end to end: against exact edges, interrupted, in rounds, and from the scale of the model."""

from __future__ import annotations

import dataclasses
import math
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import workbench as wb
from tests.helpers.workloads import small_workload
from workbench.record.read import open_record
from workbench.studies.session import Session, open_session
from workbench.topics.lr_sweep.collect import measure_critical_lr
from workbench.topics.lr_sweep.study import TrialRequest, run_round
from workbench.train.lane_stack import build_model
from workbench.workloads.analytic import eigenvalues, quadratic

CPU = torch.device("cpu")


ROOT = str(Path(__file__).parents[2])


Floats = NDArray[np.float64]


SCALES = (1e-2, 1.0, 1e4)


EDGE = {"sgd": 2.0, "momentum": 3.8, "nesterov": 3.8 / 2.8, "adam": 38.0, "nadam": 3.8 / (0.1 * 2.8)}
"""Largest stable lr * curvature (Cohen et al. 2021, 2022; NAdam by the Jury conditions), momentum and beta1 0.9."""


FAST = {("sgd", 1e4), ("momentum", 1e-2), ("nesterov", 1.0), ("adam", 1.0)}


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


COMBINATIONS = [
    pytest.param(rule, scale, marks=() if (rule, scale) in FAST else pytest.mark.slow, id=f"{rule}-{scale:g}")
    for rule in EDGE
    for scale in SCALES
]


@pytest.mark.parametrize(("optimizer", "scale"), COMBINATIONS)
def test_lr_unstable_and_lr_best_on_a_quadratic(tmp_path: Path, optimizer: str, scale: float) -> None:
    workload = workload_of(optimizer, scale)
    _, diagnosis = sweep(workload, tmp_path / "s")
    unstable, best = diagnosis["lr.unstable"].value, diagnosis["lr.best"].value
    assert unstable is not None
    assert best is not None
    assert unstable == pytest.approx(edge_of(workload, scale), rel=0.05)
    assert diagnosis["lr.unstable"].evidence["ratio"] <= 1.05 * (1 + 1e-9), "and it is bracketed to 5 %"
    assert best < unstable
    assert diagnosis["lr.grid_edge"].status == "ok"


def test_seeds_share_their_batches_at_every_lr(tmp_path: Path) -> None:
    record, _ = sweep(small_workload(), tmp_path / "s", lrs=(0.01, 0.02), seeds=3)
    assert record.trials["peak_lr"].tolist() == [0.01] * 3 + [0.02] * 3
    assert record.trials["shared_seed"].tolist() == [0, 1, 2] * 2
    first = record.steps[record.steps["step"] == 0]["loss"].tolist()
    assert first[:3] == first[3:]
    assert len(set(first[:3])) == 3


def test_steps_shorten_the_trials(tmp_path: Path) -> None:
    workload = small_workload(config={"warmup_steps": 8, "eval_every_steps": 10})
    record = wb.lr_sweep.Study(lrs=(0.01,), steps=20).run(workload, wb.Trainer(device="cpu"), out=tmp_path / "s")
    row = record.trials.iloc[0]
    assert (row["total_steps"], row["warmup_steps"], row["eval_every_steps"]) == (20, 4, 5)


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from tests.topics.test_lr_sweep_study import SWEEP, killed_workload
from workbench.train.hooks import Hook
from workbench.train.trainer import Trainer
counted = [0]
class Dies(Hook):
    def on_step(self, step):
        counted[0] += len(step.trials)
        if counted[0] >= int(sys.argv[3]):
            os.kill(os.getpid(), getattr(signal, sys.argv[4]))
SWEEP.run(killed_workload(), Trainer(device="cpu", hooks=[Dies()]), out=sys.argv[2])
"""


SWEEP = wb.lr_sweep.Study(full_batch_refinements=4)


def killed_workload() -> wb.Workload:
    return quadratic(dimension=4, condition=4.0, total_steps=50, optimizer="nesterov")


def spent(record: wb.StudyRecord) -> dict[int, bytes]:
    return {int(p.parent.name): p.read_bytes() for p in record.path.glob("trials/*/events.jsonl")}


@pytest.mark.parametrize("signal_name", ["SIGKILL", pytest.param("SIGINT", marks=pytest.mark.slow)])
def test_a_sweep_that_was_stopped_goes_on_and_ends_the_same(tmp_path: Path, signal_name: str) -> None:
    whole = SWEEP.run(killed_workload(), wb.Trainer(device="cpu"), out=tmp_path / "whole")
    total = int(whole.trials["steps_run"].sum())
    ended: dict[int, bytes] = {}
    for share in (0.5, 0.3):
        words = [sys.executable, "-c", KILLED, ROOT, str(tmp_path / "s"), str(int(share * total)), signal_name]
        done = subprocess.run(words, check=False, timeout=120, capture_output=True, text=True)
        assert done.returncode == (-signal.SIGKILL if signal_name == "SIGKILL" else 1), done.stderr
        assert signal_name == "SIGKILL" or "everything is saved" in done.stderr
        now = open_record(tmp_path / "s")
        assert isinstance(now, wb.StudyRecord)
        states = now.trials.set_index("trial")["state"]
        assert set(states) <= {"complete", "diverged", "stopped"}
        hit = sum(states == "stopped")  # also after SIGKILL: nobody writes any more
        assert 1 <= hit <= SWEEP.lanes, "the trials of one round"
        assert all(spent(now)[n] == events for n, events in ended.items()), "no finished trial is trained again"
        ended = {n: events for n, events in spent(now).items() if states[n] in ("complete", "diverged")}
        assert len(ended) > 1
    again = SWEEP.run(killed_workload(), wb.Trainer(device="cpu"), out=tmp_path / "s")
    assert all(spent(again)[n] == events for n, events in ended.items())
    columns = ["trial", "step", "loss", "lr", "grad_norm"]
    assert again.steps[columns].equals(whole.steps[columns])
    assert [f.to_dict() for f in wb.lr_sweep.diagnose(again)] == [f.to_dict() for f in wb.lr_sweep.diagnose(whole)]


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


Calls = list[list[float]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The lrs asked for, call by call."""
    seen: Calls = []
    real = Session.trials

    def noted(session: Session, configs: Sequence[wb.TrainConfig], *, stage: str) -> list[wb.TrialRecord]:
        seen.append([config.peak_lr for config in configs])
        return real(session, configs, stage=stage)

    monkeypatch.setattr(Session, "trials", noted)
    return seen


def run(study: Any, workload: wb.Workload, out: Path) -> wb.StudyRecord:
    record = study.run(workload, wb.Trainer(device="cpu"), out=out)
    assert isinstance(record, wb.StudyRecord)
    return record


def test_a_round_is_in_order_and_the_same_trial_is_run_once(tmp_path: Path, calls: Calls) -> None:
    workload = small_workload()
    first, second, third = (workload.config.replace(peak_lr=lr) for lr in (0.1, 0.2, 0.3))
    asked = [TrialRequest("a", second), TrialRequest("b", first), TrialRequest("b", second), TrialRequest("a", third)]
    with open_session(
        workload, stem="round", settings={}, trainer=wb.Trainer(device="cpu"), out=tmp_path / "s"
    ) as session:
        records = run_round(session, asked)
        assert [r.config["peak_lr"] for r in records] == [0.2, 0.1, 0.2, 0.3]
        assert records[0].number == records[2].number
        stages = session.record.trials.set_index("peak_lr")["stage"].to_dict()
        assert stages == {0.2: "a", 0.1: "b", 0.3: "a"}, "what it was asked for first"
        assert run_round(session, []) == []
    assert calls == [[0.2, 0.1, 0.3]], "one call, whatever the stages"


def test_a_round_with_a_trial_that_cannot_be_trained_names_it_and_writes_nothing(tmp_path: Path) -> None:
    workload = small_workload()
    good, bad = workload.config.replace(peak_lr=0.1), workload.config.replace(peak_lr=0.2, batch_size=1000)
    with (
        open_session(
            workload, stem="round", settings={}, trainer=wb.Trainer(device="cpu"), out=tmp_path / "s"
        ) as session,
        pytest.raises(wb.errors.DataError, match="batch_size=1000") as raised,
    ):
        run_round(session, [TrialRequest("a", good), TrialRequest("b", bad)])
    assert "configs[1] (peak_lr=0.2)" in str(raised.value)
    assert not (tmp_path / "s" / "trials").exists()


@pytest.mark.parametrize("lanes", [1, 2, 4, 8])
def test_the_number_of_lanes_changes_the_rounds_and_not_the_answer(tmp_path: Path, calls: Calls, lanes: int) -> None:
    workload = quadratic(dimension=10, condition=10.0, total_steps=100)
    diagnosis = wb.lr_sweep.diagnose(
        run(wb.lr_sweep.Study(lanes=lanes, full_batch_refinements=40), workload, tmp_path / "s")
    )
    assert diagnosis["lr.unstable"].value == pytest.approx(2.0, rel=0.05)
    assert diagnosis["lr.unstable"].evidence["ratio"] <= 1.05 * (1 + 1e-9)
    best = diagnosis["lr.best"]
    assert best.evidence["needs_refinement"] is False
    assert best.value is not None
    assert 1.6 < best.value < 2.0
    assert max(len(call) for call in calls) <= max(4, lanes), "4 is the coarse grid"
    assert len(calls) <= {1: 24, 2: 14, 4: 9, 8: 7}[lanes]


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "nesterov", "adam"])
@pytest.mark.parametrize("scale", [1e-2, 1.0, 1e4])
@pytest.mark.parametrize("seed", [0, 1])
def test_within_ten_percent_of_the_parabola(optimizer: Any, scale: float, seed: int) -> None:
    """Along u the loss of a quadratic is a parabola that is back at its start at 2 (g.u) / (u.H.u)."""
    workload = quadratic(optimizer=optimizer, loss_scale=scale)
    config = workload.config.replace(shared_seed=seed)
    found = measure_critical_lr(workload, config, CPU)
    curvature = eigenvalues(loss_scale=scale).numpy()
    gradient = curvature * build_model(workload, config, CPU).theta.detach().numpy()
    update = gradient / (np.abs(gradient) + config.eps) if optimizer == "adam" else gradient
    update = (1.9 if optimizer == "nesterov" else 1.0) * update
    exact = 2 * (gradient @ update) / (update @ (curvature * update))
    assert found.value == pytest.approx(exact, rel=0.1)
    assert found.below <= exact <= found.above
    assert found.forwards < 20


def test_random_state_is_put_back_also_after_an_error() -> None:
    calls = []

    def breaks(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        calls.append(torch.rand(1))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return (outputs.squeeze(-1) - batch[1]) ** 2

    before = torch.get_rng_state()
    workload = small_workload(loss=breaks)
    with pytest.raises(KeyboardInterrupt):
        measure_critical_lr(workload, workload.config, CPU)
    assert torch.equal(before, torch.get_rng_state())


def test_accumulated_micro_batches_give_the_same() -> None:
    whole, parts = (small_workload(config={"accumulate_steps": k}) for k in (1, 4))
    values = [measure_critical_lr(w, w.config, CPU).value for w in (whole, parts)]
    assert values[0] == pytest.approx(values[1], rel=1e-9)
