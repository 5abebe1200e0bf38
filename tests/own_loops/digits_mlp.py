"""A classifier with dropout: DataLoader, momentum, StepLR and an evaluation every epoch."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 6


def train(watch, seed=0):
    torch.manual_seed(seed)
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
    loader = DataLoader(TensorDataset(x[:640], y[:640]), batch_size=64, shuffle=True)
    val_loader = DataLoader(TensorDataset(x[1200:1500], y[1200:1500]), batch_size=100)
    encoder = nn.Sequential(nn.Linear(64, 32), nn.ReLU())
    head = nn.Sequential(nn.Dropout(0.1), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
    model = nn.Sequential(encoder, head)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    history = []
    with watch(model, optimizer) as run:
        for epoch in range(EPOCHS):
            model.train()
            total_loss = 0
            for inputs, targets in loader:
                optimizer.zero_grad()
                logits = model(inputs)
                loss = F.cross_entropy(logits, targets)
                loss.backward()
                optimizer.step()
                total_loss += loss.item()
                history.append(loss.item())
            scheduler.step()
            model.eval()
            correct = 0
            with torch.no_grad():
                for inputs, targets in val_loader:
                    correct += (model(inputs).argmax(1) == targets).sum().item()
            run.log(accuracy=correct / 300)
    return history
