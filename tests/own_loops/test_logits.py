"""Attention and output logits of models that the package has never seen, by their calls, names and shapes, against what each computes itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import workbench as wb
from tests.own_loops.nanogpt import GPT
from workbench.instruments.losses.logits import Logits
from workbench.train.batches import train_batches
from workbench.train.stacked_weights import build_model
from workbench.workloads.source_text import Transformer, source_data, source_lm


def looked(model: nn.Module, *given: Any, **named: Any) -> dict[str, float]:
    """What is seen of one forward pass."""
    logits = Logits()
    handle = model.register_forward_pre_hook(lambda part, args, kwargs: logits.begin(part, (*args, kwargs)), with_kwargs=True)  # fmt: skip
    model(*given, **named)
    handle.remove()
    return {name: float(value) for name, value in logits.take().items()}


def tokens(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("named", [True, False])
def test_nanogpt_is_read_by_names_and_shapes(flash: bool, named: bool) -> None:
    torch.manual_seed(0)
    model, idx = GPT(flash=flash, std=1.0), tokens(3, 16)
    seen = looked(model, idx=idx, targets=idx) if named else looked(model, idx, idx)
    layers = [float(block.attn.last) for block in model.transformer.h]
    assert [seen[f"attention_logit/transformer.h.{i}.attn"] for i in range(2)] == pytest.approx(layers, rel=1e-4)
    assert seen["attention_logit"] == pytest.approx(max(layers), rel=1e-4)
    assert seen["output_log_z"] == pytest.approx(float(model.last.logsumexp(-1).mean()), rel=1e-4)
    assert seen["output_logit"] == pytest.approx(float(model.last.abs().max()), rel=1e-4)


class Scores(nn.Module):
    """Calls `attend` on queries and keys of its own."""

    def __init__(self, attend: Callable[[Tensor, Tensor], Tensor], q: Tensor, k: Tensor) -> None:
        super().__init__()
        self.attend, self.q, self.k = attend, q, k

    def forward(self, _: Tensor) -> Tensor:
        return self.attend(self.q, self.k)


KEEP = torch.tensor([[True, True, False, True, False]])


@pytest.mark.parametrize(
    ("attend", "expected"),
    [
        (lambda q, k: F.scaled_dot_product_attention(q, k, k), lambda q, k: q @ k.mT / 8**0.5),
        (lambda q, k: F.scaled_dot_product_attention(q, k, k, scale=2.0), lambda q, k: q @ k.mT * 2),
        (lambda q, k: F.scaled_dot_product_attention(q, k, k, KEEP), lambda q, k: (q @ k.mT / 8**0.5)[..., KEEP[0]]),
        (lambda q, k: F.scaled_dot_product_attention(q, k, k, 9.0 * KEEP), lambda q, k: q @ k.mT / 8**0.5 + 9.0 * KEEP),
        (lambda q, k: F.scaled_dot_product_attention(q, k[:, :1], k[:, :1], enable_gqa=True), lambda q, k: q @ k[:, :1].mT / 8**0.5),
        (lambda q, k: (q @ k.mT).softmax(-1) @ k, lambda q, k: q @ k.mT),
        (lambda q, k: torch.softmax(q @ k.mT, dim=3) @ k, lambda q, k: q @ k.mT),
    ],
    ids=["plain", "scale", "mask", "bias", "shared keys", "method", "function"],
)  # fmt: skip
def test_what_a_call_computes_is_what_is_seen(attend: Any, expected: Any) -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 5, 8)
    assert looked(Scores(attend, q, k), q)["attention_logit"] == pytest.approx(float(expected(q, k).max()), rel=1e-5)


@pytest.mark.parametrize("weights", [True, False])
def test_torchs_own_attention_is_seen(weights: bool) -> None:
    torch.manual_seed(0)
    model, x = nn.MultiheadAttention(8, 2, batch_first=True), 3 * torch.randn(3, 5, 8)
    q, k, _ = F.linear(x, model.in_proj_weight, model.in_proj_bias).view(3, 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
    seen = looked(model, x, x, x, need_weights=weights)
    assert seen == pytest.approx({name: (q @ k.mT).max().item() / 2 for name in ("attention_logit", "attention_logit/the model")}, rel=1e-5)  # fmt: skip


def test_nothing_is_left_behind_and_what_has_no_logits_is_left_alone() -> None:
    before = F.scaled_dot_product_attention, F.softmax, torch.softmax, Tensor.softmax
    model = nn.Sequential(nn.Linear(4, 8), nn.Softmax(dim=-1), nn.Linear(8, 3))
    assert looked(model, torch.randn(5, 4)) == {}
    with pytest.raises(IndexError):
        looked(GPT(), tokens(1, 16) + 256)
    assert (F.scaled_dot_product_attention, F.softmax, torch.softmax, Tensor.softmax) == before
    assert "softmax" not in vars(Tensor)
    logits = Logits(every=1)
    for update in range(3):
        logits.begin(model, (), update)
        model(torch.randn(5, 4))
    assert logits.to_dict() == {"looks": 1}


def losses(model: nn.Module, watched: Any = None) -> list[float]:
    """Train nanoGPT's loop for some steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    generator, found = torch.Generator().manual_seed(0), []
    text = source_data(length=32).train.tensors

    def loop() -> None:
        for _ in range(60):
            rows = torch.randint(0, 1000, (4,), generator=generator)
            _, loss = model(text[0][rows], text[1][rows])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            found.append(loss.item())

    if watched is None:
        loop()
    else:
        with wb.watch(model, optimizer, out=watched) as run:
            loop()
        found.append(run)  # type: ignore[arg-type]
    return found


def test_a_watched_nanogpt_is_judged_and_trains_the_same(tmp_path: Path) -> None:
    """Queries and keys that begin 16 times too large stay so."""
    made: list[GPT] = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(GPT(layers=1))
        with torch.no_grad():
            made[-1].transformer.h[0].attn.c_attn.weight[:64] *= 16
    torch.manual_seed(1)
    alone = losses(made[0])
    torch.manual_seed(1)
    *watched, run = losses(made[1], tmp_path / "run")
    assert watched == alone
    diagnosis = run.diagnose()  # type: ignore[attr-defined]
    assert diagnosis["stability.output_logits"].status == "ok"
    assert diagnosis["stability.attention_logits"].status == "warn"
    assert "transformer.h.0.attn" in diagnosis["stability.attention_logits"].summary


@pytest.mark.parametrize("gradients", ["loop", "vmap"])
def test_every_lane_of_a_trainer_has_the_logits_of_its_own_weights(tmp_path: Path, gradients: Any) -> None:
    workload = source_lm(width=16, total_steps=40)
    configs = [workload.config.replace(peak_lr=lr) for lr in (1e-3, 0.1)]
    record = wb.lr_sweep.Study(lrs=[c.peak_lr for c in configs]).run(
        workload, wb.Trainer(gradients=gradients), out=tmp_path / "sweep"
    )
    rows = record.steps.dropna(subset="attention_logit").sort_values(["trial", "step"])
    assert rows["step"].tolist() == [0, 10, 20, 30] * 2
    low, high = (part["attention_logit"].tolist() for _, part in rows.groupby("trial"))
    assert low[0] == high[0]
    assert high[-1] > 10 * low[-1]
    model = build_model(workload, configs[0], torch.device("cpu"))
    assert isinstance(model, Transformer)
    batch = next(train_batches(workload, configs[0], torch.device("cpu")))[0][0]
    assert looked(model, batch[0])["attention_logit"] == pytest.approx(low[0], rel=1e-4)


def test_losses_are_bitwise_equal_with_the_hook_and_without(tmp_path: Path) -> None:
    """Of a model that draws in its forward pass."""
    workload = source_lm(width=16, total_steps=12)
    workload = workload.replace(
        build_model=lambda: GPT(width=16, length=64), forward=lambda model, batch: model(batch[0])[0]
    )
    often, never = (
        wb.Trainer(gradients="loop", hooks=[wb.hooks.Logits(every=every)])
        .run(workload, out=tmp_path / str(every))
        .steps
        for every in (1, 10_000)
    )
    assert often["loss"].tolist() == never["loss"].tolist()
    assert often["attention_logit"].notna().sum() > never["attention_logit"].notna().sum()
