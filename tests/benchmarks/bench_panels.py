"""What a panel takes to answer a slider, and what the panel over a running cluster costs its training.

PYTHONPATH=. python tests/benchmarks/bench_panels.py

An answer is timed in the kernel, from the message of the page to the picture that is sent back; budget 100 ms on an idle core.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

os.environ.pop("WORKBENCH_LIVE", None)

import numpy as np
import pandas as pd
import torch
from timing import machine, median, ratio

import workbench as wb
from tests.helpers.records import one_trial
from tests.helpers.server_facts import facts, served
from tests.helpers.simulated_checkpoints import evaluated, overfitted
from tests.helpers.simulated_norms import study as norms
from tests.helpers.simulated_records import record, trial
from tests.topics.test_warmup import GOOD, full, short
from tests.topics.test_warmup import study as warmups

MOVES = 20
STEPS = 1000


def sweep() -> Any:
    """Sixteen learning rates of 1,000 noisy steps each, the last four diverged."""
    rng, trials = np.random.default_rng(0), []
    for k, lr in enumerate(np.geomspace(1e-3, 10, 16)):
        loss = 0.1 + 2.2 * np.exp(-min(lr, 1.0) * np.arange(STEPS) / 50) + 0.02 * rng.standard_normal(STEPS)
        trials.append(trial(loss if k < 12 else np.append(loss[:200], np.inf), float(lr), total_steps=STEPS))
    return record(trials, total_steps=STEPS, peak_lr=0.01, full_batch=False)


def tracked() -> Any:
    """Sixty-four examples, evaluated forty times."""
    rng = np.random.default_rng(0)
    rows = [
        [0, 25 * k, "validation", e, int(rng.integers(10)) if k < 20 else e % 10, e % 10, float(rng.random() / (1 + k))]
        for k in range(40)
        for e in range(64)
    ]
    names = ["trial", "step", "split", "example", "prediction", "label", "loss"]
    return SimpleNamespace(predictions=pd.DataFrame(rows, columns=names))


PANELS: dict[str, Callable[[], Any]] = {
    "lr_sweep_panel": lambda: wb.lr_sweep.panel(sweep()),
    "clipping_panel": lambda: wb.clipping.panel(one_trial(np.random.default_rng(0).lognormal(size=STEPS))),
    "warmup_panel": lambda: wb.warmup.panel(
        warmups(*GOOD, short(50, passes=True, multiple=20.0), full(50, passes=False, total=1000, multiple=20.0))
    ),
    "batch_norm_panel": lambda: wb.batch_norm.panel(norms({8: [0.6, 0.7], 32: [0.5, 0.4], None: [0.5, 0.5]})),
    "checkpoints_panel": lambda: wb.checkpoints.panel(evaluated([overfitted(seed=k, noise=0.05) for k in range(5)])),
    "predictions_panel": lambda: wb.predictions.panel(tracked()),
    "parameter_server_panel": lambda: wb.ps.panel(served(*[facts(workers=k) for k in (1, 2, 3)])),
}


def values_of(control: Any) -> list[Any]:
    """Twenty places of a control, to and fro, none twice in a row."""
    options = getattr(control, "options", None)
    if options:
        every = list(range(len(options)))
    else:
        every = [type(control.value)(v) for v in np.linspace(control.min, control.max, MOVES)]
    ways = (every + every[-2:0:-1]) * MOVES
    now = control.index if options else control.value
    return [value for value, before in zip(ways, [now, *ways], strict=False) if value != before][:MOVES]


def answers() -> None:
    """Print the milliseconds of an answer for every control of every panel."""
    print(
        "| panel | control | min, ms | median, ms | slowest, ms | CPU median, ms | picture, kB |\n|---|---|---|---|---|---|---|"
    )
    for name, make in PANELS.items():
        panel = make()
        for key, control in panel.controls.items():
            wall, cpu = [], []
            for value in values_of(control):
                message = {"index" if hasattr(control, "options") else "value": value}
                begun, used = time.perf_counter(), time.process_time()
                control.set_state(message)  # what ipywidgets does with a message of the page
                wall.append(1e3 * (time.perf_counter() - begun))
                cpu.append(1e3 * (time.process_time() - used))
            print(
                f"| {name} | {key} | {min(wall):.0f} | {median(wall):.0f} | {max(wall):.0f} | {median(cpu):.0f} | {len(panel.picture.value) / 1e3:.0f} |",
                flush=True,
            )
        panel.close()


def cost(*, rounds: int = 6, seconds: float = 8.0) -> None:
    """Print updates per second of a running cluster with the panel over those without, in rounds that take turns."""
    torch.set_num_threads(1)
    x, y = torch.randn(256, 64), torch.randint(0, 10, (256,))

    def step(placed: Any) -> None:
        with placed.step() as module:
            torch.nn.functional.cross_entropy(module(x), y).backward()

    with wb.ps.create_in_process_cluster(2, 2) as cluster:
        strategy = wb.ps.Strategy(cluster)
        coordinator = wb.ps.ClusterCoordinator(strategy)
        model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
        placed = strategy.place(model, wb.TrainConfig(peak_lr=1e-3, total_steps=10**6, batch_size=256))

        def rate() -> float:
            begun, made = time.perf_counter(), 0
            while time.perf_counter() - begun < seconds:
                for _ in range(50):
                    coordinator.schedule(step, args=(placed,))
                coordinator.join()
                made += 50
            return made / (time.perf_counter() - begun)

        rate()
        rates: dict[str, list[float]] = {"with": [], "without": []}
        for number in range(rounds):
            for side in ("with", "without") if number % 2 else ("without", "with"):
                panel = wb.ps.panel(coordinator, placed) if side == "with" else None
                rates[side].append(rate())
                if panel is not None:
                    panel.close()
        print(f"updates a second with the panel over without: {ratio(rates['with'], rates['without'])}")
        print({side: [round(each) for each in values] for side, values in rates.items()})


if __name__ == "__main__":
    print(machine())
    answers()
    cost()
