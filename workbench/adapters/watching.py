"""`Watching`: a watched run that a trainer's callbacks begin, feed and end."""

from __future__ import annotations

import atexit
import importlib
import logging
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from workbench.errors import WorkbenchError, in_one_line
from workbench.instruments.log import split_of
from workbench.topics.loop.collect import WatchedRun, watch

_LOG = logging.getLogger(__name__)


class Watching:
    """One watched run after another, each from `begin` to `end`; between them nothing is recorded and nothing goes wrong."""

    def __init__(
        self, out: str | Path | None, *, name: str | None, note: str | None, every: int, share: float | None = 0.01
    ) -> None:
        self._out, self._options = out, {"name": name, "note": note, "every": every, "share": share}
        self.open = self._told = False
        self.run: WatchedRun | None = None

    def begin(self, model: Any, optimizers: Sequence[Any]) -> None:
        """Begin to record; where that fails, say so once, and let the training go on without a record."""
        self.end()
        options: dict[str, Any] = dict(self._options)
        try:
            self.run = watch(model, optimizers, self._out, **options).__enter__()
        except Exception as error:
            if not self._told:
                _LOG.warning("nothing is recorded (%s); the training continues unchanged.", in_one_line(error))
            self._told = True
            return
        self.open = True
        atexit.register(self._at_exit)

    def plan(self, steps: int | None) -> None:
        """Say how many updates are planned, where that is known and more than none."""
        if self.open and self.run is not None and steps and steps > 0:
            self.run.plan(steps)

    def log(self, metrics: Mapping[str, Any], *, split: str = "validation") -> None:
        """Record numbers under their names; "val_loss", "eval/loss" and the like are of the validation split, others of `split`."""
        if not self.open or self.run is None:
            return
        values: dict[str, Any] = {}
        for name, value in metrics.items():
            where, metric = split_of(name, split)
            with suppress(TypeError, ValueError, RuntimeError):  # texts, lists, tensors of several elements
                values[f"{where}_{metric}"] = float(value)
        if values:
            self.run.log(**values)

    def end(self, error: BaseException | None = None) -> None:
        """Write the rest; a second call does nothing."""
        if self.open and self.run is not None:
            self.open = False
            atexit.unregister(self._at_exit)
            self.run.__exit__(None if error is None else type(error), error, None)

    def _at_exit(self) -> None:
        """A trainer that tells nobody of an exception is left with one: the last that nobody caught, where there is one."""
        self.end(getattr(sys, "last_value", None) or WorkbenchError("the training did not come to its end"))


def libraries(*names: str) -> list[ModuleType]:
    """Return those of these modules that the program has imported, else the first that is installed.

    Raises:
        WorkbenchError: none of them is installed.
    """
    loaded = [module for name in names if (module := sys.modules.get(name)) is not None]
    for name in () if loaded else names:
        try:
            return [importlib.import_module(name)]
        except ModuleNotFoundError as error:
            if error.name not in (name, name.partition(".")[0]):
                raise
    if not loaded:
        packages = [name.partition(".")[0] for name in names]
        raise WorkbenchError(
            f"this callback needs {' or '.join(packages)}, which is not installed: pip install {packages[0]}."
        )
    return loaded
