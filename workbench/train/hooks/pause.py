"""`Pause`: a hook that holds training up once, as a preempted job or a slow network would (P2.8)."""

from __future__ import annotations

import time

from workbench.train.hooks.base import Hook, Step

__all__ = ["Pause"]


class Pause(Hook):
    """Waits during one step; what is trained stays the same bit for bit.

    Args:
        step: at which to wait.
        seconds: how long.
    """

    def __init__(self, step: int, seconds: float) -> None:
        self.step, self.seconds = step, seconds

    def on_step(self, step: Step) -> None:
        """Wait where it is time to; the pause shows in `step_time_s` of the next step."""
        if step.index == self.step:
            time.sleep(self.seconds)
