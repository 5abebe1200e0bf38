"""One progress bar per study, in the terminal or the notebook; never one per epoch."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Progress = Callable[[int], None]


class ProgressBar:
    """A tqdm bar and its status line, or none: then it is silent."""

    def __init__(self, bar: Any = None) -> None:
        self._bar = bar

    def advance(self, steps: int) -> None:
        """Count `steps` more updates."""
        if self._bar is not None:
            self._bar.update(steps)

    def status(self, text: str) -> None:
        """Say what is being trained."""
        if self._bar is not None:
            self._bar.set_postfix_str(text)


@contextmanager
def progress_bar(total: int | None, label: str, *, show: bool) -> Iterator[ProgressBar]:
    """Yield the bar of one study of `total` updates, None where it decides as it goes; silent with `WORKBENCH_LIVE=0`."""
    if not show or os.environ.get("WORKBENCH_LIVE") == "0":
        yield ProgressBar()
        return
    from tqdm.auto import tqdm

    with tqdm(total=total, desc=label, unit=" steps", file=sys.stderr, dynamic_ncols=True, leave=False) as bar:
        yield ProgressBar(bar)
