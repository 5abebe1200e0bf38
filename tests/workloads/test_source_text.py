import hashlib
import math
import os
import sysconfig
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from workbench.errors import DataError
from workbench.workloads.source_data import source_data
from workbench.workloads.source_text import Transformer, source_text, text_hash


def test_the_text_is_that_of_the_first_file_on() -> None:
    """The training windows open with the first file, byte for byte."""
    first = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"), key=os.fspath)[0].read_bytes()
    windows = source_data().train.tensors[0]
    assert bytes(windows.flatten().tolist()).startswith(first)
    assert len(text_hash()) == len(hashlib.sha256().hexdigest())
    assert text_hash() == source_data.__wrapped__().sha256


def test_targets_are_the_next_bytes() -> None:
    for split in source_text().splits.values():
        inputs, targets = split.tensors
        assert inputs.dtype == targets.dtype == torch.int64
        assert inputs.shape[1] == 64
        assert torch.equal(inputs.flatten()[1:], targets.flatten()[:-1])
        assert 0 <= int(inputs.min()) <= int(inputs.max()) <= 255


def test_the_text_ends_at_the_cap() -> None:
    small = source_data(length=16, max_bytes=1_000_000)
    total = sum(16 * len(split) for split in (small.train, small.validation, small.test))
    assert 1_000_000 - 3 * 17 <= total <= 1_000_000
    assert small.sha256 != text_hash()


def test_too_little_source_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(DataError, match="found 0 source files"):
        source_data.__wrapped__()


def test_no_position_sees_what_comes_after_it() -> None:
    model = Transformer()
    tokens = torch.randint(256, (1, 64))
    changed = tokens.clone()
    changed[0, 40] = (changed[0, 40] + 1) % 256
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :40], after[:, :40])
    assert not torch.allclose(before[:, 40:], after[:, 40:])


def test_attention_is_the_one_of_torch() -> None:
    attention = Transformer().blocks[0].attention
    x = torch.randn(2, 7, 64)
    q, k, v = attention.qkv(x).view(2, 7, 3, 4, 16).permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(attention(x), attention.out(mixed.transpose(1, 2).reshape(2, 7, 64)))


def test_attention_is_that_of_the_formula() -> None:
    torch.manual_seed(0)
    attention = Transformer(width=8, heads=2).blocks[0].attention
    x = torch.randn(1, 5, 8)
    q, k, v = (attention.qkv(x)[0, :, i * 8 : (i + 1) * 8].view(5, 2, 4) for i in range(3))
    expected = torch.zeros(5, 8)
    for head in range(2):
        scores = q[:, head] @ k[:, head].T / math.sqrt(4)
        scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
        expected[:, head * 4 : (head + 1) * 4] = scores.softmax(-1) @ v[:, head]
    torch.testing.assert_close(attention(x)[0], attention.out(expected))


def test_the_model_is_the_one_that_is_stated() -> None:
    model = Transformer()
    assert len(model.blocks) == 2
    assert model.token.weight.shape == (256, 64)
    assert source_text().config.batch_size == 8
