"""How often the skew tests call an honest sample skewed, and how often they find a planted bias (P3.2).

python tests/benchmarks/skew_rates.py [--draws N]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from sklearn.datasets import load_breast_cancer, load_digits

sys.path.insert(0, str(Path(__file__).parents[2]))

from workbench.topics.evaluation.skew import skew_tests, worst_skew
from workbench.workloads.subsets import How, draw_sample

LEVELS = (0.01, 0.05, 0.1)
BIASED, PLANTED = (0.25, 0.5, 1.0), 40


def main() -> None:
    """Print one line for each way to draw, and one for each planted bias."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=300)
    draws = parser.parse_args().draws
    ways: tuple[How, ...] = ("random", "stratified")
    for name, load, size in (("digits", load_digits, 200), ("breast_cancer", load_breast_cancer, 150)):
        rows, labels = load(return_X_y=True)
        examples = len(labels)
        rng = np.random.default_rng(0)
        loss, accuracy = rng.exponential(size=examples) ** 3, (rng.random(examples) < 0.95) * 1.0

        def smallest(indices: np.ndarray) -> float:
            mask = np.isin(np.arange(examples), indices)  # noqa: B023
            metrics = {"loss": loss, "accuracy": accuracy}  # noqa: B023
            return float(worst_skew(skew_tests(mask, labels=labels, features=rows, metrics=metrics))[0]["p_adjusted"])  # noqa: B023

        for how in ways:
            found = [draw_sample(rows, size, how=how, labels=labels, seed=seed).indices for seed in range(draws)]
            p = np.array([smallest(np.array(indices)) for indices in found])
            print(f"{name}, {size} of {examples}, {how}: alarms", *(f"{(p < q).mean():.1%} at {q:.0%}" for q in LEVELS))
        for what, values in (("class", labels), ("a feature", rows[:, 20]), ("loss", loss)):
            for share in BIASED:
                hits = [smallest(biased(values, size, share, seed)) < LEVELS[0] for seed in range(PLANTED)]
                print(f"{name}, {share:.0%} of the sample from the lower half by {what}: found {np.mean(hits):.0%}")


def biased(values: np.ndarray, size: int, share: float, seed: int) -> np.ndarray:
    """Draw `share` of a sample from the lower half by `values`, and the others from all that is left."""
    rng = np.random.default_rng(seed)
    half = np.argsort(values, kind="stable")[: len(values) // 2]
    chosen = rng.choice(half, round(share * size), replace=False)
    rest = np.setdiff1d(np.arange(len(values)), chosen)
    return np.concatenate([chosen, rng.choice(rest, size - len(chosen), replace=False)])


if __name__ == "__main__":
    main()
