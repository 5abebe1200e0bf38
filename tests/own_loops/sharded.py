"""Fully sharded parameters (FSDP2) over one process."""

import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def train(watch, seed=0):
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as store:
        dist.init_process_group("gloo", init_method=f"file://{store}/store", rank=0, world_size=1)
        try:
            return _train(watch)
        finally:
            dist.destroy_process_group()


def _train(watch):
    mesh = init_device_mesh("cpu", (1,))
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    target = torch.randn(8, 1)
    history = []
    with watch(model, optimizer):
        for step in range(40):
            x = torch.randn(32, 8)
            loss = nn.functional.mse_loss(model(x), x @ target)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 50.0)
            optimizer.step()
            optimizer.zero_grad()
            history.append(loss.item())
    return history
