"""What a diagnosis costs: `workbench diagnose` in a fresh process, against training the baseline once.

    python tests/benchmarks/bench_diagnose.py [WORKLOAD] [--rounds 3]
    python tests/benchmarks/bench_diagnose.py --scripts mlp cnn gru [--rounds 2]

Twice: with the proof over three seeds of whatever looks better than the baseline, and without.

The baseline is trained by a plain loop that indexes tensors directly, at the better of one and two threads, and
evaluates and saves ten times; the diagnosis is everything from the command to the report, imports included.

With `--scripts` it is `workbench diagnose -- python plain_training.py KIND` against the same trials by hand, one after the other: the script in
a process of its own, its learning rate, warmup, clipping and seed given by its own arguments, ended after as many updates.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from bare import bare_loop, fastest_threads, indexed
from timing import machine, median, ratio, rounds

import workbench as wb

BUDGETS = {1: 6.0, 3: 14.0}  # baseline runs, without and with the proof
SCRIPT = Path(__file__).with_name("plain_training.py")


def spent(words: list[str], folder: Path) -> tuple[float, float]:
    """Run a command, and return what it took: seconds of the processor, and of the wall.

    The processor's are read from /proc ten times a second, of all processes that descend from it: of those that are forked, and that nobody
    waits for, the system keeps no sum.
    """
    mark, began, taken = f"BENCH_MARK={time.time_ns()}", time.perf_counter(), dict[str, float]()
    environment = os.environ | dict([mark.split("=")])
    known: dict[str, bool] = {}
    with subprocess.Popen(
        words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder, env=environment
    ) as process:
        while process.poll() is None:
            time.sleep(0.1)
            for place in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):
                    if place.name not in known:
                        known[place.name] = mark.encode() in (place / "environ").read_bytes()
                    if known[place.name]:
                        ticks = (place / "stat").read_text().rsplit(")", 1)[1].split()[11:13]
                        taken[place.name] = sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
    return sum(taken.values()), time.perf_counter() - began


def by_hand(kind: str, study: Path) -> list[list[str]]:
    """Return the commands of the trials that a study has run."""
    found = []
    own = json.loads((study / "trials/0/config.json").read_text())["config"]
    for trial in sorted((study / "trials").iterdir(), key=lambda folder: int(folder.name)):
        config = json.loads((trial / "config.json").read_text())["config"]
        end = [json.loads(line) for line in (trial / "events.jsonl").read_text().splitlines()][-1]
        if not end["seconds"]:  # the beginning of another trial, that was not run again
            continue
        words = [
            f"--lr={config['peak_lr'] / own['peak_lr']}",
            f"--steps={end['steps_run']}",
            f"--seed={config['shared_seed']}",
        ]
        words += [f"--warmup={config['warmup_steps']}"] if config["warmup_steps"] else []
        words += [f"--clip={config['max_grad_norm']}"] if config["max_grad_norm"] else []
        found.append([sys.executable, str(SCRIPT), kind, *words])
    return found


def scripts(kinds: list[str], count: int) -> None:
    """Print what the diagnosis of each script costs, over its trials by hand, and over the script."""
    print(machine())
    for kind in kinds:
        for number in range(count):
            with tempfile.TemporaryDirectory() as folder:
                study, alone = Path(folder) / "study", [sys.executable, str(SCRIPT), kind]
                once = spent(alone, Path(folder))
                ours = spent(
                    [sys.executable, "-m", "workbench", "diagnose", "--out", str(study), "--", *alone], Path(folder)
                )
                assert (study / "report.html").is_file()
                trials = by_hand(kind, study)
                theirs = [sum(each) for each in zip(*(spent(words, Path(folder)) for words in trials), strict=True)]
                again = spent(alone, Path(folder))
            for i, what in enumerate(("processor", "wall")):
                baseline = (once[i] + again[i]) / 2
                print(
                    f"{kind}, round {number}, {what}: script {baseline:.1f} s, {len(trials)} trials by hand {theirs[i]:.1f} s, diagnosis {ours[i]:.1f} s: "
                    f"{ours[i] / theirs[i]:.3f} of the trials by hand, {ours[i] / baseline:.1f} baseline runs", flush=True,
                )  # fmt: skip


def main() -> None:
    """Print the cost of a diagnosis in baseline runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("workload", nargs="?", default="digits_cnn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scripts", nargs="+", choices=("mlp", "cnn", "gru"))
    asked = parser.parse_args()
    if asked.scripts:
        scripts(asked.scripts, asked.rounds)
        return
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
