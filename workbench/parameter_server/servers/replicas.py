"""`Replica`: a process's copy of a placed module, how such a module travels, and its buffers, merged over the workers (T1.1, P6.7, P7.3)."""

import copy
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils import parametrize

from workbench.config import TrainConfig
from workbench.errors import UsageError
from workbench.parameter_server.context import current_worker
from workbench.parameter_server.errors import NonFiniteError
from workbench.train.distributed.merge_statistics import merge_statistics


@dataclass
class Replica:
    """A worker's copy of the module."""

    module: nn.Module  # to compute with; its placed parameters are replaced by every pull
    parameters: dict[str, Tensor]  # those that are placed, by name, flat
    versions: list[int]  # of the blocks, as they were last pulled
    config: TrainConfig
    restored: int  # how often the module had been restored when its buffers were taken over
    marks: dict[str, tuple[int, int]]  # of the placed parameters, see `marks_of`
    updates: int = 0  # that were pushed from here: whose batches its buffers have seen
    revision: int = 0  # of what the coordinator noted last

    def adopt(self, noted: Mapping[str, Any], revision: int) -> None:
        """Take over what was restored or reconfigured since; buffers where something was restored."""
        self.config, self.revision = noted["config"], revision
        with torch.no_grad():
            for key, parameter in self.module.named_parameters():
                if key in noted["frozen"]:
                    parameter.copy_(noted["frozen"][key])
            if noted["restored"] != self.restored:
                self.restored, self.updates = noted["restored"], 0
                copy_buffers(self.module, noted["buffers"])

    def changed(self) -> list[str]:
        """Return the parameters that code here has written, cast, moved or replaced: servers know nothing of it, and pulls may not reach them."""
        here = marks_of(self.module)
        return [key for key, mark in self.marks.items() if here.get(key) != mark]


def marks_of(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Return where each parameter's values lie, and how often it was written in place: another once it was written, cast, moved or replaced."""
    return {key: (each.data_ptr(), each._version) for key, each in module.named_parameters()}


def copy_buffers(module: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Give a module the buffers that are there by its names."""
    with torch.no_grad():
        for key, buffer in module.named_buffers():
            if key in buffers:
                buffer.copy_(buffers[key])


_REPLICAS: dict[tuple[str, str, int | None], Replica] = {}


def replica_of(
    cluster: str,
    name: str,
    module: nn.Module,
    parameters: Collection[str],
    blocks: int,
    *,
    config: TrainConfig,
    restored: int,
) -> Replica:
    """Return the replica of whoever asks, worker or coordinator; where there is none, or its parameters were changed here, `module` is copied."""
    here = current_worker()
    key = (cluster, name, None if here is None else here.index)
    before = _REPLICAS.get(key)
    if before is None or before.changed():
        module = copy.deepcopy(module)
        placed = {label: parameter for label, parameter in module.named_parameters() if label in parameters}
        flat = {label: parameter.data.reshape(-1) for label, parameter in placed.items()}
        for label, parameter in placed.items():
            parameter.data = flat[label].view(parameter.shape)
            parameter.requires_grad_(True)
        marks = {label: mark for label, mark in marks_of(module).items() if label in placed}
        made = Replica(module, flat, [0] * blocks, config, restored, marks)
        if before is not None:
            copy_buffers(module, dict(before.module.named_buffers()))
            made = replace(before, module=module, parameters=flat, marks=marks, revision=0)
        _REPLICAS[key] = made
    return _REPLICAS[key]


def forget_replicas(cluster: str, name: str | None = None) -> None:
    """Drop the replicas of a cluster that ended, or of one placed module."""
    for key in list(_REPLICAS):  # workers that are threads make replicas meanwhile
        if key[0] == cluster and name in (None, key[1]):
            _REPLICAS.pop(key, None)


def with_gradients(module: nn.Module, placed: Collection[str]) -> dict[str, nn.Parameter]:
    """Return the placed parameters of a module by name, sparse gradients made dense; raises `UsageError` where another one got a gradient."""
    named = dict(module.named_parameters())
    elsewhere = [key for key, parameter in named.items() if key not in placed and parameter.grad is not None]
    if elsewhere:
        raise UsageError(
            f"{', '.join(elsewhere[:3])} got a gradient, and needed none when the module was placed, so that it is on no server. Place "
            "the module with requires_grad as it is to be trained; place what is thawed later anew."
        )
    held = {key: parameter for key, parameter in named.items() if key in placed}
    for parameter in held.values():
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            parameter.grad = parameter.grad.to_dense()
    return held


def check_gradients(parameters: Mapping[str, nn.Parameter], name: str) -> None:
    """Refuse to send no gradient at all, and one that is NaN or infinite, which would make every value on the servers so."""
    if all(parameter.grad is None for parameter in parameters.values()):
        raise UsageError(
            "No parameter has a gradient, so there is nothing to send. Call loss.backward() inside of `with placed.step() as module`, on "
            "what that module computed, and no zero_grad() after it: the servers make the update. To leave an update out, use pull and push."
        )
    grads = {key: parameter.grad for key, parameter in parameters.items() if parameter.grad is not None}
    if math.isfinite(sum(float(grad.sum()) for grad in grads.values())):
        return
    bad = [key for key, grad in grads.items() if not bool(grad.isfinite().all())]
    if bad:
        here = current_worker()
        where = "the coordinator" if here is None else f"worker {here.index}"
        raise NonFiniteError(
            f"{name!r}: the gradient of {', '.join(bad[:3])} is NaN or infinite on {where} ({len(bad)} of {len(grads)} parameters), as that of a "
            "loss that is; nothing was sent, and the servers hold the values before it. Look at the batch, lower peak_lr or set max_grad_norm; "
            "to leave such an update out, use pull and push in place of step."
        )


def portable(module: nn.Module) -> nn.Module:
    """Return what can be pickled in place of a module: itself, or a copy whose parametrized parts, as by weight norm, have the classes of before."""
    if not any(parametrize.is_parametrized(part) for part in module.modules()):
        return module
    module = copy.deepcopy(module)
    for part in module.modules():
        part.__class__ = parametrize.type_before_parametrizations(part)
    return module


def unpacked(module: nn.Module) -> nn.Module:
    """Undo `portable`."""
    for part in list(module.modules()):
        if parametrize.is_parametrized(part):
            parametrize._inject_new_class(part)
            for name in part.parametrizations:  # type: ignore[union-attr]
                parametrize._inject_property(part, name)
    return module


def tracks_statistics(module: nn.Module) -> bool:
    """Return whether a module has batch norm layers with running statistics."""
    return any(isinstance(layer, _NormBase) and layer.running_mean is not None for layer in module.modules())


class ReplicaBuffers(NamedTuple):
    """Buffers of one worker's replica."""

    updates: int  # that it has made since the replica was built
    values: dict[str, Tensor]


def merged_buffers(start: Mapping[str, Tensor], replicas: Mapping[int, ReplicaBuffers]) -> dict[str, Tensor]:
    """Return the buffers that a model should be evaluated with.

    Parameters are on the servers and newer than any replica; buffers are made by forward passes, and each worker's are its own. Running means
    and variances become those of the examples of all workers, each weighed by the updates that it has made; counters add up; of
    anything else the values of the worker that made most updates stand. Workers without an update have no say.

    Source: P6.7, P7.3.
    """
    here = [found for found in replicas.values() if found.updates]
    if not here:
        return {name: value.clone() for name, value in start.items()}
    most = max(here, key=lambda found: found.updates).values
    merged: dict[str, Tensor] = {}
    for name, begun in start.items():
        prefix, dot, _ = name.rpartition(".")
        pair = f"{prefix}{dot}running_mean", f"{prefix}{dot}running_var"
        if name in pair and {*pair} <= {*start} and len(here) > 1:
            means, variances = (torch.stack([found.values[each] for found in here]).double().numpy() for each in pair)
            together = merge_statistics(means, variances, [found.updates for found in here])
            merged[name] = torch.as_tensor(together.mean if name == pair[0] else together.variance).to(begun.dtype)
        elif not begun.is_floating_point() and not begun.dim():
            merged[name] = begun + torch.stack([found.values[name] - begun for found in here]).sum(0)
        else:
            merged[name] = most[name].clone()
    return merged


def quicken_batch_norm(module: nn.Module, workers: int) -> None:
    """Let the running statistics of one of several replicas forget as fast as those of a single one.

    A replica sees one batch in `workers` updates, so its moving average reaches that many times as far back, over parameters that
    have long changed. With 1 - (1 - momentum)^workers it reaches as far back, in updates, as without servers; the noise that this
    adds the average over the replicas takes away again. Layers without a momentum, which average over all batches, are left.
    Source: ours, for O9.
    """
    for layer in module.modules():
        momentum = getattr(layer, "momentum", None)
        if isinstance(getattr(layer, "running_mean", None), Tensor) and isinstance(momentum, float):
            setattr(layer, "momentum", 1 - (1 - momentum) ** workers if workers > 1 else momentum)  # noqa: B010


class BufferLog:
    """The newest buffers of each worker, and how many updates it has made; `start` is what every replica began with."""

    def __init__(self, start: Mapping[str, Tensor]) -> None:
        self._start = {name: value.detach().clone() for name, value in start.items()}
        self._replicas: dict[int, ReplicaBuffers] = {}

    def note(self, worker: int, updates: int, values: dict[str, Tensor]) -> None:
        """Note that a worker made so many more updates, and what its buffers were afterwards."""
        before = self._replicas.get(worker)
        self._replicas[worker] = ReplicaBuffers(updates + (before.updates if before else 0), values)

    def merged(self) -> dict[str, Tensor]:
        """Return what `merged_buffers` makes of them."""
        return merged_buffers(self._start, self._replicas)
