"""One JupyterLab and one Chromium for all tests in a real browser; each test has a page, whose console must stay silent."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, sync_playwright

from tests.browser.lab import CHROMIUM, FLAGS, SIZE, Desk, Lab, start_lab


@pytest.fixture(scope="session")
def shots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where screenshots go: the folder in WORKBENCH_SHOTS, which is kept, or a temporary one."""
    folder = Path(os.environ.get("WORKBENCH_SHOTS") or tmp_path_factory.mktemp("shots"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Chromium without a window."""
    if CHROMIUM is None:
        pytest.fail("no Chromium here: install the package chromium, or leave these tests out with -m 'not browser'")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """JupyterLab over an empty folder."""
    root, private = tmp_path_factory.mktemp("lab"), tmp_path_factory.mktemp("private")
    yield from start_lab(root, private)


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    """A window of 1280 x 800 whose clipboard may be used."""
    context = browser.new_context(viewport=SIZE, permissions=["clipboard-read", "clipboard-write"])  # type: ignore[arg-type]
    yield context
    context.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Take a picture of the page on which a test failed."""
    report = yield
    desk = getattr(item, "funcargs", {}).get("desk")
    if report.when == "call" and report.failed and desk is not None:
        desk.screenshot(f"FAILED-{item.name}")
    return report


@pytest.fixture
def desk(context: BrowserContext, lab: Lab, shots: Path) -> Iterator[Desk]:
    """JupyterLab in a page; afterwards its kernels are ended, and the console must have had nothing to complain of."""
    desk = Desk.at(context, lab, shots)
    yield desk
    complaints = list(desk.complaints)  # ending kernels under an open notebook has complaints of its own
    desk.page.evaluate("() => window.jupyterapp.serviceManager.sessions.shutdownAll()")
    assert complaints == []
