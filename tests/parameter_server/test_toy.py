"""Path B, the source's own example: vocabulary, custom loop, evaluation, export and serving (T5 to T8, behaviour 88)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from notebooks.three_words import (
    CONFIG,
    FEATURES,
    LABELS,
    Toy,
    dataset_fn,
    examples,
    preprocessed,
    step,
    toy_workload,
)
from workbench.parameter_server.cluster.cluster import Cluster
from workbench.parameter_server.coordinator.coordinator import ClusterCoordinator
from workbench.parameter_server.servers.layout import FixedShardsPartitioner
from workbench.parameter_server.servers.placed import PlacedModule
from workbench.parameter_server.strategy import ParameterServerStrategy
from workbench.parameter_server.training.evaluation import evaluate_direct, evaluate_distributed
from workbench.parameter_server.training.strategy_model import StrategyModel

ROOT = Path(__file__).parents[2]
EPOCHS, STEPS = 4, 5


def make(cluster: Cluster) -> tuple[ParameterServerStrategy, PlacedModule]:
    torch.manual_seed(0)
    strategy = ParameterServerStrategy(cluster, variable_partitioner=FixedShardsPartitioner(2))
    return strategy, strategy.place(Toy(), CONFIG)


def train(strategy: ParameterServerStrategy, placed: PlacedModule) -> tuple[list[float], ClusterCoordinator]:
    """T6.6: accuracy of each epoch."""
    coordinator = ClusterCoordinator(strategy)
    batches = iter(coordinator.create_per_worker_dataset(strategy.distribute_datasets_from_function(dataset_fn)))
    right, seen = strategy.variable(0.0), strategy.variable(0.0)
    found = []
    for _ in range(EPOCHS):
        for variable in (right, seen):
            variable.assign(0.0)
        for _ in range(STEPS):
            coordinator.schedule(step, args=(placed, right, seen, batches))
        coordinator.join()
        assert float(seen) > 0
        found.append(float(right) / float(seen))
    last = coordinator.schedule(step, args=(placed, right, seen, batches)).fetch()
    assert float(last) < 0.35
    return found, coordinator


def test_it_is_solved_within_four_epochs(cluster: Cluster) -> None:
    """T5.5, T5.6, T5.8, T6.6, T8.3, T8.4: accuracy 1.0, and on 16 fresh examples too, evaluated here and on the workers; by fit as well."""
    words, labels = examples(7_000, seed=5)
    assert (len(FEATURES), len(LABELS)) == (8, 2)
    assert all(len(set(each)) == 3 for each in words)
    assert labels.count("yes") / 7_000 == pytest.approx(3 / 7, abs=0.03)
    strategy, placed = make(cluster)
    assert placed.shards("embedding.weight") == [(0, (4, 20)), (1, (4, 20))]
    assert [shape for _, shape in placed.shards("dense.weight")] == [(1, 20)]
    found, coordinator = train(strategy, placed)
    assert max(found) == 1.0, found
    assert placed.steps == EPOCHS * STEPS + 1
    data = preprocessed(16, seed=1)
    direct = evaluate_direct(placed, toy_workload(), data, batch_size=8)
    shared = evaluate_distributed(strategy, placed, toy_workload(), data, batch_size=8)
    assert direct["accuracy"] == shared["accuracy"] == 1.0
    assert shared["loss"] == pytest.approx(direct["loss"], rel=1e-9)
    model = StrategyModel(toy_workload(), strategy)
    assert max(model.fit(epochs=6, verbose=0).history["accuracy"]) == 1.0
    assert model.evaluate()["accuracy"] == 1.0
    coordinator.shutdown()


SERVE = """
import json, sys
import torch
from workbench.parameter_server.data.string_lookup import StringLookup

folder = sys.argv[1]
with open(f"{folder}/serving.json") as file:
    stored = json.load(file)
words, labels = (StringLookup(**stored[name]) for name in ("words", "labels"))
program = torch.export.load(f"{folder}/toy.pt2").module()
request = json.load(sys.stdin)
probability = program(words(request))[:, 0].sigmoid()
ids = (probability <= 0.5).long()
json.dump({"probability": probability.tolist(), "label": labels.decode(ids)}, sys.stdout)
"""


@pytest.mark.slow
def test_train_export_reload_serve(cluster: Cluster, tmp_path: Path) -> None:
    """T6.9, T14.4, behaviour 88: shards are merged in the program; a plain process serves words and answers labels."""
    strategy, placed = make(cluster)
    _, coordinator = train(strategy, placed)
    coordinator.shutdown()
    module = placed.module()
    (tmp_path / "serving.json").write_text(json.dumps({"words": asdict(FEATURES), "labels": asdict(LABELS)}))
    words, labels = examples(40, seed=9)
    words.append(["hulk", "never_heard_of", "avenger"])
    shapes = ({0: torch.export.Dim("batch")},)
    torch.export.save(torch.export.export(module, (FEATURES(words[:2]),), dynamic_shapes=shapes), tmp_path / "toy.pt2")
    served = subprocess.run(
        [sys.executable, "-c", SERVE, str(tmp_path)], input=json.dumps(words), capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=tmp_path, check=True,
    )  # fmt: skip
    answer = json.loads(served.stdout)
    with torch.no_grad():
        expected = module(FEATURES(words))[:, 0].sigmoid().tolist()
    assert answer["probability"] == pytest.approx(expected, rel=1e-6)
    assert answer["label"][:40] == labels
