"""What the Ray executor costs: one study in this process, and the same through executor="ray" on this machine.

    python tests/benchmarks/bench_ray.py [WORKLOAD] [--minutes 1] [--lanes 32] [--rounds 1] [--address ADDRESS]

The number of steps is chosen so that the study takes about --minutes in this process; the budget is for a study of five.
Starting a cluster is part of it, unless --address names one that is there.
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
from pathlib import Path

import torch
from sweeps import Study, learning_rates, load, run_study
from timing import cores_here, machine, ratio

from workbench.train.batches import resolve_device

BUDGET = 1.10
PROBE_SECONDS = 10.0


def main() -> None:
    """Print the ratio of the two, study by study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", nargs="?", default="digits_cnn")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--lanes", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--address", help="of a Ray cluster; default: one is started on this machine")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    if importlib.util.find_spec("ray") is None:
        print("skipped: Ray is not installed. Install it with: pip install -c constraints.txt -e '.[ray]'")
        return
    workload, device = load(options.workload), resolve_device(options.device)
    lrs = learning_rates(workload, options.lanes)
    torch.set_num_threads(cores_here())
    print(machine())
    with tempfile.TemporaryDirectory() as folder:

        def study(steps: int, executor: str) -> Study:
            address = options.address if executor == "ray" else None
            return run_study(
                workload,
                lrs,
                steps=steps,
                gradients="auto",
                device=device,
                runs=Path(folder),
                executor=executor,
                address=address,
            )

        steps, seconds = 50, 0.0
        while seconds < min(PROBE_SECONDS, 60 * options.minutes / 4):
            before, seconds = steps, study(steps, "local").seconds.whole
            steps *= 4
        steps = max(10, round(before * 60 * options.minutes / seconds))
        print(f"{workload.name}: {options.lanes} lanes, {steps} steps a trial")
        whole: dict[str, list[float]] = {"local": [], "ray": []}
        for number in range(options.rounds):
            for executor in sorted(whole, reverse=number % 2 == 1):
                done = study(steps, executor)
                whole[executor].append(done.seconds.whole)
                print(f"  {executor:<6} {done.seconds.whole:7.1f} s   {done.gradients}; {done.states}", flush=True)
    print(f"ray / in this process   {ratio(whole['ray'], whole['local'])}   budget {BUDGET} for a study of 5 minutes")


if __name__ == "__main__":
    main()
