"""One progress bar per study, in the terminal or the notebook; never one per epoch."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Progress", "progress_bar"]

Progress = Callable[[int], None]


@contextmanager
def progress_bar(total: int, label: str, *, show: bool) -> Iterator[Progress]:
    """Yield a function that advances the bar by a number of steps.

    `WORKBENCH_LIVE=0` turns the bar off, for batch runs and tests.
    """
    if not show or os.environ.get("WORKBENCH_LIVE") == "0":
        yield lambda steps: None  # noqa: ARG005
        return
    from tqdm.auto import tqdm

    with tqdm(total=total, desc=label, unit="step", file=sys.stderr, dynamic_ncols=True, leave=False) as bar:

        def advance(steps: int) -> None:
            bar.update(steps)

        yield advance
