"""What the report and the pages have to know of this question."""

from __future__ import annotations

from workbench.findings.topic import Figure, StudyKind, Topic
from workbench.topics.evaluation.diagnose import CODES, diagnose_evaluation
from workbench.topics.evaluation.diagnose_sample import CODES as SAMPLE_CODES
from workbench.topics.evaluation.diagnose_sample import diagnose_evaluation_sample
from workbench.topics.evaluation.figures import plot_evaluation, plot_evaluation_sample
from workbench.topics.evaluation.proxy import CODES as PROXY_CODES

TOPIC = Topic(
    name="evaluation", codes={**CODES, **SAMPLE_CODES, **PROXY_CODES},
    figures=(
        Figure(
            name="evaluation", kind="evaluation", codes=("evaluation.bad_proxy",), draw=plot_evaluation,
            shows="Offline metric against the periodic one, a point for each checkpoint.",
            caption="Points that rise together are healthy; a cloud says that the proxy ranks checkpoints otherwise than whole splits do.",
        ),
        Figure(
            name="evaluation-sample", kind="evaluation_sample", codes=("evaluation.too_small",), draw=plot_evaluation_sample, size=(6.4, 3.9),
            shows="Smallest difference that shows, and the time of an evaluation, against the number of examples.",
            caption="In the shaded band a sample keeps both bounds; without a band no size does.",
        ),
    ),
    studies={
        "evaluation": StudyKind(diagnose=diagnose_evaluation, pictures=("evaluation",)),
        "evaluation_sample": StudyKind(diagnose=diagnose_evaluation_sample, pictures=("evaluation-sample",)),
    },
)  # fmt: skip
