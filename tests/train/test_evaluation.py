"""Evaluation: the same number for every batch size, and a model that does not know it was evaluated (P2.7, P2.11)."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from tests.helpers.workloads import small_net, small_workload, squared
from workbench.config import TrainConfig
from workbench.errors import ConfigError, DataError, UnknownNameError, UsageError, WorkloadError
from workbench.train.evaluation import evaluate
from workbench.workloads.base import Workload

EXAMPLES = 103


class Items(Dataset[Any]):
    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> Any:
        return tuple(t[index] for t in self.tensors)


class Stream(IterableDataset[Any]):
    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __iter__(self) -> Any:
        return zip(*self.tensors, strict=True)


def workload_of(kind: Any = TensorDataset, *, dtype: torch.dtype = torch.float64, **fields: Any) -> Workload:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(EXAMPLES, 3, generator=generator, dtype=dtype)
    y = torch.randn(EXAMPLES, generator=generator, dtype=dtype) * torch.linspace(0.1, 5, EXAMPLES, dtype=dtype)
    return small_workload(validation_data=kind(x, y), **fields)


def values(workload: Workload, model: nn.Module, batch_size: int, **options: Any) -> dict[str, float]:
    return {e.metric: e.value for e in evaluate(workload, model, batch_size=batch_size, **options)}


def exact(workload: Workload, model: nn.Module) -> np.ndarray:
    x, y = workload.validation_data.tensors
    with torch.no_grad():
        return (model.eval()(x).squeeze(-1) - y).square().numpy()


@pytest.mark.parametrize("batch_size", [1, 10, 103, 128])
@pytest.mark.parametrize("kind", [TensorDataset, Items, Stream])
def test_103_examples_give_the_same_metric_for_every_batch_size(kind: Any, batch_size: int) -> None:
    workload, model = workload_of(kind), small_net().double()
    found = values(workload, model, batch_size)
    losses = exact(workload, model)
    assert found["loss"] == pytest.approx(losses.mean(), rel=1e-13)
    assert found["close"] == pytest.approx((np.sqrt(losses) < 0.5).mean(), rel=1e-13)
    assert [e.num_examples for e in evaluate(workload, model, batch_size=batch_size)] == [EXAMPLES] * 2


@pytest.mark.parametrize("kind", [Items, Stream])
def test_the_number_of_workers_moves_nothing(kind: Any) -> None:
    model = small_net().double()
    found = [values(workload_of(kind, num_workers=workers), model, 10) for workers in (0, 1, 2)]
    assert found[0] == found[1] == found[2]
    assert found[0]["loss"] == pytest.approx(exact(workload_of(kind), model).mean(), rel=1e-13)


def test_float32_agrees_to_float_tolerance() -> None:
    workload, model = workload_of(dtype=torch.float32), small_net()
    found = [values(workload, model, size)["loss"] for size in (1, 10, 103, 128)]
    np.testing.assert_allclose(found, found[2], rtol=1e-6)


def test_a_mean_of_batch_means_would_differ_by_the_exact_bias() -> None:
    workload, model = workload_of(), small_net().double()
    batches = np.split(exact(workload, model), range(10, EXAMPLES, 10))
    wrong = np.mean([batch.mean() for batch in batches])
    bias = sum(b.mean() / len(batches) - b.size * b.mean() / EXAMPLES for b in batches)
    assert abs(bias) > 0.01 * wrong, "the planted data must make the difference visible"
    assert values(workload, model, 10)["loss"] == pytest.approx(wrong - bias, rel=1e-12)


@pytest.mark.parametrize("batch_size", [1, 10, 103, 128])
def test_every_mean_is_weighted_and_weight_zero_is_as_good_as_absent(batch_size: int) -> None:
    weights = torch.linspace(0, 3, EXAMPLES, dtype=torch.float64)
    weights[::7] = 0.0
    workload, model = workload_of(), small_net().double()
    x, y = workload.validation_data.tensors
    y = y.clone()
    losses = exact(workload, model)
    y[::7] = math.inf
    padded = workload.replace(validation_data=TensorDataset(x, y, weights), weights=lambda batch: batch[2])
    evaluations = evaluate(padded, model, batch_size=batch_size)
    assert evaluations[0].value == pytest.approx(np.average(losses, weights=weights), rel=1e-13)
    assert evaluations[0].num_examples == int((weights > 0).sum())
    close = (np.sqrt(losses) < 0.5)[weights.numpy() > 0]
    assert evaluations[1].num_correct == close.sum()


def test_correct_predictions_are_counted_for_zeros_and_ones_only() -> None:
    metrics = {"close": small_workload().metrics["close"], "error": lambda o, b: (o.squeeze(-1) - b[1]).abs()}
    found = {e.metric: e for e in evaluate(workload_of(metrics=metrics), small_net().double(), batch_size=10)}
    assert found["loss"].num_correct is None
    assert found["error"].num_correct is None
    assert found["close"].num_correct == round(found["close"].value * EXAMPLES)


class Sensitive(nn.Module):
    """Has everything that an evaluation could disturb."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.frozen_norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.frozen_norm(x))


def test_model_mode_buffers_and_random_state_are_bitwise_unchanged() -> None:
    torch.manual_seed(0)
    model = Sensitive().double().train()
    model.frozen_norm.eval()
    model(torch.randn(16, 3, dtype=torch.float64))
    draws = lambda batch: (np.random.rand(), random.random(), torch.rand(1)) and torch.ones_like(batch[1])  # noqa: E731
    workload = workload_of(Items, build_model=Sensitive, weights=draws)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    rng = (torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate())
    evaluate(workload, model, batch_size=10)
    assert [module.training for module in model.modules()] == modes
    assert any(modes)
    assert not all(modes)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(rng[0], torch.get_rng_state())
    assert rng[1:] == (np.random.get_state()[1].tolist(), random.getstate())
    assert all(p.grad is None for p in model.parameters())


def test_the_model_is_put_back_also_when_the_loss_raises() -> None:
    def raises(outputs: Tensor, batch: Any) -> Tensor:
        raise RuntimeError("planted")

    model = Sensitive().double().train()
    state = torch.get_rng_state()
    with pytest.raises(WorkloadError, match="planted"):
        evaluate(workload_of(loss=raises), model, batch_size=10)
    assert model.training
    assert torch.equal(state, torch.get_rng_state())


def test_evaluation_uses_running_statistics_and_no_dropout() -> None:
    model = Sensitive().double()
    workload = workload_of()
    assert values(workload, model, 1) == pytest.approx(values(workload, model, 103), rel=1e-12)


def test_a_reduced_metric_is_refused() -> None:
    workload = workload_of(metrics={"mse": lambda o, b: squared(o, b).mean()})
    with pytest.raises(WorkloadError, match=r"shape \(\)"):
        evaluate(workload, small_net().double(), batch_size=10)


def test_an_unknown_split_is_named() -> None:
    with pytest.raises(UnknownNameError, match=r"no split 'valid'\. Did you mean 'validation'"):
        evaluate(workload_of(), small_net().double(), split="valid", batch_size=10)


def test_an_evaluation_batch_below_the_training_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"eval_batch_size=16 must be at least batch_size=32.*P2\.7"):
        TrainConfig(peak_lr=0.1, total_steps=10, batch_size=32, eval_batch_size=16)
    assert TrainConfig(peak_lr=0.1, total_steps=10, batch_size=32, eval_batch_size=32).evaluation_batch == 32
    assert TrainConfig(peak_lr=0.1, total_steps=10, batch_size=32).evaluation_batch == 128


def test_a_reduced_metric_is_called_by_its_name_and_place() -> None:
    workload = workload_of(metrics={"acc": lambda outputs, batch: (outputs.squeeze(-1) == batch[1]).double().mean()})
    with pytest.raises(
        WorkloadError,
        match=r"^workload 'small', in the batch of the validation split that begins with example 0: metric 'acc' has shape \(\)",
    ):
        evaluate(workload, small_net().double(), batch_size=8)


def test_a_metric_that_raises_is_explained_with_its_place() -> None:
    def metric(outputs: Tensor, batch: Any) -> Tensor:
        return outputs[:, 0] if len(outputs) == 100 else {}["mask"]

    workload = workload_of(metrics={"m": metric})
    with pytest.raises(WorkloadError, match=r"begins with example 100: forward or loss raised KeyError: 'mask'"):
        evaluate(workload, small_net().double(), batch_size=100)


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        (lambda batch: torch.ones(len(batch[1]), 1), r"weights\(batch\) has shape \(8, 1\).*squeeze"),
        (lambda batch: 0 * batch[1], "gives 0 to all 103 examples of the validation split"),
        (lambda batch: batch[1], "finite and at least 0"),
    ],
)
def test_weights_that_give_no_mean_are_refused(weights: Any, said: str) -> None:
    with pytest.raises(WorkloadError, match=said):
        evaluate(workload_of(weights=weights), small_net().double(), batch_size=8)


def test_values_reach_the_host_before_they_become_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not every device has float64; here every tensor counts as on such a device until `.cpu()`."""
    order: list[str] = []
    double, cpu = Tensor.double, Tensor.cpu
    monkeypatch.setattr(Tensor, "double", lambda self: order.append("double") or double(self))
    monkeypatch.setattr(Tensor, "cpu", lambda self: order.append("cpu") or cpu(self))
    evaluate(workload_of(dtype=torch.float32, metrics={}), small_net(), batch_size=8, precision="float32")
    assert order == ["cpu", "double"] * 2


@pytest.mark.parametrize("batch_size", [0, -1, True, "32", 2.0, None])
def test_a_batch_size_that_is_none_is_refused(batch_size: Any) -> None:
    with pytest.raises(UsageError, match=f"batch_size={batch_size!r} must be an integer of at least 1"):
        evaluate(small_workload(), small_net(), batch_size=batch_size)


def test_an_empty_split_is_refused_by_its_name() -> None:
    nothing = TensorDataset(torch.empty(0, 3), torch.empty(0))
    workload = small_workload(validation_data=nothing)
    with pytest.raises(DataError, match="the validation split has no examples"):
        evaluate(workload, small_net(), batch_size=4)
