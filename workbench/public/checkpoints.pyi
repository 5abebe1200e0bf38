"""Which checkpoint to take, and does training resume where it stopped?"""

from workbench.topics.checkpoints.diagnose import diagnose_checkpoints as diagnose
from workbench.topics.checkpoints.early_stopping import early_stopping as early_stopping
from workbench.topics.checkpoints.early_stopping import stop_with_patience as stop_with_patience
from workbench.topics.checkpoints.figures import plot_checkpoints as plot
from workbench.topics.checkpoints.figures import plot_early_stopping as plot_early_stopping
from workbench.topics.checkpoints.figures import plot_patience as plot_patience
from workbench.topics.checkpoints.panel import checkpoints_panel as panel
from workbench.topics.checkpoints.resume import audit_checkpoint as audit
from workbench.topics.checkpoints.resume import audit_resume as audit_resume
from workbench.topics.checkpoints.study import CheckpointStudy as Study
from workbench.train.offline import export_program as export_program
from workbench.train.offline import load_trained as load_trained

__all__ = [
    "Study",
    "audit",
    "audit_resume",
    "diagnose",
    "early_stopping",
    "export_program",
    "load_trained",
    "panel",
    "plot",
    "plot_early_stopping",
    "plot_patience",
    "stop_with_patience",
]
