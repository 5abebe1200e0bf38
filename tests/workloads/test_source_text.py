import hashlib
import math
import os
import sysconfig
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from workbench.errors import DataError, UsageError
from workbench.train.trainer import Trainer
from workbench.workloads.source_text import Transformer, source_data, source_text, source_text_post_norm, text_hash


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


@pytest.mark.parametrize("norm", ["pre", "after_add"])
def test_a_block_is_the_one_of_torch(norm: str) -> None:
    """torch's layer with the same weights, `norm_first` for "pre" and not for "after_add"."""
    torch.manual_seed(0)
    ours = Transformer(width=16, heads=2, layers=1, norm=norm).blocks[0]
    torch.nn.init.normal_(ours.norm1.weight)
    twin = torch.nn.TransformerEncoderLayer(
        16, 2, 64, dropout=0.0, activation="gelu", batch_first=True, norm_first=norm == "pre"
    )
    pairs = {
        "self_attn.in_proj_": ours.attention.qkv, "self_attn.out_proj.": ours.attention.out, "linear1.": ours.mlp[0],
        "linear2.": ours.mlp[2], "norm1.": ours.norm1, "norm2.": ours.norm2,
    }  # fmt: skip
    twin.load_state_dict({f"{name}{key}": value for name, m in pairs.items() for key, value in m.state_dict().items()})
    x = torch.randn(3, 7, 16)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(7)
    torch.testing.assert_close(ours(x), twin(x, src_mask=mask, is_causal=True))


def test_the_output_of_a_post_norm_model_is_normalised_once() -> None:
    model = Transformer(layers=3, norm="after_add", init_std=0.08)
    seen: list[torch.Tensor] = []
    model.head.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    model(torch.randint(256, (4, 64)))
    torch.testing.assert_close(seen[0].var(-1, unbiased=False), torch.ones(4, 64), rtol=1e-3, atol=1e-3)
    assert sum(isinstance(module, torch.nn.LayerNorm) for module in model.modules()) == 2 * 3


@pytest.mark.slow
def test_adam_breaks_the_post_norm_model_unless_its_lr_warms_up(tmp_path: Path) -> None:
    """Without warmup it stays at the frequencies of single bytes, a loss of about 3.1."""
    workload = source_text_post_norm()
    config = workload.config.replace(peak_lr=0.004, total_steps=500, eval_every_steps=500)
    ends = []
    for warmup in (0, 200):
        record = Trainer().run(workload, config.replace(warmup_steps=warmup), out=tmp_path / str(warmup))
        ends.append(float(record.steps["loss"].tail(50).mean()))
    assert ends[0] > 2.95
    assert ends[1] < ends[0] - 0.2


def test_names_tell_the_variants_apart() -> None:
    assert source_text().name == "source_text"
    assert source_text(layers=6, norm="after_add").name == "source_text_layers6_after_add"
    assert source_text_post_norm().name == "source_text_post_norm"
    assert len(source_text_post_norm().build_model().blocks) == 12


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"layers": 0}, "layers=0 must be an integer above 0"),
        ({"width": 30}, "width=30 must be an integer above 0, and a multiple of 4"),
        ({"norm": "post"}, "norm='post' is not known.*Allowed: after_add, pre"),
        ({"init_std": math.inf}, "init_std=inf must be a finite number above 0"),
    ],
)
def test_options_that_make_no_model_are_named(options: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        source_text(**options)
