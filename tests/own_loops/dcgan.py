"""A GAN with two optimizers in the order of pytorch/examples."""

import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset


def train(watch, seed=0):
    torch.manual_seed(seed)
    nz = 8
    real = torch.randn(320, 2) * 0.3 + torch.tensor([1.0, -1.0])
    dataloader = DataLoader(TensorDataset(real), batch_size=32, shuffle=True)
    netG = nn.Sequential(nn.Linear(nz, 16), nn.BatchNorm1d(16), nn.ReLU(True), nn.Linear(16, 2))
    netD = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1), nn.Sigmoid())
    criterion = nn.BCELoss()
    fixed_noise = torch.randn(16, nz)
    optimizerD = optim.Adam(netD.parameters(), lr=0.0002, betas=(0.5, 0.999))
    optimizerG = optim.Adam(netG.parameters(), lr=0.0002, betas=(0.5, 0.999))
    history = []
    with watch([netD, netG], [optimizerD, optimizerG]):
        for epoch in range(6):
            for i, data in enumerate(dataloader, 0):
                netD.zero_grad()
                real_cpu = data[0]
                size = real_cpu.size(0)
                label = torch.full((size,), 1.0)
                output = netD(real_cpu).view(-1)
                errD_real = criterion(output, label)
                errD_real.backward()
                noise = torch.randn(size, nz)
                fake = netG(noise)
                label.fill_(0.0)
                output = netD(fake.detach()).view(-1)
                errD_fake = criterion(output, label)
                errD_fake.backward()
                errD = errD_real + errD_fake
                optimizerD.step()
                netG.zero_grad()
                label.fill_(1.0)
                output = netD(fake).view(-1)
                errG = criterion(output, label)
                errG.backward()
                optimizerG.step()
                history.append(errD.item())
                if i % 5 == 0:
                    with torch.no_grad():
                        fake = netG(fixed_noise).detach()
    return history
