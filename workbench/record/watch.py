"""Who looks on while this process writes studies: told of studies, trials, rows and events, and never heard by training.

Rows are told as they are handed to the record. Where somebody asks for them early, the loop also shows, `SHOW_SECONDS`
apart, the rows that still wait in memory. Either way a watcher gets every row once, and in order trial by trial. With
nobody there all of this costs one look at an empty list.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

SHOW_SECONDS = 0.2  # rule of thumb: five pictures a second look like motion and cost little


class Watcher:
    """Base of what looks on; each method is called in the thread that trains, so it must be quick."""

    early: ClassVar[bool] = True

    def on_study(self, path: Path, *, created: bool) -> None:
        """A study's folder was opened for writing; with `created` False it may hold rows already."""

    def on_stage(self, path: Path, stage: str, steps: int) -> None:
        """The study goes on with `stage`, "3 of 4: search: learning rates", of about `steps` updates in all; "" and 0 where it does not know."""

    def on_trial(self, path: Path, number: int, *, stage: str, config: Mapping[str, Any]) -> None:
        """A trial has its place in the study, a new one or one that is there already."""

    def on_rows(self, path: Path, table: str, columns: Mapping[str, Any]) -> None:
        """Rows of "steps", "evals" or "predictions"; rows of steps that come early have the columns of the loop alone, and its times."""

    def on_event(self, path: Path, number: int, event: Mapping[str, Any]) -> None:
        """Something happened to a trial, as `events.jsonl` has it: `state` says that it runs, or how it ended."""

    def on_rewind(self, path: Path, number: int, step: int) -> None:
        """The trial's rows of `step` and later are dropped: they come again."""

    def on_closed(self, path: Path) -> None:
        """The study's folder was closed."""


class _Place:
    """One watcher, and the last step of every trial that it has seen."""

    def __init__(self, watcher: Watcher) -> None:
        self.watcher = watcher
        self._last: dict[Path, np.ndarray] = {}

    def on_rows(self, path: Path, table: str, columns: Mapping[str, Any], *, early: bool = False) -> None:
        if early and not self.watcher.early:
            return
        new = columns if table != "steps" else self._new(path, columns)
        if new is not None:
            self.watcher.on_rows(path, table, new)

    def on_rewind(self, path: Path, number: int, step: int) -> None:
        if path in self._last and number < len(self._last[path]):
            self._last[path][number] = min(int(self._last[path][number]), step - 1)
        self.watcher.on_rewind(path, number, step)

    def _new(self, path: Path, columns: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return the rows after those that were told before; None where there is none."""
        trials, steps = np.asarray(columns["trial"]), np.asarray(columns["step"])
        if not len(trials):
            return None
        last = self._last.get(path, np.empty(0, np.int64))
        short = int(trials.max()) + 1 - len(last)
        if short > 0:
            last = np.concatenate([last, np.full(short, -1, np.int64)])
        self._last[path] = last
        keep = steps > last[trials]
        last[trials[keep]] = steps[keep]  # rows are in order, so the last one of a trial stays
        if keep.all():
            return columns
        return {name: np.asarray(values)[keep] for name, values in columns.items()} if keep.any() else None


_places: list[_Place] = []
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_places.clear)  # a page belongs to the process that opened it


@contextlib.contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Let `watcher` look on at every study that this process writes within the block."""
    place = _Place(watcher)
    _places.append(place)
    try:
        yield
    finally:
        if place in _places:
            _places.remove(place)


def early_wanted() -> bool:
    """Return whether somebody wants rows before they are handed to the record."""
    return bool(_places) and any(place.watcher.early for place in _places)


def tell(what: str, *given: Any, **more: Any) -> None:
    """Call a method of every watcher, and drop one that raises: looking on must never harm what is looked at."""
    for place in tuple(_places):
        try:
            getattr(place if hasattr(place, what) else place.watcher, what)(*given, **more)
        except Exception:
            if place in _places:
                _places.remove(place)
            logging.getLogger(__name__).warning(
                "%s raised and is not called any more; training continues.", type(place.watcher).__name__, exc_info=True
            )
