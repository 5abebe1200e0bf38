"""Instability shown through real training: catapults, a curvature that doubles, and what must raise no alarm."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.helpers.workloads import small_workload
from workbench.config import TrainConfig
from workbench.errors import ConfigError
from workbench.record.read import TrialRecord
from workbench.topics.lr_sweep.study import LRSweep
from workbench.topics.stability.diagnose import diagnose_instability
from workbench.topics.stability.study import InstabilityStudy
from workbench.train.checkpoint import load_model
from workbench.train.lane_stack import build_model
from workbench.train.trainer import Trainer
from workbench.workloads.analytic import Quadratic, catapult, eigenvalues, half_squared_length, quadratic
from workbench.workloads.base import Workload
from workbench.workloads.sklearn_data import digits_data

CPU = torch.device("cpu")
SEEDS = range(5)
jit_is_deprecated = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


def trained(workload: Workload, out: Path, *, seed: int = 0) -> TrialRecord:
    steps = workload.config.total_steps
    config = workload.config.replace(shared_seed=seed, per_host_seed=seed, eval_every_steps=steps)
    return Trainer(device="cpu").run(workload, config, out=out)


def alarms(record: Any) -> dict[str, int | None]:
    """Return the codes that warn or fail, with their steps."""
    found = diagnose_instability(record)
    return {f.code: f.step for f in found if f.status in ("warn", "fail")}


def seen(record: Any) -> dict[str, tuple[str, int | None]]:
    """Return the codes that the record's own run shows, with status and step."""
    found = diagnose_instability(record)
    return {f.code: (f.status, f.step) for f in found if f.evidence.get("hits")}


@pytest.mark.parametrize("loss_scale", [1.0, 1e-2])
@pytest.mark.parametrize(
    ("relative_lr", "codes"),
    [
        (1.5, {}),
        (3.0, {"stability.early_recovers": ("ok", 0)}),
        (4.5, {"stability.early": ("fail", 0), "stability.divergent": ("fail", 0)}),
    ],
)
def test_catapults_are_named_by_what_they_do(
    tmp_path: Path, relative_lr: float, codes: dict[str, tuple[str, int]], loss_scale: float
) -> None:
    """lr * curvature below 2 falls, between 2 and 4 rises and soon comes back, above 4 diverges (arXiv 2003.02218)."""
    workload = catapult(curvature=1.0, peak_lr=relative_lr / loss_scale)
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


def doubling(optimizer: Any, lr: float, *, at: int, loss_scale: float = 1.0, seed: int = 0) -> Workload:
    workload = quadratic(
        noise=0.01 * math.sqrt(32), optimizer=optimizer, peak_lr=lr / loss_scale, loss_scale=loss_scale, seed=seed
    )
    curvature = eigenvalues(loss_scale=loss_scale)
    return workload.replace(build_model=lambda: Doubling(curvature, at))


@pytest.mark.parametrize(("optimizer", "lr"), STABLE_THEN_NOT)
def test_a_curvature_that_doubles_at_half_time_is_mid_at_that_step(tmp_path: Path, optimizer: str, lr: float) -> None:
    for seed in SEEDS:
        found = alarms(trained(doubling(optimizer, lr, at=150, seed=seed), tmp_path / str(seed), seed=seed))
        assert set(found) == {"stability.mid", "stability.divergent"}, f"seed {seed}"
        step = found["stability.mid"]
        assert step is not None
        assert 140 <= step <= 155, f"seed {seed}: step {step}"


@pytest.mark.parametrize(("optimizer", "lr"), STABLE_THEN_NOT)
def test_the_same_without_the_doubling_raises_no_alarm(tmp_path: Path, optimizer: str, lr: float) -> None:
    """Momentum above half of its edge swings once before it settles, and that costs nothing."""
    for seed in SEEDS:
        found = alarms(trained(doubling(optimizer, lr, at=10**6, seed=seed), tmp_path / str(seed), seed=seed))
        assert found == {}


@pytest.mark.parametrize("loss_scale", [1e-2, 1e4])
def test_the_scale_of_the_loss_changes_no_verdict(tmp_path: Path, loss_scale: float) -> None:
    found = [
        alarms(trained(doubling("sgd", 1.3, at=150, loss_scale=scale), tmp_path / f"{scale:g}"))
        for scale in (1.0, loss_scale)
    ]
    assert found[0] == found[1]
    assert found[0], "a verdict must be there to be compared"


@pytest.mark.parametrize(
    ("optimizer", "lr"), [("sgd", 1.6), ("sgd", 0.4), ("nesterov", 0.9), ("nesterov", 0.2), ("momentum", 0.9)]
)
@pytest.mark.parametrize("noise", [0.03, 0.1])
def test_a_noise_floor_is_no_instability(tmp_path: Path, optimizer: Any, lr: float, noise: float) -> None:
    """The loss falls to eta sigma^2 / (B lambda (2 - eta lambda)) and wobbles there."""
    for seed in range(3):
        workload = quadratic(noise=noise, optimizer=optimizer, peak_lr=lr, total_steps=400, seed=seed)
        record = trained(workload, tmp_path / str(seed), seed=seed)
        loss = record.steps["loss"].to_numpy()
        assert loss[-100:].mean() < 0.7 * loss[0], "it must have come down"
        assert (np.diff(loss[-100:]) > 0).mean() > 0.3, "and it must wobble"
        assert alarms(record) == {}, f"seed {seed}"


def tanh_net() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 10))


def half_squared_error(outputs: Tensor, batch: Any) -> Tensor:
    return 0.5 * (outputs - batch[1]).square().sum(1)


def sharpness(model: nn.Module, data: TensorDataset, iterations: int = 40) -> float:
    """Largest Hessian eigenvalue of the full-batch loss, by power iteration."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(values: dict[str, Tensor]) -> Tensor:
        outputs = torch.func.functional_call(model, values, (data.tensors[0],))
        return half_squared_error(outputs, data.tensors).mean()

    generator = torch.Generator().manual_seed(0)
    direction = {name: torch.randn(p.shape, generator=generator) for name, p in parameters.items()}
    value = math.nan
    for _ in range(iterations):
        size = math.sqrt(sum(float(d.square().sum()) for d in direction.values()))
        direction = {name: d / size for name, d in direction.items()}
        _, product = torch.func.jvp(torch.func.grad(loss), (parameters,), (direction,))
        value, direction = sum(float((direction[n] * product[n]).sum()) for n in direction), product
    return value


@jit_is_deprecated  # torch.func says so itself
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_training_at_the_edge_of_stability_is_healthy(tmp_path: Path, seed: int) -> None:
    """Full-batch tanh network: the sharpness climbs to 2 / lr and stays, the loss ripples and keeps falling."""
    lr, split = 0.15, digits_data(flat=True)["train_data"]
    x, y = split.tensors
    data = TensorDataset(x[:400], nn.functional.one_hot(y[:400], 10).float())
    workload = Workload(
        name="edge_of_stability", build_model=tanh_net, train_data=data, validation_data=data, loss=half_squared_error,
        config=TrainConfig(optimizer="sgd", peak_lr=lr, total_steps=1200, batch_size=400),
    )  # fmt: skip
    record = trained(workload, tmp_path / "run", seed=seed)
    loss = record.steps["loss"].to_numpy()
    assert (np.diff(loss) > 0).sum() > 50, "the loss must not be monotone for this test to mean anything"
    final = load_model(build_model(workload, workload.config, CPU), record.checkpoints[-1])
    assert 1.8 < lr * sharpness(final, data) < 2.3, "it must be at the edge for this test to mean anything"
    assert alarms(record) == {}


def test_the_probe_and_the_confirmation_runs_are_what_the_playbook_asks_for(tmp_path: Path) -> None:
    workload = small_workload(config={"total_steps": 60, "batch_size": 48, "peak_lr": 0.02})
    study = InstabilityStudy(best_lr=0.04, probe_steps=25, fixes=())
    record = study.run(workload, Trainer(device="cpu"), out=tmp_path / "s")
    trials = record.trials.set_index("stage")
    assert trials.loc["lr_sweep", "peak_lr"] == pytest.approx(0.04)
    assert trials.loc["probe", "peak_lr"] == pytest.approx(0.08)
    assert trials.loc["confirm", "peak_lr"].tolist() == pytest.approx([0.2, 0.4])
    assert trials.loc["probe", "total_steps"] == 25
    probe = int(trials.loc["probe", "trial"])
    evals = record.trial(probe).evals.query("metric == 'loss' and split == 'validation'")
    assert evals["step"].tolist() == list(range(26)), "the probe is evaluated at every step (F1.11)"
    again = study.run(workload, Trainer(device="cpu"), out=tmp_path / "s")
    assert again.steps.equals(record.steps), "nothing is trained twice"


def test_without_a_best_lr_the_study_finds_it(tmp_path: Path) -> None:
    workload = quadratic(dimension=4, condition=4.0, total_steps=40)
    study = InstabilityStudy(sweep=LRSweep(lrs=(0.125, 0.5, 1.0, 4.0)), fixes=(), confirm_all=False)
    record = study.run(workload, Trainer(device="cpu"), out=tmp_path / "s")
    assert 0.5 < record.facts["lr_star"] < 2.0
    confirm = record.trials.query("stage == 'confirm'")
    assert len(confirm) == 1, "five times lr* is beyond the edge already, so ten times is not run"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"best_lr": 0.0}, r"best_lr=0\.0 must be a finite number above 0"),
        ({"best_lr": math.inf}, "best_lr=inf"),
        ({"probe_multiple": -1}, "probe_multiple=-1"),
        ({"fix_multiple": "x"}, "fix_multiple='x'"),
        ({"confirm_multiples": (5.0, math.nan)}, r"confirm_multiples\[1\]=nan"),
        ({"fixes": ("warmup", "prayer")}, "may hold 'warmup' and 'clipping', not 'prayer'"),
        ({"probe_steps": 0}, "probe_steps=0 must be an integer of at least 1"),
    ],
)
def test_wrong_arguments_are_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        InstabilityStudy(**changes)
