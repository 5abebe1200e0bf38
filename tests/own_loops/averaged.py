"""Averaged weights, evaluated on the average; its batch norm is recomputed on the training data at the end."""

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.data import DataLoader, TensorDataset


def train(watch, seed=0):
    torch.manual_seed(seed)
    x = torch.randn(512, 16)
    y = (x @ torch.randn(16, 4)).argmax(1)
    loader = DataLoader(TensorDataset(x[:384], y[:384]), batch_size=24, shuffle=True)
    val = DataLoader(TensorDataset(x[384:], y[384:]), batch_size=64)
    model = nn.Sequential(nn.Linear(16, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 4))
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    history = []
    with watch(model, optimizer):
        for epoch in range(4):
            model.train()
            for inputs, labels in loader:
                loss = nn.functional.cross_entropy(model(inputs), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                averaged.update_parameters(model)
                history.append(loss.item())
            averaged.eval()
            with torch.no_grad():
                for inputs, labels in val:
                    averaged(inputs)
        update_bn(loader, averaged)
    return history
