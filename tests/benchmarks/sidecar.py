"""Whether training ends sooner when somebody else evaluates (T8.6): inline after each epoch, or from checkpoints in a process of its own.

    python tests/benchmarks/sidecar.py [--rounds 5] [--epochs 6]

Each round trains the same network on one worker and two servers without any evaluation, with checkpoints alone, inline, and with a
side-car evaluator, once where evaluation computes and once where it waits, which takes no processor from anybody.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from timing import machine, median, ratio
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from workbench.config import TrainConfig
from workbench.parameter_server.cluster.cluster import create_in_process_cluster
from workbench.parameter_server.fit.callbacks import ModelCheckpoint
from workbench.parameter_server.fit.sidecar import SidecarEvaluator
from workbench.parameter_server.fit.strategy_model import StrategyModel
from workbench.parameter_server.strategy import ParameterServerStrategy
from workbench.workloads.base import Workload

BATCH, STEPS, EVALUATED, WAIT_S = 64, 40, 10_000, 0.05
KINDS = ("computes", "waits")


def workload(kind: str) -> Workload:
    generator = torch.Generator().manual_seed(0)
    size = EVALUATED if kind == "computes" else 4 * BATCH
    x = torch.randn(BATCH * STEPS + size, 256, generator=generator)
    y = (x[:, :10] + 0.5 * x[:, 10:20]).argmax(1)

    def loss(outputs: Tensor, batch: Any) -> Tensor:
        if kind == "waits" and not outputs.requires_grad:
            time.sleep(WAIT_S)
        return nn.functional.cross_entropy(outputs, batch[1], reduction="none")

    return Workload(
        name="side-car",
        build_model=lambda: nn.Sequential(
            nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
        ),
        train_data=TensorDataset(x[size:], y[size:]),
        validation_data=TensorDataset(x[:size], y[:size]),
        loss=loss,
        config=TrainConfig(
            peak_lr=0.05, total_steps=10_000, batch_size=BATCH, eval_batch_size=BATCH, optimizer="sgd"
        ),
    )  # fmt: skip


def trained(kind: str, epochs: int, folder: Path | None, *, inline: bool) -> tuple[float, float]:
    """Return seconds and processor seconds of this process until `fit` returns."""
    made = workload(kind)
    with create_in_process_cluster(1, 2) as cluster:
        model = StrategyModel(made, ParameterServerStrategy(cluster))
        callbacks = [] if folder is None else [ModelCheckpoint(folder, max_to_keep=3)]
        begun, used = time.perf_counter(), time.process_time()
        model.fit(
            made.train_data, epochs=epochs, validation_data=made.validation_data if inline else None,
            callbacks=callbacks, verbose=0,
        )  # fmt: skip
        return time.perf_counter() - begun, time.process_time() - used


def beside(kind: str, epochs: int, folder: Path) -> tuple[float, float, float, int]:
    """Return what `trained` does, seconds until the last epoch was evaluated, too, and how many were."""
    command = [sys.executable, str(Path(__file__).resolve()), "--evaluate", str(folder), kind, str(epochs)]
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE) as evaluator:
        assert evaluator.stdout is not None
        assert evaluator.stdout.readline() == "ready\n"
        begun = time.perf_counter()
        seconds, used = trained(kind, epochs, folder, inline=False)
        count = int(evaluator.stdout.readline())
        return seconds, used, time.perf_counter() - begun, count


def evaluate(folder: str, kind: str, epochs: int) -> None:
    """Be the evaluator."""
    torch.set_num_threads(1)
    evaluator = SidecarEvaluator(workload(kind), folder, epochs=epochs, poll_s=0.02, timeout_s=120.0)
    print("ready", flush=True)
    print(len(evaluator.run()), flush=True)


def main() -> None:
    """Print medians, and the ratios of the rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--evaluate", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.evaluate:
        folder, kind, epochs = options.evaluate
        evaluate(folder, kind, int(epochs))
        return
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(machine())
    for kind in KINDS:
        found: dict[str, list[tuple[float, float]]] = {}
        late, counts = [], []
        trained(kind, 1, None, inline=True)  # unmeasured
        for number in range(options.rounds):
            with tempfile.TemporaryDirectory() as kept:
                sides = {
                    "no evaluation": lambda: trained(kind, options.epochs, None, inline=False),  # noqa: B023
                    "checkpoints alone": lambda: trained(kind, options.epochs, Path(kept) / "a", inline=False),  # noqa: B023
                    "inline": lambda: trained(kind, options.epochs, None, inline=True),  # noqa: B023
                    "side-car": lambda: beside(kind, options.epochs, Path(kept) / "b"),  # noqa: B023
                }
                for name in list(sides) if number % 2 == 0 else reversed(list(sides)):
                    measured = sides[name]()
                    found.setdefault(name, []).append(measured[:2])
                    if len(measured) == 4:
                        late.append(measured[2])
                        counts.append(measured[3])
        print(f"evaluation {kind}: seconds until fit returns, of the processor, both / inline")
        for name in ("no evaluation", "checkpoints alone", "inline", "side-car"):
            wall, used = ([each[k] for each in found[name]] for k in (0, 1))
            walls, useds = ([each[k] for each in found["inline"]] for k in (0, 1))
            print(f"  {name:<18} {median(wall):6.2f} {median(used):6.2f}   {ratio(wall, walls)}   {ratio(used, useds)}")
        print(f"  side-car: last epoch evaluated after {median(late):.2f} s; of {options.epochs} epochs {counts} were")


if __name__ == "__main__":
    main()
