"""The sweep against exact truths: where quadratics become unstable, and which learning rate trains them best."""

from __future__ import annotations

import dataclasses
import math
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.utils.data import TensorDataset

from tests.helpers.workloads import small_workload
from workbench.errors import ConfigError, RecordError, UsageError
from workbench.findings.diagnosis import Diagnosis
from workbench.playbook.walk import diagnose
from workbench.record.read import StudyRecord, open_record
from workbench.record.write import StudyWriter
from workbench.topics.lr_sweep.diagnose import diagnose_lr_sweep
from workbench.topics.lr_sweep.study import LRSweep
from workbench.topics.stability.diagnose import diagnose_instability
from workbench.topics.stability.study import InstabilityStudy
from workbench.train.hooks.base import Hook, Step
from workbench.train.lane_stack import build_model
from workbench.train.trainer import Trainer
from workbench.workloads.analytic import eigenvalues, quadratic
from workbench.workloads.base import Workload

CPU = torch.device("cpu")
ROOT = str(Path(__file__).parents[2])
Floats = NDArray[np.float64]
SCALES = (1e-2, 1.0, 1e4)
EDGE = {"sgd": 2.0, "momentum": 3.8, "nesterov": 3.8 / 2.8, "adam": 38.0, "nadam": 3.8 / (0.1 * 2.8)}
"""Largest stable lr * curvature (Cohen et al. 2021, 2022; NAdam by the Jury conditions), momentum and beta1 0.9."""
FAST = {("sgd", 1e4), ("momentum", 1e-2), ("nesterov", 1.0), ("adam", 1.0)}


def workload_of(optimizer: Any, scale: float) -> Workload:
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


def edge_of(workload: Workload, scale: float) -> float:
    name = str(workload.config.optimizer)
    return EDGE[name] * (workload.config.eps if name in ("adam", "nadam") else 1.0) / scale


def sweep(workload: Workload, out: Path, **settings: Any) -> tuple[StudyRecord, Diagnosis]:
    config = workload.config.replace(eval_every_steps=workload.config.total_steps)
    record = LRSweep(**settings).run(workload.replace(config=config), Trainer(device="cpu"), out=out)
    return record, diagnose_lr_sweep(record)


def simulated(workload: Workload, scale: float, lrs: Floats) -> Floats:
    """Mean loss of the last tenth of the steps at each lr, shape (lrs,): the rules written out in NumPy."""
    config, curvature = workload.config, eigenvalues(loss_scale=scale).numpy()
    theta = np.repeat(build_model(workload, config, CPU).theta.detach().numpy()[None], len(lrs), axis=0)
    velocity, tail = np.zeros_like(theta), np.zeros(len(lrs))
    first = config.total_steps - round(0.1 * config.total_steps)
    memory = {"sgd": 0.0}.get(str(config.optimizer), config.momentum)
    with np.errstate(over="ignore", invalid="ignore"):
        for step in range(config.total_steps):
            tail += (step >= first) * 0.5 * (curvature * theta**2).sum(1)
            gradient = curvature * theta
            velocity = memory * velocity + gradient
            theta = theta - lrs[:, None] * (
                gradient + memory * velocity if config.optimizer == "nesterov" else velocity
            )
    return np.where(np.isfinite(tail), tail, np.inf)


COMBINATIONS = [
    pytest.param(rule, scale, marks=() if (rule, scale) in FAST else pytest.mark.slow, id=f"{rule}-{scale:g}")
    for rule in EDGE
    for scale in SCALES
]


@pytest.mark.parametrize(("optimizer", "scale"), COMBINATIONS)
def test_lr_unstable_and_lr_best_on_a_quadratic(tmp_path: Path, optimizer: str, scale: float) -> None:
    workload = workload_of(optimizer, scale)
    record, diagnosis = sweep(workload, tmp_path / "s")
    unstable, best = diagnosis["lr.unstable"].value, diagnosis["lr.best"].value
    assert unstable is not None
    assert best is not None
    assert unstable == pytest.approx(edge_of(workload, scale), rel=0.05)
    assert diagnosis["lr.unstable"].evidence["ratio"] <= 1.05 * (1 + 1e-9), "and it is bracketed to 5 %"
    assert best < unstable
    assert diagnosis["lr.grid_edge"].status == "ok"
    if optimizer == "sgd":
        exact = exact_best(workload, scale)
        assert exact / 1.25 <= best <= exact
    if optimizer in ("momentum", "nesterov"):
        grid = np.geomspace(1e-3, 1.0, 4000) * edge_of(workload, scale)
        at_best = simulated(workload, scale, np.array([best]))[0]
        assert at_best <= 1.1 * simulated(workload, scale, grid).min()
    assert record.steps["loss"].iloc[0] == pytest.approx(simulated_start(workload, scale))


def exact_best(workload: Workload, scale: float) -> float:
    """The argmin of the closed form: 1/2 sum_i lambda_i theta_i^2 (1 - eta lambda_i)^(2k), averaged over the tail."""
    curvature = eigenvalues(loss_scale=scale).numpy()
    start = 0.5 * curvature * build_model(workload, workload.config, CPU).theta.detach().numpy() ** 2
    steps = workload.config.total_steps
    lrs = np.linspace(0.5, 1.0, 20_001) * 2.0 / scale
    decay = (1 - lrs[:, None] * curvature) ** 2
    tail = sum(decay**k for k in range(steps - round(0.1 * steps), steps)) @ start
    return float(lrs[int(np.argmin(tail))])


def simulated_start(workload: Workload, scale: float) -> float:
    theta = build_model(workload, workload.config, CPU).theta.detach().numpy()
    return float(0.5 * (eigenvalues(loss_scale=scale).numpy() * theta**2).sum())


def test_the_two_oracles_agree() -> None:
    workload = workload_of("sgd", 1.0)
    lrs = np.linspace(0.5, 1.0, 2001) * 2.0
    assert lrs[int(np.argmin(simulated(workload, 1.0, lrs)))] == pytest.approx(exact_best(workload, 1.0), rel=1e-3)


@pytest.mark.parametrize("optimizer", ["sgd", pytest.param("nesterov", marks=pytest.mark.slow)])
def test_another_seed_and_another_scale_give_the_same_verdict(tmp_path: Path, optimizer: Any) -> None:
    small = {"dimension": 10, "condition": 10.0, "total_steps": 100, "optimizer": optimizer}
    found = []
    for scale, seed in ((1.0, 0), (1e4, 0), (1.0, 7)):
        workload = quadratic(loss_scale=scale, **small)
        workload = workload.replace(config=workload.config.replace(shared_seed=seed))
        _, diagnosis = sweep(workload, tmp_path / f"{scale:g}-{seed}")
        values = [diagnosis[code].value for code in ("lr.unstable", "lr.best")]
        found.append([f.status for f in diagnosis] + [v * scale for v in values if v is not None])
    statuses = [row[:-2] for row in found]
    assert statuses[1:] == statuses[:-1]
    assert found[1][-2:] == pytest.approx(found[0][-2:], rel=0.02)
    assert found[2][-2] == pytest.approx(found[0][-2], rel=0.05)


def test_every_example_twice_gives_the_same_verdict(tmp_path: Path) -> None:
    found = []
    for times in (1, 2):
        base = small_workload(config={"batch_size": 48 * times, "total_steps": 120, "optimizer": "sgd"})
        x, y = base.train_data.tensors
        workload = base.replace(train_data=TensorDataset(x.repeat(times, 1), y.repeat(times)))
        record, diagnosis = sweep(workload, tmp_path / str(times), lrs=(0.02, 0.1, 0.5, 2.5, 12.5))
        instability = diagnose_instability(record)
        found.append([(f.code, f.status, f.step) for f in (*diagnosis, *instability)])
        found[-1] += [f.value and float(f"{f.value:.6g}") for f in diagnosis]
    assert found[0] == found[1]


def test_given_lrs_are_exactly_the_trials(tmp_path: Path) -> None:
    lrs = (0.3, 0.01, 2.0, 50.0)
    workload = quadratic(dimension=5, condition=5.0, total_steps=400)
    record, diagnosis = sweep(workload, tmp_path / "s", lrs=lrs)
    assert record.trials["peak_lr"].tolist() == list(lrs)
    assert set(record.trials["stage"]) == {"lr_sweep"}
    assert record.trials["total_steps"].tolist() == [400] * 4
    state = dict(zip(record.trials["peak_lr"], record.trials["state"], strict=True))
    assert state == {0.3: "complete", 0.01: "complete", 2.0: "complete", 50.0: "diverged"}
    last = record.steps[record.steps["trial"] == 3].iloc[-1]
    assert not math.isfinite(last["loss"]), "the diverged trial is kept, with the row that shows it"
    points = {p["lr"]: p["state"] for p in diagnosis["lr.best"].evidence["points"]}
    assert points[50.0] == "diverged"
    assert diagnosis["lr.best"].value is not None


def test_seeds_share_their_batches_at_every_lr(tmp_path: Path) -> None:
    record, _ = sweep(small_workload(), tmp_path / "s", lrs=(0.01, 0.02), seeds=3)
    assert record.trials["peak_lr"].tolist() == [0.01] * 3 + [0.02] * 3
    assert record.trials["shared_seed"].tolist() == [0, 1, 2] * 2
    first = record.steps[record.steps["step"] == 0]["loss"].tolist()
    assert first[:3] == first[3:]
    assert len(set(first[:3])) == 3


def test_steps_shorten_the_trials(tmp_path: Path) -> None:
    workload = small_workload(config={"warmup_steps": 8, "eval_every_steps": 10})
    record = LRSweep(lrs=(0.01,), steps=20).run(workload, Trainer(device="cpu"), out=tmp_path / "s")
    row = record.trials.iloc[0]
    assert (row["total_steps"], row["warmup_steps"], row["eval_every_steps"]) == (20, 4, 5)


def test_a_workload_that_no_lr_trains_ends_with_not_measured(tmp_path: Path) -> None:
    workload = small_workload(loss=lambda outputs, batch: 0 * outputs.squeeze(-1) + batch[1] ** 2)
    record, diagnosis = sweep(workload, tmp_path / "s")
    assert {f.status for f in diagnosis} == {"not_measured"}
    assert len(record.trials) < 60, "the search ends"


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from tests.studies.test_lr_sweep import SWEEP, killed_workload
from workbench.train.hooks.base import Hook
from workbench.train.trainer import Trainer
counted = [0]
class Dies(Hook):
    def on_step(self, step):
        counted[0] += len(step.trials)
        if counted[0] >= int(sys.argv[3]):
            os.kill(os.getpid(), getattr(signal, sys.argv[4]))
SWEEP.run(killed_workload(), Trainer(device="cpu", hooks=[Dies()]), out=sys.argv[2])
"""


SWEEP = LRSweep(full_batch_refinements=4)


def killed_workload() -> Workload:
    return quadratic(dimension=4, condition=4.0, total_steps=50, optimizer="nesterov")


def spent(record: StudyRecord) -> dict[int, bytes]:
    return {int(p.parent.name): p.read_bytes() for p in record.path.glob("trials/*/events.jsonl")}


@pytest.mark.parametrize("signal_name", ["SIGKILL", pytest.param("SIGINT", marks=pytest.mark.slow)])
def test_a_sweep_that_was_stopped_goes_on_and_ends_the_same(tmp_path: Path, signal_name: str) -> None:
    whole = SWEEP.run(killed_workload(), Trainer(device="cpu"), out=tmp_path / "whole")
    total = int(whole.trials["steps_run"].sum())
    ended: dict[int, bytes] = {}
    for share in (0.5, 0.3):
        words = [sys.executable, "-c", KILLED, ROOT, str(tmp_path / "s"), str(int(share * total)), signal_name]
        done = subprocess.run(words, check=False, timeout=120, capture_output=True, text=True)
        assert done.returncode == (-signal.SIGKILL if signal_name == "SIGKILL" else 1), done.stderr
        assert signal_name == "SIGKILL" or "everything is saved" in done.stderr
        now = open_record(tmp_path / "s")
        assert isinstance(now, StudyRecord)
        states = now.trials.set_index("trial")["state"]
        assert set(states) <= {"complete", "diverged", "stopped"}
        hit = sum(states == "stopped")  # also after SIGKILL: nobody writes any more
        assert 1 <= hit <= SWEEP.lanes, "the trials of one round"
        assert all(spent(now)[n] == events for n, events in ended.items()), "no finished trial is trained again"
        ended = {n: events for n, events in spent(now).items() if states[n] in ("complete", "diverged")}
        assert len(ended) > 1
    again = SWEEP.run(killed_workload(), Trainer(device="cpu"), out=tmp_path / "s")
    assert all(spent(again)[n] == events for n, events in ended.items())
    columns = ["trial", "step", "loss", "lr", "grad_norm"]
    assert again.steps[columns].equals(whole.steps[columns])
    assert [f.to_dict() for f in diagnose_lr_sweep(again)] == [f.to_dict() for f in diagnose_lr_sweep(whole)]


class Counts(Hook):
    """Counts the updates that are really made."""

    steps = 0

    def on_step(self, step: Step) -> None:
        self.steps += len(step.trials)


@pytest.mark.parametrize("total_steps", [400, 2000])
def test_a_loss_without_a_minimum_is_not_followed_upwards(tmp_path: Path, total_steps: int) -> None:
    """Its depth is proportional to the lr: no lr is unstable, and the largest is always the best."""
    workload = small_workload(
        loss=lambda outputs, batch: -outputs.squeeze(-1) * batch[1], metrics={}, build_model=lambda: torch.nn.Linear(3, 1),
        config={"total_steps": total_steps, "batch_size": 16},
    )  # fmt: skip
    record = LRSweep().run(workload, out=tmp_path / "s")
    assert record.trials["peak_lr"].max() < 1e4
    assert len(record.trials) < 16


def test_the_same_call_again_trains_nothing(tmp_path: Path) -> None:
    counts = Counts()
    first = SWEEP.run(killed_workload(), Trainer(device="cpu", hooks=[counts]), out=tmp_path / "s")
    events, trained = spent(first), counts.steps
    assert trained == first.trials["steps_run"].sum(), "the hook sees every step, for this test to mean anything"
    again = SWEEP.run(killed_workload(), Trainer(device="cpu", hooks=[counts]), out=tmp_path / "s")
    assert counts.steps == trained
    assert spent(again) == events
    assert again.steps.equals(first.steps)


LONG = 320
SHORT = LRSweep(short_frac=0.0625, min_short_steps=20, refinements=0, full_batch_refinements=0)


def first_critical_lr(workload: Workload) -> float:
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
    assert abs(away) <= 0.5, (
        "the first full-length run is at the point of the factor-2 lattice nearest to the best short one"
    )
    assert math.log2(full["peak_lr"].iloc[0] / peak_lr) == pytest.approx(
        round(math.log2(full["peak_lr"].iloc[0] / peak_lr))
    )


def blown(record: StudyRecord, number: int) -> bool:
    return record.trial(number).steps["loss"].iloc[-1] > record.trial(number).steps["loss"].iloc[0]


def settings_of(study: LRSweep) -> dict[str, Any]:
    return {f.name: getattr(study, f.name) for f in dataclasses.fields(study)}


@pytest.mark.parametrize(("steps", "short"), [(LONG, 20), (240, 20), (160, 20), (159, None)])
def test_a_short_run_is_a_sixteenth_and_no_shorter_than_the_least(
    tmp_path: Path, steps: int, short: int | None
) -> None:
    """Where the least, 20 here, is more than an eighth of the run, the coarse grid of four lrs is at full length."""
    workload = quadratic(dimension=4, condition=4.0, total_steps=steps, peak_lr=0.1)
    record, _ = sweep(workload, tmp_path / "s", **settings_of(SHORT))
    if short is not None:
        assert set(record.trials["total_steps"][record.trials["stage"] == "lr_range"]) == {short}
        return
    assert "lr_range" not in set(record.trials["stage"])
    assert set(record.trials["total_steps"]) == {steps}
    top = round(math.log(4 * first_critical_lr(workload) / 0.1, 4))
    assert record.trials["peak_lr"].iloc[:4].tolist() == pytest.approx([0.1 * 4.0 ** (top - k) for k in range(4)])


@pytest.mark.parametrize("steps", [60, LONG])
def test_the_baseline_is_a_point_of_the_sweep_and_is_not_trained_again(tmp_path: Path, steps: int) -> None:
    """With and without short runs; 1.0 is on the lattice and next to the best of this quadratic."""
    workload = quadratic(dimension=4, condition=4.0, total_steps=steps, peak_lr=1.0)
    nothing = InstabilityStudy(probe_steps=1, confirm_multiples=(), fixes=())
    diagnosis = diagnose(
        workload,
        tmp_path / "s",
        trainer=Trainer(device="cpu"),
        sweep=SHORT,
        instability=nothing,
        command="c",
        proof_seeds=1,
    )
    record = open_record(tmp_path / "s")
    assert isinstance(record, StudyRecord)
    same = record.trials[(record.trials["peak_lr"] - 1.0).abs() < 1e-9]
    same = same[same["total_steps"] == steps]
    assert same["stage"].tolist() == ["baseline"]
    (point,) = [p for p in diagnosis["lr.best"].evidence["points"] if p["lr"] == pytest.approx(1.0)]
    assert point["trials"] == [0]
    swept = record.trials["stage"].isin(["baseline", "lr_sweep"])
    tried = np.log2(record.trials["peak_lr"][swept].to_numpy())
    assert tried == pytest.approx(np.round(tried), abs=1e-9), "1.0 is one of a grid by factors of 2"
    if steps == LONG:
        assert (record.trials["stage"] == "lr_range").sum() >= 4


def test_other_settings_in_the_same_folder_are_an_error(tmp_path: Path) -> None:
    workload = small_workload()
    LRSweep(lrs=(0.01,)).run(workload, Trainer(device="cpu"), out=tmp_path / "s")
    with pytest.raises(RecordError, match=r"holds another study \(lrs: there \[0\.01\], here \[0\.02\]\)"):
        LRSweep(lrs=(0.02,)).run(workload, Trainer(device="cpu"), out=tmp_path / "s")
    with pytest.raises(RecordError, match="total_steps: there 40, here 30"):
        LRSweep(lrs=(0.01,), steps=30).run(workload, Trainer(device="cpu"), out=tmp_path / "s")


def test_a_workload_that_fails_in_the_first_trial_names_its_error(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="not finite at step 0"):
        LRSweep(lrs=(0.1,)).run(small_workload(loss=lambda o, b: o.squeeze(-1) * math.nan), out=tmp_path / "s")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lrs": ()}, r"lrs=\[\] holds no learning rate"),
        ({"lrs": (0.1, -0.1)}, r"finite and above 0; wrong: \[-0\.1\]"),
        ({"lrs": (0.0,)}, r"wrong: \[0\.0\]"),
        ({"lrs": (math.nan,)}, r"wrong: \[nan\]"),
        ({"lrs": (math.inf,)}, r"wrong: \[inf\]"),
        ({"lrs": ("a",)}, r"wrong: \['a'\]"),
        ({"seeds": 0}, "seeds=0 must be an integer of at least 1"),
        ({"seeds": True}, "seeds=True"),
        ({"tolerance": 0}, "tolerance=0 must be between 0 and 1"),
        ({"tolerance": 5}, "tolerance=5"),
        ({"lrs": (0.1, True)}, r"wrong: \[True\]"),
        ({"lrs": (0.1, 0.2, 0.1, 0.3, 0.2)}, r"holds the same lr more than once: \[0\.1, 0\.2\].*ask for seeds="),
        ({"lrs": (1, 1.0)}, r"more than once: \[1\.0\]"),
        ({"lanes": 0}, "lanes=0 must be an integer of at least 1"),
        ({"lanes": 2.0}, r"lanes=2\.0"),
        ({"lanes": True}, "lanes=True"),
        ({"short_frac": 0}, "short_frac=0 must be above 0 and at most 1"),
        ({"max_short_frac": 1.5}, r"max_short_frac=1\.5"),
        ({"decades": 0}, "decades=0 must be above 0"),
    ],
)
def test_wrong_arguments_are_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        LRSweep(**changes)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda out: LRSweep().run("digits_mlp", out=out), r"workload must be a Workload, not str \(digits_mlp\)"),
        (lambda out: LRSweep().run(small_workload(), executor="slurm", out=out), "executor='slurm' is not known"),
        (lambda out: LRSweep(steps=0).run(small_workload(), out=out), "steps=0 must be an integer of at least 1"),
        (lambda out: LRSweep().run(small_workload(), out=out, note=" "), "note='' is empty"),
    ],
)
def test_wrong_calls_leave_nothing_behind(tmp_path: Path, call: Callable[[Path], Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        call(tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_a_study_holds_its_folder_while_it_runs(tmp_path: Path) -> None:
    workload = small_workload()
    LRSweep(lrs=(0.01,)).run(workload, Trainer(device="cpu"), out=tmp_path / "s")
    stored = open_record(tmp_path / "s")
    assert isinstance(stored, StudyRecord)
    writer = StudyWriter.open(
        tmp_path / "s", kind="lr_sweep", workload="small", config=stored.config, settings=stored.study["settings"]
    )
    try:
        with pytest.raises(RecordError, match="another process is writing"):
            LRSweep(lrs=(0.01,)).run(workload, Trainer(device="cpu"), out=tmp_path / "s")
    finally:
        writer.close()
