"""Gradient checkpointing, a loss built of two terms, RMSprop with CosineAnnealingWarmRestarts by update."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.out = nn.Linear(10, 24), nn.Linear(24, 1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 24), nn.GELU()) for _ in range(3))

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return self.out(x)


def train(watch, seed=0):
    torch.manual_seed(seed)
    x = torch.randn(256, 10)
    y = x[:, :1] * x[:, 1:2] + 0.1 * torch.randn(256, 1)
    model = Deep()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=20)
    history = []
    with watch(model, optimizer):
        for step in range(60):
            pick = torch.randint(256, (32,))
            optimizer.zero_grad()
            prediction = model(x[pick])
            loss = nn.functional.mse_loss(prediction, y[pick]) + 0.1 * nn.functional.l1_loss(prediction, y[pick])
            loss.backward()
            optimizer.step()
            scheduler.step()
            history.append(loss.item())
    return history
