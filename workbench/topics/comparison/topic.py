"""What does a modification do to the learning rates that train, and does a warmup undo it?"""

from typing import TYPE_CHECKING

from workbench.findings.topic import Topic
from workbench.lazy import lazily
from workbench.topics.comparison.diagnose import CODES
from workbench.topics.comparison.diagnose import diagnose_modification as diagnose
from workbench.topics.comparison.figures import plot_modification as plot

if TYPE_CHECKING:
    from workbench.topics.comparison.study import ModificationStudy as Study
else:
    __getattr__, __dir__ = lazily(__name__, __file__)

__all__ = ["Study", "diagnose", "plot"]
TOPIC = Topic(name="comparison", codes=CODES)
