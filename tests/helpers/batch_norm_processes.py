"""What each of several real gloo processes does in the tests of batch norm; a file for each rank holds what it saw."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from workbench.errors import UsageError
from workbench.topics.batch_norm.collect import audit_batch_norm
from workbench.topics.batch_norm.diagnose import diagnose_batch_norm
from workbench.train.distributed.batch_norm import (
    gather_running_statistics,
    merge_running_statistics,
    merged_running_statistics,
    synchronise_batch_norm,
)
from workbench.workloads.batch_norm import ghost_batch_norm

SIZES = {2: ((5, 3), (4, 4), (6, 0)), 4: ((5, 3, 1, 4), (2, 2, 2, 2), (3, 0, 2, 6))}
"""Examples on each process, case by case."""
KINDS: dict[str, tuple[type[nn.Module], tuple[int, ...]]] = {
    "1d": (nn.BatchNorm1d, ()),
    "3d": (nn.BatchNorm3d, (2, 1, 2)),
}
STEPS = 4
EQUAL = torch.linspace(0.1, 0.9, 50, dtype=torch.float64)


def run_processes(world: int, folder: Path) -> list[dict[str, Any]]:
    """Return what each rank saw."""
    mp.start_processes(_process, args=(world, str(folder)), nprocs=world, start_method="fork")  # type: ignore[no-untyped-call]
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]


def whole_batch(kind: str, examples: int) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a layer, its inputs, and the weights of its outputs in a loss: the same in every process."""
    layer, space = KINDS[kind]
    generator = torch.Generator().manual_seed(examples)
    x = 2 + 3 * torch.randn(examples, 3, *space, dtype=torch.float64, generator=generator)
    y = torch.randn(examples, 3, *space, dtype=torch.float64, generator=generator)
    torch.manual_seed(0)
    made: Any = layer(3, momentum=0.3)
    nn.init.uniform_(made.weight)
    nn.init.uniform_(made.bias)
    return made.double(), x, y


def small_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1)).double()


def data() -> tuple[Tensor, Tensor]:
    """Return 32 examples, sorted by their size, so that the parts of the processes are not alike."""
    x = torch.randn(32, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x = x[x.sum(1).argsort()]
    return x, torch.sin(x.sum(1, keepdim=True))


def trained(model: nn.Module, x: Tensor, y: Tensor) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()
    return model


def _process(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    try:
        seen = {"layers": _layers(rank, world), "drawn": _drawn(rank, world), **_nets(rank, world), **_merges(rank)}
        torch.save(seen, f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


def _layers(rank: int, world: int) -> dict[Any, Any]:
    found = {}
    for kind in KINDS:
        for sizes in SIZES[world]:
            layer, x, y = whole_batch(kind, sum(sizes))
            own = torch.split(x, list(sizes))[rank].clone().requires_grad_()
            layer = synchronise_batch_norm(layer)
            out = layer(own)
            (out**2 * torch.split(y, list(sizes))[rank]).sum().backward()
            grads = {f"{name}.grad": p.grad for name, p in layer.named_parameters()} | {"x.grad": own.grad}
            found[kind, sizes] = (
                grads | dict(layer.state_dict()) | {"out": out.detach(), "eval": layer.eval()(x[:1]).detach()}
            )
    return found


def _drawn(rank: int, world: int) -> Tensor:
    """Example i of this process is 1 in channel i of its own: the mean tells which ones make the statistic."""
    layer: Any = synchronise_batch_norm(ghost_batch_norm(nn.BatchNorm1d(8 * world, momentum=1.0), 10)).double()
    x = torch.zeros(8, 8 * world, dtype=torch.float64)
    x[:, 8 * rank : 8 * rank + 8] = torch.eye(8)
    torch.manual_seed(rank)
    layer(x)
    found: Tensor = layer.running_mean > 0
    return found


def _nets(rank: int, world: int) -> dict[str, Any]:
    x, y = (torch.chunk(t, world)[rank] for t in data())
    synchronised = trained(DistributedDataParallel(synchronise_batch_norm(small_net())), x, y)
    copied = trained(DistributedDataParallel(small_net()), x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer releases call it forward_sync_buffers
        local = trained(DistributedDataParallel(small_net(), broadcast_buffers=False), x, y)
    still = small_net()
    still[1].eval()  # type: ignore[index,operator]
    frozen = trained(DistributedDataParallel(still), x, y)
    models = {"synchronised": synchronised, "copied": copied, "local": local, "frozen": frozen}
    found: dict[str, Any] = {name: copy.deepcopy(model.module.state_dict()) for name, model in models.items()}  # type: ignore[union-attr]
    found["apart"] = gather_running_statistics(copied)
    found["verdicts"] = {name: _verdicts(model) for name, model in models.items()}
    with merged_running_statistics(local):
        merged = copy.deepcopy(local.module.state_dict())  # type: ignore[union-attr]
    found["verdicts"]["merged"] = _verdicts(local, checkpoint=merged)
    return found


def _verdicts(model: nn.Module, *, checkpoint: Any = None) -> dict[str, str]:
    """Return what is found in a job whose first process writes the checkpoint."""
    written = [checkpoint or model.state_dict()]
    dist.broadcast_object_list(written)
    audit = audit_batch_norm(model, replicas=gather_running_statistics(model), checkpoint=written[0])
    return {finding.code.partition(".")[2]: finding.status for finding in diagnose_batch_norm(audit)}


def _merges(rank: int) -> dict[str, Any]:
    def layer() -> nn.BatchNorm1d:
        made = nn.BatchNorm1d(2)
        made.running_mean.copy_(torch.tensor([2.0 * rank - 3, 1.0]))  # type: ignore[union-attr]
        return made

    merged, weighted, equal = layer(), layer(), nn.BatchNorm1d(50).double()
    equal.running_mean.copy_(EQUAL)  # type: ignore[union-attr]
    before = merge_running_statistics(merged)
    merge_running_statistics(weighted, examples=float(rank))
    merge_running_statistics(equal, examples=rank + 1.0)  # a weighted mean of equal numbers is not always that number
    own = layer()
    with merged_running_statistics(own):
        inside = {name: t.clone() for name, t in own.state_dict().items()}
    refused = ""
    try:
        merge_running_statistics(nn.BatchNorm1d(2 + rank % 2))
    except UsageError as error:
        refused = str(error)
    layers = {"merged": merged, "weighted": weighted, "equal": equal, "after": own}
    return {name: each.state_dict() for name, each in layers.items()} | {
        "before": before,
        "inside": inside,
        "refused": refused,
    }
