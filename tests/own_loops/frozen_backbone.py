"""Fine-tuning of a head: the backbone is frozen and in evaluation mode, its dropout and batch norm with it."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Tuned(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(16, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(24, 4)

    def forward(self, x):
        return self.head(self.backbone(x))


def train(watch, seed=0):
    torch.manual_seed(seed)
    x = torch.randn(512, 16)
    y = (x @ torch.randn(16, 4)).argmax(1)
    loader = DataLoader(TensorDataset(x[:384], y[:384]), batch_size=24, shuffle=True)
    val = DataLoader(TensorDataset(x[384:], y[384:]), batch_size=64)
    model = Tuned()
    nn.init.orthogonal_(model.backbone[0].weight)  # for weights that are loaded
    for parameter in model.backbone.parameters():
        parameter.requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    history = []
    with watch(model, optimizer):
        for epoch in range(4):
            model.train()
            model.backbone.eval()
            for inputs, labels in loader:
                loss = nn.functional.cross_entropy(model(inputs), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                history.append(loss.item())
            model.eval()
            with torch.inference_mode():
                for inputs, labels in val:
                    model(inputs)
    return history
