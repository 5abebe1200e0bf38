"""Small models of every kind that lanes must train like plain autograd does, and some that cannot be traced."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from workbench.config import TrainConfig
from workbench.workloads.base import Workload
from workbench.workloads.losses import classification

FEATURES, CLASSES, EXAMPLES, BATCH = 16, 4, 32, 8


class Tied(nn.Module):
    """One weight under two names, used a third time transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(FEATURES, 6), nn.Linear(FEATURES, 6), nn.Linear(6, CLASSES)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.b(torch.tanh(self.a(x)) @ self.a.weight)))
        return out


class Buffered(nn.Module):
    """A running mean written in place, a counter, and a buffer that is replaced by a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(FEATURES))
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.mean(0), 0.1)
            self.scale = 0.9 * self.scale + 0.1 * x.std()
            self.calls += 1
        out: Tensor = self.head((x - self.mean) / self.scale)
        return out


class Remembering(nn.Module):
    """Moves one buffer into another, and swaps two more."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("now", "then", "left", "right"):
            self.register_buffer(name, torch.randn(FEATURES))
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.then, self.now = self.now, x.mean(0)
            self.left, self.right = self.right, self.left
        out: Tensor = self.head(x + self.then * self.left - self.right)
        return out


class Attending(nn.Module):
    """Self-attention over a sequence of features: written out, fused, or torch's own layer."""

    def __init__(self, kind: str, dropout: float = 0.0) -> None:
        super().__init__()
        self.kind, self.dropout = kind, dropout
        self.embed, self.head, self.norm = nn.Linear(4, 8), nn.Linear(8, CLASSES), nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 24)
        if kind == "layer":
            self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=True)
        elif kind == "multihead":
            self.layer = nn.MultiheadAttention(8, 2, dropout=dropout, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x.view(-1, 4, 4))
        out: Tensor = self.head(self._mix(self.norm(h)).mean(1))
        return out

    def _mix(self, h: Tensor) -> Tensor:
        if self.kind == "layer":
            return self.layer(h)
        if self.kind == "multihead":
            mixed: Tensor = self.layer(h, h, h, need_weights=False)[0]
            return h + mixed
        q, k, v = self.qkv(h).view(-1, 4, 3, 2, 4).permute(2, 0, 3, 1, 4)
        if self.kind == "fused":
            p = self.dropout if self.training else 0.0
            mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        else:
            future = torch.ones(4, 4, dtype=torch.bool).triu(1)
            mixed = (q @ k.transpose(-2, -1) / 2).masked_fill(future, -math.inf).softmax(-1) @ v
        return h + mixed.transpose(1, 2).reshape(-1, 4, 8)


class Embedding(nn.Module):
    """Looks tokens up, and tells them apart by their sign."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(6, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x > 0).long() + 2 * (x > 1).long()
        out: Tensor = self.head(self.table(tokens).mean(1))
        return out


class Recurrent(nn.Module):
    """An LSTM or GRU over the features, four at a time."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU] = nn.LSTM) -> None:
        super().__init__()
        self.cells, self.head = kind(4, 8, batch_first=True), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.cells(x.view(-1, 4, 4))[0][:, -1])
        return out


class Unused(nn.Module):
    """Has a parameter that the loss never sees."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.spare = nn.Linear(FEATURES, CLASSES), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x)
        return out


class Caching(nn.Module):
    """Fills a table at its first call, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(0.5, 1.5, FEATURES, dtype=x.dtype)
        out: Tensor = self.head(x * self.table)
        return out


class InPlace(nn.Module):
    """Writes into its activations, as `nn.ReLU(inplace=True)` and masks do."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.body(x), inplace=True)
        h = h.clone()
        h[:, 0] = 1.0
        h.mul_(0.5).add_(1)
        out: Tensor = self.head(h)
        return out


class Noisy(nn.Module):
    """Draws in every way that a layer of one's own may draw."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.body(x))
        if self.training:
            h = h + 0.1 * torch.randn_like(h) + 0.1 * torch.rand(8, dtype=h.dtype)
            h = h * torch.bernoulli(torch.full_like(h, 0.7)) * torch.bernoulli(torch.sigmoid(h))
            h = F.dropout1d(h.unsqueeze(2), 0.3).squeeze(2) + torch.empty_like(h).uniform_(-0.1, 0.1)
        out: Tensor = self.head(F.dropout(h.t(), 0.2, self.training).t())
        return out


def conv(*, norm: Callable[[], nn.Module], pool: nn.Module | None = None) -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 8)),
        nn.Conv2d(1, 4, 3, padding=1, bias=False),
        norm(),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.ReLU(),
        pool or nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16, CLASSES),
    )


def mlp(*extra: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), *extra, nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def frozen() -> nn.Module:
    net = mlp()
    for p in net[0].parameters():  # type: ignore[index]
        p.requires_grad_(False)
    return net


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "batch_norm": lambda: mlp(nn.BatchNorm1d(8)),
    "layer_norm": lambda: mlp(nn.LayerNorm(8)),
    "dropout": lambda: mlp(nn.Dropout(0.4)),
    "dropout_half": lambda: mlp(nn.Dropout()),
    "alpha_dropout": lambda: mlp(nn.AlphaDropout(0.3)),
    "frozen": frozen,
    "tied": Tied,
    "buffered": Buffered,
    "remembering": Remembering,
    "conv": lambda: conv(norm=lambda: nn.BatchNorm2d(4)),
    "group_norm": lambda: conv(norm=lambda: nn.GroupNorm(2, 4), pool=nn.AvgPool2d(2)),
    "channel_dropout": lambda: conv(norm=lambda: nn.Dropout2d(0.3)),
    "written_out_attention": lambda: Attending("written out"),
    "fused_attention": lambda: Attending("fused"),
    "fused_attention_dropout": lambda: Attending("fused", 0.2),
    "multihead": lambda: Attending("multihead"),
    "encoder_layer": lambda: Attending("layer", 0.1),
    "embedding": Embedding,
    "lstm": Recurrent,
    "gru": lambda: Recurrent(nn.GRU),
    "caching": Caching,
    "in_place": InPlace,
    "noisy": Noisy,
    "weight_norm": lambda: nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(FEATURES, 8)), nn.Linear(8, CLASSES)
    ),
    "spectral_norm": lambda: nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(FEATURES, 8)), nn.Linear(8, CLASSES)
    ),
    "unused": Unused,
}


class Branching(nn.Module):
    """Decides by the values that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.head(x)
        return h if h.sum() > 0 else -h


class Counting(nn.Module):
    """Decides by how often it was called, which it counts itself."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.calls = nn.Linear(FEATURES, CLASSES), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.head(x) * (1 + self.calls % 2)
        return out


class PythonRandom(nn.Module):
    """Draws from Python's random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x) * (0.5 + random.random())
        return out


class HiddenState(nn.Module):
    """Keeps a running mean in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.mean = nn.Linear(FEATURES, CLASSES), torch.zeros(FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean.to(x) + 0.1 * x.mean(0)
        out: Tensor = self.head(x - self.mean)
        return out


class WritesPlainTensor(nn.Module):
    """Writes into a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.box = nn.Linear(FEATURES, CLASSES), [torch.zeros(FEATURES)]

    def forward(self, x: Tensor) -> Tensor:
        self.box[0].add_(1)
        out: Tensor = self.head(x)
        return out


class WritesWeight(nn.Module):
    """Clips its own weight in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        self.head.weight.data.clamp_(-0.1, 0.1)
        out: Tensor = self.head(x)
        return out


class Selecting(nn.Module):
    """Takes the examples that a mask chooses: how many, the data decide."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x)
        return out + out[out[:, 0] > 0].sum()


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "branching": (Branching, r"reads the value of a tensor .*if h\.sum\(\) > 0"),
    "counting": (Counting, r"the attribute 'calls' of the model changes with every step"),
    "python_random": (PythonRandom, "draws from Python's or NumPy's random numbers"),
    "hidden_state": (HiddenState, r"the attribute 'mean' of the model changes with every step"),
    "plain_tensor": (WritesPlainTensor, "(writes into a tensor that is no buffer|the attribute 'box')"),
    "writes_weight": (WritesWeight, "writes into a parameter"),
    "selecting": (Selecting, "a shape depends on the values of a tensor"),
}


class Dicts(Dataset[dict[str, Any]]):
    """Items are dicts, nested, with a constant among the tensors."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input": {"x": self.x[index]}, "label": self.y[index]}


def lane_workload(
    build: Callable[[], nn.Module], *, dtype: torch.dtype = torch.float64, name: str = "lanes", **config: Any
) -> Workload:
    """Return a workload around a model of `FEATURES` inputs and `CLASSES` outputs."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(EXAMPLES, FEATURES, generator=generator, dtype=torch.float64).to(dtype)
    y = torch.randint(0, CLASSES, (EXAMPLES,), generator=generator)
    base: dict[str, Any] = {"peak_lr": 0.1, "total_steps": 4, "batch_size": BATCH, "eval_batch_size": 12}
    return classification(
        name=name,
        build_model=lambda: build().to(dtype),
        train_data=TensorDataset(x, y),
        validation_data=TensorDataset(x[:20], y[:20]),
        config=TrainConfig(**base | config),
    )
