"""Which practices of its architecture does a model follow?"""

from typing import TYPE_CHECKING

from workbench.findings.topic import Figure, StudyKind, Topic
from workbench.lazy import lazily
from workbench.topics.architecture.diagnose import CODES, lr_sensitivity
from workbench.topics.architecture.diagnose import architecture_depths as depths
from workbench.topics.architecture.diagnose import architecture_joins as joins
from workbench.topics.architecture.diagnose import diagnose_architecture as diagnose
from workbench.topics.architecture.figures import plot_architecture as plot
from workbench.topics.architecture.figures import plot_sensitivity

if TYPE_CHECKING:
    from workbench.topics.architecture.study import ArchitectureStudy as Study
else:
    __getattr__, __dir__ = lazily(__name__, __file__)

__all__ = ["Study", "depths", "diagnose", "joins", "lr_sensitivity", "plot", "plot_sensitivity"]

TOPIC = Topic(
    name="architecture",
    codes=CODES,
    figures=(
        Figure(
            name="architecture",
            shows="Largest stable learning rate against depth, with each practice and without.",
            caption="A level line, high up, keeps its learning rate however deep the network gets; a hollow triangle is an end of the grid.",
            codes=("architecture.norm_after_add", "architecture.no_residual", "architecture.no_norm"),
            draw=lambda record, _, *, ax: plot(record, ax=ax),
            kind="architecture",
            size=(6.4, 3.9),
        ),
    ),
    studies={
        "architecture": StudyKind(diagnose=diagnose, pictures=("architecture",)),
    },
)
