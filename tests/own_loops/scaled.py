"""Mixed precision with a GradScaler whose first scale overflows, warmup by LambdaLR in updates."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train(watch, seed=0):
    torch.manual_seed(seed)
    x = torch.randn(512, 20)
    y = (x[:, :4] @ torch.randn(4, 3)).argmax(1)
    loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 10))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18)
    criterion = nn.CrossEntropyLoss()
    history = []
    with watch(model, optimizer):
        for epoch in range(4):
            for inputs, labels in loader:
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = criterion(model(inputs), labels)
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
                scaler.step(optimizer)
                scale = scaler.get_scale()
                scaler.update()
                if scaler.get_scale() >= scale:
                    scheduler.step()
                history.append(loss.item())
    return history
