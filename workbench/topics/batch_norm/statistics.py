"""What batch norm sees and keeps: the statistics of one batch after the other, layer by layer, and those that a checkpoint and the processes of a job hold."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from workbench.errors import CheckpointError, UsageError
from workbench.train.checkpoint import load_checkpoint
from workbench.train.distributed.batch_norm import LayerStatistics, SynchronisedBatchNorm, statistic_processes
from workbench.train.distributed.merge_statistics import merge_statistics
from workbench.train.evaluation import modes_kept
from workbench.train.forward import buffers_put_back
from workbench.train.rng import isolated_rng
from workbench.workloads.batch_norm import batch_norm_layers, plain_name

Floats = NDArray[np.float64]
Moments = tuple[Floats, Floats]  # mean and variance of a layer, each shape (channels,)
State = Mapping[str, Any]
LEAST_CALLS = 8  # calls from which their spread is estimated, at least (rule of thumb)


class BatchStatistics(NamedTuple):
    """The statistics that one layer made, one row for each time that it was called: once a batch, or more where it is shared."""

    # mean, variance: shape (calls, channels); the variance is unbiased
    mean: Floats
    variance: Floats
    examples: NDArray[np.int64]  # that made the statistic, over all processes where it is synchronised, shape (calls,)
    values: NDArray[np.int64]  # per channel, examples times places, shape (calls,)
    batch: NDArray[np.int64]  # its number, from 0, shape (calls,)

    @property
    def together(self) -> Moments:
        """Mean and variance over all calls, each shape (channels,)."""
        biased = self.variance * ((self.values - 1) / self.values)[:, None]
        merged = merge_statistics(self.mean, biased, self.values)
        return merged.mean, merged.variance

    @property
    def independent(self) -> float | None:
        """Independent values that the statistics are as steady as, from call to call; None from fewer than 8 calls.

        n normal values have a mean that varies by 1 / n of their variance, and a standard deviation that does by half as much. The
        places of an image are values, too, so a few images may be steadier than as many rows of a table.
        """
        within = self.variance.mean(0)
        alive = within > 0
        if len(self.mean) < LEAST_CALLS or not alive.any():
            return None
        of_mean = self.mean.var(0, ddof=1)[alive] / within[alive]
        of_deviation = self.variance.var(0, ddof=1)[alive] / (2 * within[alive]) ** 2
        noise = float(np.mean(of_mean + of_deviation))
        return 1.5 / noise if 0 < noise < np.inf else None

    def average(self, momentum: float | None) -> Moments:
        """Return what running statistics are after these batches, were they warm."""
        count = len(self.mean)
        weight = np.ones(count) if momentum is None else (1 - momentum) ** np.arange(count - 1, -1, -1.0)
        return np.average(self.mean, axis=0, weights=weight), np.average(self.variance, axis=0, weights=weight)


def tracking_layers(model: nn.Module) -> dict[str, _BatchNorm]:
    """Return the batch norm layers that keep running statistics, by name."""
    return {name: layer for name, layer in batch_norm_layers(model).items() if layer.running_mean is not None}


def running_statistics(layer: _BatchNorm) -> tuple[Floats, Floats, int]:
    """Return a layer's running mean and variance, each shape (channels,), and the batches that it has seen."""
    batches = 0 if layer.num_batches_tracked is None else int(layer.num_batches_tracked)
    return _to_numpy(layer.running_mean), _to_numpy(layer.running_var), batches


def batch_statistics(
    model: nn.Module, batches: Iterable[Any], forward: Callable[[nn.Module, Any], Any], *, refused: list[int] | None = None
) -> dict[str, BatchStatistics]:  # fmt: skip
    """Return the statistics of every batch in every layer; model and random state are left bit for bit as they were."""
    layers = batch_norm_layers(model)
    names = {layer: name for name, layer in layers.items()}
    rows: dict[str, list[Any]] = {name: [] for name in layers}
    now: list[tuple[str, Any]] = []
    number = 0

    def note(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> None:
        if layer.training:
            x: Tensor = args[0] if args else kwargs["input"]
            now.append((names[layer], (*_statistic_of(layer, x), number)))

    handles = [layer.register_forward_hook(note, with_kwargs=True) for layer in layers.values()]
    try:
        with _probed(model, tracking_layers(model).values()), torch.no_grad(), isolated_rng():
            for number, batch in enumerate(batches):
                now.clear()
                try:
                    forward(model, batch)
                except ValueError as error:
                    if refused is None or "more than 1 value per channel" not in str(error):
                        raise
                    refused.append(number)
                    continue
                for name, row in now:
                    rows[name].append(row)
    finally:
        for handle in handles:
            handle.remove()
    return {name: BatchStatistics(*map(np.array, zip(*seen, strict=True))) for name, seen in rows.items() if seen}


def _statistic_of(layer: _BatchNorm, x: Tensor) -> tuple[Floats, Floats, int, int]:
    """Return mean, unbiased variance, examples and values of the statistic that a layer has just made of `x`."""
    examples, places = len(x) * statistic_processes(layer), x[:1, 0].numel() if len(x) else 0
    used = min(examples, int(getattr(layer, "stat_examples", None) or examples))
    if layer.running_mean is not None:
        mean, variance, _ = running_statistics(layer)
    else:  # its own are nowhere to be read
        wide = x[:used].double()
        found = torch.var_mean(wide, dim=[0, *range(2, x.dim())], correction=int(used * places > 1))
        variance, mean = (_to_numpy(each) for each in found)
    return mean, variance, used, used * places


def is_frozen(model: nn.Module, layer: nn.Module) -> bool:
    """Tell whether a layer normalises with its stored statistics while the model trains."""
    return model.training and not layer.training


@contextmanager
def statistics_set(model: nn.Module, statistics: Mapping[str, Moments]) -> Iterator[nn.Module]:
    """Have other running statistics in the model inside the block: a mean and a variance for each named layer."""
    layers = tracking_layers(model)
    with buffers_put_back(model):
        for name, values in statistics.items():
            for own, array in zip((layers[name].running_mean, layers[name].running_var), values, strict=True):
                assert own is not None
                own.copy_(torch.from_numpy(array))
        yield model


@contextmanager
def _probed(model: nn.Module, layers: Iterable[_BatchNorm]) -> Iterator[None]:
    """Let running statistics be those of the last batch inside the block, and put modes, buffers and momentum back after it."""
    momenta = [(layer, layer.momentum) for layer in layers]
    with buffers_put_back(model), modes_kept(model):
        try:
            if not model.training:  # else what is frozen in training stays so
                model.train()
            for layer, _ in momenta:
                layer.momentum = 1.0
            yield
        finally:
            for layer, momentum in momenta:
                layer.momentum = momentum


def _to_numpy(values: Any) -> Floats:
    if isinstance(values, Tensor):
        return np.array(values.detach().cpu().double().numpy())
    return np.asarray(values, dtype=np.float64)


def copies_first(model: nn.Module) -> bool:
    """Tell whether the first process's running statistics are copied over all others' at every forward pass."""
    model = getattr(model, "_orig_mod", model)
    if not isinstance(model, DistributedDataParallel) or not model.broadcast_buffers:
        return False
    inner, kinds = unwrapped(model), (SynchronisedBatchNorm, nn.SyncBatchNorm)
    apart = any(not isinstance(each, kinds) and not is_frozen(inner, each) for each in tracking_layers(inner).values())
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
    """Return the running statistics of every process: count, examples, metrics, and layers -> mean and variance, (processes, channels)."""
    names = [plain_name(name) for name in tracking_layers(model)]
    weights = examples
    if isinstance(replicas, Mapping):
        if lacking := [name for name in names if name not in replicas]:
            raise UsageError(
                f"replicas has no layer {lacking[0]!r}: give what gather_running_statistics(model) returned for this model."
            )
        layers = {n: {kind: getattr(replicas[n], kind).tolist() for kind in ("mean", "variance")} for n in names}
        weights = replicas[names[0]].examples.tolist() if weights is None and names else weights
    else:
        states = [_running(_state_within(state), names) for state in replicas]
        for number, state in enumerate(states):
            if missing := [name for name in names if name not in state]:
                raise UsageError(
                    f"replicas[{number}] has no running statistics of {missing[0]!r}: give the state dict of every process."
                )
        layers = {n: {kind: [state[n][kind] for state in states] for kind in ("mean", "variance")} for n in names}
    count = len(next(iter(layers.values()))["mean"]) if layers else 0
    given: dict[str, Any] = {"examples": weights, "metrics": metrics}
    for name, numbers in given.items():
        if numbers is not None and count and len(numbers) != count:
            raise UsageError(f"{name} has {len(numbers)} numbers for {count} replicas.")
    lists = {name: None if numbers is None else [float(n) for n in numbers] for name, numbers in given.items()}
    return {"count": count, **lists, "layers": layers}


def checkpoint_facts(model: nn.Module, checkpoint: State | str | Path) -> dict[str, Any]:
    """Return the running statistics that were written: layers -> mean and variance, (channels,)."""
    state = _state_within(_read_state(checkpoint) if isinstance(checkpoint, (str, Path)) else checkpoint)
    names = [plain_name(name) for name in tracking_layers(model)]
    found = _running(state, names)
    if names and not found:
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


def _read_state(path: str | Path) -> State:
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


def _state_within(state: Any, depth: int = 2) -> dict[str, Any]:
    """Return the state dict in what was given, without the prefixes of wrappers."""
    if isinstance(state, Mapping):
        if any(str(key).endswith("running_mean") for key in state):
            return {plain_name(str(key)): value for key, value in state.items()}
        for value in state.values() if depth else ():
            if found := _state_within(value, depth - 1):
                return found
    return {}


def _running(state: State, names: Iterable[str]) -> dict[str, dict[str, list[float]]]:
    """Return mean and variance of each layer that a state dict has running statistics of."""
    front = {name: f"{name}.running_".lstrip(".") for name in names}
    return {
        name: {"mean": _to_numpy(state[f"{key}mean"]).tolist(), "variance": _to_numpy(state[f"{key}var"]).tolist()}
        for name, key in front.items()
        if f"{key}mean" in state
    }
