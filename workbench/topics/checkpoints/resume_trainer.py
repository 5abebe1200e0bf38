"""Resume audit of a workload under our own trainer: what is lost then lies in the workload's own code (P4.2)."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Subset

from workbench.config import TrainConfig
from workbench.record.folder import lock
from workbench.record.read import TrialRecord
from workbench.record.roles import Role
from workbench.record.write import StudyWriter
from workbench.topics.checkpoints.resume import Trace, difference
from workbench.train.hooks import Hook, Step
from workbench.train.trainer import Trainer
from workbench.workloads.base import Workload
from workbench.workloads.items import in_its_own_order

__all__ = ["collect_resume"]

STEPS = 4
"""Updates before the checkpoint, and after it (rule of thumb: a few cost nothing)."""
MAX_EXAMPLES = 64
"""Validation examples that are looked at (rule of thumb)."""


class _StopsError(Exception):
    """Stands for a crash."""


class _Stops(Hook):
    def __init__(self, at: int) -> None:
        self.at = at

    def on_step(self, step: Step) -> None:
        if step.index == self.at:
            raise _StopsError


def collect_resume(workload: Workload, config: TrainConfig, device: torch.device) -> dict[str, Any]:
    """Return the facts that `resume_finding` judges: a few steps trained twice, and once with a crash in between.

    Args:
        workload: what is trained; with random state of its own, in its data or its model, it cannot be resumed.
        config: the baseline.
        device: where to train.
    """
    config = config.replace(
        total_steps=2 * STEPS, warmup_steps=0, eval_every_steps=2 * STEPS, checkpoint_every_steps=STEPS, keep_best=1
    )
    data = workload.validation_data
    if not in_its_own_order(data) and len(data) > MAX_EXAMPLES:
        workload = workload.replace(validation_data=Subset(data, range(MAX_EXAMPLES)))
    with tempfile.TemporaryDirectory() as folder:
        runs = [_trained(workload, config, device, Path(folder) / name, stop) for name, stop in _RUNS]
    whole, again, resumed = runs
    floor = difference(whole, again)
    jump = difference(whole, resumed)
    unstable = bool(floor["changed"])
    return {
        "steps": STEPS, "after": STEPS, "jump": jump["loss"], "floor": floor["loss"], "allowed": None, "parts": [], "missing": [],
        "changed": jump["changed"], "first_step": jump["first_step"], "outside": bool(jump["changed"]),
        "losses": whole.losses, "losses_resumed": resumed.losses,
    } | ({"allowed": 10.0 * floor["loss"], "changed": [], "outside": False} if unstable else {})  # fmt: skip


_RUNS = (("whole", None), ("again", None), ("resumed", STEPS))


def _trained(workload: Workload, config: TrainConfig, device: torch.device, folder: Path, stop: int | None) -> Trace:
    """Train in a folder of its own, outside of every ledger; with `stop`, crash behind the checkpoint and go on."""
    folder.mkdir()
    with contextlib.closing(lock(folder)) as held:
        for hooks in ([_Stops(stop)], []) if stop is not None else ([],):
            study = StudyWriter(folder, held)
            trainer = Trainer(device=str(device), gradients="loop", hooks=hooks)
            with contextlib.suppress(_StopsError):
                trainer.run_trial(workload, config, study, stage=Role.RESUME)
        study.flush()
        record = TrialRecord(folder, 0)
        after = record.steps["loss"].to_numpy()[STEPS:].tolist()
        ended = record.evals[record.evals["step"] == 2 * STEPS]
        return Trace(after, {"evaluation": dict(zip(ended["metric"], ended["value"].tolist(), strict=True))})
