"""What a person would pick instead of lanes: Lightning, Optuna and Ray Tune around the same model, batches and optimizer.

Each is used the quick way: bars, loggers and its own checkpoints off, the same indexed batches as the bare loop, its
cluster or storage made before the clock starts. Each trial is evaluated and saved ten times, like the bare loop's.
"""

from __future__ import annotations

import importlib
import logging
import os
import tempfile
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bare import Seconds, bare_loop, clock, indexed, on_device, optimizer_of
from timing import cores_here

import workbench as wb

PACKAGES = {"lightning": "lightning", "optuna": "optuna", "ray": "ray.tune"}
CHECKS = 10


def missing(peer: str) -> str | None:
    """Return why a peer cannot be measured; None when it can."""
    try:
        importlib.import_module(PACKAGES.get(peer, "torch"))
    except ImportError as error:
        return f"Without {peer}: {error}. Install it with: pip install -c constraints.txt -e '.[bench]'"
    return None


def plain(workload: wb.Workload, configs: Sequence[wb.TrainConfig], device: torch.device) -> Seconds:
    """Train one trial after the other by the bare loop."""
    return total([bare_loop(workload, config, checks=CHECKS, device=device)[0] for config in configs])


def total(parts: Sequence[Seconds]) -> Seconds:
    """Return the sum."""
    return Seconds(sum(p.training for p in parts), sum(p.whole for p in parts))


def lightning(workload: wb.Workload, configs: Sequence[wb.TrainConfig], device: torch.device) -> Seconds:
    """Train one trial after the other by a Lightning `Trainer`."""
    import lightning  # noqa: F401  # it sets the levels of its own loggers

    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return total([_lightning_trial(workload, config, device) for config in configs])


def _lightning_trial(workload: wb.Workload, config: wb.TrainConfig, device: torch.device) -> Seconds:
    from lightning import LightningModule, Trainer
    from torch.utils.data import DataLoader

    class Module(LightningModule):
        """The workload as Lightning wants it; the clock stops while it validates and saves."""

        def __init__(self) -> None:
            super().__init__()
            self.model = workload.build_model()
            self.start = self.end = self.paused = self.before = 0.0

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return workload.loss(workload.forward(self.model, batch), batch).mean()

        def validation_step(self, batch: Any, index: int) -> None:
            outputs = workload.forward(self.model, on_device(batch, device))
            for value in (workload.loss(outputs, batch), *(m(outputs, batch) for m in workload.metrics.values())):
                float(value.mean())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self.model, config)

        def on_train_start(self) -> None:
            self.start = clock(device)

        def on_validation_start(self) -> None:
            self.before = clock(device)

        def on_validation_end(self) -> None:
            with tempfile.TemporaryDirectory() as folder:
                torch.save(self.model.state_dict(), Path(folder) / "model.pt")
            self.paused += clock(device) - self.before

        def on_train_end(self) -> None:
            self.end = clock(device)

    began = clock(device)
    torch.manual_seed(0)
    module = Module()
    trainer = Trainer(
        accelerator=device.type,
        devices=1 if device.index is None else [device.index],
        max_steps=config.total_steps,
        val_check_interval=max(1, config.total_steps // CHECKS),
        check_val_every_n_epoch=None,
        barebones=True,  # no bar, logger, checkpoint or summary
    )
    validation = DataLoader(workload.validation_data, config.evaluation_batch, collate_fn=workload.collate)
    trainer.fit(module, _Endless(workload, config.batch_size, device), validation)
    return Seconds(module.end - module.start - module.paused, clock(device) - began)


class _Endless:
    """The batches of the bare loop as an iterable without a length."""

    def __init__(self, workload: wb.Workload, batch_size: int, device: torch.device) -> None:
        self.make = partial(indexed, workload, batch_size, device)

    def __iter__(self) -> Any:
        return self.make()


def optuna(workload: wb.Workload, configs: Sequence[wb.TrainConfig], device: torch.device) -> Seconds:
    """Train one Optuna trial after the other by the bare loop; the study lies in a SQLite file."""
    import optuna as library

    library.logging.set_verbosity(library.logging.WARNING)
    by_lr = {config.peak_lr: config for config in configs}
    parts: list[Seconds] = []

    def objective(trial: Any) -> float:
        seconds, value = bare_loop(
            workload, by_lr[trial.suggest_categorical("lr", list(by_lr))], checks=CHECKS, device=device
        )
        parts.append(seconds)
        return value

    with tempfile.TemporaryDirectory() as folder:
        study = library.create_study(
            storage=f"sqlite:///{folder}/optuna.db", sampler=library.samplers.GridSampler({"lr": list(by_lr)}, seed=0)
        )
        began = clock(device)
        study.optimize(objective, n_trials=len(configs))
        whole = clock(device) - began
    assert len(parts) == len(configs)
    return Seconds(total(parts).training, whole)


def ray_tune(workload: wb.Workload, configs: Sequence[wb.TrainConfig], device: torch.device) -> Seconds:
    """Train as many Ray Tune trials at a time as there are cores, each by the bare loop on one CPU.

    The cluster runs only while this side is measured, and its start is not counted. Training alone is the mean over the
    trials, times how many follow one another on a core.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"
    import ray
    from ray import tune

    cores = cores_here()
    needs = {"cpu": 1.0} | ({"gpu": 1.0 / cores} if device.type == "cuda" else {})
    by_lr = {config.peak_lr: config for config in configs}
    ray.init(num_cpus=cores, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        with tempfile.TemporaryDirectory() as folder:
            trainable = tune.with_parameters(_ray_trial, workload=workload, by_lr=by_lr, device=device)
            tuner = tune.Tuner(
                tune.with_resources(trainable, needs),
                param_space={"lr": tune.grid_search(list(by_lr))},
                tune_config=tune.TuneConfig(metric="loss", mode="min"),
                run_config=tune.RunConfig(storage_path=folder, verbose=0),
            )
            began = clock(device)
            results = tuner.fit()
            whole = clock(device) - began
    finally:
        ray.shutdown()
    if results.num_errors or len(results) != len(configs):
        raise RuntimeError(f"{results.num_errors} of {len(configs)} Ray Tune trials failed: {results.errors[:1]}")
    training = [result.metrics["training_s"] for result in results]
    return Seconds(sum(training) / len(training) * waves(len(training)), whole)


def _ray_trial(
    sampled: dict[str, float], *, workload: wb.Workload, by_lr: dict[float, wb.TrainConfig], device: torch.device
) -> dict[str, float]:
    torch.set_num_threads(1)
    seconds, value = bare_loop(workload, by_lr[sampled["lr"]], checks=CHECKS, device=device)
    return {"loss": value, "training_s": seconds.training}


def waves(trials: int) -> int:
    """Return how many trials follow one another where one runs on each core."""
    return -(-trials // cores_here())
