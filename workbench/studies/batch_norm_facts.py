"""`collect_batch_norm` and `audit_batch_norm`: the facts for `diagnose_batch_norm`, from a study or from somebody's own model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from workbench.config import TrainConfig
from workbench.diagnostics.audited import Audit
from workbench.errors import UsageError
from workbench.hosts.batch_norm import LayerStatistics, SynchronisedBatchNorm
from workbench.studies.batch_norm_batches import (
    BatchStatistics,
    batch_statistics,
    running_statistics,
    statistics_set,
    tracking_layers,
)
from workbench.studies.batch_norm_states import State, checkpoint_facts, copies_first, replica_facts, stored_replicas
from workbench.studies.session import Session
from workbench.train.batch_norm import batch_norm_layers
from workbench.train.batches import train_batches
from workbench.train.checkpoint import load_model
from workbench.train.evaluation import evaluate
from workbench.train.forward import autocast
from workbench.train.lanes import build_model
from workbench.train.rng import isolated_rng
from workbench.workloads.base import Workload, first_of_batch
from workbench.workloads.evaluation_sample import draw_sample

__all__ = [
    "BatchNormAudit",
    "audit_batch_norm",
    "collect_batch_norm",
    "forward_of",
    "held_out",
    "model_facts",
    "selected_norm_model",
    "validation_loss",
]

MOST_EXAMPLES = 2000
"""Of the validation split, for the loss with either statistics."""
BATCHES = 20
"""Forward passes over training data by which statistics are estimated anew (rule of thumb)."""
LEAST_WARM = 0.05
"""Running statistics that are colder than this say nothing about what they average (rule of thumb)."""

Forward = Callable[[nn.Module, Any], Any]


class BatchNormAudit(Audit):
    """What `audit_batch_norm` found, for `diagnose_batch_norm`."""


def audit_batch_norm(
    model: nn.Module,
    batches: Iterable[Any] | None = None,
    *,
    forward: Forward = first_of_batch,
    checkpoint: State | str | Path | None = None,
    replicas: Sequence[State] | Mapping[str, LayerStatistics] | None = None,
    examples: Sequence[float] | None = None,
    max_batches: int = BATCHES,
) -> BatchNormAudit:
    """Look at the batch norm of your own model, its checkpoint and its replicas; the model is left as it is.

    In a job of several processes:

        found = wb.gather_running_statistics(model)  # on every process
        diagnosis = wb.diagnose_batch_norm(wb.audit_batch_norm(model, loader, checkpoint="last.pt", replicas=found))

    Args:
        model: with the weights and running statistics to look at; `DistributedDataParallel` may be around it.
        batches: training data as one process sees them, such as your loader; None leaves out what needs a forward pass.
        forward: called with the model and a batch; the default is `model(batch[0])`.
        checkpoint: what was written: a state dict, or the path of one (`torch.save`, safetensors, or a checkpoint of `Trainer`).
        replicas: running statistics of every process, in the order of the ranks: what `gather_running_statistics` returns,
            or their state dicts; None takes those that a checkpoint of `Trainer` on many hosts has beside its own.
        examples: that stand for each replica, its weight in a merge; None is what `gather_running_statistics` was told, or as many each.
        max_batches: forward passes at most.

    Raises:
        UsageError: `model` is no module, `max_batches` is below 1, or replicas and model do not fit each other.
        CheckpointError: the checkpoint cannot be read or holds no running statistics.

    Source: P6.3, P6.7, P6.8.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"model must be a torch.nn.Module, not {type(model).__name__}.")
    if isinstance(max_batches, bool) or not isinstance(max_batches, int) or max_batches < 1:
        raise UsageError(f"max_batches={max_batches!r} must be an integer of at least 1.")
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    with isolated_rng():  # a loader draws its order
        seen = {} if batches is None else batch_statistics(inner, itertools.islice(batches, max_batches), forward)
    facts = model_facts(inner, seen)
    facts["copies_first"] = copies_first(model)
    replicas = stored_replicas(checkpoint) if replicas is None else replicas
    if replicas is not None:
        facts["replicas"] = replica_facts(inner, replicas, examples)
    if checkpoint is not None:
        facts["checkpoint"] = checkpoint_facts(inner, checkpoint)
    return BatchNormAudit(facts={"batch_norm": facts}, workload=type(inner).__name__)


def collect_batch_norm(session: Session, config: TrainConfig | None = None) -> dict[str, Any]:
    """Return JSON facts for `diagnose_batch_norm` from a run's selected checkpoint; {"layers": 0} without batch norm.

    The price is 20 forward passes over training batches and two evaluations of at most 2,000 examples.

    Args:
        session: a study.
        config: of the run; None is the baseline. It is trained where it is not there yet.
    """
    workload, config = session.workload, config or session.config
    model, step = selected_norm_model(session, config)
    if not batch_norm_layers(model):
        return {"layers": 0}
    known = {"asked": config.bn_stat_examples}
    if step is None:
        return model_facts(model, {}) | known | {"reason": "the run has no selected checkpoint"}
    with isolated_rng():
        seen = batch_statistics(model, _training_batches(session, config, BATCHES), forward_of(session))
    facts = model_facts(model, seen) | known | {"step": step}
    if facts["estimate"] is not None:
        held = held_out(workload)
        anew = {name: each.together for name, each in seen.items()}
        losses = {"stored": validation_loss(held, model, session)}
        with statistics_set(model, anew):
            losses["anew"] = validation_loss(held, model, session)
        facts["estimate"]["loss"] = losses
    return facts


def selected_norm_model(session: Session, config: TrainConfig) -> tuple[nn.Module, int | None]:
    """Return the model of a run's selected checkpoint and its step; untrained, and None, without batch norm or checkpoint."""
    with isolated_rng():
        model = build_model(session.workload, config, session.device)
    if not batch_norm_layers(model):
        return model, None
    best = session.trial(config, stage="baseline").best()
    if best.checkpoint is None:
        return model, None
    return load_model(model, best.checkpoint), int(best.step)


def _training_batches(session: Session, config: TrainConfig, count: int) -> Iterator[Any]:
    """Yield the first batches of training as a device sees them: micro-batches."""
    updates = train_batches(session.workload, config, session.device)
    yield from itertools.islice((batch for update in updates for batch, _ in update), count)


def forward_of(session: Session) -> Forward:
    """Return the workload's forward pass in the session's precision."""

    def forward(model: nn.Module, batch: Any) -> Any:
        with autocast(session.device, session.config.precision):
            return session.workload.forward(model, batch)

    return forward


def model_facts(model: nn.Module, seen: Mapping[str, BatchStatistics]) -> dict[str, Any]:
    """Return what a model's layers are, how warm their running statistics are, and how far from those of the batches seen.

    Args:
        model: to look at.
        seen: what `batch_statistics` found on training data; {} leaves the comparison out.
    """
    layers = batch_norm_layers(model)
    asked = [int(n) for layer in layers.values() if (n := getattr(layer, "stat_examples", None))]
    facts: dict[str, Any] = {
        "layers": len(layers),
        "synchronised": sum(isinstance(m, (SynchronisedBatchNorm, nn.SyncBatchNorm)) for m in layers.values()),
        "asked": max(asked, default=None),
        "examples": min((int(each.examples.min()) for each in seen.values()), default=None),
        "values": min((int(each.values.min()) for each in seen.values()), default=None),
        "ema": [_ema(name, layer) for name, layer in tracking_layers(model).items()],
        "estimate": None,
    }
    rows = [_shift(name, layer, seen[name]) for name, layer in tracking_layers(model).items() if name in seen]
    known = [row for row in rows if row is not None]
    if known:
        facts["estimate"] = {"batches": min(len(each.mean) for each in seen.values()), "layers": known, "loss": None}
    return facts


def _ema(name: str, layer: nn.Module) -> dict[str, Any]:
    momentum: float | None = layer.momentum  # type: ignore[assignment]
    batches = running_statistics(layer)[2]  # type: ignore[arg-type]
    return {"layer": name, "momentum": momentum, "batches": batches, "warm": _warm(momentum, batches)}


def _warm(momentum: float | None, batches: int) -> float:
    if momentum is None:
        return float(batches > 0)
    return 1 - (1 - momentum) ** batches


def _shift(name: str, layer: Any, seen: BatchStatistics) -> dict[str, Any] | None:
    """Return how far stored statistics lie from those of training data now, in standard deviations; what is cold is left out."""
    mean, variance, batches = running_statistics(layer)
    warm = _warm(layer.momentum, batches)
    if warm < LEAST_WARM or len(seen.mean) < 2:
        return None
    mean, variance = mean / warm, np.maximum((variance - (1 - warm)) / warm, 0.0)
    now_mean, now_variance = seen.together
    sd = np.sqrt(now_variance + layer.eps)
    shift = np.square((mean - now_mean) / sd) + np.square(0.5 * np.log((variance + layer.eps) / sd**2))
    one = np.square(seen.mean.std(0, ddof=1) / sd) + np.square(0.5 * seen.variance.std(0, ddof=1) / sd**2)
    memory = 1 / max(batches, 1) if layer.momentum is None else layer.momentum / (2 - layer.momentum)
    noise = one * (memory + 1 / len(seen.mean))
    return {"layer": name, "shift": _rms(shift), "noise": _rms(noise)}


def _rms(squares: Any) -> float:
    return math.sqrt(float(np.mean(squares)))


def held_out(workload: Workload) -> Workload:
    """Return the workload with a random part of a large validation split."""
    data: Any = workload.validation_data
    if not hasattr(data, "__getitem__") or len(data) <= MOST_EXAMPLES:
        return workload
    return workload.replace(validation_data=draw_sample(data, MOST_EXAMPLES).data)


def validation_loss(workload: Workload, model: nn.Module, session: Session) -> float:
    """Return the loss of a model with the running statistics that it has now."""
    config = session.config
    found = evaluate(
        workload, model, batch_size=config.evaluation_batch, device=session.device, precision=config.precision
    )
    return next(e.value for e in found if e.metric == "loss")
