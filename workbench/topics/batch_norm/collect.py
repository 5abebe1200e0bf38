"""`collect_batch_norm`, `audit_batch_norm`: the facts for `diagnose_batch_norm`, of a study or of your own model; `measure_devices`: one batch on several devices."""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Subset

from workbench.config import TrainConfig
from workbench.errors import UsageError
from workbench.findings.audited import Audit
from workbench.instruments.examples.rows import read_rows
from workbench.record.roles import Role
from workbench.studies.session import Session
from workbench.topics.batch_norm.statistics import (
    BatchStatistics,
    Moments,
    State,
    batch_statistics,
    checkpoint_facts,
    copies_first,
    is_frozen,
    replica_facts,
    running_statistics,
    statistics_set,
    stored_replicas,
    tracking_layers,
    unwrapped,
)
from workbench.train.batches import eval_batches, train_batches
from workbench.train.checkpoint import load_model
from workbench.train.distributed.batch_norm import LayerStatistics
from workbench.train.distributed.merge_statistics import MergedStatistics, merge_statistics
from workbench.train.evaluation import evaluate
from workbench.train.forward import autocast
from workbench.train.rng import isolated_rng, seed_all
from workbench.train.stacked_weights import build_model
from workbench.workloads.base import first_of_batch
from workbench.workloads.batch_norm import batch_norm_layers
from workbench.workloads.subsets import at_most

MOST_EXAMPLES = 2000  # of the validation split, for the loss with either statistics
BATCHES = 20  # forward passes over training data by which statistics are estimated anew (rule of thumb)
LEAST_WARM = 0.05  # running statistics that are colder than this say nothing about what they average (rule of thumb)
Forward = Callable[[nn.Module, Any], Any]
Shards = Literal["dealt", "sorted"]
Floats = NDArray[np.float64]


def audit_batch_norm(
    model: nn.Module,
    batches: Iterable[Any] | None = None,
    *,
    forward: Forward | None = None,
    checkpoint: State | str | Path | None = None,
    replicas: Sequence[State] | Mapping[str, LayerStatistics] | None = None,
    examples: Sequence[float] | None = None,
    metrics: Sequence[float] | None = None,
) -> Audit:
    """Look at the batch norm of your own model, its checkpoint and its replicas; the model is left as it is.

    In a job of several processes:

        found = wb.batch_norm.gather_running_statistics(model)  # on every process
        diagnosis = wb.batch_norm.diagnose(wb.batch_norm.audit(model, loader, checkpoint="last.pt", replicas=found))

    Args:
        model: with the weights and running statistics to look at; `DistributedDataParallel` may be around it.
        batches: training data as one process sees them, such as your loader; None leaves out what needs a forward pass.
            Layers that are in evaluation mode while the model is in training mode count as frozen.
        forward: called with the model and a batch; the default is `model(batch[0])`, and `model(batch)` where that is a tensor.
        checkpoint: what was written: a state dict, or the path of one (`torch.save`, safetensors, or a checkpoint of `Trainer`).
        replicas: running statistics of every process, in the order of the ranks: what `gather_running_statistics` returns,
            or their state dicts; None takes those that a checkpoint of `Trainer` on many hosts has beside its own.
        examples: that stand for each replica, its weight in a merge; None is what `gather_running_statistics` was told, or as many each.
        metrics: validation loss, or another metric, that each replica has with its own statistics; None judges by their distance.

    Raises:
        UsageError: an argument is out of its range, `batches` yields nothing, or replicas and model, or metrics, do not fit each other.
        ConfigError: a layer does not know its channels yet.
        CheckpointError: the checkpoint cannot be read or holds no running statistics.

    Source: P6.3, P6.7, P6.8.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"model must be a torch.nn.Module, not {type(model).__name__}.")
    inner, seen, refused = unwrapped(model), None, list[int]()
    if batches is not None:
        with isolated_rng():  # a loader draws its order
            read = itertools.islice(batches, BATCHES)
            first = next(read, None)
            if first is None:
                raise UsageError("batches yields nothing: give a loader that can be read again, with a batch at least.")
            seen = batch_statistics(inner, itertools.chain([first], read), forward or _inputs, refused=refused)
    facts = _model_facts(inner, seen, refused=len(refused))
    facts["copies_first"] = copies_first(model)
    replicas = stored_replicas(checkpoint) if replicas is None else replicas
    if replicas is not None:
        facts["replicas"] = replica_facts(inner, replicas, examples, metrics)
    elif metrics is not None:
        raise UsageError(
            "metrics has a number for each replica: give replicas=wb.batch_norm.gather_running_statistics(model) as well."
        )
    if checkpoint is not None:
        facts["checkpoint"] = checkpoint_facts(inner, checkpoint)
    return Audit(facts={"batch_norm": facts}, workload=type(inner).__name__)


def _inputs(model: nn.Module, batch: Any) -> Any:
    return model(batch) if isinstance(batch, Tensor) else first_of_batch(model, batch)


def collect_batch_norm(session: Session, config: TrainConfig | None = None) -> dict[str, Any]:
    """Return JSON facts for `diagnose_batch_norm` from the last checkpoint of a run, the baseline's without a config."""
    workload, config = session.workload, config or session.config
    model, step = norm_model(session, config, last=True)
    if not batch_norm_layers(model):
        return {"layers": 0}
    known = {"asked": config.bn_stat_examples}
    if step is None:
        return _model_facts(model, None) | known | {"reason": "the run has no checkpoint"}
    refused: list[int] = []
    with isolated_rng():
        seed_all(config.shared_seed, config.per_host_seed)  # asked again, the same digits
        updates = train_batches(workload, config, session.device)  # as a device sees them: micro-batches
        batches = itertools.islice((batch for update in updates for batch, _ in update), BATCHES)
        seen = batch_statistics(model, batches, _forward_of(session), refused=refused)
    facts = _model_facts(model, seen, refused=len(refused)) | known | {"step": step}
    anew = {name: each.together for name, each in seen.items() if name in tracking_layers(model)}
    if anew:
        with isolated_rng():
            fresh = build_model(workload, config, session.device)
        loss = _loss_function(session)
        facts["loss"] = {"start": loss(fresh, {}), "stored": loss(model, {}), "anew": loss(model, anew)}
    return facts


def norm_model(session: Session, config: TrainConfig, *, last: bool = False) -> tuple[nn.Module, int | None]:
    """Return the model of a run's selected or last checkpoint and its step; untrained, and None, without batch norm or checkpoint."""
    with isolated_rng():
        model = build_model(session.workload, config, session.device)
    if not batch_norm_layers(model):
        return model, None
    trial = session.trial(config, stage=Role.BASELINE)
    kept = sorted((trial.folder / "checkpoints").glob("step-*"))
    best = trial.best()
    found = (int(kept[-1].name.partition("-")[2]), kept[-1]) if last and kept else (best.step, best.checkpoint)
    if found[1] is None:
        return model, None
    return load_model(model, found[1]).train(), int(found[0])  # as the trainer trains it


def _forward_of(session: Session) -> Forward:
    """Return the workload's forward pass in the session's precision."""

    def forward(model: nn.Module, batch: Any) -> Any:
        with autocast(session.device, session.config.precision):
            return session.workload.forward(model, batch)

    return forward


def _model_facts(model: nn.Module, seen: Mapping[str, BatchStatistics] | None, *, refused: int = 0) -> dict[str, Any]:
    """Return what a model's layers are, how warm their running statistics are, and how far from those of the training batches `seen`."""
    layers = batch_norm_layers(model)
    frozen = [name for name, layer in layers.items() if is_frozen(model, layer)]
    blind = seen is None or (refused > 0 and not seen)
    seen = seen or {}
    used = {n: layer for n, layer in layers.items() if n not in frozen and (blind or n in seen)}
    tracking = {name: layer for name, layer in used.items() if layer.running_mean is not None}
    asked = [int(n) for layer in used.values() if (n := getattr(layer, "stat_examples", None))]
    shifts = [_shift_of(name, layer, seen[name]) for name, layer in tracking.items() if name in seen]
    known = [row for row in shifts if row is not None]
    batches = min((len(set(seen[row["layer"]].batch)) for row in known), default=0)
    return {
        "layers": len(layers),
        "unused": len(layers) - len(used),
        "frozen_new": [name for name in frozen if layers[name].running_mean is not None and _is_new(layers[name])],
        "refused": refused,
        "asked": max(asked, default=None),
        "examples": min((_usual(each.examples) for each in seen.values()), default=None),
        "independent": min((n for each in seen.values() if (n := each.independent) is not None), default=None),
        "values": min((_usual(each.values) for each in seen.values()), default=None),
        "ema": [
            {"layer": name, "momentum": layer.momentum, "batches": running_statistics(layer)[2], "warm": _warm(layer)}
            for name, layer in tracking.items()
        ],
        "estimate": {"batches": batches, "layers": known} if known else None,
    }


def _is_new(layer: Any) -> bool:
    """Tell whether running statistics are those that a layer is made with."""
    mean, variance, _ = running_statistics(layer)
    return not mean.any() and bool((variance == 1).all())


def _usual(counts: Any) -> int:
    """Return the median, so that the last and incomplete batch of an epoch does not stand for all of them."""
    return int(np.quantile(counts, 0.5, method="higher"))


def _warm(layer: Any) -> float:
    """Return the share of what running statistics average that they hold; all of it where they came without a count."""
    batches = running_statistics(layer)[2]
    if batches == 0 and not _is_new(layer):
        return 1.0  # as in weights that were converted, or stored by an old release
    if layer.momentum is None:
        return float(batches > 0)
    return float(1 - (1 - layer.momentum) ** batches)


def _shift_of(name: str, layer: Any, seen: BatchStatistics) -> dict[str, Any] | None:
    """Return how far stored statistics lie from those of training data now, in standard deviations; None where they are cold."""
    mean, variance, batches = running_statistics(layer)
    warm = _warm(layer)
    if warm < LEAST_WARM or len(seen.mean) < 2:
        return None
    mean, variance = mean / warm, np.maximum((variance - (1 - warm)) / warm, 0.0)
    now_mean, now_variance = seen.together
    sd = np.sqrt(now_variance + layer.eps)
    shift = np.square((mean - now_mean) / sd) + np.square(0.5 * np.log((variance + layer.eps) / sd**2))
    one = np.square(seen.mean.std(0, ddof=1) / sd) + np.square(0.5 * seen.variance.std(0, ddof=1) / sd**2)
    memory = 1 / max(batches, 1) if layer.momentum is None else layer.momentum / (2 - layer.momentum)
    noise = one * (memory + 1 / len(seen.mean))
    return {"layer": name, "shift": math.sqrt(shift.mean()), "noise": math.sqrt(noise.mean())}


def _loss_function(session: Session) -> Callable[[nn.Module, Mapping[str, Moments]], float]:
    """Return the loss, on a random part of a large validation split, as a function of a model and its running statistics."""
    workload, config = session.workload, session.config
    workload = workload.replace(validation_data=at_most(workload.validation_data, MOST_EXAMPLES))
    settings: dict[str, Any] = {"batch_size": config.evaluation_batch, "precision": config.precision}

    def loss(model: nn.Module, statistics: Mapping[str, Moments]) -> float:
        with torch.no_grad(), statistics_set(model, statistics):
            found = evaluate(workload, model, device=session.device, **settings)
        return next(e.value for e in found if e.metric == "loss")

    return loss


def measure_devices(
    session: Session, model: nn.Module, *, batch_size: int, devices: Sequence[int], shards: Sequence[Shards]
) -> list[dict[str, Any]]:  # fmt: skip
    """Return JSON rows, one for each way to shard and number of devices: how far their statistics part, and what that costs.

    Args:
        batch_size: examples in a batch over all devices; numbers of devices that leave one fewer than 2 are left out.
        shards: "dealt" gives each device every k-th example of a random order, "sorted" a contiguous part of the examples by
            label, as where files are sorted and nobody shuffles across them.
    """
    data: Any = session.workload.train_data
    layers = tracking_layers(model)
    if not layers or not hasattr(data, "__getitem__"):
        return []
    rows: list[dict[str, Any]] = []
    with isolated_rng():
        for kind in shards:
            if (order := _ordered(data, kind)) is None:
                continue
            for count in (count for count in devices if batch_size // count >= 2):
                examples = batch_size // count
                steps = max(2, min(BATCHES, len(order) // (count * examples)))
                places = _places(order, kind, count, examples, steps)
                found = _split_batch(session, model, places, count=count, examples=examples)
                rows += [] if found is None else [{"shards": kind, "batches": steps, **found}]
    return rows


def _ordered(data: Any, kind: Shards) -> NDArray[np.int64] | None:
    """Return the order that shards are cut from; None where labels are asked for and there are none."""
    if kind == "dealt":
        return np.random.default_rng(0).permutation(len(data))
    labels = [rows.labels for rows in read_rows(data, memory_mb=64.0)]
    if not labels or any(part is None or part.dtype.kind not in "iub" for part in labels):
        return None
    return np.argsort(np.concatenate([part for part in labels if part is not None]), kind="stable")


def _split_batch(
    session: Session, model: nn.Module, places: Sequence[int], *, count: int, examples: int
) -> dict[str, Any] | None:
    layers = tracking_layers(model)
    dealt = session.workload.replace(train_data=Subset(session.workload.train_data, places))

    def seen(batch_size: int) -> dict[str, BatchStatistics]:
        read = eval_batches(dealt, "train", batch_size, session.device, session.config.precision)
        found = batch_statistics(model, (batch for batch, _ in read), _forward_of(session))
        return {name: each for name, each in found.items() if name in layers}

    parts, whole = seen(examples), seen(count * examples)
    parts = {name: each for name, each in parts.items() if len(set(each.batch % count)) == count and name in whole}
    if not parts:
        return None
    own: list[dict[str, Moments]] = [{} for _ in range(count)]
    merged: dict[str, MergedStatistics] = {}
    together: dict[str, Moments] = {}
    steps, missing = [0.0], list[float]()
    for name, each in parts.items():
        momentum, eps = layers[name].momentum, layers[name].eps
        for device in range(count):
            calls = BatchStatistics(*(column[each.batch % count == device] for column in each))
            own[device][name] = calls.average(momentum)
        merged[name] = found = merge_statistics([one[name][0] for one in own], [one[name][1] for one in own])
        together[name] = whole[name].average(momentum)
        steps.append(float((_step_spread(each, count) / np.maximum(together[name][1], eps)).mean()))
        missing.append(float((found.spread / np.maximum(found.variance, eps)).mean()))
    loss = _loss_function(session)
    return {
        "devices": count, "examples": examples, "apart": math.sqrt(max(missing)),
        "step_apart": math.sqrt(max(steps)), "missing": max(missing),
        "losses": {
            "own": [loss(model, each) for each in own],
            "average": loss(model, {name: (m.mean, m.average_variance) for name, m in merged.items()}),
            "merged": loss(model, {name: (m.mean, m.variance) for name, m in merged.items()}),
            "whole": loss(model, together),
        },
    }  # fmt: skip


def _step_spread(each: BatchStatistics, count: int) -> Floats:
    """Return the variance of the devices' means within a step, averaged over the steps, shape (channels,)."""
    means = {int(batch): each.mean[each.batch == batch].mean(0) for batch in set(each.batch)}
    steps = [[means[b] for b in range(at, at + count) if b in means] for at in range(0, max(means) + 1, count)]
    return np.asarray(np.mean([np.var(rows, axis=0) for rows in steps if rows], axis=0))


def _places(order: NDArray[np.int64], kind: Shards, count: int, examples: int, steps: int) -> list[int]:
    """Return which examples pass, batch after batch, and in each of them device after device."""
    dealt = kind == "dealt"
    shards = [order[device::count] if dealt else part for device, part in enumerate(np.array_split(order, count))]
    rng = np.random.default_rng(1)
    drawn = [np.resize(rng.permutation(shard), (steps, examples)) for shard in shards]
    return [int(i) for step in range(steps) for rows in drawn for i in rows[step]]
