"""Every panel in JupyterLab: a slider is dragged and moved by arrow keys, words and picture follow, nothing leaves the page."""

from __future__ import annotations

import pytest
from playwright.sync_api import Locator

from tests.browser.lab import SIZE, Desk

pytestmark = pytest.mark.browser

PANELS = {
    "lr_sweep": "from tests.helpers.records import study\nwb.lr_sweep.panel(study())",
    "clipping": (
        "import numpy as np\nfrom tests.helpers.records import one_trial\n"
        "wb.clipping.panel(one_trial(np.random.default_rng(0).lognormal(size=400)))"
    ),
    "warmup": "from tests.topics.test_warmup import GOOD, study as warmups\nwb.warmup.panel(warmups(*GOOD))",
    "batch_norm": (
        "from tests.helpers.simulated_norms import study as norms\n"
        "wb.batch_norm.panel(norms({8: [0.6, 0.7], 32: [0.5, 0.45], 64: [0.5, 0.4], None: [0.5, 0.5]}))"
    ),
    "checkpoints": (
        "from tests.helpers.simulated_checkpoints import evaluated, overfitted\n"
        "wb.checkpoints.panel(evaluated([overfitted(seed=k, noise=0.05) for k in range(2)]))"
    ),
    "predictions": "from tests.helpers.evaluations import predicted\nwb.predictions.panel(predicted(20))",
}


class Shown:
    """One panel on the page."""

    def __init__(self, desk: Desk, cell: int) -> None:
        self.page, self.area = desk.page, desk.cell(cell).locator(".jp-OutputArea")
        self.picture, self.words = self.area.locator("img"), self.area.locator("[role=status]")
        self.picture.wait_for()
        self.area.scroll_into_view_if_needed()

    @property
    def handles(self) -> Locator:
        """What a slider is moved by."""
        return self.area.locator(".noUi-handle")

    def state(self) -> tuple[str, str]:
        """Words, and where the picture comes from, which is new for every picture."""
        return self.words.inner_text(), str(self.picture.get_attribute("src"))

    def wait_for_picture(self, before: str) -> None:
        """Wait until the picture is another one: it says where the slider stands, whether or not the words have to change."""
        self.page.wait_for_function(
            "([area, before]) => area.querySelector('img').src !== before", arg=[self.area.element_handle(), before]
        )

    def wait_for_words(self, before: str) -> None:
        """Wait until the words are others."""
        self.page.wait_for_function(
            "([area, before]) => area.querySelector('[role=status]').innerText !== before",
            arg=[self.area.element_handle(), before],
        )

    def drag(self, number: int, share: float) -> None:
        """Drag a slider to a share of its length in one movement, which asks for one picture and no more."""
        handle = self.handles.nth(number)
        handle.scroll_into_view_if_needed()
        track = self.area.locator(".noUi-base").nth(number).bounding_box()
        box = handle.bounding_box()
        assert track is not None
        assert box is not None
        y = box["y"] + box["height"] / 2
        self.page.mouse.move(box["x"] + box["width"] / 2, y)
        self.page.mouse.down()
        self.page.mouse.move(track["x"] + share * track["width"], y)
        self.page.mouse.up()


def inside_the_window(shown: Shown) -> None:
    """Nothing of a panel is wider than the page, and pictures are not squeezed; all measured at one moment, because redrawing replaces both."""
    shown.page.wait_for_function(
        "area => { const img = area.querySelector('img'); return img && img.complete && img.getBoundingClientRect().width > 0"
        " && area.querySelector('[role=status]').getBoundingClientRect().width > 0 }",
        arg=shown.area.element_handle(),
    )
    left, right, natural, seen = shown.area.evaluate(
        "area => { const img = area.querySelector('img'); const boxes = [img, area.querySelector('[role=status]')]"
        ".map(part => part.getBoundingClientRect()); return [Math.min(...boxes.map(b => b.left)),"
        " Math.max(...boxes.map(b => b.right)), img.naturalWidth, boxes[0].width] }"
    )
    assert left >= 0
    assert right <= SIZE["width"]
    assert seen >= 0.85 * natural, "its text would be too small to read"


def test_sliders_answer_to_the_mouse_and_to_arrow_keys(desk: Desk) -> None:
    desk.open(desk.lab.write("panels.ipynb", ["import workbench as wb", *PANELS.values()]))
    desk.run_all()
    assert desk.errors() == []
    for cell, name in enumerate(PANELS, 1):
        shown = Shown(desk, cell)
        inside_the_window(shown)
        words, picture = shown.state()
        shown.drag(0, 0.75)
        shown.wait_for_words(words)
        shown.wait_for_picture(picture)
        picture = shown.state()[1]
        shown.handles.first.focus()
        desk.page.keyboard.press("ArrowLeft")
        shown.wait_for_picture(picture)
        inside_the_window(shown)
        desk.wait_for_kernel()
        desk.screenshot(f"panel_{name}")
