"""`check_evaluation`: calls somebody's own evaluation function where its faults show, and names them (P2.11)."""

from __future__ import annotations

import inspect
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset, TensorDataset, default_collate

from workbench.checks import check_integer
from workbench.errors import DataError, UnknownNameError, UsageError, WorkloadError, in_one_line, nearest
from workbench.findings.diagnosis import Diagnosis
from workbench.topics.evaluation.diagnose import TOLERANCE, diagnose_evaluation_cases
from workbench.train.batches import to_device
from workbench.train.evaluation import eval_mode, evaluate, values_each
from workbench.train.example_values import ONE_A_BATCH, Dependence, batch_dependence, first_items, one_loss_a_batch
from workbench.train.rng import isolated_rng
from workbench.train.stacked_weights import build_model
from workbench.workloads.base import Workload
from workbench.workloads.items import in_its_own_order

Evaluate = Callable[..., Any]
PAIRED = 16  # examples that are looked at two by two (rule of thumb)
ITEM = 4  # bytes of a value in a row: rows are compared as float32


def check_evaluation(
    evaluate: Evaluate,
    workload: Workload,
    *,
    model: nn.Module | None = None,
    metric: str = "loss",
    split: str = "validation",
    examples: int = 103,
    batch_sizes: Sequence[int] = (1, 10, 103, 128),
    hosts: Sequence[int] = (),
    tolerance: float = TOLERANCE,
) -> Diagnosis:
    """Tell whether an evaluation function gives each example its weight and counts each once, and if not, which fault it has.

    The function is called on examples whose values fall from the first to the last, so that a short last batch, a repeated or a missing
    example moves the result. The fault whose prediction comes true is named: mean of batch means, counted padding, repeated or dropped examples.

    Args:
        evaluate: `(model, data, batch_size) -> number`, or a mapping that has `metric`. `data` is a map-style dataset with the
            items of the split. With `hosts` it is called with `hosts=` as well, and plays all hosts itself.
        workload: says what the metric of an example is, and its weight.
        model: what to evaluate, on the CPU; None builds one.
        metric: "loss" or a name of the workload's metrics; a loss shows more than an accuracy, which has two values.
        examples: at most so many, and fewer where otherwise no batch of some size would be short.
        hosts: numbers of hosts to play.
        tolerance: two values are the same within this share of the spread of the examples' values (rule of thumb).

    Returns:
        `evaluation.weighting` and `evaluation.coverage`; the cases, with the bias found and the bias predicted, are evidence.

    Raises:
        WorkloadError: `evaluate` raised, or returned NaN, a value per batch or per example, or no number; or the metric of an
            example is not finite.
        DataError: the split is empty.
    """
    facts = collect_cases(
        evaluate, workload, model=model, metric=metric, split=split, examples=examples, batch_sizes=batch_sizes, hosts=hosts
    )  # fmt: skip
    return diagnose_evaluation_cases(facts, workload=workload.name, tolerance=tolerance)


def collect_own_evaluation(workload: Workload, device: torch.device, *, examples: int = 32) -> dict[str, Any]:
    """Return the facts of this package's own evaluation of a workload: do its values depend on the batch they are in?"""
    if one_loss_a_batch(workload, workload.config, device):
        return {"unseen": ONE_A_BATCH, "coupled": True}

    def own(model: nn.Module, data: Dataset[Any], batch_size: int) -> float:
        part = workload.replace(validation_data=data)
        return evaluate(part, model, batch_size=batch_size, precision=workload.config.precision)[0].value

    with isolated_rng():
        model = build_model(workload, workload.config, device)
    how: dict[str, Any] = {"model": model, "examples": examples, "batch_sizes": (max(2, examples // 3), examples)}
    found = collect_cases(own, workload, **how)
    if max(found["values"]) > min(found["values"]):
        return found
    with isolated_rng():  # a last layer that begins at zero gives every example one value: any other weights will do
        torch.manual_seed(0)
        for p in model.parameters():
            if p.is_floating_point():
                p.data += 0.1 * torch.randn_like(p)
    return collect_cases(own, workload, **how)


def collect_cases(
    evaluate: Evaluate, workload: Workload, *, model: nn.Module | None, examples: int, batch_sizes: Sequence[int], metric: str = "loss",
    split: str = "validation", hosts: Sequence[int] = (),
) -> dict[str, Any]:  # fmt: skip
    """Return what an evaluation function gave in each case, and which examples the model saw in which batches, as JSON values."""
    _check_arguments(evaluate, workload, metric, {"examples": [examples], "batch_sizes": batch_sizes, "hosts": hosts})
    if metric == "loss" and one_loss_a_batch(workload, workload.config, torch.device("cpu")):
        raise UsageError(
            f'workload {workload.name!r}: {ONE_A_BATCH}. Choose a metric with metric=..., or give the loss reduction="none".'
        )
    with isolated_rng():
        model = model or build_model(workload, workload.config, torch.device("cpu"))
        with eval_mode(model):
            items, facts, others = _falling_examples(
                workload, model, metric, split, count=examples, batch_sizes=batch_sizes
            )
            names = _ExampleNames(workload, model, items)
            cases = []
            for size in batch_sizes:
                for count in hosts or (1,):
                    arguments = {"batch_size": size} | ({"hosts": count} if hosts else {})
                    case = _watched_case(evaluate, model, items, names, metric=metric, arguments=arguments)
                    cases.append({"batch_size": size, "hosts": count, **case})
    found = [case["observed"] for case in cases if case["observed"] is not None]
    own = float(np.average(facts["values"], weights=facts["weights"])) if found else 0.0
    for name, value in others.items():
        meant = found and np.allclose(found, value, rtol=1e-6, atol=1e-9)
        if meant and not np.isclose(own, value, rtol=1e-4, atol=1e-6):
            raise UsageError(
                f"evaluate returned {found[0]:.6g} each time: that is the workload's {name}, and its {metric} is {own:.6g}. "
                f"Say which metric it returns with metric={name!r}."
            )
    return facts | {
        "short_digits": workload.config.precision in ("bfloat16", "float16") or next(model.parameters()).device.type != "cpu",
        "observed_batches": any(case["batches"] or case["error"] for case in cases), "cases": cases,
    }  # fmt: skip


def _check_arguments(evaluate: Any, workload: Any, metric: str, numbers: dict[str, Sequence[Any]]) -> None:
    if not callable(evaluate):
        raise UsageError(
            f"evaluate must be a function (model, data, batch_size) -> number, not {type(evaluate).__name__}."
        )
    if not isinstance(workload, Workload):
        raise UsageError(
            f"workload must be a Workload, not {type(workload).__name__}: it says what the metric of an example is."
        )
    if metric not in (known := ["loss", *workload.metrics]):
        raise UnknownNameError(f"workload {workload.name!r} has no metric {metric!r}.{nearest(metric, known)}")
    for name, given in numbers.items():
        for place, number in enumerate(given):
            check_integer(f"{name}[{place}]", number, error=UsageError)
    if not numbers["batch_sizes"]:
        raise UsageError("batch_sizes=() must hold at least one; leave it out for 1, 10, 103 and 128.")
    if numbers["hosts"] and "hosts" not in inspect.signature(evaluate).parameters:
        raise UsageError(
            f"hosts={tuple(numbers['hosts'])!r} asks to play hosts, but evaluate takes no argument named hosts."
        )


class _ChosenItems(Dataset[Any]):
    """Some items of a dataset, read once; a `TensorDataset` keeps its `tensors`."""

    def __init__(self, data: Any, indices: Sequence[int]) -> None:
        self._items = [data[i] for i in indices]
        if isinstance(data, (TensorDataset, _ChosenItems)) and hasattr(data, "tensors"):
            self.tensors: tuple[Tensor, ...] = tuple(t[torch.tensor(indices)] for t in data.tensors)

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Any:
        return self._items[index]


def _falling_examples(
    workload: Workload, model: nn.Module, metric: str, split: str, *, count: int, batch_sizes: Sequence[int]
) -> tuple[_ChosenItems, dict[str, Any], dict[str, float]]:
    """Return the examples that the function is called on, whose values fall; facts about them; the mean of every other metric."""
    data = workload.data(split)
    if not len(data):
        raise DataError(f"workload {workload.name!r}: the {split} split has 0 examples: there is nothing to evaluate.")
    if in_its_own_order(data):
        data = first_items(workload, split, 10 * count)
    places = list(range(len(data)))
    if len(data) > 10 * count:  # a sample is enough to choose from
        places = np.linspace(0, len(data) - 1, 10 * count).astype(int).tolist()
    items = _ChosenItems(data, places)  # read once: a random augmentation is no matter of the batch

    def at(batch_size: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
        ((columns, weights),) = values_each(
            workload.replace(**{f"{split}_data": items}), [model], split=split, batch_size=batch_size,
            device=next(model.parameters()).device, precision=workload.config.precision,
        )  # fmt: skip
        return {name: column.numpy() for name, column in columns.items()}, weights.numpy()

    columns, weights = at(len(places))
    values = columns[metric]
    bad = np.flatnonzero(~np.isfinite(values) & (weights > 0))
    if bad.size:
        raise WorkloadError(
            f"workload {workload.name!r}: the {metric} of example {places[bad[0]]} of the {split} split is {values[bad[0]]}. Repair the "
            "metric, or give the example the weight 0."
        )
    few = np.linspace(0, len(places) - 1, min(PAIRED, len(places) // 2 * 2)).astype(int)
    third, probe = values, Dependence()
    if len(few):  # a third at a time shows what many neighbours do, two at a time how far a row is padded
        third = at(max(1, len(places) // 3))[0][metric]
        probe = batch_dependence(workload, model, [items[i] for i in few], metric=metric, split=split)
    dependence = max(float(np.abs(third - values)[weights > 0].max(initial=0.0)), probe.batch)
    counted = np.flatnonzero(weights > 0)
    order = counted[np.argsort(-values[counted], kind="stable")]
    most = min(count, len(order))  # fewer, where that leaves each batch size but 1 a short batch
    fits = (n for n in range(most, most // 2, -1) if not any(n % size == 0 for size in batch_sizes if 1 < size < n))
    kept = order[np.linspace(0, len(order) - 1, next(fits, most)).astype(int)]
    others = {
        name: float(np.average(column[kept], weights=weights[kept])) for name, column in columns.items() if name != metric
    }  # fmt: skip
    facts = {
        "metric": metric, "examples": [places[i] for i in kept], "values": values[kept].tolist(), "weights": weights[kept].tolist(),
        "batch_dependence": dependence, "random": probe.random, "coupled": probe.coupled,
    }  # fmt: skip
    return _ChosenItems(items, kept.tolist()), facts, others


def _watched_case(
    evaluate: Evaluate, model: nn.Module, data: _ChosenItems, names: _ExampleNames, *, metric: str, arguments: dict[str, int]
) -> dict[str, Any]:  # fmt: skip
    result, rows, error = _watched(model, lambda: evaluate(model, data, **arguments))
    batches, by_order = names.batches(rows)
    found: dict[str, Any] = {"observed": None, "batches": batches, "by_order": by_order, "error": None}
    where = f"evaluate(model, data of {len(data)} examples, {', '.join(f'{k}={v}' for k, v in arguments.items())})"
    value = math.nan if error else _returned_number(result, metric, where, batches=len(batches), examples=len(data))
    if math.isfinite(value):
        return found | {"observed": value}
    if not batches and arguments["batch_size"] * arguments.get("hosts", 1) > len(data):
        what = f"returned {value}" if error is None else f"raised {type(error).__name__}"
        return found | {"error": f"it {what}, for no batch was full"}
    if error is not None:
        raise WorkloadError(
            f"{where} raised {in_one_line(error)}. It is called with a model, a dataset and batch_size=..., and returns one number."
        ) from error
    raise WorkloadError(
        f"{where} returned {value}, though the {metric} of each example is finite. Look for a division by zero, and for "
        "a value that is computed from an empty or a padded batch."
    )


def _returned_number(result: Any, metric: str, where: str, *, batches: int, examples: int) -> float:
    if result is None:
        raise WorkloadError(f"{where} returned nothing, but must return one number: is its return statement missing?")
    if isinstance(result, dict):
        if metric not in result:
            raise WorkloadError(f"{where} returned a mapping without {metric!r}.{nearest(metric, map(str, result))}")
        result = result[metric]
    try:
        array = np.asarray(result.detach().cpu() if isinstance(result, Tensor) else result, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise WorkloadError(
            f"{where} returned {type(result).__name__} ({str(result)[:60]}), but must return one number, or a mapping with {metric!r}."
        ) from error
    if array.size == 1:
        return float(array.reshape(()))
    what = {examples: "one value per example"} | {batches: "one value per batch"}
    raise WorkloadError(
        f"{where} returned {what.get(array.size, 'several values')} (shape {array.shape}), but must return one number: the sum of "
        "weight times value over all examples, divided once by the sum of the weights."
    )


class _ExampleNames:
    """Recognises examples by what the model is given: rows of its first tensor, padded at either end or not."""

    def __init__(self, workload: Workload, model: nn.Module, data: _ChosenItems) -> None:
        self._places: dict[bytes, list[int]] = {}
        self._count = len(data)
        collate = workload.collate or default_collate
        precision = {"float64": torch.float64, "float32": torch.float32}.get(workload.config.precision or "")
        device = next(model.parameters()).device
        for place in range(len(data)):
            batch = collate([data[place]])
            for row in _watched(model, lambda: workload.forward(model, to_device(batch, device, precision)))[1]:  # noqa: B023
                self._places.setdefault(row[0], []).append(place)
        self._lengths = sorted({len(row) for row in self._places}, reverse=True)

    def batches(self, rows: Sequence[Sequence[bytes]]) -> tuple[list[list[int]], bool]:
        """Return the examples of each batch, -1 for a row that is none; equal examples are told apart by their order."""
        known = [[self._known(row) for row in batch] for batch in rows]
        if rows and not any(places for batch in known for places in batch):
            number = itertools.count()
            return [[place if (place := next(number)) < self._count else -1 for _ in batch] for batch in rows], True
        met: Counter[int] = Counter()
        found: list[list[int]] = []
        for batch in known:
            found.append([])
            for places in batch:
                found[-1].append(places[met[places[0]] % len(places)] if places else -1)
                met.update(places[:1])
        return found, False

    def _known(self, row: bytes) -> list[int]:
        """Return the examples that look like this row, or begin or end it where the rest is one value: padding of a batch."""
        if row in self._places:
            return self._places[row]
        for length in (length for length in self._lengths if length < len(row)):
            rest = len(row) - length
            for part, pad in ((row[:length], row[length:]), (row[rest:], row[:rest])):
                if part in self._places and pad == pad[:ITEM] * (rest // ITEM):
                    return self._places[part]
        return []


def _watched(model: nn.Module, function: Callable[[], Any]) -> tuple[Any, list[list[bytes]], Exception | None]:
    """Return what a function returns, the rows of the first tensor of each call of the model, and what it raised."""
    rows: list[list[bytes]] = []

    def note(_: nn.Module, args: Any, kwargs: Any) -> None:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.dim()]
        if tensors:
            first = tensors[0].detach().cpu()
            first = torch.view_as_real(first) if first.is_complex() else first
            table = first.float().flatten(1) if first.dim() > 1 else first.float()[:, None]
            rows.append([row.tobytes() for row in table.numpy()])

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        with torch.no_grad():
            return function(), rows, None
    except Exception as error:
        return None, rows, error
    finally:
        handle.remove()
