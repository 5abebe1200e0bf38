"""A frozen backbone, gradient checkpointing, half precision with a GradScaler, accumulation, two optimizers, clipping, and averaged weights that are evaluated."""

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset


class Tuned(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(16, 24), nn.BatchNorm1d(24), nn.ReLU())
        self.neck = nn.Linear(24, 32)
        self.block = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU())
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        x = torch.relu(self.neck(self.backbone(x)))
        return self.head(x + checkpoint(self.block, x, use_reentrant=False))


def train(watch, seed=0):
    torch.manual_seed(seed)
    x = torch.randn(512, 16)
    y = (x @ torch.randn(16, 4)).argmax(1)
    loader = DataLoader(TensorDataset(x[:384], y[:384]), batch_size=16, shuffle=True)
    val = DataLoader(TensorDataset(x[384:], y[384:]), batch_size=64)
    model = Tuned()
    nn.init.orthogonal_(model.backbone[0].weight)  # for weights that are loaded
    model.backbone.requires_grad_(False)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    body = [*model.neck.parameters(), *model.block.parameters()]
    optimizers = [torch.optim.AdamW(body, lr=3e-3), torch.optim.SGD(model.head.parameters(), lr=0.05, momentum=0.9)]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    history = []
    with watch(model, optimizers):
        for epoch in range(6):
            model.train()
            model.backbone.eval()
            for i, (inputs, labels) in enumerate(loader):
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = nn.functional.cross_entropy(model(inputs), labels)
                scaler.scale(loss / 2).backward()
                history.append(loss.item())
                if i % 2 == 1:
                    for optimizer in optimizers:
                        scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
                    for optimizer in optimizers:
                        scaler.step(optimizer)
                        optimizer.zero_grad()
                    scaler.update()
                    averaged.update_parameters(model)
            averaged.eval()
            with torch.no_grad():
                for inputs, labels in val:
                    averaged(inputs)
    return history
