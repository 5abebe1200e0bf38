"""Where the time of a step goes: waiting for data, and everything."""

from __future__ import annotations

from workbench.train.hooks.base import Hook, Step

__all__ = ["Timing"]


class Timing(Hook):
    """Records `data_wait_s` and `step_time_s` at every step.

    Both are host times. On an accelerator the host runs ahead of the device, so single values are launch times; their
    mean over many steps is the true step time. Healthy: the wait is a few percent of the step (P1.1).
    """

    def on_step(self, step: Step) -> None:
        """Store what the loop measured."""
        step.record("data_wait_s", step.data_wait_s)
        step.record("step_time_s", step.step_time_s)
