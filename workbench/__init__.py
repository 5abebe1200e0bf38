"""Workbench: is this training healthy, and what should I try next?

    import workbench as wb

    workload = wb.load_workload("digits_cnn")
    record = wb.LRSweep(seeds=1).run(workload, out="runs/sweep")
    diagnosis = wb.diagnose_lr_sweep(record)
    wb.plot_lr_sweep(record, diagnosis)

Names load when they are first used, so that the import alone brings in neither torch nor matplotlib.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench.config import TrainConfig
    from workbench.diagnostics.architecture import architecture_depths, architecture_joins, diagnose_architecture
    from workbench.diagnostics.base import Diagnosis, Finding
    from workbench.diagnostics.batch_norm import diagnose_batch_norm
    from workbench.diagnostics.batch_norm_layout import statistics_layout
    from workbench.diagnostics.batch_norm_merge import merge_statistics
    from workbench.diagnostics.batch_size import diagnose_batch_size
    from workbench.diagnostics.checkpoints import diagnose_checkpoints
    from workbench.diagnostics.class_counts import class_counts
    from workbench.diagnostics.clipping import diagnose_clipping
    from workbench.diagnostics.comparison import diagnose_comparison
    from workbench.diagnostics.data import diagnose_data
    from workbench.diagnostics.detectable import detectable_difference, examples_needed
    from workbench.diagnostics.early_stopping import early_stopping
    from workbench.diagnostics.evaluation import diagnose_evaluation
    from workbench.diagnostics.evaluation_sample import diagnose_evaluation_sample
    from workbench.diagnostics.hosts import diagnose_hosts
    from workbench.diagnostics.hosts_area import host_areas
    from workbench.diagnostics.input_pipeline import diagnose_input_pipeline
    from workbench.diagnostics.instability import diagnose_instability
    from workbench.diagnostics.lr_sweep import diagnose_lr_sweep
    from workbench.diagnostics.optimizers import better_rule, diagnose_optimizers
    from workbench.diagnostics.parameter_server import diagnose_parameter_server
    from workbench.diagnostics.patience import stop_with_patience
    from workbench.diagnostics.periodicity import diagnose_periodicity
    from workbench.diagnostics.sample_size import evaluation_sizes
    from workbench.diagnostics.schedule import diagnose_schedule
    from workbench.diagnostics.selection_gap import selection_gaps
    from workbench.diagnostics.server_remedies import server_remedies
    from workbench.diagnostics.server_throughput import server_throughput
    from workbench.diagnostics.skew import skew_tests
    from workbench.diagnostics.stability_first import check_stability
    from workbench.diagnostics.tracking import diagnose_tracking
    from workbench.diagnostics.warmup import diagnose_warmup
    from workbench.errors import (
        CheckpointError,
        ClusterError,
        ConfigError,
        DataError,
        DeviceError,
        NotebookError,
        RecordError,
        StudyInterrupted,
        UnknownNameError,
        UsageError,
        WorkbenchError,
        WorkloadError,
    )
    from workbench.hosts.batch_norm import synchronise_batch_norm
    from workbench.hosts.file_shards import measure_file_shards, shard_files
    from workbench.hosts.running_statistics import (
        gather_running_statistics,
        merge_running_statistics,
        merged_running_statistics,
    )
    from workbench.ledger import list_studies
    from workbench.ledger_export import export_studies
    from workbench.ledger_note import set_note
    from workbench.notebook_batch import run_notebooks
    from workbench.notebook_runner import describe_notebook, find_notebook, read_verdict, run_notebook
    from workbench.panels.batch_norm import batch_norm_panel
    from workbench.panels.checkpoints import checkpoints_panel
    from workbench.panels.clipping import clipping_panel
    from workbench.panels.curves import curves_panel
    from workbench.panels.live import live_view
    from workbench.panels.lr_sweep import lr_sweep_panel
    from workbench.panels.parameter_server import parameter_server_panel
    from workbench.panels.predictions import predictions_panel
    from workbench.panels.studies import studies_panel
    from workbench.panels.summary import show_study
    from workbench.panels.warmup import warmup_panel
    from workbench.parameter_server.cluster.cluster_resolver import ClusterResolver
    from workbench.parameter_server.cluster.connect import connect_to_cluster
    from workbench.parameter_server.cluster.in_process import create_in_process_cluster
    from workbench.parameter_server.cluster.serve_task import serve_task
    from workbench.parameter_server.context import get_current_worker_index
    from workbench.parameter_server.coordinator.buffers import merge_buffers
    from workbench.parameter_server.coordinator.coordinator import ClusterCoordinator
    from workbench.parameter_server.data.input_context import DatasetCreator, InputContext
    from workbench.parameter_server.data.string_lookup import StringLookup
    from workbench.parameter_server.data.visits import count_visits
    from workbench.parameter_server.fit.callbacks import Callback
    from workbench.parameter_server.fit.checkpoint_callbacks import BackupAndRestore, ModelCheckpoint
    from workbench.parameter_server.fit.checkpoint_manager import CheckpointManager
    from workbench.parameter_server.fit.evaluation import evaluate_direct, evaluate_distributed
    from workbench.parameter_server.fit.sidecar import SidecarEvaluator
    from workbench.parameter_server.fit.strategy_model import StrategyModel
    from workbench.parameter_server.fit.tensorboard import TensorBoard
    from workbench.parameter_server.servers.partitioners import (
        FixedShardsPartitioner,
        MaxSizePartitioner,
        MinSizePartitioner,
    )
    from workbench.parameter_server.servers.variable import ShardedVariable
    from workbench.parameter_server.strategy import ParameterServerStrategy
    from workbench.parameter_server.trials.trainer import ParameterServerTrainer
    from workbench.parameter_server.workers.closure import RemoteValue
    from workbench.parameter_server.workers.resources import PerWorkerValues
    from workbench.playbook import diagnose
    from workbench.plots.architecture import plot_architecture
    from workbench.plots.batch_norm import plot_batch_norm, plot_batch_norm_devices
    from workbench.plots.batch_norm_layout import plot_batch_norm_layout
    from workbench.plots.batch_size import plot_batch_size, plot_tuned_lr
    from workbench.plots.checkpoints import plot_checkpoints, plot_early_stopping
    from workbench.plots.clipping import plot_clipping
    from workbench.plots.comparison import plot_comparison
    from workbench.plots.evaluation import plot_evaluation, plot_timed_evaluations
    from workbench.plots.evaluation_sample import plot_class_recall, plot_evaluation_sample, plot_selection_gap
    from workbench.plots.grad_norm import plot_grad_norm, plot_grad_norm_histogram
    from workbench.plots.hosts import plot_bytes_read, plot_hosts, plot_shards
    from workbench.plots.input_pipeline import plot_input_pipeline, plot_input_workers
    from workbench.plots.instability import plot_confirm, plot_probe
    from workbench.plots.lr_sweep import plot_loss_curves, plot_lr_sweep
    from workbench.plots.optimizers import plot_optimizers, plot_rule_forms
    from workbench.plots.parameter_server import plot_server_load, plot_staleness, plot_throughput
    from workbench.plots.patience import plot_patience
    from workbench.plots.periodicity import plot_periodicity
    from workbench.plots.predictions import plot_predictions
    from workbench.plots.proof import plot_proof
    from workbench.plots.schedule import plot_schedule
    from workbench.plots.tracking import plot_studies
    from workbench.plots.trial_curves import plot_trial_curves
    from workbench.plots.warmup import plot_warmup
    from workbench.record import StudyRecord, TrialRecord
    from workbench.record import open_record as open
    from workbench.record_lanes import how_trained
    from workbench.report import write_report
    from workbench.report_summary import summarise
    from workbench.schedules import (
        constant,
        cosine,
        join,
        linear,
        linear_warmup,
        lr_values,
        prepend_warmup,
        schedule_of,
        shaped,
    )
    from workbench.studies.architecture import ArchitectureStudy
    from workbench.studies.batch_norm import BatchNormStudy
    from workbench.studies.batch_norm_facts import audit_batch_norm
    from workbench.studies.batch_size import BatchSizeStudy
    from workbench.studies.checkpoint_file import audit_checkpoint
    from workbench.studies.checkpoints import CheckpointStudy
    from workbench.studies.clipping import ClippingStudy
    from workbench.studies.comparison import ComparisonStudy
    from workbench.studies.data.collect import audit_data
    from workbench.studies.data.overlap import find_overlap
    from workbench.studies.evaluation import EvaluationStudy
    from workbench.studies.evaluation_check import check_evaluation
    from workbench.studies.evaluation_sample import EvaluationSampleStudy
    from workbench.studies.hosts import HostsStudy, audit_hosts, audit_script, read_hosts
    from workbench.studies.hosts_self_test import self_test_hosts
    from workbench.studies.input.audit import audit_input
    from workbench.studies.input.storage import compare_storage
    from workbench.studies.input_pipeline import InputPipelineStudy
    from workbench.studies.instability import InstabilityStudy
    from workbench.studies.lr_sweep import LRSweep
    from workbench.studies.optimizers import OptimizersStudy
    from workbench.studies.parameter_server import ParameterServerStudy, audit_parameter_server
    from workbench.studies.resume import audit_resume
    from workbench.studies.warmup import WarmupStudy
    from workbench.train.artifacts import export_program, load_trained
    from workbench.train.batch_norm import ghost_batch_norm
    from workbench.train.evaluation import evaluate
    from workbench.train.hooks.activations import Activations
    from workbench.train.hooks.base import Hook
    from workbench.train.hooks.norms import Norms
    from workbench.train.hooks.timing import Timing
    from workbench.train.hooks.update_ratios import UpdateRatios
    from workbench.train.offline import evaluate_offline
    from workbench.train.replace_norm import replace_batch_norm
    from workbench.train.replay import serve_requests
    from workbench.train.rule_forms import explain_rule
    from workbench.train.trainer import Trainer
    from workbench.workloads.base import Workload
    from workbench.workloads.delayed import Delayed
    from workbench.workloads.evaluation_sample import draw_sample, sampled_workload
    from workbench.workloads.helpers import classification, language_model, regression
    from workbench.workloads.registry import list_workloads, load_workload
    from workbench.workloads.stored import cache_dataset
    from workbench.workloads.subset import periodic_subset

__version__ = "0.1.0"

__all__ = [
    "Activations",
    "ArchitectureStudy",
    "BackupAndRestore",
    "BatchNormStudy",
    "BatchSizeStudy",
    "Callback",
    "CheckpointError",
    "CheckpointManager",
    "CheckpointStudy",
    "ClippingStudy",
    "ClusterCoordinator",
    "ClusterError",
    "ClusterResolver",
    "ComparisonStudy",
    "ConfigError",
    "DataError",
    "DatasetCreator",
    "Delayed",
    "DeviceError",
    "Diagnosis",
    "EvaluationSampleStudy",
    "EvaluationStudy",
    "Finding",
    "FixedShardsPartitioner",
    "Hook",
    "HostsStudy",
    "InputContext",
    "InputPipelineStudy",
    "InstabilityStudy",
    "LRSweep",
    "MaxSizePartitioner",
    "MinSizePartitioner",
    "ModelCheckpoint",
    "Norms",
    "NotebookError",
    "OptimizersStudy",
    "ParameterServerStrategy",
    "ParameterServerStudy",
    "ParameterServerTrainer",
    "PerWorkerValues",
    "RecordError",
    "RemoteValue",
    "ShardedVariable",
    "SidecarEvaluator",
    "StrategyModel",
    "StringLookup",
    "StudyInterrupted",
    "StudyRecord",
    "TensorBoard",
    "Timing",
    "TrainConfig",
    "Trainer",
    "TrialRecord",
    "UnknownNameError",
    "UpdateRatios",
    "UsageError",
    "WarmupStudy",
    "WorkbenchError",
    "Workload",
    "WorkloadError",
    "__version__",
    "architecture_depths",
    "architecture_joins",
    "audit_batch_norm",
    "audit_checkpoint",
    "audit_data",
    "audit_hosts",
    "audit_input",
    "audit_parameter_server",
    "audit_resume",
    "audit_script",
    "batch_norm_panel",
    "better_rule",
    "cache_dataset",
    "check_evaluation",
    "check_stability",
    "checkpoints_panel",
    "class_counts",
    "classification",
    "clipping_panel",
    "compare_storage",
    "connect_to_cluster",
    "constant",
    "cosine",
    "count_visits",
    "create_in_process_cluster",
    "curves_panel",
    "describe_notebook",
    "detectable_difference",
    "diagnose",
    "diagnose_architecture",
    "diagnose_batch_norm",
    "diagnose_batch_size",
    "diagnose_checkpoints",
    "diagnose_clipping",
    "diagnose_comparison",
    "diagnose_data",
    "diagnose_evaluation",
    "diagnose_evaluation_sample",
    "diagnose_hosts",
    "diagnose_input_pipeline",
    "diagnose_instability",
    "diagnose_lr_sweep",
    "diagnose_optimizers",
    "diagnose_parameter_server",
    "diagnose_periodicity",
    "diagnose_schedule",
    "diagnose_tracking",
    "diagnose_warmup",
    "draw_sample",
    "early_stopping",
    "evaluate",
    "evaluate_direct",
    "evaluate_distributed",
    "evaluate_offline",
    "evaluation_sizes",
    "examples_needed",
    "explain_rule",
    "export_program",
    "export_studies",
    "find_notebook",
    "find_overlap",
    "gather_running_statistics",
    "get_current_worker_index",
    "ghost_batch_norm",
    "host_areas",
    "how_trained",
    "join",
    "language_model",
    "linear",
    "linear_warmup",
    "list_studies",
    "list_workloads",
    "live_view",
    "load_trained",
    "load_workload",
    "lr_sweep_panel",
    "lr_values",
    "measure_file_shards",
    "merge_buffers",
    "merge_running_statistics",
    "merge_statistics",
    "merged_running_statistics",
    "open",
    "parameter_server_panel",
    "periodic_subset",
    "plot_architecture",
    "plot_batch_norm",
    "plot_batch_norm_devices",
    "plot_batch_norm_layout",
    "plot_batch_size",
    "plot_bytes_read",
    "plot_checkpoints",
    "plot_class_recall",
    "plot_clipping",
    "plot_comparison",
    "plot_confirm",
    "plot_early_stopping",
    "plot_evaluation",
    "plot_evaluation_sample",
    "plot_grad_norm",
    "plot_grad_norm_histogram",
    "plot_hosts",
    "plot_input_pipeline",
    "plot_input_workers",
    "plot_loss_curves",
    "plot_lr_sweep",
    "plot_optimizers",
    "plot_patience",
    "plot_periodicity",
    "plot_predictions",
    "plot_probe",
    "plot_proof",
    "plot_rule_forms",
    "plot_schedule",
    "plot_selection_gap",
    "plot_server_load",
    "plot_shards",
    "plot_staleness",
    "plot_studies",
    "plot_throughput",
    "plot_timed_evaluations",
    "plot_trial_curves",
    "plot_tuned_lr",
    "plot_warmup",
    "predictions_panel",
    "prepend_warmup",
    "read_hosts",
    "read_verdict",
    "regression",
    "replace_batch_norm",
    "run_notebook",
    "run_notebooks",
    "sampled_workload",
    "schedule_of",
    "selection_gaps",
    "self_test_hosts",
    "serve_requests",
    "serve_task",
    "server_remedies",
    "server_throughput",
    "set_note",
    "shaped",
    "shard_files",
    "show_study",
    "skew_tests",
    "statistics_layout",
    "stop_with_patience",
    "studies_panel",
    "summarise",
    "synchronise_batch_norm",
    "warmup_panel",
    "write_report",
]

_HOMES: dict[str, tuple[str, ...]] = {
    "config": ("TrainConfig",),
    "diagnostics.architecture": (
        "architecture_depths",
        "architecture_joins",
        "diagnose_architecture",
    ),
    "diagnostics.base": (
        "Diagnosis",
        "Finding",
    ),
    "diagnostics.batch_norm": ("diagnose_batch_norm",),
    "diagnostics.batch_norm_layout": ("statistics_layout",),
    "diagnostics.batch_norm_merge": ("merge_statistics",),
    "diagnostics.batch_size": ("diagnose_batch_size",),
    "diagnostics.checkpoints": ("diagnose_checkpoints",),
    "diagnostics.class_counts": ("class_counts",),
    "diagnostics.clipping": ("diagnose_clipping",),
    "diagnostics.comparison": ("diagnose_comparison",),
    "diagnostics.detectable": (
        "detectable_difference",
        "examples_needed",
    ),
    "diagnostics.early_stopping": ("early_stopping",),
    "diagnostics.evaluation": ("diagnose_evaluation",),
    "diagnostics.evaluation_sample": ("diagnose_evaluation_sample",),
    "diagnostics.data": ("diagnose_data",),
    "diagnostics.hosts": ("diagnose_hosts",),
    "diagnostics.hosts_area": ("host_areas",),
    "diagnostics.input_pipeline": ("diagnose_input_pipeline",),
    "diagnostics.instability": ("diagnose_instability",),
    "diagnostics.lr_sweep": ("diagnose_lr_sweep",),
    "diagnostics.optimizers": (
        "better_rule",
        "diagnose_optimizers",
    ),
    "diagnostics.sample_size": ("evaluation_sizes",),
    "diagnostics.patience": ("stop_with_patience",),
    "diagnostics.periodicity": ("diagnose_periodicity",),
    "diagnostics.schedule": ("diagnose_schedule",),
    "diagnostics.selection_gap": ("selection_gaps",),
    "diagnostics.skew": ("skew_tests",),
    "diagnostics.stability_first": ("check_stability",),
    "diagnostics.tracking": ("diagnose_tracking",),
    "diagnostics.warmup": ("diagnose_warmup",),
    "errors": (
        "CheckpointError",
        "ClusterError",
        "ConfigError",
        "DataError",
        "DeviceError",
        "NotebookError",
        "RecordError",
        "StudyInterrupted",
        "UnknownNameError",
        "UsageError",
        "WorkbenchError",
        "WorkloadError",
    ),
    "hosts.batch_norm": ("synchronise_batch_norm",),
    "hosts.file_shards": (
        "measure_file_shards",
        "shard_files",
    ),
    "hosts.running_statistics": (
        "gather_running_statistics",
        "merge_running_statistics",
        "merged_running_statistics",
    ),
    "ledger": ("list_studies",),
    "ledger_export": ("export_studies",),
    "ledger_note": ("set_note",),
    "notebook_batch": ("run_notebooks",),
    "notebook_runner": (
        "describe_notebook",
        "find_notebook",
        "read_verdict",
        "run_notebook",
    ),
    "panels.batch_norm": ("batch_norm_panel",),
    "panels.checkpoints": ("checkpoints_panel",),
    "panels.clipping": ("clipping_panel",),
    "panels.curves": ("curves_panel",),
    "panels.live": ("live_view",),
    "panels.lr_sweep": ("lr_sweep_panel",),
    "panels.parameter_server": ("parameter_server_panel",),
    "panels.predictions": ("predictions_panel",),
    "panels.warmup": ("warmup_panel",),
    "panels.summary": ("show_study",),
    "panels.studies": ("studies_panel",),
    "playbook": ("diagnose",),
    "plots.architecture": ("plot_architecture",),
    "plots.batch_norm": (
        "plot_batch_norm",
        "plot_batch_norm_devices",
    ),
    "plots.batch_norm_layout": ("plot_batch_norm_layout",),
    "plots.batch_size": (
        "plot_batch_size",
        "plot_tuned_lr",
    ),
    "plots.checkpoints": (
        "plot_checkpoints",
        "plot_early_stopping",
    ),
    "plots.clipping": ("plot_clipping",),
    "plots.comparison": ("plot_comparison",),
    "plots.evaluation": (
        "plot_evaluation",
        "plot_timed_evaluations",
    ),
    "plots.evaluation_sample": (
        "plot_class_recall",
        "plot_evaluation_sample",
        "plot_selection_gap",
    ),
    "plots.grad_norm": (
        "plot_grad_norm",
        "plot_grad_norm_histogram",
    ),
    "plots.hosts": (
        "plot_bytes_read",
        "plot_hosts",
        "plot_shards",
    ),
    "plots.input_pipeline": (
        "plot_input_pipeline",
        "plot_input_workers",
    ),
    "plots.instability": (
        "plot_confirm",
        "plot_probe",
    ),
    "plots.lr_sweep": (
        "plot_loss_curves",
        "plot_lr_sweep",
    ),
    "plots.optimizers": (
        "plot_optimizers",
        "plot_rule_forms",
    ),
    "plots.patience": ("plot_patience",),
    "plots.predictions": ("plot_predictions",),
    "plots.schedule": ("plot_schedule",),
    "plots.periodicity": ("plot_periodicity",),
    "plots.proof": ("plot_proof",),
    "plots.tracking": ("plot_studies",),
    "plots.trial_curves": ("plot_trial_curves",),
    "plots.warmup": ("plot_warmup",),
    "record": (
        "StudyRecord",
        "TrialRecord",
    ),
    "record_lanes": ("how_trained",),
    "report": ("write_report",),
    "report_summary": ("summarise",),
    "schedules": (
        "constant",
        "cosine",
        "join",
        "linear",
        "linear_warmup",
        "lr_values",
        "prepend_warmup",
        "schedule_of",
        "shaped",
    ),
    "studies.architecture": ("ArchitectureStudy",),
    "studies.batch_norm": ("BatchNormStudy",),
    "studies.batch_norm_facts": ("audit_batch_norm",),
    "studies.batch_size": ("BatchSizeStudy",),
    "studies.checkpoint_file": ("audit_checkpoint",),
    "studies.checkpoints": ("CheckpointStudy",),
    "studies.clipping": ("ClippingStudy",),
    "studies.comparison": ("ComparisonStudy",),
    "studies.evaluation": ("EvaluationStudy",),
    "studies.evaluation_check": ("check_evaluation",),
    "studies.evaluation_sample": ("EvaluationSampleStudy",),
    "studies.data.collect": ("audit_data",),
    "studies.data.overlap": ("find_overlap",),
    "studies.hosts": (
        "HostsStudy",
        "audit_hosts",
        "audit_script",
        "read_hosts",
    ),
    "studies.hosts_self_test": ("self_test_hosts",),
    "studies.input.audit": ("audit_input",),
    "studies.input.storage": ("compare_storage",),
    "studies.input_pipeline": ("InputPipelineStudy",),
    "studies.instability": ("InstabilityStudy",),
    "studies.lr_sweep": ("LRSweep",),
    "studies.optimizers": ("OptimizersStudy",),
    "studies.resume": ("audit_resume",),
    "studies.warmup": ("WarmupStudy",),
    "train.artifacts": (
        "export_program",
        "load_trained",
    ),
    "train.batch_norm": ("ghost_batch_norm",),
    "train.evaluation": ("evaluate",),
    "train.hooks.activations": ("Activations",),
    "train.hooks.base": ("Hook",),
    "train.hooks.norms": ("Norms",),
    "train.hooks.timing": ("Timing",),
    "train.hooks.update_ratios": ("UpdateRatios",),
    "train.offline": ("evaluate_offline",),
    "train.replay": ("serve_requests",),
    "train.replace_norm": ("replace_batch_norm",),
    "train.rule_forms": ("explain_rule",),
    "train.trainer": ("Trainer",),
    "workloads.base": ("Workload",),
    "workloads.delayed": ("Delayed",),
    "workloads.evaluation_sample": (
        "draw_sample",
        "sampled_workload",
    ),
    "workloads.helpers": (
        "classification",
        "language_model",
        "regression",
    ),
    "workloads.registry": (
        "list_workloads",
        "load_workload",
    ),
    "workloads.stored": ("cache_dataset",),
    "workloads.subset": ("periodic_subset",),
    "diagnostics.parameter_server": ("diagnose_parameter_server",),
    "diagnostics.server_remedies": ("server_remedies",),
    "diagnostics.server_throughput": ("server_throughput",),
    "parameter_server.fit.callbacks": ("Callback",),
    "parameter_server.fit.checkpoint_callbacks": (
        "BackupAndRestore",
        "ModelCheckpoint",
    ),
    "parameter_server.fit.checkpoint_manager": ("CheckpointManager",),
    "parameter_server.workers.closure": ("RemoteValue",),
    "parameter_server.cluster.cluster_resolver": ("ClusterResolver",),
    "parameter_server.cluster.connect": ("connect_to_cluster",),
    "parameter_server.cluster.in_process": ("create_in_process_cluster",),
    "parameter_server.cluster.serve_task": ("serve_task",),
    "parameter_server.context": ("get_current_worker_index",),
    "parameter_server.coordinator.buffers": ("merge_buffers",),
    "parameter_server.coordinator.coordinator": ("ClusterCoordinator",),
    "parameter_server.fit.evaluation": (
        "evaluate_direct",
        "evaluate_distributed",
    ),
    "parameter_server.fit.strategy_model": ("StrategyModel",),
    "parameter_server.data.input_context": (
        "DatasetCreator",
        "InputContext",
    ),
    "parameter_server.servers.partitioners": (
        "FixedShardsPartitioner",
        "MaxSizePartitioner",
        "MinSizePartitioner",
    ),
    "parameter_server.workers.resources": ("PerWorkerValues",),
    "parameter_server.fit.sidecar": ("SidecarEvaluator",),
    "parameter_server.strategy": ("ParameterServerStrategy",),
    "parameter_server.data.string_lookup": ("StringLookup",),
    "parameter_server.fit.tensorboard": ("TensorBoard",),
    "parameter_server.trials.trainer": ("ParameterServerTrainer",),
    "parameter_server.servers.variable": ("ShardedVariable",),
    "parameter_server.data.visits": ("count_visits",),
    "plots.parameter_server": (
        "plot_server_load",
        "plot_staleness",
        "plot_throughput",
    ),
    "studies.parameter_server": (
        "ParameterServerStudy",
        "audit_parameter_server",
    ),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import the module that `name` lives in, and keep what was found."""
    if name == "open":
        value = importlib.import_module("workbench.record").open_record
    elif name in _HOME:
        value = getattr(importlib.import_module(f"workbench.{_HOME[name]}"), name)
    else:
        raise AttributeError(f"workbench has no {name!r}; dir(workbench) lists what there is")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names, loaded or not."""
    return sorted(__all__)


def _show(record: Any) -> None:
    importlib.import_module("workbench.panels.summary").show_study(record)


def _show_records_in_notebooks() -> None:
    """Let a notebook draw a record that is the last line of a cell, such as `wb.open("runs/one")`."""
    shell: Any = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if getattr(shell, "kernel", None) is not None:
        for name in ("StudyRecord", "TrialRecord"):
            shell.display_formatter.ipython_display_formatter.for_type_by_name("workbench.record", name, _show)


_show_records_in_notebooks()
