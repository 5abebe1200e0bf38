"""A rise that is replayed: a planted bad batch and a planted stale second moment are told apart, and the run stays as it was."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import workbench as wb
from workbench.record.json_values import dumps
from workbench.record.roles import Role
from workbench.studies.session import open_session
from workbench.topics.stability.replay import collect_replay
from workbench.train.batches import train_order
from workbench.train.stacked_weights import build_model

BATCH, STEPS, AT = 16, 400, 210
pytestmark = pytest.mark.usefixtures("no_figures")


def own_adam(params: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr, betas=(0.5, 0.999))


def listed_adam(params: Any, lr: float) -> torch.optim.Optimizer:
    """Keeps its betas in a list, as optimizers do that take them as they are given."""
    made = own_adam(params, lr)
    for group in made.param_groups:
        group["betas"] = list(group["betas"])
    return made


def error(outputs: Tensor, batch: Any) -> Tensor:
    """A squared error whose gradient is `gain` times its own, and whose value is not."""
    value = (outputs - batch[1]).square().mean(1)
    return value + (batch[2] - 1) * (value - value.detach())


def spiky(
    *, bad: float = 1.0, whole: float = 1.0, gain: float = 1.0, step: Any = None, **config: Any
) -> tuple[wb.Workload, list[int]]:
    """Less than an epoch, so that what is planted in the batch of update AT is met once; return its examples, too."""
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(BATCH * (STEPS + 20), 8, generator=draw)
    targets = inputs.sum(1, keepdim=True) + 0.3 * torch.randn(len(inputs), 1, generator=draw)
    gains = torch.ones(len(inputs))
    how = wb.TrainConfig(**{"peak_lr": 0.02, "total_steps": STEPS, "batch_size": BATCH, "optimizer": "sgd", **config})
    batch = next(train_order(len(inputs), how, start_step=AT))
    targets[batch] *= whole
    targets[batch[:3]] *= bad
    gains[batch] = gain
    held = torch.randn(64, 8, generator=draw)
    workload = wb.Workload(
        name="spiky", build_model=lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)), loss=error, step=step, config=how,
        train_data=TensorDataset(inputs, targets, gains), validation_data=TensorDataset(held, held.sum(1, keepdim=True), torch.ones(64)),
    )  # fmt: skip
    return workload, batch


def hashes(folder: Path) -> dict[str, str]:
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.rglob("*")) if p.is_file()}


def own_step(state: Any, batch: Any) -> Tensor:
    state.optimizer.zero_grad()
    loss = error(state.model(batch[0]), batch).mean()
    loss.backward()
    state.optimizer.step()
    return loss


def run(workload: wb.Workload, folder: Path) -> Any:
    wb.Trainer(device="cpu").run(workload, out=folder)
    return wb.open(folder)


def test_a_bad_batch_is_told_by_what_weights_before_it_think_of_it(tmp_path: Path) -> None:
    workload, batch = spiky(bad=200.0, checkpoint_every_steps=30, eval_every_steps=30, keep_best=20)
    record = run(workload, tmp_path / "s")
    before, random = hashes(tmp_path), torch.get_rng_state()
    found = wb.stability.replay(workload, record)
    assert hashes(tmp_path) == before
    assert torch.equal(torch.get_rng_state(), random)
    assert (found.update, found.cause, found.exact) == (AT, "data", True)
    assert set(found.examples[:3]) == set(batch[:3])
    assert set(found.examples) == set(batch)
    assert found.example_losses[2] > 100 * found.example_losses[3]
    assert found.others_before < found.limit < found.batch_before
    assert found.started == 180


@pytest.mark.parametrize("case", ["by name", "a factory", "a list", "a step"])
def test_a_second_moment_that_is_stale_is_a_fault_of_the_state(tmp_path: Path, case: str) -> None:
    """Its ratio is held against the moments of torch's own Adam on the same batches."""
    config = {"by name": {"optimizer": "adam", "beta1": 0.5}}.get(
        case, {"optimizer": listed_adam if case == "a list" else own_adam}
    )
    workload, _ = spiky(gain=300.0, step=own_step if case == "a step" else None, peak_lr=0.05, **config)
    found = wb.stability.replay(workload, run(workload, tmp_path / "s"))
    assert (found.update, found.cause, found.exact) == (AT, "state", True)
    assert found.batch_before < found.limit < found.others_after
    assert found.update_ratio > 10
    model, data = build_model(workload, workload.config, torch.device("cpu")), workload.train_data
    optimizer, order = own_adam(model.parameters(), 0.05), train_order(len(data), workload.config)
    squares = moment = 0.0
    for step in range(AT + 1):
        indices = next(order)
        optimizer.zero_grad()
        error(model(data.tensors[0][indices]), [t[indices] for t in data.tensors]).mean().backward()
        if step == AT:
            squares = sum(float(p.grad.square().sum()) for p in model.parameters())
            moment = sum(float(s["exp_avg_sq"].sum()) for s in optimizer.state.values()) / (1 - 0.999**AT)
        optimizer.step()
    assert found.second_moment_ratio == pytest.approx(squares / moment, rel=1e-3)
    assert squares / moment > 10


def late_step(state: Any, batch: Any) -> Tensor:
    state.optimizer.zero_grad()
    loss = error(state.model(batch[0]), batch).mean()
    (loss * float(batch[2].max() > 1)).backward()
    state.optimizer.step()
    return loss


def test_an_update_after_none_that_moved_is_longer_than_any_usual_one(tmp_path: Path) -> None:
    workload, _ = spiky(gain=300.0, step=late_step, optimizer=own_adam)
    assert wb.stability.replay(workload, run(workload, tmp_path / "s"), update=AT).update_ratio == math.inf


def test_a_healthy_run_has_nothing_to_replay_and_a_quiet_update_has_no_cause(tmp_path: Path) -> None:
    workload, batch = spiky()
    record = run(workload, tmp_path / "s")
    with pytest.raises(wb.errors.UsageError, match=r"update=None of trial 0: give one of 1 to 399"):
        wb.stability.replay(workload, record)
    found = wb.stability.replay(workload, record, update=AT)
    assert (found.cause, found.exact) == (None, True)
    assert set(found.examples) == set(batch)
    assert found.update_ratio < 10


def test_a_replay_that_cannot_be_says_why(tmp_path: Path) -> None:
    workload, _ = spiky(bad=200.0)
    record = run(workload, tmp_path / "s")
    with pytest.raises(wb.errors.UsageError, match="no trial 0 of this config: give the config"):
        wb.stability.replay(workload, record, config=workload.config.replace(peak_lr=0.03))
    other, _ = spiky()
    doubled = TensorDataset(*(t + 0.5 for t in other.train_data.tensors))
    with pytest.raises(wb.errors.WorkloadError, match="are not those of the record again"):
        wb.stability.replay(workload.replace(train_data=doubled), record)


@pytest.mark.parametrize(("planted", "said", "cause"), [
    ({"bad": 200.0}, "The loss of a single update jumps, 210", "the batch itself is to blame"),
    ({"gain": 300.0, "peak_lr": 0.05, "optimizer": "adam", "beta1": 0.5}, "The loss spikes in the middle", "the state is to blame, not the batch"),
])  # fmt: skip
def test_the_diagnosis_says_which(tmp_path: Path, planted: dict[str, Any], said: str, cause: str) -> None:
    workload, batch = spiky(**planted)
    with open_session(workload, stem="diagnosis", settings={}, out=tmp_path / "s") as session:
        session.trial(session.config, stage=Role.BASELINE)
        collect_replay(session)
        record = session.record
    found = wb.stability.diagnose(record)
    (finding,) = (f for f in found if f.evidence.get("replay"))
    assert finding.code in ("stability.spike", "stability.mid")
    for part in (said if finding.code == "stability.spike" else "", "Replayed from step", cause):
        assert part in finding.summary
    if "bad" in planted:
        assert all(f"{example} (" in finding.summary for example in batch[:3])
    else:
        assert "times the second moment" in finding.summary
    assert finding.evidence["replay"] == json.loads(dumps(asdict(wb.stability.replay(workload, record))))


def test_a_healthy_baseline_is_not_replayed(tmp_path: Path) -> None:
    workload, _ = spiky(total_steps=60)
    with open_session(workload, stem="diagnosis", settings={}, out=tmp_path / "s") as session:
        collect_replay(session)
        assert "replay" not in session.record.facts
