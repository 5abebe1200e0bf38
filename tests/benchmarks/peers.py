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
from typing import Any

import torch
from bare import Seconds, bare_loop, clock, evaluate_and_save, indexed, optimizer_of
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

    every = max(1, config.total_steps // CHECKS)

    class Module(LightningModule):
        """The workload as Lightning wants it; the clock stops while it is evaluated and saved."""

        def __init__(self) -> None:
            super().__init__()
            self.model = workload.build_model()
            self.start = self.end = self.paused = 0.0

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return workload.loss(workload.forward(self.model, batch), batch).mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self.model, config)

        def on_train_start(self) -> None:
            self.start = clock(device)

        def on_train_batch_start(self, batch: Any, index: int) -> None:
            if index % every == 0:
                before = clock(device)
                evaluate_and_save(workload, self.model, config, device)
                self.paused += clock(device) - before

        def on_train_end(self) -> None:
            self.end = clock(device)

    class Endless:
        """The batches of the bare loop as an iterable without a length."""

        def __iter__(self) -> Any:
            return indexed(workload, config.batch_size, device)

    began = clock(device)
    torch.manual_seed(0)
    module = Module()
    trainer = Trainer(
        accelerator=device.type,
        devices=1 if device.index is None else [device.index],
        max_steps=config.total_steps,
        barebones=True,  # no bar, logger, checkpoint or summary
    )
    trainer.fit(module, Endless())
    return Seconds(module.end - module.start - module.paused, clock(device) - began)


def optuna(workload: wb.Workload, configs: Sequence[wb.TrainConfig], device: torch.device) -> Seconds:
    """Train one Optuna trial after the other by the bare loop; the study lies in a SQLite file."""
    import optuna as library

    library.logging.set_verbosity(library.logging.WARNING)
    by_lr = {config.peak_lr: config for config in configs}
    parts: list[Seconds] = []

    def objective(trial: Any) -> float:
        config = by_lr[trial.suggest_categorical("lr", list(by_lr))]
        seconds, value = bare_loop(workload, config, checks=CHECKS, device=device)
        parts.append(seconds)
        return value

    with tempfile.TemporaryDirectory() as folder:
        sampler = library.samplers.GridSampler({"lr": list(by_lr)}, seed=0)
        study = library.create_study(storage=f"sqlite:///{folder}/optuna.db", sampler=sampler)
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
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AIR_NEW_OUTPUT": "0"}
    import ray
    from ray import tune

    by_lr = {config.peak_lr: config for config in configs}

    def trial(sampled: dict[str, float], *, workload: wb.Workload) -> dict[str, float]:
        torch.set_num_threads(1)
        seconds, value = bare_loop(workload, by_lr[sampled["lr"]], checks=CHECKS, device=device)
        return {"loss": value, "training_s": seconds.training}

    needs = {"cpu": 1.0} | ({"gpu": 1.0 / cores_here()} if device.type == "cuda" else {})
    ray.init(num_cpus=cores_here(), include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        with tempfile.TemporaryDirectory() as folder:
            tuner = tune.Tuner(
                tune.with_resources(tune.with_parameters(trial, workload=workload), needs),
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


def waves(trials: int) -> int:
    """Return how many trials follow one another where one runs on each core."""
    return -(-trials // cores_here())
