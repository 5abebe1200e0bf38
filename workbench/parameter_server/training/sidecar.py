"""`SidecarEvaluator`: a process of its own that evaluates every checkpoint that training writes (T8.6, T8.7)."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from workbench.checks import check_integer
from workbench.errors import CheckpointError, UsageError
from workbench.logs.event_file import EventFile
from workbench.train.checkpoint import Checkpoint, latest_checkpoint, load_checkpoint, load_model
from workbench.train.evaluation import evaluate
from workbench.train.rng import isolated_rng
from workbench.train.stacked_weights import build_model
from workbench.workloads.base import Workload


@dataclass(frozen=True)
class SidecarEvaluation:
    """What one checkpoint is worth."""

    checkpoint: Path  # its folder, which may be deleted by now
    epoch: int | None  # how many epochs it holds; None where its writer did not say
    steps: int  # updates that it holds
    values: dict[str, float]  # loss and metrics by name


class SidecarEvaluator:
    """Follows a folder of checkpoints, always to the newest, until the last epoch was evaluated. It knows nothing of the cluster.

    Training goes on meanwhile, and does not wait. A checkpoint that is deleted while it is read is left out: a newer one is there.

    Args:
        workload: builds the model; loss, metrics and validation data say what is evaluated.
        checkpoint_dir: where `CheckpointManager` or `ModelCheckpoint` writes; may be absent until it does.
        epochs: of the training: it ends after the checkpoint that holds so many.
        steps: in place of `epochs`, where checkpoints count updates, as those of a trial do.
        batch_size: examples in a forward pass; None is the config's.
        poll_s: how often it looks.
        timeout_s: how long it waits for a new checkpoint before it raises; None is for ever.
        log_dir: where TensorBoard's files go; None writes none.

    Raises:
        UsageError: not one of `epochs` and `steps` is given, or it is no integer of at least 1.
    """

    def __init__(
        self,
        workload: Workload,
        checkpoint_dir: str | Path,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        batch_size: int | None = None,
        poll_s: float = 1.0,
        timeout_s: float | None = None,
        log_dir: str | Path | None = None,
    ) -> None:
        given = {name: value for name, value in (("epochs", epochs), ("steps", steps)) if value is not None}
        if len(given) != 1:
            raise UsageError(
                f"epochs={epochs!r}, steps={steps!r}: give one of them, that of the training that it follows; it ends there."
            )
        for name, value in given.items():
            check_integer(name, value, error=UsageError, hint=": those of the training that it follows")
        self.workload, self.directory = workload, Path(checkpoint_dir)
        self.epochs, self.steps = epochs, steps
        self.batch_size = workload.config.evaluation_batch if batch_size is None else batch_size
        self.poll_s, self.timeout_s, self.log_dir = poll_s, timeout_s, log_dir

    def run(self) -> list[SidecarEvaluation]:
        """Evaluate until the last epoch's checkpoint, and return all; raises `TimeoutError` where no new checkpoint comes in time."""
        return list(self)

    def __iter__(self) -> Iterator[SidecarEvaluation]:
        """Evaluate checkpoint after checkpoint, as they come."""
        with isolated_rng():
            model = build_model(self.workload, self.workload.config, torch.device("cpu"))
        file = None if self.log_dir is None else EventFile(self.log_dir)
        for path, checkpoint in self._checkpoints():
            load_model(model, path, checkpoint)
            found = evaluate(self.workload, model, batch_size=self.batch_size, precision=self.workload.config.precision)
            values = {each.metric: each.value for each in found}
            for name, value in values.items():
                if file is not None:
                    file.scalar(f"evaluation_{name}_vs_iterations", value, checkpoint.step)
            yield SidecarEvaluation(path, checkpoint.meta.get("epoch"), checkpoint.step, values)

    def _checkpoints(self) -> Iterator[tuple[Path, Checkpoint]]:
        """Yield the newest checkpoint whenever it is another one, until that of the last epoch."""
        seen: str | None = None
        waited_from = time.monotonic()
        while True:
            newest = latest_checkpoint(self.directory)
            if newest is not None and newest.name != seen:
                seen = newest.name
                try:
                    checkpoint = load_checkpoint(newest)
                except CheckpointError:
                    if newest.exists():
                        raise
                    continue  # deleted under its hands: look for the newer one at once
                yield newest, checkpoint
                done = checkpoint.step if self.epochs is None else checkpoint.meta.get("epoch") or 0
                if done >= (self.epochs or self.steps or 0):
                    return
                waited_from = time.monotonic()
                continue
            if self.timeout_s is not None and time.monotonic() - waited_from > self.timeout_s:
                end = f"update {self.steps}" if self.epochs is None else f"epoch {self.epochs}"
                raise TimeoutError(
                    f"No new checkpoint in {self.directory} for {self.timeout_s:g} s, the newest is {seen}; {end} has "
                    "not come. Did training end early, or in another folder? Else let it wait longer."
                )
            time.sleep(self.poll_s)
