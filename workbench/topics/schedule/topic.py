"""Does the learning rate's schedule do what it should?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.config import TrainConfig, is_callable_name
from workbench.errors import UsageError
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.topic import Figure, Topic
from workbench.plots.words import counted, number_text
from workbench.topics.schedule.diagnose import CODES
from workbench.topics.schedule.diagnose import diagnose_schedule as diagnose
from workbench.topics.schedule.figures import plot_schedule as plot

__all__ = ["diagnose", "plot"]


def _draw_schedule(record: Any, diagnosis: Diagnosis, *, ax: Any) -> Any:
    chosen = (diagnosis.recommendation or {}).get("config") or record.config
    return plot(_with_schedule(chosen), baseline=_with_schedule(record.config), ax=ax)


def _with_schedule(stored: Mapping[str, Any]) -> TrainConfig:
    """Return the stored config as far as the schedule goes; an optimizer of the user's own has no part in it."""
    if is_callable_name(stored.get("schedule")):
        raise UsageError(
            f"the schedule is a function of your own, {stored['schedule']}, and the record keeps its name only."
        )
    optimizer = "sgd" if is_callable_name(stored.get("optimizer")) else stored.get("optimizer", "sgd")
    return TrainConfig.from_dict({**stored, "optimizer": optimizer})


def _schedule_numbers(record: Any, diagnosis: Diagnosis) -> str:
    chosen = (diagnosis.recommendation or {}).get("config")
    before = _shape(record.config)
    warms = int((chosen or record.config).get("warmup_steps") or 0)
    ramp = " The ramp starts at 0 and meets the schedule without a jump." if warms else ""
    if not chosen or _shape(chosen) == before:
        return f"The schedule is the baseline's: {before}.{ramp}"
    return f"Recommended: {_shape(chosen)}. The baseline as it ran: {before}.{ramp}"


def _says_more(record: Any, diagnosis: Diagnosis) -> bool:
    """Tell whether there is more to see than horizontal lines."""
    chosen = (diagnosis.recommendation or {}).get("config") or record.config
    return any(
        (c.get("schedule") or "constant") != "constant" or c.get("warmup_steps") for c in (chosen, record.config)
    )


def _shape(config: Any) -> str:
    warmup = int(config.get("warmup_steps") or 0)
    ramp = f"after {counted(warmup, 'step')} of warmup" if warmup else "without warmup"
    kind = str(config.get("schedule") or "constant")
    return f"{kind} at a peak of {number_text(config['peak_lr'])} {ramp}, {counted(int(config['total_steps']), 'step')} in all"


TOPIC = Topic(
    name="schedule",
    codes=CODES,
    figures=(
        Figure(
            name="schedule",
            shows="Learning rate against step, recommended and baseline.",
            caption="",
            codes=("warmup.shortest", "schedule.discontinuity"),
            draw=_draw_schedule,
            numbers=_schedule_numbers,
            applies=_says_more,
            alone=True,
        ),
    ),
)
