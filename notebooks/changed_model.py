"""A model before and after a change, and data with and without outliers, for 17_comparison: put in your own, and keep the names."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import workbench as wb


class Block(nn.Module):  # x + f(x), with a layer norm before f or behind the addition
    def __init__(self, norm, zero_branch):
        super().__init__()
        self.norm, self.before = nn.LayerNorm(32), norm == "before"
        self.inner, self.outer = nn.Linear(32, 32), nn.Linear(32, 32)
        nn.init.kaiming_normal_(self.inner.weight, nonlinearity="relu")
        nn.init.kaiming_normal_(self.outer.weight, nonlinearity="linear")
        if zero_branch:
            nn.init.zeros_(self.outer.weight)

    def forward(self, x):
        if self.before:
            return x + self.outer(self.inner(self.norm(x)).relu())
        return self.norm(x + self.outer(self.inner(x).relu()))


def residual(norm, *, depth=8, zero_branch=False):
    blocks = [Block(norm, zero_branch) for _ in range(depth)]
    return nn.Sequential(nn.Linear(64, 32), *blocks, nn.LayerNorm(32), nn.Linear(32, 10))


def plain():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


images, classes = load_digits(return_X_y=True)
images = torch.tensor(images / 16, dtype=torch.float32)
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
images, classes = images[order], torch.tensor(classes)[order]
scaled_wrongly = images.clone()
scaled_wrongly[:3] *= 255  # three of 1,400 examples, as where some files hold another unit


def workload(name, build_model, inputs=images, **config):
    return wb.classification(
        name=name,
        build_model=build_model,
        train_data=TensorDataset(inputs[:1400], classes[:1400]),
        validation_data=TensorDataset(images[1400:], classes[1400:]),
        config=wb.TrainConfig(total_steps=300, batch_size=64, **config),
    )


adam, momentum = {"optimizer": "adam", "peak_lr": 0.001}, {"optimizer": "momentum", "peak_lr": 0.05}
before = workload("norm_before", lambda: residual("before"), **adam)
after = workload("norm_behind", lambda: residual("behind"), **adam)  # the change: Norm(x + f(x)) for x + f(Norm(x))
zero_branches = workload("zero_branches", lambda: residual("behind", zero_branch=True), **adam)
outliers = workload("outliers", plain, scaled_wrongly, **momentum)
no_outliers = workload("no_outliers", plain, **momentum)
