"""A training script of somebody's own for torchrun, with a way to go wrong named as its first argument."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

HOW = sys.argv[1]


def stuck() -> None:
    while True:
        time.sleep(0.1)


def main() -> None:
    if HOW != "alone":
        dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    trained = model if HOW == "alone" else DistributedDataParallel(model)
    data = TensorDataset(torch.randn(32, 3, generator=torch.Generator().manual_seed(1)))
    sampler: DistributedSampler = DistributedSampler(data, int(os.environ["WORLD_SIZE"]), rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for step, (inputs,) in enumerate(DataLoader(data, batch_size=4, sampler=sampler)):
            if rank == 1 and (epoch, step) == (1, 2):
                if HOW == "hang":
                    stuck()
                if HOW == "die":
                    raise ValueError("the labels are gone")
                if HOW == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            trained(inputs).square().mean().backward()
            optimizer.step()
    if rank == 0:
        print("done")
    if HOW == "job":
        return
    if dist.is_initialized():
        dist.destroy_process_group()


if HOW == "job":
    import workbench

    workbench.hosts.audit(sys.argv[2])
main()
