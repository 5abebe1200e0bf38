"""`collect_one_batch`: the facts for `diagnose_one_batch`, collected once before training."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from workbench.config import TrainConfig
from workbench.topics.one_batch.affine import find_affine
from workbench.topics.one_batch.batch import OneBatch, first_batch
from workbench.topics.one_batch.fit import fit_one_batch
from workbench.topics.one_batch.influence import find_coupling, find_spread, find_unused
from workbench.topics.one_batch.layers import find_layers
from workbench.topics.one_batch.losses import find_loss
from workbench.topics.one_batch.modes import find_modes
from workbench.topics.one_batch.target_leak import find_answer
from workbench.train.rng import isolated_rng
from workbench.workloads.base import Workload

__all__ = ["collect_one_batch"]


def collect_one_batch(
    workload: Workload, config: TrainConfig, device: torch.device, *, seconds: float = 60.0
) -> dict[str, Any]:
    """Return JSON facts about one batch; the caller's random state is left bit for bit as it was.

    A fresh model of its own is looked at, fitted to the batch, and looked at again. Where a part could not be looked at, its
    "reason" says why.

    Args:
        workload: what to look at.
        config: how it would be trained.
        device: where.
        seconds: after which a large model is let go, a third of them before it is fitted, while, and after; a small one takes less than one.

    Raises:
        WorkbenchError: the model cannot be built, or the batch not loaded.
    """
    with isolated_rng():
        one = first_batch(workload, config.replace(bn_stat_examples=None), device)
        stages: list[dict[str, Callable[[OneBatch], Any]]] = [
            {"loss": find_loss, "layers": find_layers, "spread": find_spread},
            {"fit": lambda one: fit_one_batch(one, config)},
            {
                "answer": find_answer, "modes": find_modes, "coupling": find_coupling, "fitted": find_layers, "fitted_spread": find_spread,
                "affine": find_affine, "unused": find_unused,
            },
        ]  # fmt: skip
        found: dict[str, Any] = {"examples": one.examples}
        for parts in stages:
            timed = replace(one, until=time.monotonic() + seconds / len(stages))
            found |= {name: _looked(timed, find) for name, find in parts.items()}
        return found


def _looked(one: OneBatch, find: Callable[[OneBatch], Any]) -> Any:
    try:
        one.check_time()
        return find(one)
    except Exception as error:  # the person's own code, on batches that were made for this: whatever it raises
        line = (str(error).splitlines() or ["no message"])[0]
        return {"reason": f"{type(error).__name__}: {line[:200]}"}
