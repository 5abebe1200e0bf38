"""Which update rule, with which constants?"""

from typing import TYPE_CHECKING

from workbench.findings.topic import Figure, StudyKind, Topic
from workbench.lazy import lazily
from workbench.topics.optimizers.constants import CODES as REPLACED_CODES
from workbench.topics.optimizers.diagnose import CODES, better_rule
from workbench.topics.optimizers.diagnose import diagnose_optimizers as diagnose
from workbench.topics.optimizers.figures import plot_optimizers as plot

if TYPE_CHECKING:
    from workbench.topics.optimizers.rule_forms import explain_rule
    from workbench.topics.optimizers.study import OptimizersStudy as Study
else:
    __getattr__, __dir__ = lazily(__name__, __file__)

__all__ = ["Study", "better_rule", "diagnose", "explain_rule", "plot"]

TOPIC = Topic(
    name="optimizers",
    codes={**CODES, **REPLACED_CODES},
    figures=(
        Figure(
            name="optimizers",
            shows="The learning rates over which each update rule trains.",
            caption="Long bars are healthy, with the diamond, the baseline's own learning rate, well inside the bar of its rule.",
            codes=("optimizers.better",),
            draw=plot,
            kind="optimizers",
            size=(6.4, 3.9),
        ),
    ),
    studies={"optimizers": StudyKind(diagnose=diagnose, pictures=("optimizers",))},
)
