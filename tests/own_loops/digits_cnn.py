"""A convolutional network with batch norm: Nesterov momentum, weight decay, CosineAnnealingLR by epoch, losses of torch.nn."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 5


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        x = self.stem(x)
        x = self.body(x)
        return self.head(x.mean((2, 3)))


def evaluate(net, loader, criterion):
    net.eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for images, labels in loader:
            total += criterion(net(images), labels).item() * len(images)
            count += len(images)
    return total / count


def train(watch, seed=0):
    torch.manual_seed(seed)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    train_loader = DataLoader(TensorDataset(images[:480], labels[:480]), batch_size=32, shuffle=True, drop_last=True)
    test_loader = DataLoader(TensorDataset(images[1200:1400], labels[1200:1400]), batch_size=50)
    net = Net()
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS)
    history = []
    with watch(net, optimizer) as run:
        for epoch in range(EPOCHS):
            net.train()
            running_loss = 0.0
            for images, labels in train_loader:
                outputs = net(images)
                loss = criterion(outputs, labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                running_loss += loss.item()
                history.append(loss.item())
            val_loss = evaluate(net, test_loader, criterion)
            run.log(validation_loss=val_loss)
            scheduler.step()
    return history
