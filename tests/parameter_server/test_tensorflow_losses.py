"""Losses of one worker against TensorFlow's, which `tests/benchmarks/equal_losses.py --store` wrote down from its own parameter servers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.data import IterableDataset

from tests.benchmarks.equal_losses import MOMENTUM, NETS, PRECISIONS, RULES, module, scheduled_losses, start
from workbench.config import TrainConfig
from workbench.parameter_server.cluster.cluster import Cluster
from workbench.parameter_server.strategy import ParameterServerStrategy
from workbench.parameter_server.training.strategy_model import StrategyModel
from workbench.parameter_server.training.trainer import ParameterServerTrainer
from workbench.workloads.base import Workload

NET = NETS["small"]
THEIRS = json.loads((Path(__file__).parent / "tensorflow_losses.json").read_text())["losses"]
WITHIN = {"float32": 1e-5, "float64": 1e-12}

curves = pytest.mark.parametrize(
    ("rule", "precision"), [(rule, precision) for rule in RULES for precision in PRECISIONS]
)


class Examples(IterableDataset[Any]):
    """What TensorFlow's steps were given, in that order."""

    def __init__(self, precision: str) -> None:
        self.given = start(NET, precision)

    def __len__(self) -> int:
        return NET.steps * NET.batch

    def __iter__(self) -> Iterator[Any]:
        return zip(torch.from_numpy(self.given.x).flatten(0, 1), torch.from_numpy(self.given.y).flatten(), strict=True)


def workload(rule: str, precision: str) -> Workload:
    given = Examples(precision)
    return Workload(
        name="beside TensorFlow",
        build_model=lambda: module(NET, given.given),
        train_data=given,
        validation_data=given,
        loss=lambda outputs, batch: functional.cross_entropy(outputs, batch[1], reduction="none"),
        config=TrainConfig(
            peak_lr=NET.lr, total_steps=NET.steps, batch_size=NET.batch, optimizer=rule, momentum=MOMENTUM,  # type: ignore[arg-type]
            precision=precision, eval_every_steps=NET.steps,  # type: ignore[arg-type]
        ),
    )  # fmt: skip


def theirs(rule: str, precision: str) -> Any:
    return pytest.approx(THEIRS[f"small/{rule}/{precision}"], rel=0, abs=WITHIN[precision])


def test_the_curves_tell_rules_and_learning_rates_apart() -> None:
    """A tolerance that everything would meet shows nothing."""
    found = [THEIRS[f"small/{rule}/float64"] for rule in RULES]
    assert all(len(curve) == NET.steps and curve[-1] < 0.7 * curve[0] for curve in found)
    for one, other in ((0, 1), (1, 2), (0, 2)):
        assert max(abs(a - b) for a, b in zip(found[one], found[other], strict=True)) > 1e-3


@curves
def test_a_loop_of_ones_own_has_tensorflow_s_losses(lone_cluster: Cluster, rule: str, precision: str) -> None:
    """From the same values and batches, step by step."""
    assert scheduled_losses(lone_cluster, NET, rule, precision) == theirs(rule, precision)


def test_an_lr_that_is_a_thousandth_larger_is_seen(lone_cluster: Cluster) -> None:
    found = scheduled_losses(lone_cluster, NET._replace(lr=1.001 * NET.lr), "sgd", "float32")
    assert found != theirs("sgd", "float32")


@curves
def test_fit_has_tensorflow_s_losses(lone_cluster: Cluster, rule: str, precision: str) -> None:
    """T4.2."""
    model = StrategyModel(workload(rule, precision), ParameterServerStrategy(lone_cluster))
    history = model.fit(model.workload.train_data, epochs=NET.steps, steps_per_epoch=1, verbose=0)
    assert history.history["loss"] == theirs(rule, precision)


@pytest.mark.parametrize(("rule", "precision"), [("sgd", "float32"), ("nesterov", "float64")])
def test_a_trial_has_tensorflow_s_losses(engine: Any, tmp_path: Path, rule: str, precision: str) -> None:
    record = ParameterServerTrainer(workers=1, servers=2, engine=engine).run(
        workload(rule, precision), out=tmp_path / "s"
    )
    assert record.steps["loss"].tolist() == theirs(rule, precision)
