"""Evaluation: the same number for every batch size, and a model that does not know it was evaluated (P2.7, P2.11)."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.helpers.datasets import Items, Stream
from tests.helpers.workloads import small_net, small_workload, squared
from workbench.config import TrainConfig
from workbench.errors import DataError, UnknownNameError, UsageError, WorkloadError
from workbench.train.evaluation import evaluate
from workbench.train.example_values import Dependence, batch_dependence, evaluation_batch, example_values, float_tensors
from workbench.workloads.base import Workload
from workbench.workloads.losses import classification

EXAMPLES = 103


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
    assert evaluations[1].num_correct == close.sum(), "counted for a metric of zeros and ones"
    assert evaluations[0].num_correct is None


class Sensitive(nn.Module):
    """Has everything that an evaluation could disturb."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.frozen_norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.frozen_norm(x))


def raises(outputs: Tensor, batch: Any) -> Tensor:
    raise RuntimeError("planted")


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
    with pytest.raises(WorkloadError, match="planted"):
        evaluate(workload.replace(loss=raises), model, batch_size=10)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(rng[0], torch.get_rng_state())
    assert values(workload_of(), model, 1) == pytest.approx(values(workload_of(), model, 103), rel=1e-12)


PLACE = "^workload 'small', in the batch of the validation split that begins with example "
NOTHING = TensorDataset(torch.empty(0, 3), torch.empty(0))


@pytest.mark.parametrize(("fields", "error", "said"), [
    ({"metrics": {"acc": lambda o, b: squared(o, b).mean()}}, WorkloadError, PLACE + r"0: metric 'acc' has shape \(\)"),
    ({"metrics": {"m": lambda o, b: o[:, 0] if len(o) == 100 else {}["mask"]}}, WorkloadError, PLACE + "100: forward or loss raised KeyError: 'mask'"),
    ({"weights": lambda batch: torch.ones(len(batch[1]), 1)}, WorkloadError, r"weights\(batch\) has shape \(100, 1\).*squeeze"),
    ({"weights": lambda batch: 0 * batch[1]}, WorkloadError, "gives 0 to all 103 examples of the validation split"),
    ({"weights": lambda batch: batch[1]}, WorkloadError, "finite and at least 0"),
    ({"validation_data": NOTHING}, DataError, "the validation split has no examples"),
])  # fmt: skip
def test_what_gives_no_mean_is_refused_with_its_place(
    fields: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        evaluate(workload_of().replace(**fields), small_net().double(), batch_size=100)


@pytest.mark.parametrize(("how", "error", "said"), [
    *(({"batch_size": n}, UsageError, f"batch_size={n!r} must be an integer of at least 1") for n in (0, True, "32", 2.0)),
    ({"batch_size": 4, "split": "valid"}, UnknownNameError, r"no split 'valid'\. Did you mean 'validation'"),
])  # fmt: skip
def test_wrong_arguments_are_named(how: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        evaluate(small_workload(), small_net(), **how)


# Example by example

X, Y = torch.randn(23, 2, 2, generator=torch.Generator().manual_seed(0)), torch.arange(23) % 3
CLASSES = classification(
    name="c", build_model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), train_data=TensorDataset(X, Y),
    validation_data=TensorDataset(X, Y), config=TrainConfig(peak_lr=0.1, total_steps=5, batch_size=4),
)  # fmt: skip
HOW: dict[str, Any] = {"device": torch.device("cpu"), "precision": None}


def test_classes_and_inputs_come_in_the_order_of_the_data_and_nan_passes_through() -> None:
    bad = X.clone()
    bad[3, 0, 0] = math.nan
    workload = CLASSES.replace(validation_data=TensorDataset(bad, Y))
    model, before = CLASSES.build_model(), torch.get_rng_state()
    found = example_values(workload, model, split="validation", batch_size=7, max_features=100, **HOW)
    assert torch.equal(torch.get_rng_state(), before)
    assert (found.labels.tolist(), found.classes) == (Y.tolist(), 3)
    np.testing.assert_allclose(found.features, bad.flatten(1))
    assert np.flatnonzero(~np.isfinite(found.columns["loss"])).tolist() == [3]
    few = example_values(CLASSES, model, split="train", batch_size=7, max_features=2, **HOW)
    np.testing.assert_allclose(few.features, X.flatten(1)[:, [0, 3]])
    part = few.only(np.arange(23) < 5)
    assert [len(v) for v in (part.weights, part.columns["loss"], part.labels, part.features)] == [5, 5, 5, 5]
    batch = {"a": X, "b": [Y, (X[0], "text")], "c": 3}
    assert [t.shape for t in float_tensors(batch)] == [X.shape, X[0].shape]


# Losses that couple the examples of a batch


@pytest.mark.parametrize(
    ("outputs", "losses", "coupled"), [(0.0, 0.9e-3, False), (0.0, 1.1e-3, True), (0.9e-3, 0.5, True), (1.1e-3, 0.5, False)]
)  # fmt: skip
def test_a_thousandth_is_rounding_of_what_the_loss_says_and_of_what_the_model_does(
    outputs: float, losses: float, coupled: bool
) -> None:
    """In batches of two either is larger by this share than in one of all 16; one that is coupled is evaluated as it is trained."""

    def forward(model: nn.Module, batch: Any) -> Tensor:
        out: Tensor = model(batch[0]) * (1 + outputs * (len(batch[0]) < 9))
        return out

    def loss(_: Tensor, batch: Any) -> Tensor:
        return torch.ones(len(batch[0]), dtype=torch.float64) * (1 + losses * (len(batch[0]) < 9))

    x = torch.randn(16, 3, generator=torch.Generator().manual_seed(0)).double()
    data = TensorDataset(x, x[:, 0])
    workload = small_workload(forward=forward, loss=loss, train_data=data, validation_data=data)
    found = batch_dependence(workload, nn.Linear(3, 1).double(), [data[i] for i in range(16)])
    assert found == Dependence(0.0, pytest.approx(losses), coupled)
    config = workload.config.replace(batch_size=8, accumulate_steps=2)
    assert evaluation_batch(workload, config, torch.device("cpu")) == (4 if coupled else 32)
    assert evaluation_batch(workload, config.replace(eval_batch_size=9), torch.device("cpu")) == 9
