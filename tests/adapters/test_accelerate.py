"""A loop with Accelerate needs no callback: `wb.watch` sees through what `prepare` returns."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import workbench as wb

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def _own_state() -> Iterator[None]:
    """A process has one accelerator state, which other tests may have made, and may make after these."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def train(out: Path | None, *, passes: int) -> tuple[Any, list[float], list[float]]:
    """Return the watch, the loss of every pass and the gradient norm of every update that the accelerator clips."""
    torch.manual_seed(0)
    inputs = torch.randn(128, 6, generator=torch.Generator().manual_seed(0))
    made = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
    rule = torch.optim.AdamW(made.parameters(), lr=1e-2)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=passes, mixed_precision="bf16")
    model, optimizer, loader, scheduler = accelerator.prepare(
        made, rule, DataLoader(TensorDataset(inputs, (inputs[:, 0] > 0).long()), 8), torch.optim.lr_scheduler.CosineAnnealingLR(rule, 32 // passes)
    )  # fmt: skip

    def loop() -> tuple[list[float], list[float]]:
        losses, norms = [], []
        for _ in range(2):
            for x, y in loader:
                with accelerator.accumulate(model):
                    loss = F.cross_entropy(model(x), y)
                    losses.append(loss.item())
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.1)))
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
        return losses, norms

    if out is None:
        return None, *loop()
    with wb.watch(model, optimizer, out=out) as run:
        losses, norms = loop()
    return run, losses, norms


@pytest.mark.parametrize("passes", [1, 4])
def test_a_loop_with_accelerate_is_recorded_and_not_changed(passes: int, tmp_path: Path) -> None:
    _, alone, _ = train(None, passes=passes)
    run, losses, norms = train(tmp_path / "run", passes=passes)
    assert losses == alone
    steps = run.record.steps
    assert steps["loss"].tolist() == pytest.approx(torch.tensor(losses).reshape(-1, passes).mean(1).tolist(), rel=1e-5)
    assert steps["grad_norm"].tolist() == pytest.approx(norms, rel=1e-5)
    assert steps["clipped"].sum() == sum(norm > 0.1 for norm in norms) > 0
    assert [
        (f.code, f.summary)
        for f in run.diagnose()
        if f.status in ("warn", "fail") and not f.code.startswith(("stability", "clipping.aggressive"))
    ] == []
