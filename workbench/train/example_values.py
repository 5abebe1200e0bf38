"""What is known of every single example of a split: its loss and metrics, weight, class and inputs; and whether its loss is random, or depends on the other examples of its batch.

Contrastive losses and in-batch negatives do. The loss of such a batch depends on its size, so an evaluation says the same as training
only at the batch of training.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from workbench.config import TrainConfig
from workbench.train.batches import eval_batches
from workbench.train.evaluation import eval_mode, values_each, values_of
from workbench.train.rng import isolated_rng, seed_all
from workbench.train.stacked_weights import build_model
from workbench.workloads.base import Workload
from workbench.workloads.items import IndexedDataset, in_its_own_order
from workbench.workloads.losses import CrossEntropy, classes_of

Floats = NDArray[np.float64]
PROBED = 16  # examples that are looked at in batches of all and of a few (rule of thumb)
TOLERANCE = 1e-3
"""Float32 values of the same examples in other batches differ by less than this share of the largest (rule of thumb)."""
REMEMBERED = 16
LOOKS, FAR = 4, 12.0
"""Looks at random values, and standard errors between their means that chance hardly ever gives (rule of thumb)."""

ONE_A_BATCH = "the loss is one value per batch, and this takes one per example"
"""Why something is not measured; a loss of shape () is the person's own mean, sum or whatever else over its batch."""

_known: OrderedDict[Hashable, tuple[Workload, _Look]] = OrderedDict()


class ExampleValues(NamedTuple):
    """What is known of every example of a split."""

    columns: dict[str, Floats]  # "loss" and the workload's metrics -> values, shape (examples,)
    weights: Floats  # shape (examples,), ones without weights
    # class of each, shape (examples,); None where the loss is no cross-entropy with one class an example
    labels: NDArray[np.int64] | None
    classes: int | None  # how many the model tells apart; None where unknown
    features: Floats | None  # shape (examples, features), the floating tensors of the batch; None where there is none

    def only(self, mask: NDArray[np.bool_]) -> ExampleValues:
        """Return the values of a part of the examples."""
        return self._replace(
            columns={name: values[mask] for name, values in self.columns.items()},
            weights=self.weights[mask],
            labels=None if self.labels is None else self.labels[mask],
            features=None if self.features is None else self.features[mask],
        )


def example_values(workload: Workload, model: nn.Module, *, max_features: int = 0, **how: Any) -> ExampleValues:
    """Return the values of `model` on every example of a split, in evaluation mode; model and RNG are left as they were."""
    labels: list[Tensor] = []
    features: list[Tensor] = []
    classes: int | None = None

    def observe(batch: Any, outputs: Any, examples: int) -> None:
        nonlocal classes
        classes = classes_of(workload.loss, outputs)
        if isinstance(workload.loss, CrossEntropy):
            labels.append(workload.loss.targets(batch))
        if max_features:
            features.append(_columns(batch, examples, max_features))

    ((columns, weights),) = values_each(workload, [model], observe=observe, **how)
    return ExampleValues(
        columns={name: values.numpy() for name, values in columns.items()},
        weights=weights.numpy(),
        labels=torch.cat(labels).cpu().numpy().astype(np.int64) if labels else None,
        classes=classes if labels else None,
        features=torch.cat(features).numpy() if features and features[0].shape[1] else None,
    )


def _columns(batch: Any, examples: int, most: int) -> Tensor:
    """Return the floating tensors of a batch side by side, shape (examples, columns), at most `most` of the columns."""
    parts = [t.detach().reshape(examples, -1) for t in float_tensors(batch) if t.dim() and t.shape[0] == examples]
    if not parts:
        return torch.empty(examples, 0, dtype=torch.float64)
    rows = torch.cat([part.cpu().double() for part in parts], 1)
    count = rows.shape[1]
    return rows if count <= most else rows[:, torch.linspace(0, count - 1, most).long()]


def float_tensors(batch: Any) -> list[Tensor]:
    """Return the floating tensors of a nested batch, in order."""
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


class Dependence(NamedTuple):
    """How far the values of the same examples differ between two looks at them."""

    random: float = 0.0  # largest difference between two looks at the same batch
    batch: float = 0.0  # the same between one batch of all and batches of a few; 0 where values are random
    # whether the loss looks at the whole batch, though the model does not, and it is no mean over the batch. Of
    # random values, whether their mean differs between batches
    coupled: bool = False


def batch_dependence(
    workload: Workload,
    model: nn.Module,
    data: Sequence[Any],
    *,
    metric: str = "loss",
    split: str = "validation",
    piece: int = 2,
) -> Dependence:
    """Compare the values of some examples in one batch, in the same batch again, and in batches of `piece`."""
    part, device = workload.replace(**{f"{split}_data": data}), next(model.parameters()).device

    def look(batch_size: int, seed: int) -> tuple[Tensor, list[list[Tensor]]]:
        outputs: list[list[Tensor]] = []

        def observe(_: Any, returned: Any, examples: int) -> None:
            tensors = [t for t in tree_leaves(returned) if isinstance(t, Tensor) and t.dim() and len(t) == examples]
            outputs.append([t.detach().cpu() for t in tensors if t.is_floating_point()])

        with isolated_rng():
            seed_all(seed)
            ((columns, weights),) = values_each(
                part, [model], split=split, batch_size=batch_size, device=device, precision=workload.config.precision, observe=observe,
            )  # fmt: skip
        return torch.where(weights > 0, columns[metric], 0.0), outputs

    whole, outputs = look(len(data), 0)
    pieces, parts = look(piece, 0)
    allowed = TOLERANCE * float(whole.abs().max())
    random, apart = _apart(whole, look(len(data), 1)[0]), _apart(whole, pieces)
    if random > allowed:
        means = [[float(look(size, seed)[0].mean()) for seed in range(LOOKS)] for size in (len(data), piece)]
        whole_means, piece_means = np.asarray(means)
        error = math.sqrt((whole_means.var(ddof=1) + piece_means.var(ddof=1)) / LOOKS)
        return Dependence(random, coupled=bool(abs(whole_means.mean() - piece_means.mean()) > FAR * error))
    same = _outputs_apart(outputs, parts)
    coupled = apart > allowed and same is not None and same <= TOLERANCE and not _averaged(look, pieces, piece, allowed)
    return Dependence(random, apart, coupled)


def evaluation_batch(workload: Workload, config: TrainConfig, device: torch.device) -> int:
    """Return examples per evaluation batch: the config's, or the micro-batch of training where the loss couples examples or is one value."""
    micro = config.batch_size // config.accumulate_steps
    if config.eval_batch_size is not None or not any(_look(workload, config, device)):
        return config.evaluation_batch
    return micro


def one_loss_a_batch(workload: Workload, config: TrainConfig, device: torch.device) -> bool:
    """Tell whether the loss of a batch has shape (): no example has one of its own."""
    return _look(workload, config, device).per_batch


def first_items(workload: Workload, split: str, count: int) -> list[Any]:
    """Return the first items of a split, read once, so that random preprocessing is the same in every batch."""
    data = workload.data(split)
    if in_its_own_order(data):
        return list(islice(data, count))
    return IndexedDataset(data, split=split).__getitems__(range(min(count, len(data))))


class _Look(NamedTuple):
    """Whether the loss couples examples, and whether it is one value a batch."""

    coupled: bool = False
    per_batch: bool = False


def _look(workload: Workload, config: TrainConfig, device: torch.device) -> _Look:
    """Look once at untrained weights; what raises there is for evaluation itself to say."""
    parts = (workload.build_model, workload.forward, workload.loss, workload.collate)
    key = tuple(map(id, parts))
    if key not in _known:
        try:
            with isolated_rng():
                data, model = first_items(workload, "validation", PROBED), build_model(workload, config, device)
            found = _Look(per_batch=_is_one_value(workload, model, data, config))
            if not found.per_batch:
                found = _Look(batch_dependence(workload, model, data, piece=max(2, len(data) // 2)).coupled)
        except Exception:
            found = _Look()
        _known[key] = (workload, found)
        while len(_known) > REMEMBERED:
            _known.popitem(last=False)
    return _known[key][1]


def _is_one_value(workload: Workload, model: nn.Module, data: Sequence[Any], config: TrainConfig) -> bool:
    part, device = workload.replace(validation_data=data), next(model.parameters()).device
    with torch.no_grad(), isolated_rng(), eval_mode(model):
        batch, examples = next(eval_batches(part, "validation", len(data), device, config.precision))
        losses = values_of(part, model, batch, examples, device=device, precision=config.precision)[1]
    return not losses.dim()


def _averaged(look: Any, pieces: Tensor, piece: int, allowed: float) -> bool:
    """Tell whether the value of each example is the mean of those of its batch."""
    try:
        alone = look(1, 0)[0]
    except Exception:  # there is no value of an example alone
        return False
    if float(alone.max() - alone.min()) <= allowed:  # such as 0 for an example without another one of its class
        return False
    means = torch.cat([part.mean().expand(len(part)) for part in alone.split(piece)])
    return _apart(means, pieces) <= allowed


def _apart(one: Tensor, other: Tensor) -> float:
    difference = (one - other).abs()
    return float(difference.nan_to_num(0.0 if one.isnan().equal(other.isnan()) else torch.inf).max())


def _outputs_apart(whole: list[list[Tensor]], parts: list[list[Tensor]]) -> float | None:
    """Return the largest difference of an output as a share of the largest output; None where shapes are of the batch."""
    if len({len(each) for each in (*whole, *parts)}) != 1 or not whole[0]:
        return None
    shares = []
    for tensor, *cut in zip(whole[0], *parts, strict=True):
        size, first = float(tensor.abs().max()), 0
        for part in cut:
            rows = tensor[first : first + len(part)]
            if tensor.dim() > 1 and part.dim() > 1 and (tensor.shape[1], part.shape[1]) == (len(tensor), len(part)):
                rows = rows[:, first : first + len(part)]  # examples against examples
            if rows.shape != part.shape:
                return None
            shares.append(_apart(rows, part) / size if size else 0.0)
            first += len(part)
    return max(shares)
