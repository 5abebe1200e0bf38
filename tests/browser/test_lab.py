"""The fixtures themselves: a cell runs, an error of the console is noticed, a page comes back after a reload."""

from __future__ import annotations

import pytest

from tests.browser.lab import Desk

pytestmark = pytest.mark.browser


def test_what_the_console_complains_of_is_noticed(desk: Desk) -> None:
    desk.page.evaluate("() => console.error('planted')")
    desk.page.evaluate("() => setTimeout(() => { throw new Error('thrown') })")
    desk.page.wait_for_timeout(300)
    assert [c.split(" (")[0] for c in desk.complaints] == ["planted", "Error: thrown"]
    desk.complaints.clear()
