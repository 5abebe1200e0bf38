"""Where the best checkpoint lies, what it is worth on the test split, and what stopping early costs: one row a workload.

python tests/benchmarks/best_not_last.py digits_mlp:2000 breast_cancer:1000
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import workbench as wb

SEEDS = 5


def main(asked: list[str]) -> None:
    """Train each workload for so many steps under every seed, and print what is found."""
    with tempfile.TemporaryDirectory() as folder:
        for number, word in enumerate(asked):
            name, _, steps = word.partition(":")
            study = wb.checkpoints.Study(seeds=SEEDS, steps=int(steps or 0) or None, resume=False)
            record = study.run(wb.load_workload(name), out=Path(folder) / str(number))
            found = wb.checkpoints.diagnose(record)
            said = found["checkpoints.best_not_last"]
            print(f"\n{name}, {record.config['total_steps']} steps: {said.status}. {said.summary}")
            for row in said.evidence["runs"]:
                print(
                    f"  seed {row['seed']}: best at {row['best_frac']:.0%}, gain {row['gain']:.4f}, on test {row['test_gain']:.4f}, best {row['best']:.4f}"
                )
            print(f"  selection: {found['checkpoints.selection'].evidence}")
            print(wb.checkpoints.early_stopping(record).round(4).to_string(index=False), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or ["digits_mlp:2000", "breast_cancer:1000", "digits_cnn:2000", "digits_resnet:500"])
