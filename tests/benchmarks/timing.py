"""Interleaved rounds and ratios: what every benchmark here has in common."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping

import torch
from scipy.stats import binom

__all__ = ["cores_here", "interval", "machine", "median", "ratio", "rounds"]


def rounds(sides: Mapping[str, Callable[[], object]], *, count: int = 5) -> dict[str, list[float]]:
    """Return the seconds of each side in `count` interleaved rounds, after one unmeasured run of each."""
    for run in sides.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(count):
        for name in list(sides) if number % 2 == 0 else list(reversed(sides)):
            start = time.perf_counter()
            sides[name]()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def median(values: list[float]) -> float:
    """Return the median."""
    return statistics.median(values)


def interval(values: list[float], *, share: float = 0.95) -> tuple[float, float]:
    """Return the order statistics between which the median lies, with a confidence of `share` at least, or the extremes."""
    ordered, count = sorted(values), len(values)
    out = int(binom.ppf((1 - share) / 2, count, 0.5))
    low = max(out - 1, 0)
    return ordered[low], ordered[count - 1 - low]


def ratio(ours: list[float], theirs: list[float], *, digits: int = 3) -> str:
    """Return the ratio of the medians, and the smallest and largest ratio within one of the rounds that both have."""
    each = [a / b for a, b in zip(ours, theirs, strict=False)]
    ours, theirs = ours[: len(each)], theirs[: len(each)]
    return f"{median(ours) / median(theirs):.{digits}f} ({min(each):.{digits}f} to {max(each):.{digits}f})"


def machine() -> str:
    """Return what a reader needs to know about the machine."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    load = os.getloadavg()[0]
    return f"{platform.machine()}, {cores_here()} cores, {device}, torch {torch.__version__}, load {load:.1f}"


def cores_here() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
