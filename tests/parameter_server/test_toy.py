"""Path B, the source's own example: vocabulary, custom loop, evaluation, export and serving (T5 to T8, behaviour 88)."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from workbench.config import TrainConfig
from workbench.errors import UsageError
from workbench.parameter_server.cluster import Cluster
from workbench.parameter_server.coordinator import ClusterCoordinator
from workbench.parameter_server.evaluation import evaluate_direct, evaluate_distributed
from workbench.parameter_server.partitioners import FixedShardsPartitioner
from workbench.parameter_server.placed import PlacedModule
from workbench.parameter_server.strategy import ParameterServerStrategy
from workbench.parameter_server.string_lookup import StringLookup
from workbench.parameter_server.variable import Variable
from workbench.train.artifacts import export_program
from workbench.workloads.base import Workload

ROOT = Path(__file__).parents[2]
WORDS = ("avenger", "ironman", "batman", "hulk", "spiderman", "kingkong", "wonder_woman")
FEATURES = StringLookup(WORDS)
LABELS = StringLookup(("yes", "no"), num_oov_indices=0)
CONFIG = TrainConfig(optimizer="rmsprop", momentum=0.0, peak_lr=0.1, total_steps=20, batch_size=32)
EXAMPLES, EPOCHS, STEPS = 200, 4, 5


class Toy(nn.Module):
    """The mean of three words' embeddings, and one output: a logit, whose sigmoid is the source's output."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(FEATURES), 20)
        nn.init.uniform_(self.embedding.weight, -0.05, 0.05)
        self.dense = nn.Linear(20, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.dense(self.embedding(ids).mean(1))  # type: ignore[no-any-return]


def examples(count: int, seed: int) -> tuple[list[list[str]], list[str]]:
    """Three different words; yes where one of them is the first of the vocabulary."""
    generator = random.Random(seed)
    words = [generator.sample(WORDS, 3) for _ in range(count)]
    return words, ["yes" if "avenger" in each else "no" for each in words]


def preprocessed(count: int, seed: int) -> TensorDataset:
    words, labels = examples(count, seed)
    return TensorDataset(FEATURES(words), LABELS(labels))


def dataset_fn(context: Any) -> Iterator[Any]:
    """Made on each worker, endless, shuffled there; the tables came with the function."""
    generator = torch.Generator().manual_seed(context.input_pipeline_id)
    while True:
        yield from DataLoader(preprocessed(EXAMPLES, seed=0), batch_size=32, shuffle=True, generator=generator)


def losses(logits: Tensor, batch: Any) -> Tensor:
    """Binary cross-entropy, one value per example; "yes" is id 0."""
    return nn.functional.binary_cross_entropy_with_logits(logits[:, 0], (batch[1] == 0).float(), reduction="none")


def accuracy(logits: Tensor, batch: Any) -> Tensor:
    return ((logits[:, 0].sigmoid() > 0.5) == (batch[1] == 0)).float()


def step(placed: PlacedModule, right: Variable, seen: Variable, batches: Iterator[Any]) -> Tensor:
    """T5.9: mean of the examples' losses, gradients, update; the metric's state lives on a server."""
    batch = next(batches)
    with placed.step() as module:
        logits = module(batch[0])
        loss = losses(logits, batch).mean()
        loss.backward()
    right.assign_add(accuracy(logits, batch).sum())
    seen.assign_add(float(len(logits)))
    return loss


def workload() -> Workload:
    data = preprocessed(16, seed=1)
    return Workload(
        name="toy", build_model=Toy, train_data=preprocessed(EXAMPLES, seed=0), validation_data=data, config=CONFIG, loss=losses,
        metrics={"accuracy": accuracy},
    )  # fmt: skip


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


def test_tables_and_data() -> None:
    """T5.5, T5.6: 8 ids and 2; three of seven words, so that 3/7 of the labels are yes."""
    assert (len(FEATURES), len(LABELS)) == (8, 2)
    words, labels = examples(7_000, seed=5)
    assert all(len(set(each)) == 3 for each in words)
    share, expected = labels.count("yes") / 7_000, 3 / 7
    assert abs(share - expected) < 5 * (expected * (1 - expected) / 7_000) ** 0.5
    with pytest.raises(UsageError, match="no id for unknown"):
        LABELS(["perhaps"])


def test_the_embedding_is_in_two_shards_on_two_servers(cluster: Cluster) -> None:
    """T3.8, T5.8: (8, 20) as two shards (4, 20) on servers 0 and 1; nothing else can be split."""
    _, placed = make(cluster)
    assert placed.shards("embedding.weight") == [(0, (4, 20)), (1, (4, 20))]
    assert [shape for _, shape in placed.shards("dense.weight")] == [(1, 20)]
    assert [shape for _, shape in placed.shards("dense.bias")] == [(1,)]


def test_it_is_solved_within_four_epochs(cluster: Cluster) -> None:
    """T6.6, T8.3, T8.4: accuracy 1.0, and on 16 fresh examples too, evaluated here and on the workers."""
    strategy, placed = make(cluster)
    found, coordinator = train(strategy, placed)
    assert max(found) == 1.0, found
    assert placed.steps == EPOCHS * STEPS + 1
    data = preprocessed(16, seed=1)
    direct = evaluate_direct(placed, workload(), data, batch_size=8)
    shared = evaluate_distributed(strategy, placed, workload(), data, batch_size=8)
    assert direct["accuracy"] == shared["accuracy"] == 1.0
    assert shared["loss"] == pytest.approx(direct["loss"], rel=1e-9)
    coordinator.shutdown()


SERVE = """
import json, sys
import torch
from workbench.parameter_server.string_lookup import StringLookup

folder = sys.argv[1]
with open(f"{folder}/serving.json") as file:
    stored = json.load(file)
words, labels = (StringLookup.from_dict(stored[name]) for name in ("words", "labels"))
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
    export_program(workload(), module, tmp_path / "toy.pt2")
    (tmp_path / "serving.json").write_text(json.dumps({"words": FEATURES.to_dict(), "labels": LABELS.to_dict()}))
    words, labels = examples(40, seed=9)
    words.append(["hulk", "never_heard_of", "avenger"])
    served = subprocess.run(
        [sys.executable, "-c", SERVE, str(tmp_path)], input=json.dumps(words), capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=tmp_path, check=True,
    )  # fmt: skip
    answer = json.loads(served.stdout)
    with torch.no_grad():
        expected = module(FEATURES(words))[:, 0].sigmoid().tolist()
    assert answer["probability"] == pytest.approx(expected, rel=1e-6)
    assert answer["label"][:40] == labels
