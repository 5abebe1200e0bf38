"""Which trials train together as lanes of one stack, how many of them fit in memory, and what happens where they do not."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path

import torch

from workbench.config import TrainConfig
from workbench.errors import ConfigError, UsageError, WorkbenchError
from workbench.schedules import lr_values
from workbench.train.forward import is_out_of_memory
from workbench.train.lane import Lane
from workbench.train.stacked_weights import LaneStack
from workbench.workloads.base import Workload
from workbench.workloads.checks import check_data, check_selection

SHARED = ("batch_size", "accumulate_steps", "precision", "evaluation_batch", "bn_stat_examples")
"""What the lanes of a stack have in common; everything else may differ."""
STATE_SHARE = 0.5  # rule of thumb: of the bound, for weights, gradients and optimizers; activations get the rest
FREE_SHARE = 0.8  # rule of thumb: of what is free now; the rest is for what nobody counted
OPTIMIZER_COPIES = 4  # two moments, the update and what it is made from: the most of a built-in rule, per parameter


def check_lanes(workload: Workload, configs: Sequence[TrainConfig]) -> dict[str, int]:
    """Check every config against the workload before anything is written; return the sizes of the splits."""
    if not configs:
        raise UsageError("configs is empty: give at least one TrainConfig to train.")
    seen: dict[TrainConfig, int] = {}
    sizes: dict[str, int] = {}
    for number, config in enumerate(configs):
        if not isinstance(config, TrainConfig):
            raise ConfigError(f"configs[{number}] must be a TrainConfig, not {type(config).__name__}.")
        if config in seen:
            raise ConfigError(
                f"configs[{seen[config]}] and configs[{number}] are the same (peak_lr={config.peak_lr:g}, "
                f"shared_seed={config.shared_seed}): a trial is trained once. Leave one out, or give it another seed."
            )
        seen[config] = number
        try:
            sizes = check_data(workload, config)
            check_selection(workload, config)
            lr_values(config)
        except WorkbenchError as error:
            if len(configs) > 1:
                raise type(error)(f"configs[{number}] (peak_lr={config.peak_lr:g}): {error}") from error
            raise
    return sizes


def group_lanes(lanes: Sequence[Lane]) -> list[list[Lane]]:
    """Return the lanes stack by stack: of one batch size, precision and first step; those of a rule side by side, so that it works on a slice."""
    groups: dict[Hashable, list[Lane]] = {}
    for lane in lanes:
        key = (lane.start_step, *(getattr(lane.config, name) for name in SHARED))
        groups.setdefault(key, []).append(lane)
    return [
        sorted(group, key=lambda lane: (str(lane.config.optimizer), lane.config.rules)) for group in groups.values()
    ]


def train_stacks(lanes: Sequence[Lane], train: Callable[[Sequence[Lane]], None], *, fit: int) -> None:
    """Train all lanes, at most `fit` at a time in stacks of about equal size; one that runs out of memory after all is halved."""
    count = -(-len(lanes) // max(1, fit))
    for piece in range(count):
        stack = lanes[piece * len(lanes) // count : (piece + 1) * len(lanes) // count]
        try:
            train(stack)
            continue
        except Exception as error:
            if len(stack) == 1 or not is_out_of_memory(error):
                raise
        if torch.cuda.is_available():  # outside the handler, whose traceback holds the stack that failed
            torch.cuda.empty_cache()
        left = [Lane(lane.config, lane.writer) for lane in stack if not lane.writer.finished]
        for group in group_lanes(left):  # their newest checkpoints need not be of the same step
            train_stacks(group, train, fit=(len(stack) + 1) // 2)


def lane_bytes(stack: LaneStack) -> int:
    """Return the bytes that one more lane adds to a stack."""
    trained = stack.values[0].nbytes * (2 + OPTIMIZER_COPIES)
    return trained + sum(t[0].nbytes for t in (*stack.frozen.values(), *stack.buffers.values()))


def available_bytes(device: torch.device) -> int:
    """Return the bytes that are free on a device now; what torch holds without using it counts as free."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + unused)
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):  # not Linux: half of what the machine has is a guess that leaves room
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def lanes_in_a_stack(workload: Workload, lanes: Sequence[Lane], device: torch.device, bound: int | None) -> int:
    """Return how many of the lanes fit in memory together, of which `bound` bytes may be taken; None is a share of what is free."""
    if len(lanes) < 2:
        return 1
    allowed = available_bytes(device) * FREE_SHARE if bound is None else bound
    return max(1, int(allowed * STATE_SHARE) // lane_bytes(LaneStack(workload, [lanes[0].config], device)))


def room_for_calls(stack: LaneStack, *, bound: int | None) -> int:
    """Return the bytes that the activations of a stack may take; `bound` is for all of it, None a share of what is free."""
    if bound is not None:
        return max(0, bound - lane_bytes(stack) * len(stack))
    return int(available_bytes(stack.device) * FREE_SHARE)
