"""A variational autoencoder: a summed loss of two terms, noise in its forward pass."""

import torch
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(64, 32), nn.Linear(32, 4), nn.Linear(32, 4)
        self.fc3, self.fc4 = nn.Linear(4, 32), nn.Linear(32, 64)

    def forward(self, x):
        h = F.relu(self.fc1(x))
        mu, logvar = self.fc21(h), self.fc22(h)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mu, logvar


def loss_function(recon_x, x, mu, logvar):
    bce = F.binary_cross_entropy(recon_x, x, reduction="sum")
    kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return bce + kld


def train(watch, seed=0):
    torch.manual_seed(seed)
    x = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    train_loader = DataLoader(TensorDataset(x[:640]), batch_size=64, shuffle=True)
    test_loader = DataLoader(TensorDataset(x[1200:1400]), batch_size=64)
    model = VAE()
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    history = []
    with watch(model, optimizer):
        for epoch in range(6):
            model.train()
            for (data,) in train_loader:
                optimizer.zero_grad()
                recon_batch, mu, logvar = model(data)
                loss = loss_function(recon_batch, data, mu, logvar)
                loss.backward()
                optimizer.step()
                history.append(loss.item() / len(data))
            model.eval()
            with torch.no_grad():
                for (data,) in test_loader:
                    model(data)
    return history
