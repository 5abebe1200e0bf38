"""The running statistics that somebody's checkpoint and the processes of a job hold, as facts for `diagnose_batch_norm` (P6.8)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from workbench.errors import CheckpointError, UsageError
from workbench.topics.batch_norm.batches import is_frozen, tracking_layers
from workbench.train.batch_norm import plain_name
from workbench.train.checkpoint import load_checkpoint
from workbench.train.distributed.batch_norm import SynchronisedBatchNorm
from workbench.train.distributed.running_statistics import LayerStatistics

__all__ = ["State", "checkpoint_facts", "copies_first", "replica_facts", "stored_replicas", "unwrapped"]

State = Mapping[str, Any]


def copies_first(model: nn.Module) -> bool:
    """Tell whether the first process's running statistics are copied over all others' at every forward pass."""
    model = getattr(model, "_orig_mod", model)
    if not isinstance(model, DistributedDataParallel) or not model.broadcast_buffers:
        return False
    kinds = (SynchronisedBatchNorm, nn.SyncBatchNorm)
    inner = unwrapped(model)
    apart = any(
        not isinstance(layer, kinds) and not is_frozen(inner, layer) for layer in tracking_layers(inner).values()
    )
    return apart and model.process_group.size() > 1


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model within DistributedDataParallel and torch.compile, in whichever order they are around it."""
    while True:
        inner = model.module if isinstance(model, DistributedDataParallel) else getattr(model, "_orig_mod", model)
        if inner is model:
            return model
        model = inner


def replica_facts(
    model: nn.Module,
    replicas: Sequence[State] | Mapping[str, LayerStatistics],
    examples: Sequence[float] | None,
    metrics: Sequence[float] | None = None,
) -> dict[str, Any]:
    """Return the running statistics of every process: count, examples, metrics, and layers -> mean and variance, (processes, channels).

    Raises:
        UsageError: they do not fit the model.
    """
    names = [plain_name(name) for name in tracking_layers(model)]
    layers: dict[str, Any] = {}
    weights = examples
    if isinstance(replicas, Mapping):
        for name in names:
            if name not in replicas:
                raise UsageError(
                    f"replicas has no layer {name!r}: give what gather_running_statistics(model) returned for this model."
                )
            layers[name] = {"mean": replicas[name].mean.tolist(), "variance": replicas[name].variance.tolist()}
            weights = replicas[name].examples.tolist() if weights is None else weights
    else:
        states = [_plain(state) for state in replicas]
        for number, state in enumerate(states):
            missing = [name for name in names if f"{name}.running_mean".lstrip(".") not in state]
            if missing:
                raise UsageError(
                    f"replicas[{number}] has no running statistics of {missing[0]!r}: give the state dict of every process."
                )
        for name in names:
            layers[name] = {
                kind: [_values(state, name, kind).tolist() for state in states] for kind in ("mean", "variance")
            }
    count = len(next(iter(layers.values()))["mean"]) if layers else 0
    given: dict[str, Any] = {"examples": weights, "metrics": metrics}
    for name, numbers in given.items():
        if numbers is not None and count and len(numbers) != count:
            raise UsageError(f"{name} has {len(numbers)} numbers for {count} replicas.")
    lists = {name: None if numbers is None else [float(n) for n in numbers] for name, numbers in given.items()}
    return {"count": count, **lists, "layers": layers}


def checkpoint_facts(model: nn.Module, checkpoint: State | str | Path) -> dict[str, Any]:
    """Return the running statistics that were written: layers -> mean and variance, (channels,).

    Raises:
        CheckpointError: the file cannot be read, or holds none.
    """
    state = _plain(_read(checkpoint) if isinstance(checkpoint, (str, Path)) else checkpoint)
    found = {
        name: {kind: _values(state, name, kind).tolist() for kind in ("mean", "variance")}
        for name in map(plain_name, tracking_layers(model))
        if f"{name}.running_mean".lstrip(".") in state
    }
    if tracking_layers(model) and not found:
        raise CheckpointError(
            f"the checkpoint holds no running statistics of {type(model).__name__}: give its state dict, or a file of one."
        )
    return found


def stored_replicas(checkpoint: object) -> list[dict[str, Tensor]] | None:
    """Return the running statistics of every host that trained a checkpoint of this package; None of others, or of one host."""
    if not isinstance(checkpoint, (str, Path)) or not (Path(checkpoint) / "trainer.safetensors").is_file():
        return None
    hosts: dict[int, dict[str, Tensor]] = {}
    for name, tensor in load_checkpoint(checkpoint).trainer.items():
        found = re.fullmatch(r"(?:host(\d+)/)?statistics/(.+)", name)
        if found:
            hosts.setdefault(int(found[1] or 0), {})[found[2]] = tensor
    return [hosts[rank] for rank in sorted(hosts)] or None


def _read(path: str | Path) -> State:
    path = Path(path)
    try:
        if path.is_dir():  # one of this package's own
            path = path / "model.safetensors"
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        loaded: State = torch.load(path, map_location="cpu", weights_only=True)
        return loaded
    except Exception as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {type(error).__name__}: {error}") from error


def _plain(state: Any, depth: int = 2) -> dict[str, Any]:
    """Return the state dict in what was given, without the prefixes of wrappers."""
    if isinstance(state, Mapping):
        if any(str(key).endswith("running_mean") for key in state):
            return {plain_name(str(key)): value for key, value in state.items()}
        for value in state.values() if depth else ():
            if found := _plain(value, depth - 1):
                return found
    return {}


def _values(state: State, name: str, kind: str) -> Any:
    key = f"{name}.running_{'mean' if kind == 'mean' else 'var'}".lstrip(".")
    value = state[key]
    return value.detach().cpu().double().numpy() if isinstance(value, Tensor) else np.asarray(value, dtype=np.float64)
