"""What the hosts of test_together.py train: `python -m torch.distributed.run ... -m tests.hosts.programs.together DIR`."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.helpers.datasets import Items, Stream
from tests.helpers.workloads import small_net, small_workload
from workbench.errors import StudyInterrupted, WorkbenchError
from workbench.topics.lr_sweep.study import LRSweep
from workbench.train.distributed.process_group import HostGroup, host_group
from workbench.train.hooks import Hook, Step
from workbench.train.trainer import Trainer
from workbench.workloads.base import Workload

TENSORS = small_workload().train_data.tensors
FEWER = [tensor[:45] for tensor in TENSORS]  # of which the last batch is incomplete


class Noisy(Items):
    """Draws what it adds from torch's global generator."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        x, y = super().__getitem__(index)
        return x + 0.1 * torch.randn(3), y


class Masked(Stream):
    """Only the second half of every batch counts: the first host's share weighs nothing."""

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        for index, example in enumerate(super().__iter__()):
            yield *example, torch.tensor(float(index // 5 % 2))


def counted(batch: Any) -> Tensor:
    """All examples of the validation split, which has no third column, count."""
    weights: Tensor = batch[2] if len(batch) > 2 else torch.ones(len(batch[1]))
    return weights


def cases() -> dict[str, Workload]:
    """Workloads for which it makes no difference how many hosts train them."""
    clipped = {"max_grad_norm": 0.3, "warmup_steps": 5, "optimizer": "adam", "peak_lr": 0.01}
    return {
        "tensors": small_workload(config=clipped),
        "weighted": small_workload(
            train_data=Items(*TENSORS), weights=lambda batch: batch[0].abs().sum(1), config={"accumulate_steps": 2}
        ),
        "masked": small_workload(train_data=Masked(*FEWER), weights=counted, config={"batch_size": 10}),
        "stream": small_workload(train_data=Stream(*FEWER), config={"batch_size": 10}),
    }


def normalised() -> Workload:
    """A net with batch norm: with statistics over all hosts it is trained as by one."""
    return small_workload(
        build_model=lambda: nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)),
        name="normalised",
    )


def drawing() -> Workload:
    """Dropout and noise, which every host draws for itself, and running statistics of its own."""
    return small_workload(
        train_data=Noisy(*TENSORS), build_model=lambda: nn.Sequential(nn.BatchNorm1d(3), small_net(0.3)), name="drawing"
    )


def differing() -> Workload:
    """A model that is another one on every host."""

    def build() -> nn.Module:
        net = small_net()
        with torch.no_grad():
            net[0].bias.add_(dist.get_rank() if dist.is_initialized() else 0)
        return net

    return small_workload(build_model=build)


def exchanges(hosts: HostGroup) -> dict[str, Any]:
    """What an exchange makes of numbers that few digits cannot hold, by the type of the gradient."""
    found = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        told = torch.tensor([(hosts.rank + 1) / 3, -1e-300, float("inf")], dtype=torch.float64)
        summed = torch.full((5 + hosts.room(told),), 2.0 + hosts.rank, dtype=dtype)
        rows = hosts.sum_and_gather(summed, told)
        found[str(dtype)] = {"sum": summed[:5].tolist(), "rows": rows.tolist()}
    return found


class Interrupts(Hook):
    """Ctrl-C that reaches one host alone."""

    def on_step(self, step: Step) -> None:
        if step.index == 10 and dist.get_rank() == 1:
            signal.raise_signal(signal.SIGINT)


def interrupted(folder: Path) -> str:
    """Stop in mid-run and go on; return what this host heard."""
    workload, said = cases()["tensors"], ""
    try:
        Trainer(device="cpu", hooks=[Interrupts()]).run(workload, out=folder / "interrupted")
    except StudyInterrupted as error:
        said = str(error)
    Trainer(device="cpu").run(workload, out=folder / "interrupted")
    return said


def refusals(folder: Path) -> dict[str, str]:
    """What this host says to things that many hosts cannot do."""
    attempts = {
        "uneven": lambda: Trainer(device="cpu").run(small_workload(config={"batch_size": 9}), out=folder / "uneven"),
        "study": lambda: LRSweep(lrs=[0.1], steps=5).run(small_workload(), out=folder / "study"),
        "weights": lambda: Trainer(device="cpu").run(differing(), out=folder / "weights"),
        "folder": lambda: Trainer(device="cpu").run(small_workload(), out=Path(__file__)),
    }
    said = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except WorkbenchError as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


def main(folder: Path) -> None:
    """Train every case under the processes' own folder names, and write down what each host saw."""
    with host_group(torch.device("cpu")) as hosts:
        for name, workload in cases().items():
            Trainer(device="cpu").run(workload, out=folder / name)
        Trainer(device="cpu", synchronise_batch_norm=True).run(normalised(), out=folder / "normalised")
        Trainer(device="cpu").run(normalised(), out=folder / "local")
        Trainer(device="cpu").run(drawing(), out=folder / "drawing")
        again = Trainer(device="cpu").run(drawing(), out=folder / "drawing")
        seen = {"rank": hosts.rank, "size": hosts.size, "refused": refusals(folder), "steps": len(again.steps)}
        seen["exchanged"] = exchanges(hosts)
        seen["interrupted"] = interrupted(folder)
        (folder / f"seen-{hosts.rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
