"""The gradient noise scale against its closed form on a regression, and where it cannot be told."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from workbench.config import TrainConfig
from workbench.topics.batch_size.noise_scale import NoiseScale, measure_noise_scale
from workbench.train.trainer import Trainer
from workbench.workloads.base import Workload

DIM, ERROR, NOISE = 20, 0.5, 1.0
CPU = torch.device("cpu")


class Fixed(nn.Module):
    """A linear model that is off by `error` in every weight."""

    def __init__(self, error: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((DIM,), error))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def regression(examples: int = 20_000, *, error: float = ERROR, scale: float = 1.0, batch_size: int = 64) -> Workload:
    """y = noise, x standard normal: B_simple = (d + 1) + d s^2 / |e|^2 at weights e."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(examples, DIM, generator=generator), NOISE * torch.randn(examples, generator=generator)

    def loss(outputs: Tensor, batch: Any) -> Tensor:
        return scale * (outputs - batch[1]).square()

    return Workload(
        name="regression", build_model=lambda: Fixed(error), train_data=TensorDataset(x, y),
        validation_data=TensorDataset(x[:100], y[:100]), loss=loss,
        config=TrainConfig(optimizer="sgd", peak_lr=1e-4, total_steps=10, batch_size=batch_size),
    )  # fmt: skip


def exact(error: float = ERROR) -> float:
    return (DIM + 1) + DIM * NOISE**2 / (DIM * error**2)


def measure(workload: Workload, **more: Any) -> NoiseScale:
    found = measure_noise_scale(workload, workload.config, CPU, **more)
    assert isinstance(found, NoiseScale), found
    return found


@pytest.mark.parametrize("error", [0.5, 0.15])
def test_the_closed_form_lies_within_the_interval(error: float) -> None:
    found = measure(regression(error=error), micro_batches=1000, micro_batch=16)
    assert found.low < exact(error) < found.high
    assert found.value == pytest.approx(exact(error), rel=0.1)
    assert (found.examples, found.micro_batch) == (16_000, 16)


def test_the_interval_holds_the_truth_for_most_seeds() -> None:
    workload = regression(2_000)
    inside = []
    for seed in range(40):
        config = workload.config.replace(per_host_seed=seed)
        found = measure_noise_scale(workload, config, CPU, micro_batches=64, micro_batch=8)
        assert isinstance(found, NoiseScale)
        inside.append(found.low < exact() < found.high)
    assert sum(inside) >= 34, "95 % intervals; fewer than 34 of 40 has a chance below 2e-3"


def test_size_of_the_micro_batch_and_scale_of_the_loss_play_no_part() -> None:
    one = measure(regression(), micro_batches=64, micro_batch=128)
    other = measure(regression(scale=100.0), micro_batches=64, micro_batch=128)
    assert other.value == pytest.approx(one.value, rel=1e-4)
    small = measure(regression(), micro_batches=4096, micro_batch=2)
    assert small.low < exact() < small.high


def test_a_fitted_model_has_no_gradient_beyond_its_noise() -> None:
    found = measure(regression(error=0.0), micro_batch=16)
    assert found.high == math.inf
    assert found.low > 100


def test_identical_examples_have_no_noise() -> None:
    workload = regression(1_000)
    x, y = torch.ones(1_000, DIM), torch.zeros(1_000)
    found = measure(workload.replace(train_data=TensorDataset(x, y)))
    assert found.value == pytest.approx(0.0, abs=1e-6)


def test_too_few_examples_and_nan_give_a_reason_and_no_number() -> None:
    few = regression(15)
    assert measure_noise_scale(few, few.config, CPU) == (
        "the training data have 15 micro-batches of 1, and the noise scale takes 16"
    )
    enough = regression(100)
    assert not isinstance(measure_noise_scale(enough, enough.config, CPU), str), "a batch of 64 is no reason for fewer"
    x = torch.full((1_000, DIM), math.nan)
    broken = regression().replace(train_data=TensorDataset(x, torch.zeros(1_000)))
    assert measure_noise_scale(broken, broken.config, CPU) == "a gradient is not finite"


@pytest.mark.parametrize(("precision", "itemsize"), [(None, 4), ("float64", 8)])
def test_a_model_too_large_for_the_sums_is_not_measured(precision: str | None, itemsize: int) -> None:
    workload = regression(2_000)
    config = workload.config.replace(precision=precision)
    enough = 8 * DIM * itemsize
    assert isinstance(measure_noise_scale(workload, config, CPU, max_bytes=enough), NoiseScale)
    said = measure_noise_scale(workload, config, CPU, max_bytes=enough - 1)
    assert isinstance(said, str)
    assert "more than the limit of" in said


def test_pieces_of_the_parameters_and_float32_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = regression(2_000)
    whole = measure(workload)
    monkeypatch.setattr("workbench.topics.batch_size.noise_scale.COLUMNS", 3)
    assert measure(workload) == pytest.approx(whole, rel=1e-9)
    double = measure_noise_scale(workload, workload.config.replace(precision="float64"), CPU)
    assert isinstance(double, NoiseScale)
    assert whole == pytest.approx(double, rel=1e-4)


def test_at_a_checkpoint_and_nothing_of_the_caller_moves(tmp_path: Any) -> None:
    workload = regression(error=0.5)
    config = workload.config.replace(peak_lr=0.02, total_steps=200)
    best = Trainer(device="cpu").run(workload, config, out=tmp_path / "run").best()
    state = torch.get_rng_state()
    trained = measure(workload, checkpoint=best.checkpoint)
    assert torch.equal(torch.get_rng_state(), state)
    assert trained.low > measure(workload).value, "as the gradient shrinks its noise stays"
