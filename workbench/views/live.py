"""`live_view`: every study that a cell writes, while it trains; then one figure, one sentence and the verdicts (P2.5)."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from workbench.errors import StudyInterrupted
from workbench.plots.svg import is_live
from workbench.progress import TOLD, progress_to
from workbench.record.read import StudyRecord, TrialRecord, open_record
from workbench.record.watch import SHOW_SECONDS, Watcher, watching
from workbench.views.study_curves import Message, StudyCurves

WHOLE_AGAIN = (0.5, 1.5, 4.0)
"""Seconds after which a page that was not ready yet is given all of it once more, in case it could not ask."""


BELOW = 'You may reload or close this page: training continues. "workbench watch {0}" in a terminal follows it; wb.open("{0}") shows all of it again.'
"""What stands below the view while the cell runs, and is what a page that was reloaded keeps of it."""


class LiveView(Watcher):
    """What `live_view` gives to its block: which study was written last."""

    early = False

    def __init__(self) -> None:
        self._open: list[Path] = []
        self._last: Path | None = None

    @property
    def record(self) -> StudyRecord | TrialRecord | None:
        """The last study of the block, read anew from disk; None where there was none."""
        if self._last is None or not (self._last / "study.json").exists():
            return None
        return open_record(self._last)

    def on_study(self, path: Path, *, created: bool) -> None:  # noqa: ARG002
        """Remember the study, unless it is a part of another one that is still being written."""
        if not self._open:
            self._last = path
        self._open.append(path)

    def on_closed(self, path: Path) -> None:
        """Note that a study is written no more."""
        if path in self._open:
            self._open.remove(path)


@contextlib.contextmanager
def live_view(*, summary: bool = True, live: bool | None = None) -> Iterator[LiveView]:
    """Show every study that this process writes within the block while it trains.

        with wb.live_view():
            record = wb.lr_sweep.Study().run(workload)

    Loss, gradient norm with its clip line, and lr of each trial, coloured by lr; a trial that diverges fades to a thin dashed
    line that ends in a cross. Hover tells which trial a line is. A click on it, or on its row in the legend, isolates it; the
    same click or Escape gives the others back. Dragging over a part of the x axis zooms into it, a double click shows all of it;
    it counts steps, examples or the seconds of training (evaluation left out, of all trials that train together).
    A slider draws the debiased exponential moving average (of logarithms on a logarithmic axis) over the faint raw curves, its weight (0 to 0.99) that from step to step, in
    trials of more than 1,000 from one thousandth of the longest to the next; learning rates are never smoothed. "Freeze" holds the picture while data goes on arriving. All of it works while
    the cell runs, and by keyboard. Healthy: lines fall and stay down. Sick: lines rise, jump, or end in crosses just above the
    lr that is best.

    It only observes: training is bit for bit the same, rows come at most five times a second, and a view that fails is dropped with
    a warning. Of several studies in one block the newest is shown. A page that is reloaded while the cell runs has the curves
    back when it has ended. The block ends, also by an error, in curves that stay in the cell, one figure, one sentence and the
    verdicts of its last study; by an interrupt in the curves and how to resume.

    Args:
        summary: whether to end with figure, sentence and verdicts.
        live: None asks the environment: with `WORKBENCH_LIVE=0`, or outside of a notebook, nobody is looking, and the block only
            ends in the summary.

    Yields:
        The view, whose `record` is that of the last study.
    """
    view = LiveView()
    try:
        with _page(shown=is_live(live) and (live is not None or _has_page())), watching(view):
            yield view
    except BaseException as error:
        with contextlib.suppress(Exception):  # the first error is the one to report
            _show_last(view, wanted=summary and not isinstance(error, StudyInterrupted))  # which says how to go on
        raise
    _show_last(view, wanted=summary)


@contextlib.contextmanager
def _page(*, shown: bool) -> Iterator[None]:
    """Show a widget that is told of everything; at the end curves that need no kernel stand in its place."""
    if not shown:
        with progress_to(_tell_the_runner) if "WORKBENCH_PROGRESS" in os.environ else contextlib.nullcontext():
            yield
        return
    try:
        from IPython.display import display, publish_display_data

        from workbench.views.curves import CurvesWidget, curves_html

        widget = CurvesWidget()
        place, below = uuid.uuid4().hex, uuid.uuid4().hex
        publish = partial(publish_display_data, metadata={}, transient={"display_id": below})

        def tell(path: Path) -> None:
            said = BELOW.format(os.path.relpath(path))
            publish({"text/plain": said, "text/html": f"<small>{escape(said)}</small>"}, update=True)

        feed = LiveFeed(widget.send, shows=tell)
        widget.when_asked(feed.everything)
        display(widget, display_id=place)  # type: ignore[no-untyped-call]
        publish({"text/plain": ""})
    except Exception:  # a page that cannot be shown is no reason not to train
        logging.getLogger(__name__).warning(
            "The live view cannot be shown; training continues without it.", exc_info=True
        )
        yield
        return
    try:
        with watching(feed):
            yield
    finally:
        with contextlib.suppress(Exception):
            widget.still = True  # a page that was reloaded meanwhile finds it now, and asks for all
            last, gone = feed.stays(), {"text/plain": ""}
            kept = gone if last is None else {"text/plain": "The curves.", "text/html": curves_html(last)}
            for output, left in ((place, kept), (below, gone)):
                publish_display_data(left, {}, transient={"display_id": output}, update=True)  # type: ignore[no-untyped-call]


def _tell_the_runner(what: str, left: str) -> None:
    from IPython.display import publish_display_data

    publish_display_data({TOLD: {"what": what, "left": left}})  # type: ignore[no-untyped-call]


def _show_last(view: LiveView, *, wanted: bool) -> None:
    if wanted and (record := view.record) is not None:
        from workbench.views.summary import show_study

        show_study(record)


def _has_page() -> bool:
    """Whether this is a kernel; a script and a terminal have no page."""
    from IPython.core.getipython import get_ipython

    return getattr(get_ipython(), "kernel", None) is not None


class LiveFeed(Watcher):
    """Sends what this process writes of the newest open study to a page, as JSON values and buffers, at most five times a second."""

    def __init__(
        self,
        send: Callable[[dict[str, Any], list[Any]], object],
        clock: Callable[[], float] = time.monotonic,
        shows: Callable[[Path], object] = lambda _: None,
    ) -> None:
        self._send, self._clock, self._shows = send, clock, shows
        self._studies: dict[Path, StudyCurves] = {}
        self._open: list[Path] = []
        self._shown: StudyCurves | None = None
        self._again: list[float] = []
        self._sent_at = -SHOW_SECONDS
        self._number = 0
        self._lock = threading.RLock()  # a page may ask from another thread

    def everything(self) -> None:
        """Send all of the study that is shown, to a page that has just been opened."""
        with self._lock:
            if self._shown is not None:
                self._out(self._shown.everything())

    def stays(self) -> Message | None:
        """Return the study that was shown last, as small as a notebook should be; None where it has no step."""
        with self._lock:
            message = None if self._shown is None else self._shown.stays()
            return message if message is not None and message[1] else None

    def on_study(self, path: Path, *, created: bool) -> None:
        """Show the study that was opened last."""
        with self._lock:
            if path not in self._studies:
                self._studies[path] = StudyCurves(path, loaded=not created)
            self._open.append(path)
            self._show(path)

    def on_closed(self, path: Path) -> None:
        """Go back to the study that this one was a part of."""
        with self._lock:
            if path in self._open:
                self._open.remove(path)
                self._studies[path].close()
            if self._open:
                self._show(self._open[-1])
            self._tick(now=True)

    def on_stage(self, path: Path, stage: str, steps: int) -> None:
        """Note what is planned."""
        with self._lock:
            if path in self._studies:
                self._studies[path].plan = stage, steps

    def on_trial(self, path: Path, number: int, *, stage: str, config: Mapping[str, Any]) -> None:
        """Note a trial."""
        with self._lock:
            if path in self._studies:
                self._studies[path].trial(number, stage, config)

    def on_rows(self, path: Path, table: str, columns: Mapping[str, Any]) -> None:
        """Note rows of steps; others only remind of the time."""
        with self._lock:
            if table == "steps" and path in self._studies:
                self._studies[path].rows(columns)
            self._tick()

    def on_event(self, path: Path, number: int, event: Mapping[str, Any]) -> None:
        """Note how a trial stands."""
        with self._lock:
            if path in self._studies and "state" in event:
                self._studies[path].state(number, str(event["state"]))
            self._tick()

    def on_rewind(self, path: Path, number: int, step: int) -> None:
        """Forget rows that come again."""
        with self._lock:
            if path in self._studies:
                self._studies[path].rewind(number, step)

    def _show(self, path: Path) -> None:
        if self._shown is not self._studies[path]:
            self._shown = self._studies[path]
            self._shown.whole = True
            self._shows(path)
            now = self._clock()
            self._again = [now + seconds for seconds in WHOLE_AGAIN]

    def _tick(self, *, now: bool = False) -> None:
        time_s = self._clock()
        if self._shown is None or (time_s - self._sent_at < SHOW_SECONDS and not now):
            return
        self._sent_at = time_s
        if self._again and time_s >= self._again[0]:
            del self._again[0]
            self._shown.whole = True
        self._out(self._shown.message(time_s))

    def _out(self, message: Message) -> None:
        content, buffers = message
        self._send({**content, "number": self._number}, buffers)
        self._number += 1
