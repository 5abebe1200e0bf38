"""`curves_panel`: the curves of any record, finished or running, to explore as in the live view."""

from __future__ import annotations

from typing import Any

from workbench.curves.trials import RecordLike
from workbench.panels.base import is_live, still
from workbench.panels.controls import needs, nothing
from workbench.plots.render import png
from workbench.record.read import StudyRecord, TrialRecord
from workbench.topics.lr_sweep.figures import plot_loss_curves
from workbench.views.study_curves import StudyCurves

__all__ = ["curves_panel"]

ALT = "The training loss of each trial against the step, coloured by learning rate."


def curves_panel(record: RecordLike, *, live: bool | None = None) -> Any:
    """Return loss, gradient norm and lr of every trial of a record, to hover over and to isolate.

    What one sees and what keys do is that of `live_view`. Each curve is thinned to what a page can show, lowest and highest
    values kept. The panel shows what the record has read; of a study that still runs, open it again for newer rows.

    Args:
        record: a study or a single trial.
        live: None asks the environment: `WORKBENCH_LIVE=0` means that nobody is looking.

    Returns:
        A widget, or an `IPython.display.Image` of the loss curves; a notebook shows either as the last line of a cell.

    Raises:
        UsageError: it is no record.
    """
    needs("curves_panel", record, "steps", "trials")
    if record.steps.empty:
        why = "the record has no step yet. Run wb.LRSweep().run(workload, out=...), or any study of wb.Trainer, and open it again."
        return nothing("curves_panel", why, alt=ALT, live=live)
    if not is_live(live) or not isinstance(record, (StudyRecord, TrialRecord)):
        return still(png([lambda ax: plot_loss_curves(record, ax=ax)]), ALT)
    from workbench.views.curves_widget import CurvesWidget

    curves, widget = StudyCurves.of(record), CurvesWidget(still=True)

    def everything() -> None:
        content, buffers = curves.everything()
        widget.tell({**content, "number": 0}, buffers)

    widget.when_asked(everything)
    return widget
