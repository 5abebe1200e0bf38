"""Figures: numbers in, Axes out. matplotlib is imported here and nowhere else; a figure never fits, smooths or decides."""

from __future__ import annotations

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

__all__ = [
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
]
