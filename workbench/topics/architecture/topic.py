"""What the report and the pages have to know of this question."""

from __future__ import annotations

from workbench.findings.topic import Figure, StudyKind, Topic
from workbench.topics.architecture.diagnose import CODES, diagnose_architecture
from workbench.topics.architecture.figures import plot_architecture

TOPIC = Topic(
    name="architecture",
    codes=CODES,
    figures=(
        Figure(
            name="architecture",
            shows="Largest stable learning rate against depth, with each practice and without.",
            caption="A level line, high up, keeps its learning rate however deep the network gets; a hollow triangle is an end of the grid.",
            codes=("architecture.norm_after_add", "architecture.no_residual", "architecture.no_norm"),
            draw=lambda record, _, *, ax: plot_architecture(record, ax=ax),
            kind="architecture",
            size=(6.4, 3.9),
        ),
    ),
    studies={
        "architecture": StudyKind(diagnose=diagnose_architecture, pictures=("architecture",)),
    },
)
