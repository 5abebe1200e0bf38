"""What the report and the pages have to know of this question."""

from __future__ import annotations

from workbench.findings.topic import Figure, StudyKind, Topic
from workbench.topics.optimizers.diagnose import CODES, diagnose_optimizers
from workbench.topics.optimizers.figures import plot_optimizers
from workbench.topics.optimizers.replaced import CODES as REPLACED_CODES

TOPIC = Topic(
    name="optimizers",
    codes={**CODES, **REPLACED_CODES},
    figures=(
        Figure(
            name="optimizers",
            shows="The learning rates over which each update rule trains.",
            caption="Long bars are healthy, with the diamond, the baseline's own learning rate, well inside the bar of its rule.",
            codes=("optimizers.better",),
            draw=plot_optimizers,
            kind="optimizers",
            size=(6.4, 3.9),
        ),
    ),
    studies={"optimizers": StudyKind(diagnose=diagnose_optimizers, pictures=("optimizers",))},
)
