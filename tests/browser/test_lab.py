"""The fixtures themselves: a cell runs, an error of the console is noticed, a page comes back after a reload."""

from __future__ import annotations

import pytest

from tests.browser.lab import Desk

pytestmark = pytest.mark.browser


def test_a_notebook_runs_and_comes_back_after_a_reload(desk: Desk) -> None:
    desk.open(desk.lab.write("plain.ipynb", ["print('first')", "6 * 7"]))
    desk.run_all()
    assert desk.cells()[1]["outputs"][0]["data"]["text/plain"] == "42"
    assert desk.errors() == []
    assert desk.screenshot("lab").stat().st_size > 10_000
    desk.save()
    desk.reload()
    desk.page.get_by_text("first", exact=True).wait_for()


def test_what_the_console_complains_of_is_noticed(desk: Desk) -> None:
    desk.page.evaluate("() => console.error('planted')")
    desk.page.evaluate("() => setTimeout(() => { throw new Error('thrown') })")
    desk.page.wait_for_timeout(300)
    assert [c.split(" (")[0] for c in desk.complaints] == ["planted", "Error: thrown"]
    desk.complaints.clear()
