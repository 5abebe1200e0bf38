"""Does a training loop of one's own do what a loop should, in the order in which it should?"""

from __future__ import annotations

from typing import Any

from workbench.curves.clipping import max_grad_norm_of
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.topic import Figure, StudyKind, Topic
from workbench.topics.loop.diagnose import CODES
from workbench.topics.loop.diagnose import diagnose_loop as diagnose
from workbench.topics.loop.figures import plot_loop as plot
from workbench.topics.loop.judge import judge_run as judge

__all__ = ["diagnose", "judge", "plot"]


def _limit(record: Any, diagnosis: Diagnosis) -> str:
    """Return the threshold that gradients are clipped at, and in how many updates; "" where there is none."""
    limit = max_grad_norm_of(record.config)
    found = next((f.value for f in diagnosis.findings if f.code == "clipping.aggressive"), None)
    often = "" if found is None else f", in {found:.0%} of the updates"
    return "" if limit is None else f"Gradients are clipped at a norm of {limit:g}{often}."


TOPIC = Topic(
    name="loop",
    codes=CODES,
    figures=(
        Figure(
            name="loop",
            shows="Loss, gradient norm before clipping and learning rate against the update.",
            caption="The norm belongs in one decade; the learning rate should reach the end of its schedule with the run.",
            numbers=_limit,
            codes=("loop.no_zero_grad", "loop.scheduler_unit", "clipping.aggressive"),
            draw=plot, facts="loop",
        ),
    ),
    studies={"watch": StudyKind(diagnose=judge, pictures=("loop", "loss-curves"))},
)  # fmt: skip
