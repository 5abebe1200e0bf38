"""Three plain trainings as people write them, for `bench_diagnose.py --scripts`: `python plain_training.py mlp|cnn|gru [--lr LR] [--steps N] ...`."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Reader(nn.Module):
    """Predicts the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.rnn, self.head = (
            nn.Embedding(40, 64),
            nn.GRU(64, 128, batch_first=True),
            nn.Linear(128, 40),
        )

    def forward(self, tokens):
        return self.head(self.rnn(self.embedding(tokens))[0]).transpose(1, 2)


parser = argparse.ArgumentParser()
parser.add_argument("kind", choices=("mlp", "cnn", "gru"))
parser.add_argument("--lr", type=float, default=1.0)  # times its own
parser.add_argument("--steps", type=int)
parser.add_argument("--warmup", type=int, default=0)
parser.add_argument("--clip", type=float)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

torch.manual_seed(0)
if args.kind == "gru":
    chain = torch.distributions.Categorical(logits=3 * torch.randn(40, 40))
    tokens = [torch.randint(40, (4000,))]
    for _ in range(33):
        tokens.append(torch.multinomial(chain.probs[tokens[-1]], 1).squeeze(1))
    text = torch.stack(tokens, 1)
    inputs, targets, batch, steps = text[:, :-1], text[:, 1:], 32, 300
else:
    shape = (256,) if args.kind == "mlp" else (3, 16, 16)
    inputs = torch.randn(10_000, *shape)
    teacher = nn.Sequential(nn.Flatten(), nn.Linear(inputs[0].numel(), 32), nn.Tanh(), nn.Linear(32, 10))
    targets = (teacher(inputs) + 0.05 * torch.randn(10_000, 10)).argmax(1).detach()
    batch, steps = (128, 700) if args.kind == "mlp" else (64, 700)

torch.manual_seed(args.seed)
if args.kind == "mlp":
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4 * args.lr)
elif args.kind == "cnn":
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(2048, 10)
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002 * args.lr, momentum=0.9)
else:
    model = Reader()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 * args.lr)
rates = [group["lr"] for group in optimizer.param_groups]
loader = DataLoader(TensorDataset(inputs, targets), batch_size=batch, shuffle=True)
step, steps = 0, args.steps or steps
while step < steps:
    for x, y in loader:
        for group, lr in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = lr * min(step / args.warmup, 1.0) if args.warmup else lr
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        if args.clip:
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        step += 1
        if step % 100 == 0:
            print(f"step {step} loss {loss.item():.4f}")
        if step == steps:
            break
