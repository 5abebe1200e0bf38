"""A simulated study of batch sizes: each has its own best learning rate, and trials around it."""

from __future__ import annotations

import math
from itertools import product

import numpy as np

from tests.helpers.simulated_records import evaluations, record, trial

STEPS, OWN_LR, CHOOSING = 40, 0.1, 3
LRS = [OWN_LR * 2.0**k for k in range(-4, 5)]


def level(lr, best_lr):
    """A parabola in log lr: 0.2 at its bottom, 0.4 a factor of 4 away."""
    return 0.2 * 2 ** (math.log(lr / best_lr, 4) ** 2)


def batches(
    best_lr,
    *,
    lrs=LRS,
    spread=0.01,
    extra=None,
    decays=(),
    decayed=None,
    facts=None,
    fresh=5,
    memory=None,
    warmup=None,
    optimizer="sgd",
    lengths=None,
):
    """A study: batch size -> its best lr; `extra` multiplies the level of a batch size, `decayed` that of (batch size, decay).

    `lengths` is every number of steps that a batch size trains for, with what that multiplies its level by; `memory` is the momentum of a batch size's trials at another lr than the baseline's, and `warmup` its warmup steps, where they are not those of the config.
    """
    rng, trials, evals, losses = np.random.default_rng(0), [], [], {}
    for size, best in best_lr.items():
        for (steps, factor), decay in product((lengths or {}).get(size, {STEPS: 1.0}).items(), (0.0, *decays)):
            tried = lrs if not decay else [min(lrs, key=lambda lr: level(lr, best))]
            for lr in tried:
                chosen = level(lr, best) == min(level(each, best) for each in lrs)
                seeds = range(CHOOSING + fresh) if chosen or lr == OWN_LR else [0]
                for seed in seeds:
                    value = level(lr, best) * (extra or {}).get(size, 1.0) * (decayed or {}).get((size, decay), 1.0)
                    value *= factor * math.exp(spread * rng.standard_normal())
                    number = len(trials)
                    more = {"momentum": (memory or {}).get(size, 0.9) if lr != OWN_LR else 0.9,
                            "warmup_steps": (warmup or {}).get(size, 0), "total_steps": steps}  # fmt: skip
                    trials.append(trial(np.linspace(2.3, 0.1, steps), lr, seed=seed, stage="batch_size", batch_size=size,
                                        weight_decay=decay, best_step=steps, **more))  # fmt: skip
                    evals += evaluations(number, [0, steps], [2.3, value], split="validation")
                    losses[str(number)] = value - 0.001 * size
    known = {"batch_size": {"choosing_seeds": CHOOSING}, "train_losses": losses} | (facts or {})
    own = {"batch_size": 64, "peak_lr": OWN_LR, "total_steps": STEPS, "optimizer": optimizer}
    return record(trials, evals=evals, facts=known, full_batch=False, **own)
