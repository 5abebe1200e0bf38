"""Which batch size is worth its steps?"""

from typing import TYPE_CHECKING

from workbench.findings.topic import Figure, StudyKind, Topic
from workbench.lazy import lazily
from workbench.topics.batch_size.diagnose import CODES
from workbench.topics.batch_size.diagnose import diagnose_batch_size as diagnose
from workbench.topics.batch_size.figures import plot_batch_size as plot
from workbench.topics.batch_size.figures import plot_tuned_lr

if TYPE_CHECKING:
    from workbench.topics.batch_size.study import BatchSizeStudy as Study
else:
    __getattr__, __dir__ = lazily(__name__, __file__)

__all__ = ["Study", "diagnose", "plot", "plot_tuned_lr"]

TOPIC = Topic(
    name="batch_size",
    codes=CODES,
    figures=(
        Figure(
            name="batch-size",
            shows="Selected metric against batch size, with the baseline's settings everywhere and tuned for each.",
            caption="Crosses that lie apart and dots that do not: the settings fitted one batch size, and the size itself made no difference.",
            codes=("batch_size.equivalence", "batch_size.retune"),
            draw=plot,
            kind="batch_size",
            size=(6.4, 3.9),
        ),
        Figure(
            name="tuned-lr",
            shows="Tuned learning rate against batch size, beside the two rules by which it is often scaled.",
            caption="A hollow mark lies at the end of what was tried, so that the best may lie beyond.",
            codes=("batch_size.retune",),
            draw=plot_tuned_lr,
            kind="batch_size",
            size=(6.4, 3.9),
        ),
    ),
    studies={"batch_size": StudyKind(diagnose=diagnose, pictures=("batch-size",))},
)
