"""Whose fault it is that a person's code raises: its own, or that of weights that training has led astray.

`binary_cross_entropy` asserts that its inputs lie in [0, 1], a distribution validates its parameters, a Cholesky factor asks for
a positive definite matrix: at a learning rate that is too high they raise before a loss is NaN. Such a trial has diverged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import torch

from workbench.config import TrainConfig
from workbench.errors import WorkbenchError
from workbench.train.evaluation import values_of
from workbench.train.forward import MicroBatches, autocast, per_example
from workbench.train.lane_stack import build_model
from workbench.train.rng import isolated_rng
from workbench.workloads.base import Workload

Excuse = Callable[[int, Exception, MicroBatches, bool], bool]
"""(lane, what was raised, batches, training) -> whether that lane counts as diverged instead."""

_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")
_LENGTHS = {"total_steps", "warmup_steps", "eval_every_steps", "checkpoint_every_steps", "keep_best"}


def is_own_config(workload: Workload, config: TrainConfig) -> bool:
    """Tell whether a trial trains as the person does, over whatever length."""
    own = workload.config
    return all(getattr(own, f.name) == getattr(config, f.name) for f in fields(own) if f.name not in _LENGTHS)


def fault_of_weights(
    workload: Workload,
    config: TrainConfig,
    device: torch.device,
    *,
    error: Exception,
    batches: MicroBatches,
    training: bool,
) -> bool:
    """Tell whether what raised on these batches passes with untrained weights, made by the config's seed; a mistake does not."""
    numeric = isinstance(error, (ArithmeticError, AssertionError, RuntimeError, ValueError))
    if not numeric or isinstance(error, WorkbenchError) or is_out_of_memory(error):
        return False
    try:
        with isolated_rng(), torch.set_grad_enabled(training):
            model = build_model(workload, config, device)
            for batch, examples in batches:
                if training:
                    with autocast(device, config.precision):
                        _, losses, _ = per_example(workload, model.train(), batch, examples)
                    losses.sum().backward()  # type: ignore[no-untyped-call]
                else:
                    values_of(workload, model.eval(), batch, examples, device=device, precision=config.precision)
    except Exception:
        return False
    return True


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or one that it came from, says that memory ran out."""
    while error is not None:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return True
        if isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _OUT_OF_MEMORY):
            return True
        error = error.__cause__
    return False
