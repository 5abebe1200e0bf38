"""How much does choosing the best of many models on a validation set flatter it? On real digits, against the closed form (P3.5).

Many small networks are trained once, each with its own learning rate and seed. Then, again and again, some of the examples that
training never saw become the validation set and the others are held out: what is best on the first is looked up on the second.

    python tests/benchmarks/selection_gap.py [--models N] [--steps N]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import workbench as wb
from workbench.topics.evaluation.collect import selected_model
from workbench.topics.evaluation.sample_size import selection_gap
from workbench.train.example_values import example_values

SIZES = (30, 60, 130, 270)
DRAWS = 4000


def answers(
    workload: wb.Workload, config: wb.TrainConfig, lrs: list[float], seeds: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Return 1 where a trained model is right, shape (models, examples), and the classes, over validation and test."""
    how = {"batch_size": 512, "device": torch.device("cpu"), "precision": None}
    right = []
    with tempfile.TemporaryDirectory() as folder:
        study = wb.lr_sweep.Study(lrs=lrs, seeds=seeds, steps=config.total_steps)
        record = study.run(workload.replace(config=config), wb.Trainer(device="cpu"), out=Path(folder) / "s")
        for number in record.trials["trial"]:
            model = selected_model(workload, config, record, int(number), torch.device("cpu"))
            both = [example_values(workload, model, split=split, **how) for split in ("validation", "test")]
            right.append(np.concatenate([values.columns["accuracy"] for values in both]))
    return np.array(right), np.concatenate([values.labels for values in both if values.labels is not None])


def main() -> None:
    """Print one line for each number of models and size of the validation set."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=64)
    parser.add_argument("--steps", type=int, default=150)
    given = parser.parse_args()
    models, steps = given.models, given.steps
    lrs = np.exp(np.random.default_rng(0).uniform(np.log(0.01), np.log(0.2), models)).tolist()
    workload = wb.load_workload("digits_mlp")
    config = workload.config.replace(total_steps=steps, select="train/loss", eval_every_steps=steps)
    right, _ = answers(workload, config, lrs)
    examples = right.shape[1]
    accuracy = right.mean(1)
    pairs = [(right[i] != right[j]).mean() for i in range(models) for j in range(i)]
    disagreement = float(np.mean(pairs))
    noise = disagreement / 2 / examples
    spread = float(np.sqrt(max(accuracy.var(ddof=1) - noise, 0.0)))
    print(f"{models} models, {steps} steps, {examples} examples: accuracy {accuracy.min():.3f} to {accuracy.max():.3f}, "
          f"disagreement {disagreement:.3f}, spread of the true accuracy {spread:.4f}")  # fmt: skip
    rng = np.random.default_rng(1)
    for k in (8, models):
        for n in SIZES:
            gaps, gains = [], []
            for _ in range(DRAWS):
                order = rng.permutation(examples)
                some = right[rng.choice(models, k, replace=False)]
                here, there = some[:, order[:n]].mean(1), some[:, order[n:]].mean(1)
                best = rng.choice(np.flatnonzero(here == here.max()))
                gaps.append((here[best] - here.mean()) - (there[best] - there.mean()))
                gains.append(there[best] - there.mean())
            # examples are drawn from a finite set: what is seen on one part is missing on the other
            seen = (1 - n / examples) * disagreement / 2
            equal, unequal = (
                selection_gap(n, k, sd=np.sqrt(seen), spread=each) * examples / (examples - n)
                for each in (0.0, float(accuracy.std(ddof=1)))
            )
            print(f"best of {k:3d} on {n:3d}: gap {np.mean(gaps):.4f}, closed form {equal:.4f} for equal models and {unequal:.4f} "
                  f"for these; true gain {np.mean(gains):+.4f}")  # fmt: skip


if __name__ == "__main__":
    main()
