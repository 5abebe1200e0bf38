"""A model with nanoGPT's module names and shapes: fused `c_attn`, tied `lm_head`, logits and loss from one call."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class CausalSelfAttention(nn.Module):
    """`flash` takes torch's function, else the scores are written out."""

    def __init__(self, width: int, heads: int, *, flash: bool) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.flash, self.last = heads, flash, torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in self.c_attn(x).split(width, dim=2))
        scores = q @ k.transpose(-2, -1) / math.sqrt(k.size(-1))
        scores = scores.masked_fill(torch.ones(length, length).tril() == 0, -math.inf)
        self.last = scores.detach().max()  # the oracle
        if self.flash:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=0.1 * self.training, is_causal=True)
        else:
            y = F.dropout(F.softmax(scores, dim=-1), 0.1, self.training) @ v
        return self.c_proj(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, *, flash: bool) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width), CausalSelfAttention(width, heads, flash=flash)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class GPT(nn.Module):
    """`std` is that of its embeddings, 0.02 in nanoGPT; 1 is torch's own, with which tied logits are as large as the width."""

    def __init__(self, *, width: int = 32, layers: int = 2, heads: int = 4, length: int = 32, flash: bool = True, std: float = 0.02) -> None:  # fmt: skip
        super().__init__()
        parts: dict[str, Any] = {
            "wte": nn.Embedding(256, width), "wpe": nn.Embedding(length, width), "drop": nn.Dropout(0.1),
            "h": nn.ModuleList(Block(width, heads, flash=flash) for _ in range(layers)), "ln_f": nn.LayerNorm(width),
        }  # fmt: skip
        self.transformer = nn.ModuleDict(parts)
        self.lm_head = nn.Linear(width, 256, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight
        nn.init.normal_(self.lm_head.weight, std=std)
        self.last = torch.empty(0)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        parts: Any = self.transformer
        x = parts.drop(parts.wte(idx) + parts.wpe(torch.arange(idx.shape[1])))
        for block in parts.h:
            x = block(x)
        logits = self.lm_head(parts.ln_f(x))
        self.last = logits.detach()
        loss = None if targets is None else F.cross_entropy(logits.view(-1, 256), targets.view(-1))
        return logits, loss
