"""A sweep as lanes of one program, against what a person would pick instead, in one run, as ratios.

    python tests/benchmarks/bench_lanes.py [MODEL ...] [--lanes 32 ...] [--steps 1000] [--rounds 3] [--without NAME ...]

MODEL is digits_mlp, digits_mlp_128, digits_cnn, source_text (by default all four) or whatever `load_workload` takes. The peers come
with `pip install -c constraints.txt -e '.[bench]'`; one that is not there is skipped. NAME is loop, diverging,
plain, lightning, optuna or ray.

Two ways to count. "training": for ours the sum over the steps, without start, evaluations, checkpoints and the measuring
by which gradients="auto" chooses; for the others their steps alone. "study": everything from the call to the result, with
ten evaluations and ten checkpoints a trial. Sequential peers are measured on a few trials and multiplied.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import peers
import torch
from bare import Seconds, fastest_threads
from sweeps import learning_rates, load, run_study
from timing import cores_here, machine, median, ratio

import workbench as wb
from workbench.train.batches import resolve_device

PEERS = {"plain": peers.plain, "lightning": peers.lightning, "optuna": peers.optuna, "ray": peers.ray_tune}
NAMES = {
    "auto": "ours",
    "loop": 'ours, gradients="loop"',
    "diverging": "ours, every second lane diverges early",
    "plain": "plain loop",
    "lightning": "Lightning",
    "optuna": "Optuna + plain loop",
    "ray": "Ray Tune",
}
TRIALS = {"digits_mlp": 4, "digits_mlp_128": 4, "digits_cnn": 2, "source_text": 1}
"""Of each sequential peer in a round."""
HEADER = "| lanes | | training, s | / ours | study, s | / ours |\n| --- | --- | --- | --- | --- | --- |"

Key = tuple[str, int]
"""Side, and number of lanes; a peer has 0."""


def sides_of(
    workload: wb.Workload, options: argparse.Namespace, runs: Path, threads: int
) -> dict[Key, Callable[[int], Seconds]]:
    """Return what is measured, called with the number of steps of a trial; `threads` are those of one trial at a time."""
    device = resolve_device(options.device)

    def study(name: str, lanes: int) -> Callable[[int], Seconds]:
        lrs = learning_rates(workload, lanes, diverging=name == "diverging")

        def run(steps: int) -> Seconds:
            torch.set_num_threads(threads if lanes == 1 else options.threads)
            how = "loop" if name == "loop" else "auto"
            done = run_study(workload, lrs, steps=steps, gradients=how, device=device, runs=runs)
            print(f"  {NAMES[name]}, {lanes} lanes: {done.gradients}; {done.states}", file=sys.stderr)
            return done.seconds

        return run

    def peer(name: str) -> Callable[[int], Seconds]:
        count = trials_of(name, workload.name)

        def run(steps: int) -> Seconds:
            torch.set_num_threads(threads)
            configs = [workload.config.replace(peak_lr=lr, total_steps=steps) for lr in learning_rates(workload, count)]
            return PEERS[name](workload, configs, device)

        return run

    found = {(name, k): study(name, k) for name in ("auto", "loop") for k in options.lanes}
    found["diverging", max(options.lanes)] = study("diverging", max(options.lanes))
    found |= {(name, 0): peer(name) for name in PEERS if peers.missing(name) is None}
    return {key: run for key, run in found.items() if key[0] not in options.without}


def trials_of(peer: str, model: str) -> int:
    """Return how many trials of a peer are measured."""
    return 2 * cores_here() if peer == "ray" else TRIALS.get(model, 2)


def measure(sides: dict[Key, Callable[[int], Seconds]], steps: int, rounds: int) -> dict[Key, list[Seconds]]:
    """Run all sides in turn, after one short unmeasured run of each; a peer that fails is left out."""
    found: dict[Key, list[Seconds]] = {key: [] for key in sides}
    began = time.perf_counter()
    for number in range(-1, rounds):
        for key in list(sides) if number % 2 == 0 else list(reversed(sides)):
            if key not in found:
                continue
            what = f"round {number + 1}" if number >= 0 else "warm-up"
            print(f"  {time.perf_counter() - began:6.1f} s  {what}: {NAMES[key[0]]} {key[1] or ''}", file=sys.stderr)
            try:
                result = sides[key](steps if number >= 0 else max(10, steps // 10))
            except Exception as error:
                if key[0] not in PEERS:
                    raise
                print(f"{NAMES[key[0]]} failed and is left out: {type(error).__name__}: {error}")
                del found[key]
                continue
            if number >= 0:
                found[key].append(result)
    return found


def row(lanes: int, name: str, seconds: Sequence[Seconds], ours: Sequence[Seconds]) -> str:
    """Return a row of the table: medians, and ratios over the rounds."""
    cells = [str(lanes), name]
    for kind in ("training", "whole"):
        mine, theirs = ([getattr(each, kind) for each in side] for side in (ours, seconds))
        cells += [f"{median(theirs):.3g}", "1" if seconds is ours else ratio(theirs, mine, digits=2)]
    return f"| {' | '.join(cells)} |"


def compare(name: str, options: argparse.Namespace, runs: Path) -> None:
    """Measure one model and print its table."""
    workload = load(name)
    print(f"\n### `{name}`, {options.steps:,} steps a trial\n\n{machine()}, on {options.device}.")
    for why in filter(None, map(peers.missing, PEERS)):
        print(why)
    device = resolve_device(options.device)
    threads = fastest_threads(workload, workload.config.replace(total_steps=options.steps), device)
    print(
        f"One trial at a time: {threads} thread(s), the better of 1 and 2; lanes: {options.threads}; Ray Tune: one "
        f"CPU a trial, {cores_here()} at a time."
    )
    found = measure(sides_of(workload, options, runs, threads), options.steps, options.rounds)
    print(f"\n{HEADER}", flush=True)
    for lanes in options.lanes:
        ours = found["auto", lanes]
        for (side, k), results in found.items():
            if k == lanes:
                print(row(lanes, NAMES[side], results, ours))
            elif side in PEERS:
                trials = trials_of(side, name)
                factor = peers.waves(lanes) / peers.waves(trials) if side == "ray" else lanes / trials
                scaled = [Seconds(s.training * factor, s.whole * factor) for s in results]
                print(row(lanes, f"{NAMES[side]}, x {factor:g} from {trials} trials", scaled, ours), flush=True)
    print(f"\nAfterwards: {machine()}.", flush=True)


def main() -> None:
    """Read the command line and compare model by model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", default=list(TRIALS))
    parser.add_argument("--lanes", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--steps", type=int, default=1000, help="of a trial")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--without", nargs="+", default=[], choices=[n for n in NAMES if n != "auto"], metavar="NAME")
    parser.add_argument("--threads", type=int, default=cores_here(), help="of lanes; default one a core")
    parser.add_argument("--device", default="auto", help="as for Trainer")
    options = parser.parse_args()
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder:
            compare(name, options, Path(folder))


if __name__ == "__main__":
    main()
