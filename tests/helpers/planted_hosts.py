"""A small training on many ranks, right as it stands, and wrong in one way at a time where it is told to.

It knows nothing of the workbench: torch, `DistributedDataParallel` and a sampler, as in many scripts.
`python -m tests.helpers.planted_hosts FOLDER BUG ...` trains once for each bug on the ranks of a launcher, each under an audit of its own.
"""

import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

from workbench.topics.hosts.watch import HostsWatch

BUGS = {
    "init_seed": "each rank initialises its own model, and nobody sends one around",
    "data_seed": "augmentation draws the same numbers on all ranks",
    "overlap": "the ranks' shares of the data overlap",
    "incomplete": "some examples are on no rank",
    "no_set_epoch": "set_epoch is never called",
    "logs": "every rank writes the log",
    "checkpoints": "every rank writes the checkpoint",
    "buffers": "batch norm's running statistics are not merged before the evaluation and the checkpoint",
    "padded": "the evaluation counts the sampler's padding",
    "own_part": "each rank reports the metric of its own part",
    "clip": "only the first rank clips",
    "slow": "the last rank is slow",
    "raw_module": "the raw module is called in place of the wrapped one",
}
"""Every bug that can be planted, by name."""

SHARED_SEED, PER_HOST_SEED = 7, 1_000
TRAIN, VALIDATION = 320, 51


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Small images of two classes; training examples come with noise, drawn anew each time."""

    def __init__(self, examples: int, noise: float) -> None:
        generator = torch.Generator().manual_seed(examples)
        self.labels = torch.arange(examples) % 2
        self.images = torch.randn(examples, 1, 6, 6, generator=generator) + self.labels[:, None, None, None]
        self.noise = noise

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return an image and its label."""
        image = self.images[index]
        return (image + self.noise * torch.randn(image.shape) if self.noise else image), self.labels[index]


def build_model() -> nn.Module:
    """Return a small network with batch norm."""
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))


def train(bug: str, out: Path, *, epochs: int = 2, batch_size: int = 8, slow_s: float = 0.03) -> None:
    """Train on all ranks of the process group, with one of `BUGS`, or none where it is no bug; the log and the checkpoint go to `out`."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(SHARED_SEED + (rank if bug == "init_seed" else 0))
    model = build_model()
    wrapped = DistributedDataParallel(model, init_sync=bug != "init_seed")
    torch.manual_seed(PER_HOST_SEED + (0 if bug == "data_seed" else rank))
    data, validation = Noisy(TRAIN, 0.1), Noisy(VALIDATION, 0.0)
    part = share(data, rank, world, bug)
    sampler: DistributedSampler[Any] | None = (
        None if isinstance(part, Subset) else DistributedSampler(data, seed=SHARED_SEED)
    )
    loader = DataLoader(part, batch_size, sampler=sampler, shuffle=sampler is None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    trained = model if bug == "raw_module" else wrapped
    for epoch in range(epochs):
        if sampler is not None and bug != "no_set_epoch":
            sampler.set_epoch(epoch)
        model.train()
        for images, labels in loader:
            if bug == "slow" and rank == world - 1:
                time.sleep(slow_s)
            optimizer.zero_grad()
            F.cross_entropy(trained(images), labels).backward()  # type: ignore[no-untyped-call]
            if bug != "clip" or rank == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        if bug != "buffers":
            merge_statistics(model)
        accuracy = evaluate(model, validation, rank, world, bug)
        if rank == 0 or bug == "logs":
            with (out / "log.csv").open("a") as file:
                file.write(f"{epoch},{accuracy}\n")
        if rank == 0 or bug == "checkpoints":
            torch.save(model.state_dict(), out / "last.pt")
    dist.barrier()


def share(data: Dataset[tuple[Tensor, Tensor]], rank: int, world: int, bug: str) -> Dataset[tuple[Tensor, Tensor]]:
    """Return this rank's part of the data, or all of it where a sampler takes the parts."""
    size = TRAIN // world
    if bug == "overlap":
        return Subset(data, [i % TRAIN for i in range(rank * size, (rank + 1) * size + 8)])
    if bug == "incomplete":
        return Subset(data, range(rank * size, (rank + 1) * size - 8))
    return data


def merge_statistics(model: nn.Module) -> None:
    """Give all ranks the running statistics of all ranks together, by the law of total variance."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d) and module.running_mean is not None and module.running_var is not None:
            mean, square = module.running_mean.clone(), module.running_var + module.running_mean**2
            for total in (mean, square):
                dist.all_reduce(total)
                total.div_(dist.get_world_size())
            module.running_mean.copy_(mean)
            module.running_var.copy_(square - mean**2)


@torch.no_grad()
def evaluate(model: nn.Module, data: Dataset[tuple[Tensor, Tensor]], rank: int, world: int, bug: str) -> float:
    """Return the accuracy over all examples, each of which one rank has counted."""
    model.eval()
    sampler: DistributedSampler[Any] | None = DistributedSampler(data, shuffle=False) if bug == "padded" else None
    part = data if sampler is not None else Subset(data, range(rank, VALIDATION, world))
    counts = torch.zeros(2)
    for images, labels in DataLoader(part, 16, sampler=sampler):
        right = (model(images).argmax(1) == labels).sum()
        counts += torch.tensor([float(right), float(len(labels))])
    if bug != "own_part":
        dist.all_reduce(counts)
    return float(counts[0] / counts[1])


def main(folder: str, *bugs: str) -> None:
    """Train once for each bug; the facts of "clip" go to FOLDER/clip."""
    dist.init_process_group("gloo")
    for bug in bugs:
        facts = Path(folder) / bug
        (facts / "out").mkdir(parents=True, exist_ok=True)
        with HostsWatch(facts):
            train(bug, facts / "out")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
