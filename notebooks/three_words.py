"""The tutorial's own example: is one word among three? Data, model and step of a custom training loop (T5, T6, behaviour 88)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from workbench.config import TrainConfig
from workbench.parameter_server.data.string_lookup import StringLookup
from workbench.parameter_server.servers.placed import PlacedModule
from workbench.parameter_server.servers.variable import Variable
from workbench.workloads.base import Workload

WORDS = ("avenger", "ironman", "batman", "hulk", "spiderman", "kingkong", "wonder_woman")
FEATURES = StringLookup(WORDS)
"""Words to ids: 7 and one for all others (T5.5)."""
LABELS = StringLookup(("yes", "no"), num_oov_indices=0)
CONFIG = TrainConfig(optimizer="rmsprop", momentum=0.0, peak_lr=0.1, total_steps=20, batch_size=32)
EXAMPLES = 200


class Toy(nn.Module):
    """The mean of three words' embeddings, and one output: a logit, whose sigmoid is the source's output (T5.8)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.dense = nn.Embedding(len(FEATURES), 20), nn.Linear(20, 1)
        nn.init.uniform_(self.embedding.weight, -0.05, 0.05)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits, shape (batch, 1), of ids of shape (batch, 3)."""
        return self.dense(self.embedding(ids).mean(1))  # type: ignore[no-any-return]


def examples(count: int, seed: int) -> tuple[list[list[str]], list[str]]:
    """Return three different words for each example, and "yes" where the first of the vocabulary is among them (T5.6)."""
    generator = random.Random(seed)
    words = [generator.sample(WORDS, 3) for _ in range(count)]
    return words, ["yes" if WORDS[0] in each else "no" for each in words]


def preprocessed(count: int, seed: int) -> TensorDataset:
    """Return examples as ids."""
    words, labels = examples(count, seed)
    return TensorDataset(FEATURES(words), LABELS(labels))


def dataset_fn(context: Any) -> Iterator[Any]:
    """Return a worker's batches, endless and shuffled there; the tables came with the function (T5.7, T7.4, T7.5)."""
    generator = torch.Generator().manual_seed(context.input_pipeline_id)
    while True:
        yield from DataLoader(preprocessed(EXAMPLES, seed=0), batch_size=32, shuffle=True, generator=generator)


def losses(logits: Tensor, batch: Any) -> Tensor:
    """Return the binary cross-entropy of each example; "yes" is id 0."""
    return nn.functional.binary_cross_entropy_with_logits(logits[:, 0], (batch[1] == 0).float(), reduction="none")


def accuracy(logits: Tensor, batch: Any) -> Tensor:
    """Return 1 for each example whose probability is on the right side of 0.5."""
    right: Tensor = (logits[:, 0] > 0) == (batch[1] == 0)
    return right.float()


def step(placed: PlacedModule, right: Variable, seen: Variable, batches: Iterator[Any]) -> Any:
    """Make one update on a worker and return its loss; the metric's state lives on a server (T5.9)."""
    batch = next(batches)
    with placed.step() as module:
        logits = module(batch[0])
        loss: Any = losses(logits, batch).mean()
        loss.backward()
    right.assign_add(accuracy(logits, batch).sum())
    seen.assign_add(float(len(logits)))
    return loss


def toy_workload() -> Workload:
    """Return the example as a workload, with 16 fresh examples for evaluation (T8.3)."""
    return Workload(
        name="toy", build_model=Toy, train_data=preprocessed(EXAMPLES, seed=0), validation_data=preprocessed(16, seed=1), config=CONFIG,
        loss=losses, metrics={"accuracy": accuracy},
    )  # fmt: skip
