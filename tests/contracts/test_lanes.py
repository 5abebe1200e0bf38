"""What every way to the gradients promises: a lane is the same trial as one that is trained alone."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from tests.helpers import lane_models
from tests.helpers.hooks import At
from tests.helpers.lane_models import CLASSES, FEATURES
from workbench.config import TrainConfig
from workbench.errors import ConfigError, StudyInterrupted, UsageError
from workbench.record.read import StudyRecord, TrialRecord
from workbench.record.write import StudyWriter
from workbench.train.hooks import Hook, Run, Step
from workbench.train.loop import FLUSH_STEPS
from workbench.train.trainer import Trainer
from workbench.train.update_rules import RULES
from workbench.workloads.base import Workload
from workbench.workloads.losses import classification

WAYS = ("loop", "vmap")
DIGITS = [(torch.float64, 1e-10), (torch.float32, 1e-5)]
MODELS = ("mlp", "batch_norm", "dropout", "conv", "tied", "frozen", "buffered")


class Noisy(Dataset[Any]):
    """A map-style dataset that augments with the global random state."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index] + 0.01 * torch.randn(FEATURES, dtype=self.x.dtype) + 0.01 * np.random.rand(), self.y[index]


def workload(
    model: str = "mlp", *, augmented: bool = False, dtype: torch.dtype = torch.float32, **config: Any
) -> Workload:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(96, FEATURES, generator=generator).to(dtype)
    y = (x[:, :CLASSES] + 0.3 * torch.randn(96, CLASSES, generator=generator).to(dtype)).argmax(1)
    data: Any = (Noisy if augmented else TensorDataset)(x[:64], y[:64])
    base: dict[str, Any] = {"peak_lr": 0.02, "total_steps": 200, "batch_size": 16, "eval_every_steps": 100}
    return classification(
        name=model,
        build_model=lambda: lane_models.MODELS[model]().to(dtype),
        train_data=data,
        validation_data=TensorDataset(x[64:], y[64:]),
        config=TrainConfig(**base | config),
    )


def variants(config: TrainConfig, count: int) -> list[TrainConfig]:
    """Lanes that differ in everything a lane may differ in, clipping and warmup on."""
    return [
        config.replace(
            peak_lr=config.peak_lr * (1 + 0.4 * k),
            warmup_steps=5 * (k + 1),
            max_grad_norm=(0.5, 0.3, None)[k % 3],
            weight_decay=0.01 * (k % 2),
            momentum=(0.9, 0.8)[k % 2],
            beta1=(0.9, 0.85)[k % 2],
            shared_seed=k % 3,
        )
        for k in range(count)
    ]


def together(given: Workload, configs: Sequence[TrainConfig], out: Path, way: str, **trainer: Any) -> StudyRecord:
    study = StudyWriter.open(out, kind="lr_sweep", workload=given.name, config=given.config.to_dict())
    try:
        Trainer(gradients=way, **trainer).run_trials(given, configs, study, stage="lr_sweep")  # type: ignore[arg-type]
    finally:
        study.close()
    return StudyRecord(out)


def assert_same(
    lanes: StudyRecord, number: int, alone: Any, *, rel: float, names: Sequence[str] = ("loss", "grad_norm")
) -> None:
    rows: pd.DataFrame = lanes.trial(number).steps
    for name in names:
        np.testing.assert_allclose(rows[name], alone.steps[name], rtol=rel, atol=rel * 1e-2, err_msg=name)
    np.testing.assert_array_equal(rows["lr"], alone.steps["lr"])
    np.testing.assert_array_equal(rows["clipped"], alone.steps["clipped"])
    values, expected = lanes.trial(number).evals, alone.evals
    assert list(values["step"]) == list(expected["step"])
    np.testing.assert_allclose(values["value"], expected["value"], rtol=max(rel, 1e-7) * 10, atol=1e-7)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Workload, TrainConfig], TrialRecord]:
    """Trains a trial alone by plain autograd, once for all ways that are held against it."""
    known: dict[Any, TrialRecord] = {}

    def train(given: Workload, config: TrainConfig) -> TrialRecord:
        key = (given.name, str(given.validation_data.tensors[0].dtype), config)
        if key not in known:
            known[key] = Trainer(gradients="loop").run(given, config, out=tmp_path_factory.mktemp("alone") / "run")
        return known[key]

    return train


def check(
    given: Workload, configs: Sequence[TrainConfig], out: Path, way: str, alone: Any, *, rel: float
) -> StudyRecord:
    lanes = together(given, configs, out / "lanes", way)
    if any(config.max_grad_norm for config in configs):
        assert lanes.steps["clipped"].any(), "a threshold that is never reached shows nothing"
    for number, config in enumerate(configs):
        assert_same(lanes, number, alone(given, config), rel=rel)
    return lanes


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("optimizer", "rules"), RULES)
def test_every_rule_trains_a_lane_like_a_trial_of_its_own(
    tmp_path: Path, way: str, alone: Any, optimizer: str, rules: str
) -> None:
    lr = {"sgd": 0.02, "momentum": 0.02, "nesterov": 0.02, "rmsprop": 2e-4}.get(optimizer, 2e-3)  # stable for all steps
    given = workload(dtype=torch.float64, optimizer=optimizer, rules=rules, peak_lr=lr)
    check(given, variants(given.config, 3), tmp_path, way, alone, rel=1e-10)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("dtype", "rel"), DIGITS)
def test_every_model_trains_a_lane_like_a_trial_of_its_own(
    tmp_path: Path, way: str, alone: Any, model: str, dtype: torch.dtype, rel: float
) -> None:
    peak_lr = {"tied": 0.01, "batch_norm": 0.005, "conv": 0.01}.get(model, 0.02)  # larger ones let rounding grow
    given = workload(model, dtype=dtype, peak_lr=peak_lr)
    check(given, variants(given.config, 3), tmp_path, way, alone, rel=rel)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("augmented", [False, True])
def test_lanes_may_read_their_data_in_different_orders(tmp_path: Path, way: str, alone: Any, augmented: bool) -> None:
    given = workload("dropout", augmented=augmented, dtype=torch.float64, total_steps=60, eval_every_steps=30)
    configs = [given.config.replace(peak_lr=0.01 * (k + 1), per_host_seed=k % 2) for k in range(4)]
    lanes = check(given.replace(name=f"orders-{augmented}"), configs, tmp_path, way, alone, rel=1e-10)
    first, second = (lanes.trial(n).steps["loss"].iloc[0] for n in (0, 1))
    assert first != second, "another seed must give another first batch"


@pytest.mark.parametrize("way", WAYS)
def test_micro_batches_and_weights(tmp_path: Path, way: str, alone: Any) -> None:
    given = workload(dtype=torch.float64, accumulate_steps=4, total_steps=60, eval_every_steps=30).replace(
        name="weighted", weights=lambda batch: 0.5 + batch[1].double()
    )
    check(given, variants(given.config, 3), tmp_path, way, alone, rel=1e-10)


@pytest.mark.parametrize("way", WAYS)
def test_a_lane_that_diverges_does_not_touch_its_neighbours(tmp_path: Path, way: str) -> None:
    """Bitwise the same as beside a healthy lane for as long as it is in the stack, to rounding after it has left."""
    given = workload("batch_norm", optimizer="sgd", total_steps=200, dtype=torch.float64)
    healthy = [given.config.replace(peak_lr=lr) for lr in (0.01, 0.02, 0.05)]
    configs = [*healthy[:2], given.config.replace(peak_lr=1e308), healthy[2]]
    beside = [*healthy[:2], given.config.replace(peak_lr=0.03), healthy[2]]
    with_nan = together(given, configs, tmp_path / "nan", way)
    without = together(given, beside, tmp_path / "healthy", way)
    assert list(with_nan.trials["state"]) == ["complete", "complete", "diverged", "complete"]
    lost = with_nan.trial(2).steps
    assert not np.isfinite(lost["loss"].iloc[-1])
    assert np.isfinite(lost["loss"].iloc[:-1]).all()
    assert len(lost) < FLUSH_STEPS
    for number in (0, 1, 3):
        rows, expected = with_nan.trial(number).steps, without.trial(number).steps
        in_stack = rows["step"] < FLUSH_STEPS
        for name in ("loss", "grad_norm"):
            np.testing.assert_array_equal(rows[name][in_stack], expected[name][in_stack])
            np.testing.assert_allclose(rows[name], expected[name], rtol=1e-9)
        assert len(rows) == 200


@pytest.mark.parametrize("way", WAYS)
def test_half_precision_forward_passes(tmp_path: Path, way: str, alone: Any) -> None:
    given = workload(precision="bfloat16", total_steps=40, eval_every_steps=20).replace(name="bfloat16")
    lanes = together(given, variants(given.config, 3), tmp_path / "lanes", way)
    for number, config in enumerate(variants(given.config, 3)):
        expected = alone(given, config).steps["loss"]
        np.testing.assert_allclose(lanes.trial(number).steps["loss"], expected, rtol=0.02)  # three digits a product


@pytest.mark.parametrize("way", WAYS)
def test_lanes_of_different_length_and_rule(tmp_path: Path, way: str, alone: Any) -> None:
    given = workload(dtype=torch.float64, total_steps=60, eval_every_steps=20)
    configs = [
        given.config,
        given.config.replace(optimizer="adam", peak_lr=2e-3, total_steps=45),
        given.config.replace(optimizer=torch.optim.Adagrad, peak_lr=1e-2),
        given.config.replace(optimizer="adamw", peak_lr=2e-3, weight_decay=0.1, eval_every_steps=15),
        given.config.replace(schedule="cosine", optimizer="adam", peak_lr=3e-3),
    ]
    check(given, configs, tmp_path, way, alone, rel=1e-10)


@pytest.mark.parametrize("way", WAYS)
def test_interrupted_lanes_go_on_where_they_were(tmp_path: Path, way: str) -> None:
    given = workload("dropout", dtype=torch.float64, optimizer="adam", peak_lr=2e-3, total_steps=80)
    configs = variants(given.config, 3)
    whole = together(given, configs, tmp_path / "whole", way)
    with pytest.raises(StudyInterrupted, match="stopped after step 34 of 80"):
        together(given, configs, tmp_path / "stopped", way, hooks=[At(33, signal.SIGINT)])
    stopped = StudyRecord(tmp_path / "stopped")
    assert list(stopped.trials["state"]) == ["stopped"] * 3
    assert (stopped.steps.groupby("trial").size() == 34).all()
    resumed = together(given, configs, tmp_path / "stopped", way)
    for name in ("loss", "grad_norm", "lr"):
        np.testing.assert_allclose(resumed.steps[name], whole.steps[name], rtol=1e-12)
    assert resumed.evals["value"].tolist() == pytest.approx(whole.evals["value"].tolist(), rel=1e-12)
    assert list(resumed.trials["best_step"]) == list(whole.trials["best_step"])


@pytest.mark.parametrize("way", WAYS)
def test_hooks_see_all_lanes_at_once(tmp_path: Path, way: str) -> None:
    seen: list[Any] = []

    class Looks(Hook):
        def on_start(self, run: Run) -> None:
            seen.append((run.trials, len(run.models), len(run.configs)))

        def on_step(self, step: Step) -> None:
            assert step.loss.shape == step.grad_norm.shape == step.lr.shape == (len(step.trials),)
            assert step.params.shape == step.grad.shape == step.update.shape
            step.record("user/first", step.params[:, 0].clone())

        def on_end(self, record: Any) -> None:
            seen.append(sorted(record.trials["trial"]))

    given = workload(total_steps=20)
    record = together(given, variants(given.config, 3), tmp_path / "run", way, hooks=[Looks()])
    assert seen == [((0, 1, 2), 3, 3), [0, 1, 2]]
    first = record.steps.pivot_table(index="step", columns="trial", values="user/first")
    assert (first.diff().loc[2:] != 0).all(axis=None), "each lane moves at every step after its first, whose lr is 0"
    assert first.loc[0, 0] != first.loc[0, 1], "lanes of different seeds begin with different weights"


def test_what_no_lane_can_be_made_of_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    given = workload()
    config = given.config
    with pytest.raises(UsageError, match="configs is empty"):
        together(given, [], tmp_path / "none", "auto")
    with pytest.raises(ConfigError, match=r"configs\[0\] and configs\[2\] are the same \(peak_lr=0.02"):
        together(given, [config, config.replace(peak_lr=0.1), config.replace()], tmp_path / "twice", "auto")
    with pytest.raises(ConfigError, match=r"configs\[1\] must be a TrainConfig, not dict"):
        together(given, [config, config.to_dict()], tmp_path / "dict", "auto")  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="batch_size") as refused:
        together(given, [config, config.replace(batch_size=65)], tmp_path / "large", "auto")
    assert "configs[1]" in str(refused.value)
    for name in ("none", "twice", "dict", "large"):
        assert not (tmp_path / name / "trials").exists()
