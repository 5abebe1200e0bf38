"""The instability study end to end: catapults, a doubling curvature, noise floors, and fixes that are really tried."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import workbench as wb
from tests.helpers.workloads import Having, small_workload
from workbench.workloads.analytic import Quadratic, catapult, eigenvalues, half_squared_length, quadratic

SEEDS = range(2)


def trained(workload: wb.Workload, out: Path, *, seed: int = 0) -> wb.TrialRecord:
    steps = workload.config.total_steps
    config = workload.config.replace(shared_seed=seed, per_host_seed=seed, eval_every_steps=steps)
    return wb.Trainer(device="cpu").run(workload, config, out=out)


def alarms(record: Any) -> dict[str, int | None]:
    """Return the codes that warn or fail, with their steps."""
    found = wb.stability.diagnose(record)
    return {f.code: f.step for f in found if f.status in ("warn", "fail")}


def seen(record: Any) -> dict[str, tuple[str, int | None]]:
    """Return the codes that the record's own run shows, with status and step."""
    found = wb.stability.diagnose(record)
    return {f.code: (f.status, f.step) for f in found if f.evidence.get("hits")}


@pytest.mark.parametrize("loss_scale", [1.0, 1e-2])
@pytest.mark.parametrize(("relative_lr", "codes"), [
    (1.5, {}), (3.0, {"stability.early_recovers": ("ok", 0)}),
    (4.5, {"stability.early": ("fail", 0), "stability.divergent": ("fail", 0)}),
])  # fmt: skip
def test_catapults_are_named_by_what_they_do(
    tmp_path: Path, relative_lr: float, codes: dict[str, tuple[str, int]], loss_scale: float
) -> None:
    """lr * curvature below 2 falls, between 2 and 4 rises and soon comes back, above 4 diverges (arXiv 2003.02218)."""
    workload = catapult(peak_lr=relative_lr / loss_scale)
    if loss_scale != 1.0:
        workload = workload.replace(loss=lambda outputs, batch: loss_scale * half_squared_length(outputs, batch))
    for seed in SEEDS:
        assert seen(trained(workload, tmp_path / str(seed), seed=seed)) == codes, f"seed {seed}"


class Doubling(nn.Module):
    """A quadratic whose curvature doubles with training step `at`; a buffer counts, so that a resumed run agrees."""

    seen: Tensor

    def __init__(self, curvature: Tensor, at: int) -> None:
        super().__init__()
        self.quadratic, self.at = Quadratic(curvature), at
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        factor: Tensor = torch.where(self.seen > self.at, math.sqrt(2.0), 1.0)
        return factor * self.quadratic(x)


STABLE_THEN_NOT = [("sgd", 1.3), ("momentum", 2.5), ("nesterov", 0.9)]
"""Between half of the edge (2, 3.8, 1.357) and the edge: stable for curvature 1, unstable for 2."""


def doubling(optimizer: Any, lr: float, *, at: int, loss_scale: float = 1.0, seed: int = 0) -> wb.Workload:
    workload = quadratic(
        noise=0.01 * math.sqrt(32), optimizer=optimizer, peak_lr=lr / loss_scale, loss_scale=loss_scale, seed=seed
    )
    curvature = eigenvalues(loss_scale=loss_scale)
    return workload.replace(build_model=lambda: Doubling(curvature, at))


@pytest.mark.parametrize(("optimizer", "lr"), STABLE_THEN_NOT)
def test_a_curvature_that_doubles_at_half_time_is_mid_at_that_step_and_its_twin_is_silent(
    tmp_path: Path, optimizer: str, lr: float
) -> None:
    """Momentum above half of its edge swings once before it settles, and that costs nothing."""
    for seed in SEEDS:
        found = alarms(trained(doubling(optimizer, lr, at=150, seed=seed), tmp_path / str(seed), seed=seed))
        assert set(found) == {"stability.mid", "stability.divergent"}, f"seed {seed}"
        assert 140 <= found["stability.mid"] <= 155, f"seed {seed}"
        twin = trained(doubling(optimizer, lr, at=10**6, seed=seed), tmp_path / f"twin-{seed}", seed=seed)
        assert alarms(twin) == {}


def test_the_probe_and_the_confirmation_runs_are_what_the_playbook_asks_for(tmp_path: Path) -> None:
    workload = small_workload(config={"total_steps": 60, "batch_size": 48, "peak_lr": 0.02})
    study = wb.stability.Study(best_lr=0.04, probe_steps=25, fixes=())
    record = study.run(workload, wb.Trainer(device="cpu"), out=tmp_path / "s")
    trials = record.trials.set_index("stage")
    assert trials.loc["lr_sweep", "peak_lr"] == pytest.approx(0.04)
    assert trials.loc["probe", "peak_lr"] == pytest.approx(0.08)
    assert trials.loc["confirm", "peak_lr"].tolist() == pytest.approx([0.2, 0.4])
    evals = record.trial(int(trials.loc["probe", "trial"])).evals.query("metric == 'loss' and split == 'validation'")
    assert evals["step"].tolist() == list(range(26)), "the probe is evaluated at every step (F1.11)"


STEEP, SLOW, SLOW_CURVATURE, STEPS = 4.0, 50.0, 0.01, 200
LRS = {True: (0.07, 0.14, 0.28, 0.31), False: (0.5, 1.0, 1.9, 2.1)}
EDGE = {True: 2 * STEEP / math.sinh(STEEP), False: 2.0}
"""The lr beyond which the first step leads further up the opposite wall."""


def walls(curved: bool) -> nn.Module:
    """Return cosh(steep) - 1 + 0.005 slow^2, or with `curved` False steep^2 / 2 + 0.005 slow^2, for every example."""

    def forward(m: Any, x: Tensor) -> Tensor:
        wall = torch.cosh(m.steep) - 1 if curved else 0.5 * m.steep**2
        return (wall + 0.5 * SLOW_CURVATURE * m.slow**2).expand(len(x))

    starts = {"steep": STEEP, "slow": SLOW}
    return Having(forward, **{k: nn.Parameter(torch.tensor(v, dtype=torch.float64)) for k, v in starts.items()})


def valley(curved: bool) -> wb.Workload:
    data = TensorDataset(torch.zeros(2, 1, dtype=torch.float64))
    return wb.Workload(
        name="valley", build_model=lambda: walls(curved), train_data=data, validation_data=data,
        loss=lambda outputs, batch: outputs,
        config=wb.TrainConfig(optimizer="sgd", peak_lr=LRS[curved][0], total_steps=STEPS, batch_size=2),
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


def studied(out: Path, *, curved: bool) -> tuple[wb.Diagnosis, wb.StudyRecord, list[dict[str, Any]]]:
    """Return the verdict on the sweep, the record, and the fix runs."""
    study = wb.stability.Study(confirm_multiples=(), probe_steps=20, sweep=wb.lr_sweep.Study(lrs=LRS[curved]))
    record = study.run(valley(curved), wb.Trainer(device="cpu"), out=out)
    found = wb.lr_sweep.diagnose(record)
    assert found["lr.unstable"].value == pytest.approx(EDGE[curved], rel=0.06), "the oracle's edge"
    assert found["lr.best"].evidence["measured_lr"] == LRS[curved][2]
    rows = record.trials[record.trials["stage"] == "fix"].to_dict("records")
    plain = [{str(k): None if isinstance(v, float) and math.isnan(v) else v for k, v in row.items()} for row in rows]
    return found, record, plain


def test_a_warmup_that_helps_is_found_harmful_and_the_last_fix(tmp_path: Path) -> None:
    found, record, (fix,) = studied(tmp_path / "s", curved=True)  # the first one helps, so no second one is run
    lr, ramp = 1.5 * found["lr.unstable"].value, STEPS // 10
    assert fix["peak_lr"] == pytest.approx(lr, rel=1e-9)
    assert (fix["warmup_steps"], fix["max_grad_norm"]) == (ramp, None)
    assert fix["total_steps"] == STEPS + ramp, "a warmup is put before the run, it takes nothing from it"
    losses = record.trial(fix["trial"]).steps["loss"].to_numpy()
    assert losses == pytest.approx(simulated(lr, warmup=ramp)[0], rel=1e-6)
    finding = found["lr.at_edge"]
    assert (finding.status, finding.evidence["harmful"]) == ("warn", True)
    assert [row["trial"] for row in finding.evidence["fix_trials"]] == [fix["trial"]]


def test_on_the_quadratic_twin_every_fix_is_tried_and_none_helps(tmp_path: Path) -> None:
    found, record, (warmup, clipping) = studied(tmp_path / "s", curved=False)
    assert (warmup["warmup_steps"], warmup["max_grad_norm"], clipping["warmup_steps"]) == (STEPS // 10, None, 0)
    norms = record.steps["grad_norm"][record.steps["trial"] == found["lr.best"].evidence["points"][2]["trials"][0]]
    assert clipping["max_grad_norm"] == pytest.approx(np.percentile(norms, 90)), "of the norms at lr*"
    lr = 1.5 * found["lr.unstable"].value
    assert [warmup["peak_lr"], clipping["peak_lr"]] == pytest.approx([lr, lr])
    finding = found["lr.at_edge"]
    assert (finding.status, finding.evidence["harmful"], finding.evidence["at_edge"]) == ("ok", False, True)
    assert "harmless" in finding.summary
