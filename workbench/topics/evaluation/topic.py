"""Does evaluation measure what it should, often and precisely enough?"""

from typing import TYPE_CHECKING

from workbench.findings.topic import Figure, StudyKind, Topic
from workbench.lazy import lazily
from workbench.topics.evaluation.diagnose import CODES
from workbench.topics.evaluation.diagnose import diagnose_evaluation as diagnose
from workbench.topics.evaluation.diagnose_generalisation import CODES as GENERALISATION_CODES
from workbench.topics.evaluation.diagnose_sample import CODES as SAMPLE_CODES
from workbench.topics.evaluation.diagnose_sample import diagnose_evaluation_sample as diagnose_sample
from workbench.topics.evaluation.figures import plot_evaluation as plot
from workbench.topics.evaluation.figures import plot_evaluation_sample as plot_sample
from workbench.topics.evaluation.figures import plot_timed_evaluations as plot_timed
from workbench.topics.evaluation.proxy import CODES as PROXY_CODES

if TYPE_CHECKING:
    from workbench.topics.evaluation.check import check_evaluation as check
    from workbench.topics.evaluation.offline import evaluate_offline
    from workbench.topics.evaluation.sample_size import detectable_difference, examples_needed
    from workbench.topics.evaluation.sample_size import evaluation_sizes as sizes
    from workbench.topics.evaluation.study import EvaluationSampleStudy as SampleStudy
    from workbench.topics.evaluation.study import EvaluationStudy as Study
    from workbench.train.evaluation import evaluate
    from workbench.workloads.subsets import periodic_subset
else:
    __getattr__, __dir__ = lazily(__name__, __file__)

__all__ = [
    "SampleStudy",
    "Study",
    "check",
    "detectable_difference",
    "diagnose",
    "diagnose_sample",
    "evaluate",
    "evaluate_offline",
    "examples_needed",
    "periodic_subset",
    "plot",
    "plot_sample",
    "plot_timed",
    "sizes",
]

TOPIC = Topic(
    name="evaluation", codes={**CODES, **SAMPLE_CODES, **PROXY_CODES, **GENERALISATION_CODES},
    figures=(
        Figure(
            name="evaluation", kind="evaluation", codes=("evaluation.bad_proxy",), draw=plot,
            shows="Offline metric against the periodic one, a point for each checkpoint.",
            caption="Points that rise together are healthy; a cloud says that the proxy ranks checkpoints otherwise than whole splits do.",
        ),
        Figure(
            name="evaluation-sample", kind="evaluation_sample", codes=("evaluation.too_small",), draw=plot_sample, size=(6.4, 3.9),
            shows="Smallest difference that shows, and the time of an evaluation, against the number of examples.",
            caption="In the shaded band a sample keeps both bounds; without a band no size does.",
        ),
    ),
    studies={
        "evaluation": StudyKind(diagnose=diagnose, pictures=("evaluation",)),
        "evaluation_sample": StudyKind(diagnose=diagnose_sample, pictures=("evaluation-sample",)),
    },
)  # fmt: skip
