"""`controls_panel`: controls above words and a picture that answer them; one picture where nobody can move a control.

A panel holds no numbers of its own: its answer calls `diagnose_x` for the words and `plot_x` for the picture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from workbench.errors import UsageError
from workbench.panels.answers import Answer, Control
from workbench.panels.base import is_live, still
from workbench.plots.redraw import Draw, Redrawn
from workbench.plots.style import not_measured

__all__ = ["controls_panel", "needs", "nothing"]


def controls_panel(
    name: str,
    answer: Callable[..., Answer],
    controls: Mapping[str, Control],
    *,
    alt: str,
    live: bool | None = None,
    size: tuple[float, float] = (4.9, 3.9),
) -> Any:
    """Return controls above the words and the picture of an answer; the first picture alone, with its words, where nobody is looking.

    Args:
        name: of the panel, for its repr.
        answer: called with the value of every control by its name.
        controls: by name; one with a single value is not shown.
        alt: what the picture shows, in words, for those who do not see it.
        live: None asks the environment, see `is_live`.
        size: width and height of each figure, in inches.

    Returns:
        A `Panel`, or an `IPython.display.Image`; a notebook shows either when it is the last line of a cell.
    """
    if is_live(live):
        from workbench.panels.widgets import Panel

        return Panel(name, answer, controls, alt=alt, size=size)
    said = answer(**{key: control.start for key, control in controls.items()})
    return still(Redrawn(size=size).png(said.draws, caption=said.words), f"{alt} {said.words}")


def nothing(name: str, why: str, *, alt: str, live: bool | None = None) -> Any:
    """Return a panel without controls that says why there is nothing to see, and what to run instead."""
    draw: Draw = lambda ax: not_measured(ax, why)  # noqa: E731 - an answer holds functions
    return controls_panel(name, lambda: Answer(f"Not measured: {why}", [draw]), {}, alt=alt, live=live, size=(8.0, 1.6))


def needs(
    name: str, record: Any, *attributes: str, what: str = "a study or a trial, as wb.open(path) returns it"
) -> None:
    """Raise a `UsageError` that says what a panel takes, where `record` lacks what it reads."""
    if any(not hasattr(record, each) for each in attributes):
        raise UsageError(f"{name} takes {what}, not {type(record).__name__}.")
