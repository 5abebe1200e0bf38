"""What it costs to watch a loop: processor time of a step with `wb.watch` and with what others offer, over the bare step.

    python tests/benchmarks/bench_watch.py [ROUNDS] [--device cuda]

On a GPU it is the wall time of a step, the device waited for before and after the steps.

All sides train the same model on the same batches, in turns of `STEPS` updates within one process and one thread; watching is measured in its
first updates, in which it looks at everything, and later. `wandb.watch` runs offline, with its own defaults, and is given the losses. Who is
not installed is left out. Cockpit's backward pass has to stand in a block of its own under BackPACK, and Lightning's monitors need its trainer.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from timing import machine
from torch import nn

import workbench as wb

STEPS = 200
BARS = {"mlp": 1.10, "wide": 1.02}
Update = Callable[[Callable[[torch.Tensor], None]], None]


def mlp() -> tuple[nn.Module, int, int]:
    """Return the model of `digits_mlp`, its inputs and its batch size."""
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10)), 64, 64


def wide() -> tuple[nn.Module, int, int]:
    """Return a model whose update takes some milliseconds."""
    layers = [nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(512, 10)), 512, 256


def trained(
    build: Callable[[], tuple[nn.Module, int, int]], device: str
) -> tuple[nn.Module, torch.optim.Optimizer, Update]:
    """Return a model, its optimizer and one update of it; what is given is called with the loss."""
    torch.manual_seed(0)
    model, features, size = build()
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x, y = torch.randn(4 * size, features, device=device), torch.randint(10, (4 * size,), device=device)
    place = 0

    def update(see: Callable[[torch.Tensor], None]) -> None:
        nonlocal place
        place = (place + size) % (3 * size)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[place : place + size]), y[place : place + size])
        loss.backward()
        optimizer.step()
        see(loss)

    return model, optimizer, update


@contextmanager
def bare(*_: object) -> Iterator[Callable[[torch.Tensor], None]]:
    """Watch nothing."""
    yield lambda _: None


@contextmanager
def ours(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> Iterator[Callable[[torch.Tensor], None]]:
    """Watch by `wb.watch`."""
    with wb.watch(model, optimizer, out=folder):
        yield lambda _: None


@contextmanager
def wandb_watch(model: nn.Module, _: object, folder: Path) -> Iterator[Callable[[torch.Tensor], None]]:
    """Watch by `wandb.watch`, as it is, and log each loss."""
    import wandb

    os.environ["WANDB_SILENT"] = "true"
    folder.mkdir()
    run = wandb.init(mode="offline", dir=str(folder), project="bench")
    run.watch(model)
    yield lambda loss: run.log({"loss": loss})
    run.finish()


SIDES = {"bare": bare, "wb.watch": ours, "wandb.watch": wandb_watch}


def clock(device: str) -> float:
    """Return processor seconds, or those of the wall once a GPU has done what it was given."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def measured(
    build: Callable[[], tuple[nn.Module, int, int]], rounds: int, first: int, device: str
) -> dict[str, list[float]]:
    """Return the seconds of a step of each side that is there, round by round, after `first` updates that are not measured.

    Each side is entered and left in every round: what it hangs into torch would cost the others something.
    """
    seconds: dict[str, list[float]] = {name: [] for name in SIDES}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(-1, rounds):
            for name, side in SIDES.items():
                model, optimizer, update = trained(build, device)
                try:
                    with side(model, optimizer, Path(folder) / f"{name}{number}") as see:
                        for _ in range(first):
                            update(see)
                        began = clock(device)
                        for _ in range(STEPS):
                            update(see)
                        took = (clock(device) - began) / STEPS
                except ImportError as error:
                    if number < 0:
                        print(f"Without {name}: {error}.")
                    continue
                if number >= 0:
                    seconds[name].append(took)
    return {name: values for name, values in seconds.items() if values}


def main() -> None:
    """Print a table row for each model and side."""
    parser = argparse.ArgumentParser()
    parser.add_argument("rounds", nargs="?", type=int, default=15)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    given = parser.parse_args()
    print(f"{machine()}, on {given.device}")
    for build in (mlp, wide):
        for first, when in ((10, "its first updates"), (250, "later")):
            found = measured(build, given.rounds, first, given.device)
            base = statistics.median(found["bare"])
            print(f"{build.__name__}, {when}: bare {base * 1e3:.3f} ms a step, bar {BARS[build.__name__]}")
            for name in found:
                each = [a / b for a, b in zip(found[name], found["bare"], strict=True)]
                print(f"  {name:12} {statistics.median(each):.3f} ({min(each):.3f} to {max(each):.3f})")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
