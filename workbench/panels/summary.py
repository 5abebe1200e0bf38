"""`show_study`: one figure, one sentence and the verdict table of any study on disk, as ordinary outputs that stay."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape
from typing import Any

from workbench.diagnostics.base import Diagnosis
from workbench.panels.base import still
from workbench.playbook_records import diagnosis_of
from workbench.plots.architecture import plot_architecture
from workbench.plots.batch_norm import plot_batch_norm
from workbench.plots.batch_size import plot_batch_size
from workbench.plots.checkpoints import plot_checkpoints
from workbench.plots.clipping import plot_clipping
from workbench.plots.evaluation import plot_evaluation
from workbench.plots.evaluation_sample import plot_evaluation_sample
from workbench.plots.hosts import plot_hosts
from workbench.plots.input_pipeline import plot_input_pipeline
from workbench.plots.instability import plot_confirm
from workbench.plots.lr_sweep import plot_loss_curves, plot_lr_sweep
from workbench.plots.optimizers import plot_optimizers
from workbench.plots.parameter_server import plot_server_load
from workbench.plots.render import png
from workbench.plots.warmup import plot_warmup
from workbench.record import StudyRecord, TrialRecord

__all__ = ["show_study", "study_picture", "study_sentence"]

Draw = Callable[[Any, Diagnosis, Any], Any]


def _curves(record: Any, diagnosis: Diagnosis, ax: Any) -> Any:
    return plot_loss_curves(record, diagnosis=diagnosis, ax=ax)


def _drawn_by(plot: Callable[..., Any]) -> Draw:
    return lambda record, diagnosis, ax: plot(record, diagnosis, ax=ax)


PICTURES: Mapping[str, tuple[Draw, ...]] = {
    "diagnosis": (_drawn_by(plot_lr_sweep), _curves),
    "lr_sweep": (_drawn_by(plot_lr_sweep), _curves),
    "instability": (_drawn_by(plot_confirm), _curves),
    "warmup": (_drawn_by(plot_warmup), _curves),
    "clipping": (_drawn_by(plot_clipping), _curves),
    "optimizers": (_drawn_by(plot_optimizers),),
    "architecture": (lambda record, _, ax: plot_architecture(record, ax=ax),),
    "batch_size": (_drawn_by(plot_batch_size),),
    "batch_norm": (_drawn_by(plot_batch_norm),),
    "checkpoints": (_drawn_by(plot_checkpoints),),
    "evaluation": (_drawn_by(plot_evaluation),),
    "evaluation_sample": (_drawn_by(plot_evaluation_sample),),
    "hosts": (_drawn_by(plot_hosts),),
    "input_pipeline": (_drawn_by(plot_input_pipeline),),
    "parameter_server": (_drawn_by(plot_server_load),),
}
"""What a study of each kind is looked at with; any other one by its loss curves."""


def show_study(record: StudyRecord | TrialRecord) -> None:
    """Show one figure, one sentence and the verdict table in the cell that runs; the last line of a cell does it by itself.

    All three are made from the study's folder, so that a page that was reloaded or a kernel that was restarted loses nothing.

    Args:
        record: a study or a single trial, finished, stopped or running.
    """
    from IPython.display import Markdown, display

    record = _anew(record)
    diagnosis = diagnosis_of(record)
    display(still(study_picture(record, diagnosis)))  # type: ignore[no-untyped-call]
    display(Markdown(study_sentence(record)))  # type: ignore[no-untyped-call]
    display(diagnosis)  # type: ignore[no-untyped-call]


def study_picture(record: StudyRecord | TrialRecord, diagnosis: Diagnosis) -> bytes:
    """Return the figure that a study of its kind is looked at with, as PNG."""
    kind = str(record.study.get("kind")) if isinstance(record, StudyRecord) else "trial"
    draws = PICTURES.get(kind, (_curves,))
    return png([lambda ax, draw=draw: draw(record, diagnosis, ax) for draw in draws])  # type: ignore[misc]


def study_sentence(record: StudyRecord | TrialRecord) -> str:
    """Return what was trained, how it ended and what came out best, in one sentence of Markdown."""
    trials = record.trials
    if trials.empty:
        return f"`{record.path}`: no trial yet; the call that began the study goes on with it."
    states = trials["state"].value_counts()
    told = ", ".join(f"{states[state]} {state}" for state in _ORDER if state in states)
    many = f"{len(trials)} trial{'s' * (len(trials) > 1)} of {escape(str(record.workload), quote=False)}: {told}"
    best = _best(record)
    left = set(states.index) & {"stopped", "failed"}
    go_on = f"; the call that began `{record.path}` goes on from there" if left else ""
    return f"{many}{best}{go_on}."


_ORDER = ("complete", "diverged", "running", "stopped", "failed")


def _best(record: StudyRecord | TrialRecord) -> str:
    """Return the trial with the best selected checkpoint, as the end of a sentence; nothing where none was evaluated."""
    rows = record.trials.dropna(subset=["best_value"]).to_dict("records")
    if not rows:
        return ""
    sign = 1.0 if record.config["select_mode"] == "min" else -1.0
    best = min(rows, key=lambda row: sign * float(row["best_value"]))
    value = f"{record.config['select']} {best['best_value']:.4g}"
    return f"; best {value} in trial {best['trial']} at lr {best['peak_lr']:.4g}, step {best['best_step']:.0f}"


def _anew(record: StudyRecord | TrialRecord) -> StudyRecord | TrialRecord:
    """Return the record read again from disk: it may have been opened while it was being written."""
    return record.reload() if isinstance(record, StudyRecord) else TrialRecord(record.path, record.number)
