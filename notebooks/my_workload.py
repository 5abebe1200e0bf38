"""Your model and your data, for 00_quickstart: put in your own, and keep the name `mine`."""

import torch
from sklearn.datasets import load_digits
from torch.utils.data import Dataset

import workbench as wb


class MyData(Dataset):  # your dataset: item k is (input, class)
    def __init__(self, rows):
        images, classes = load_digits(return_X_y=True)
        self.images = torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8)[rows]
        self.classes = torch.tensor(classes)[rows]

    def __len__(self):
        return len(self.classes)

    def __getitem__(self, k):
        return self.images[k], self.classes[k]


class MyModel(torch.nn.Module):  # your model: a number for each class, without a softmax
    def __init__(self):
        super().__init__()
        self.features = torch.nn.Conv2d(1, 8, kernel_size=3)
        self.head = torch.nn.Linear(8 * 6 * 6, 10)

    def forward(self, images):
        return self.head(self.features(images).relu().flatten(1))


rows = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
mine = wb.classification(
    name="mine",
    build_model=MyModel,  # called anew for each trial
    train_data=MyData(rows[:1400]),
    validation_data=MyData(rows[1400:]),  # examples that are not trained on
    config=wb.TrainConfig(peak_lr=0.005, total_steps=300, batch_size=32),  # what you train with today
)
