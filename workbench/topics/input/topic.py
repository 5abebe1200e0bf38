"""What the report and the pages have to know of this question."""

from __future__ import annotations

from workbench.findings.topic import Figure, StudyKind, Topic
from workbench.topics.input.diagnose import CODES, diagnose_input_pipeline
from workbench.topics.input.figures import plot_input_pipeline, plot_input_workers

TOPIC = Topic(
    name="input",
    codes=CODES,
    figures=(
        Figure(
            name="input-pipeline",
            shows="Milliseconds of a step, split into waiting for data and computing, and what making a batch takes.",
            caption="Red is waiting; a second bar that is about as long as the first says that nothing is to be gained. The change that was "
            "tried stands below, as predicted and as measured.",
            codes=("input.bound",),
            draw=plot_input_pipeline, facts="input_pipeline", size=(8.4, 3.6),
        ),
        Figure(
            name="input-workers",
            shows="Batches per second of the loader alone against the number of worker processes.",
            caption="The number to set is where the curve meets the dashed line, which is what the step can use; a flat curve is held up by "
            "something that workers share.",
            codes=("input.bound",),
            draw=plot_input_workers, facts="input_pipeline",
        ),
    ),
    studies={"input_pipeline": StudyKind(diagnose=diagnose_input_pipeline, pictures=("input-pipeline",))},
)  # fmt: skip
