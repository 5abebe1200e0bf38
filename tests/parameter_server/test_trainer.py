"""Trials on parameter servers leave the record that every trainer leaves, and studies take it as their trainer."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import workbench as wb
from tests.helpers.workloads import small_net, small_workload
from workbench.errors import ConfigError, StudyInterrupted, UsageError
from workbench.parameter_server.context import WorkerContext, on_worker
from workbench.parameter_server.servers.layout import FixedShardsPartitioner
from workbench.parameter_server.strategy import ParameterServerStrategy
from workbench.parameter_server.training.checkpoint_manager import CheckpointManager
from workbench.parameter_server.training.steps import WorkerTrial
from workbench.parameter_server.training.trainer import ParameterServerTrainer, PlacedRun
from workbench.topics.lr_sweep.study import LRSweep
from workbench.train.checkpoint import load_checkpoint
from workbench.train.trainer import Trainer
from workbench.workloads.base import Workload

ALONE = ParameterServerTrainer(workers=1)


def workload(**fields: Any) -> Workload:
    made = small_workload()
    return made.replace(config=made.config.replace(total_steps=30, eval_every_steps=10, **fields))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


@pytest.mark.parametrize(
    ("model", "fields", "partitioner"),
    [
        (small_net, {}, None),
        (small_net, {"optimizer": "adam", "max_grad_norm": 0.1}, FixedShardsPartitioner(2)),
        (normed, {"schedule": "cosine", "warmup_steps": 5, "accumulate_steps": 2}, FixedShardsPartitioner(2)),
    ],
)
def test_one_worker_is_training_without_servers(
    tmp_path: Path, model: Any, fields: dict[str, Any], partitioner: Any
) -> None:
    """Losses, norms, evaluations and checkpoints, bit for bit; batch norm is evaluated with the worker's statistics."""
    made = workload(**fields).replace(build_model=model)
    theirs = Trainer(device="cpu", gradients="loop").run(made, out=tmp_path / "local")
    trainer = ParameterServerTrainer(workers=1, servers=3, variable_partitioner=partitioner)
    ours = trainer.run(made, out=tmp_path / "servers")
    for name in ("step", "loss", "loss_se", "lr", "grad_norm", "clipped"):
        assert ours.steps[name].tolist() == theirs.steps[name].tolist(), name
    columns = ["step", "split", "metric", "value", "num_examples"]
    assert ours.evals[columns].equals(theirs.evals[columns])
    assert ours.best()[:2] == theirs.best()[:2]
    assert set(ours.steps["staleness_steps"]) == {0.0}
    loaded = [wb.checkpoints.load_trained(made, record) for record in (ours, theirs)]
    for one, other in zip(*(model.parameters() for model in loaded), strict=True):
        assert torch.equal(one, other)


def test_many_workers_make_every_update_once(tmp_path: Path) -> None:
    """T1.2: by several of them, some on parameters that others have changed meanwhile."""
    made = small_workload()
    made = made.replace(config=made.config.replace(total_steps=200, eval_every_steps=50))
    record = ParameterServerTrainer(workers=3, steps_per_closure=4).run(made, out=tmp_path / "s")
    steps = record.steps
    assert steps["step"].tolist() == list(range(200))
    assert set(steps["worker"]) == {0.0, 1.0, 2.0}
    assert (steps["staleness_steps"] >= 0).all()
    assert steps["staleness_steps"].max() > 0
    facts = wb.open(tmp_path / "s").facts["parameter_server"]["0"]
    for histogram in facts["staleness_steps"]:
        assert sum(histogram.values()) == 200
    assert facts["workers"] == 3
    assert sum(facts["closures"]) == math.ceil(1 / 4) + 3 * math.ceil(50 / 4) + math.ceil(49 / 4)


def test_traffic_is_that_of_the_parameters(tmp_path: Path) -> None:
    """Read once and written once an update: twice their bytes, in two requests a server."""
    made = workload()
    record = ParameterServerTrainer(workers=1, servers=2).run(made, out=tmp_path / "s")
    parameters = sum(p.numel() * 8 for p in made.build_model().parameters())
    last = record.steps.iloc[15:]
    columns = [f"server_bytes/{server}" for server in range(2)]
    measured = last[columns].dropna()
    reads = record.config["eval_every_steps"] or 10
    expected = parameters * (2 + 1 / reads)
    assert float(measured.sum(axis=1).iloc[-1]) == pytest.approx(expected, rel=0.15)


def test_a_study_runs_on_it(tmp_path: Path) -> None:
    study = wb.lr_sweep.Study(lrs=(0.01, 0.1)).run(
        workload(), trainer=ParameterServerTrainer(workers=2), out=tmp_path / "s"
    )
    assert study.trials["state"].tolist() == ["complete"] * 2
    assert "trainer=ParameterServerTrainer(workers=2)" in LRSweep(lrs=(0.01,))._call(
        ParameterServerTrainer(workers=2), None
    )
    assert study.trials["peak_lr"].tolist() == [0.01, 0.1]
    assert "lr.best" in wb.lr_sweep.diagnose(study)
    assert set(study.facts["parameter_server"]) == {"0", "1"}


def test_a_trial_that_diverges_ends_there(tmp_path: Path) -> None:
    record = ParameterServerTrainer(workers=2).run(workload(peak_lr=1e30), out=tmp_path / "s")
    assert record.state == "diverged"
    assert not math.isfinite(record.steps["loss"].iloc[-1])
    assert np.isfinite(record.steps["loss"].iloc[:-1]).all()


def test_a_checkpoint_manager_restores_what_a_trial_saved(strategy: ParameterServerStrategy, tmp_path: Path) -> None:
    """One format: weights and both of Adam's moments, into other shards."""
    made = workload(optimizer="adam")
    folder = ALONE.run(made, out=tmp_path / "s").path / "trials" / "0" / "checkpoints"
    split = ParameterServerStrategy(strategy.cluster, variable_partitioner=FixedShardsPartitioner(2))
    placed = split.place(small_net().double(), made.config)
    restored = CheckpointManager(placed, folder).restore()
    assert restored is not None
    assert (restored.steps, restored.epoch, placed.steps) == (30, None, 30)
    stored, state = load_checkpoint(restored.path), placed.state_dict()
    for name, value in state["parameters"].items():
        assert torch.equal(value, stored.model[name])
    assert sorted(state["slots"]) == ["m", "v"]
    for slot, whole in state["slots"].items():
        assert all(torch.equal(value, stored.trainer[f"optimizer/{slot}/{name}"]) for name, value in whole.items())


def test_a_trial_that_was_stopped_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one worker and data in memory: as if nothing had been."""
    made = workload(optimizer="adam")
    whole = ALONE.run(made, out=tmp_path / "whole")
    real = PlacedRun._write_rows

    def stops(self: Any, updates: Any, loads: Any) -> bool:
        if self.step >= 20:
            raise KeyboardInterrupt
        return real(self, updates, loads)

    monkeypatch.setattr(PlacedRun, "_write_rows", stops)
    with pytest.raises((KeyboardInterrupt, StudyInterrupted)):
        ALONE.run(made, out=tmp_path / "s")
    monkeypatch.undo()
    resumed = ALONE.run(made, out=tmp_path / "s")
    assert resumed.steps["step"].tolist() == list(range(30))
    assert resumed.steps["loss"].tolist() == whole.steps["loss"].tolist()


def test_batch_norm_of_several_workers_is_merged(tmp_path: Path) -> None:
    """P6.7: the saved model has statistics of the data, not of the initialisation.

    Each batch is the whole of the data and the weights stay, so every worker's statistics go to the same ones, whoever is fast: a
    worker that made a share k / n of the n updates keeps (1 - momentum)^(3 k) of the initial ones, which weighs at most .5 % together.
    """
    still = {"total_steps": 240, "batch_size": 48, "peak_lr": 1e-12, "eval_every_steps": 240}
    made = small_workload(build_model=normed, config=still)
    ParameterServerTrainer(workers=3).run(made, out=tmp_path / "s")
    (checkpoint,) = (tmp_path / "s").rglob("step-00000240")
    model = wb.checkpoints.load_trained(made, checkpoint)
    first, norm = model[0], model[1]  # type: ignore[index]
    inputs = first(made.train_data[:][0].double())  # type: ignore[index, operator]
    assert torch.allclose(norm.running_mean, inputs.mean(0), atol=0.01)  # type: ignore[arg-type, union-attr]
    assert torch.allclose(norm.running_var, inputs.var(0), atol=0.01)  # type: ignore[arg-type, union-attr]


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"workers": 0}, "workers=0"),
        ({"servers": 1.5}, "servers=1.5"),
        ({"steps_per_closure": True}, "steps_per_closure=True"),
        ({"engine": "mpi"}, "engine='mpi'"),
        ({"device": "cuda"}, "device='cuda'"),
    ],
)
def test_bad_arguments(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        ParameterServerTrainer(**fields)


def test_an_executor_for_whole_trials_refuses_it(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="spreads one trial over several"):
        wb.lr_sweep.Study(lrs=(0.01,)).run(workload(), trainer=ALONE, executor="ray", out=tmp_path / "s")


def test_each_worker_shuffles_for_itself() -> None:
    """T7.4: worker 0 reads what training without servers reads, the others the same examples in another order."""
    made = workload()
    orders = []
    for worker in range(3):
        with on_worker(WorkerContext(worker)):
            stream = WorkerTrial(made, made.config, 0, 3).stream
            orders.append(torch.cat([_inputs(stream.next()) for _ in range(6)]))
    assert all(not torch.equal(orders[0], other) for other in orders[1:])
    assert not torch.equal(orders[1], orders[2])
    for order in orders:
        assert len({tuple(row) for row in order.tolist()}) == 48


def _inputs(batch: Any) -> torch.Tensor:
    while not isinstance(batch, torch.Tensor):
        batch = batch[0]
    return batch
