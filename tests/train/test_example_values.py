"""Values example by example: their means are those of an evaluation, and nothing is left changed."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.helpers.workloads import small_net, small_workload
from workbench.config import TrainConfig
from workbench.errors import WorkloadError
from workbench.train.evaluation import evaluate, example_values, float_tensors
from workbench.workloads.losses import classification

CPU = torch.device("cpu")
X, Y = torch.randn(23, 2, 2, generator=torch.Generator().manual_seed(0)), torch.arange(23) % 3
CLASSES = classification(
    name="c", build_model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), train_data=TensorDataset(X, Y),
    validation_data=TensorDataset(X, Y), config=TrainConfig(peak_lr=0.1, total_steps=5, batch_size=4),
)  # fmt: skip


@pytest.mark.parametrize("batch_size", [1, 5, 100])
def test_means_are_those_of_an_evaluation(batch_size: int) -> None:
    weights = lambda batch: batch[1].abs()  # noqa: E731
    workload = small_workload(weights=weights, build_model=lambda: small_net(0.5))
    model = small_net(0.5).double()
    found = example_values(workload, model, split="validation", batch_size=batch_size, device=CPU, precision="float64")
    for row in evaluate(workload, model, batch_size=13, precision="float64"):
        mean = np.average(found.columns[row.metric], weights=found.weights)
        assert mean == pytest.approx(row.value, rel=1e-12)
    assert model.training
    assert found.labels is None
    assert found.classes is None
    assert found.features is None


def test_classes_and_inputs_come_in_the_order_of_the_data() -> None:
    found = example_values(
        CLASSES, CLASSES.build_model(), split="train", batch_size=7, device=CPU, precision=None, max_features=100
    )
    assert found.labels is not None
    assert found.features is not None
    assert found.labels.tolist() == Y.tolist()
    assert found.classes == 3
    assert np.allclose(found.features, X.flatten(1).numpy())
    few = example_values(
        CLASSES, CLASSES.build_model(), split="train", batch_size=7, device=CPU, precision=None, max_features=2
    )
    assert few.features is not None
    assert np.allclose(few.features, X.flatten(1)[:, [0, 3]].numpy())
    part = found.only(np.arange(23) < 5)
    assert [len(v) for v in (part.weights, part.columns["loss"], part.labels, part.features)] == [5, 5, 5, 5]  # type: ignore[arg-type]


def test_the_random_state_is_untouched() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    example_values(CLASSES, CLASSES.build_model(), split="train", batch_size=7, device=CPU, precision=None)
    model = CLASSES.build_model()
    before = torch.get_rng_state()
    example_values(CLASSES, model, split="train", batch_size=7, device=CPU, precision=None)
    assert torch.equal(before, torch.get_rng_state())


def test_a_metric_of_one_value_per_batch_is_an_error_that_names_it() -> None:
    workload = small_workload(metrics={"mean": lambda outputs, batch: outputs.mean()})
    with pytest.raises(WorkloadError, match=r"metric 'mean' has shape \(\)"):
        example_values(
            workload, small_net().double(), split="validation", batch_size=4, device=CPU, precision="float64"
        )


def test_values_that_are_not_finite_pass_through() -> None:
    bad = X.clone()
    bad[3, 0, 0] = math.nan
    workload = CLASSES.replace(validation_data=TensorDataset(bad, Y))
    found = example_values(
        workload, CLASSES.build_model(), split="validation", batch_size=7, device=CPU, precision=None, max_features=9
    )
    assert np.flatnonzero(~np.isfinite(found.columns["loss"])).tolist() == [3]
    assert found.features is not None
    assert np.isnan(found.features).sum() == 1


def test_floating_tensors_of_a_nested_batch() -> None:
    batch = {"a": X, "b": [Y, (X[0], "text")], "c": 3}
    assert [t.shape for t in float_tensors(batch)] == [X.shape, X[0].shape]
