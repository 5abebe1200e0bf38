"""What a workload's code and data give when the model is built: the same again, or something has changed."""

from __future__ import annotations

import math
import zlib
from typing import Any

import torch

from workbench.config import TrainConfig
from workbench.train.batches import train_batches
from workbench.train.forward import autocast, per_example
from workbench.train.lane_stack import build_model
from workbench.train.rng import isolated_rng, seed_all
from workbench.workloads.base import Workload
from workbench.workloads.checks import check_data
from workbench.workloads.losses import classes_of


def fingerprint(workload: Workload, config: TrainConfig, device: torch.device) -> dict[str, Any]:
    """Return sizes of the splits, a hash of the parameters' names and shapes, the loss of the first batch, and the classes.

    A dataset that knows the hash of its contents, as an attribute `sha256`, has it recorded as well.

    One forward pass in evaluation mode; random state and caller are left as they were. A change that shows in none of
    the three, such as another augmentation of later batches, goes unseen.
    """
    with isolated_rng(), torch.no_grad():
        model = build_model(workload, config, device).eval()
        shapes = repr([(name, tuple(p.shape)) for name, p in model.named_parameters()])
        seed_all(config.shared_seed, config.per_host_seed)
        batch, examples = next(train_batches(workload, config, device))[0]
        with autocast(device, config.precision):
            outputs, losses, _ = per_example(workload, model, batch, examples)
    loss = float(losses.float().mean())
    hashes = {split: data.sha256 for split, data in workload.splits.items() if hasattr(data, "sha256")}
    return {
        "examples": check_data(workload, config),
        **({"sha256": hashes} if hashes else {}),
        "parameters": f"{zlib.crc32(shapes.encode()):08x}",
        "first_loss": loss if math.isfinite(loss) else None,
        "classes": classes_of(workload.loss, outputs),
    }
