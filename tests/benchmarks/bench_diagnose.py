"""What a diagnosis costs: `workbench diagnose` in a fresh process, against training the baseline once.

    python tests/benchmarks/bench_diagnose.py [WORKLOAD] [--rounds 3]

Twice: with the proof over three seeds of whatever looks better than the baseline, and without.

The baseline is trained by a plain loop that indexes tensors directly, at the better of one and two threads, and
evaluates and saves ten times; the diagnosis is everything from the command to the report, imports included.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from bare import bare_loop, fastest_threads, indexed
from timing import machine, median, ratio, rounds

import workbench as wb

BUDGETS = {1: 6.0, 3: 14.0}  # baseline runs, without and with the proof


def main() -> None:
    """Print the cost of a diagnosis in baseline runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("workload", nargs="?", default="digits_cnn")
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    workload = wb.load_workload(asked.workload)
    threads = fastest_threads(workload, workload.config)
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        number = iter(range(1000))

        def diagnose(seeds: int) -> None:
            out = Path(folder) / f"{seeds}-{next(number)}"
            words = f"-m workbench diagnose {asked.workload} --out {out} --seeds {seeds}".split()
            subprocess.run(
                [sys.executable, *words], check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder
            )
            assert (out / "report.html").is_file()

        sides: dict[str, Callable[[], object]] = {"bare": lambda: bare_loop(workload, workload.config, indexed, 10)}
        sides |= {f"seeds {seeds}": partial(diagnose, seeds) for seeds in BUDGETS}
        seconds = rounds(sides, count=asked.rounds)
        studies = {seeds: wb.open(next(Path(folder).glob(f"{seeds}-*"))).trials for seeds in BUDGETS}
    print(machine())
    steps, bare = workload.config.total_steps, median(seconds["bare"])
    print(f"{asked.workload}: {steps} steps, bare {bare:.1f} s, {threads} thread(s)")
    for seeds, budget in BUDGETS.items():
        trials = studies[seeds]
        runs = ratio(seconds[f"seeds {seeds}"], seconds["bare"])
        print(f"diagnose --seeds {seeds} / bare: {runs} baseline runs   budget {budget:g}")
        print(f"  {len(trials)} trials, {trials['steps_run'].sum() / steps:.1f} baseline runs by the steps trained")


if __name__ == "__main__":
    main()
