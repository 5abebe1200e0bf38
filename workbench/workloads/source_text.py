"""`source_text`: a byte-level transformer on the source of Python's standard library."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from workbench.config import TrainConfig
from workbench.workloads.base import Workload
from workbench.workloads.helpers import language_model
from workbench.workloads.source_data import source_data, text_hash

__all__ = ["Attention", "Block", "Transformer", "source_text", "text_hash"]


class Attention(nn.Module):
    """Causal self-attention with `heads` heads.

    Written out, because `scaled_dot_product_attention` has neither a second derivative nor lanes (vmap) on a CPU; at this
    length it is no faster.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to (batch, length, width); a position sees itself and those before it."""
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        scores = q @ k.transpose(-2, -1) / math.sqrt(width // self.heads)
        mixed = scores.masked_fill(future, -math.inf).softmax(-1) @ v
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class Block(nn.Module):
    """Attention and a two-layer network, each normalised before and added after."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to (batch, length, width)."""
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class Transformer(nn.Module):
    """Predicts the next byte at every position."""

    def __init__(
        self, *, vocabulary: int = 256, length: int = 64, width: int = 64, heads: int = 4, layers: int = 2
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.empty(length, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map bytes (batch, length) to logits (batch, length, vocabulary)."""
        x = self.token(tokens) + self.position[: tokens.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def source_text() -> Workload:
    """Return the workload; `text_hash()` says which text this Python has."""
    data = source_data(length=64)
    return language_model(
        name="source_text",
        build_model=Transformer,
        train_data=data.train,
        validation_data=data.validation,
        test_data=data.test,
        ignore_index=None,
        config=TrainConfig(optimizer="adam", peak_lr=2e-3, total_steps=2000, batch_size=8),
    )
