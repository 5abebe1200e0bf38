"""Every panel in JupyterLab: a slider is dragged and moved by arrow keys, words and picture follow, nothing leaves the page."""

from __future__ import annotations

import pytest

from tests.browser.lab import Desk
from tests.browser.open_to_all import serious

pytestmark = pytest.mark.browser

PANELS = {
    "lr_sweep": "from tests.helpers.records import study\nwb.lr_sweep.panel(study())",
    "clipping": (
        "import numpy as np\nfrom tests.helpers.records import one_trial\n"
        "wb.clipping.panel(one_trial(np.random.default_rng(0).lognormal(size=400)))"
    ),
    "warmup": "from tests.topics.test_warmup import GOOD, study as warmups\nwb.warmup.panel(warmups(*GOOD))",
}


class Shown:
    """One panel on the page."""

    def __init__(self, desk: Desk, cell: int) -> None:
        self.page, self.area = desk.page, desk.cell(cell).locator(".jp-OutputArea")
        self.picture, self.words = self.area.locator("svg[role=img]"), self.area.locator("[role=status]")
        self.sliders = self.area.get_by_role("slider")
        self.picture.wait_for()
        self.area.scroll_into_view_if_needed()

    def state(self) -> tuple[str, str]:
        """Words, and an id within the picture, which is another for every picture."""
        return self.words.inner_text(), str(self.area.locator(".wb-figures svg [id]").first.get_attribute("id"))

    def wait_for_picture(self, before: str) -> None:
        """Wait until the picture is another one: it says where the slider stands, whether or not the words have to change."""
        self.page.wait_for_function(
            "([area, before]) => { const part = area.querySelector('svg [id]'); return part && part.id !== before }",
            arg=[self.area.element_handle(), before],
        )

    def wait_for_words(self, before: str) -> None:
        """Wait until the words are others."""
        self.page.wait_for_function(
            "([area, before]) => area.querySelector('[role=status]').innerText !== before",
            arg=[self.area.element_handle(), before],
        )

    def drag(self, number: int, share: float) -> None:
        """Drag a slider to a share of its length."""
        slider = self.sliders.nth(number)
        slider.scroll_into_view_if_needed()
        box = slider.bounding_box()
        assert box is not None
        y, at = box["y"] + box["height"] / 2, slider.evaluate("e => (e.value - e.min) / (e.max - e.min)")
        self.page.mouse.move(box["x"] + 8 + at * (box["width"] - 16), y)
        self.page.mouse.down()
        self.page.mouse.move(box["x"] + share * box["width"], y)
        self.page.mouse.up()

    def lefts(self) -> list[int]:
        """Left edge of each figure, none of which leaves the window."""
        boxes = [svg.bounding_box() for svg in self.area.locator(".wb-figures svg").all()]
        width = self.page.evaluate("innerWidth")
        edges = [(round(box["x"]), round(box["x"] + box["width"])) for box in boxes if box is not None]
        assert [edge for edge in edges if edge[0] < 0 or edge[1] > width] == []
        return [left for left, _ in edges]


def test_sliders_answer_to_the_mouse_and_to_arrow_keys(desk: Desk) -> None:
    """They say what they show, keep the focus, and the page has nothing for axe to complain of; narrow and dark as well."""
    desk.open(
        desk.lab.write("panels.ipynb", ["import workbench as wb", *PANELS.values(), "axes = wb.lr_sweep.plot(study())"])
    )
    desk.run_all()
    assert desk.errors() == []
    for cell, name in enumerate(PANELS, 1):
        shown = Shown(desk, cell)
        assert len(set(shown.lefts())) == len(shown.lefts()), "side by side"
        words, picture = shown.state()
        shown.drag(0, 0.75)
        shown.wait_for_words(words)
        shown.wait_for_picture(picture)
        picture = shown.state()[1]
        slider = shown.sliders.first
        slider.focus()
        desk.page.keyboard.press("ArrowLeft")
        shown.wait_for_picture(picture)
        assert slider.evaluate("e => e === document.activeElement")
        assert slider.get_attribute("aria-valuetext") == shown.area.locator("output").first.inner_text()
        assert slider.evaluate("e => e.labels[0].textContent")
        desk.wait_for_kernel()
        desk.screenshot(f"panel_{name}")
    assert serious(desk.page, ".jp-Notebook .jp-OutputArea-output") == []
    ink = "() => getComputedStyle(document.querySelector('.wb-figures')).color"
    light = desk.page.evaluate(ink)
    desk.command("apputils:change-theme", theme="JupyterLab Dark")
    desk.page.wait_for_function(f"(light) => ({ink})() !== light", arg=light)
    desk.page.set_viewport_size({"width": 560, "height": 800})
    for cell, name in ((1, "lr_sweep"), (len(PANELS) + 1, "figure")):
        desk.cell(cell)
        desk.screenshot(f"dark_narrow_{name}")
    shown = Shown(desk, 1)
    assert len(set(shown.lefts())) == 1, "one below the other"
    assert serious(desk.page, ".jp-Notebook .jp-OutputArea-output") == []
