"""The page of `workbench watch` in a real browser: curves that answer, narrow, dark, and open to all."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from playwright.sync_api import Browser

import workbench as wb
from tests.browser.open_to_all import serious
from tests.helpers.workloads import small_workload
from workbench.views.watch_page import serving

pytestmark = pytest.mark.browser


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 560)])
def test_curves_answer_to_the_pointer_and_follow_the_study(
    browser: Browser, tmp_path: Path, shots: Path, scheme: str, width: int
) -> None:
    record = wb.lr_sweep.Study(lrs=[0.01, 0.1]).run(small_workload(), out=tmp_path / "sweep")
    context, said = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 800}), []  # type: ignore[arg-type]
    page = context.new_page()
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    with serving(record.path) as server:
        page.goto(server.address)
        page.wait_for_function(
            "() => { const r = document.querySelector('.wb-live'); return r && r.wbLive.stats.redraws > 0 && r.wbLive.lanes.length === 2; }"
        )
        over = page.locator(".wb-live-loss .u-over")
        box = over.bounding_box()
        assert box is not None
        tip = page.locator(".wb-live-tip")
        for share in [k / 20 for k in range(1, 20)]:
            page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + share * box["height"])
            if tip.is_visible():
                break
        assert "training loss" in page.inner_text(".wb-live-loss")
        assert "lr" in tip.inner_text()
        page.screenshot(path=shots / f"watch_{scheme}_{width}.png", full_page=True)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert serious(page) == []
        wb.lr_sweep.Study(lrs=[0.01, 0.1, 0.3]).run(small_workload(), out=tmp_path / "longer")
        shutil.copytree(tmp_path / "longer", record.path, dirs_exist_ok=True)
        page.wait_for_function("() => document.querySelector('.wb-live').wbLive.lanes.length === 3")
    context.close()
    assert said == []
