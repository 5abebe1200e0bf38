"""What has a CUDA path, on a GPU: `make gpu`. The oracles are the CPU, plain PyTorch loops and torch's own detector of synchronisations."""

from __future__ import annotations

import copy
import math
import signal
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import workbench as wb
from tests.helpers.hooks import At
from tests.helpers.workloads import small_workload
from workbench.train.batches import train_batches
from workbench.train.checkpoint import load_checkpoint
from workbench.train.stacked_weights import build_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def _exact() -> Iterator[None]:
    """Run matrix products and convolutions in full float32, as the CPU does."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


@contextmanager
def synchronisations() -> Iterator[list[str]]:
    """Yield the list of what made the CPU wait for the device, as torch warns of it."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
            found += [f"{w.filename}:{w.lineno}" for w in told if "synchroniz" in str(w.message)]


def final(record: Any) -> dict[str, Tensor]:
    return load_checkpoint(sorted((record.folder / "checkpoints").glob("step-*"))[-1]).model


def net(width: int = 64) -> nn.Module:
    return nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4))


def classes(width: int = 64, *, steps: int = 60, examples: int = 512, **config: Any) -> wb.Workload:
    """A classification that a small net learns."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(examples, 16, generator=generator)
    y = (x @ torch.randn(16, 4, generator=generator)).argmax(1)
    return wb.Workload(
        name=f"classes-{width}",
        build_model=lambda: net(width),
        train_data=TensorDataset(x, y),
        validation_data=TensorDataset(x[:128], y[:128]),
        loss=lambda outputs, batch: F.cross_entropy(outputs, batch[1], reduction="none"),
        config=wb.TrainConfig(**({"peak_lr": 0.1, "total_steps": steps, "batch_size": 32} | config)),
    )


# ---- one trial


@pytest.mark.parametrize("name", ["digits_mlp", "digits_cnn", "source_text"])
def test_bundled_workloads_train_as_on_the_cpu(tmp_path: Path, name: str) -> None:
    workload = wb.load_workload(name)
    config = workload.config.replace(total_steps=20, precision="float32")
    cpu, cuda = (wb.Trainer(device=d).run(workload, config, out=tmp_path / d) for d in ("cpu", "cuda"))
    assert torch.cuda.max_memory_allocated() > 0
    np.testing.assert_allclose(cuda.steps["loss"], cpu.steps["loss"], rtol=2e-3)
    np.testing.assert_allclose(cuda.steps["grad_norm"], cpu.steps["grad_norm"], rtol=2e-2)


def test_resumes_bit_for_bit(tmp_path: Path) -> None:
    config = {"total_steps": 40, "checkpoint_every_steps": 10}
    workload = small_workload(config=config)
    whole = wb.Trainer(device="cuda").run(workload, out=tmp_path / "whole")
    with pytest.raises(wb.errors.StudyInterrupted):
        wb.Trainer(device="cuda", hooks=[At(25, signal.SIGINT)]).run(workload, out=tmp_path / "cut")
    resumed = wb.Trainer(device="cuda").run(workload, out=tmp_path / "cut")
    assert resumed.steps["loss"].tolist() == whole.steps["loss"].tolist()
    for name, value in final(whole).items():
        torch.testing.assert_close(final(resumed)[name], value, rtol=0, atol=0)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_short_precisions_are_autocast_of_torch(tmp_path: Path, precision: str) -> None:
    workload = classes(precision=precision, steps=30)
    record = wb.Trainer(device="cuda", gradients="loop").run(workload, out=tmp_path / "run")
    model = build_model(workload, workload.config, CUDA)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=workload.config.momentum)
    scaler = torch.amp.GradScaler("cuda", enabled=precision == "float16")
    losses, batches = [], train_batches(workload, workload.config, CUDA)
    for _ in range(30):
        ((x, y), _), *_ = next(batches)
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=getattr(torch, precision)):
            outputs = model(x)
        loss = F.cross_entropy(outputs.float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    np.testing.assert_allclose(record.steps["loss"], losses, rtol=2e-2)


# ---- lanes


@pytest.mark.parametrize("gradients", ["vmap", "auto"])
def test_lanes_train_as_one_after_the_other(tmp_path: Path, gradients: Any) -> None:
    workload, lrs = classes(), [0.01, 0.03, 0.1, 0.3]
    one, many = (
        wb.lr_sweep.Study(lrs=lrs, steps=40).run(workload, wb.Trainer(device="cuda", gradients=how), out=tmp_path / how)
        for how in ("loop", gradients)
    )
    key = ["trial", "step"]
    one_by_one, together = (r.steps.sort_values(key).set_index(key)["loss"] for r in (one, many))
    np.testing.assert_allclose(together, one_by_one, rtol=1e-3)


def test_lanes_that_run_out_of_memory_are_halved(tmp_path: Path) -> None:
    workload = classes(2048, steps=4)
    one = sum(p.numel() for p in net(2048).parameters()) * 4
    free, total = torch.cuda.mem_get_info()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(
        min(1.0, 40 * one / total)
    )  # for eight lanes with their gradients, not sixteen
    try:
        trainer = wb.Trainer(device="cuda", gradients="vmap", memory_gb=free / 1e9)
        record = wb.lr_sweep.Study(lrs=np.geomspace(1e-3, 1e-1, 16).tolist(), steps=4).run(
            workload, trainer, out=tmp_path / "study"
        )
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert set(record.trials["state"]) == {"complete"}
    assert record.steps["loss"].notna().all()


# ---- what waits for the device


@pytest.mark.parametrize("gradients", ["loop", "vmap"])
def test_a_step_waits_for_no_device(tmp_path: Path, gradients: Any) -> None:
    def count(steps: int) -> list[str]:
        workload = classes(steps=steps, examples=256)
        with synchronisations() as found:
            wb.Trainer(device="cuda", gradients=gradients).run(workload, out=tmp_path / f"{steps}")
        return found

    count(20)  # what is measured or built once
    short, long = count(200), count(400)
    assert short, "the detector hears nothing"
    assert len(long) - len(short) <= 20, sorted({(w, long.count(w) - short.count(w)) for w in long})


def watched(model: nn.Module, steps: int, out: Path | None) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    x, y = torch.randn(256, 16, device=CUDA), torch.randint(4, (256,), device=CUDA)
    losses = []

    def loop() -> None:
        for step in range(steps):
            rows = slice(step % 8 * 32, step % 8 * 32 + 32)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[rows]), y[rows])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.detach())

    if out is None:
        loop()
    else:
        with wb.watch(model, optimizer, out=out):
            loop()
    return torch.stack(losses).tolist()


def test_watching_changes_no_bit_and_waits_rarely(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = net().to(CUDA)

    def run(steps: int, out: Path | None) -> tuple[list[float], list[str]]:
        torch.manual_seed(1)
        with synchronisations() as found:
            losses = watched(copy.deepcopy(model), steps, out)
        return losses, found

    run(20, tmp_path / "warm")
    alone, _ = run(600, None)
    seen, few = run(600, tmp_path / "few")
    assert seen == alone
    _, many = run(1200, tmp_path / "many")
    assert len(many) - len(few) <= 60, sorted({(w, many.count(w) - few.count(w)) for w in many})  # one in ten updates
    losses = wb.open(tmp_path / "few").steps["loss"]
    assert losses.notna().mean() > 0.9
    np.testing.assert_allclose(losses.dropna(), np.array(alone)[losses.notna()], rtol=1e-5)


# ---- studies


def test_a_diagnosis_ends_in_a_verdict(tmp_path: Path) -> None:
    diagnosis = wb.diagnose(wb.load_workload("digits_mlp"), tmp_path / "study", device="cuda")
    found = {finding.code: finding for finding in diagnosis.findings}
    assert found["lr.best"].status == "ok", found["lr.best"].summary
    assert math.isfinite(found["lr.unstable"].value)


class Rows(TensorDataset):
    """Rows that take their time."""

    def __init__(self, seconds: float) -> None:
        super().__init__(torch.randn(512, 16), torch.randint(4, (512,)))
        self.seconds = seconds

    def __getitem__(self, index: int) -> Any:
        if self.seconds:
            time.sleep(self.seconds)
        return super().__getitem__(index)


@pytest.mark.parametrize(("seconds", "width", "waits"), [(0.002, 64, True), (0.0, 4096, False)])
def test_waiting_for_data_is_told_from_work_that_the_device_still_does(seconds: float, width: int, waits: bool) -> None:
    model = net(width).to(CUDA)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(batch: Any) -> None:
        x, y = (t.to(CUDA) for t in batch)
        for _ in range(1 if waits else 40):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    loader = DataLoader(Rows(seconds), batch_size=32, shuffle=True)
    found = wb.input.diagnose(wb.input.audit(loader, step, seconds=4.0, max_workers=2))["input.bound"]
    assert (found.status in ("warn", "fail")) is waits, found.summary
    assert found.status != "not_measured", found.summary
