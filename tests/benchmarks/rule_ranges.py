"""Learning rates that train, rule by rule, on workloads that are hard to train and on easy ones (F2.3).

    python tests/benchmarks/rule_ranges.py [WORKLOAD ...] [--steps N] [--rules momentum,adam] [--seeds N]

With seeds above 1 the whole study is repeated, under another seed each time.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import workbench as wb
from workbench.config import OPTIMIZERS
from workbench.topics.optimizers.rule_ranges import read_ranges


def main() -> None:
    """Print one line a rule for each workload and seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workloads", nargs="*", default=["deep_residual", "valley", "digits_mlp"])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rules", default=",".join(OPTIMIZERS))
    parser.add_argument("--seeds", type=int, default=1)
    given = parser.parse_args()
    sweep = wb.lr_sweep.Study(tolerance=0.1, refinements=0, full_batch_refinements=0)
    study = wb.optimizers.Study(optimizers=given.rules.split(","), steps=given.steps, sweep=sweep)
    for name in given.workloads:
        for seed in range(given.seeds):
            workload = wb.load_workload(name)
            config = workload.config.replace(shared_seed=100 * seed, per_host_seed=100 * seed)
            with tempfile.TemporaryDirectory() as folder:
                record = study.run(workload.replace(config=config), wb.Trainer(device="cpu"), out=Path(folder) / "s")
                show(record, f"{name}, {given.steps} steps, seed {100 * seed}")


def show(record: wb.StudyRecord, title: str) -> None:
    """Print the ranges, and what the diagnosis says of them."""
    print(f"\n{title}: {len(record.trials)} trials")
    print(f"{'rule':9} {'trains':>22} {'decades':>8} {'stable to':>10} {'lr*':>9} {'end loss':>9} {'selected':>9}")
    for found in read_ranges(record).values():
        if found.best_lr is None or found.trains_from is None or found.trains_to is None:
            print(f"{found.optimizer:9} learned nothing")
            continue
        span, selected = f"{found.trains_from:.3g} to {found.trains_to:.3g}", found.selected or float("nan")
        print(
            f"{found.optimizer:9} {span:>22} {found.decades or 0:8.2f} {found.stable or float('inf'):10.3g} {found.best_lr:9.3g} "
            f"{found.loss:9.3g} {selected:9.3g}"
        )
    print(wb.optimizers.diagnose(record), flush=True)


if __name__ == "__main__":
    main()
