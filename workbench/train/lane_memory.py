"""How much memory lanes need, and how many of them fit."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from workbench.errors import ConfigError
from workbench.train.lane_stack import LaneStack

__all__ = ["FREE_SHARE", "STATE_SHARE", "available_bytes", "lane_bytes", "lanes_that_fit", "room_for_calls"]

STATE_SHARE = (
    0.5  # rule of thumb: of the bound that weights, gradients and optimizers may take; activations get the rest
)
FREE_SHARE = 0.8  # rule of thumb: of what is free now; the rest is for what nobody counted

OPTIMIZER_COPIES = (
    4  # two moments, the update and what it is made from: the most that a built-in rule keeps per parameter
)


def lane_bytes(stack: LaneStack, *, optimizer_copies: int = OPTIMIZER_COPIES) -> int:
    """Return the bytes that one more lane adds to a stack: parameters, gradient, frozen ones, buffers, optimizer.

    Args:
        stack: lanes of the same kind.
        optimizer_copies: tensors of the size of the parameters that the optimizer holds at a time.
    """
    trained = stack.values[0].nbytes * (2 + optimizer_copies)
    return trained + sum(t[0].nbytes for t in (*stack.frozen.values(), *stack.buffers.values()))


def available_bytes(device: torch.device) -> int:
    """Return the bytes that are free on a device now; what torch holds without using it counts as free."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + unused)
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):  # not Linux: half of what the machine has is a guess that leaves room
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def lanes_that_fit(available: int, *, lane: int, share: float = 1.0) -> int:
    """Return how many lanes fit into the available memory, at least 1.

    Args:
        available: bytes; see `available_bytes`.
        lane: bytes that each lane needs: of its state (see `lane_bytes`), or of its part of the calls in progress.
        share: of the available memory that may be used; the rest is for what nobody counted.

    Raises:
        ConfigError: an argument is negative or the share is not between 0 and 1.
    """
    for name, value in (("available", available), ("lane", lane)):
        if value < 0:
            raise ConfigError(f"{name}={value} must be a number of bytes, at least 0.")
    if not 0 < share <= 1:
        raise ConfigError(f"share={share} must be above 0 and at most 1.")
    return max(1, int(available * share) // max(1, lane))


def room_for_calls(stack: LaneStack, *, bound: int | None, share: float = FREE_SHARE) -> int:
    """Return the bytes that the activations of a stack may take, beside what `lane_bytes` counts.

    Args:
        stack: allocated already, its optimizer aside.
        bound: bytes that it may take in all; None is a share of what is free.
        share: of what is free now.
    """
    state = lane_bytes(stack) * len(stack)
    if bound is not None:
        return max(0, bound - state)
    return int(available_bytes(stack.device) * share)
