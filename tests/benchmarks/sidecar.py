"""Whether training ends sooner when somebody else evaluates (T8.6): inline after each epoch, or from checkpoints in a process of its own.

    python tests/benchmarks/sidecar.py [--rounds 5] [--epochs 6]

Each round trains the same network on one worker and two servers without any evaluation, with checkpoints alone, inline, and with a
side-car evaluator, once where evaluation computes and once where it waits, which takes no processor from anybody.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from timing import machine, median, ratio
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from workbench.config import TrainConfig
from workbench.parameter_server.cluster.cluster import create_in_process_cluster
from workbench.parameter_server.strategy import ParameterServerStrategy
from workbench.parameter_server.training.callbacks import ModelCheckpoint
from workbench.parameter_server.training.sidecar import SidecarEvaluator
from workbench.parameter_server.training.strategy_model import StrategyModel
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


def trained(kind: str, epochs: int, folder: Path | None = None, *, inline: bool = False) -> dict[str, float]:
    """Return seconds and processor seconds of this process until `fit` returns; checkpoints go to `folder`."""
    made = workload(kind)
    with create_in_process_cluster(1, 2) as cluster:
        model = StrategyModel(made, ParameterServerStrategy(cluster))
        callbacks = [] if folder is None else [ModelCheckpoint(folder, max_to_keep=3)]
        begun, used = time.perf_counter(), time.process_time()
        evaluated = made.validation_data if inline else None
        model.fit(made.train_data, epochs=epochs, validation_data=evaluated, callbacks=callbacks, verbose=0)
        return {"wall": time.perf_counter() - begun, "processor": time.process_time() - used}


def beside(kind: str, epochs: int, folder: Path) -> dict[str, float]:
    """Return what `trained` does, seconds until the last epoch was evaluated, too, and how many were."""
    command = [sys.executable, str(Path(__file__).resolve()), "--evaluate", str(folder), kind, str(epochs)]
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE) as evaluator:
        assert evaluator.stdout is not None
        assert evaluator.stdout.readline() == "ready\n"
        begun = time.perf_counter()
        found = trained(kind, epochs, folder)
        count = int(evaluator.stdout.readline())
        return found | {"last": time.perf_counter() - begun, "evaluated": count}


def main() -> None:
    """Print medians, and the ratios of the rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--evaluate", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.evaluate:  # be the evaluator
        folder, kind, epochs = options.evaluate
        evaluator = SidecarEvaluator(workload(kind), folder, epochs=int(epochs), poll_s=0.02, timeout_s=120.0)
        print("ready", flush=True)
        print(len(evaluator.run()), flush=True)
        return
    print(machine())
    for kind in KINDS:
        trained(kind, 1, inline=True)  # unmeasured
        sides: dict[str, Callable[[Path], dict[str, float]]] = {
            "no evaluation": lambda _, kind=kind: trained(kind, options.epochs),
            "checkpoints alone": lambda folder, kind=kind: trained(kind, options.epochs, folder),
            "inline": lambda _, kind=kind: trained(kind, options.epochs, inline=True),
            "side-car": lambda folder, kind=kind: beside(kind, options.epochs, folder),
        }
        found: dict[str, dict[str, list[float]]] = {name: {} for name in sides}
        for number in range(options.rounds):
            for name in list(sides) if number % 2 == 0 else reversed(list(sides)):
                with tempfile.TemporaryDirectory() as folder:
                    for key, value in sides[name](Path(folder)).items():
                        found[name].setdefault(key, []).append(value)
        print(f"evaluation {kind}: seconds until fit returns, of the processor, both / inline")
        for name, each in found.items():
            shares = [ratio(each[key], found["inline"][key]) for key in ("wall", "processor")]
            print(f"  {name:<18} {median(each['wall']):6.2f} {median(each['processor']):6.2f}   {'   '.join(shares)}")
        last, counts = (found["side-car"][key] for key in ("last", "evaluated"))
        print(f"  side-car: last epoch evaluated after {median(last):.2f} s; of {options.epochs} epochs {counts} were")


if __name__ == "__main__":
    main()
