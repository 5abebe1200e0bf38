"""Losses and metrics against numbers worked out by hand or by NumPy, and every error they explain."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from workbench.config import TrainConfig
from workbench.errors import WorkloadError
from workbench.workloads.losses import (
    AbsoluteError,
    Accuracy,
    CrossEntropy,
    SquaredError,
    TokenAccuracy,
    TokenCount,
    TokenCrossEntropy,
    classification,
    language_model,
    next_tokens,
    regression,
)


def numpy_cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> np.ndarray:
    z = logits.double().numpy()
    log_sum = np.log(np.exp(z - z.max(-1, keepdims=True)).sum(-1)) + z.max(-1)
    return log_sum - np.take_along_axis(z, targets.numpy()[..., None], -1)[..., 0]


def test_cross_entropy_is_minus_log_of_the_softmax() -> None:
    logits, targets = torch.randn(5, 3), torch.tensor([0, 1, 2, 2, 0])
    losses = CrossEntropy()(logits, [None, targets])
    np.testing.assert_allclose(losses.numpy(), numpy_cross_entropy(logits, targets), rtol=1e-5)


@pytest.mark.parametrize(("value", "highest"), [(3, 2), (-1, 2), (-100, 2), (10, 2)])
def test_a_class_out_of_range_is_named(value: int, highest: int) -> None:
    with pytest.raises(WorkloadError, match=rf"target {value} is out of range.*3 outputs.*0 to {highest}") as caught:
        CrossEntropy()(torch.zeros(2, 3), [None, torch.tensor([1, value])])
    assert isinstance(caught.value.__cause__, IndexError | RuntimeError)


@pytest.mark.parametrize(
    ("targets", "fix"),
    [
        ([0, 1, 4], "Give the model at least 5 outputs: the targets go from 0 to 4."),
        (
            [1, 2, 3],
            "Number the classes from 0, in every split alike, and give the model as many outputs as there are classes.",
        ),
        ([-1, 1], "Number the classes from 0, in every split alike."),
    ],
)
def test_what_mends_a_class_out_of_range(targets: list[int], fix: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        CrossEntropy()(torch.zeros(len(targets), 3), [None, torch.tensor(targets)])
    assert str(caught.value).endswith(f"). {fix}")


@pytest.mark.parametrize(
    ("outputs", "targets", "said"),
    [
        (torch.zeros(2, 3), torch.zeros(2, 1).long(), r"\(2, 3\) against targets of shape \(2, 1\)"),
        (torch.zeros(2, 3), torch.zeros(2), "torch.float32"),
        (torch.zeros(2, 3), torch.zeros(2, 3), "integer classes"),
        (torch.zeros(2), torch.zeros(2).long(), r"shape \(2,\) against"),
        (torch.zeros(3, 2), torch.zeros(2).long(), r"\(3, 2\) against targets of shape \(2,\)"),
        ({"logits": torch.zeros(2, 3)}, torch.zeros(2).long(), r"returned dict.*\.logits"),
    ],
)
def test_outputs_and_targets_that_do_not_fit(outputs: object, targets: torch.Tensor, said: str) -> None:
    with pytest.raises(WorkloadError, match=said):
        CrossEntropy()(outputs, [None, targets])  # type: ignore[arg-type]


def test_squared_and_absolute_error_average_over_an_example() -> None:
    outputs, targets = torch.tensor([[1.0, 3.0], [0.0, 0.0]]), torch.tensor([[0.0, 0.0], [2.0, -2.0]])
    assert SquaredError()(outputs, [None, targets]).tolist() == [5.0, 4.0]
    assert AbsoluteError()(outputs, [None, targets]).tolist() == [2.0, 2.0]
    assert SquaredError()(outputs[:, 0], [None, targets[:, 0]]).tolist() == [1.0, 4.0]


@pytest.mark.parametrize("loss", [SquaredError(), AbsoluteError()])
def test_regression_never_broadcasts(loss: SquaredError | AbsoluteError) -> None:
    with pytest.raises(WorkloadError, match=r"\(4, 1\) against targets of shape \(4,\).*squeeze\(-1\)"):
        loss(torch.zeros(4, 1), [None, torch.zeros(4)])
    with pytest.raises(WorkloadError, match="returned tuple"):
        loss((torch.zeros(4),), [None, torch.zeros(4)])  # type: ignore[arg-type]


def test_token_loss_is_the_mean_over_counted_tokens() -> None:
    logits, targets = torch.randn(2, 3, 5), torch.tensor([[0, 4, 1], [2, -100, -100]])
    batch = [None, targets]
    losses = TokenCrossEntropy(ignore_index=-100)(logits, batch)
    by_hand = numpy_cross_entropy(logits, targets.clamp(min=0))
    np.testing.assert_allclose(losses.numpy(), [by_hand[0].mean(), by_hand[1, 0]], rtol=1e-5)
    weights = TokenCount(next_tokens, -100)(batch)
    assert weights.tolist() == [3.0, 1.0]
    whole = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
    torch.testing.assert_close((weights * losses).sum() / weights.sum(), whole)


@pytest.mark.parametrize(
    ("loss", "outputs", "targets"),
    [
        (CrossEntropy(), torch.randn(2, 4, 3), torch.tensor([0, 1, 2, 0])),
        (Accuracy(), torch.randn(2, 4, 3), torch.tensor([0, 1, 2, 0])),
        (SquaredError(), torch.randn(2, 4, 3), torch.randn(4, 3)),
        (TokenCrossEntropy(ignore_index=0), torch.randn(2, 4, 3, 5), torch.randint(0, 5, (4, 3))),
        (TokenAccuracy(), torch.randn(2, 4, 3, 5), torch.randint(0, 5, (4, 3))),
    ],
)
def test_lanes_give_what_one_after_the_other_gives(
    loss: CrossEntropy | Accuracy | SquaredError, outputs: torch.Tensor, targets: torch.Tensor
) -> None:
    batch = (None, targets)
    together = torch.func.vmap(lambda lane: loss(lane, batch))(outputs)
    torch.testing.assert_close(together, torch.stack([loss(lane, batch) for lane in outputs]))


FIELDS: dict[str, Any] = {
    "name": "mine",
    "build_model": lambda: nn.Embedding(5, 5),
    "train_data": TensorDataset(torch.zeros(4, 3), torch.zeros(4).long()),
    "validation_data": TensorDataset(torch.zeros(4, 3), torch.zeros(4).long()),
    "config": TrainConfig(peak_lr=0.1, total_steps=10, batch_size=2),
}


def test_each_kind_of_workload_has_its_loss_and_its_metric() -> None:
    logits, batch = torch.tensor([[9.0, 0.0], [9.0, 0.0]]), {"y": torch.tensor([0, 1], dtype=torch.uint8)}
    made = classification(**FIELDS, targets=lambda batch: batch["y"])
    assert made.loss(logits, batch).tolist() == pytest.approx([0.000123, 9.000123], abs=1e-6)
    assert made.metrics["accuracy"](logits, batch).tolist() == [1.0, 0.0]
    outputs, pair = torch.tensor([3.0, 0.0]), [None, torch.tensor([0.0, 1.0])]
    made = regression(**FIELDS)
    assert made.loss(outputs, pair).tolist() == [9.0, 1.0]
    assert made.metrics["absolute_error"](outputs, pair).tolist() == [3.0, 1.0]
    tokens = torch.tensor([[1, 2, 3], [4, 0, 1]])
    made = language_model(**FIELDS)
    outputs = made.forward(made.build_model(), tokens)
    assert outputs.shape == (2, 2, 5)
    assert made.loss(outputs, tokens).shape == made.metrics["token_accuracy"](outputs, tokens).shape == (2,)


def test_z_loss_is_in_the_gradient_and_not_in_the_value() -> None:
    """The derivative of c (log Z)^2 by a logit is 2 c log Z times its probability; every token has its share of the mean."""
    logits, batch = 3 * torch.randn(2, 4, 5, dtype=torch.float64), (None, torch.randint(0, 5, (2, 4)))
    plain, penalised = (language_model(**FIELDS, ignore_index=None, z_loss=c).loss for c in (0.0, 0.01))
    assert torch.equal(plain(logits, batch), penalised(logits, batch))
    grads = [torch.func.grad(lambda z, loss=loss: loss(z, batch).mean())(logits) for loss in (plain, penalised)]
    expected = 2 * 0.01 * logits.logsumexp(-1, keepdim=True) * logits.softmax(-1) / 8
    torch.testing.assert_close(grads[1] - grads[0], expected)


def test_padding_counts_for_nothing() -> None:
    logits, padding = F.one_hot(torch.tensor([[1, 2, 0]]), 3).float(), [None, torch.tensor([[-1, -1, -1]])]
    assert TokenAccuracy()(logits, [None, torch.tensor([[1, 0, 0]])]).tolist() == pytest.approx([2 / 3])
    assert TokenAccuracy(ignore_index=-1)(logits, [None, torch.tensor([[1, 0, -1]])]).tolist() == [0.5]
    assert TokenAccuracy(ignore_index=0)(logits, [None, torch.tensor([[1, 1, 0]])]).tolist() == [0.5], (
        "0 is a class too"
    )
    for metric in (TokenCrossEntropy(ignore_index=-1), TokenAccuracy(ignore_index=-1)):
        assert metric(torch.randn(1, 3, 3), padding).tolist() == [0.0]
    assert TokenCount(next_tokens, -1)(padding).tolist() == [0.0]
