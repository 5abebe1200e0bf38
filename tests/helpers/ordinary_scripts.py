"""Trainings on many hosts as people write them, each right as it stands, and each with one bug on request.

`python -m tests.helpers.ordinary_scripts FOLDER` runs all of them on the ranks that a launcher has started, each under an audit
of its own, right and wrong.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler, Subset, TensorDataset

from tests.helpers import planted_hosts
from workbench.topics.hosts.watch import HostsWatch

EXAMPLES, BATCH = 80, 8


def toy(examples: int = EXAMPLES, seed: int = 1) -> TensorDataset:
    inputs = torch.randn(examples, 6, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))


def epochs(data: Dataset[Any], count: int = 2, **settings: Any) -> Iterator[Any]:
    """The batches of this host, epoch by epoch."""
    sampler: DistributedSampler[Any] = DistributedSampler(data)  # type: ignore[arg-type]
    loader = DataLoader(data, BATCH, sampler=sampler, **settings)
    for epoch in range(count):
        sampler.set_epoch(epoch)
        yield from loader


def update(optimizer: Any, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def accumulated(bug: bool, out: Path) -> None:
    """Gradients of four micro-batches are averaged once. Bug: never."""
    model = DistributedDataParallel(small())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for number, (inputs, labels) in enumerate(epochs(toy(256))):
        last = number % 4 == 3
        with contextlib.nullcontext() if last and not bug else model.no_sync():
            (cross_entropy(model(inputs), labels) / 4).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()


def averaged_by_hand(bug: bool, out: Path) -> None:
    """No wrapper: parameters are sent around, and gradients are averaged one by one. Bug: parameters are not sent."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    for parameter in () if bug else model.parameters():
        dist.broadcast(parameter.data, 0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(Subset(toy(), range(rank, EXAMPLES, world)), BATCH, shuffle=True)
    for inputs, labels in itertools.chain(loader, loader):
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world  # type: ignore[operator]
        optimizer.step()


class Checkpointed(nn.Module):
    """Two parts whose activations are computed again in the backward pass."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.last, self.reentrant = nn.Linear(6, 16), nn.Linear(16, 2), reentrant
        self.parts = nn.ModuleList([nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.ReLU()) for _ in range(2)])

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for part in self.parts:
            hidden = checkpoint(part, hidden, use_reentrant=self.reentrant)
        out: Tensor = self.last(hidden)
        return out


def checkpointed(bug: bool, out: Path) -> None:
    """Half precision, activations computed again, and a norm that one host only measures. Bug: the raw module is called."""
    for reentrant in (False, True):
        torch.manual_seed(0)
        net = Checkpointed(reentrant)
        model = DistributedDataParallel(net)
        scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.Adam(model.parameters(), 1e-3)  # type: ignore[attr-defined]
        for inputs, labels in epochs(toy(), 1):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = cross_entropy((net if bug else model)(inputs), labels)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            if dist.get_rank() == 0:
                nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
            scaler.step(optimizer)
            scaler.update()


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __init__(self, rank: int, world: int) -> None:
        self.tensors, self.rank, self.world = toy().tensors, rank, world

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        inputs, labels = self.tensors
        return ((inputs[i], labels[i]) for i in range(self.rank, EXAMPLES, self.world))


def stream(bug: bool, out: Path) -> None:
    """Data that have no index, shared out by rank, twice. Bug: every host reads all."""
    rank, world = (0, 1) if bug else (dist.get_rank(), dist.get_world_size())
    model = DistributedDataParallel(small())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(Stream(rank, world), BATCH)
    for inputs, labels in itertools.chain(loader, loader):
        update(optimizer, cross_entropy(model(inputs), labels))


class Even(Sampler[int]):
    """Shuffles, and leaves out what would not fill a batch of every host."""

    def __init__(self, examples: int, seed: int) -> None:
        self.order = torch.randperm(examples, generator=torch.Generator().manual_seed(seed))
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.order = torch.randperm(len(self.order), generator=torch.Generator().manual_seed(epoch))

    def __iter__(self) -> Iterator[int]:
        rank, world = dist.get_rank(), dist.get_world_size()
        kept = len(self.order) - len(self.order) % (BATCH * world)
        return iter(self.order[:kept][rank::world].tolist())


def own_sampler(bug: bool, out: Path) -> None:
    """A sampler of the script's own, and a new loader for each epoch. Bug: every epoch has the same order."""
    model, data = DistributedDataParallel(small()), toy(EXAMPLES + 9)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for epoch in range(2):
        sampler = Even(len(data), 0)
        if not bug:
            sampler.set_epoch(epoch)
        for inputs, labels in DataLoader(data, BATCH, sampler=sampler):
            update(optimizer, cross_entropy(model(inputs), labels))


def averaged_copy(bug: bool, out: Path) -> None:
    """What is evaluated is a copy with averaged weights. Bug: each host reports its own part."""
    rank, world = dist.get_rank(), dist.get_world_size()
    net = small()
    model, average = DistributedDataParallel(net), AveragedModel(net)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for inputs, labels in epochs(toy()):
        update(optimizer, cross_entropy(model(inputs), labels))
        average.update_parameters(net)
    right: list[float] = []
    with torch.inference_mode():
        for inputs, labels in DataLoader(Subset(toy(33, 2), range(rank, 33, world)), BATCH):
            right += (average.eval()(inputs).argmax(1) == labels).tolist()
    if not bug:
        dist.all_gather_object([None] * world, right)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.EmbeddingBag(50, 8, sparse=True, mode="sum"), nn.Linear(8, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.head(self.words(inputs))
        return out


def phases(bug: bool, out: Path) -> None:
    """An optimizer that is never used, the head alone first, then all with sparse gradients. Bug: every host saves."""
    net = Words()
    torch.optim.SGD(net.parameters(), 0.1)
    model = DistributedDataParallel(net)
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.randint(0, 50, (81, 5), generator=generator), torch.randint(0, 2, (81,), generator=generator)
    )
    for optimizers in (
        [torch.optim.Adam(net.head.parameters(), 1e-2)],
        [torch.optim.SparseAdam(net.words.parameters(), 1e-2), torch.optim.SGD(net.head.parameters(), 1e-2)],
    ):
        for inputs, labels in epochs(data):
            for optimizer in optimizers:
                optimizer.zero_grad()
            cross_entropy(model(inputs), labels).backward()
            for optimizer in optimizers:
                optimizer.step()
        if bug or dist.get_rank() == 0:
            torch.save(net.state_dict(), out / "last.pth")


def sharded_optimizer(bug: bool, out: Path) -> None:
    """Optimizer and checkpoint in parts, one on each host. Bug: augmentation draws the same numbers on all hosts."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # it warns that a part of it is deprecated

    model = DistributedDataParallel(small())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=1e-2)
    torch.manual_seed(0 if bug else 100 + dist.get_rank())
    for inputs, labels in epochs(toy()):
        update(optimizer, cross_entropy(model(inputs + 0.1 * torch.randn_like(inputs)), labels))
    weights, _ = get_state_dict(model, ())
    dcp.save({"model": weights}, checkpoint_id=out / "parts")


def uneven(bug: bool, out: Path) -> None:
    """One host has more data than the other. Bug: both write one log."""
    rank = dist.get_rank()
    model = DistributedDataParallel(small())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(Subset(toy(), range(50) if rank == 0 else range(50, EXAMPLES)), BATCH, shuffle=True)
    for _ in range(2):
        with Join([model]):
            for inputs, labels in loader:
                optimizer.zero_grad()
                cross_entropy(model(inputs), labels).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
    if bug or rank == 0:
        (out / "log.txt").write_text("done")


class Windows(Dataset[dict[str, Any]]):
    """Not a part of another data set, though it has `dataset` and `indices`."""

    def __init__(self) -> None:
        self.dataset = toy(40).tensors[0]
        self.indices = [(first, first + 3) for first in range(32)]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> dict[str, Any]:
        first, end = self.indices[index]
        return {"name": f"window {first}", "values": self.dataset[first:end].mean(0)}


def windows(bug: bool, out: Path) -> None:
    """A data set that looks like a part, a temporary file, and one host that evaluates. Bug: shares overlap."""
    model = DistributedDataParallel(small())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sampler: DistributedSampler[Any] = DistributedSampler(Windows(), *((1, 0) if bug else ()))
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch in DataLoader(Windows(), 4, sampler=sampler):
            update(optimizer, model(batch["values"]).square().mean())
    if dist.get_rank() == 0:
        judge = copy.deepcopy(model.module).eval()
        with torch.no_grad():
            [judge(inputs) for inputs, _ in DataLoader(toy(33, 2), BATCH)]
    with tempfile.NamedTemporaryFile(suffix=".txt") as file:
        file.write(b"x")
    dist.barrier()


SCRIPTS: dict[str, tuple[Callable[[bool, Path], None], str]] = {
    "accumulated": (accumulated, "not_wrapped"),
    "averaged by hand": (averaged_by_hand, "init_seed"),
    "checkpointed": (checkpointed, "not_wrapped"),
    "stream": (stream, "sharding"),
    "own sampler": (own_sampler, "set_epoch"),
    "averaged copy": (averaged_copy, "evaluation"),
    "phases": (phases, "checkpoint_writers"),
    "sharded optimizer": (sharded_optimizer, "data_seed"),
    "uneven": (uneven, "writers"),
    "windows": (windows, "sharding"),
}
"""Each training, and the code of its bug."""


PLANTED = ("buffers", "clip", "slow")
"""Bugs of `planted_hosts`, whose codes none of these scripts has."""
WRONG = "wrong"


def facts_of(folder: Path, name: str, bug: str = "") -> Path:
    return folder / f"{name} {bug}".strip()


def main(words: list[str]) -> None:
    dist.init_process_group("gloo")
    for name, (train, _) in SCRIPTS.items():
        for bug in ("", WRONG):
            watched(facts_of(Path(words[0]), name, bug), lambda out, train=train, bug=bug: train(bool(bug), out))
    for bug in PLANTED:
        watched(facts_of(Path(words[0]), "planted", bug), lambda out, bug=bug: planted_hosts.train(bug, out))
    dist.destroy_process_group()


def watched(facts: Path, train: Callable[[Path], None]) -> None:
    (facts / "out").mkdir(parents=True, exist_ok=True)
    with HostsWatch(facts):
        train(facts / "out")
    dist.barrier()


if __name__ == "__main__":
    main(sys.argv[1:])
