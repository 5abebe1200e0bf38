"""Which checkpoint to take, and does training resume where it stopped?"""

from typing import TYPE_CHECKING

from workbench.findings.topic import Figure, StudyKind, Topic
from workbench.lazy import lazily
from workbench.topics.checkpoints.diagnose import CODES
from workbench.topics.checkpoints.diagnose import diagnose_checkpoints as diagnose
from workbench.topics.checkpoints.figures import plot_checkpoints as plot
from workbench.topics.checkpoints.figures import plot_early_stopping

if TYPE_CHECKING:
    from workbench.topics.checkpoints.early_stopping import early_stopping
    from workbench.topics.checkpoints.resume import audit_resume
    from workbench.topics.checkpoints.study import CheckpointStudy as Study
    from workbench.topics.evaluation.offline import load_trained
else:
    __getattr__, __dir__ = lazily(__name__, __file__)

__all__ = [
    "Study",
    "audit_resume",
    "diagnose",
    "early_stopping",
    "load_trained",
    "plot",
    "plot_early_stopping",
]

TOPIC = Topic(
    name="checkpoints", codes=CODES,
    figures=(
        Figure(
            name="checkpoints", kind="checkpoints", codes=("checkpoints.best_not_last",), draw=plot,
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
    studies={"checkpoints": StudyKind(diagnose=diagnose, pictures=("checkpoints",))},
)  # fmt: skip
