from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from workbench.config import TrainConfig
from workbench.workloads.losses import classification, language_model, regression

FIELDS: dict[str, Any] = {
    "name": "mine",
    "build_model": lambda: nn.Linear(3, 2),
    "train_data": TensorDataset(torch.zeros(4, 3), torch.zeros(4).long()),
    "validation_data": TensorDataset(torch.zeros(4, 3), torch.zeros(4).long()),
    "config": TrainConfig(peak_lr=0.1, total_steps=10, batch_size=2),
}


def test_classification_has_cross_entropy_and_accuracy() -> None:
    workload = classification(**FIELDS)
    logits, batch = torch.tensor([[9.0, 0.0], [9.0, 0.0]]), [None, torch.tensor([0, 1])]
    assert workload.loss(logits, batch).tolist() == pytest.approx([0.000123, 9.000123], abs=1e-6)
    assert workload.metrics["accuracy"](logits, batch).tolist() == [1.0, 0.0]
    assert workload.weights is None


def test_classification_of_mappings() -> None:
    workload = classification(
        **FIELDS, forward=lambda model, batch: model(batch["x"]), targets=lambda batch: batch["label"]
    )
    batch = {"x": torch.zeros(2, 3), "label": torch.tensor([0, 1])}
    assert workload.loss(workload.forward(workload.build_model(), batch), batch).shape == (2,)


def test_regression_has_squared_and_absolute_error() -> None:
    workload = regression(**FIELDS)
    outputs, batch = torch.tensor([3.0, 0.0]), [None, torch.tensor([0.0, 1.0])]
    assert workload.loss(outputs, batch).tolist() == [9.0, 1.0]
    assert workload.metrics["absolute_error"](outputs, batch).tolist() == [3.0, 1.0]


def test_language_model_weighs_by_tokens_where_padding_is_marked() -> None:
    batch = torch.tensor([[1, 2, 3], [1, 2, -100]])
    workload = language_model(**FIELDS)
    assert workload.weights is not None
    assert workload.weights(batch).tolist() == [2.0, 1.0]
    assert language_model(**FIELDS, ignore_index=None).weights is None
    own = language_model(**FIELDS, weights=lambda batch: torch.ones(2))
    assert own.weights is not None
    assert own.weights(batch).tolist() == [1.0, 1.0]


def test_language_model_on_tokens_alone() -> None:
    workload = language_model(**{**FIELDS, "build_model": lambda: nn.Embedding(5, 5)})
    tokens = torch.tensor([[1, 2, 3], [4, 0, 1]])
    outputs = workload.forward(workload.build_model(), tokens)
    assert outputs.shape == (2, 2, 5)
    assert workload.loss(outputs, tokens).shape == (2,)


@pytest.mark.parametrize("helper", [classification, regression, language_model])
def test_an_unknown_field_is_refused(helper: Any) -> None:
    with pytest.raises(TypeError, match="los"):
        helper(**FIELDS, los=None)
