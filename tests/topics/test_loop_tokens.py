"""Tokens that never get a gradient, as behind a padding mask whose sign is turned; and models in which every token counts, each in its way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import workbench as wb

VOCABULARY, WIDTH, LENGTH, ROWS = 40, 16, 24, 32
Read = Callable[[nn.ModuleDict, Tensor], Tensor]


def attends(m: nn.ModuleDict, ids: Tensor, *, ignored: int = 1) -> Tensor:
    x = m["embed"](ids) + m["place"](torch.arange(LENGTH))
    return m["encoder"](x, src_key_padding_mask=(ids == 0) == bool(ignored))[:, 0]


def last(m: nn.ModuleDict, ids: Tensor) -> Tensor:
    return m["gru"](m["embed"](ids))[0][torch.arange(ROWS), (ids != 0).sum(1) - 1]


def behind_the_end(m: nn.ModuleDict, ids: Tensor) -> Tensor:
    return m["gru"](m["embed"](ids.flip(1)).flip(1))[0][:, 0]  # of the first place alone


def largest(m: nn.ModuleDict, ids: Tensor) -> Tensor:
    return m["conv"](m["embed"](ids).mT).amax(2)


def tied(m: nn.ModuleDict, ids: Tensor) -> Tensor:
    return attends(m, ids) @ m["embed"].weight.T


def added(m: nn.ModuleDict, ids: Tensor) -> Tensor:
    """Of a vocabulary to which tokens were added, which alone are trained."""
    return attends(m, ids)


def watched(read: Read, out: Path) -> wb.Diagnosis:
    torch.manual_seed(0)
    model = nn.ModuleDict({
        "embed": nn.Embedding(VOCABULARY, WIDTH, padding_idx=0), "place": nn.Embedding(LENGTH, WIDTH), "head": nn.LazyLinear(3),
        "encoder": nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True), 1, enable_nested_tensor=False),
        "gru": nn.GRU(WIDTH, WIDTH, batch_first=True), "conv": nn.Conv1d(WIDTH, WIDTH, 3),
    })  # fmt: skip
    model["head"](torch.zeros(1, VOCABULARY if read is tied else WIDTH))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with wb.watch(model, optimizer, out=out) as run:
        for _ in range(12):
            ids = torch.randint(2, VOCABULARY, (ROWS, LENGTH)) * (
                torch.arange(LENGTH) < torch.randint(6, LENGTH // 3 + 2, (ROWS, 1))
            )
            ids[:, 0] = 1  # begins each sequence
            optimizer.zero_grad()
            F.cross_entropy(model["head"](read(model, ids)), ids[:, 2] % 3).backward()
            if read is added:
                model["embed"].weight.grad[: VOCABULARY - 2] = 0
            optimizer.step()
    return run.diagnose()


@pytest.mark.parametrize("read", [lambda m, ids: attends(m, ids, ignored=0), behind_the_end], ids=["mask", "place"])
def test_tokens_that_never_reach_the_loss_are_told(read: Read, tmp_path: Path) -> None:
    found = watched(read, tmp_path / "run")["input.unused_features"]
    assert found.status == "fail", found.summary
    assert "38 of 39 tokens of embed.weight" in found.summary  # all but the first of each sequence


@pytest.mark.parametrize("read", [attends, last, largest, tied, added])
def test_models_that_read_their_tokens_rouse_nothing(read: Read, tmp_path: Path) -> None:
    found = watched(read, tmp_path / "run")["input.unused_features"]
    assert (found.status, found.value is not None) == ("ok", True), found.summary
