"""Small models of every kind that lanes must train like plain autograd does, and some that cannot be traced."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from workbench.config import TrainConfig
from workbench.workloads.base import Workload
from workbench.workloads.losses import classification

FEATURES, CLASSES, EXAMPLES, BATCH = 16, 4, 32, 8


class Doing(nn.Module):
    """A linear head, what a function does before or after it, and whatever attributes that needs."""

    def __init__(self, do: Callable[[Any, Tensor], Tensor], width: int = FEATURES, **attributes: Any) -> None:
        super().__init__()
        self.do, self.head = do, nn.Linear(width, CLASSES)
        for name, value in attributes.items():
            if isinstance(value, Tensor):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.do(self, x)


def tied() -> nn.Module:
    """One weight under two names, used a third time transposed."""
    a, b = nn.Linear(FEATURES, 6), nn.Linear(FEATURES, 6)
    b.weight = a.weight
    return Doing(lambda m, x: m.head(torch.tanh(m.b(torch.tanh(m.a(x)) @ m.a.weight))), 6, a=a, b=b)


def buffered(m: Any, x: Tensor) -> Tensor:
    """A running mean written in place, a counter, and a buffer that is replaced by a new tensor."""
    if m.training:
        m.mean.lerp_(x.mean(0), 0.1)
        m.scale = 0.9 * m.scale + 0.1 * x.std()
        m.calls += 1
    return m.head((x - m.mean) / m.scale)


class Attending(nn.Module):
    """Self-attention over a sequence of features: written out, fused, or torch's own layer."""

    def __init__(self, kind: str, dropout: float = 0.0) -> None:
        super().__init__()
        self.kind, self.dropout = kind, dropout
        self.embed, self.head, self.norm = nn.Linear(4, 8), nn.Linear(8, CLASSES), nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 24)
        if kind == "layer":
            self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.embed(x.view(-1, 4, 4)))
        out: Tensor = self.head((self.layer(h) if self.kind == "layer" else self._mix(h)).mean(1))
        return out

    def _mix(self, h: Tensor) -> Tensor:
        q, k, v = self.qkv(h).view(-1, 4, 3, 2, 4).permute(2, 0, 3, 1, 4)
        if self.kind == "fused":
            p = self.dropout if self.training else 0.0
            mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        else:
            future = torch.ones(4, 4, dtype=torch.bool).triu(1)
            mixed = (q @ k.transpose(-2, -1) / 2).masked_fill(future, -math.inf).softmax(-1) @ v
        return h + mixed.transpose(1, 2).reshape(-1, 4, 8)


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


def in_place(m: Any, x: Tensor) -> Tensor:
    """Write into activations, as `nn.ReLU(inplace=True)` and masks do."""
    h = F.relu(m.body(x), inplace=True).clone()
    h[:, 0] = 1.0
    return m.head(h.mul_(0.5).add_(1))


def noisy(m: Any, x: Tensor) -> Tensor:
    """Draw in every way that a layer of one's own may draw."""
    h = torch.tanh(m.body(x))
    if m.training:
        h = h + 0.1 * torch.randn_like(h) + 0.1 * torch.rand(8, dtype=h.dtype)
        h = h * torch.bernoulli(torch.full_like(h, 0.7)) * torch.bernoulli(torch.sigmoid(h))
        h = F.dropout1d(h.unsqueeze(2), 0.3).squeeze(2) + torch.empty_like(h).uniform_(-0.1, 0.1)
    return m.head(F.dropout(h.t(), 0.2, m.training).t())


def conv() -> nn.Module:
    first = (nn.Unflatten(1, (1, 2, 8)), nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
    return nn.Sequential(
        *first, nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, CLASSES)
    )


def mlp(*extra: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), *extra, nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def frozen() -> nn.Module:
    net = mlp()
    for p in net[0].parameters():  # type: ignore[index]
        p.requires_grad_(False)
    return net


def body() -> nn.Module:
    return nn.Linear(FEATURES, 8)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "batch_norm": lambda: mlp(nn.BatchNorm1d(8)),
    "layer_norm": lambda: mlp(nn.LayerNorm(8)),
    "dropout": lambda: mlp(nn.Dropout(0.4)),
    "frozen": frozen,
    "tied": tied,
    "buffered": lambda: Doing(
        buffered, mean=torch.zeros(FEATURES), scale=torch.ones(()), calls=torch.zeros((), dtype=torch.int64)
    ),
    "conv": conv,
    "written_out_attention": lambda: Attending("written out"),
    "fused_attention_dropout": lambda: Attending("fused", 0.2),
    "encoder_layer": lambda: Attending("layer", 0.1),
    "embedding": lambda: Doing(lambda m, x: m.head(m.table((x > 0).long() + 2 * (x > 1).long()).mean(1)), 8, table=nn.Embedding(6, 8)),
    "lstm": lambda: Doing(lambda m, x: m.head(m.cells(x.view(-1, 4, 4))[0][:, -1]), 8, cells=nn.LSTM(4, 8, batch_first=True)),
    "caching": Caching,
    "in_place": lambda: Doing(in_place, 8, body=body()),
    "noisy": lambda: Doing(noisy, 8, body=body()),
    "spectral_norm": lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(body()), nn.Linear(8, CLASSES)),
    "unused": lambda: Doing(lambda m, x: m.head(x), spare=nn.Linear(3, 3)),
}  # fmt: skip


def branching(m: Any, x: Tensor) -> Tensor:
    h: Tensor = m.head(x)
    return h if h.sum() > 0 else -h


def counting(m: Any, x: Tensor) -> Tensor:
    m.calls += 1
    return m.head(x) * (1 + m.calls % 2)


class HiddenState(nn.Module):
    """Keeps a running mean in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.mean = nn.Linear(FEATURES, CLASSES), torch.zeros(FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean.to(x) + 0.1 * x.mean(0)
        out: Tensor = self.head(x - self.mean)
        return out


def writes_plain_tensor(m: Any, x: Tensor) -> Tensor:
    m.box[0].add_(1)
    return m.head(x)


def writes_weight(m: Any, x: Tensor) -> Tensor:
    m.head.weight.data.clamp_(-0.1, 0.1)
    return m.head(x)


def selecting(m: Any, x: Tensor) -> Tensor:
    out: Tensor = m.head(x)
    return out + out[out[:, 0] > 0].sum()


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "branching": (lambda: Doing(branching), r"reads the value of a tensor .*if h\.sum\(\) > 0"),
    "counting": (lambda: Doing(counting, calls=0), r"the attribute 'calls' of the model changes with every step"),
    "python_random": (lambda: Doing(lambda m, x: m.head(x) * (0.5 + random.random())), "draws from Python's or NumPy's"),
    "hidden_state": (HiddenState, r"the attribute 'mean' of the model changes with every step"),
    "plain_tensor": (lambda: Doing(writes_plain_tensor, box=[torch.zeros(FEATURES)]), "(a tensor that is no buffer|the attribute 'box')"),
    "writes_weight": (lambda: Doing(writes_weight), "writes into a parameter"),
    "selecting": (lambda: Doing(selecting), "a shape depends on the values of a tensor"),
}  # fmt: skip


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
