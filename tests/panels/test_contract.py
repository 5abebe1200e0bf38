"""What holds for every panel: static without a page, live with one, words and picture that follow, and an end."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import ipywidgets
import numpy as np
import pytest

import workbench as wb
from tests.helpers.panels import pixels, said
from tests.helpers.records import empty, one_trial, study
from tests.topics.test_warmup import GOOD
from tests.topics.test_warmup import study as warmups
from workbench.errors import UsageError
from workbench.panels.controls import Answer, Slider, controls_panel
from workbench.plots.render import Picture

GRADIENTS = np.random.default_rng(0).lognormal(size=200)

PANELS: dict[str, tuple[Callable[..., Any], Any]] = {
    "lr_sweep_panel": (wb.lr_sweep.panel, study()),
    "clipping_panel": (wb.clipping.panel, one_trial(GRADIENTS)),
    "warmup_panel": (wb.warmup.panel, warmups(*GOOD)),
}
EMPTY: dict[str, tuple[Callable[..., Any], Any, str]] = {
    "curves_panel": (wb.curves_panel, empty(), "wb.lr_sweep.Study()"),
    "lr_sweep_panel": (wb.lr_sweep.panel, empty(), "wb.lr_sweep.Study()"),
    "clipping_panel": (wb.clipping.panel, empty(), "wb.clipping.Study()"),
    "warmup_panel": (wb.warmup.panel, empty(), "wb.warmup.Study()"),
}
MOVES = [
    ("lr_sweep_panel", "lr", 0.16), ("clipping_panel", "percentile", 50.0), ("warmup_panel", "steps", 5), ("warmup_panel", "lr", 0.02),
    ("warmup_panel", "trace", "gradient norm"),
]  # fmt: skip

every_panel = pytest.mark.parametrize("name", PANELS)


@pytest.fixture(scope="module")
def moved() -> Iterator[dict[str, Any]]:
    """One live panel of each kind, whose controls are put back."""
    yield {name: made(name, live=True) for name in PANELS}
    ipywidgets.Widget.close_all()


BUILT = {
    found.__name__: found for name in wb.__all__ if (found := getattr(getattr(wb, name), "panel", None)) is not None
}
"""Every panel of a question."""


def made(name: str, *, live: bool) -> Any:
    make, record = PANELS[name]
    return make(record, live=live)


def inside(widget: Any) -> list[Any]:
    """A widget and all below it."""
    return [widget, *(found for child in getattr(widget, "children", ()) for found in inside(child))]


def test_all_panels_are_here() -> None:
    assert set(BUILT) == set(PANELS)


@every_panel
def test_without_a_page_it_is_one_picture_with_its_words(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_LIVE", "0")
    make, record = PANELS[name]
    shown = make(record)
    assert isinstance(shown, Picture)
    live = made(name, live=True)
    assert shown.alt.endswith("\n".join(line.strip() for line in said(live).splitlines() if line.strip()))
    assert shown.html().count("<svg") == live.picture.value.count("<svg") > 0
    assert pixels(shown.png()).std() > 0
    assert "text/html" not in shown._repr_mimebundle_()[0]
    assert not re.search("0x[0-9a-f]{6}", repr(shown))


@every_panel
def test_with_a_page_it_has_controls_words_and_a_picture(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORKBENCH_LIVE")
    make, record = PANELS[name]
    panel = make(record)
    *controls, words, picture = panel.children
    assert controls
    assert all(any(widget is own for own in panel.controls.values()) for widget in controls)
    assert (words, picture) == (panel.words, panel.picture)
    assert isinstance(picture, ipywidgets.HTML)
    assert said(panel)
    assert re.search(r'<svg [^>]*aria-label="[A-Z][^"]+\."', picture.value), (
        "what it shows, for those who do not see it"
    )
    assert not any(isinstance(widget, ipywidgets.Output) for widget in inside(panel)), "Output hangs papermill"
    shown = repr(panel)
    assert shown.startswith(f"{name}(")
    assert all(f"{key}=" in shown for key in panel.controls)
    assert not re.search("0x[0-9a-f]{6}", shown)
    widgets = [panel, *panel.controls.values(), words, picture]
    panel.close()
    assert all(widget.comm is None for widget in widgets)
    panel.close()


@pytest.mark.parametrize(("name", "control", "value"), MOVES)
def test_a_control_changes_words_and_picture_and_back_again(
    moved: dict[str, Any], name: str, control: str, value: Any
) -> None:
    panel = moved[name]
    widget = panel.controls[control]
    words, picture, start = panel.words.value, panel.picture.value, widget.value
    assert value != start
    widget.value = value
    assert widget.value == value
    assert panel.picture.value != picture
    assert panel.words.value != words or control in {"trace"}
    widget.value = start
    assert panel.words.value == words


@pytest.mark.parametrize("name", EMPTY)
@pytest.mark.parametrize("live", [True, False])
def test_over_an_empty_record_it_says_what_to_run(name: str, live: bool) -> None:
    make, record, run = EMPTY[name]
    shown = make(record, live=live)
    words = said(shown) if live else shown.alt
    assert "Not measured: " in words
    assert run in words


def test_an_answer_that_cannot_be_given_is_said_and_the_panel_goes_on() -> None:
    """The words say why, as text; the last picture stays; the next value is answered again."""

    def answer(value: int) -> Answer:
        if value == 2:
            raise UsageError("no <b>two</b> here.")
        return Answer(f"It is {value}.", [lambda ax: ax.plot([0, value])])

    panel = controls_panel(
        "a_panel", answer, {"value": Slider(label="value", low=1, high=3, start=1)}, alt="A line.", live=True
    )
    picture, slider = panel.picture.value, panel.controls["value"]
    slider.value = 2
    assert said(panel).endswith("no <b>two</b> here.")
    assert "<b>" not in panel.words.value
    assert panel.picture.value == picture
    slider.value = 3
    assert said(panel).endswith("It is 3.")
    assert panel.picture.value != picture
    panel.close()
