"""What it costs to watch a loop: processor time of a step with `wb.watch` and with what others offer, over the bare step.

    python tests/benchmarks/bench_watch.py [ROUNDS] [--device cuda]

On a GPU it is the wall time of a step, the device waited for before and after the steps.

All sides train the same model on the same batches in processes of their own, one thread each, which take turns of `BLOCK` updates: what else the
machine does meets all of them alike. Watching is measured in its first updates, in which it looks at most, and later. `wandb.watch` runs offline,
with its own defaults, and is given the losses. Who is not installed is left out. Cockpit's backward pass has to stand in a block of its own under
BackPACK, and Lightning's monitors need its trainer.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from timing import interval, machine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import workbench as wb

BLOCK = 50
MODELS = {"mlp": 1.10, "mlp over a DataLoader": 1.10, "wide": 1.02}
"""With the ratio that is asked for."""
Update = Callable[[Callable[[torch.Tensor], None]], None]


def mlp() -> tuple[nn.Module, int, int]:
    """Return the model of `digits_mlp`, its inputs and its batch size."""
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10)), 64, 64


def wide() -> tuple[nn.Module, int, int]:
    """Return a model whose update takes some milliseconds."""
    layers = [nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(512, 10)), 512, 256


def trained(name: str, device: str) -> tuple[nn.Module, torch.optim.Optimizer, Update]:
    """Return a model, its optimizer and one update of it; what is given is called with the loss."""
    torch.manual_seed(0)
    model, features, size = wide() if name == "wide" else mlp()
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x, y = torch.randn(10 * size, features), torch.randint(10, (10 * size,))
    if "DataLoader" in name:
        loader = DataLoader(TensorDataset(x, y), batch_size=size, shuffle=True)
        batches = itertools.chain.from_iterable(itertools.repeat(loader))
    else:
        batches = itertools.cycle(list(zip(x.to(device).split(size), y.to(device).split(size), strict=True)))

    def update(see: Callable[[torch.Tensor], None]) -> None:
        inputs, targets = next(batches)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs.to(device)), targets.to(device))
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


def child(side: str, name: str, device: str) -> None:
    """Train when told to: a line "FOLDER" begins anew, one of a number makes so many updates and prints their seconds."""
    torch.set_num_threads(1)
    _, _, update = trained(name, device)
    see: Callable[[torch.Tensor], None] = print
    with ExitStack() as stack:
        for line in sys.stdin:
            if line.strip().isdigit():
                began = clock(device)
                for _ in range(int(line)):
                    update(see)
                print(clock(device) - began, flush=True)
            else:
                stack.close()
                model, optimizer, update = trained(name, device)
                see = stack.enter_context(SIDES[side](model, optimizer, Path(line.strip())))
                print("begun", flush=True)


def asked(process: subprocess.Popen[str], what: object) -> str:
    """Tell a child something, and return its answer, "" where it is gone."""
    assert process.stdin is not None
    assert process.stdout is not None
    print(what, file=process.stdin, flush=True)
    return process.stdout.readline().strip()


def measured(name: str, rounds: int, first: int, updates: int, device: str) -> dict[str, list[float]]:
    """Return the seconds of a step of each side that is there, round by round, after `first` updates that are not measured."""
    with tempfile.TemporaryDirectory() as folder:
        children = {
            side: subprocess.Popen([sys.executable, __file__, "--child", side, name, "--device", device], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for side in SIDES if side != "wandb.watch" or importlib.util.find_spec("wandb")
        }  # fmt: skip
        seconds: dict[str, list[float]] = {side: [] for side in children}
        for number in range(rounds):
            for side, process in children.items():
                asked(process, Path(folder) / f"{side}{number}")
                asked(process, first)
            took = dict.fromkeys(children, 0.0)
            for block in range(updates // BLOCK):
                for side in list(children)[:: 1 if block % 2 else -1]:
                    took[side] += float(asked(children[side], BLOCK))
            for side in children:
                seconds[side].append(took[side] / updates)
        for process in children.values():
            assert process.stdin is not None
            process.stdin.close()
            process.wait()
    return seconds


def main() -> None:
    """Print a table row for each model and side."""
    parser = argparse.ArgumentParser()
    parser.add_argument("rounds", nargs="?", type=int, default=15)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(*given.child, given.device)
        return
    print(f"{machine()}, on {given.device}; ratios are medians with their 95 % interval")
    for name, bar in MODELS.items():
        for first, updates, when in ((10, 200, "updates 10 to 210"), (250, 200 if name == "wide" else 1000, "later")):
            found = measured(name, given.rounds, first, updates, given.device)
            base = statistics.median(found["bare"])
            print(f"{name}, {when}: bare {base * 1e3:.3f} ms a step, bar {bar}")
            for side in list(found)[1:]:
                each = [a / b for a, b in zip(found[side], found["bare"], strict=True)]
                low, high = interval(each)
                print(f"  {side:12} {statistics.median(each):.3f} ({low:.3f} to {high:.3f})", flush=True)


if __name__ == "__main__":
    main()
