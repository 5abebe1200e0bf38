"""Does training wait for its data loader, and why?"""

from typing import TYPE_CHECKING

from workbench.findings.topic import Figure, StudyKind, Topic
from workbench.lazy import lazily
from workbench.topics.input.diagnose import CODES
from workbench.topics.input.diagnose import diagnose_input_pipeline as diagnose
from workbench.topics.input.figures import plot_input_pipeline as plot
from workbench.topics.input.figures import plot_input_workers as plot_workers

if TYPE_CHECKING:
    from workbench.topics.input.study import InputPipelineStudy as Study
    from workbench.topics.input.study import audit_input as audit
    from workbench.topics.input.variants import compare_storage
    from workbench.workloads.items import Delayed, cache_dataset
else:
    __getattr__, __dir__ = lazily(__name__, __file__)

__all__ = ["Delayed", "Study", "audit", "cache_dataset", "compare_storage", "diagnose", "plot", "plot_workers"]

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
            draw=plot, facts="input_pipeline", size=(8.4, 3.6),
        ),
        Figure(
            name="input-workers",
            shows="Batches per second of the loader alone against the number of worker processes.",
            caption="The number to set is where the curve meets the dashed line, which is what the step can use; a flat curve is held up by "
            "something that workers share.",
            codes=("input.bound",),
            draw=plot_workers, facts="input_pipeline",
        ),
    ),
    studies={"input_pipeline": StudyKind(diagnose=diagnose, pictures=("input-pipeline",))},
)  # fmt: skip
