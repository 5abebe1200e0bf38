"""Regression of a series with a GRU: Adam, clipping, OneCycleLR by update, a state that is carried and detached."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 4


class Forecast(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(1, 16, num_layers=2, batch_first=True, dropout=0.05)
        self.out = nn.Linear(16, 1)

    def forward(self, x, h=None):
        y, h = self.rnn(x, h)
        return self.out(y[:, -1]), h


def train(watch, seed=0):
    torch.manual_seed(seed)
    phase = torch.rand(512, 1) * 6.28
    series = torch.sin(phase + 0.3 * torch.arange(13)) + 0.02 * torch.randn(512, 13)
    x, y = series[:, :12].unsqueeze(-1), series[:, 12]
    loader = DataLoader(TensorDataset(x[:384], y[:384]), batch_size=24, shuffle=True)
    val = DataLoader(TensorDataset(x[384:], y[384:]), batch_size=32)
    model = Forecast()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=EPOCHS * len(loader))
    criterion = nn.MSELoss()
    history, hidden, total = [], None, 0.0
    with watch(model, optimizer):
        for epoch in range(EPOCHS):
            model.train()
            for xb, yb in loader:
                optimizer.zero_grad()
                prediction, hidden = model(xb, hidden)
                hidden = hidden.detach()
                loss = criterion(prediction.squeeze(-1), yb)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=10.0)
                optimizer.step()
                scheduler.step()
                total += loss.item()
                history.append(loss.item())
            model.eval()
            with torch.no_grad():
                for xb, yb in val:
                    prediction, _ = model(xb)
    return history
