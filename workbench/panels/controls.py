"""`controls_panel`: controls above words and a picture that answer them; one picture where nobody can move a control."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, NamedTuple

import ipywidgets  # type: ignore[import-untyped]

from workbench.errors import UsageError, WorkbenchError
from workbench.panels.range import Range
from workbench.plots.render import Draw, Picture, side_by_side
from workbench.plots.style import not_measured
from workbench.plots.svg import is_live


class Answer(NamedTuple):
    """What a panel says for one setting of its controls: a sentence or a few, and figures side by side."""

    words: str
    draws: Sequence[Draw]


@dataclass(frozen=True, kw_only=True)
class Slider:
    """A number from `low` to `high`, at first `start`; all values are integers where `step` is one."""

    label: str
    low: float
    high: float
    start: float
    step: float = 1


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One of several values by what they are called, in an order to slide through; a list that drops down where `slides` is False."""

    label: str
    options: Sequence[tuple[str, Hashable]]
    start: Hashable
    slides: bool = True


Control = Slider | Choice


class Panel(ipywidgets.VBox):  # type: ignore[misc]
    """Controls, words and a picture, one above the other. Arrow keys move a slider that has the focus.

    The picture follows once a slider rests: the page sends where it stands, not what it passed.
    """

    def __init__(
        self,
        name: str,
        answer: Callable[..., Answer],
        controls: Mapping[str, Control],
        *,
        alt: str,
        size: tuple[float, float],
    ) -> None:
        self.controls = {key: _widget(control) for key, control in controls.items()}
        self.words = ipywidgets.HTML()
        self.picture = ipywidgets.HTML(layout=ipywidgets.Layout(max_width="100%"))
        self._name, self._answer, self._alt, self._size = name, answer, alt, size
        movable = {
            key: len(each.options) > 1 if isinstance(each, Choice) else each.low < each.high
            for key, each in controls.items()
        }
        shown = [self.controls[key] for key in controls if movable[key]]
        super().__init__([*shown, self.words, self.picture])
        self.redraw()
        for widget in self.controls.values():
            widget.observe(self.redraw, names="value")

    def __repr__(self) -> str:
        """Return the name and where the controls stand."""
        return f"{self._name}({', '.join(f'{key}={widget.value!r}' for key, widget in self.controls.items())})"

    def redraw(self, _: Any = None) -> None:
        """Answer to where the controls stand now."""
        try:
            said = self._answer(**{key: widget.value for key, widget in self.controls.items()})
            picture = side_by_side(said.draws, alt=self._alt, size=self._size)
        except Exception as error:  # a traceback would end in the server's log, under an old picture
            said_by_us = isinstance(error, WorkbenchError)  # says what to do by itself
            self.words.value = _html(str(error) if said_by_us else f"{type(error).__name__}: {error}")
            return
        self.words.value, self.picture.value = _html(said.words), picture

    def close(self) -> None:
        """Take the panel off the page; a second call does nothing."""
        for widget in (*self.controls.values(), self.words, self.picture):
            widget.close()
        super().close()


def _html(words: str) -> str:
    """Return plain text as HTML that a screen reader reads out when it changes."""
    said = "<br>".join(escape(line) for line in words.splitlines())
    return f'<div style="max-width: 60em; line-height: 1.4"><div role="status" aria-live="polite">{said}</div></div>'


def _widget(control: Control) -> Any:
    if isinstance(control, Choice) and not control.slides:
        return ipywidgets.Dropdown(
            options=list(control.options), value=control.start, description=control.label,
            style={"description_width": "9em"}, layout=ipywidgets.Layout(width="36em", max_width="100%"),
        )  # fmt: skip
    if isinstance(control, Choice):
        return Range(control.label, control.options, control.start)
    stride = max(1, round((control.high - control.low) / control.step / MOST_STOPS)) * control.step
    count = int((control.high - control.low) / stride)
    values = sorted({control.low, control.start, control.high, *(control.low + k * stride for k in range(count + 1))})
    return Range(control.label, [(f"{value:.6g}", value) for value in values], control.start)


MOST_STOPS = 1000
"""Of a slider over numbers: it has fewer pixels (rule of thumb)."""


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
        answer: called with the value of every control by its name.
        controls: by name; one with a single value is not shown.
        alt: what the picture shows, in words, for those who do not see it.
        live: None asks the environment, see `is_live`.
        size: width and height of each figure, in inches.

    Returns:
        A `Panel`, or a `Picture`; a notebook shows either when it is the last line of a cell.
    """
    if is_live(live):
        return Panel(name, answer, controls, alt=alt, size=size)
    said = answer(**{key: control.start for key, control in controls.items()})
    return Picture(said.draws, f"{alt} {said.words}", size=size, caption=said.words)


def nothing(name: str, why: str, *, alt: str, live: bool | None = None) -> Any:
    """Return a panel without controls that says why there is nothing to see, and what to run instead."""
    draws: list[Draw] = [] if is_live(live) else [lambda ax: not_measured(ax, why)]  # on a page the words say it
    return controls_panel(name, lambda: Answer(f"Not measured: {why}", draws), {}, alt=alt, live=live, size=(8.0, 1.6))


def needs(
    name: str, record: Any, *attributes: str, what: str = "a study or a trial, as wb.open(path) returns it"
) -> None:
    """Raise a `UsageError` that says what a panel takes, where `record` lacks what it reads."""
    if any(not hasattr(record, each) for each in attributes):
        raise UsageError(f"{name} takes {what}, not {type(record).__name__}.")
