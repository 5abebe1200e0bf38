"""Fix runs end to end: a valley where warmup truly helps, and its twin, a quadratic, where nothing does (F1.4, F1.8).

The valley is steep where training starts (cosh) and flat where it ends, beside a slow direction that wants a large lr:
the start alone decides which lr is unstable. On the quadratic the same edge holds everywhere.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import workbench as wb
from workbench.config import TrainConfig
from workbench.findings.diagnosis import Diagnosis
from workbench.playbook import walk as playbook
from workbench.record.read import StudyRecord, open_record
from workbench.topics.lr_sweep.diagnose import diagnose_lr_sweep
from workbench.topics.lr_sweep.study import LRSweep
from workbench.topics.stability.study import InstabilityStudy
from workbench.train.trainer import Trainer
from workbench.workloads.analytic import quadratic
from workbench.workloads.base import Workload

STEEP, SLOW, SLOW_CURVATURE, STEPS = 4.0, 50.0, 0.01, 200
LRS = {True: (0.07, 0.14, 0.28, 0.31), False: (0.5, 1.0, 1.9, 2.1)}
EDGE = {True: 2 * STEEP / math.sinh(STEEP), False: 2.0}
"""The lr beyond which the first step leads further up the opposite wall."""


class Valley(nn.Module):
    """Returns cosh(steep) - 1 + 0.005 slow^2, or with `curved` False steep^2 / 2 + 0.005 slow^2, for every example."""

    def __init__(self, curved: bool) -> None:
        super().__init__()
        self.curved = curved
        self.steep = nn.Parameter(torch.tensor(STEEP, dtype=torch.float64))
        self.slow = nn.Parameter(torch.tensor(SLOW, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        wall = torch.cosh(self.steep) - 1 if self.curved else 0.5 * self.steep**2
        return (wall + 0.5 * SLOW_CURVATURE * self.slow**2).expand(len(x))


def valley(curved: bool) -> Workload:
    data = TensorDataset(torch.zeros(2, 1, dtype=torch.float64))
    return Workload(
        name="valley", build_model=lambda: Valley(curved), train_data=data, validation_data=data,
        loss=lambda outputs, batch: outputs,
        config=TrainConfig(optimizer="sgd", peak_lr=LRS[curved][0], total_steps=STEPS, batch_size=2),
    )  # fmt: skip


def simulated(lr: float, *, warmup: int = 0, clip: float = math.inf) -> tuple[np.ndarray, np.ndarray]:
    """Losses and gradient norms of the curved valley, written out: shape (STEPS + warmup,) each."""
    steep, slow, losses, norms = STEEP, SLOW, [], []
    for step in range(STEPS + warmup):
        losses.append(math.cosh(steep) - 1 + 0.5 * SLOW_CURVATURE * slow**2)
        gradient = (math.sinh(steep), SLOW_CURVATURE * slow)
        norms.append(math.hypot(*gradient))
        scale = min(1.0, clip / norms[-1]) * lr * min(1.0, step / warmup if warmup else 1.0)
        steep, slow = steep - scale * gradient[0], slow - scale * gradient[1]
    return np.array(losses), np.array(norms)


def diagnosed(out: Path, *, curved: bool, **settings: Any) -> tuple[Diagnosis, StudyRecord]:
    study = InstabilityStudy(confirm_multiples=(), probe_steps=20, **settings)
    diagnosis = wb.diagnose(
        valley(curved), out=out, trainer=Trainer(device="cpu"), sweep=LRSweep(lrs=LRS[curved]), instability=study
    )
    record = open_record(out)
    assert isinstance(record, StudyRecord)
    assert diagnosis["lr.unstable"].value == pytest.approx(EDGE[curved], rel=0.06), "the oracle's edge"
    assert diagnosis["lr.best"].evidence["measured_lr"] == LRS[curved][2]
    return diagnosis, record


@pytest.fixture(autouse=True)
def fix_runs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tried after a fix run has helped has its own tests."""
    monkeypatch.setattr(playbook, "_cure", lambda session, known: None)


def fixes_of(record: StudyRecord) -> list[dict[str, Any]]:
    rows = record.trials[record.trials["stage"] == "fix"].to_dict("records")
    return [{str(k): None if isinstance(v, float) and math.isnan(v) else v for k, v in row.items()} for row in rows]


def test_a_warmup_that_helps_is_found_harmful_and_adopted(tmp_path: Path) -> None:
    diagnosis, record = diagnosed(tmp_path / "s", curved=True)
    (fix,) = fixes_of(record)  # the first one helps, so no second one is run
    lr = 1.5 * diagnosis["lr.unstable"].value
    assert fix["peak_lr"] == pytest.approx(lr, rel=1e-9)
    assert fix["warmup_steps"] == STEPS // 10
    assert fix["total_steps"] == STEPS + STEPS // 10, "a warmup is put before the run, it takes nothing from it"
    assert fix["max_grad_norm"] is None
    losses = record.trial(fix["trial"]).steps["loss"].to_numpy()
    assert losses == pytest.approx(simulated(lr, warmup=STEPS // 10)[0], rel=1e-6)

    finding = diagnosis["lr.at_edge"]
    assert (finding.status, finding.evidence["harmful"]) == ("warn", True)
    assert [row["trial"] for row in finding.evidence["fix_trials"]] == [fix["trial"]]
    recommendation = diagnosis.recommendation
    assert recommendation is not None
    assert recommendation["adopted"] is True
    assert recommendation["chosen"]["trial"] == fix["trial"]
    assert recommendation["recommended"]["seeds"] == 3
    assert recommendation["proof"]["seeds"] == [1, 2, 3]
    assert recommendation["config"]["peak_lr"] == fix["peak_lr"]
    assert recommendation["config"]["warmup_steps"] == STEPS // 10
    assert recommendation["config"]["total_steps"] == STEPS + STEPS // 10
    assert recommendation["config"]["max_grad_norm"] is None
    unfixed = record.evals[record.evals["trial"] < fix["trial"]]["value"].min()
    assert recommendation["recommended"]["validation/loss"] < unfixed


def test_clipping_comes_from_the_norms_at_lr_star(tmp_path: Path) -> None:
    diagnosis, record = diagnosed(tmp_path / "s", curved=True, fixes=("clipping", "warmup"))
    (fix,) = fixes_of(record)
    threshold = np.percentile(simulated(LRS[True][2])[1], 90)
    assert fix["max_grad_norm"] == pytest.approx(threshold, rel=1e-6)
    assert (fix["warmup_steps"], fix["total_steps"]) == (0, STEPS)
    losses = record.trial(fix["trial"]).steps["loss"].to_numpy()
    assert losses == pytest.approx(simulated(fix["peak_lr"], clip=threshold)[0], rel=1e-6)
    assert diagnosis["lr.at_edge"].evidence["harmful"] is True
    assert diagnosis.recommendation is not None
    assert diagnosis.recommendation["config"]["max_grad_norm"] == fix["max_grad_norm"]
    assert diagnosis.recommendation["config"]["total_steps"] == STEPS


def test_on_the_quadratic_twin_every_fix_is_tried_and_none_helps(tmp_path: Path) -> None:
    diagnosis, record = diagnosed(tmp_path / "s", curved=False)
    warmup, clipping = fixes_of(record)
    assert (warmup["warmup_steps"], warmup["max_grad_norm"]) == (STEPS // 10, None)
    assert clipping["warmup_steps"] == 0
    assert clipping["max_grad_norm"] > 0
    lr = 1.5 * diagnosis["lr.unstable"].value
    assert [warmup["peak_lr"], clipping["peak_lr"]] == pytest.approx([lr, lr])
    finding = diagnosis["lr.at_edge"]
    assert (finding.status, finding.evidence["harmful"]) == ("ok", False)
    assert finding.evidence["at_edge"]
    assert "harmless" in finding.summary
    recommendation = diagnosis.recommendation
    assert recommendation is not None
    assert recommendation["recommended"]["trials"][0] not in (warmup["trial"], clipping["trial"])
    assert recommendation["config"]["peak_lr"] < 2.0
    assert (recommendation["config"]["warmup_steps"], recommendation["config"]["max_grad_norm"]) == (0, None)


def test_the_settings_of_a_fix_are_obeyed(tmp_path: Path) -> None:
    """Beyond the edge of the quadratic nothing helps, so both fixes are there to be read."""
    settings = {"fix_multiple": 2.0, "fix_warmup_frac": 0.25, "fix_percentile": 50.0}
    diagnosis, record = diagnosed(tmp_path / "s", curved=False, **settings)
    warmup, clipping = fixes_of(record)
    lr = 2.0 * diagnosis["lr.unstable"].value
    assert [warmup["peak_lr"], clipping["peak_lr"]] == pytest.approx([lr, lr])
    assert warmup["warmup_steps"] == STEPS // 4
    at_best = record.trials["trial"][record.trials["peak_lr"] == LRS[False][2]].iloc[0]
    norms = record.trial(int(at_best)).steps["grad_norm"]
    assert clipping["max_grad_norm"] == pytest.approx(norms.median(), rel=1e-6)


def test_without_fixes_nobody_knows(tmp_path: Path) -> None:
    diagnosis, record = diagnosed(tmp_path / "s", curved=True, fixes=())
    assert fixes_of(record) == []
    assert (diagnosis["lr.at_edge"].status, diagnosis["lr.at_edge"].evidence["harmful"]) == ("warn", None)


def test_away_from_the_edge_no_fix_is_run(tmp_path: Path) -> None:
    """Gradient noise makes a small lr the best one, far below the edge at 2."""
    workload = quadratic(dimension=2, condition=2.0, noise=0.3, total_steps=200)
    lrs = LRSweep(lrs=(0.05, 0.1, 0.5, 1.0, 2.5))
    study = InstabilityStudy(confirm_multiples=(), probe_steps=20, sweep=lrs)
    record = study.run(workload, Trainer(device="cpu"), out=tmp_path / "s")
    at_edge = diagnose_lr_sweep(record)["lr.at_edge"]
    assert at_edge.evidence["at_edge"] is False, "it must be far from the edge for this test to mean anything"
    assert at_edge.status == "ok"
    assert fixes_of(record) == []


def test_a_warmup_is_put_before_one_that_is_there_already(tmp_path: Path) -> None:
    workload, lrs = valley(False), LRSweep(lrs=(0.5, 1.0, 1.9, 2.6))
    workload = workload.replace(config=workload.config.replace(warmup_steps=60, total_steps=STEPS + 60))
    study = InstabilityStudy(confirm_multiples=(), probe_steps=20, fixes=("warmup",), sweep=lrs)
    (fix,) = fixes_of(study.run(workload, Trainer(device="cpu"), out=tmp_path / "s"))
    assert fix["warmup_steps"] >= 60
    assert fix["total_steps"] - fix["warmup_steps"] == STEPS


def test_a_fix_run_is_no_point_of_the_sweep(tmp_path: Path) -> None:
    diagnosis, record = diagnosed(tmp_path / "s", curved=True)
    (fix,) = fixes_of(record)
    used = itertools.chain.from_iterable(p["trials"] for p in diagnosis["lr.best"].evidence["points"])
    assert fix["trial"] not in set(used)
    assert diagnosis["lr.best"].value is not None
    assert diagnosis["lr.best"].value < diagnosis["lr.unstable"].value


def test_the_same_call_again_runs_no_second_fix(tmp_path: Path) -> None:
    study = InstabilityStudy(confirm_multiples=(), probe_steps=20, sweep=LRSweep(lrs=LRS[True]))
    first = study.run(valley(True), Trainer(device="cpu"), out=tmp_path / "s")
    again = study.run(valley(True), Trainer(device="cpu"), out=tmp_path / "s")
    assert len(fixes_of(first)) == 1
    assert again.steps.equals(first.steps)
