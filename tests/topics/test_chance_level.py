"""The best constant output, against entropies and variances that are known."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from tests.helpers.workloads import small_workload
from workbench.topics.lr_sweep.collect import measure_chance
from workbench.topics.lr_sweep.study import LRSweep
from workbench.train.trainer import Trainer
from workbench.workloads.base import Workload
from workbench.workloads.losses import classification, language_model

CPU = torch.device("cpu")
Y = torch.tensor([0] * 30 + [1] * 20 + [2] * 10)
X = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
ENTROPY = -sum(p * math.log(p) for p in (1 / 2, 1 / 3, 1 / 6))


def chance(workload: Workload) -> float | None:
    return measure_chance(workload, workload.config, CPU)


def full_batch(x: Tensor, y: Tensor) -> dict[str, Any]:
    config = small_workload(config={"batch_size": len(x), "precision": None}).config
    data = TensorDataset(x, y)
    return {"name": "w", "train_data": data, "validation_data": data, "config": config}


def own(build: Any, loss: Any, **fields: Any) -> Workload:
    return Workload(build_model=build, loss=loss, **full_batch(X, Y), **fields)


def test_frequencies_of_classes_and_tokens() -> None:
    assert chance(classification(build_model=lambda: nn.Linear(4, 5), **full_batch(X, Y))) == pytest.approx(ENTROPY)
    weighted = classification(build_model=lambda: nn.Linear(4, 3), **full_batch(X, Y)).replace(
        weights=lambda batch: torch.tensor([1.0, 1.5, 3.0])[batch[1]]
    )
    assert chance(weighted) == pytest.approx(math.log(3)), "weights that level the classes"
    tokens = torch.tensor([0, 0, 0, 1]).repeat(20, 3)
    words = language_model(build_model=lambda: nn.Embedding(7, 7), **full_batch(tokens[:, :-1], tokens[:, 1:]))
    share = float((tokens[:, 1:] == 0).double().mean())
    assert chance(words) == pytest.approx(-share * math.log(share) - (1 - share) * math.log(1 - share))
    assert chance(words.replace(loss=type(words.loss)(ignore_index=1))) is None, "one token alone"


@pytest.mark.parametrize(("last", "loss", "expected"), [
    (nn.Softmax(-1), lambda o, b: F.nll_loss(o.log(), b[1], reduction="none"), ENTROPY),
    (nn.Identity(), lambda o, b: F.cross_entropy(o, b[1], reduction="none") - 1000.0, ENTROPY - 1000.0),
])  # fmt: skip
def test_a_loss_of_ones_own_over_classes(last: nn.Module, loss: Any, expected: float) -> None:
    found = chance(own(lambda: nn.Sequential(nn.Linear(4, 3), last), loss))
    assert found is not None
    assert found == pytest.approx(expected, abs=2e-4)


def test_a_density_and_the_variance_that_a_study_knows(tmp_path: Any) -> None:
    def density(o: Tensor, b: Any) -> Tensor:
        return F.gaussian_nll_loss(o[:, 0], b[0][:, 0], o[:, 1].exp(), reduction="none", full=True)

    spread = float(X[:, 0].double().std(correction=0))
    assert chance(own(lambda: nn.Linear(4, 2), density)) == pytest.approx(math.log(spread) + 0.5 * math.log(2 * math.pi * math.e), abs=1e-3)  # fmt: skip
    before, workload = torch.get_rng_state(), small_workload()
    record = LRSweep(lrs=(0.01,)).run(workload, Trainer(device="cpu"), out=tmp_path / "s")
    variance = float(workload.train_data.tensors[1].double().var(correction=0))
    assert record.facts["chance_loss"] == chance(workload) == pytest.approx(variance, rel=1e-3)
    assert torch.equal(torch.get_rng_state(), before)


def variational(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    mean, logvar = m(x).chunk(2, 1)
    return torch.tanh(mean), mean, logvar


def elbo(o: Any, b: Any) -> Tensor:
    return (o[0] - b[0]).square().mean(1) + (o[1].square() + o[2].exp() - o[2] - 1).sum(1) / 2


def test_several_outputs_have_a_constant_each_where_the_model_makes_them_all() -> None:
    def made(forward: Any, loss: Any) -> Workload:
        return own(lambda: nn.Linear(4, 8), loss, forward=lambda m, b: forward(m, b[0]))

    variance = float(X.var(0, correction=0).mean())
    assert chance(made(variational, elbo)) == pytest.approx(variance, rel=1e-3), "the mean input, and no code"
    masked = made(lambda m, x: (m(x)[:, :4], (x > 0).float()), lambda o, b: ((o[0] - b[0]).square() * o[1]).sum(1))
    assert chance(masked) is None, "a mask is no output that training could make constant"
    pairs = made(lambda m, x: (m(x), m(-x)), lambda o, b: (o[0] - o[1]).square().sum(1))
    assert chance(pairs) is None, "two views are held against each other, not against the batch"


@pytest.mark.parametrize(("loss", "forward"), [
    (lambda o, b: o.squeeze(-1), None), (lambda o, b: -F.softplus(o.squeeze(-1)).log(), None),
    (lambda o, b: o[0].squeeze(-1) ** 2, lambda m, b: (m(b[0]), 1)), (lambda o, b: o.squeeze(-1) ** 2, None),
], ids=["linear", "without a floor", "no tensor", "nothing of the batch"])  # fmt: skip
def test_a_loss_without_a_best_constant_has_no_chance(loss: Any, forward: Any) -> None:
    assert chance(own(lambda: nn.Linear(4, 1), loss, **({} if forward is None else {"forward": forward}))) is None
