"""What a diagnosis costs: `workbench diagnose` in a fresh process, against training the baseline once.

    python tests/benchmarks/bench_diagnose.py [WORKLOAD] [--rounds 3]

The baseline is trained by a plain loop that indexes tensors directly, at the better of one and two threads, and
evaluates and saves ten times; the diagnosis is everything from the command to the report, imports included.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from bare import bare_loop, fastest_threads, indexed
from timing import machine, median, ratio, rounds

import workbench as wb

BUDGET = 6.0  # baseline runs


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

        def diagnose() -> None:
            out = Path(folder) / str(next(number))
            command = [sys.executable, "-m", "workbench", "diagnose", asked.workload, "--out", str(out)]
            subprocess.run(command, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder)
            assert (out / "report.html").is_file()

        seconds = rounds(
            {"bare": lambda: bare_loop(workload, workload.config, indexed, 10), "diagnose": diagnose},
            count=asked.rounds,
        )
        trials = wb.open(Path(folder) / "1").trials
    print(machine())
    print(
        f"{asked.workload}: {workload.config.total_steps} steps, bare {median(seconds['bare']):.1f} s, {threads} thread(s)"
    )
    print(f"diagnose / bare: {ratio(seconds['diagnose'], seconds['bare'])} baseline runs   budget {BUDGET:g}")
    ours = trials["seconds"].sum() / trials["seconds"].iloc[0]
    print(
        f"{len(trials)} trials, {trials['steps_run'].sum()} steps; their training took {ours:.1f} baseline runs of ours"
    )


if __name__ == "__main__":
    main()
