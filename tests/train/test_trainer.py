"""The trainer against a bare loop in plain PyTorch, and what it promises about observation, resume and interrupts."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from tests.helpers.workloads import small_net, small_workload, squared
from workbench.errors import (
    ConfigError,
    DataError,
    DeviceError,
    RecordError,
    StudyInterrupted,
    UnknownNameError,
    UsageError,
    WorkloadError,
)
from workbench.record.parts import read_parts
from workbench.record.read import TrialRecord, open_record
from workbench.train.batches import train_batches
from workbench.train.checkpoint import load_checkpoint, load_model
from workbench.train.hooks import Activations, Hook, Norms, Run, Step, Timing, UpdateRatios
from workbench.train.lane_stack import build_model
from workbench.train.trainer import Trainer

CPU = torch.device("cpu")


def bare_loop(workload: Any, config: Any) -> tuple[list[float], list[float], nn.Module]:
    """The same training written the ordinary way, with torch's own optimizer, norm and clipping."""
    model = build_model(workload, config, CPU)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.peak_lr, momentum=config.momentum)
    losses, norms = [], []
    batches = train_batches(workload, config, CPU)
    for _ in range(config.total_steps):
        ((batch, _),) = next(batches)
        optimizer.zero_grad()
        loss = squared(model(batch[0]), batch).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm or math.inf)
        losses.append(loss.item())
        norms.append(norm.item())
        optimizer.step()
    return losses, norms, model


@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_equals_a_bare_loop(tmp_path: Path, max_grad_norm: float | None) -> None:
    workload = small_workload(config={"max_grad_norm": max_grad_norm})
    record = Trainer().run(workload, out=tmp_path / "run")
    losses, norms, _ = bare_loop(workload, workload.config)
    np.testing.assert_allclose(record.steps["loss"], losses, rtol=1e-5)
    np.testing.assert_allclose(record.steps["grad_norm"], norms, rtol=1e-5)
    if max_grad_norm is not None:
        assert record.steps["clipped"].tolist() == [n > max_grad_norm for n in norms]
        assert 0 < record.steps["clipped"].mean() < 1, "both cases must occur for this test to mean anything"
        assert (record.steps["grad_norm"] > max_grad_norm).any(), "the unclipped norm is what is recorded"


def test_loss_se_is_that_of_the_batch_mean(tmp_path: Path) -> None:
    workload = small_workload()
    record = Trainer().run(workload, out=tmp_path / "run")
    model = build_model(workload, workload.config, CPU)
    ((batch, _),) = next(train_batches(workload, workload.config, CPU))
    losses = squared(model(batch[0]), batch).detach().numpy()
    assert record.steps["loss_se"][0] == pytest.approx(losses.std(ddof=1) / math.sqrt(len(losses)), rel=1e-9)


@pytest.mark.parametrize("weighted", [False, True])
def test_accumulation_gives_the_gradient_of_the_whole_batch(tmp_path: Path, weighted: bool) -> None:
    weights = (lambda batch: 0.5 + batch[1].abs()) if weighted else None
    whole = Trainer().run(small_workload(weights=weights), out=tmp_path / "whole")
    split = small_workload(weights=weights, config={"accumulate_steps": 4})
    parts = Trainer().run(split, out=tmp_path / "parts")
    for column in ("loss", "loss_se", "grad_norm"):
        np.testing.assert_allclose(parts.steps[column], whole.steps[column], rtol=1e-9)


def test_weight_zero_is_as_good_as_absent(tmp_path: Path) -> None:
    workload = small_workload(weights=lambda batch: (batch[1] > 0).double(), config={"batch_size": 48})
    data = workload.train_data
    keep = data.tensors[1] > 0
    kept = small_workload(
        train_data=TensorDataset(data.tensors[0][keep], data.tensors[1][keep]), config={"batch_size": int(keep.sum())}
    )
    ours, theirs = (Trainer().run(w, out=tmp_path / str(i)) for i, w in enumerate((workload, kept)))
    np.testing.assert_allclose(ours.steps["loss"], theirs.steps["loss"], rtol=1e-9)


class Nosy(Hook):
    """Looks at everything it is given, at every moment."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_start(self, run: Run) -> None:
        self.calls.append("start")

    def on_step(self, step: Step) -> None:
        self.calls.append("step")
        assert step.loss.shape == step.grad_norm.shape == step.lr.shape == (1,)
        step.record("user/twice_the_loss", 2 * step.loss)

    def on_evaluation(self, row: Mapping[str, Any]) -> None:
        self.calls.append(f"eval {row['step']} {row['metric']}")

    def on_end(self, record: TrialRecord) -> None:
        self.calls.append(f"end {record.number}")


def test_hooks_only_observe(tmp_path: Path) -> None:
    workload = small_workload(build_model=lambda: small_net(dropout=0.3))
    plain = Trainer(hooks=[Norms(every=1000), Timing()]).run(workload, out=tmp_path / "plain")
    nosy = Nosy()
    every = [Norms(every=1), UpdateRatios(every=1), Activations(every=1), nosy]
    observed = Trainer(hooks=every).run(workload, out=tmp_path / "observed")
    assert plain.steps["loss"].tolist() == observed.steps["loss"].tolist()
    assert plain.evals["value"].tolist() == observed.evals["value"].tolist()
    np.testing.assert_allclose(observed.steps["user/twice_the_loss"], 2 * observed.steps["loss"])
    assert nosy.calls[0] == "start"
    assert nosy.calls[-1] == "end 0"
    assert nosy.calls.count("step") == 40
    assert nosy.calls[1] == "eval 0 loss"


def test_bundled_hooks_measure_what_they_say(tmp_path: Path) -> None:
    workload = small_workload()
    hooks = [Norms(every=5), UpdateRatios(every=5), Activations(every=5)]
    steps = Trainer(hooks=hooks).run(workload, out=tmp_path / "run").steps
    model = build_model(workload, workload.config, CPU)
    size = math.sqrt(sum(float(p.detach().square().sum()) for p in model.parameters()))
    assert steps["param_norm"][0] == pytest.approx(size)
    assert steps["update_norm"][0] == pytest.approx(0.05 * steps["grad_norm"][0])
    first = model[0].weight
    ((batch, _),) = next(train_batches(workload, workload.config, CPU))
    squared(model(batch[0]), batch).mean().backward()
    assert steps["update_ratio/0.weight"][0] == pytest.approx(0.05 * float(first.grad.norm() / first.detach().norm()))
    assert steps["activation_rms/1"][0] == pytest.approx(
        float(model[1](model[0](batch[0])).detach().square().mean().sqrt())
    )
    assert steps["update_norm"].notna().tolist() == [k % 5 == 0 for k in range(40)]
    assert (steps["step_time_s"] > 0).all()
    assert (steps["data_wait_s"] <= steps["step_time_s"]).all()


def test_activations_detach_also_after_an_error_and_attach_once(tmp_path: Path) -> None:
    models: list[nn.Module] = []

    def build() -> nn.Module:
        models.append(small_net())
        return models[-1]

    class Breaks(Hook):
        def on_step(self, step: Step) -> None:
            if step.index == 5:
                raise RuntimeError("planted")

    watcher = Activations()
    with pytest.raises(RuntimeError, match="planted"):
        Trainer(hooks=[watcher, Breaks()]).run(small_workload(build_model=build), out=tmp_path / "run")
    assert all(not module._forward_hooks for model in models for module in model.modules())
    workload = small_workload()
    run = Run([models[0]], workload, [workload.config], CPU, {})
    watcher.on_start(run)
    watcher.on_start(run)
    assert sum(len(m._forward_hooks) for m in models[0].modules()) == 4


def test_evaluation_steps_are_fixed_in_steps_whatever_the_clock_does(tmp_path: Path) -> None:
    class Slow(Hook):
        def on_step(self, step: Step) -> None:
            if step.index == 3:
                time.sleep(0.2)

    workload = small_workload(config={"eval_every_steps": 7})
    usual, slow = (Trainer(hooks=h).run(workload, out=tmp_path / n) for h, n in (([], "a"), ([Slow()], "b")))
    assert usual.evals["step"].unique().tolist() == [0, 7, 14, 21, 28, 35, 40]
    assert slow.evals["step"].tolist() == usual.evals["step"].tolist()


def test_resume_after_kill_gives_bitwise_the_same_trace(tmp_path: Path) -> None:
    code = """
import sys, os, signal
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.helpers.workloads import small_workload, small_net
from workbench.train.trainer import Trainer
from workbench.train.hooks import Hook
from workbench.train import checkpoint
checkpoint.WRITE_SECONDS = -1.0  # every checkpoint is on disk at once
import random, torch
class Noisy(torch.utils.data.Dataset):
    def __init__(self, data): self.data = data
    def __len__(self): return len(self.data)
    def __getitem__(self, i):
        x, y = self.data[i]
        return x + 0.1 * torch.randn(3) + 0.01 * random.random(), y
class Dies(Hook):
    def on_step(self, step):
        if step.index == int(sys.argv[3]): os.kill(os.getpid(), signal.SIGKILL)
base = small_workload(build_model=lambda: small_net(0.3))
w = base.replace(train_data=Noisy(base.train_data), config=base.config.replace(optimizer="adam", schedule="cosine", warmup_steps=9, eval_every_steps=6))
Trainer(hooks=[Dies()]).run(w, out=sys.argv[2])
"""
    root = str(Path(__file__).parents[2])

    def train(out: str, die_at: int) -> int:
        return subprocess.run(
            [sys.executable, "-c", code, root, str(tmp_path / out), str(die_at)], check=False, timeout=120
        ).returncode

    assert train("whole", -1) == 0
    assert train("killed", 10) == -signal.SIGKILL
    assert open_record(tmp_path / "killed").state == "stopped", "what is there must be readable"
    assert train("killed", 27) == -signal.SIGKILL
    assert train("killed", -1) == 0
    events = [json.loads(line) for line in (tmp_path / "killed/trials/0/events.jsonl").read_text().splitlines()]
    assert [e.get("step") for e in events if e["event"] == "resumed"] == [6, 24]
    whole, killed = (open_record(tmp_path / name) for name in ("whole", "killed"))
    assert killed.steps["step"].tolist() == list(range(40))
    for column in ("loss", "grad_norm", "lr", "loss_se"):
        assert killed.steps[column].tolist() == whole.steps[column].tolist()
    assert killed.evals[["step", "value"]].values.tolist() == whole.evals[["step", "value"]].values.tolist()
    assert killed.best()[:2] == whole.best()[:2]


def test_interrupt_finishes_the_step_saves_and_goes_on(tmp_path: Path) -> None:
    class Interrupts(Hook):
        def on_step(self, step: Step) -> None:
            if step.index == 13:
                os.kill(os.getpid(), signal.SIGINT)

    workload = small_workload(build_model=lambda: small_net(0.3))
    whole = Trainer().run(workload, out=tmp_path / "whole")
    with pytest.raises(StudyInterrupted, match=r"stopped after step 14 of 40.*goes on from there"):
        Trainer(hooks=[Interrupts()]).run(workload, out=tmp_path / "stopped")
    stopped = open_record(tmp_path / "stopped")
    assert stopped.state == "stopped"
    assert len(stopped.steps) == 14
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    resumed = Trainer().run(workload, out=tmp_path / "stopped")
    assert resumed.state == "complete"
    assert resumed.steps["loss"].tolist() == whole.steps["loss"].tolist()


def test_an_interrupt_at_the_very_last_step_still_stops_whoever_would_go_on(tmp_path: Path) -> None:
    class Interrupts(Hook):
        def on_step(self, step: Step) -> None:
            if step.index == 39:
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(StudyInterrupted, match=r"stopped after step 40 of 40"):
        Trainer(hooks=[Interrupts()]).run(small_workload(), out=tmp_path / "run")
    assert open_record(tmp_path / "run").state == "complete"


def test_a_finished_trial_is_not_trained_again_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nosy = Nosy()
    first = Trainer().run(small_workload(), out=tmp_path / "run")
    assert "already finished" not in caplog.text
    again = Trainer(hooks=[nosy]).run(small_workload(), out=tmp_path / "run")
    assert nosy.calls == []
    assert again.steps.equals(first.steps)
    assert f"{tmp_path / 'run'}: already finished, nothing was trained" in caplog.text


def test_divergence_is_a_result_and_keeps_its_non_finite_row(tmp_path: Path) -> None:
    record = Trainer().run(small_workload(config={"peak_lr": 1e6, "total_steps": 400}), out=tmp_path / "run")
    assert record.state == "diverged"
    losses = record.steps["loss"].to_numpy()
    assert not np.isfinite(losses[-1])
    assert np.isfinite(losses[:-1]).all()
    assert record.best().step == 0


def test_best_checkpoint_reloads_to_the_logged_metric(tmp_path: Path) -> None:
    workload = small_workload(config={"eval_every_steps": 4})
    record = Trainer().run(workload, out=tmp_path / "run")
    best = record.best()
    assert best.value == record.evals.query("metric == 'loss'")["value"].min()
    assert best.checkpoint is not None
    model = load_model(build_model(workload, workload.config, CPU), best.checkpoint)
    x, y = workload.validation_data.tensors
    with torch.no_grad():
        assert float(((model.eval()(x.double()).squeeze(-1) - y) ** 2).mean()) == pytest.approx(best.value, rel=1e-6)
    assert len(record.checkpoints) <= workload.config.keep_best + 1


def test_the_callers_random_state_is_untouched(tmp_path: Path) -> None:
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    before = (torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate())
    Trainer().run(small_workload(build_model=lambda: small_net(0.5)), out=tmp_path / "run")
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (np.random.get_state()[1].tolist(), random.getstate())


def test_shared_seed_decides_the_model_and_per_host_seed_the_order() -> None:
    config = small_workload().config
    models = [
        build_model(small_workload(), config.replace(shared_seed=s, per_host_seed=h), CPU)[0].weight
        for s, h in ((0, 0), (0, 1), (1, 0))
    ]
    assert torch.equal(models[0], models[1])
    assert not torch.equal(models[0], models[2])
    orders = [
        next(train_batches(small_workload(), config.replace(shared_seed=s, per_host_seed=h), CPU))[0][0][1].tolist()
        for s, h in ((0, 0), (1, 0), (0, 1))
    ]
    assert orders[0] == orders[1] != orders[2]


@pytest.mark.parametrize("kind", ["tensors", "items", "workers", "iterable"])
def test_every_kind_of_dataset_gives_whole_batches(kind: str) -> None:
    class Items(Dataset[Any]):
        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.tensor([index])

    class Stream(IterableDataset[Any]):
        def __len__(self) -> int:
            return 20

        def __iter__(self) -> Any:
            return (torch.tensor([i]) for i in range(20))

    data = {"tensors": TensorDataset(torch.arange(20)), "iterable": Stream()}.get(kind, Items())
    workload = small_workload(train_data=data, num_workers=2 if kind == "workers" else 0, config={"batch_size": 6})
    batches = train_batches(workload, workload.config, CPU)
    epochs = [[int(v) for _ in range(3) for v in torch.as_tensor(_first(next(batches))).flatten()] for _ in range(3)]
    for epoch in epochs:
        assert len(set(epoch)) == 18, "an epoch repeats nothing and drops the incomplete batch"
    if kind != "iterable":
        assert epochs[0] != epochs[1]
    later = train_batches(workload, workload.config, CPU, start_step=4)
    assert [int(v) for v in torch.as_tensor(_first(next(later))).flatten()] == epochs[1][6:12]


def _first(micro_batches: Any) -> Any:
    batch = micro_batches[0][0]
    return batch[0] if isinstance(batch, (list, tuple)) else batch


def test_bfloat16_runs_the_forward_pass_in_it_and_keeps_the_parameters(tmp_path: Path) -> None:
    seen: list[torch.dtype] = []

    def loss(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        seen.append(outputs.dtype)
        return squared(outputs, batch)

    workload = small_workload(loss=loss, config={"precision": "bfloat16", "total_steps": 60})
    record = Trainer().run(workload, out=tmp_path / "run")
    assert set(seen) == {torch.bfloat16}
    assert record.steps["loss"].iloc[-10:].mean() < record.steps["loss"].iloc[:5].mean()
    assert load_checkpoint(record.checkpoints[-1]).model["0.weight"].dtype == torch.float32


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_cuda_follows_the_cpu(tmp_path: Path) -> None:
    runs = [Trainer(device=d).run(small_workload(), out=tmp_path / d) for d in ("cpu", "cuda")]
    np.testing.assert_allclose(runs[0].steps["loss"], runs[1].steps["loss"], rtol=1e-6)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_cuda_asked_for_where_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=r"device='cuda' was asked for.*Use device='cpu'"):
        Trainer(device="cuda").run(small_workload(), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


class _Item5Breaks(Dataset[Any]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise KeyError("no such file")
        return torch.zeros(3), torch.tensor(0.0)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"loss": lambda o, b: squared(o, b).mean()}, WorkloadError, r'shape \(\).*reduction="none"'),
        ({"loss": lambda o, b: squared(o, b) * math.nan}, WorkloadError, "not finite at step 0"),
        ({"train_data": TensorDataset(torch.zeros(0, 3), torch.zeros(0))}, DataError, "the train split has 0 examples"),
        ({"config": {"batch_size": 49}}, DataError, "batch_size=49 is more than the 48 examples"),
        ({"build_model": nn.Identity}, WorkloadError, "Identity has no parameters"),
        ({"build_model": lambda: small_net().requires_grad_(False)}, WorkloadError, "frozen"),
        ({"train_data": _Item5Breaks()}, DataError, r"item 5 of the train split.*KeyError"),
        ({"train_data": _Item5Breaks(), "num_workers": 1}, DataError, r"item 5 of the train split"),
        ({"config": {"select": "validation/acuracy"}}, UnknownNameError, "no select='validation/acuracy'"),
        ({"config": {"bn_stat_examples": 4}}, ConfigError, "bn_stat_examples=4"),
    ],
)
def test_bad_workloads_say_what_is_wrong(
    tmp_path: Path, fields: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Trainer().run(small_workload(**fields), out=tmp_path / "run")


def test_what_was_saved_before_a_failure_is_kept(tmp_path: Path) -> None:
    class FailsLate(Hook):
        def on_step(self, step: Step) -> None:
            if step.index == 30:
                raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        Trainer(hooks=[FailsLate()]).run(small_workload(), out=tmp_path / "run")
    record = open_record(tmp_path / "run")
    assert record.state == "failed"
    assert len(record.steps) == 30
    assert len(read_parts(tmp_path / "run" / "evals")["step"].unique()) == 8


def test_hooks_and_cadences_are_checked() -> None:
    with pytest.raises(ConfigError, match="hooks must hold workbench.Hook"):
        Trainer(hooks=[print])
    with pytest.raises(ConfigError, match="every=0"):
        Norms(every=0)
    with pytest.raises(ConfigError, match="gradients='fast'"):
        Trainer(gradients="fast")


class Ends(Hook):
    """Writes down that it ended, and raises where it is told to."""

    def __init__(self, log: list[str], name: str, *, on_end: str = "", on_step: str = "") -> None:
        self.log, self.name, self.end, self.step = log, name, on_end, on_step

    def on_step(self, step: Step) -> None:
        if self.step and step.index == 3:
            raise RuntimeError(self.step)

    def on_end(self, record: TrialRecord) -> None:
        self.log.append(f"{self.name} {record.state} {len(record.steps)}")
        if self.end:
            raise ValueError(self.end)


def test_every_hook_ends_when_another_one_fails_to(tmp_path: Path) -> None:
    log: list[str] = []
    hooks = [Ends(log, "a", on_end="first"), Ends(log, "b", on_end="second"), Ends(log, "c")]
    with pytest.raises(ValueError, match="first"):
        Trainer(hooks=hooks).run(small_workload(), out=tmp_path / "run")
    assert log == ["a complete 40", "b complete 40", "c complete 40"]
    assert open_record(tmp_path / "run").state == "complete"


def test_what_stopped_training_is_reported_before_what_a_hook_raised_at_the_end(tmp_path: Path) -> None:
    log: list[str] = []
    hooks = [Ends(log, "a", on_end="late"), Ends(log, "b", on_step="planted"), Ends(log, "c")]
    with pytest.raises(RuntimeError, match="planted") as caught:
        Trainer(hooks=hooks).run(small_workload(), out=tmp_path / "run")
    assert caught.value.__notes__ == ["Then a hook's on_end raised ValueError: late"]
    assert log == ["a failed 3", "b failed 3", "c failed 3"]


def test_every_hook_ends_when_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    class Fills(Hook):
        def on_step(self, step: Step) -> None:
            def full(*_: Any) -> None:
                raise OSError(28, "No space left on device")

            if step.index == 3:
                monkeypatch.setattr(os, "fsync", full)

    with pytest.raises(RecordError, match="No space left"):
        Trainer(hooks=[Ends(log, "a"), Fills(), Ends(log, "b")]).run(small_workload(), out=tmp_path / "run")
    monkeypatch.undo()
    assert [line[0] for line in log] == ["a", "b"]


def test_a_hook_cannot_change_a_row_that_is_stored(tmp_path: Path) -> None:
    class Forges(Hook):
        def on_evaluation(self, row: Any) -> None:
            row["value"] = -1.0

    with pytest.raises(TypeError, match="does not support item assignment"):
        Trainer(hooks=[Forges()]).run(small_workload(), out=tmp_path / "run")


@pytest.mark.parametrize("given", [{"peak_lr": 0.1}, {}, 3])
def test_a_config_of_another_type_is_refused(tmp_path: Path, given: Any) -> None:
    with pytest.raises(ConfigError, match=rf"must be a TrainConfig, not {type(given).__name__}.*TrainConfig\(peak_lr"):
        Trainer().run(small_workload(), given, out=tmp_path / "run")
    with pytest.raises(UsageError, match=r"workload must be a Workload, not str \(digits_mlp\)"):
        Trainer().run("digits_mlp", out=tmp_path / "run")  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="an MPS device is here")
def test_mps_asked_for_where_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=r"device='mps' was asked for.*Use 'cpu' or 'auto'"):
        Trainer(device="mps").run(small_workload(), out=tmp_path / "run")


def test_a_metric_nobody_listed_is_refused(tmp_path: Path) -> None:
    class Unlisted(Hook):
        def on_step(self, step: Step) -> None:
            step.record("grad_nrom", 1.0)

    with pytest.raises(UnknownNameError, match=r"Did you mean 'grad_norm'.*user/grad_nrom"):
        Trainer(hooks=[Unlisted()]).run(small_workload(), out=tmp_path / "run")
