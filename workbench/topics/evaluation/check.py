"""`check_evaluation`: calls somebody's own evaluation function where its faults show, and names them (P2.11)."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from workbench.errors import DataError, UnknownNameError, UsageError, WorkloadError, nearest
from workbench.findings.diagnosis import Diagnosis
from workbench.topics.evaluation.diagnose import TOLERANCE, diagnose_evaluation_cases
from workbench.topics.evaluation.watch import ChosenItems, ExampleNames, WatchedCall
from workbench.train.coupled_losses import Dependence, Items, batch_dependence, first_items
from workbench.train.evaluation import eval_mode, evaluate, values_each
from workbench.train.lane_stack import build_model
from workbench.train.rng import isolated_rng
from workbench.workloads.base import Workload
from workbench.workloads.items import in_its_own_order

__all__ = ["check_evaluation", "collect_cases", "collect_own_evaluation"]

Evaluate = Callable[..., Any]
PAIRED = 16
"""Examples that are looked at two by two (rule of thumb)."""


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

    The function is called on a set of examples whose values fall from the first to the last, so that a short last batch, a
    repeated or a missing example moves the result. What each fault predicts is computed from the values of the examples, and
    the prediction that comes true names it: mean of batch means, counted padding, repeated or dropped examples.

    Args:
        evaluate: `(model, data, batch_size) -> number`, or a mapping that has `metric`. `data` is a map-style dataset with the
            items of the split. With `hosts` it is called with `hosts=` as well, and plays all hosts itself.
        workload: says what the metric of an example is, and its weight.
        model: what to evaluate, on the CPU; None builds one.
        metric: "loss" or a name of the workload's metrics; a loss shows more than an accuracy, which has two values.
        split: where the examples are from.
        examples: at most so many, and fewer where otherwise no batch of some size would be short.
        batch_sizes: one after the other.
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
        evaluate,
        workload,
        model=model,
        metric=metric,
        split=split,
        examples=examples,
        batch_sizes=batch_sizes,
        hosts=hosts,
    )
    return diagnose_evaluation_cases(facts, workload=workload.name, tolerance=tolerance)


def collect_own_evaluation(workload: Workload, device: torch.device, *, examples: int = 32) -> dict[str, Any]:
    """Return the facts of this package's own evaluation of a workload: do its values depend on the batch they are in?

    Args:
        workload: to look at.
        device: where.
        examples: of the validation split, at most; the price is a dozen small forward passes.

    Raises:
        WorkbenchError: that cannot be seen: the split cannot be indexed, or a loss is not finite.
    """

    def own(model: nn.Module, data: Dataset[Any], batch_size: int) -> float:
        part = workload.replace(validation_data=data)
        return evaluate(part, model, batch_size=batch_size, precision=workload.config.precision)[0].value

    with isolated_rng():
        model = build_model(workload, workload.config, device)
    sizes = (max(2, examples // 3), examples)
    found = collect_cases(own, workload, model=model, examples=examples, batch_sizes=sizes)
    if max(found["values"]) > min(found["values"]):
        return found
    with isolated_rng():  # a last layer that begins at zero gives every example one value: any other weights will do
        torch.manual_seed(0)
        for p in model.parameters():
            if p.is_floating_point():
                p.data += 0.1 * torch.randn_like(p)
    return collect_cases(own, workload, model=model, examples=examples, batch_sizes=sizes)


def collect_cases(
    evaluate: Evaluate,
    workload: Workload,
    *,
    model: nn.Module | None = None,
    metric: str = "loss",
    split: str = "validation",
    examples: int = 103,
    batch_sizes: Sequence[int] = (1, 10, 103, 128),
    hosts: Sequence[int] = (),
) -> dict[str, Any]:
    """Return what an evaluation function gave in each case, and which examples the model saw in which batches, as JSON values.

    The arguments and errors are those of `check_evaluation`.
    """
    _check_arguments(evaluate, workload, metric, examples=examples, batch_sizes=batch_sizes, hosts=hosts)
    with isolated_rng():
        model = model or build_model(workload, workload.config, torch.device("cpu"))
        with eval_mode(model):
            chosen = _examples(workload, model, metric, split, count=examples, batch_sizes=batch_sizes)
            data = chosen.items
            names = ExampleNames(workload, model, data)
            cases = []
            for size in batch_sizes:
                for count in hosts or (1,):
                    arguments = {"batch_size": size} | ({"hosts": count} if hosts else {})
                    case = _call(evaluate, model, data, names, metric=metric, arguments=arguments)
                    cases.append({"batch_size": size, "hosts": count, **case})
    _check_metric([case["observed"] for case in cases], chosen, metric)
    return {
        "metric": metric,
        "examples": chosen.places,
        "values": chosen.values.tolist(),
        "weights": chosen.weights.tolist(),
        "batch_dependence": chosen.dependence,
        "random": chosen.probe.random,
        "coupled": chosen.probe.coupled,
        "short_digits": workload.config.precision == "bfloat16" or next(model.parameters()).device.type != "cpu",
        "observed_batches": any(case["batches"] or case["error"] for case in cases),
        "cases": cases,
    }


class _Chosen(NamedTuple):
    """The examples that the function is called on.

    Attributes:
        places: in the split.
        items: themselves.
        values: of the metric, falling, shape (examples,).
        weights: of them, same shape.
        dependence: how far the value of an example differs between batch sizes.
        probe: what a few of them say of randomness and of the other examples of the batch.
        others: mean of every other metric of the workload.
    """

    places: list[int]
    items: ChosenItems
    values: np.ndarray
    weights: np.ndarray
    dependence: float
    probe: Dependence
    others: dict[str, float]


def _check_metric(observed: Sequence[float | None], chosen: _Chosen, metric: str) -> None:
    """Raise where every value that came back is another metric of the workload, exactly."""
    found = np.array([value for value in observed if value is not None])
    own = float(np.average(chosen.values, weights=chosen.weights)) if found.size else 0.0
    for name, value in chosen.others.items():
        meant = found.size and np.allclose(found, value, rtol=1e-6, atol=1e-9)
        if meant and not np.isclose(own, value, rtol=1e-4, atol=1e-6):
            raise UsageError(
                f"evaluate returned {found[0]:.6g} each time: that is the workload's {name}, and its {metric} is {own:.6g}. "
                f"Say which metric it returns with metric={name!r}."
            )


def _call(
    evaluate: Evaluate,
    model: nn.Module,
    data: ChosenItems,
    names: ExampleNames,
    *,
    metric: str,
    arguments: dict[str, int],
) -> dict[str, Any]:
    """Return the number that came back, what the model saw, whether that is read off its order, and the error where no batch was full."""
    watch = WatchedCall(model, lambda: evaluate(model, data, **arguments))
    batches, by_order = names.batches(watch.rows)
    found: dict[str, Any] = {"observed": None, "batches": batches, "by_order": by_order, "error": None}
    where = f"evaluate(model, data of {len(data)} examples, {', '.join(f'{k}={v}' for k, v in arguments.items())})"
    if watch.error is not None:
        if not batches and max(arguments["batch_size"] * arguments.get("hosts", 1), 0) > len(data):
            return found | {"error": f"it raised {type(watch.error).__name__}, for no batch was full"}
        raise WorkloadError(
            f"{where} raised {type(watch.error).__name__}: {str(watch.error).rstrip('.')}. It is called with a model, a dataset "
            "and batch_size=..., and returns one number."
        ) from watch.error
    value = _number(watch.result, metric, where, batches=len(batches), examples=len(data))
    if not math.isfinite(value):
        if batches or arguments["batch_size"] * arguments.get("hosts", 1) <= len(data):
            raise WorkloadError(
                f"{where} returned {value}, though the {metric} of each example is finite. Look for a division by zero, and for "
                "a value that is computed from an empty or a padded batch."
            )
        return found | {"error": f"it returned {value}, for no batch was full"}
    return found | {"observed": value}


def _number(result: Any, metric: str, where: str, *, batches: int, examples: int) -> float:
    """Return the one number in a result."""
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
    what = (
        "one value per batch"
        if array.size == batches
        else "one value per example"
        if array.size == examples
        else "several values"
    )
    raise WorkloadError(
        f"{where} returned {what} (shape {array.shape}), but must return one number: the sum of weight times value over all "
        "examples, divided once by the sum of the weights."
    )


def _examples(
    workload: Workload, model: nn.Module, metric: str, split: str, *, count: int, batch_sizes: Sequence[int]
) -> _Chosen:
    """Return examples whose values fall."""
    device = next(model.parameters()).device
    precision = workload.config.precision
    data = workload.data(split)
    if not len(data):
        raise DataError(
            f"workload {workload.name!r}: the {split} split has 0 examples, so there is nothing to evaluate."
        )
    if in_its_own_order(data):
        data = first_items(workload, split, 10 * count)
    if len(data) > 10 * count:  # a sample is enough to choose from
        places = np.linspace(0, len(data) - 1, 10 * count).astype(int).tolist()
    else:
        places = list(range(len(data)))

    items = ChosenItems(data, places)  # read once: a random augmentation is no matter of the batch

    def at(batch_size: int, chosen: ChosenItems = items) -> tuple[dict[str, np.ndarray], np.ndarray]:
        part = workload.replace(**{f"{split}_data": chosen})
        ((columns, weights),) = values_each(
            part, [model], split=split, batch_size=batch_size, device=device, precision=precision
        )
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
    third, probe = values.copy(), Dependence()
    if len(few):  # a third at a time shows what many neighbours do, two at a time how far a row is padded
        third = at(max(1, len(places) // 3))[0][metric]
        probe = batch_dependence(workload, model, Items([items[i] for i in few]), metric=metric, split=split)
    dependence = max(float(np.abs(third - values)[weights > 0].max(initial=0.0)), probe.batch)
    counted = np.flatnonzero(weights > 0)
    order = counted[np.argsort(-values[counted], kind="stable")]
    kept = order[np.linspace(0, len(order) - 1, _with_short_batch(min(count, len(order)), batch_sizes)).astype(int)]
    others = {
        name: float(np.average(column[kept], weights=weights[kept]))
        for name, column in columns.items()
        if name != metric
    }
    chosen = ChosenItems(items, kept.tolist())
    return _Chosen([places[i] for i in kept], chosen, values[kept], weights[kept], dependence, probe, others)


def _with_short_batch(count: int, batch_sizes: Sequence[int]) -> int:
    """Return the largest number of examples up to `count` that leaves each batch size but 1 a short batch, if there is one."""
    fits = (n for n in range(count, count // 2, -1) if not any(n % size == 0 for size in batch_sizes if 1 < size < n))
    return next(fits, count)


def _check_arguments(
    evaluate: Any, workload: Any, metric: str, *, examples: Any, batch_sizes: Sequence[Any], hosts: Sequence[Any]
) -> None:
    if not callable(evaluate):
        raise UsageError(
            f"evaluate must be a function (model, data, batch_size) -> number, not {type(evaluate).__name__}."
        )
    if not isinstance(workload, Workload):
        raise UsageError(
            f"workload must be a Workload, not {type(workload).__name__}: it says what the metric of an example is."
        )
    if metric not in ("loss", *workload.metrics):
        raise UnknownNameError(
            f"workload {workload.name!r} has no metric {metric!r}.{nearest(metric, ['loss', *workload.metrics])}"
        )
    numbers = {"examples": [examples], "batch_sizes": batch_sizes, "hosts": hosts}
    for name, given in numbers.items():
        for number in given:
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise UsageError(f"{name}={given!r} must hold integers of at least 1.")
    if not batch_sizes:
        raise UsageError("batch_sizes=() must hold at least one; leave it out for 1, 10, 103 and 128.")
    if hosts and "hosts" not in inspect.signature(evaluate).parameters:
        raise UsageError(f"hosts={tuple(hosts)!r} asks to play hosts, but evaluate takes no argument named hosts.")
