"""A recommender: sparse embeddings with SparseAdam, the rest with Adam."""

import torch
from torch import nn


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.users, self.items = nn.Embedding(40, 8, sparse=True), nn.Embedding(30, 8, sparse=True)
        self.mlp = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, u, i):
        return self.mlp(torch.cat([self.users(u), self.items(i)], 1)).squeeze(1)


def train(watch, seed=0):
    torch.manual_seed(seed)
    users, items = torch.randint(40, (1024,)), torch.randint(30, (1024,))
    ratings = ((users + items) % 2).float()
    model = Recommender()
    sparse = torch.optim.SparseAdam([*model.users.parameters(), *model.items.parameters()], lr=1e-2)
    dense = torch.optim.Adam(model.mlp.parameters(), lr=1e-2)
    criterion = nn.BCEWithLogitsLoss()
    history = []
    with watch(model, [dense, sparse]):
        for step in range(60):
            pick = torch.randint(1024, (64,))
            loss = criterion(model(users[pick], items[pick]), ratings[pick])
            dense.zero_grad()
            sparse.zero_grad()
            loss.backward()
            dense.step()
            sparse.step()
            history.append(loss.item())
    return history
