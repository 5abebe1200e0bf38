"""The public names and where each lives; `__init__.py` imports it when a name is first used."""

from workbench import errors as errors
from workbench import schedules as schedules
from workbench.config import TrainConfig as TrainConfig
from workbench.errors import StudyInterrupted as StudyInterrupted
from workbench.errors import WorkbenchError as WorkbenchError
from workbench.findings.diagnosis import Diagnosis as Diagnosis
from workbench.findings.finding import Finding as Finding
from workbench.ledger.studies import export_studies as export_studies
from workbench.ledger.studies import list_studies as list_studies
from workbench.ledger.studies import set_note as set_note
from workbench.notebook.batch import run_notebooks as run_notebooks
from workbench.notebook.runner import describe_notebook as describe_notebook
from workbench.notebook.runner import find_notebook as find_notebook
from workbench.notebook.runner import read_verdict as read_verdict
from workbench.notebook.runner import run_notebook as run_notebook
from workbench.playbook.walk import diagnose as diagnose
from workbench.plots.loss import plot_trial_curves as plot_trial_curves
from workbench.public import architecture as architecture
from workbench.public import batch_norm as batch_norm
from workbench.public import batch_size as batch_size
from workbench.public import checkpoints as checkpoints
from workbench.public import clipping as clipping
from workbench.public import comparison as comparison
from workbench.public import data as data
from workbench.public import evaluation as evaluation
from workbench.public import hooks as hooks
from workbench.public import hosts as hosts
from workbench.public import input as input
from workbench.public import lr_sweep as lr_sweep
from workbench.public import optimizers as optimizers
from workbench.public import periodicity as periodicity
from workbench.public import predictions as predictions
from workbench.public import ps as ps
from workbench.public import schedule as schedule
from workbench.public import stability as stability
from workbench.public import tracking as tracking
from workbench.public import warmup as warmup
from workbench.record.read import StudyRecord as StudyRecord
from workbench.record.read import TrialRecord as TrialRecord
from workbench.record.read import how_trained as how_trained
from workbench.record.read import open_record as open
from workbench.report.page import write_report as write_report
from workbench.report.summary import summarise as summarise
from workbench.topics.recommendation.figures import plot_proof as plot_proof
from workbench.train.trainer import Trainer as Trainer
from workbench.views.curves import curves_panel as curves_panel
from workbench.views.live import live_view as live_view
from workbench.views.studies import studies_panel as studies_panel
from workbench.views.summary import show_study as show_study
from workbench.workloads.base import Workload as Workload
from workbench.workloads.losses import classification as classification
from workbench.workloads.losses import language_model as language_model
from workbench.workloads.losses import regression as regression
from workbench.workloads.registry import list_workloads as list_workloads
from workbench.workloads.registry import load_workload as load_workload

__version__: str
__all__ = [
    "Diagnosis",
    "Finding",
    "StudyInterrupted",
    "StudyRecord",
    "TrainConfig",
    "Trainer",
    "TrialRecord",
    "WorkbenchError",
    "Workload",
    "__version__",
    "architecture",
    "batch_norm",
    "batch_size",
    "checkpoints",
    "classification",
    "clipping",
    "comparison",
    "curves_panel",
    "data",
    "describe_notebook",
    "diagnose",
    "errors",
    "evaluation",
    "export_studies",
    "find_notebook",
    "hooks",
    "hosts",
    "how_trained",
    "input",
    "language_model",
    "list_studies",
    "list_workloads",
    "live_view",
    "load_workload",
    "lr_sweep",
    "open",
    "optimizers",
    "periodicity",
    "plot_proof",
    "plot_trial_curves",
    "predictions",
    "ps",
    "read_verdict",
    "regression",
    "run_notebook",
    "run_notebooks",
    "schedule",
    "schedules",
    "set_note",
    "show_study",
    "stability",
    "studies_panel",
    "summarise",
    "tracking",
    "warmup",
    "write_report",
]
