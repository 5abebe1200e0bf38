"""The networks against closed forms, torch twins and the identity path of F2.8; the text that they read."""

from __future__ import annotations

import hashlib
import math
import os
import sysconfig
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from workbench.errors import UsageError
from workbench.train.trainer import Trainer
from workbench.workloads.sklearn_data import deep_residual, digits_resnet
from workbench.workloads.source_text import (
    Transformer,
    source_data,
    source_lm,
    source_text,
    source_text_post_norm,
)

PLACEMENTS = ("none", "branch", "after_add", "pre")


def build(seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    return deep_residual(**options).build_model()


def features(model: Any, images: torch.Tensor) -> list[torch.Tensor]:
    """What the first layer returns, and each block after it."""
    seen = [model.stem(images)]
    for block in model.blocks:
        seen.append(block(seen[-1]))
    return seen


@pytest.mark.parametrize(("residual", "norm"), [(False, "none"), (False, "branch"), (False, "pre"), *product([True], PLACEMENTS)])  # fmt: skip
def test_a_block_is_the_formula_that_the_option_names(residual: bool, norm: Any) -> None:
    block = build(depth=1, residual=residual, norm=norm).blocks[0]
    x = 3 * torch.randn(5, 32) + 1
    normalise = lambda h: F.layer_norm(h, (32,))  # noqa: E731
    before = normalise(x) if norm == "pre" else x
    branch = torch.relu(before @ block.inner.weight.T) @ block.outer.weight.T
    branch = normalise(branch) if norm == "branch" else branch
    expected = x + branch if residual else branch
    torch.testing.assert_close(block(x), normalise(expected) if norm == "after_add" else expected)


@pytest.mark.parametrize(
    ("options", "variance"),
    [
        ({"residual": False}, lambda depth: 1.0),
        ({}, lambda depth: 2.0**depth),
        ({"norm": "branch"}, lambda depth: 1.0 + depth),
        ({"norm": "pre"}, lambda depth: 1.0 + depth),
        ({"norm": "after_add"}, lambda depth: 1.0),
    ],
)
def test_the_variance_after_each_block_is_the_one_of_the_docstring(options: dict[str, Any], variance: Any) -> None:
    torch.manual_seed(1)
    seen = features(build(depth=6, width=2048, **options), torch.randn(64, 64))
    for depth in (1, 3, 6):
        assert float(seen[depth].var().detach()) == pytest.approx(variance(depth), rel=0.25)


@pytest.mark.parametrize("norm", PLACEMENTS)
def test_branches_of_zero_leave_the_identity_path(norm: Any) -> None:
    """F2.8: at step 0 the network is its first layer and its classifier, with the norms that lie on the way."""
    model = build(depth=4, norm=norm, zero_init=True)
    images = torch.randn(7, 64)
    first = model.stem(images)
    expected = first
    for _ in range(4 if norm == "after_add" else norm == "pre"):
        expected = F.layer_norm(expected, (32,))
    logits = model(images)
    if norm in ("none", "branch"):
        assert torch.equal(logits, model.classifier(first))
    torch.testing.assert_close(logits, model.classifier(expected))


def test_the_text_is_that_of_the_first_file_on() -> None:
    """The training windows open with the first file, byte for byte."""
    first = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"), key=os.fspath)[0].read_bytes()
    windows = source_data().train.tensors[0]
    assert bytes(windows.flatten().tolist()).startswith(first)
    assert len(source_data().sha256) == len(hashlib.sha256().hexdigest())
    assert source_data().sha256 == source_data.__wrapped__().sha256


def test_targets_are_the_next_bytes() -> None:
    for split in source_text().splits.values():
        inputs, targets = split.tensors
        assert inputs.dtype == targets.dtype == torch.int64
        assert inputs.shape[1] == 64
        assert torch.equal(inputs.flatten()[1:], targets.flatten()[:-1])
        assert 0 <= int(inputs.min()) <= int(inputs.max()) <= 255


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


def test_qk_norm_bounds_the_attention_logits_of_the_block() -> None:
    """With queries and keys normalised, attention is torch's on normalised ones, and no logit exceeds the root of the head's width."""
    torch.manual_seed(0)
    ours = Transformer(width=16, heads=2, layers=1, qk_norm=True, init_std=5.0).double().blocks[0].attention
    x = 10 * torch.randn(3, 7, 16, dtype=torch.float64)
    q, k, v = ours.qkv(x).view(3, 7, 3, 2, 8).permute(2, 0, 3, 1, 4)
    q, k = F.layer_norm(q, (8,)), F.layer_norm(k, (8,))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(ours(x), ours.out(mixed.transpose(1, 2).reshape(3, 7, 16)))
    assert (q @ k.mT).abs().max().item() / math.sqrt(8) <= math.sqrt(8) + 1e-4


def test_a_tied_model_has_one_matrix_less_and_trains() -> None:
    sizes = [sum(p.numel() for p in source_lm(tied=tied).build_model().parameters()) for tied in (False, True)]
    assert sizes[0] - sizes[1] == 256 * 96
    assert sizes[0] == pytest.approx(0.3e6, rel=0.1)


@pytest.mark.slow
def test_adam_breaks_the_post_norm_model_unless_its_lr_warms_up(tmp_path: Path) -> None:
    """Without warmup it learns hardly more than how often each byte occurs, the entropy of single bytes."""
    workload = source_text_post_norm()
    counts = torch.bincount(torch.cat([workload.train_data[i][0].flatten() for i in range(len(workload.train_data))]))
    frequencies = counts[counts > 0] / counts.sum()
    alone = -float((frequencies * frequencies.log()).sum())
    config = workload.config.replace(peak_lr=0.004, total_steps=500, eval_every_steps=500)
    ends = []
    for warmup in (0, 200):
        record = Trainer(gradients="loop").run(
            workload, config.replace(warmup_steps=warmup), out=tmp_path / str(warmup)
        )
        ends.append(float(record.steps["loss"].tail(50).mean()))
    assert ends[0] > 0.9 * alone
    assert ends[1] < 0.85 * alone


def test_names_tell_the_variants_apart() -> None:
    for made, name in (
        (deep_residual(depth=24, norm="after_add"), "deep_residual_depth24_after_add"),
        (deep_residual(residual=False, init_scale=10.0), "deep_residual_plain_scale10"),
        (deep_residual(norm="branch", zero_init=True, width=16), "deep_residual_width16_branch_zero"),
        (digits_resnet(stride=1), "digits_resnet_stride1"),
        (source_text(layers=6, norm="after_add"), "source_text_layers6_after_add"),
        (source_lm(width=128, heads=8, qk_norm=True, z_loss=1e-4), "source_lm_width128_heads8_qk_norm_z_loss0.0001"),
    ):
        assert made.name == name


@pytest.mark.parametrize(
    ("make", "options", "said"),
    [
        (deep_residual, {"depth": 0}, "depth=0 must be an integer of at least 1"),
        (deep_residual, {"norm": "post"}, "norm='post' is not known.*Allowed: after_add, branch, none, pre"),
        (deep_residual, {"init_scale": math.nan}, "init_scale=nan must be a finite number above 0"),
        (deep_residual, {"residual": False, "zero_init": True}, "zero_init=True needs residual=True"),
        (deep_residual, {"residual": False, "norm": "after_add"}, "norm='after_add' needs residual=True"),
        (source_text, {"layers": 0}, "layers=0 must be an integer above 0"),
        (source_text, {"width": 30}, "width=30 must be an integer above 0, and a multiple of 4"),
        (source_lm, {"heads": 5}, "width=96 must be an integer above 0, and a multiple of 5"),
        (source_lm, {"z_loss": -1e-4}, "z_loss=-0.0001 must be a finite number of at least 0"),
        (source_text, {"init_std": math.inf}, "init_std=inf must be a finite number above 0"),
    ],
)
def test_options_that_make_no_network_are_named(make: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        make(**options)


@pytest.mark.parametrize(("residual", "scale"), [(False, 10.0), (True, 2.0)])
def test_init_scale_multiplies_every_weight_matrix(residual: bool, scale: float) -> None:
    usual = build(depth=2, residual=residual).state_dict()
    scaled = build(depth=2, residual=residual, init_scale=scale).state_dict()
    for name, value in scaled.items():
        torch.testing.assert_close(value, scale * usual[name])
