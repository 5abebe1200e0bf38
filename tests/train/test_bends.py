"""What a loop of one's own has and a `Workload` takes: the twin of each is that loop in plain PyTorch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import workbench as wb
from tests.helpers.workloads import small_workload, squared
from tests.playbook.test_playbook import QUICK
from workbench.train.batches import train_batches
from workbench.train.stacked_weights import build_model

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("no_figures")


def own_loop(workload: wb.Workload, optimizer_of: Any, *, scheduler_of: Any = None) -> tuple[list[float], nn.Module]:
    """Train as a person would, and return the losses and the model; one micro-batch an update."""
    config = workload.config
    model = build_model(workload, config, CPU)
    optimizer = optimizer_of(model)
    scheduler = scheduler_of(optimizer) if scheduler_of else None
    batches, losses = train_batches(workload, config, CPU), []
    for _ in range(config.total_steps):
        ((batch, _),) = next(batches)
        optimizer.zero_grad()
        loss = squared(model(batch[0]), batch).mean()
        loss.backward()
        optimizer.step()
        if scheduler:
            scheduler.step()
        losses.append(loss.item())
    return losses, model


def mean_loss(outputs: Any, batch: Any) -> torch.Tensor:
    return squared(outputs, batch).mean()


def test_a_loss_of_one_value_a_batch_trains_as_in_ones_own_loop(tmp_path: Path) -> None:
    """The validation loss of its 13 examples is the mean over the parts of 8 and of 5, by their sizes."""
    workload = small_workload(loss=mean_loss, config={"optimizer": "sgd"})
    losses, model = own_loop(workload, lambda model: torch.optim.SGD(model.parameters(), lr=0.05))
    record = wb.Trainer(track=2).run(workload, out=tmp_path / "s")
    np.testing.assert_allclose(record.steps["loss"], losses, rtol=1e-6)
    assert record.steps["loss_se"].isna().all()
    last = record.evals[(record.evals["step"] == 40) & (record.evals["metric"] == "loss")]
    x, y = (t.double() for t in workload.validation_data.tensors)
    assert last["value"].item() == pytest.approx(float(mean_loss(model(x), (x, y)).detach()), rel=1e-5)
    assert record.predictions["loss"].isna().all(), "no example has a loss of its own"
    assert record.predictions["prediction"].notna().all()


def test_micro_batches_of_a_loss_of_one_value_weigh_as_their_examples(tmp_path: Path) -> None:
    whole, parts = (
        wb.Trainer().run(small_workload(loss=mean_loss, config={"accumulate_steps": k}), out=tmp_path / str(k)).steps
        for k in (1, 4)
    )
    np.testing.assert_allclose(parts["loss"], whole["loss"], rtol=1e-5)
    np.testing.assert_allclose(parts["grad_norm"], whole["grad_norm"], rtol=1e-5)
    assert parts["loss_se"].isna().all()


def test_what_takes_a_loss_of_each_example_says_that_there_is_none(tmp_path: Path) -> None:
    found = {f.code: f for f in wb.diagnose(small_workload(loss=mean_loss), out=tmp_path / "s", **QUICK)}
    for code in ("batch_size.noise_scale", "evaluation.weighting", "evaluation.coverage"):
        assert found[code].status == "not_measured"
        assert "one value a batch" in found[code].summary, code
    assert found["lr.best"].value is not None
    assert "one value a batch" in found["evaluation.batch_size"].summary
    with pytest.raises(wb.errors.UsageError, match=r"one value a batch.*metric="):
        wb.evaluation.check(lambda model, data, batch_size: math.nan, small_workload(loss=mean_loss))
