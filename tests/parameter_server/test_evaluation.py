"""Inline evaluation: sums that add up to what one process finds, also where workers die (T8.1 to T8.5, behaviours 86, 87)."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.helpers.killed_programs import sigkill
from tests.helpers.workloads import small_workload
from tests.parameter_server.conftest import MakeCluster
from workbench.config import TrainConfig
from workbench.errors import UsageError, WorkloadError
from workbench.parameter_server.coordinator.coordinator import ClusterCoordinator
from workbench.parameter_server.strategy import ParameterServerStrategy
from workbench.parameter_server.training.steps import AdditiveMetric, MetricSet, total
from workbench.parameter_server.training.strategy_model import StrategyModel
from workbench.train.evaluation import evaluate
from workbench.workloads.base import Workload

EXAMPLES = 200


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(EXAMPLES, 4, generator=generator)
    label = (x[:, 0] + torch.randn(EXAMPLES, generator=generator) > 0).double()
    return TensorDataset(x.double(), label, torch.arange(EXAMPLES))


def cross_entropy(outputs: Tensor, batch: Any) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(outputs[:, 0], batch[1], reduction="none")


def accuracy(outputs: Tensor, batch: Any) -> Tensor:
    return ((outputs[:, 0] > 0) == (batch[1] > 0.5)).double()


def absolute(outputs: Tensor, batch: Any) -> Tensor:
    return (outputs[:, 0].sigmoid() - batch[1]).abs()


def double_weight(batch: Any) -> Tensor:
    return 1 + batch[1]


def score(outputs: Tensor, batch: Any) -> Tensor:
    return outputs[:, 0].sigmoid()


def label(batch: Any) -> Tensor:
    return batch[1]  # type: ignore[no-any-return]


def visited(outputs: Tensor, batch: Any, weights: Tensor) -> Tensor:
    return torch.bincount(batch[2], minlength=EXAMPLES)


def slowly_visited(outputs: Tensor, batch: Any, weights: Tensor) -> Tensor:
    time.sleep(0.01)
    return visited(outputs, batch, weights)


def spread(counts: Tensor) -> float:
    return float(counts.min()) if counts.min() == counts.max() else float("nan")


def workload(**fields: Any) -> Workload:
    config = TrainConfig(peak_lr=0.5, total_steps=100, batch_size=20, optimizer="sgd", precision="float64")
    defaults: dict[str, Any] = {
        "name": "signs", "build_model": lambda: nn.Linear(4, 1), "train_data": data(), "validation_data": data(),
        "config": config, "loss": cross_entropy, "metrics": {"accuracy": accuracy, "absolute": absolute},
    }  # fmt: skip
    return Workload(**(defaults | fields))


def auc(bins: int) -> AdditiveMetric:
    """The area under the ROC curve of scores from 0 to 1, counted in bins."""

    def state(outputs: Any, batch: Any, weights: torch.Tensor) -> torch.Tensor:
        place = (score(outputs, batch).double() * bins).long().clamp(0, bins - 1).reshape(-1)
        counts = torch.zeros(2, bins, dtype=torch.float64)
        return counts.index_put_((label(batch).long().reshape(-1), place), weights, accumulate=True)

    def area(counts: torch.Tensor) -> float:
        negatives, positives = counts
        below = torch.cumsum(negatives, 0) - negatives / 2
        return float((positives * below).sum() / (positives.sum() * negatives.sum()))

    return AdditiveMetric(state, area)


ADDITIVE = {"auc": auc(bins=10_000), "visits": AdditiveMetric(visited, spread)}


@pytest.mark.parametrize("weights", [None, double_weight])
@pytest.mark.parametrize("shards", [None, 1, 7, 100])
def test_shards_add_up_to_what_one_process_finds(
    strategy: ParameterServerStrategy, shards: int | None, weights: Any
) -> None:
    """T8.2 to T8.4, behaviour 86: the trainer's own evaluation and scikit-learn are the measure."""
    model = StrategyModel(workload(weights=weights), strategy, metrics=ADDITIVE)
    model.fit(epochs=1, verbose=0)
    found = model.evaluate(batch_size=9, shards=shards)
    expected = {each.metric: each.value for each in evaluate(model.workload, model.module(), batch_size=200)}
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-12)
    x, y, _ = data().tensors
    weight = None if weights is None else (1 + y).numpy()
    with torch.no_grad():
        binned = (model.module()(x)[:, 0].sigmoid() * 10_000).long()
    assert found["auc"] == pytest.approx(roc_auc_score(y.numpy(), binned.numpy(), sample_weight=weight), rel=1e-12)
    assert found["visits"] == 1.0
    assert found == pytest.approx(model.evaluate(where="coordinator", batch_size=200), rel=1e-12)


@pytest.mark.parametrize("seed", [0])
def test_two_workers_die_on_the_way_and_nothing_changes(own_cluster: MakeCluster, seed: int) -> None:
    """Behaviour 86, T14.14: equal to the local result, to far more than 5 digits, and each example counted once."""
    cluster = own_cluster(3, 2)
    slow = {"auc": ADDITIVE["auc"], "visits": AdditiveMetric(slowly_visited, spread)}
    model = StrategyModel(workload(), ParameterServerStrategy(cluster), metrics=slow)
    model.fit(epochs=1, verbose=0)
    expected = model.evaluate(where="coordinator")
    coordinator = ClusterCoordinator(model.strategy)  # type: ignore[arg-type]
    failed: list[int] = []

    def kill() -> None:
        before = coordinator.metrics()["closures_executed"]
        dice = random.Random(seed)
        moment = dice.randint(1, 6)
        while coordinator.metrics()["closures_executed"] < before + moment:
            time.sleep(0.002)
        for worker in dice.sample(range(3), 2):
            sigkill(cluster.engine, "worker", worker)
        failed.append(coordinator.metrics()["closures_executed"] - before)

    killer = threading.Thread(target=kill)
    killer.start()
    found = model.evaluate(batch_size=4)
    killer.join(10.0)
    assert failed[0] < 15, "they died too late to matter"
    assert coordinator.metrics()["worker_failures"] >= 1
    assert found == pytest.approx(expected, rel=1e-12)


def test_evaluation_inside_fit_is_exact_at_every_epoch(strategy: ParameterServerStrategy) -> None:
    """T14.13: at a fixed interval of steps; none in between where fewer are asked for."""
    model = StrategyModel(workload(), strategy, metrics=ADDITIVE)
    history = model.fit(epochs=4, validation_freq=2, verbose=0)
    assert history.history["val_visits"] == [1.0, 1.0]
    assert len(history.history["loss"]) == 4
    assert history.history["val_accuracy"][-1] == model.evaluate()["accuracy"] > 0.6


def test_an_example_of_weight_zero_does_not_count() -> None:
    """Padding: also where its loss is not a number."""
    metrics = MetricSet({}, {})
    state = metrics.state(None, None, torch.tensor([1.0, float("nan"), 3.0]), torch.tensor([1.0, 0.0, 1.0]))
    assert metrics.result(state) == {"loss": 2.0}
    assert total([{}, state, state])["weight"] == 4.0
    with pytest.raises(UsageError, match="no batch"):
        metrics.result(total([]))


def test_bad_metrics() -> None:
    with pytest.raises(UsageError, match=r"\['accuracy'\] are taken"):
        StrategyModel(workload(), metrics={"accuracy": ADDITIVE["auc"]})
    with pytest.raises(UsageError, match="give an AdditiveMetric"):
        StrategyModel(workload(), metrics={"mean": accuracy})  # type: ignore[dict-item]
    mean = small_workload(metrics={"mean": lambda outputs, batch: outputs.mean()})
    with pytest.raises(WorkloadError, match="metric 'mean' has shape"):
        StrategyModel(mean).evaluate()
