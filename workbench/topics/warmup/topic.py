"""What the report and the pages have to know of this question."""

from __future__ import annotations

from workbench.findings.topic import Figure, StudyKind, Topic
from workbench.topics.warmup.diagnose import CODES, diagnose_warmup
from workbench.topics.warmup.figures import plot_warmup

TOPIC = Topic(
    name="warmup",
    codes=CODES,
    figures=(
        Figure(
            name="warmup",
            shows="Which warmup lengths train, at which learning rate.",
            caption="The star is the shortest that trains; crosses up to the cap say that no allowed warmup opens that learning rate.",
            codes=("warmup.shortest", "warmup.insufficient"),
            draw=plot_warmup,
            size=(6.4, 3.9),
        ),
    ),
    studies={"warmup": StudyKind(diagnose=diagnose_warmup, pictures=("warmup", "loss-curves"))},
)
