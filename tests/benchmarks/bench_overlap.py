"""What the overlap check costs: a million rows of 784 floats against a tenth as many, and the memory beyond the data.

python tests/benchmarks/bench_overlap.py [--rows 1000000] [--memory 256]
"""

from __future__ import annotations

import argparse
import re
import time
from pathlib import Path

import torch
from timing import machine
from torch.utils.data import TensorDataset

from workbench.topics.data.overlap import find_overlap

BUDGET_S = 30.0
VALUES = 784


def memory_mb(kind: str) -> float:
    """Return this process's memory: "VmRSS" now, "VmHWM" the most since `forget_peak`, in units of 1e6 bytes."""
    found = re.search(rf"{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return float(found[1]) * 1024 / 1e6 if found else float("nan")


def forget_peak() -> None:
    """Start the peak anew (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")


def main() -> None:
    """Print seconds, and memory beyond the data, for several bounds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--memory", type=float, nargs="*", default=[64.0, 256.0, 1024.0])
    asked = parser.parse_args()
    print(machine())
    generator = torch.Generator().manual_seed(0)
    train = torch.rand(asked.rows, VALUES, generator=generator)
    held = torch.rand(asked.rows // 10, VALUES, generator=generator)
    planted = 1000
    held[:planted] = train[-planted:]
    noise = 0.01 * torch.randn(planted, VALUES, generator=generator)
    held[planted : 2 * planted] = 0.5 * train[:planted] + 0.1 + 0.5 * 0.29 * noise
    data, other = TensorDataset(train), TensorDataset(held)
    find_overlap(TensorDataset(train[:1000]), {"validation": TensorDataset(held[:1000])})
    for memory in asked.memory:
        forget_peak()
        before = memory_mb("VmRSS")
        start, busy = time.perf_counter(), time.process_time()
        found = find_overlap(data, {"validation": other}, memory_mb=memory)["splits"]["validation"]
        seconds, busy = time.perf_counter() - start, time.process_time() - busy
        print(
            f"memory_mb={memory:g}: {seconds:.1f} s (budget {BUDGET_S:g}), {busy:.1f} s of processor time, peak {memory_mb('VmHWM') - before:.0f} MB above the data "
            f"({before:.0f}); {found['exact']} exact and {found['near']} near of {planted} and {planted} planted"
        )


if __name__ == "__main__":
    main()
