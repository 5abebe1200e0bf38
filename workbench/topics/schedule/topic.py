"""What the report and the pages have to know of this question."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.config import TrainConfig, is_callable_name
from workbench.errors import UsageError
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.topic import Figure, Topic
from workbench.topics.schedule.captions import schedule_numbers
from workbench.topics.schedule.figures import plot_schedule

__all__ = ["TOPIC"]


def _draw_schedule(record: Any, diagnosis: Diagnosis, *, ax: Any) -> Any:
    chosen = (diagnosis.recommendation or {}).get("config") or record.config
    return plot_schedule(_with_schedule(chosen), baseline=_with_schedule(record.config), ax=ax)


def _with_schedule(stored: Mapping[str, Any]) -> TrainConfig:
    """Return the stored config as far as the schedule goes; an optimizer of the user's own has no part in it."""
    if is_callable_name(stored.get("schedule")):
        raise UsageError(
            f"the schedule is a function of your own, {stored['schedule']}, and the record keeps its name only."
        )
    optimizer = "sgd" if is_callable_name(stored.get("optimizer")) else stored.get("optimizer", "sgd")
    return TrainConfig.from_dict({**stored, "optimizer": optimizer})


TOPIC = Topic(
    name="schedule",
    figures=(
        Figure(
            name="schedule",
            shows="Learning rate against step, recommended and baseline.",
            caption="The ramp starts at 0 and meets the schedule without a jump; the run is longer by the warmup.",
            codes=("warmup.shortest", "schedule.discontinuity"),
            draw=_draw_schedule,
            numbers=schedule_numbers,
            alone=True,
        ),
    ),
)
