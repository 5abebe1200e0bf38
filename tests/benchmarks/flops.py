"""How far a training step is from what the cores can do: its floating-point operations, and a bare matrix product."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from bare import CPU, clock, indexed, on_device
from timing import cores_here
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import workbench as wb

SECONDS = 0.15


class Product(NamedTuple):
    """`count` products of (rows, inner) by (inner, columns)."""

    count: int
    rows: int
    inner: int
    columns: int

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.count * self.rows * self.inner * self.columns

    def __str__(self) -> str:
        """Return it as words."""
        return f"{self.count} x ({self.rows}x{self.inner}) @ ({self.inner}x{self.columns})"


class _Products(TorchDispatchMode):
    """Notes the shapes of all matrix products and convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Product] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "bmm", "baddbmm"):
            a, b = args[1:3] if name in ("addmm", "baddbmm") else args[:2]
            self.found.append(Product(math.prod(a.shape[:-2]), *a.shape[-2:], b.shape[-1]))
        elif name == "convolution":
            groups, weight = args[8], args[1]
            rows, inner = weight.shape[0] // groups, math.prod(weight.shape[1:])
            self.found.append(Product(groups, rows, inner, out.numel() // out.shape[1]))
        return out


def step_flops(workload: wb.Workload) -> int:
    """Return the operations of one forward and backward pass of one trial, counted by torch."""
    with FlopCounterMode(display=False) as counter:
        _forward(workload).mean().backward()
    return counter.get_total_flops()


def largest_product(workload: wb.Workload) -> Product:
    """Return the matrix product of the forward pass that has the most operations; of a convolution, its matrix form."""
    with _Products() as seen:
        _forward(workload)
    return max(seen.found, key=lambda product: product.flops)


def _forward(workload: wb.Workload) -> torch.Tensor:
    torch.manual_seed(0)
    batch = on_device(next(indexed(workload, workload.config.batch_size)), CPU)
    return workload.loss(workload.forward(workload.build_model(), batch), batch)


def product_rate(product: Product, lanes: int, device: torch.device) -> float:
    """Return the GFLOP/s of the product for all lanes: batched or one after the other, on one core or on all, the best."""
    count = product.count * lanes
    a = torch.randn(count, product.rows, product.inner, device=device)
    b = torch.randn(count, product.inner, product.columns, device=device)
    c = torch.empty(count, product.rows, product.columns, device=device)

    def one_by_one() -> None:
        for k in range(count):
            torch.mm(a[k], b[k], out=c[k])

    best = math.inf
    for threads in (1, cores_here()):
        torch.set_num_threads(threads)
        best = min(best, *(_shortest(run, device) for run in (lambda: torch.bmm(a, b, out=c), one_by_one)))
    return product.flops * lanes / best / 1e9


def _shortest(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the quickest of many calls."""
    run()
    best, end = math.inf, time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        start = clock(device)
        run()
        best = min(best, clock(device) - start)
    return best
