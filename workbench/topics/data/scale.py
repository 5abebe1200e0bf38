"""How large the numbers are that a model has to start from: facts for `data.scale`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Subset

from workbench.errors import WorkbenchError
from workbench.topics.data.codes import MOST as MOST_CODES
from workbench.topics.data.codes import apart
from workbench.topics.data.sample import Sample
from workbench.train.batches import eval_batches
from workbench.train.forward import autocast
from workbench.train.lane_stack import build_model
from workbench.workloads.base import Workload
from workbench.workloads.items import in_its_own_order
from workbench.workloads.losses import label_of

__all__ = ["codes_in_the_model", "far_in_the_model", "far_rows", "input_scale", "model_scale"]

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


def far_rows(sample: Sample, *, most: int = 32) -> dict[str, Any]:
    """Return how far the rows that are farthest from the middle of the others lie, of inputs and of targets that are numbers.

    Args:
        sample: of the training split.
        most: rows to tell of.

    Returns:
        Under "inputs" and "targets", where there are some: "rows" that were looked at, and "far", pairs of a place in the split and
        a distance (root mean square over columns, from their medians, in units of the median row's), the farthest first.
    """
    kinds = {"inputs": None if sample.ids else sample.inputs, "targets": None if sample.classes else sample.targets}
    found = {}
    for kind, rows in kinds.items():
        if rows is None or len(rows) < 8:
            continue
        away = _distances(rows, rows)
        if away is not None:
            order = np.argsort(-away, kind="stable")[:most]
            found[kind] = {"rows": len(rows), "far": [[int(sample.places[i]), float(away[i])] for i in order]}
    return found


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
    data = workload.train_data
    count = len(data) if most is None else min(most, len(data))
    shown = min(MOST, workload.config.batch_size // workload.config.accumulate_steps, count)
    if not in_its_own_order(data):
        workload = workload.replace(train_data=Subset(data, np.linspace(0, count - 1, shown).astype(int).tolist()))
    seen = _shown(workload, device, shown)
    if seen is None:
        return {"unseen": True}
    return _first(seen.called, seen.names) | {
        "targets": _targets(seen.outputs, label_of(workload.loss, seen.batch, seen.examples))
    }


def far_in_the_model(
    workload: Workload, device: torch.device, far: Sequence[Sequence[Any]], *, most: int | None = None, others: int = 32
) -> list[list[Any]]:
    """Return the same rows with their distances where they reach the first layer with weights: a model may scale its inputs itself.

    Args:
        workload: to look at.
        device: where.
        far: pairs of a place in the training split and a distance, as `far_rows` has them.
        most: examples to choose from, the first ones; None is all.
        others: rows to compare them with.
    """
    data, places = workload.train_data, [int(place) for place, _ in far]
    count = len(data) if most is None else min(most, len(data))
    spread = np.linspace(0, count - 1, others + len(places)).astype(int).tolist()
    rest = [i for i in spread if i not in set(places)]
    if in_its_own_order(data) or len(rest) < others // 2:
        return [list(pair) for pair in far]
    chosen = workload.replace(train_data=Subset(data, places + rest))
    seen = _shown(chosen, device, len(places) + len(rest))
    layer = (
        next((k for k, (module, _) in enumerate(seen.called) if isinstance(module, _WEIGHED)), None) if seen else None
    )
    if (
        seen is None
        or layer is None
        or not isinstance(seen.called[layer][1], Tensor)
        or len(seen.called[layer][1]) != seen.examples
    ):
        return [list(pair) for pair in far]
    values = seen.called[layer][1].detach().double().cpu().flatten(1).numpy()
    away = _distances(values[: len(places)], values[len(places) :])
    found = [] if away is None else zip(places, away.tolist(), strict=True)
    return sorted(([place, distance] for place, distance in found), key=lambda pair: -pair[1])


def codes_in_the_model(
    workload: Workload, device: torch.device, codes: Sequence[dict[str, Any]], *, most: int | None = None
) -> list[dict[str, Any]]:
    """Return those of `missing_codes` that reach the first layer with weights: a model may put something else in their place.

    Args:
        workload: to look at.
        device: where.
        codes: as `missing_codes` has them.
        most: examples to choose from, the first ones; None is all.
    """
    data = workload.train_data
    count = len(data) if most is None else min(most, len(data))
    return [code for code in codes if in_its_own_order(data) or _reaches(workload, device, code["places"], count)]


def _reaches(workload: Workload, device: torch.device, places: list[int], count: int) -> bool:
    """Tell whether some number of these rows lies apart from those of others in the first layer; True where nobody can tell."""
    spread = np.linspace(0, count - 1, min(count, int(len(places) / MOST_CODES))).astype(int).tolist()
    chosen = sorted({*places, *spread})
    seen = _shown(workload.replace(train_data=Subset(workload.train_data, chosen)), device, len(chosen))
    taken = next((x for module, x in seen.called if isinstance(module, _WEIGHED)), None) if seen else None
    if not isinstance(taken, Tensor) or len(taken) != len(chosen):
        return True
    values = taken.detach().double().cpu().flatten(1)
    return any(True for _ in apart((values if taken.dim() == 2 else values.reshape(-1, 1)).numpy()))


def _distances(rows: NDArray[Any], others: NDArray[Any]) -> NDArray[np.float64] | None:
    """Return how far rows lie from the median of others, in units of the median distance of these; None where that is 0."""
    rows, others = (np.clip(np.nan_to_num(r, nan=0.0, posinf=0.0, neginf=0.0), -1e150, 1e150) for r in (rows, others))
    middle = np.median(others, axis=0)
    away, usual = (np.sqrt(np.square(r - middle).mean(1)) for r in (rows, others))
    unit = float(np.median(usual))
    return away / unit if unit > 1e-150 else None


class _Seen(NamedTuple):
    """What a new model did with a batch: modules that were called with their first argument, its outputs, the batch, module names."""

    called: list[tuple[nn.Module, Any]]
    outputs: Any
    batch: Any
    examples: int
    names: dict[nn.Module, str]


def _shown(workload: Workload, device: torch.device, count: int) -> _Seen | None:
    """Show a new model the first `count` training examples; None where it raises."""
    config = workload.config
    model = build_model(workload, config, device).train()
    batch, examples = next(eval_batches(workload, "train", count, device, config.precision))
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
        return None
    finally:
        for handle in handles:
            handle.remove()
    return _Seen(called, outputs, batch, examples, {module: name for name, module in model.named_modules()})


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
