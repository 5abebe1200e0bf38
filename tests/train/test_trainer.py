"""The trainer against a bare loop in plain PyTorch, and what it promises about observation, resume and interrupts."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.hooks import At, Threads
from tests.helpers.workloads import small_net, small_workload, squared
from workbench.cli.signals import ended_like_ctrl_c
from workbench.errors import (
    ConfigError,
    DeviceError,
    RecordError,
    StudyInterrupted,
    UnknownNameError,
    UsageError,
)
from workbench.record.read import TrialRecord, open_record
from workbench.record.tables import read_parts
from workbench.topics.lr_sweep.study import LRSweep
from workbench.train.batches import train_batches
from workbench.train.checkpoint import load_model
from workbench.train.hooks import Hook, Norms, Pause, Run, Step, Timing
from workbench.train.stacked_weights import build_model
from workbench.train.trainer import Trainer

CPU = torch.device("cpu")


def bare_loop(workload: Any, config: Any) -> tuple[list[float], list[float], np.ndarray]:
    """The same training written the ordinary way, with torch's own optimizer, norm and clipping."""
    model = build_model(workload, config, CPU)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.peak_lr, momentum=config.momentum)
    losses, norms, first = [], [], None
    batches = train_batches(workload, config, CPU)
    for _ in range(config.total_steps):
        ((batch, _),) = next(batches)
        optimizer.zero_grad()
        each = squared(model(batch[0]), batch)
        first = each.detach().numpy() if first is None else first
        loss = each.mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm or math.inf)
        losses.append(loss.item())
        norms.append(norm.item())
        optimizer.step()
    return losses, norms, first


@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_equals_a_bare_loop(tmp_path: Path, max_grad_norm: float | None) -> None:
    workload = small_workload(config={"max_grad_norm": max_grad_norm})
    record = Trainer().run(workload, out=tmp_path / "run")
    losses, norms, first = bare_loop(workload, workload.config)
    np.testing.assert_allclose(record.steps["loss"], losses, rtol=1e-5)
    np.testing.assert_allclose(record.steps["grad_norm"], norms, rtol=1e-5)
    assert record.steps["loss_se"][0] == pytest.approx(first.std(ddof=1) / math.sqrt(len(first)), rel=1e-9)
    if max_grad_norm is not None:
        assert record.steps["clipped"].tolist() == [n > max_grad_norm for n in norms]
        assert 0 < record.steps["clipped"].mean() < 1, "both cases must occur for this test to mean anything"
        assert (record.steps["grad_norm"] > max_grad_norm).any(), "the unclipped norm is what is recorded"


@pytest.mark.parametrize("weighted", [False, True])
def test_accumulation_gives_the_gradient_of_the_whole_batch(tmp_path: Path, weighted: bool) -> None:
    weights = (lambda batch: 0.5 + batch[1].abs()) if weighted else None
    whole = Trainer().run(small_workload(weights=weights), out=tmp_path / "whole")
    split = small_workload(weights=weights, config={"accumulate_steps": 4})
    parts = Trainer().run(split, out=tmp_path / "parts")
    for column in ("loss", "loss_se", "grad_norm"):
        np.testing.assert_allclose(parts.steps[column], whole.steps[column], rtol=1e-9)
    if weights is not None:  # the formulas themselves, at the first step
        model = build_model(split, split.config, CPU)
        x, y = (
            torch.cat(part) for part in zip(*(b for b, _ in next(train_batches(split, split.config, CPU))), strict=True)
        )
        losses, w = squared(model(x), (x, y)), weights((x, y))
        mean = (w * losses).sum() / w.sum()
        spread = ((w * (losses - mean)) ** 2).sum().sqrt() / w.sum() * math.sqrt(8 / 7)
        assert parts.steps["loss"][0] == pytest.approx(mean.item(), rel=1e-9)
        assert parts.steps["loss_se"][0] == pytest.approx(spread.item(), rel=1e-9)


class Nosy(Hook):
    """Looks at everything it is given, at every moment."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_start(self, run: Run) -> None:
        self.calls.append("start")

    def on_step(self, step: Step) -> None:
        self.calls.append("step")
        assert step.loss.shape == step.grad_norm.shape == step.lr.shape == (1,)
        assert step.index or step.update.equal(step.lr.unsqueeze(1) * step.grad), (
            "the update has memory of its own where a hook reads the gradient"
        )
        step.record("user/twice_the_loss", 2 * step.loss)

    def on_evaluation(self, row: Mapping[str, Any]) -> None:
        self.calls.append(f"eval {row['step']} {row['metric']}")

    def on_end(self, record: TrialRecord) -> None:
        self.calls.append(f"end {record.number}")


def test_hooks_only_observe_and_measure_what_they_say(tmp_path: Path) -> None:
    plain = Trainer(hooks=[Norms(every=1000), Timing()]).run(small_workload(), out=tmp_path / "plain")
    workload, nosy = small_workload(), Nosy()
    observed = Trainer(hooks=[Norms(every=5), nosy]).run(workload, out=tmp_path / "observed")
    steps = observed.steps
    assert plain.steps["loss"].tolist() == steps["loss"].tolist()
    assert plain.evals["value"].tolist() == observed.evals["value"].tolist()
    np.testing.assert_allclose(steps["user/twice_the_loss"], 2 * steps["loss"])
    assert [nosy.calls[0], nosy.calls[1], nosy.calls[-1]] == ["start", "eval 0 loss", "end 0"]
    assert nosy.calls.count("step") == 40
    model = build_model(workload, workload.config, CPU)
    size = math.sqrt(sum(float(p.detach().square().sum()) for p in model.parameters()))
    assert steps["param_norm"][0] == pytest.approx(size)
    assert steps["update_norm"][0] == pytest.approx(0.05 * steps["grad_norm"][0])
    assert steps["update_norm"].notna().tolist() == [k % 5 == 0 for k in range(40)]
    assert (steps["step_time_s"] > steps["data_wait_s"]).all()


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


def test_an_interrupt_finishes_the_step_saves_and_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    workload = small_workload(build_model=lambda: small_net(0.3))
    whole = Trainer().run(workload, out=tmp_path / "whole")
    with (
        ended_like_ctrl_c(),  # as a command runs, and a queue or a container ends it
        pytest.raises(StudyInterrupted, match=r"stopped after step 14 of 40.*the same command or cell resumes"),
    ):
        Trainer(hooks=[At(13, signal.SIGTERM)]).run(workload, out=tmp_path / "stopped")
    stopped = open_record(tmp_path / "stopped")
    assert (stopped.state, len(stopped.steps)) == ("stopped", 14)
    with pytest.raises(StudyInterrupted, match=r"stopped after step 40 of 40"):
        Trainer(hooks=[At(39, signal.SIGINT)]).run(workload, out=tmp_path / "stopped")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    resumed, nosy = Trainer().run(workload, out=tmp_path / "stopped"), Nosy()
    assert resumed.state == "complete"
    assert "already finished" not in caplog.text
    again = Trainer(hooks=[nosy]).run(workload, out=tmp_path / "stopped")
    assert f"{tmp_path / 'stopped'}: already finished, nothing was trained" in caplog.text
    assert nosy.calls == []
    assert again.steps["loss"].tolist() == whole.steps["loss"].tolist()


def test_divergence_is_a_result_and_keeps_its_non_finite_row(tmp_path: Path) -> None:
    record = Trainer().run(small_workload(config={"peak_lr": 1e6, "total_steps": 400}), out=tmp_path / "run")
    assert record.state == "diverged"
    losses = record.steps["loss"].to_numpy()
    assert not np.isfinite(losses[-1])
    assert np.isfinite(losses[:-1]).all()
    assert record.best().step == 0


CONFIG = {"total_steps": 20, "eval_every_steps": 6, "keep_best": 9}


def test_blocks_of_training_and_evaluation_alternate_and_a_pause_moves_nothing(tmp_path: Path) -> None:
    """Evaluated every so many steps, whatever the clock does (P2.5, P2.8); the curve and its checkpoints are kept (P2.6)."""
    log = Nosy()
    calm = Trainer(hooks=[log]).run(small_workload(config=CONFIG), out=tmp_path / "calm")
    blocks = [(kind, len(list(group))) for kind, group in itertools.groupby(call[:4] for call in log.calls)]
    evaluations = [("step", 6), ("eval", 2)]
    assert blocks == [("star", 1), ("eval", 2), *(evaluations * 3), ("step", 2), ("eval", 2), ("end ", 1)]
    held_up = Trainer(hooks=[Pause(7, 0.05)]).run(small_workload(config=CONFIG), out=tmp_path / "held up")
    assert held_up.steps["step_time_s"].max() >= 0.05
    assert calm.evals.drop(columns="seconds").equals(held_up.evals.drop(columns="seconds"))
    curve = calm.evals[calm.evals["metric"] == "loss"].set_index("step")["value"]
    assert [int(path.name[-8:]) for path in calm.checkpoints] == curve.index.tolist() == [0, 6, 12, 18, 20]
    best = calm.best()
    assert best.value == curve.min()
    assert best.checkpoint is not None
    workload = small_workload()
    model = load_model(build_model(workload, workload.config, CPU), best.checkpoint).eval()
    x, y = workload.validation_data.tensors
    with torch.no_grad():
        assert float(((model(x.double()).squeeze(-1) - y) ** 2).mean()) == pytest.approx(best.value, rel=1e-6)


class Ends(Hook):
    """Writes down that it ended, and raises where it is told to."""

    def __init__(self, log: list[str], name: str, error: str = "") -> None:
        self.log, self.name, self.error = log, name, error

    def on_end(self, record: TrialRecord) -> None:
        self.log.append(f"{self.name} {record.state} {len(record.steps)}")
        if self.error:
            raise ValueError(self.error)


def fill_the_disk(_: Step) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    os.fsync = full


def unlisted(step: Step) -> None:
    step.record("grad_nrom", 1.0)


@pytest.mark.parametrize(("do", "error", "said", "state"), [
    (None, ValueError, "first", "complete 40"),
    (RuntimeError("planted"), RuntimeError, "planted", "failed 3"),
    (unlisted, UnknownNameError, r"Did you mean 'grad_norm'.*user/grad_nrom", "failed 3"),
    (fill_the_disk, RecordError, "No space left", None),
])  # fmt: skip
def test_every_hook_ends_whatever_was_raised_and_what_was_saved_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, do: Any, error: type[Exception], said: str, state: str | None
) -> None:
    monkeypatch.setattr(os, "fsync", os.fsync)
    log: list[str] = []
    hooks = [Ends(log, "a", "first"), *([At(3, do)] if do else []), Ends(log, "b", "second"), Ends(log, "c")]
    with pytest.raises(error, match=said) as caught:
        Trainer(hooks=hooks).run(small_workload(config={"eval_every_steps": 2}), out=tmp_path / "run")
    monkeypatch.undo()
    assert [line[0] for line in log] == ["a", "b", "c"]
    if do and state:
        notes = [f"Then a hook's on_end raised ValueError: {name}" for name in ("first", "second")]
        assert caught.value.__notes__ == notes
    if state:
        assert [line[2:] for line in log] == [state] * 3
        record = open_record(tmp_path / "run")
        assert record.state == state.split()[0]
        assert read_parts(tmp_path / "run" / "evals")["step"].max() == (2 if do else 40)


@pytest.mark.parametrize(("call", "error", "said"), [

    (lambda out: Trainer(hooks=[print]), ConfigError, "hooks must hold workbench.hooks.Hook"),
    (lambda out: Norms(every=0), ConfigError, "every=0 must be an integer of at least 1: measure"),
    (lambda out: Trainer(gradients="fast"), ConfigError, "gradients='fast'"),
    (lambda out: Trainer(memory_gb=0), ConfigError, "memory_gb=0 must be above 0"),
    (lambda out: Trainer(evaluate_also=["test"]).run(small_workload(), out=out), ConfigError, "'small' has no split 'test'"),
    (lambda out: Trainer().run(small_workload(), {"peak_lr": 0.1}, out=out), ConfigError, r"must be a TrainConfig, not dict.*TrainConfig\(peak_lr"),
    (lambda out: Trainer().run("digits_mlp", out=out), UsageError, r"workload must be a Workload, not str \(digits_mlp\)"),
    (lambda out: Trainer(device="cuda:99").run(small_workload(), out=out), DeviceError, "Use device='cpu' or device='auto'"),
])  # fmt: skip
def test_wrong_arguments_are_named(tmp_path: Path, call: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        call(tmp_path / "run")


def test_a_finished_run_without_a_folder_begins_anew_and_an_interrupted_one_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(KeyboardInterrupt):
        Trainer(hooks=[At(20, KeyboardInterrupt())]).run(small_workload())
    (folder,) = (p for p in (tmp_path / "runs").iterdir() if p.is_dir())
    resumed = Trainer().run(small_workload())
    assert resumed.path.name == folder.name
    assert resumed.state == "complete"
    other = Trainer().run(small_workload(config={"peak_lr": 0.01}))
    again = Trainer().run(small_workload())
    assert len({resumed.path.name, other.path.name, again.path.name}) == 3


@pytest.mark.parametrize(
    ("width", "default", "environment", "threads", "seen"),
    [
        (8, 4, {}, None, 1),
        (8, 2, {}, None, 1),  # torch's own number where two processors are a core
        (8, 2, {"OMP_NUM_THREADS": "2"}, None, 2),
        (8, 3, {}, None, 3),  # not the machine's own number: somebody has set it
        (8, 2, {}, 2, 2),
        (4096, 2, {}, 1, 1),
    ],
)
def test_a_small_model_trains_on_one_thread_unless_a_number_was_set_and_the_number_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int, default: int, environment: dict[str, str], threads: int | None, seen: int
) -> None:  # fmt: skip
    def build() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.ReLU(), torch.nn.Linear(width, 1))

    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    given = small_workload(build_model=build)
    torch.set_num_threads(default)
    try:
        for study in (False, True):
            hook = Threads()
            trainer = Trainer(hooks=[hook], threads=threads)
            if study:
                LRSweep(lrs=(0.01, 0.02), steps=5).run(given, trainer, out=tmp_path / "study")
            else:
                trainer.run(given, out=tmp_path / "run")
            assert hook.seen == {seen}
            assert torch.get_num_threads() == default
    finally:
        torch.set_num_threads(1)
