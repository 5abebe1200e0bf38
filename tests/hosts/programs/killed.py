"""A training in which host 1 is killed once: `... -m tests.hosts.programs.killed OUT MARKER STEP [CASE]`, a STEP of -1 kills nobody."""

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
    """Ends host 1 without a word at one step, the first time."""

    def __init__(self, marker: Path, step: int) -> None:
        self.marker, self.step = marker, step

    def on_step(self, step: Step) -> None:
        if step.index == self.step and os.environ["RANK"] == "1" and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    torch.set_num_threads(1)
    checkpoint.WRITE_SECONDS = 0.0  # every checkpoint reaches the disk
    out, marker, step = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    workload = cases()[sys.argv[4]] if len(sys.argv) > 4 else drawing()
    Trainer(device="cpu", hooks=[Kill(marker, step)]).run(workload, out=out)
