"""DistributedDataParallel over one process, with no_sync while gradients are accumulated."""

import contextlib
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def train(watch, seed=0):
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as store:
        dist.init_process_group("gloo", init_method=f"file://{store}/store", rank=0, world_size=1)
        try:
            return _train(watch)
        finally:
            dist.destroy_process_group()


def _train(watch):
    x = torch.randn(320, 8)
    data = TensorDataset(x, x @ torch.randn(8, 1))
    sampler = DistributedSampler(data, num_replicas=1, rank=0)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    history = []
    with watch(model, optimizer):
        for epoch in range(4):
            sampler.set_epoch(epoch)
            for i, (inputs, targets) in enumerate(loader):
                last = i % 2 == 1
                with contextlib.nullcontext() if last else model.no_sync():
                    loss = nn.functional.mse_loss(model(inputs), targets)
                    (loss / 2).backward()
                history.append(loss.item())
                if last:
                    optimizer.step()
                    optimizer.zero_grad()
    return history
