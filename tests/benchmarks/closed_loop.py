"""Does what `diagnose` recommends hold on seeds that it has not seen, on workloads made unstable? (issue of the closed loop, F3.12)

    python tests/benchmarks/closed_loop.py [NAME ...] [--steps N] [--seeds N]

For each workload: one diagnosis, then the baseline and the recommended config, each under five fresh seeds. A seed is won where
the recommended config's selected checkpoint is better, or where its peak lr is at least ten times the baseline's and its
checkpoint is not worse by more than the baseline's spread over the seeds.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Subset

import workbench as wb
from workbench.errors import RecordError
from workbench.findings.diagnosis import Diagnosis
from workbench.workloads.base import Workload
from workbench.workloads.sklearn_data import digits_mlp

FIRST_FRESH_SEED = 1000
OPENS = 10.0  # times the baseline's peak lr


def post_norm() -> Workload:
    """A deep transformer with norms after the additions, without a warmup, at the lr of its kind with norms before them.

    Validated on 512 windows of the text: the probe evaluates at each of its 500 steps (F1.11).
    """
    workload = wb.load_workload("source_text_post_norm")
    few = torch.randperm(len(workload.validation_data), generator=torch.Generator().manual_seed(0))[:512]
    return workload.replace(
        validation_data=Subset(workload.validation_data, few.tolist()), config=workload.config.replace(peak_lr=4e-3)
    )


def resnet_stride1() -> Workload:
    """`digits_resnet` after the stride change, at a learning rate that is good before it."""
    workload = wb.load_workload("digits_resnet_stride1")
    return workload.replace(config=workload.config.replace(peak_lr=0.8))


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "wide_init": lambda: digits_mlp(init_scale=10.0),
    "post_norm": post_norm,
    "resnet_stride1": resnet_stride1,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(WORKLOADS))
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    for name in arguments.names or WORKLOADS:
        held_out(name, WORKLOADS[name](), arguments.steps, arguments.seeds)


def held_out(name: str, workload: Workload, steps: int | None, seeds: int) -> None:
    """Diagnose, train both arms on fresh seeds, and print who won."""
    if steps is not None:
        workload = workload.replace(config=workload.config.replace(total_steps=steps))
    with tempfile.TemporaryDirectory() as folder:
        diagnosis = wb.diagnose(workload, out=Path(folder) / "diagnosis", device="cpu")
        found = diagnosis.recommendation or {}
        print(f"== {name}: {found.get('changed') or 'keep the baseline'}; {found.get('reason')}")
        print_kinds(diagnosis)
        config = wb.TrainConfig.from_dict(found["config"])
        arms = {"baseline": workload.config, "recommended": config}
        values = {arm: fresh(workload, c, seeds, Path(folder) / arm) for arm, c in arms.items()}
    spread = float(np.nanstd(values["baseline"], ddof=1))
    opens = config.peak_lr >= OPENS * workload.config.peak_lr
    wins = 0
    for k, (before, after) in enumerate(zip(values["baseline"], values["recommended"], strict=True)):
        won = after < before or (opens and after <= before + spread) or (not np.isfinite(before) and np.isfinite(after))
        wins += won
        print(f"   seed {FIRST_FRESH_SEED + k}: {before:.4g} -> {after:.4g} {'won' if won else 'lost'}")
    print(f"   {wins} of {seeds} seeds won, peak lr {workload.config.peak_lr:.4g} -> {config.peak_lr:.4g}", flush=True)


def print_kinds(diagnosis: Diagnosis) -> None:
    """Print what was found wrong, and the price."""
    for finding in diagnosis:
        if finding.status in ("warn", "fail"):
            print(f"   {finding.status} {finding.code}: {finding.summary}")
    print(f"   cost: {diagnosis.cost['baseline_runs']:.1f} baseline runs, {diagnosis.cost['seconds']:.0f} s")


def fresh(workload: Workload, config: wb.TrainConfig, seeds: int, out: Path) -> list[float]:
    """Return the selected value of a config under each fresh seed, NaN where nothing was finite."""
    values = []
    for k in range(seeds):
        seed = FIRST_FRESH_SEED + k
        record = wb.Trainer(device="cpu").run(
            workload, config.replace(shared_seed=seed, per_host_seed=seed), out=out / str(k)
        )
        try:
            values.append(record.best().value)
        except RecordError:
            values.append(float("nan"))
    return values


if __name__ == "__main__":
    main()
