"""`Lane`: the life of one trial in the record, from its first step or its checkpoint to its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from workbench.config import TrainConfig
from workbench.record.read import periodic_rows, select_best
from workbench.record.write import TrialWriter
from workbench.schedules import lr_values
from workbench.train.checkpoint import Checkpoint, latest_checkpoint, load_checkpoint
from workbench.train.checkpoint_store import CheckpointStore, SilentStore, Store
from workbench.train.evaluation import Evaluation

__all__ = ["Lane"]


class Lane:
    """One trial as the loop sees it: its config, what was selected so far, and where its rows and checkpoints go.

    Attributes:
        config: of the trial.
        writer: its place in the study.
        lrs: lr of every step, shape (total_steps,).
        checkpoints: its checkpoints.
        selected: step -> value that retrospective selection compares (P4.5).
        seconds: its share of the wall time; lanes that train together share it equally.
        evaluated_at: the last step it was evaluated at.
    """

    def __init__(self, config: TrainConfig, writer: TrialWriter) -> None:
        self.config, self.writer = config, writer
        self.lrs = lr_values(config)
        folder = writer.folder / "checkpoints"
        self.checkpoints: Store = (
            CheckpointStore(folder, keep_best=config.keep_best, mode=config.select_mode)
            if writer.writes
            else SilentStore()
        )
        self.selected: dict[int, float] = {}
        self.seconds = 0.0
        self.evaluated_at = -1
        path = latest_checkpoint(folder) if writer.writes else None
        self.start = None if path is None else load_checkpoint(path)
        """The checkpoint that the trial goes on from."""

    @property
    def number(self) -> int:
        """Number of the trial."""
        return self.writer.number

    @property
    def start_step(self) -> int:
        """Updates made before this call."""
        return 0 if self.start is None else self.start.step

    @property
    def name(self) -> str:
        """How an error calls it."""
        return f"trial {self.number} (peak_lr={self.config.peak_lr:g}, shared_seed={self.config.shared_seed})"

    @property
    def way(self) -> dict[str, Any] | None:
        """How the gradients of a trial that goes on from a checkpoint were taken before."""
        said = [event for event in self.writer.events if "gradients" in event] if self.start else []
        return said[-1] if said else None

    def again(self) -> Lane:
        """Return the same trial, to go on from its newest checkpoint on disk."""
        return Lane(self.config, self.writer)

    def begin(self, **how: Any) -> None:
        """Drop the rows that come again, and note that the trial is running and how."""
        if self.start is None:
            if self.writer.events:
                self.writer.rewind(-1)
            self.writer.event("started", state="running", **how)
            return
        self.seconds = float(self.start.meta["seconds"])
        self.evaluated_at = self.start.step if self.start.meta["evaluated"] else -1
        self.writer.rewind(self.start.step)
        self.selected = self._selected_before() if self.writer.writes else {}
        self.writer.event("resumed", state="running", step=self.start.step, **how)
        self.start = None

    def _selected_before(self) -> dict[int, float]:
        split, metric = self.config.select.split("/", 1)
        evals = periodic_rows(self.writer.record.evals)
        rows = evals[(evals["split"] == split) & (evals["metric"] == metric)]
        return dict(zip(rows["step"].astype(int).tolist(), rows["value"].tolist(), strict=True))

    def evaluation_due(self, step: int) -> bool:
        """Whether the trial is evaluated at this step: at fixed numbers of steps, the first and the last (P2.8)."""
        on_cadence = step == self.config.total_steps or step % self.config.eval_interval == 0
        return on_cadence and self.evaluated_at != step

    def checkpoint_due(self, step: int) -> bool:
        """Whether a checkpoint is made at this step."""
        on_cadence = step == self.config.total_steps or step % self.config.checkpoint_interval == 0
        return on_cadence and self.checkpoints.latest != step

    def next_due(self, step: int) -> int:
        """Return the first step after `step` at which something of this trial is due."""
        every = (self.config.eval_interval, self.config.checkpoint_interval)
        return min(self.config.total_steps, *(interval * (step // interval + 1) for interval in every))

    def rows(self, step: int, split: str, results: Sequence[Evaluation], *, subset: str = "") -> list[dict[str, Any]]:
        """Return the rows of `.evals` for one evaluated split, and remember what selection compares."""
        for result in results:
            if f"{split}/{result.metric}" == self.config.select:
                self.selected[step] = result.value
        self.evaluated_at = step
        return [
            {
                "trial": self.number,
                "step": step,
                "split": split,
                "setting": "periodic",
                **result._asdict(),
                "subset": subset,
            }
            for result in results
        ]

    def keep(self, checkpoint: Checkpoint) -> None:
        """Take a checkpoint of this trial."""
        self.checkpoints.add(checkpoint, self.selected)

    def end(self, state: str, *, step: int, diverged_at: int | None = None) -> None:
        """Note how the trial ended."""
        best = select_best(list(self.selected), list(self.selected.values()), mode=self.config.select_mode)
        self.writer.event(
            "ended",
            state=state,
            steps_run=step if diverged_at is None else diverged_at + 1,
            seconds=self.seconds,
            best_step=None if best is None else best[0],
            best_value=None if best is None else best[1],
            diverged_at=diverged_at,
        )


def padded_lrs(lanes: Sequence[Lane]) -> np.ndarray:
    """Return the lr of every step and lane, shape (steps of the longest, lanes); zero after a lane's end."""
    table = np.zeros((max(len(lane.lrs) for lane in lanes), len(lanes)))
    for row, lane in enumerate(lanes):
        table[: len(lane.lrs), row] = lane.lrs
    return table
