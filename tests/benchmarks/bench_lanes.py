"""A sweep as lanes of one program, against what a person would pick instead, in one run, as ratios.

    python tests/benchmarks/bench_lanes.py [MODEL ...] [--lanes 32 ...] [--steps 1000] [--rounds 5] [--without NAME ...]

MODEL is digits_mlp, digits_mlp_128, digits_cnn, source_text (by default all four) or whatever `load_workload` takes. The
full run takes about 25 minutes on two idle cores, most of them for source_text; an MLP alone takes three. The peers come
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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import peers
import torch
from bare import Seconds, fastest_threads
from flops import largest_product, product_rate, step_flops
from lane_models import learning_rates, load
from lane_tables import HEADER, Row, row_text
from ours import Study, run_study
from timing import cores_here, machine

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


class Plan(NamedTuple):
    """In how many rounds each side of a model is measured, so that everything fits into less than half an hour.

    Attributes:
        rounds: side -> number of lanes -> rounds; the peers do not depend on the lanes.
        trials: of each sequential peer in a round.
        warm_up: share of a trial's steps in the unmeasured first run of each side.
    """

    rounds: Mapping[str, Mapping[int, int]]
    trials: int
    warm_up: float

    def chosen(self, lanes: Sequence[int] | None, rounds: int | None, without: Sequence[str]) -> Plan:
        """Return the plan as the command line changes it."""
        found: dict[str, dict[int, int]] = {}
        for side, planned in self.rounds.items():
            wanted = list(planned)
            if lanes and side not in PEERS:
                wanted = [max(lanes)] if side == "diverging" else list(lanes)
            counts = {k: rounds or planned.get(k, 1) for k in wanted if side != "diverging" or k > 1}
            found[side] = {} if side in without else counts
        return self._replace(rounds=found)


MLP = Plan(
    {
        "auto": {1: 3, 8: 3, 32: 5, 64: 3},
        "loop": {1: 3, 8: 3, 32: 3, 64: 1},
        "diverging": {32: 3},
        "plain": {0: 5},
        "lightning": {0: 5},
        "optuna": {0: 5},
        "ray": {0: 2},
    },
    trials=4,
    warm_up=1.0,
)
SLOW = {"plain": {0: 3}, "lightning": {0: 3}, "optuna": {0: 3}, "ray": {0: 1}}
CNN = {"auto": {1: 2, 8: 2, 32: 3, 64: 1}, "loop": {1: 2, 8: 1, 32: 1}, "diverging": {32: 1}}
TEXT = {"auto": {1: 2, 8: 2, 32: 3, 64: 1}, "loop": {1: 2, 8: 1}, "diverging": {}}
PLANS = {
    "digits_mlp": MLP,
    "digits_mlp_128": MLP,
    "digits_cnn": Plan(CNN | SLOW, trials=2, warm_up=0.1),
    "source_text": Plan(TEXT | SLOW, trials=1, warm_up=0.05),
}


class Side(NamedTuple):
    """What is measured: called with the number of steps of a trial, in the first `rounds` rounds."""

    run: Callable[[int], Seconds | Study]
    rounds: int


Key = tuple[str, int]
_warm: set[str] = set()


def sides_of(
    workload: wb.Workload, plan: Plan, device: torch.device, runs: Path, *, threads: int, lane_threads: int
) -> dict[Key, Side]:
    """Return what is measured, by name and lanes; a peer has 0 lanes.

    Args:
        workload: the model.
        plan: what, and how often.
        device: where.
        runs: folder of the studies.
        threads: of whatever trains one trial at a time.
        lane_threads: of several lanes, by whichever way.
    """

    def study(name: str, lanes: int) -> Callable[[int], Study]:
        lrs = learning_rates(workload, lanes, diverging=name == "diverging")
        gradients = "loop" if name == "loop" else "auto"

        def run(steps: int) -> Study:
            torch.set_num_threads(threads if lanes == 1 else lane_threads)
            return run_study(workload, lrs, steps=steps, gradients=gradients, device=device, runs=runs)

        return run

    def peer(name: str, trials: int) -> Callable[[int], Seconds]:
        lrs = learning_rates(workload, trials)

        def run(steps: int) -> Seconds:
            torch.set_num_threads(threads)
            configs = [workload.config.replace(total_steps=steps, peak_lr=lr) for lr in lrs]
            return PEERS[name](workload, configs, device)

        return run

    return {
        (name, lanes): Side(peer(name, trials_of(name, plan)) if name in PEERS else study(name, lanes), rounds)
        for name, planned in plan.rounds.items()
        for lanes, rounds in planned.items()
    }


def trials_of(name: str, plan: Plan) -> int:
    """Return how many trials a peer is measured on."""
    return 2 * cores_here() if name == "ray" else plan.trials


def measure(sides: Mapping[Key, Side], steps: int, warm_up: float) -> dict[Key, list[Seconds | Study]]:
    """Return what each side took in interleaved rounds, after one unmeasured run of each.

    Ray Tune is run unmeasured once in all: its trials are fresh processes every time. A peer that fails is left out.
    """
    found: dict[Key, list[Seconds | Study]] = {key: [] for key in sides}
    began = time.perf_counter()
    for number in range(-1, max(side.rounds for side in sides.values())):
        for key in list(sides) if number % 2 == 0 else list(reversed(sides)):
            warm = number < 0 and key[0] == "ray" and key[0] in _warm
            if number >= sides[key].rounds or key not in found or warm:
                continue
            _warm.add(key[0])
            what = f"round {number + 1}" if number >= 0 else "warm-up"
            print(f"  {time.perf_counter() - began:6.1f} s  {what}: {NAMES[key[0]]} {key[1] or ''}", file=sys.stderr)
            try:
                result = sides[key].run(steps if number >= 0 else max(10, round(steps * warm_up)))
            except Exception as error:
                if key[0] not in PEERS:
                    raise
                print(f"{NAMES[key[0]]} failed and is left out: {type(error).__name__}: {error}")
                del found[key]
                continue
            if number >= 0:
                found[key].append(result)
    return found


def rows_of(found: Mapping[Key, list[Seconds | Study]], plan: Plan, lanes: int, operations: float) -> list[Row]:
    """Return the rows for one number of lanes: ours, then the peers scaled to as many trials."""
    rows = []
    for (name, k), results in found.items():
        if name in PEERS:
            trials = trials_of(name, plan)
            factor = peers.waves(lanes) / peers.waves(trials) if name == "ray" else lanes / trials
            seconds = [Seconds(s.training * factor, s.whole * factor) for s in results]
            rows.append(Row(lanes, f"{NAMES[name]}, x {factor:g} from {trials} trials", seconds, operations))
        elif k == lanes:
            done = None if name == "diverging" else operations
            rows.append(Row(lanes, NAMES[name], [study.seconds for study in results], done))
    return rows


def compare(name: str, options: argparse.Namespace, runs: Path) -> None:
    """Measure one model and print its table."""
    workload, device, steps = load(name), resolve_device(options.device), options.steps
    plan = PLANS.get(name, PLANS["digits_cnn"]).chosen(options.lanes, options.rounds, options.without)
    flops, product = step_flops(workload), largest_product(workload)
    print(f"\n### `{name}`, {steps:,} steps a trial\n\n{machine()}, on {device.type}.")
    skipped = [why for peer in PEERS if plan.rounds[peer] and (why := peers.missing(peer))]
    plan = plan._replace(rounds={k: {} if peers.missing(k) else v for k, v in plan.rounds.items()})
    threads = fastest_threads(workload, workload.config.replace(total_steps=steps), device)
    print(
        f"One trial at a time: {threads} thread(s), the better of 1 and 2; lanes: {options.threads}; Ray Tune: one "
        f"CPU a trial, {cores_here()} at a time.\nA step of a trial: {flops / 1e6:.3g} MFLOP; its largest product: {product}."
    )
    for why in skipped:
        print(why)
    sides = sides_of(workload, plan, device, runs, threads=threads, lane_threads=options.threads)
    found = measure(sides, steps, plan.warm_up)
    print(f"\n{HEADER}", flush=True)
    for lanes in plan.rounds["auto"]:
        rows = rows_of(found, plan, lanes, float(flops) * steps * lanes)
        rate = product_rate(product, lanes, device)
        print("\n".join(row_text(row, rows[0].seconds, rate) for row in rows), flush=True)
    print()
    for (side, lanes), results in found.items():
        if side in ("auto", "diverging"):
            print(f"- {NAMES[side]}, {lanes} lanes: {results[-1].arrangement}; {results[-1].states}.")
    print(f"\nAfterwards: {machine()}.", flush=True)


def main() -> None:
    """Read the command line and compare model by model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--lanes", type=int, nargs="+", help="numbers of lanes; default 1 8 32 64")
    parser.add_argument("--steps", type=int, default=1000, help="steps a trial")
    parser.add_argument("--rounds", type=int, help="rounds of every side; by default fewer for what takes long")
    parser.add_argument("--without", nargs="+", default=[], choices=[n for n in NAMES if n != "auto"], metavar="NAME")
    parser.add_argument("--threads", type=int, default=cores_here(), help="of lanes; default one a core")
    parser.add_argument("--device", default="auto", help="as for Trainer")
    options = parser.parse_args()
    for name in options.models or PLANS:
        with tempfile.TemporaryDirectory() as folder:
            compare(name, options, Path(folder))


if __name__ == "__main__":
    main()
