"""Other tools on the same cases, each used as its documentation says; their alarms beside ours in docs/zoo.md.

    pip install torch-lr-finder torchtest2 torch-audit cockpit-for-pytorch lightning "setuptools<80"   # an environment of their own
    python -m tests.zoo.peers --out build/zoo-peers            # one JSON a case; a case that is there is not run again; make zoo reads them
    python tests/zoo/peers_data.py build/zoo-peers             # deepchecks needs another one: its versions are in that file

A tool that raises on a case has said nothing of it: that is kept as "raised".
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import chdir, redirect_stderr, redirect_stdout
from multiprocessing import Pool
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.zoo import plain
from tests.zoo.cases import CASES
from tests.zoo.run import place
from workbench import Workload

ROWS = 2000
LR_FACTOR = 10.0
"""A finder that suggests ten times more or less than the baseline's learning rate says that it is off."""


def first_batch(workload: Workload) -> Any:
    """Return one training batch of the size that the config trains with."""
    torch.manual_seed(0)
    return next(iter(loader(workload)))


def loader(workload: Workload) -> DataLoader[Any]:
    """Return batches of the training split."""
    stream = isinstance(workload.train_data, torch.utils.data.IterableDataset)
    return DataLoader(workload.train_data, workload.config.batch_size, shuffle=not stream, drop_last=True, collate_fn=workload.collate)  # fmt: skip


class Whole(nn.Module):
    """A model that takes a whole batch, so that tools which call `model(inputs)` see the same outputs."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.workload = workload.build_model(), [workload]

    def forward(self, *batch: Tensor) -> Any:
        whole = batch[0] if len(batch) == 1 and isinstance(batch[0], (tuple, list)) else batch
        return self.workload[0].forward(self.inner, tuple(whole))


def optimizer_of(workload: Workload, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that the config names."""
    config, trained = workload.config, list(model.parameters())
    if callable(config.optimizer):
        return config.optimizer(trained, config.peak_lr)
    return plain.OWN[config.optimizer](trained, config.peak_lr, config)


def torchtest2(workload: Workload) -> list[str]:
    """The 18 one-batch checks; a failure or a warning is an alarm."""
    from torchtest2 import check_model

    batch, model = tuple(first_batch(workload)), Whole(workload)
    loss = lambda outputs, _: workload.loss(outputs, batch).mean()  # noqa: E731
    report = check_model(model.inner, batch[0], batch[-1], loss_fn=loss, optimizer=optimizer_of(workload, model.inner))
    return [result.name for result in (*report.failures, *report.warnings)]


def torch_audit(workload: Workload) -> list[str]:
    """Static, start and 30 training steps in its zero-touch mode, each audited; rules of performance are left out."""
    from torch_audit import autopatch
    from torch_audit.core import Severity

    model = Whole(workload).inner
    optimizer = optimizer_of(workload, model)
    auditor = autopatch(model, optimizer=optimizer, every_n_steps=1, reporters=[], fail_level="FATAL", run_static=True, run_init=True)  # fmt: skip
    for _, batch in zip(range(30), loader(workload), strict=False):
        optimizer.zero_grad()
        workload.loss(workload.forward(model, batch), batch).mean().backward()
        optimizer.step()
    result = auditor.finish(report=False)
    found = [f.rule_id for f in result.findings if f.severity >= Severity.WARN]
    return sorted({rule for rule in found if not rule.startswith("TA2")})


def nan_or_spike(workload: Workload) -> list[str]:
    """A loss that is not finite, or six standard deviations above the mean of the last 50, after 50 steps."""
    losses = plain.train(workload, workload.config, 0, evaluations=1)["loss"]
    if not all(map(math.isfinite, losses)):
        return ["nan"]
    for step in range(50, len(losses)):
        before = losses[step - 50 : step]
        if losses[step] > statistics.fmean(before) + 6 * statistics.stdev(before):
            return ["spike"]
    return []


def finder(workload: Workload) -> list[str]:
    """torch-lr-finder: its suggestion, the steepest point of an exponential range test from 1e-7 to 10 over 100 steps."""
    from torch_lr_finder import LRFinder, TrainDataLoaderIter

    model = Whole(workload)
    optimizer = optimizer_of(workload, model.inner)
    for group in optimizer.param_groups:
        group["lr"] = 1e-7

    class Batches(TrainDataLoaderIter):
        def inputs_labels_from_batch(self, batch: Any) -> tuple[Any, Any]:
            return batch, batch

    with tempfile.TemporaryDirectory() as folder:
        criterion = lambda outputs, batch: workload.loss(outputs, batch).mean()  # noqa: E731
        search = LRFinder(model, optimizer, criterion, cache_dir=folder)
        search.range_test(Batches(loader(workload)), end_lr=10, num_iter=100)
    import matplotlib as mpl

    mpl.use("Agg")
    _, suggested = search.plot()
    return off(suggested, workload)


def lightning(workload: Workload) -> list[str]:
    """Lightning: `Tuner.lr_find` with its defaults."""
    import lightning as pl
    from lightning.pytorch.tuner import Tuner

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.whole, self.lr = Whole(workload), workload.config.peak_lr

        def training_step(self, batch: Any) -> Tensor:
            return workload.loss(workload.forward(self.whole.inner, batch), batch).mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            optimizer = optimizer_of(workload, self.whole.inner)
            for group in optimizer.param_groups:
                group["lr"] = self.lr
            return optimizer

    trainer = pl.Trainer(max_epochs=100, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
    found = Tuner(trainer).lr_find(Module(), train_dataloaders=loader(workload))
    return off(None if found is None else found.suggestion(), workload)


def off(suggested: float | None, workload: Workload) -> list[str]:
    """Return what a suggestion says of the baseline's learning rate."""
    if suggested is None:
        return []
    ratio = suggested / workload.config.peak_lr
    return ["lr too low"] if ratio >= LR_FACTOR else ["lr too high"] if ratio <= 1 / LR_FACTOR else []


def cockpit(workload: Workload) -> list[str]:
    """Cockpit draws instruments; its one alarm is a warning of a loss that is not finite."""
    from cockpit import Cockpit, quantities
    from cockpit.utils.schedules import linear

    model = Whole(workload)
    optimizer = optimizer_of(workload, model.inner)
    watch = Cockpit(model.inner.parameters(), quantities=[quantities.GradNorm(track_schedule=linear(1)), quantities.UpdateSize(track_schedule=linear(1))])  # fmt: skip
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        step = 0
        while step < workload.config.total_steps:
            for batch in loader(workload):
                optimizer.zero_grad()
                losses = workload.loss(workload.forward(model.inner, batch), batch)
                with watch(step, info={"batch_size": len(losses), "individual_losses": losses, "loss": losses.mean(), "optimizer": optimizer}):  # fmt: skip
                    losses.mean().backward(create_graph=watch.create_graph(step))
                optimizer.step()
                step += 1
                if step >= workload.config.total_steps:
                    break
    return ["loss not finite"] if any("nan or inf" in str(w.message).lower() or "loss" in str(w.message).lower() for w in told) else []  # fmt: skip


PEERS: dict[str, Callable[[Workload], list[str]]] = {
    "torchtest2": torchtest2,
    "torch-audit": torch_audit,
    "NaN/spike rule": nan_or_spike,
    "torch-lr-finder": finder,
    "Lightning lr_find": lightning,
    "Cockpit": cockpit,
}


def run(job: tuple[str, Path]) -> str:
    """Ask every tool about one case, and keep its data for deepchecks."""
    case, out = CASES[job[0]], job[1]
    torch.set_num_threads(1)
    path = place(out, case)
    if path.exists():
        return case.name
    workload = case.named().workload()
    found: dict[str, Any] = {}
    for name, ask in PEERS.items():
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), tempfile.TemporaryDirectory() as folder:  # fmt: skip
            warnings.simplefilter("ignore")
            with chdir(folder):
                try:
                    found[name] = ask(workload)
                except Exception as error:  # a tool that raises is a result
                    found[name] = f"raised {type(error).__name__}: {str(error)[:200]}"
    rows = dict(table(workload))
    if rows:
        np.savez(path.with_suffix(".npz"), **rows)
    path.write_text(json.dumps(found, indent=1))
    return case.name


def table(workload: Workload) -> Iterator[tuple[str, np.ndarray]]:
    """Yield inputs and targets of both splits as flat rows, where that is what the data are."""
    parts = {}
    for split, data in (("train", workload.train_data), ("validation", workload.validation_data)):
        try:
            items = [item for _, item in zip(range(ROWS), data, strict=False)]
            x = torch.stack([torch.as_tensor(item[0]).flatten().double() for item in items]).numpy()
            y = torch.stack([torch.as_tensor(item[-1]) for item in items]).numpy()
        except (RuntimeError, TypeError, ValueError, IndexError):
            return
        if y.ndim > 2 or (y.ndim == 2 and y.shape[1] > 1):
            return
        parts |= {f"{split}_x": x, f"{split}_y": y.ravel()}
    yield from parts.items()


def main() -> None:
    """Run the tools over the cases, in as many processes as there are cores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default="", help="names that contain this")
    given = parser.parse_args()
    out = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    jobs = [(name, out) for name in CASES if given.only in name]
    with Pool(given.jobs, maxtasksperchild=10) as pool:
        for k, name in enumerate(pool.imap_unordered(run, jobs), 1):
            print(f"{k}/{len(jobs)} {name}", flush=True)


if __name__ == "__main__":
    main()
