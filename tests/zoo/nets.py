"""The models of the zoo, as small as they come."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.workloads.analytic import Valley


def mlp(*sizes: int, act: type[nn.Module] = nn.ReLU, squeeze: bool = False, dropout: float = 0.0) -> nn.Sequential:
    """Return linear layers with `act` between them; `squeeze` takes the last dimension of size 1 away."""
    layers: list[nn.Module] = []
    for k, (a, b) in enumerate(itertools.pairwise(sizes)):
        layers += [nn.Linear(a, b)]
        if k < len(sizes) - 2:
            layers += [act(), *([nn.Dropout(dropout)] if dropout else [])]
    return nn.Sequential(*layers, *([nn.Flatten(0)] if squeeze else []))


def cnn(*, norm: bool, act: type[nn.Module] = nn.ReLU, width: int = 12, momentum: float = 0.1) -> nn.Sequential:
    """Return two convolutions over (1, 8, 8), with or without batch norm, and a linear layer to 10 classes."""

    def block(a: int, b: int) -> list[nn.Module]:
        normed = [nn.BatchNorm2d(b, momentum=momentum)] if norm else []
        return [nn.Conv2d(a, b, 3, padding=1, bias=not norm), *normed, act()]

    return nn.Sequential(*block(1, width), nn.MaxPool2d(2), *block(width, 2 * width), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * width, 10))  # fmt: skip


class Residual(nn.Module):
    """`x + f(x)`."""

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


def resnet(width: int = 12, blocks: int = 2) -> nn.Sequential:
    """Return a residual CNN with batch norm over (1, 8, 8)."""

    def branch() -> nn.Module:
        conv = lambda: nn.Conv2d(width, width, 3, padding=1, bias=False)  # noqa: E731
        return nn.Sequential(nn.BatchNorm2d(width), nn.ReLU(), conv(), nn.BatchNorm2d(width), nn.ReLU(), conv())

    stem = nn.Conv2d(1, width, 3, padding=1, stride=2, bias=False)
    body = [Residual(branch()) for _ in range(blocks)]
    return nn.Sequential(stem, *body, nn.BatchNorm2d(width), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * width, 10))  # fmt: skip


def deep_mlp(inputs: int, outputs: int, *, width: int, blocks: int, norm: bool = True, residual: bool = True) -> nn.Sequential:  # fmt: skip
    """Return `blocks` pre-norm residual blocks; without norm and residual, a plain stack of linear layers."""

    def block() -> nn.Module:
        parts = [*([nn.LayerNorm(width)] if norm else []), nn.Linear(width, width), nn.ReLU()]
        if residual:
            parts.append(nn.Linear(width, width))
        return Residual(nn.Sequential(*parts)) if residual else nn.Sequential(*parts)

    return nn.Sequential(nn.Linear(inputs, width), *[block() for _ in range(blocks)], nn.Linear(width, outputs))


class Recurrent(nn.Module):
    """Embedding (or numbers as they are), a recurrent layer, a head on the last state (or on every one)."""

    def __init__(self, cell: type[nn.Module], inputs: int, width: int, outputs: int, *, tokens: int = 0, every: bool = False) -> None:  # fmt: skip
        super().__init__()
        self.embed = nn.Embedding(tokens, inputs) if tokens else nn.Identity()
        self.rnn = cell(inputs, width, batch_first=True)
        self.head = nn.Linear(width, outputs)
        self.every = every

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.rnn(self.embed(x))
        out = self.head(states if self.every else states[:, -1])
        return out.squeeze(-1) if out.shape[-1] == 1 else out


class Attention(nn.Module):
    """Self-attention with `heads` heads, causal or not."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, n, w = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / math.sqrt(w // self.heads)
        if self.causal:
            scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -math.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, n, w))


class Block(nn.Module):
    """Attention and a two-layer network; the norm before each branch, or after each addition."""

    def __init__(self, width: int, heads: int, causal: bool, post: bool) -> None:
        super().__init__()
        self.post = post
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        if self.post:
            x = self.norm1(x + self.attention(x))
            return self.norm2(x + self.mlp(x))
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Tokens in; logits at every position (causal), or one row of them from the mean over positions."""

    def __init__(self, tokens: int, outputs: int, *, width: int, layers: int, length: int, causal: bool, post: bool = False, tied: bool = False) -> None:  # fmt: skip
        super().__init__()
        self.token = nn.Embedding(tokens, width)
        self.position = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(*[Block(width, 2, causal, post) for _ in range(layers)])
        self.norm = nn.Identity() if post else nn.LayerNorm(width)
        self.head = nn.Linear(width, outputs, bias=False)
        self.causal = causal
        nn.init.normal_(self.token.weight, std=0.02 if tied else 0.5)
        if tied:
            self.head.weight = self.token.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.blocks(self.token(x) + self.position[: x.shape[1]]))
        return self.head(h if self.causal else h.mean(1))


class Autoencoder(nn.Module):
    """Encoder and decoder; with `sampled`, the code is drawn (a VAE), and outputs are (reconstruction, mean, log variance)."""

    def __init__(self, inputs: int, hidden: int, code: int, *, sampled: bool) -> None:
        super().__init__()
        self.sampled = sampled
        self.encode = mlp(inputs, hidden, 2 * code if sampled else code)
        self.decode = mlp(code, hidden, inputs)

    def forward(self, x: Tensor) -> Any:
        code = self.encode(x)
        if not self.sampled:
            return self.decode(code)
        mean, log_var = code.chunk(2, -1)
        return self.decode(mean + (0.5 * log_var).exp() * torch.randn_like(mean)), mean, log_var


class TwoTowers(nn.Module):
    """Two views of an example, each to a unit vector; outputs (batch, batch) similarities over a temperature."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.tower = mlp(inputs, width, 16)

    def forward(self, views: Sequence[Tensor]) -> Tensor:
        a, b = (F.normalize(self.tower(view), dim=-1) for view in views)
        return a @ b.T / 0.2


class Mixture(nn.Module):
    """A mixture of Gaussians; outputs the log density of each row."""

    def __init__(self, components: int, dims: int) -> None:
        super().__init__()
        self.means = nn.Parameter(torch.randn(components, dims))
        self.log_scale = nn.Parameter(torch.zeros(components, dims))
        self.logits = nn.Parameter(torch.zeros(components))

    def forward(self, x: Tensor) -> Tensor:
        z = (x[:, None] - self.means) * (-self.log_scale).exp()
        each = -0.5 * z.square().sum(-1) - self.log_scale.sum(-1) - 0.5 * x.shape[1] * math.log(2 * math.pi)
        return torch.logsumexp(each + self.logits.log_softmax(0), -1)


class Factors(nn.Module):
    """Matrix factorisation: users and items as vectors, with biases."""

    def __init__(self, users: int, items: int, width: int) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(users, width), nn.Embedding(items, width)
        self.user_bias, self.item_bias = nn.Embedding(users, 1), nn.Embedding(items, 1)
        for table in (self.user, self.item, self.user_bias, self.item_bias):
            nn.init.normal_(table.weight, std=0.3)

    def forward(self, pairs: Tensor) -> Tensor:
        u, i = pairs[:, 0], pairs[:, 1]
        return (self.user(u) * self.item(i)).sum(-1) + self.user_bias(u)[:, 0] + self.item_bias(i)[:, 0]


class Steep(nn.Module):
    """Returns the loss of each example: that of `Valley`, and how far its last number is from a linear function of the others."""

    def __init__(self, inputs: int = 0, steepness: float = 201.0, slow: float = 20.0) -> None:
        super().__init__()
        self.valley = Valley(steepness=steepness, slow=slow, slow_curvature=0.1).float()
        self.weight, self.mean = nn.Parameter(torch.zeros(inputs)), nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        fit = x[:, :-1] @ self.weight + self.mean
        return self.valley(x) + 0.5 * (x[:, -1] - fit).square()


def layers_of(model: nn.Module, kind: type | tuple[type, ...] = (nn.Linear, nn.Conv2d)) -> list[Any]:
    """Return the layers of a kind in their order."""
    return [m for m in model.modules() if isinstance(m, kind)]


Build = Callable[[], nn.Module]
