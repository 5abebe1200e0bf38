"""A sine wave fitted by LBFGS on the whole data, in double precision, as pytorch/examples time_sequence_prediction."""

import torch
from torch import nn


def train(watch, seed=0):
    torch.manual_seed(seed)
    x = torch.linspace(-2, 2, 64, dtype=torch.float64).unsqueeze(1)
    y = torch.sin(2 * x)
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    criterion = nn.MSELoss()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
    history = []
    with watch(model, optimizer):
        for step in range(20):

            def closure():
                optimizer.zero_grad()
                loss = criterion(model(x), y)
                loss.backward()
                return loss

            history.append(optimizer.step(closure).item())
    return history
