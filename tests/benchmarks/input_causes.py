"""Planted loaders of about 50 batches a second: which cause is named, in how many seconds, and is the gain the predicted one.

python tests/benchmarks/input_causes.py [--repeats 3] [--seconds 20] [NAME ...]

One row a loader and repeat; healthy twins are among them. Sleeps are planted where they can be, so that a busy machine matters less.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a second thread would wait for its turn on a busy machine
sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.helpers.input_loaders import AheadDevice, Drawing, Items, SlowCollate, Stream, TrainStep, loader
from workbench.topics.input.diagnose import diagnose_input_pipeline
from workbench.topics.input.study import audit_input

_GAINS = ("predicted", "measured", "predicted_low", "predicted_high", "measured_low", "measured_high")
Made = tuple[Any, Any, dict[str, Any]]


def _ahead(fetch_every: int, sleep_s: float, step_s: float) -> Made:
    device = AheadDevice(step_s, fetch_every=fetch_every)
    return loader(Items(sleep_s=sleep_s)), device, {"synchronize": device.wait}


def _idle(batch: Any) -> None:
    time.sleep(0.03)
    batch[0].sum() + batch[1].sum()


PLANTED: dict[str, tuple[Callable[[], Made], str]] = {
    "latency": (lambda: (loader(Items(sleep_s=0.0024)), TrainStep(0.015), {}), "latency"),
    "latency, 2 workers": (
        lambda: (loader(Items(sleep_s=0.02), num_workers=2), TrainStep(0.005), {"max_workers": 4, "seconds": 25.0}),
        "latency",
    ),
    "preprocessing": (lambda: (loader(Items(work_s=0.0024)), TrainStep(0.01), {}), "preprocessing"),
    "slow collate": (lambda: (loader(Items(), collate_fn=SlowCollate(0.02)), TrainStep(0.015), {}), "collate"),
    "fetch each step": (lambda: _ahead(1, 0.0015, 0.02), "sync"),
    "workers restart": (
        lambda: (loader(Items(40, sleep_s=0.002), num_workers=2, persistent_workers=False), TrainStep(0.01), {}),
        "worker_restart",
    ),
    "1 worker": (lambda: (loader(Items(sleep_s=0.003), num_workers=1), TrainStep(0.012), {}), "too_few_workers"),
    "unused feature": (lambda: (loader(Items(extra=400_000), batch_size=16), TrainStep(0.002), {}), "unused_features"),
    "default_rng(0)": (lambda: (loader(Drawing(), num_workers=2), _idle, {}), "data.worker_rng"),
    "stream read twice": (lambda: (loader(Stream(200, shared=False), num_workers=2), 0.03, {}), "input.example_count"),
    "item on the CPU": (lambda: (loader(Items()), TrainStep(0.01, fetch_every=1), {}), "input.sync_every_step"),
    "hidden by workers": (lambda: (loader(Items(sleep_s=0.0024), num_workers=2), TrainStep(0.03), {}), "healthy"),
    "slow first batch": (lambda: (loader(Items(first_s=2.0)), TrainStep(0.02), {}), "healthy"),
    "hidden by a device": (lambda: _ahead(20, 0.001, 0.02), "healthy"),
    "in memory": (lambda: (loader(Items()), TrainStep(0.01), {}), "healthy"),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0)
    args = parser.parse_args()
    print(
        "| planted | found | right | waits | predicted | measured | pred/meas | rounds predicted | rounds measured | meet | seconds | load |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    for _ in range(args.repeats):
        for name in args.names or PLANTED:
            make, expected = PLANTED[name]
            training, step, options = make()
            start = time.perf_counter()
            audit = audit_input(training, step, **{"seconds": args.seconds, **options})
            took = time.perf_counter() - start
            diagnosis = diagnose_input_pipeline(audit)
            bound = diagnosis["input.bound"]
            warned = [f.code for f in diagnosis if f.status == "warn"]
            cause = bound.evidence["cause"] if bound.status == "warn" else ""
            found = cause or ", ".join(warned) or "healthy"
            right = expected in (found, cause, *warned)
            fix = bound.evidence["fix"] or {}
            gains = [fix.get(key, float("nan")) for key in _GAINS]
            meet = "yes" if gains[2] <= gains[5] and gains[4] <= gains[3] else "no" if fix else ""
            value = float("nan") if bound.value is None else bound.value
            print(
                f"| {name} | {found} | {'yes' if right else 'NO'} | {value:.0%} | {gains[0]:.2f} | {gains[1]:.2f} | "
                f"{gains[0] / gains[1]:.2f} | {gains[2]:.2f} to {gains[3]:.2f} | {gains[4]:.2f} to {gains[5]:.2f} | {meet} | {took:.0f} | {os.getloadavg()[0]:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
