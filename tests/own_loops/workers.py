"""A loader with worker processes whose dataset augments: NumPy, `random` and a generator made for each example."""

import random

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset


def worker_init(worker_id):
    np.random.seed(torch.initial_seed() % 2**32)


class Digits(Dataset):
    def __init__(self):
        digits = load_digits()
        self.images, self.targets = digits.images.astype(np.float32) / 16, digits.target
        self.kept = np.random.default_rng(0)  # chooses once, here
        self.order = self.kept.permutation(256)

    def __len__(self):
        return 256

    def __getitem__(self, i):
        image = np.roll(self.images[self.order[i]], random.randint(-1, 1), 1)
        image = image + 0.05 * np.random.randn(8, 8).astype(np.float32)
        return torch.from_numpy(image).flatten(), int(self.targets[self.order[i]])


def train(watch, seed=0):
    torch.manual_seed(seed)
    loader = DataLoader(Digits(), batch_size=32, shuffle=True, num_workers=2, worker_init_fn=worker_init)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    criterion = nn.CrossEntropyLoss()
    history = []
    with watch(model, optimizer):
        for epoch in range(3):
            for inputs, targets in loader:
                optimizer.zero_grad()
                loss = criterion(model(inputs), targets)
                loss.backward()
                optimizer.step()
                history.append(loss.item())
    return history
