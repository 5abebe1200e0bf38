"""Evaluation: weighted means over examples, equal for any batch size (P2.6 to P2.11), values of each, and tracked predictions (P2.12)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from workbench.checks import check_integer
from workbench.errors import ConfigError, DataError, UsageError, WorkloadError
from workbench.train.batches import eval_batches
from workbench.train.forward import all_finite, autocast, explained, graph_if_needed, has_diverged, per_example
from workbench.train.rng import isolated_rng
from workbench.workloads.base import PerExample, Workload
from workbench.workloads.checks import check_loss_shape, check_weights
from workbench.workloads.losses import label_of, prediction_of
from workbench.workloads.subsets import example_ids

Diverged = Callable[[int, Exception, Any, int], bool]
BatchValues = tuple[Any, Tensor, Tensor | None, dict[str, Tensor]]
"""What a model makes of one batch: outputs, losses (shape () where the loss is one value per batch), weights (None is ones) and metrics,
the last three per example."""


class Evaluation(NamedTuple):
    """One metric over a whole split."""

    metric: str  # "loss" or a name of the workload's metrics
    value: float  # weighted mean over the examples
    num_examples: int  # examples with a positive weight
    num_correct: int | None  # their number of correct predictions for a metric of zeros and ones, else None (P3.7)
    seconds: float  # wall time of the whole evaluation


def evaluate(
    workload: Workload,
    model: nn.Module,
    *,
    split: str = "validation",
    batch_size: int,
    device: torch.device | None = None,
    precision: str | None = None,
) -> list[Evaluation]:
    """Return loss and metrics of `model` on a split, in evaluation mode; model and RNG are left as they were.

    Sums run in float64 over per-example values, so that batch sizes 1 and 1,000 agree to float tolerance (P2.11).

    Raises:
        UsageError: the batch size is no integer of at least 1, or the workload has no such split.
        DataError: the split has no examples.
    """
    check_integer("batch_size", batch_size, error=UsageError, hint=": the examples of one forward pass")
    data = workload.data(split)
    if hasattr(data, "__len__") and len(data) == 0:
        raise DataError(
            f"workload {workload.name!r}: the {split} split has no examples, so there is nothing to evaluate on. Look at "
            f"{split}_data, or choose another split."
        )
    device = device or next(model.parameters()).device
    return evaluate_each(workload, [model], split=split, batch_size=batch_size, device=device, precision=precision)[0]


def evaluate_each(workload: Workload, models: Sequence[nn.Module], *, split: str, **how: Any) -> list[list[Evaluation]]:
    """Return what `evaluate` does for each of several models; the arguments are those of `values_each`."""
    start = time.perf_counter()
    hosted = values_each(workload, models, split=split, **how)
    return evaluations_of(workload, hosted, split=split, seconds=(time.perf_counter() - start) / len(models))


def evaluations_of(
    workload: Workload, hosted: Sequence[tuple[Mapping[str, Tensor], Tensor]], *, split: str, seconds: float
) -> list[list[Evaluation]]:
    """Return the evaluations of each model from the values of its examples and their weights."""
    if workload.weights is not None:
        for _, weights in hosted:
            check_weights(weights, where=f"the {split} split")
    return [[mean_over(name, v, weights, seconds) for name, v in columns.items()] for columns, weights in hosted]


def values_each(
    workload: Workload,
    models: Sequence[nn.Module],
    *,
    split: str,
    batch_size: int,
    device: torch.device,
    precision: str | None,
    within: Callable[[int], AbstractContextManager[Any]] = lambda row: nullcontext(),  # noqa: ARG005
    tracked: TrackedExamples | None = None,
    diverged: Diverged | None = None,
    observe: Callable[[Any, Any, int], None] | None = None,
) -> list[tuple[dict[str, Tensor], Tensor]]:
    """Return for each model loss and metrics of every example and the weights, each (examples,) in float64 on the host.

    Args:
        models: on `device`; each batch is loaded and moved once for all of them.
        within: the context in which a model is called, by its place.
        tracked: takes the predictions of the examples that it tracks.
        diverged: called where forward, loss or a metric raises, with the model's place, the error, the batch and its examples:
            whether the values of that batch are NaN instead. None looks whether the model's numbers are finite.
        observe: called with each batch, what a model returned for it, and its number of examples.
    """

    def compute(batch: Any, examples: int, first: int) -> Iterator[BatchValues]:
        where = f"in the batch of the {split} split that begins with example {first}"
        for lane, model in enumerate(models):
            with explained(workload, where), within(lane):
                try:
                    found = values_of(workload, model, batch, examples, device=device, precision=precision)
                except Exception as error:
                    gone = diverged(lane, error, batch, examples) if diverged else has_diverged(error, model)
                    if not gone:
                        raise
                    losses = torch.full((examples,), math.nan, device=device)
                    weight = None if workload.weights is None else workload.weights(batch)
                    found = None, losses, weight, dict.fromkeys(workload.metrics, losses)
            if observe is not None and found[0] is not None:
                observe(batch, found[0], examples)
            yield found

    with ExitStack() as modes:
        for model in models:
            modes.enter_context(eval_mode(model))
        batches: dict[str, Any] = {"split": split, "batch_size": batch_size, "device": device, "precision": precision}
        return collect_values(workload, compute, models=len(models), tracked=tracked, **batches)


def collect_values(
    workload: Workload,
    compute: Callable[[Any, int, int], Iterable[BatchValues]],
    *,
    models: int,
    split: str,
    batch_size: int,
    device: torch.device,
    precision: str | None,
    tracked: TrackedExamples | None = None,
    predict: Callable[[Any, Tensor | None, int, Sequence[int]], Tensor | None] = prediction_of,
) -> list[tuple[dict[str, Tensor], Tensor]]:
    """Return what `values_each` does, for models of which `compute` knows the values of a batch."""
    seen = 0
    values: list[dict[str, list[Tensor]]] = [{} for _ in range(models)]
    weights: list[list[Tensor]] = [[] for _ in range(models)]
    if tracked is not None:
        tracked.begin()
    with torch.no_grad(), isolated_rng():
        for batch, examples in eval_batches(workload, split, batch_size, device, precision):
            rows = [] if tracked is None else tracked.rows(seen, examples)
            labels = label_of(workload.loss, batch, examples) if rows else None
            if tracked is not None and rows:
                tracked.add_labels(labels, rows)
            for lane, (outputs, losses, weight, metrics) in enumerate(compute(batch, examples, seen)):
                each = losses.expand(examples) if not losses.dim() else losses
                weights[lane].append(torch.ones_like(each) if weight is None else weight)
                for name, column in {"loss": each, **metrics}.items():
                    values[lane].setdefault(name, []).append(column)
                if tracked is not None and rows:
                    tracked.add(
                        lane, predict(outputs, labels, examples, rows), each[rows] * (1 if losses.dim() else math.nan)
                    )
            seen += examples
    return [
        ({name: _on_host(parts) for name, parts in v.items()}, _on_host(w))
        for v, w in zip(values, weights, strict=True)
    ]


def evaluation_columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the columns of rows of `.evals`; a number of correct predictions that is not known is NaN."""
    columns: dict[str, Any] = {name: [row[name] for row in rows] for name in rows[0]}
    columns["num_correct"] = np.array([math.nan if n is None else n for n in columns["num_correct"]], dtype=np.float64)
    return columns


def check_first(workload: Workload, split: str, found: Sequence[Evaluation]) -> None:
    """Raise a `WorkloadError` where a metric of an untrained model is NaN and the loss is not: training will not mend it."""
    values = {evaluation.metric: evaluation.value for evaluation in found}
    for name, value in values.items():
        if math.isnan(value) and math.isfinite(values["loss"]):
            raise WorkloadError(
                f"workload {workload.name!r}: metric {name!r} is NaN on the {split} split before training, though the loss is "
                "finite. Look for a division by zero or a logarithm of 0 in it, and give an example that it does not apply to "
                "the weight 0."
            )


def values_of(
    workload: Workload, model: nn.Module, batch: Any, examples: int, *, device: torch.device, precision: str | None
) -> BatchValues:
    """Return outputs, losses, weights and metrics of one batch; a metric that raises on outputs that are not finite is NaN."""

    def compute() -> BatchValues:
        with autocast(device, precision):
            outputs, losses, weights = per_example(workload, model, batch, examples)
        metrics = {
            name: _metric(name, metric, outputs, batch, losses.expand(examples))
            for name, metric in workload.metrics.items()
        }
        return outputs, losses, weights, metrics

    return graph_if_needed(compute)


def _metric(name: str, metric: PerExample, outputs: Any, batch: Any, losses: Tensor) -> Tensor:
    try:
        value = metric(outputs, batch)
    except Exception:
        if all_finite([outputs, losses]):
            raise
        return torch.full_like(losses, math.nan)
    check_loss_shape(value, len(losses), what=f"metric {name!r}")
    return value


def _on_host(parts: list[Tensor]) -> Tensor:
    """Return the parts of one metric, each (examples,), as one tensor in float64 on the host."""
    return torch.cat(parts).cpu().double()  # in this order: not every device has float64


def mean_over(name: str, values: Tensor, weights: Tensor, seconds: float) -> Evaluation:
    """Return the evaluation of one metric from its values and the weights, each shape (examples,)."""
    part = partial_sum(name, values, weights, seconds)
    mean = part.total / part.weight if part.num_examples else math.nan
    return Evaluation(name, mean, part.num_examples, part.num_correct, seconds)


class PartialSum(NamedTuple):
    """One metric over a part of a split, as sums."""

    metric: str  # "loss" or a name of the workload's metrics
    total: float  # sum of weight times value, in float64
    weight: float
    num_examples: int  # with a positive weight
    num_correct: int | None  # of them for a metric of zeros and ones, else None
    seconds: float


def partial_sum(name: str, values: Tensor, weights: Tensor, seconds: float) -> PartialSum:
    """Return the sums of one metric from its values and the weights, each shape (examples,)."""
    kept = weights > 0
    values, weights = values[kept], weights[kept]
    counted = name != "loss" and bool(((values == 0) | (values == 1)).all())
    total, weight = float((values * weights).sum()), float(weights.sum())
    return PartialSum(name, total, weight, len(values), int(values.sum()) if counted else None, seconds)


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Put each module of a model back into its own mode afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[Any]:
    """Put the model in evaluation mode and each of its modules back into its own mode afterwards."""
    with modes_kept(model):
        yield model.eval()


TRACKED_SPLIT = "validation"


class TrackedExamples:
    """The tracked rows of one evaluation of several lanes: their places in the order of evaluation, ascending, and their ids."""

    def __init__(self, places: Sequence[int], ids: Sequence[int]) -> None:
        self.places, self.ids = list(places), list(ids)
        self._found: dict[int, list[tuple[Tensor | None, Tensor]]] = {}
        self._labels: list[Tensor | None] = []

    def begin(self) -> None:
        """Forget the evaluation before."""
        self._found.clear()
        self._labels.clear()

    def alone(self) -> TrackedExamples:
        """Return these examples for an evaluation that reads nothing else; what it finds is found here."""
        same = TrackedExamples(range(len(self.places)), self.ids)
        same._found, same._labels = self._found, self._labels
        return same

    def rows(self, first: int, examples: int) -> list[int]:
        """Return the tracked rows of the batch that begins with example `first`."""
        return [place - first for place in self.places if first <= place < first + examples]

    def add_labels(self, labels: Tensor | None, rows: Sequence[int]) -> None:
        """Keep the labels of one batch, shape (examples, ...), where they are known."""
        self._labels.append(None if labels is None else labels[rows])

    def add(self, lane: int, prediction: Tensor | None, losses: Tensor) -> None:
        """Keep the prediction of one model for the tracked rows of one batch, shape (rows, ...), and their losses, shape (rows,)."""
        self._found.setdefault(lane, []).append((prediction, losses))

    def columns(self, trials: Sequence[int], step: int) -> dict[str, Any]:
        """Return the table's rows, lane by lane: trial, step, split, example, prediction, label, loss."""
        count = len(self.ids)
        found = [self._found[lane] for lane in range(len(trials))]
        label = _column(self._labels, count)
        return {
            "trial": np.repeat(np.asarray(trials, np.int32), count),
            "step": np.full(count * len(trials), step, dtype=np.int64),
            "split": np.full(count * len(trials), TRACKED_SPLIT),
            "example": np.tile(np.asarray(self.ids, np.int64), len(trials)),
            "prediction": np.concatenate([_column([p for p, _ in parts], count) for parts in found]),
            "label": np.concatenate([label] * len(trials)),
            "loss": np.concatenate([_column([loss for _, loss in parts], count) for parts in found]),
        }


def tracked_examples(workload: Workload, track: int | Sequence[int]) -> TrackedExamples | None:
    """Return the examples of the validation split to track; None where there are none.

    `track` is so many, evenly spaced over what is evaluated (fewer where there are fewer), or their ids; an id that is not evaluated is
    a `UsageError`. Of a named subset the ids are those of the whole split.
    """
    check_track(track)
    known = example_ids(workload.validation_data)
    if isinstance(track, int):
        count = min(track, len(known))
        places = [i * len(known) // count for i in range(count)]
    else:
        place_of = {known_id: place for place, known_id in enumerate(known)}
        missing = [wanted for wanted in track if wanted not in place_of]
        if missing:
            more = f" and {len(known) - 8} more" if len(known) > 8 else ""
            part = f"part of a larger split, with ids {', '.join(map(str, known[:8]))}{more}"
            shown = f"with ids 0 to {len(known) - 1}" if isinstance(known, range) else part
            raise UsageError(
                f"track holds example {missing[0]}, which is not evaluated: the validation split of {workload.name!r} has "
                f"{len(known)} example{'' if len(known) == 1 else 's'}, {shown}. Take ids from there, or a number of examples."
            )
        places = sorted({place_of[wanted] for wanted in track})
    return TrackedExamples(places, [known[place] for place in places]) if places else None


def check_track(track: object) -> None:
    """Raise `ConfigError` unless `track` is a number of examples or a sequence of their ids."""
    numbers = [track] if isinstance(track, int) else list(track) if isinstance(track, Sequence) else [None]
    if isinstance(track, str) or any(
        isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 0 for n in numbers
    ):
        raise ConfigError(
            f"track={track!r} must be a number of examples of the validation split, or a list of their ids, from 0; 0 tracks none."
        )


def _column(parts: Sequence[Tensor | None], count: int) -> NDArray[Any]:
    """Return one value an example: a number, or a flat list of them; NaN where nothing is known."""
    tensors = [part for part in parts if part is not None]
    if not tensors or len(tensors) < len(parts):
        return np.full(count, np.nan)
    real = [torch.view_as_real(t) if t.is_complex() else t for t in (t.detach().cpu() for t in tensors)]
    kind = torch.double if any(t.is_floating_point() for t in real) else torch.long
    if all(t.dim() == 1 for t in real):
        return torch.cat([t.to(kind) for t in real]).numpy()
    column = np.empty(count, dtype=object)  # batches may be padded to lengths of their own
    column[:] = [row for t in real for row in t.to(kind).flatten(1).numpy()]
    return column
