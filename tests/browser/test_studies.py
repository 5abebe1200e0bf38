"""The study browser as a person uses it: by mouse and by keyboard, in JupyterLab."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from playwright.sync_api import Locator, expect

from tests.browser.lab import WAIT_S, Desk
from tests.browser.open_to_all import serious
from tests.helpers.study_folders import write_study

pytestmark = pytest.mark.browser
expect.set_options(timeout=WAIT_S * 1000)


@pytest.fixture
def panel(desk: Desk, request: pytest.FixtureRequest) -> Locator:
    """A panel over three studies and a damaged one, in a folder of the test's own."""
    root = desk.lab.root / re.sub(r"\W", "_", request.node.name)
    write_study(root / "first", note="the baseline")
    write_study(root / "second", seeds=2, scale=0.5, note="halved losses")
    write_study(root / "third", trials=2, note="not done, " + "a long story " * 20, finish=False)
    (root / "broken").mkdir()
    (root / "broken" / "study.json").write_text("{")
    desk.open(desk.lab.write(f"{root.name}.ipynb", ["import workbench as wb", f"wb.studies_panel({str(root)!r})"]))
    desk.run_all()
    assert desk.errors() == []
    found = desk.page.get_by_role("region", name="studies")
    expect(found.get_by_text("3 studies in")).to_be_visible()
    return found


def names(panel: Locator) -> list[str]:
    rows = panel.get_by_role("grid", name="studies").locator(".wb-body .wb-row")
    return [str(row.get_by_role("gridcell").nth(1).text_content()) for row in rows.all()]


LEFT = """(grid) => [...grid.querySelectorAll('.wb-row')].map(
  (row) => [...row.children].map((cell) => Math.round(cell.getBoundingClientRect().left)).join(' '))"""


def status(panel: Locator) -> Locator:
    return panel.get_by_role("status")


def test_filter_sort_open_compare_and_copy_by_mouse(panel: Locator, desk: Desk) -> None:
    expect(panel.get_by_text("broken/study.json is damaged")).to_be_visible()
    left = panel.get_by_role("grid", name="studies").evaluate(LEFT)
    assert len(left) == 4
    assert len(set(left)) == 1, "head and rows have the same columns, however long a note is"
    panel.get_by_label("filter studies").fill("halved finished")
    assert names(panel) == ["second"]
    expect(panel.get_by_text("1 of 3 studies")).to_be_visible()
    panel.get_by_label("filter studies").fill("nowhere")
    expect(panel.get_by_text("nothing matches")).to_be_visible()
    panel.get_by_label("filter studies").fill("")
    panel.get_by_role("button", name="value").first.click()
    rising = names(panel)
    panel.get_by_role("button", name="value").first.click()
    assert names(panel) == rising[::-1], "sorted by value, up and down"
    assert rising[0] == "second"

    panel.get_by_role("gridcell", name="first", exact=True).click()
    expect(status(panel)).to_have_text("first is open.")
    expect(panel.get_by_role("heading", name="first")).to_be_visible()
    expect(panel.get_by_label("note of the study")).to_have_value("the baseline")
    trials = panel.get_by_role("grid", name="trials")
    assert trials.locator(".wb-body .wb-row").first.get_by_role("gridcell").nth(1).text_content() == "2", (
        "the best is first"
    )
    expect(panel.get_by_role("img")).to_be_visible()
    desk.screenshot("studies-opened-top")
    panel.get_by_label("note of the study").scroll_into_view_if_needed()
    trials.scroll_into_view_if_needed()
    desk.screenshot("studies-opened")

    panel.get_by_text("Reproduce this study").click()
    panel.get_by_role("button", name="Copy command").click()
    expect(status(panel)).to_have_text("The command is in the clipboard.")
    command = panel.get_by_label("command that reproduces the study").text_content()
    assert desk.page.evaluate("() => navigator.clipboard.readText()") == command
    assert "workbench diagnose digits_mlp" in str(command)

    studies = panel.get_by_role("grid", name="studies")
    for name in ("first", "second"):
        studies.get_by_role("row", name=name).locator(".wb-mark").click()
    panel.get_by_role("button", name="Compare selected", exact=True).click()
    expect(status(panel)).to_contain_text("2 are compared below")
    compared = panel.get_by_role("region", name="comparison")
    expect(compared.get_by_role("img")).to_be_visible()
    bar, whole, drawn = (
        part.evaluate("part => part.getBoundingClientRect().toJSON()")
        for part in (panel.get_by_label("filter studies"), compared, compared.get_by_role("img"))
    )
    assert drawn["left"] > whole["left"] + 200, "the curves stand beside the table"
    assert drawn["bottom"] - bar["top"] < 650, "studies, numbers and curves are in one window"
    desk.screenshot("studies-compared-top")
    compared.scroll_into_view_if_needed()
    desk.screenshot("studies-compared")
    assert serious(desk.page, ".wb-studies") == []


def test_everything_by_keyboard_and_the_notebook_does_not_move(panel: Locator, desk: Desk) -> None:
    keyboard = desk.page.keyboard
    panel.get_by_label("filter studies").click()
    keyboard.type("base")
    assert names(panel) == ["first"]
    for _ in range(4):
        keyboard.press("Backspace")
    grid = panel.get_by_role("grid", name="studies")
    for _ in range(20):  # past the buttons between
        if grid.evaluate("(node) => node === document.activeElement"):
            break
        keyboard.press("Tab")
    keyboard.press("Home")
    keyboard.press("ArrowDown")
    chosen = names(panel)[1]
    keyboard.press("Enter")
    expect(status(panel)).to_have_text(f"{chosen} is open.")
    keyboard.press("Space")
    keyboard.press("End")
    keyboard.press("Space")
    assert panel.locator("[aria-selected=true]").count() == 2
    panel.get_by_role("button", name="Compare selected", exact=True).focus()
    keyboard.press("Enter")
    expect(panel.get_by_role("region", name="comparison")).to_be_visible()
    note = panel.get_by_label("note of the study")
    note.focus()
    keyboard.press("ControlOrMeta+a")
    keyboard.type("written by hand")
    keyboard.press("ControlOrMeta+Enter")
    expect(status(panel)).to_have_text("The note is written.")
    root = desk.lab.root / Path(desk.name).stem
    assert json.loads((root / chosen / "study.json").read_text())["note"] == "written by hand"
    expect(panel.get_by_role("gridcell", name="written by hand")).to_be_visible()
    active = desk.page.evaluate("() => window.jupyterapp.shell.currentWidget.content.activeCellIndex")
    assert len(desk.cells()) == 2
    assert active == 1, "arrow keys and Enter belong to the panel"
