"""How large the numbers are that a model starts from, rows far from all others, and codes for missing values: facts for `data.scale`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from workbench.errors import WorkbenchError
from workbench.instruments.examples.sizes import MOST_HELD, apart, relative_distances
from workbench.instruments.norms import KINDS, WEIGHED, first_layer, sizes_of
from workbench.train.batches import eval_batches
from workbench.train.forward import autocast
from workbench.train.stacked_weights import build_model
from workbench.workloads.base import Workload
from workbench.workloads.items import in_its_own_order
from workbench.workloads.losses import label_of

MOST = 4096  # examples that the model is shown: a batch of the config, and no more than these (rule of thumb)


def model_scale(workload: Workload, device: torch.device, *, most: int | None = None) -> dict[str, Any]:
    """Return the size of what reaches the first layer with weights, from one pass of a new model over the first `most` examples.

    What a model does to its inputs before is counted in: a constant in forward, a norm, an embedding.

    Returns:
        "layer" (its name and type), "size" (root mean square over columns of the median size of their values that are not 0, times
        the share of these: neither rare features nor heavy tails move it), "columns", "constant" (columns), "smallest", "quarter"
        (of the columns are smaller), "median" and "largest" of them with "smallest_at" and "largest_at", and under "targets"
        the same of numbers that are predicted, with "outputs", the size of what the new model says. "reason": it does not apply;
        "unseen": no layer that is known was called.
    """
    data = workload.train_data
    count = len(data) if most is None else min(most, len(data))
    shown = min(MOST, workload.config.batch_size // workload.config.accumulate_steps, count)
    if not in_its_own_order(data):
        workload = workload.replace(train_data=Subset(data, np.linspace(0, count - 1, shown).astype(int).tolist()))
    seen = _run_forward(workload, device, shown)
    if seen is None:
        return {"unseen": True}
    targets, labels = None, label_of(workload.loss, seen.batch, seen.examples)
    numbers = isinstance(seen.outputs, Tensor) and labels is not None and labels.is_floating_point()
    if labels is not None and numbers and seen.outputs.numel() == labels.numel():  # they are compared number by number
        outputs = float(seen.outputs.detach().double().square().mean().sqrt())
        targets = sizes_of(labels.detach().double().cpu().reshape(len(labels), -1).numpy()) | {"outputs": outputs}
    return first_layer(seen.called, seen.names) | {"targets": targets}


def far_in_the_model(
    workload: Workload, device: torch.device, far: Sequence[Sequence[Any]], *, most: int | None = None, others: int = 32
) -> list[list[Any]]:
    """Return the rows of `far_rows`, with their distances from `others` where they reach the first layer: a model may scale its inputs."""
    data, places = workload.train_data, [int(place) for place, _ in far]
    count = len(data) if most is None else min(most, len(data))
    spread = np.linspace(0, count - 1, others + len(places)).astype(int).tolist()
    rest = [i for i in spread if i not in set(places)]
    alone = in_its_own_order(data) or len(rest) < others // 2
    reached = None if alone else _reached(workload, device, places + rest)
    if reached is None:
        return [list(pair) for pair in far]
    values = reached.flatten(1).numpy()
    away = relative_distances(values[: len(places)], values[len(places) :])
    found = [] if away is None else zip(places, away.tolist(), strict=True)
    return sorted(([place, distance] for place, distance in found), key=lambda pair: -pair[1])


def codes_in_the_model(
    workload: Workload, device: torch.device, codes: Sequence[dict[str, Any]], *, most: int | None = None
) -> list[dict[str, Any]]:
    """Return those of `missing_codes` that reach the first layer with weights: a model may put something else in their place."""
    data, kept = workload.train_data, []
    if in_its_own_order(data):
        return list(codes)
    count = len(data) if most is None else min(most, len(data))
    for code in codes:
        spread = np.linspace(0, count - 1, min(count, int(len(code["places"]) / MOST_HELD))).astype(int).tolist()
        values = _reached(workload, device, sorted({*code["places"], *spread}))
        if values is None or any(apart((values if values.dim() == 2 else values.reshape(-1, 1)).numpy())):
            kept.append(code)
    return kept


def _reached(workload: Workload, device: torch.device, places: list[int]) -> Tensor | None:
    """Return what reaches the first layer with weights, of these rows; None where nobody can tell."""
    seen = _run_forward(workload.replace(train_data=Subset(workload.train_data, places)), device, len(places))
    taken = next((x for module, x in seen.called if isinstance(module, WEIGHED)), None) if seen else None
    return taken.detach().double().cpu() if isinstance(taken, Tensor) and len(taken) == len(places) else None


class _Seen(NamedTuple):
    """What a new model did with a batch: modules that were called with their first argument, its outputs, the batch, module names."""

    called: list[tuple[nn.Module, Any]]
    outputs: Any
    batch: Any
    examples: int
    names: dict[nn.Module, str]


def _run_forward(workload: Workload, device: torch.device, count: int) -> _Seen | None:
    """Show a new model the first `count` training examples; None where it raises."""
    config = workload.config
    model = build_model(workload, config, device).train()
    batch, examples = next(eval_batches(workload, "train", count, device, config.precision))
    called: list[tuple[nn.Module, Any]] = []
    handles = [
        module.register_forward_pre_hook(lambda m, args: called.append((m, args[0] if args else None)))
        for module in model.modules()
        if isinstance(module, KINDS)
    ]
    try:
        with torch.no_grad(), autocast(device, config.precision):
            outputs = workload.forward(model, batch)
    except (RuntimeError, ValueError, TypeError, IndexError, WorkbenchError):
        return None  # the pre-flight says what is wrong with it
    finally:
        for handle in handles:
            handle.remove()
    return _Seen(called, outputs, batch, examples, {module: name for name, module in model.named_modules()})
