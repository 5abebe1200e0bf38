"""`Panel`: the widgets of `controls_panel`; the one place that makes sliders, and sends pictures to a page."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape
from typing import Any

import ipywidgets  # type: ignore[import-untyped]

from workbench.errors import WorkbenchError
from workbench.panels.answers import Answer, Choice, Control
from workbench.plots.redraw import Redrawn

__all__ = ["Panel"]


class Panel(ipywidgets.VBox):  # type: ignore[misc]
    """Controls, words and a picture, one above the other. Arrow keys move a slider that has the focus.

    The picture follows while a slider moves: the page sends the next value once the last one was answered.

    Attributes:
        controls: widgets by the names of the answer's arguments.
        words: widget that holds what the answer says.
        picture: widget that holds what it draws.
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
        self.picture = ipywidgets.Image(
            format="png", layout=ipywidgets.Layout(max_width="100%", align_self="flex-start")
        )
        self._name, self._answer, self._alt, self._canvas = name, answer, alt, Redrawn(size=size)
        self._at_close: list[Callable[[], object]] = []
        shown = [widget for key, widget in self.controls.items() if not _single(controls[key])]
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
            png = self._canvas.png(said.draws)
        except Exception as error:  # a traceback would end in the server's log, under an old picture
            said_by_us = isinstance(error, WorkbenchError)  # says what to do by itself
            self.words.value = _html(str(error) if said_by_us else f"{type(error).__name__}: {error}", self._alt)
            return
        self.words.value, self.picture.value = _html(said.words, self._alt), png

    def at_close(self, end: Callable[[], object]) -> None:
        """Call this when the panel is closed."""
        self._at_close.append(end)

    def close(self) -> None:
        """Take the panel off the page, and end what works for it; a second call does nothing."""
        while self._at_close:
            self._at_close.pop()()
        for widget in (*self.controls.values(), self.words, self.picture):
            widget.close()
        super().close()


HIDDEN = "position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%)"
"""For screen readers alone: `ipywidgets.Image` has no text of its own, and its page fails on a tooltip."""


def _html(words: str, alt: str) -> str:
    """Return plain text as HTML that a screen reader reads out when it changes, and what the picture shows."""
    said = "<br>".join(escape(line) for line in words.splitlines())
    shown = f'<span style="{HIDDEN}">{escape(alt)}</span>'
    return f'<div style="max-width: 60em; line-height: 1.4">{shown}<div role="status" aria-live="polite">{said}</div></div>'


def _single(control: Control) -> bool:
    return len(control.options) < 2 if isinstance(control, Choice) else control.low >= control.high


def _widget(control: Control) -> Any:
    look: dict[str, Any] = {
        "description": control.label,
        "tooltip": control.label,
        "style": {"description_width": "9em"},
        "layout": ipywidgets.Layout(width="36em", max_width="100%"),
    }
    if isinstance(control, Choice):
        kind = ipywidgets.SelectionSlider if control.slides else ipywidgets.Dropdown
        more = {"continuous_update": True} if control.slides else {}
        return kind(options=list(control.options), value=control.start, **more, **look)
    kind = ipywidgets.IntSlider if isinstance(control.step, int) else ipywidgets.FloatSlider
    return kind(
        value=control.start, min=control.low, max=control.high, step=control.step, continuous_update=True, **look
    )
