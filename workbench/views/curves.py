"""`curves_panel`: the curves of any record, finished or running, to explore as in the live view; and the widget of both."""

from __future__ import annotations

import base64
import json
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from workbench.curves.trial_curves import RecordLike
from workbench.panels.controls import needs, nothing
from workbench.plots.render import Picture
from workbench.plots.style import DARK_SEQUENCE, SEQUENCE
from workbench.plots.svg import is_live
from workbench.record.read import StudyRecord, TrialRecord
from workbench.topics.lr_sweep.figures import plot_loss_curves
from workbench.views.study_curves import Message, StudyCurves

ALT = "The training loss of each trial against the step, coloured by learning rate."


def curves_panel(record: RecordLike, *, live: bool | None = None) -> Any:
    """Return loss, gradient norm and lr of every trial of a record, to hover over and to isolate.

    What one sees and what keys do is that of `live_view`. Each curve is thinned to what a page can show, lowest and highest
    values kept. The panel shows what the record has read; of a study that still runs, open it again for newer rows.

    Args:
        live: None asks the environment: `WORKBENCH_LIVE=0` means that nobody is looking.

    Returns:
        A widget, or a picture of the loss curves; a notebook shows either as the last line of a cell.

    Raises:
        UsageError: it is no record.
    """
    needs("curves_panel", record, "steps", "trials")
    if record.steps.empty:
        why = "the record has no step yet. Run wb.lr_sweep.Study().run(workload, out=...), or any study of wb.Trainer, and open it again."
        return nothing("curves_panel", why, alt=ALT, live=live)
    if not is_live(live) or not isinstance(record, (StudyRecord, TrialRecord)):
        return Picture([lambda ax: plot_loss_curves(record, ax=ax)], ALT)
    curves, widget = StudyCurves.of(record), CurvesWidget(still=True)

    def everything() -> None:
        content, buffers = curves.everything()
        widget.send({**content, "number": 0}, buffers)

    widget.when_asked(everything)
    return widget


def text_of(*names: str) -> str:
    """Return files that lie here, one after the other."""
    return "\n".join((Path(__file__).parent / name).read_text(encoding="utf-8") for name in names)


SCRIPT = "\n".join(
    [
        text_of("vendor/uPlot.iife.min.js"),
        f"const SEQUENCE = {json.dumps({'light': SEQUENCE, 'dark': DARK_SEQUENCE})};",
        text_of(*(f"curves_page/{name}.js" for name in ("data", "chart", "view", "page"))),
    ]
)
CSS = text_of("vendor/uPlot.min.css", "curves_page/curves.css")


def plain(message: Message) -> str:
    """Return a message to a page as JSON: a list of its content, and its buffers in base64."""
    content, buffers = message
    whole = {**content, "number": 0}
    return json.dumps([whole, [base64.b64encode(part).decode() for part in buffers]]).replace("</", "<\\/")


def curves_html(message: Message) -> str:
    """Return curves to explore as HTML that needs neither a kernel nor a network: what stays in a cell."""
    place = f"wb-{uuid.uuid4().hex[:12]}"
    script = f'{SCRIPT}\nstand(document.getElementById("{place}"), true)(...{plain(message)});'
    return f'<style>{CSS}</style><div id="{place}"></div><script type="module">{script}</script>'


class CurvesWidget(anywidget.AnyWidget):
    """Loss, gradient norm and lr of many trials; what one does with them happens in the page alone.

    The page's side is `curves_page/`; it is told by messages, and asks for all of them when it is drawn anew. With `still` nothing
    will come but what is asked for.
    """

    still = traitlets.Bool(False).tag(sync=True)

    _esm = SCRIPT
    _css = CSS

    def __init__(self, *, still: bool = False) -> None:
        super().__init__(still=still)
        if hasattr(self.comm, "_reply_subshell_for"):  # ipykernel 7.4 would let the page wait until the cell has ended
            self.comm._reply_subshell_for = None

    def when_asked(self, everything: Callable[[], object]) -> None:
        """Call `everything` when a page asks for all that there is."""
        self.on_msg(lambda _widget, content, _buffers: everything() if content.get("kind") == "all" else None)

    def __repr__(self) -> str:
        """Return what is shown where there is no page."""
        return "CurvesWidget()"
