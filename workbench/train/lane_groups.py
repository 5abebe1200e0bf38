"""Which trials can train as lanes of one stack, and in which order they lie."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from workbench.config import TrainConfig
from workbench.errors import ConfigError, UsageError, WorkbenchError
from workbench.schedules import lr_values
from workbench.train.lane import Lane
from workbench.workloads.base import Workload
from workbench.workloads.checks import check_data, check_selection

__all__ = ["check_lanes", "group_lanes"]

SHARED = ("batch_size", "accumulate_steps", "precision", "evaluation_batch", "bn_stat_examples")
"""What the lanes of a stack have in common; everything else may differ."""


def check_lanes(workload: Workload, configs: Sequence[TrainConfig]) -> dict[str, int]:
    """Check every config against the workload before anything is written; return the sizes of the splits.

    Raises:
        UsageError: there is none.
        ConfigError: one is no `TrainConfig`, or two are the same.
        WorkbenchError: one does not fit the workload; it is named.
    """
    if not configs:
        raise UsageError("configs is empty: give at least one TrainConfig to train.")
    seen: dict[TrainConfig, int] = {}
    sizes: dict[str, int] = {}
    for number, config in enumerate(configs):
        if not isinstance(config, TrainConfig):
            raise ConfigError(f"configs[{number}] must be a TrainConfig, not {type(config).__name__}.")
        if config in seen:
            raise ConfigError(
                f"configs[{seen[config]}] and configs[{number}] are the same (peak_lr={config.peak_lr:g}, "
                f"shared_seed={config.shared_seed}): a trial is trained once. Leave one out, or give it another seed."
            )
        seen[config] = number
        try:
            sizes = check_data(workload, config)
            check_selection(workload, config)
            lr_values(config)
        except WorkbenchError as error:
            if len(configs) > 1:
                raise type(error)(f"configs[{number}] (peak_lr={config.peak_lr:g}): {error}") from error
            raise
    return sizes


def group_lanes(lanes: Sequence[Lane]) -> list[list[Lane]]:
    """Return the lanes stack by stack, in the order of their first lanes.

    A stack shares the size and precision of its batches and the step it begins with; lanes of the same update rule lie
    together in it, so that each rule works on a slice.
    """
    groups: dict[Hashable, list[Lane]] = {}
    for lane in lanes:
        key = (lane.start_step, *(getattr(lane.config, name) for name in SHARED))
        groups.setdefault(key, []).append(lane)
    return [sorted(group, key=_rule) for group in groups.values()]


def _rule(lane: Lane) -> tuple[str, str]:
    return str(lane.config.optimizer), lane.config.rules
