"""What the report and the pages have to know of this question."""

from __future__ import annotations

from workbench.findings.topic import Figure, StudyKind, Topic
from workbench.topics.stability.captions import confirm_numbers, probe_numbers
from workbench.topics.stability.diagnose import diagnose_instability
from workbench.topics.stability.figures import plot_confirm, plot_probe

__all__ = ["TOPIC"]


TOPIC = Topic(
    name="stability",
    figures=(
        Figure(
            name="probe",
            shows="Loss of a short run at twice the best learning rate, evaluated at every step and at every hundredth.",
            caption="Where the every-step curve climbs above the dotted line and the coarse one does not, the usual evaluation "
            "interval hides an unstable start.",
            codes=("stability.early_recovers", "stability.early"),
            draw=plot_probe,
            numbers=probe_numbers,
            alone=True,
        ),
        Figure(
            name="confirm",
            shows="Training loss at 5 and 10 times the best learning rate, beside the run at the best.",
            caption="A steady fall and then a sudden rise means that the model probably suffers from optimisation instability.",
            codes=("stability.mid", "stability.divergent"),
            draw=plot_confirm,
            numbers=confirm_numbers,
            alone=True,
        ),
    ),
    studies={
        "instability": StudyKind(diagnose=diagnose_instability, pictures=("confirm", "loss-curves")),
    },
)
