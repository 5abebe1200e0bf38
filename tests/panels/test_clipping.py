"""The panel: a slider that redraws through the figures alone, and a picture where nobody is looking."""

from __future__ import annotations

import io

import numpy as np
import pytest
from IPython.display import Image as Still
from ipywidgets import FloatSlider, Image, VBox
from matplotlib import image

from tests.helpers.records import one_trial
from workbench.panels import clipping
from workbench.panels.clipping import clipping_panel, clipping_picture

NORMS = np.random.default_rng(0).lognormal(size=200)


def pixels(data: bytes) -> np.ndarray:
    return image.imread(io.BytesIO(data), format="png")


def test_without_a_page_it_is_a_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_LIVE", "0")
    shown = clipping_panel(one_trial(NORMS))
    assert isinstance(shown, Still)
    assert pixels(shown.data).std() > 0


def test_with_a_page_it_is_a_slider_above_the_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORKBENCH_LIVE")
    shown = clipping_panel(one_trial(NORMS), percentile=75.0)
    assert isinstance(shown, VBox)
    slider, picture = shown.children
    assert isinstance(slider, FloatSlider)
    assert isinstance(picture, Image)
    assert slider.value == 75.0
    assert picture.value == clipping_picture(one_trial(NORMS), percentile=75.0)


def test_moving_the_slider_draws_the_new_percentile() -> None:
    slider, picture = clipping_panel(one_trial(NORMS), live=True).children
    before = picture.value
    slider.value = 50.0
    assert picture.value == clipping_picture(one_trial(NORMS), percentile=50.0)
    assert picture.value != before


def test_the_slider_cannot_leave_what_a_percentile_is() -> None:
    slider, _ = clipping_panel(one_trial(NORMS), live=True).children
    slider.value = 1000.0
    assert slider.value == 100.0
    slider.value = -5.0
    assert slider.value == 1.0


def test_both_default_pictures_are_drawn_of_the_asked_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    for name in ("plot_grad_norm", "plot_grad_norm_histogram"):
        monkeypatch.setattr(
            clipping, name, lambda *a, name=name, **k: asked.append((name, k["trial"], k["percentile"]))
        )
    clipping_picture(one_trial(NORMS), trial=0, percentile=60.0)
    assert asked == [("plot_grad_norm", 0, 60.0), ("plot_grad_norm_histogram", 0, 60.0)]


@pytest.mark.parametrize("norms", [[np.nan] * 30, [0.0] * 30, [0.7] * 30, [1.0]])
def test_poor_norms_make_a_picture_that_says_so(norms: list[float]) -> None:
    assert pixels(clipping_picture(one_trial(np.array(norms)))).std() > 0
