"""`source_text`: a byte-level transformer on the source of Python's standard library, before or after its norms."""

import hashlib
import math
import sysconfig
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from workbench.config import TrainConfig
from workbench.errors import DataError, UsageError, nearest
from workbench.workloads.base import Workload
from workbench.workloads.losses import language_model

MAX_BYTES = 2_000_000
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "__pycache__"}
EVERY = 20  # of twenty files one is for validation and one for testing


class SourceText(NamedTuple):
    """Three splits by file, so that no window is cut from a file of another split, and the hash of all text."""

    train: TensorDataset
    validation: TensorDataset
    test: TensorDataset
    sha256: str


@cache
def source_data(*, length: int = 64, max_bytes: int = MAX_BYTES) -> SourceText:
    """Return windows of the text; an item is (inputs, targets), bytes as int64 of shape (length,), targets one ahead.

    Windows do not overlap; files are taken in the order of their paths until the text is `max_bytes` long.

    Raises:
        DataError: the standard library's source is not there.
    """
    files = _read_files(max_bytes)
    digest = hashlib.sha256(b"".join(files)).hexdigest()
    splits: list[TensorDataset] = []
    for places in (range(EVERY - 2), (EVERY - 2,), (EVERY - 1,)):
        text = b"".join(text for i, text in enumerate(files) if i % EVERY in places)
        count = (len(text) - 1) // length
        tokens = torch.from_numpy(np.frombuffer(text, dtype=np.uint8)[: count * length + 1].astype(np.int64))
        split = TensorDataset(tokens[:-1].view(count, length), tokens[1:].view(count, length))
        setattr(split, "sha256", digest)  # noqa: B010 - the record keeps the hash of a dataset that knows its own
        splits.append(split)
    return SourceText(splits[0], splits[1], splits[2], digest)


def _read_files(max_bytes: int) -> list[bytes]:
    root = Path(sysconfig.get_path("stdlib"))
    paths = [path for path in root.rglob("*.py") if not SKIPPED.intersection(path.relative_to(root).parts)]
    files: list[bytes] = []
    total = 0
    for path in sorted(paths, key=lambda path: path.relative_to(root).as_posix()):
        text = path.read_bytes()[: max_bytes - total]
        files.append(text)
        total += len(text)
        if total >= max_bytes:
            break
    if len(files) < EVERY:
        raise DataError(
            f"found {len(files)} source files of the standard library in {root} within max_bytes={max_bytes}, and the "
            f"three splits need at least {EVERY}. Raise max_bytes, install Python with its source, or take another workload."
        )
    return files


Placement = Literal["pre", "after_add"]


class Attention(nn.Module):
    """Causal self-attention with `heads` heads.

    Written out, because `scaled_dot_product_attention` has neither a second derivative nor lanes (vmap) on a CPU; at this
    length it is no faster.
    """

    def __init__(self, width: int, heads: int, *, qk_norm: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.q_norm, self.k_norm = (nn.LayerNorm(width // heads) if qk_norm else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to (batch, length, width); a position sees itself and those before it."""
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        scores = self.q_norm(q) @ self.k_norm(k).transpose(-2, -1) / math.sqrt(width // self.heads)
        mixed = scores.masked_fill(future, -math.inf).softmax(-1) @ v
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class Block(nn.Module):
    """Attention and a two-layer network, each added to what it gets, with a layer norm where `norm` says."""

    def __init__(self, width: int, heads: int, norm: Placement = "pre", *, qk_norm: bool = False) -> None:
        super().__init__()
        self.placement = norm
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, qk_norm=qk_norm)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to (batch, length, width)."""
        if self.placement == "after_add":
            x = self.norm1(x + self.attention(x))
            out: Tensor = self.norm2(x + self.mlp(x))
        else:
            x = x + self.attention(self.norm1(x))
            out = x + self.mlp(self.norm2(x))
        return out


class Transformer(nn.Module):
    """Predicts the next byte at every position."""

    def __init__(
        self,
        *,
        vocabulary: int = 256,
        length: int = 64,
        width: int = 64,
        heads: int = 4,
        layers: int = 2,
        norm: Placement = "pre",
        init_std: float = 0.02,
        qk_norm: bool = False,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.empty(length, width))
        self.blocks = nn.Sequential(*(Block(width, heads, norm, qk_norm=qk_norm) for _ in range(layers)))
        self.norm = nn.LayerNorm(width) if norm == "pre" else nn.Identity()  # each block ends with one
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.token.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=init_std)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map bytes (batch, length) to logits (batch, length, vocabulary)."""
        x = self.token(tokens) + self.position[: tokens.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def source_text(
    *,
    layers: int = 2,
    width: int = 64,
    length: int = 64,
    norm: Placement = "pre",
    init_std: float = 0.02,
    heads: int = 4,
    qk_norm: bool = False,
    z_loss: float = 0.0,
    tied: bool = False,
    peak_lr: float = 2e-3,
    total_steps: int = 2000,
) -> Workload:
    """Return the workload; `source_data().sha256` says which text this Python has.

    Args:
        width: of every position, a multiple of `heads`.
        length: bytes a window predicts.
        norm: "pre": x + f(Norm(x)); "after_add": Norm(x + f(x)) (F2.7), as in the first transformers.
        init_std: deviation of the weights at the start.
        qk_norm: a layer norm of each head's queries and keys, which bounds the attention logits (Dehghani et al. 2023,
            arXiv:2302.05442).
        z_loss: coefficient of log Z squared in the gradient, see `language_model`.
        tied: the output layer's weight is that of the embedding.

    Raises:
        UsageError: an option is out of its range.
    """
    for name, count, step in (
        ("layers", layers, 1),
        ("heads", heads, 1),
        ("width", width, heads),
        ("length", length, 1),
    ):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1 or count % step:
            multiple = f", and a multiple of {step}" * (step != 1)
            raise UsageError(f"{name}={count!r} must be an integer above 0{multiple}.")
    if norm not in get_args(Placement):
        raise UsageError(f"norm={norm!r} is not known.{nearest(norm, get_args(Placement))}")
    if not (init_std > 0 and math.isfinite(init_std)):
        raise UsageError(f"init_std={init_std!r} must be a finite number above 0; 0.02 is usual for this model.")
    data = source_data(length=length)
    changed = [f"{name}{value}" for name, value, usual in (
        ("layers", layers, 2), ("width", width, 64), ("length", length, 64), ("heads", heads, 4),
    ) if value != usual]  # fmt: skip
    changed += [norm] * (norm != "pre") + [f"std{init_std:g}"] * (init_std != 0.02) + ["qk_norm"] * qk_norm
    changed += [f"z_loss{z_loss:g}"] * (z_loss > 0) + ["tied"] * tied
    shape: dict[str, Any] = {"length": length, "width": width, "layers": layers, "norm": norm, "init_std": init_std}
    shape |= {"heads": heads, "qk_norm": qk_norm, "tied": tied}
    return language_model(
        name="_".join(["source_text", *changed]),
        build_model=lambda: Transformer(**shape),
        train_data=data.train,
        validation_data=data.validation,
        test_data=data.test,
        ignore_index=None,
        z_loss=z_loss,
        config=TrainConfig(optimizer="adam", peak_lr=peak_lr, total_steps=total_steps, batch_size=8),
    )


def source_lm(*, layers: int = 2, width: int = 96, total_steps: int = 400, **options: Any) -> Workload:
    """Return the small language model that is trained as large ones are: AdamW with beta2 0.95, clipping at 1, warmup, cosine.

    Parameters by (layers, width): 0.3M (2, 96), 1M (4, 128), 3M (6, 192), 10M (8, 320). A run of the smallest takes seconds on one core.

    Args:
        layers: number of blocks.
        total_steps: of which the first tenth is the warmup (Wortsman et al. 2023, arXiv:2309.14322, take 5 %).
        **options: the others of `source_text`, such as qk_norm=True or z_loss=1e-4.
    """
    workload = source_text(layers=layers, width=width, total_steps=total_steps, **options)
    config = workload.config.replace(
        optimizer="adamw", beta2=0.95, max_grad_norm=1.0, schedule="cosine", warmup_steps=total_steps // 10
    )
    name = workload.name.replace("source_text", "source_lm").replace("_width96", "")
    return workload.replace(name=name, config=config)


def source_text_post_norm() -> Workload:
    """Return the deep one with norms after the additions, which Adam breaks early on unless its learning rate warms up.

    Without warmup it trains at lr 0.002 and stays at the frequencies of single bytes, a loss of 3.1, from 0.003 on; with 50
    of 500 steps it trains at 0.003 and 0.004 too.
    """
    workload = source_text(
        layers=12, width=32, length=16, norm="after_add", init_std=0.08, peak_lr=1e-3, total_steps=1000
    )
    return workload.replace(name="source_text_post_norm")
