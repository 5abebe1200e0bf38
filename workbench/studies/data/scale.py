"""How large the numbers are that a model has to start from: facts for `data.scale`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Subset

from workbench.errors import WorkbenchError
from workbench.studies.data.sample import Sample
from workbench.train.batches import eval_batches
from workbench.train.forward import autocast
from workbench.train.lanes import build_model
from workbench.workloads.base import Workload
from workbench.workloads.indexed import in_its_own_order
from workbench.workloads.predictions import label_of

__all__ = ["input_scale", "model_scale"]

MOST = 4096
"""Examples that the model is shown: a batch of the config, and no more than these (rule of thumb)."""
_WEIGHED = (nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
_NORMS = (
    nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm,
)  # fmt: skip


def input_scale(sample: Sample) -> dict[str, Any]:
    """Return the size of the inputs as they are stored, as `model_scale` has it.

    Args:
        sample: of the training split.
    """
    if sample.inputs is None:
        return {"reason": "the inputs are text, or of different sizes"}
    if sample.integers:
        return {"reason": "the inputs are integers, which a model looks up or scales itself"}
    return {"layer": None} | _sizes(sample.inputs)


def model_scale(workload: Workload, device: torch.device, *, most: int | None = None) -> dict[str, Any]:
    """Return the size of what reaches the first layer with weights, from one pass of a new model over training examples.

    What a model does to its inputs before is counted in: a constant in forward, a norm, an embedding.

    Args:
        workload: to look at.
        device: where.
        most: examples to choose from, the first ones; None is all.

    Returns:
        "layer" (its name and type), "size" (root mean square over columns of the median size of their values that are not 0, times
        the share of these: neither rare features nor heavy tails move it), "columns", "constant" (columns), "smallest", "quarter"
        (of the columns are smaller), "median" and "largest" of them with "smallest_at" and "largest_at", and under "targets"
        the same of numbers that are predicted, with "outputs", the size of what the new model says. "reason": it does not apply;
        "unseen": no layer that is known was called.
    """
    config = workload.config
    model = build_model(workload, config, device).train()
    data = workload.train_data
    count = len(data) if most is None else min(most, len(data))
    shown = min(MOST, config.batch_size // config.accumulate_steps, count)
    if not in_its_own_order(data):
        workload = workload.replace(train_data=Subset(data, np.linspace(0, count - 1, shown).astype(int).tolist()))
    batch, examples = next(eval_batches(workload, "train", shown, device, config.precision))
    called: list[tuple[nn.Module, Any]] = []
    handles = [
        module.register_forward_pre_hook(lambda m, args: called.append((m, args[0] if args else None)))
        for module in model.modules()
        if isinstance(module, (*_WEIGHED, *_NORMS, nn.Embedding, nn.EmbeddingBag))
    ]
    try:
        with torch.no_grad(), autocast(device, config.precision):
            outputs = workload.forward(model, batch)
    except (
        RuntimeError,
        ValueError,
        TypeError,
        IndexError,
        WorkbenchError,
    ):  # the pre-flight says what is wrong with it
        return {"unseen": True}
    finally:
        for handle in handles:
            handle.remove()
    names = {module: name for name, module in model.named_modules()}
    return _first(called, names) | {"targets": _targets(outputs, label_of(workload.loss, batch, examples))}


def _first(called: Sequence[tuple[nn.Module, Any]], names: dict[nn.Module, str]) -> dict[str, Any]:
    kinds = [module for module, _ in called]
    weighed = next((k for k, module in enumerate(kinds) if isinstance(module, _WEIGHED)), None)
    if weighed is None or not isinstance(called[weighed][1], Tensor):
        return {"unseen": True}
    if any(isinstance(module, (nn.Embedding, nn.EmbeddingBag)) for module in kinds[:weighed]):
        return {"reason": "the model looks its inputs up in an embedding", "lookup": True}
    if any(isinstance(module, _NORMS) for module in kinds[: weighed + 2]):
        return {"reason": "the model normalises its inputs, or what its first layer makes of them"}
    module, values = called[weighed]
    rows = values.detach().double().cpu()
    axis = 1 if isinstance(module, nn.modules.conv._ConvNd) and rows.dim() > 2 else rows.dim() - 1
    columns = rows.movedim(axis, -1).reshape(-1, rows.shape[axis]).numpy()
    return {"layer": [names[module], type(module).__name__]} | _sizes(columns)


def _targets(outputs: Any, labels: Tensor | None) -> dict[str, Any] | None:
    """Return the size of targets that the outputs are compared with number by number; None where they are none."""
    if not isinstance(outputs, Tensor) or labels is None or not labels.is_floating_point():
        return None
    if outputs.numel() != labels.numel():
        return None
    found = outputs.detach().double().square().mean().sqrt()
    return _sizes(labels.detach().double().cpu().reshape(len(labels), -1).numpy()) | {"outputs": float(found)}


def _sizes(rows: NDArray[Any]) -> dict[str, Any]:
    """Return the sizes of columns; a column that never varies has none."""
    values = np.where(np.isfinite(rows), rows, 0.0)
    varies = np.flatnonzero(values.max(0) > values.min(0)) if len(values) else np.empty(0, dtype=np.int64)
    known = {"columns": values.shape[1], "constant": values.shape[1] - len(varies)}
    if not len(varies):
        return known | {"reason": "the inputs never vary"}
    sizes = np.abs(values[:, varies])
    share = (sizes > 0).mean(0)
    sizes[sizes == 0] = np.nan
    size = np.nanmedian(sizes, axis=0)
    return known | {
        "size": float(np.sqrt((share * size**2).mean())),
        "smallest": float(size.min()),
        "quarter": float(np.quantile(size, 0.25)),
        "median": float(np.median(size)),
        "largest": float(size.max()),
        "smallest_at": int(varies[size.argmin()]),
        "largest_at": int(varies[size.argmax()]),
    }
