"""How noisy is the recall of a rare class, and by how many examples (P3.6, P3.7)? On `breast_cancer`, malignant made rare.

python tests/benchmarks/rare_recall.py [--seeds N] [--steps N]
"""

from __future__ import annotations

import argparse

import numpy as np
from selection_gap import answers

import workbench as wb
from workbench.curves.class_counts import wilson

COUNTS = (5, 10, 20, 40)
DRAWS = 4000


def main() -> None:
    """Print one line for each number of malignant examples."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=100)
    given = parser.parse_args()
    workload = wb.load_workload("breast_cancer")
    right, labels = answers(
        workload, workload.config.replace(total_steps=given.steps), [workload.config.peak_lr], given.seeds
    )
    rare, common = np.flatnonzero(labels == 0), np.flatnonzero(labels == 1)
    recalls = right[:, rare].mean(1)
    print(f"{given.seeds} seeds: recall of all {len(rare)} malignant {recalls.mean():.3f} +- {recalls.std(ddof=1):.3f} from seed to seed, "
          f"accuracy +- {right.mean(1).std(ddof=1):.3f}")  # fmt: skip
    rng = np.random.default_rng(0)
    for count in COUNTS:
        recall, accuracy, jumps = [], [], []
        for _ in range(DRAWS):
            some = rng.choice(rare, count, replace=True)
            one, other = rng.choice(given.seeds, 2, replace=False)
            recall.append(right[one, some].mean())
            accuracy.append(right[one, np.concatenate([some, rng.choice(common, len(common))])].mean())
            jumps.append(abs(right[one, some].sum() - right[other, some].sum()))
        low, high = np.quantile(recall, [0.025, 0.975])
        ours = wilson(round(np.mean(recall) * count), count)
        print(f"{count:2d} malignant beside {len(common)} benign: recall {np.mean(recall):.3f}, 95 % of draws {low:.2f} to {high:.2f} "
              f"(Wilson {ours[0]:.2f} to {ours[1]:.2f}), accuracy +- {np.std(accuracy):.3f}; two seeds differ by one example or more "
              f"in {np.mean(np.array(jumps) >= 1):.0%} of draws, by {1 / count:.3f} each")  # fmt: skip


if __name__ == "__main__":
    main()
