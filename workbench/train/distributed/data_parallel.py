"""Data-parallel training: every rank takes its share of each batch, and all of them make the same update.

for step in range(total_steps):
    share of the batch -> loss, gradient       on every rank
    weighted means over the ranks              one all-reduce of the flat gradient, the losses behind it
    update, the same everywhere                as if one rank had read the whole batch

Weights are equal on all ranks from the first step on (P7.5) and stay so, because every rank computes the same update
from the same numbers; nothing but gradients has to travel. One rank writes the study (P7.2); its checkpoints hold what is
each rank's own (P4.2): random state, and running statistics of batch norm, which the model of a checkpoint has merged.
"""

import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, TensorDataset

from workbench.config import TrainConfig
from workbench.errors import ConfigError, DataError, UsageError, WorkloadError
from workbench.record.write import SilentStudy, StudyWriter, TrialWriter
from workbench.train.checkpoint import SilentStore
from workbench.train.distributed.process_group import HostGroup
from workbench.train.evaluation import TRACKED_SPLIT, Evaluation, PartialSum, TrackedExamples, partial_sum, values_each
from workbench.train.gradients import LaneLoss
from workbench.train.lane import Lane
from workbench.workloads.base import Workload
from workbench.workloads.batch_norm import batch_norm_layers
from workbench.workloads.items import in_its_own_order, plain_tensors

KINDS = ("rng/", "data/", "statistics/")  # beginnings of the names of what is each rank's own in a checkpoint


def evaluate_shard(
    workload: Workload, model: nn.Module, shard: int, shards: int, *, split: str = "validation", batch_size: int,
    device: torch.device | None = None, precision: str | None = None,
) -> list[PartialSum]:  # fmt: skip
    """Return the sums over every `shards`-th example, from example `shard` on; nothing is padded and nothing dropped."""
    if not 0 <= shard < shards:
        raise UsageError(f"shard={shard} must be 0 to {shards - 1}, one of shards={shards}.")
    data = workload.data(split)
    if in_its_own_order(data):
        raise DataError(
            f"workload {workload.name!r}: to share out the {split} split it needs __getitem__, and it is iterable only."
        )
    start = time.perf_counter()
    places = range(shard, len(data), shards)
    if not places:
        return []
    part = workload.replace(**{f"{split}_data": _part(workload, data, places)})
    device = device or next(model.parameters()).device
    ((columns, weights),) = values_each(
        part, [model], split=split, batch_size=batch_size, device=device, precision=precision
    )
    seconds = time.perf_counter() - start
    return [partial_sum(name, values, weights, seconds) for name, values in columns.items()]


def _part(workload: Workload, data: Any, places: range) -> Dataset[Any]:
    """Return the examples at `places`; tensors stay tensors, because those are read without a loader."""
    if (tensors := plain_tensors(data, workload.collate)) is not None:
        return TensorDataset(*(tensor[places.start :: places.step] for tensor in tensors))
    return Subset(data, places)


def join_shards(parts: Sequence[Sequence[PartialSum]]) -> list[Evaluation]:
    """Return the evaluation of the whole split from the sums of all its parts; seconds are those of the slowest."""
    filled = [part for part in parts if part]
    if not filled or not sum(part[0].weight for part in filled) > 0:
        raise UsageError("parts hold no example with a weight above 0, so there is no mean to take.")
    found = []
    for sums in zip(*filled, strict=True):
        counts = [s.num_correct for s in sums if s.num_correct is not None]
        correct = sum(counts) if len(counts) == len(sums) else None
        mean = sum(s.total for s in sums) / sum(s.weight for s in sums)
        examples, seconds = sum(s.num_examples for s in sums), max(s.seconds for s in sums)
        found.append(Evaluation(sums[0].metric, mean, examples, correct, seconds))
    return found


def check_shares(config: TrainConfig, hosts: HostGroup) -> None:
    """Raise `ConfigError` unless every rank gets as many examples of each micro-batch as the others."""
    if config.precision == "float16" and hosts.size > 1:
        raise ConfigError("precision='float16' scales the loss, which ranks do not agree on here; take 'bfloat16'.")
    parts = config.accumulate_steps * hosts.size
    if config.batch_size % parts:
        micro = f" times {config.accumulate_steps} micro-batches" if config.accumulate_steps > 1 else ""
        smaller = config.batch_size - config.batch_size % parts
        allowed = f"{smaller} or {smaller + parts}" if smaller else f"{parts}"
        raise ConfigError(
            f"batch_size={config.batch_size} is that of all ranks together and cannot be shared out evenly among {hosts.size} "
            f"ranks{micro}. Take {allowed}, or another number of ranks."
        )


def exchange_room(hosts: HostGroup) -> int:
    """Return how many numbers of the gradient's type have to lie behind it for `average_gradients`."""
    return hosts.room(torch.empty(3, dtype=torch.float64))


def average_gradients(hosts: HostGroup, grad: Tensor, local: LaneLoss, *, examples: int) -> LaneLoss:
    """Make the gradient that of the whole batch on every rank, in place, and return the loss over the whole batch.

    Args:
        grad: flat gradient of this rank's share, and behind it `exchange_room` numbers in which losses travel, shape (numbers,).
        local: loss of this rank's share, one lane.
        examples: in the share of each rank.
    """
    own = grad[: len(grad) - exchange_room(hosts)]
    loss, weight = local.loss, torch.ones_like(local.loss) if local.weight is None else local.weight
    if local.weight is not None:
        nothing = weight == 0
        own.mul_(weight.to(grad.dtype)).masked_fill_(nothing, 0.0)  # a mean over nothing is not a number
        loss = loss.masked_fill(nothing, 0.0)
    moments = torch.cat([loss, local.squared_se, weight]).double()
    loss, squared_se, weight = hosts.sum_and_gather(grad, moments).unsqueeze(2).unbind(1)  # each (hosts, 1)
    total = weight.sum(0)
    divisor = torch.where(total > 0, total, 1)  # where no example of any rank counts, nothing is learned
    own.div_(divisor.to(grad.dtype))
    mean = (weight * loss).sum(0) / divisor
    within = torch.nan_to_num(squared_se) * (examples - 1) / examples
    between = (loss - mean) ** 2 / examples
    whole = examples * hosts.size
    joined = (weight**2 * (within + between)).sum(0) / divisor**2 * (whole / (whole - 1))
    kept = None if local.weight is None else total
    return LaneLoss(mean.to(local.loss.dtype), joined.to(local.squared_se.dtype), kept)


def evaluate_on_hosts(
    hosts: HostGroup, workload: Workload, model: nn.Module, *, split: str, batch_size: int, device: torch.device,
    precision: str | None, tracked: TrackedExamples | None = None,
) -> list[Evaluation]:  # fmt: skip
    """Return loss and metrics of a split on all ranks, every example evaluated once on one of them (P2.11)."""
    settings: dict[str, Any] = {"batch_size": batch_size, "device": device, "precision": precision}
    parts = hosts.gather(evaluate_shard(workload, model, hosts.rank, hosts.size, split=split, **settings))
    if tracked is not None:
        few = workload.replace(**{f"{TRACKED_SPLIT}_data": Subset(workload.data(TRACKED_SPLIT), tracked.places)})
        values_each(few, [model], split=TRACKED_SPLIT, tracked=tracked.alone(), **settings)
    return join_shards(parts)


def check_same_weights(hosts: HostGroup, values: Tensor, names: Sequence[str]) -> None:
    """Raise `WorkloadError` with the ranks that differ unless all begin with the same weights (P7.5)."""
    sums = hosts.gather(zlib.crc32(values.detach().cpu().contiguous().view(torch.uint8).numpy().data))
    others = [rank for rank, known in enumerate(sums) if known != sums[0]]
    if others:
        raise WorkloadError(
            f"the weights on rank {', '.join(map(str, others))} differ from those on rank 0 before the first step "
            f"({len(names)} tensors, {names[0]} first). build_model must draw from torch, NumPy or Python's random alone, "
            "which are seeded by shared_seed, and neither from the time nor from the rank (P7.5)."
        )


def open_together(hosts: HostGroup, opened: Callable[[], StudyWriter]) -> StudyWriter:
    """Return the study on the main rank, where alone `opened` is called, and one that writes nothing on the others."""
    if hosts.size == 1:
        return opened()
    studies: list[StudyWriter] = []

    def path() -> str:
        studies.append(opened())
        return str(studies[0].path)

    told = hosts.on_main(path)
    return studies[0] if studies else SilentStudy(Path(told))


def finished(hosts: HostGroup, writer: TrialWriter) -> bool:
    """Return whether the trial ran to its end before; a rank that does not write learns the trial's number, too."""
    done, number = hosts.on_main(lambda: [writer.finished, writer.number])
    writer.number = int(number)
    return bool(done)


def begin_together(hosts: HostGroup, lane: Lane) -> Lane:
    """Return the lane with the checkpoint that it goes on from, on all ranks; only the main one needs to see its folder."""
    lane.start = hosts.from_main(lane.start)
    if lane.start is not None and not hosts.main:
        lane.checkpoints = SilentStore(lane.start.step)
    return lane


def running_statistics(hosts: HostGroup, model: nn.Module) -> dict[str, Tensor]:
    """Return the running statistics of this rank's batch norm layers, the model's own tensors; none where it is alone."""
    layers = batch_norm_layers(model) if hosts.size > 1 else {}
    return {
        f"{name}.{leaf}": buffer
        for name, layer in layers.items() for leaf, buffer in layer.named_buffers(recurse=False)
    }  # fmt: skip


def gather_states(hosts: HostGroup, states: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return everybody's state, on the CPU, under names of their own: the main rank's as given (`KINDS`), the others' below host<rank>/."""
    if hosts.size == 1:
        return dict(states)
    found = enumerate(hosts.gather({name: tensor.cpu() for name, tensor in states.items()}))
    return {f"{_prefix(rank)}{name}": tensor for rank, own in found for name, tensor in own.items()}


def own_state(hosts: HostGroup, trainer: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """Return this rank's state from `Checkpoint.trainer`; None where it had no part in that training."""
    prefix = _prefix(hosts.rank)
    own = {name.removeprefix(prefix): t for name, t in trainer.items() if name.startswith(prefix)}
    return {name: t for name, t in own.items() if name.startswith(KINDS)} or None


def _prefix(rank: int) -> str:
    return f"host{rank}/" if rank else ""
