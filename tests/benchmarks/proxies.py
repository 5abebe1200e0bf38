"""How large must a random proxy be? One run per workload, its checkpoints' losses example by example, many drawn subsets.

For each size of subset: how often `evaluation.bad_proxy` is ok, warns, or cannot tell, and what the checkpoint that the proxy
picks costs on the whole split, as a share of what the run gained.

    python tests/benchmarks/proxies.py
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import workbench as wb
from tests.helpers.evaluations import evaluated
from workbench.topics.evaluation.diagnose import diagnose_evaluation
from workbench.train.evaluation import values_each

DRAWS = 200
RUNS = (
    ("digits_mlp", 0.01, 100),
    ("digits_mlp", 0.01, 400),
    ("digits_mlp", 0.05, 400),
    ("digits_cnn", 0.05, 200),
    ("breast_cancer", 0.05, 600),
)


def losses(name: str, lr: float, steps: int) -> np.ndarray:
    """Return the validation loss of each example at each checkpoint, shape (checkpoints, examples)."""
    workload = wb.load_workload(name)
    config = workload.config.replace(peak_lr=lr, total_steps=steps, eval_every_steps=steps // 20, keep_best=30)
    with tempfile.TemporaryDirectory() as folder:
        trial = wb.Trainer(track=0).run(workload, config, out=Path(folder) / "run")
        models = [wb.checkpoints.load_trained(workload, path) for path in trial.checkpoints]
        found = values_each(
            workload, models, split="validation", batch_size=256, device=torch.device("cpu"), precision=None
        )
    return np.stack([columns["loss"].numpy() for columns, _ in found])


def main() -> None:
    """Print one row per run and size."""
    for name, lr, steps in RUNS:
        table = losses(name, lr, steps)
        offline = table.mean(1)
        gained = offline[0] - offline.min()
        for size in (1, 2, 4, 16, 64):
            rng = np.random.default_rng(size)
            statuses, regrets = Counter(), []
            for _ in range(DRAWS):
                chosen = rng.choice(table.shape[1], size, replace=False)
                found = diagnose_evaluation(evaluated(table[:, chosen].mean(1), offline, subset="drawn"))[
                    "evaluation.bad_proxy"
                ]
                statuses[found.status] += 1
                regrets.append(found.evidence.get("regret", np.nan) / gained)
            shares = ", ".join(f"{statuses[s] / DRAWS:.0%} {s}" for s in ("ok", "warn", "not_measured"))
            median, worst = np.nanquantile(regrets, [0.5, 0.95])
            print(
                f"{name} lr {lr:g}, {size} of {table.shape[1]}: {shares}; regret median {median:.1%}, 95th percentile {worst:.1%}"
            )


if __name__ == "__main__":
    main()
