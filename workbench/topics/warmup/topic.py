"""Is a warmup needed, and how long?"""

from typing import TYPE_CHECKING

from workbench.findings.topic import Figure, StudyKind, Topic
from workbench.lazy import lazily
from workbench.topics.warmup.diagnose import CODES
from workbench.topics.warmup.diagnose import diagnose_warmup as diagnose
from workbench.topics.warmup.figures import plot_warmup as plot

if TYPE_CHECKING:
    from workbench.topics.warmup.panel import warmup_panel as panel
    from workbench.topics.warmup.study import WarmupStudy as Study
else:
    __getattr__, __dir__ = lazily(__name__, __file__)

__all__ = ["Study", "diagnose", "panel", "plot"]
TOPIC = Topic(
    name="warmup",
    codes=CODES,
    figures=(
        Figure(
            name="warmup",
            shows="Which warmup lengths train, at which learning rate.",
            caption="The star is the shortest that trains; crosses up to the cap say that no allowed warmup opens that learning rate.",
            codes=("warmup.shortest", "warmup.insufficient"),
            draw=plot,
            size=(6.4, 3.9),
        ),
    ),
    studies={"warmup": StudyKind(diagnose=diagnose, pictures=("warmup", "loss-curves"))},
)
