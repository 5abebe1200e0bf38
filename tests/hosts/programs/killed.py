"""A training in which host 1 is killed, once at each of some steps: `... -m tests.hosts.programs.killed OUT FOLDER STEP,STEP [CASE]`; FOLDER remembers."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

from tests.hosts.programs.together import cases, drawing
from workbench.train import checkpoint
from workbench.train.hooks import Hook, Step
from workbench.train.trainer import Trainer


class Kill(Hook):
    """Ends host 1 without a word at some steps, each the first time."""

    def __init__(self, folder: Path, steps: list[int]) -> None:
        self.folder, self.steps = folder, steps

    def on_step(self, step: Step) -> None:
        marker = self.folder / f"killed-at-{step.index}"
        if step.index in self.steps and os.environ["RANK"] == "1" and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    torch.set_num_threads(1)
    checkpoint.WRITE_SECONDS = 0.0  # every checkpoint reaches the disk
    out, folder, steps = Path(sys.argv[1]), Path(sys.argv[2]), [int(step) for step in sys.argv[3].split(",")]
    workload = cases()[sys.argv[4]] if len(sys.argv) > 4 else drawing()
    Trainer(device="cpu", hooks=[Kill(folder, steps)]).run(workload, out=out)
