"""The public names and where each lives; `__init__.py` imports it when a name is first used."""

from workbench import errors, schedules
from workbench.adapters import callbacks
from workbench.config import TrainConfig
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.finding import Finding
from workbench.instruments.log import log
from workbench.ledger.studies import export_studies, list_studies, set_note
from workbench.logs.read import read_log
from workbench.notebook.batch import run_notebooks
from workbench.playbook.diagnose import diagnose
from workbench.playbook.function import diagnose_function
from workbench.playbook.judge import judge
from workbench.playbook.program import diagnose_program
from workbench.record.read import StudyRecord, TrialRecord
from workbench.record.read import open_record as open
from workbench.report.summary import summarise
from workbench.report.write import write_report
from workbench.topics.architecture import topic as architecture
from workbench.topics.batch_norm import topic as batch_norm
from workbench.topics.batch_size import topic as batch_size
from workbench.topics.checkpoints import topic as checkpoints
from workbench.topics.clipping import topic as clipping
from workbench.topics.comparison import topic as comparison
from workbench.topics.data import topic as data
from workbench.topics.evaluation import topic as evaluation
from workbench.topics.hosts import topic as hosts
from workbench.topics.input import topic as input
from workbench.topics.loop import topic as loop
from workbench.topics.loop.collect import watch
from workbench.topics.lr_sweep import topic as lr_sweep
from workbench.topics.optimizers import topic as optimizers
from workbench.topics.parameter_server import topic as ps
from workbench.topics.periodicity import topic as periodicity
from workbench.topics.predictions import topic as predictions
from workbench.topics.schedule import topic as schedule
from workbench.topics.stability import topic as stability
from workbench.topics.tracking import topic as tracking
from workbench.topics.warmup import topic as warmup
from workbench.train import hooks
from workbench.train.trainer import Trainer
from workbench.views.curves import curves_panel
from workbench.views.live import live_view
from workbench.views.studies import studies_panel
from workbench.workloads.base import Workload
from workbench.workloads.losses import classification, language_model, regression
from workbench.workloads.registry import list_workloads, load_workload

__version__: str
__all__ = [
    "Diagnosis",
    "Finding",
    "StudyRecord",
    "TrainConfig",
    "Trainer",
    "TrialRecord",
    "Workload",
    "__version__",
    "architecture",
    "batch_norm",
    "batch_size",
    "callbacks",
    "checkpoints",
    "classification",
    "clipping",
    "comparison",
    "curves_panel",
    "data",
    "diagnose",
    "diagnose_function",
    "diagnose_program",
    "errors",
    "evaluation",
    "export_studies",
    "hooks",
    "hosts",
    "input",
    "judge",
    "language_model",
    "list_studies",
    "list_workloads",
    "live_view",
    "load_workload",
    "log",
    "loop",
    "lr_sweep",
    "open",
    "optimizers",
    "periodicity",
    "predictions",
    "ps",
    "read_log",
    "regression",
    "run_notebooks",
    "schedule",
    "schedules",
    "set_note",
    "stability",
    "studies_panel",
    "summarise",
    "tracking",
    "warmup",
    "watch",
    "write_report",
]
