"""What the report and the pages have to know of this question."""

from __future__ import annotations

from workbench.findings.topic import Figure, StudyKind, Topic
from workbench.topics.checkpoints.diagnose import CODES, diagnose_checkpoints
from workbench.topics.checkpoints.figures import plot_checkpoints, plot_early_stopping

TOPIC = Topic(
    name="checkpoints", codes=CODES,
    figures=(
        Figure(
            name="checkpoints", kind="checkpoints", codes=("checkpoints.best_not_last",), draw=plot_checkpoints,
            shows="Where in each run the best checkpoint lies, and what it is better by than the last.",
            caption="Points far to the left and high are runs whose last checkpoint was worse than an earlier one; triangles far below their "
            "circles are gains that do not carry over.",
        ),
        Figure(
            name="early-stopping", kind="checkpoints", codes=("checkpoints.selection",), draw=plot_early_stopping, size=(6.4, 3.9),
            shows="What each early-stopping rule would have lost, and the steps that it would have saved.",
            caption="Long bars are rules that stopped too soon.",
        ),
    ),
    studies={"checkpoints": StudyKind(diagnose=diagnose_checkpoints, pictures=("checkpoints",))},
)  # fmt: skip
