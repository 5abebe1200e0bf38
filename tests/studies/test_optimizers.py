"""The study of update rules on workloads whose edges, spikes and shrinking are formulas."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.helpers.workloads import small_workload
from workbench.config import OPTIMIZERS
from workbench.curves.rules import read_ranges
from workbench.errors import ConfigError, UnknownNameError
from workbench.findings.diagnosis import Diagnosis
from workbench.record.read import StudyRecord
from workbench.studies.session import Session, open_session
from workbench.topics.lr_sweep.diagnose import diagnose_lr_sweep
from workbench.topics.lr_sweep.study import LRSweep
from workbench.topics.optimizers.diagnose import CODES, diagnose_optimizers
from workbench.topics.optimizers.study import OptimizersStudy
from workbench.train.hooks.norms import Norms
from workbench.train.trainer import Trainer
from workbench.workloads.analytic import quadratic
from workbench.workloads.base import Workload

EDGE = {"sgd": 2.0, "momentum": 3.8, "nesterov": 3.8 / 2.8, "adam": 38.0, "adamw": 38.0}
"""Largest stable lr * curvature (Cohen et al. 2021, 2022), momentum and beta1 0.9; adam's with a frozen preconditioner."""


def run(
    workload: Workload, out: Path, trainer: Trainer | None = None, **settings: Any
) -> tuple[Diagnosis, StudyRecord]:
    config = workload.config.replace(eval_every_steps=workload.config.total_steps)
    record = OptimizersStudy(**settings).run(workload.replace(config=config), trainer or Trainer(device="cpu"), out=out)
    return diagnose_optimizers(record), record


def count(record: StudyRecord, **fields: Any) -> int:
    rows = record.trials
    for name, value in fields.items():
        rows = rows[rows[name] == value]
    return len(rows)


def test_the_edges_of_a_quadratic_side_by_side(tmp_path: Path) -> None:
    workload = quadratic(dimension=10, condition=10.0, optimizer="momentum", total_steps=100)
    sweep = LRSweep(tolerance=0.1, refinements=0, full_batch_refinements=0)
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
    own = diagnose_lr_sweep(record)["lr.unstable"]
    assert own.value == pytest.approx(3.8, rel=0.1), "the baseline's rule is a sweep that the other diagnoses read"


@pytest.mark.slow
def test_the_edges_of_adam_where_its_preconditioner_is_frozen(tmp_path: Path) -> None:
    """eps far above every gradient, beta2 0.5, and 100 warmup steps that outlast the bias correction."""
    eps = 1e4
    workload = quadratic(dimension=10, condition=10.0, optimizer="adam", peak_lr=0.01 * eps, total_steps=300)
    config = workload.config.replace(eps=eps, beta2=0.5, warmup_steps=100)
    _, record = run(workload.replace(config=config), tmp_path / "s", optimizers=("adam", "adamw"), seeds=1)
    for name, found in read_ranges(record).items():
        assert found.stable is not None
        assert found.unstable is not None
        assert found.stable <= EDGE[name] * eps <= found.unstable <= 1.11 * found.stable


@pytest.mark.parametrize("name", ["sgd", pytest.param("momentum", marks=pytest.mark.slow)])
def test_the_smallest_lr_that_trains_follows_from_the_budget(tmp_path: Path, name: Any) -> None:
    """One mode: the loss is (1 - lr)^2t of its start, and an lr trains where a tenth of it or less is left at the end."""
    workload = quadratic(dimension=1, condition=1.0, optimizer=name, total_steps=100)
    _, record = run(workload, tmp_path / "s", optimizers=(name,), seeds=1)
    found = read_ranges(record)[name]
    theta, velocity = np.ones(4000), np.zeros(4000)
    lrs, tail = np.geomspace(1e-4, 1, 4000), np.zeros(4000)
    for step in range(100):
        tail += (step >= 90) * theta**2 / 10
        velocity = (0.9 if name == "momentum" else 0.0) * velocity + theta
        theta = theta - lrs * velocity
    exact = lrs[np.flatnonzero(tail <= 0.1)[0]]
    assert found.fails_below is not None
    assert found.trains_from is not None
    assert found.fails_below < exact <= found.trains_from


def test_all_seven_rules_of_a_round_train_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[set[str]] = []
    real = Session.trials

    def noted(session: Session, configs: Any, *, stage: str) -> Any:
        calls.append({str(config.optimizer) for config in configs})
        return real(session, configs, stage=stage)

    monkeypatch.setattr(Session, "trials", noted)
    diagnosis, record = run(quadratic(total_steps=40), tmp_path / "s", lrs=(0.01, 0.1), seeds=1)
    assert calls[0] == set(OPTIMIZERS)
    assert calls[1:] == [{"rmsprop", "adam", "nadam", "adamw"}], "then the other form of those that have two"
    assert {name: len(found.points) for name, found in read_ranges(record).items()} == {
        name: 3 if name == "sgd" else 2 for name in OPTIMIZERS
    }, "the baseline at its own lr besides"
    assert tuple(f.code for f in diagnosis) == CODES
    assert sorted(record.facts["optimizers"]["forms"]) == ["adam", "adamw", "nadam", "rmsprop"]


def test_a_mapping_gives_each_rule_its_own_lrs(tmp_path: Path) -> None:
    lrs = {"sgd": (0.5, 1.0), "adam": (0.01, 0.02, 0.04)}
    _, record = run(quadratic(total_steps=40), tmp_path / "s", optimizers=("sgd", "adam"), lrs=lrs, seeds=1)
    assert {name: tuple(p.lr for p in found.points) for name, found in read_ranges(record).items()} == lrs


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


def test_a_form_that_matters_is_found_by_training_it(tmp_path: Path) -> None:
    """RMSProp with gradients of 1e-3: the playbook's form starts with v = 1, a thousand times shorter steps."""
    workload = quadratic(loss_scale=1e-3, optimizer="rmsprop", peak_lr=0.01, total_steps=100)
    config = workload.config.replace(rho=0.99)
    lrs = (0.005, 0.01, 0.02)
    diagnosis, record = run(workload.replace(config=config), tmp_path / "s", optimizers=("rmsprop",), lrs=lrs, seeds=1)
    finding = diagnosis["optimizers.rule_mismatch"]
    assert finding.status == "warn"
    assert "what does most is the start of v" in finding.summary
    assert count(record, stage="optimizers_twin", rules="playbook") >= 1
    swapped = config.replace(optimizer="momentum", peak_lr=1.0)
    diagnosis, _ = run(
        workload.replace(config=swapped), tmp_path / "t", optimizers=("momentum",), lrs=(1.0, 10.0), seeds=1
    )
    assert diagnosis["optimizers.rule_mismatch"].status == "ok"


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


def pulled(at: int, lr: float) -> Workload:
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
    with open_session(workload, stem="walk", settings={}, trainer=Trainer(device="cpu"), out=tmp_path / "s") as session:
        before = session.trainer
        OptimizersStudy(optimizers=("sgd",), lrs=(0.1,), seeds=1).extend(session)
        assert session.trainer is before
        assert not any(isinstance(hook, Norms) for hook in before.hooks)
        assert session.record.steps["param_norm"].notna().any()


def test_what_a_sweep_knows_of_the_baselines_rule_is_not_trained_again(tmp_path: Path) -> None:
    workload = quadratic(dimension=4, condition=4.0, total_steps=60)
    workload = workload.replace(config=workload.config.replace(eval_every_steps=60))
    sweep = LRSweep(tolerance=0.1, refinements=0, full_batch_refinements=2)
    with open_session(workload, stem="walk", settings={}, trainer=Trainer(device="cpu"), out=tmp_path / "s") as session:
        sweep.extend(session)
        before = diagnose_lr_sweep(session.record)["lr.unstable"].value
        known = len(session.record.trials)
        OptimizersStudy(optimizers=("sgd",), sweep=sweep, seeds=1).extend(session)
        record = session.record
        added = record.trials["peak_lr"][known:]
        assert (added < 1.9).all(), "the edge is bracketed already"
        assert len(added) <= 2 + 3, "two more refinements, and the lower end"
        assert diagnose_lr_sweep(record)["lr.unstable"].value == before


def test_an_optimizer_of_ones_own_is_the_first_rule(tmp_path: Path) -> None:
    workload = quadratic(total_steps=40)
    workload = workload.replace(config=workload.config.replace(optimizer=torch.optim.Adagrad, peak_lr=0.5))
    diagnosis, record = run(workload, tmp_path / "s", optimizers=("sgd",), lrs=(0.1, 0.5), seeds=1)
    assert [name.partition("#")[0].rpartition(":")[2] for name in read_ranges(record)] == ["Adagrad", "sgd"]
    assert diagnosis["optimizers.rule_mismatch"].status == "not_measured"
    assert "of your own" in diagnosis["optimizers.rule_mismatch"].summary


def test_an_interrupted_study_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = LRSweep(tolerance=0.5, refinements=0, full_batch_refinements=0)
    workload, settings = (
        quadratic(dimension=4, total_steps=30),
        {"optimizers": ("sgd", "momentum"), "seeds": 2, "sweep": sweep},
    )
    whole = run(workload, tmp_path / "whole", **settings)[1]
    real, calls = Session.trials, []

    def stopping(session: Session, configs: Any, *, stage: str) -> Any:
        calls.append(stage)
        if len(calls) == 3:
            raise RuntimeError("stopped")
        return real(session, configs, stage=stage)

    monkeypatch.setattr(Session, "trials", stopping)
    with pytest.raises(RuntimeError, match="stopped"):
        run(workload, tmp_path / "s", **settings)
    monkeypatch.setattr(Session, "trials", real)
    again = run(workload, tmp_path / "s", **settings)[1]
    compared = ["trial", "stage", "state", "optimizer", "rules", "peak_lr", "seed"]
    assert again.trials[compared].equals(whole.trials[compared])
    assert again.steps["loss"].equals(whole.steps["loss"])
    assert again.facts["optimizers"] == whole.facts["optimizers"]


def test_a_flat_place_shows_nothing(tmp_path: Path) -> None:
    flat = small_workload(loss=lambda outputs, batch: 0.0 * outputs.flatten(1).sum(1) + 2.3)
    diagnosis, _ = run(flat, tmp_path / "s", optimizers=("sgd", "adam"), lrs=(0.01, 0.1), seeds=2)
    assert diagnosis["optimizers.better"].status == "not_measured"
    assert not {f.status for f in diagnosis} & {"warn", "fail"}


@pytest.mark.parametrize(("given", "said"), [
    ({"optimizers": ()}, "must be a list of rules"),
    ({"optimizers": "adam"}, "must be a list of rules"),
    ({"seeds": 0}, "seeds=0 must be an integer of at least 1"),
    ({"seeds": True}, "seeds=True"),
    ({"end_ratio": 1.0}, "end_ratio=1.0 must be a finite number above 1"),
    ({"memory_factor": math.inf}, "memory_factor=inf"),
    ({"sweep": LRSweep(steps=10)}, "give lrs=... and steps=... to the study"),
    ({"lrs": (0.1, -1.0)}, "finite and above 0"),
    ({"lrs": {"adam": ()}, "optimizers": ("adam",)}, "holds no learning rate"),
    ({"lrs": {"adam": (0.1,)}, "optimizers": ("adam", "sgd")}, "lrs has no learning rates for sgd"),
    ({"lrs": {"adam": (0.1,), "sgd": (1.0,)}, "optimizers": ("adam",)}, "'sgd', which is not one of"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused_early(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        OptimizersStudy(**given)


def test_an_unknown_rule_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="'adm' is no update rule.*adam"):
        OptimizersStudy(optimizers=("adm",))


def test_the_baselines_rule_needs_lrs_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no learning rates for sgd, the workload's own optimizer"):
        run(quadratic(total_steps=40), tmp_path / "s", optimizers=("adam",), lrs={"adam": (0.1,)})
