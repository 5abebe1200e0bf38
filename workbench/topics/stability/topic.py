"""Is training stable, and what cures it where it is not?"""

from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.findings.diagnosis import Diagnosis
from workbench.findings.topic import Figure, StudyKind, Topic
from workbench.lazy import lazily
from workbench.plots.frames import curve, evaluations, lr_of, trials_in
from workbench.plots.words import first_and_end, number_text
from workbench.topics.stability.diagnose import CODES
from workbench.topics.stability.diagnose import diagnose_instability as diagnose
from workbench.topics.stability.diagnose_check import CHECK
from workbench.topics.stability.diagnose_check import check_stability as check
from workbench.topics.stability.figures import plot_confirm
from workbench.topics.stability.figures import plot_probe as plot

if TYPE_CHECKING:
    from workbench.topics.stability.replay import replay
    from workbench.topics.stability.study import InstabilityStudy as Study
else:
    __getattr__, __dir__ = lazily(__name__, __file__)

__all__ = ["Study", "check", "diagnose", "plot", "plot_confirm", "replay"]
EVERY_STEPS = 100  # the coarse interval that the picture of the probe draws (F1.10)
MAX_RUNS = 4  # runs that a sentence names one by one


def _probe_numbers(record: Any, _: Diagnosis) -> str:
    trial = trials_in(record, "probe")[0]
    steps, values = evaluations(record, trial, split="validation", metric="loss")
    if steps.size < 3:
        steps, values = curve(record, trial, "loss")
    peak = int(np.argmax(np.where(np.isfinite(values), values, np.inf)))
    coarse = values[steps % EVERY_STEPS == 0]
    return (
        f"At lr {number_text(lr_of(record, trial))} the loss starts at {number_text(float(values[0]))} and is largest, "
        f"{number_text(float(values[peak]))}, at step {int(steps[peak]):,}; every {EVERY_STEPS} steps would have shown "
        f"at most {number_text(float(np.where(np.isfinite(coarse), coarse, np.inf).max()))}."
    )


def _confirm_numbers(record: Any, _: Diagnosis) -> str:
    lines = []
    for trial in trials_in(record, "confirm")[:MAX_RUNS]:
        values = curve(record, trial, "loss")[1]
        first, end = first_and_end(values)
        how = f"goes from {number_text(first)} to {number_text(end)}" if np.isfinite(end) else "ends non-finite"
        lines.append(f"lr {number_text(lr_of(record, trial))} {how}")
    return f"The loss at {'; that at '.join(lines)}." if lines else ""


TOPIC = Topic(
    name="stability",
    codes={**CODES, **CHECK},
    figures=(
        Figure(
            name="probe",
            shows="Loss of a short run at twice the best learning rate, evaluated at every step and at every hundredth.",
            caption="Where the every-step curve climbs above the dotted line and the coarse one does not, the usual evaluation "
            "interval hides an unstable start.",
            codes=("stability.early_recovers", "stability.early"),
            draw=plot,
            numbers=_probe_numbers,
            alone=True,
        ),
        Figure(
            name="confirm",
            shows="Training loss far above the best learning rate, beside the run at the best.",
            caption="A steady fall and then a sudden rise means that the model probably suffers from optimisation instability.",
            codes=("stability.mid", "stability.divergent"),
            draw=plot_confirm,
            numbers=_confirm_numbers,
            alone=True,
        ),
    ),
    studies={"instability": StudyKind(diagnose=diagnose, pictures=("confirm", "loss-curves"))},
)
