"""How long `make lab` takes: from the command to JupyterLab with a notebook open, its kernel ready, and its first cell of code run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from playwright.sync_api import Error, Page, sync_playwright

from tests.browser.lab import CHROMIUM, FLAGS, SIZE, free_port

ROUNDS = 3
ROOT = Path(__file__).parents[2]


def main() -> None:
    """Print seconds of each round and their medians."""
    if CHROMIUM is None:
        raise SystemExit("no Chromium here: install the package chromium")
    rounds = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        for _ in range(ROUNDS):
            page = browser.new_page(viewport=SIZE)
            rounds.append(one_round(page))
            page.close()
            print("page there {:.1f} s, kernel ready {:.1f} s, first cell run {:.1f} s".format(*rounds[-1]), flush=True)
        browser.close()
    print(
        "median:",
        " ".join(f"{median(times):.1f}" for times in zip(*rounds, strict=True)),
        "s; load",
        os.getloadavg()[0],
    )


def one_round(page: Page) -> tuple[float, float, float]:
    """Return seconds from the command to the page, to its kernel, to the first cell's end."""
    words = [sys.executable, "-m", "workbench", "lab", "--no-browser", "--port", str(free_port())]
    with tempfile.TemporaryDirectory() as private:
        shutil.copytree(ROOT / "notebooks", Path(private) / "notebooks")  # JupyterLab saves what it opens
        env = os.environ | {"JUPYTER_CONFIG_DIR": private, "JUPYTERLAB_WORKSPACES_DIR": private}
        env |= {"PYTHONPATH": str(ROOT), "JUPYTER_RUNTIME_DIR": private, "JUPYTERLAB_SETTINGS_DIR": private}
        began = time.perf_counter()
        process = subprocess.Popen(words, cwd=private, env=env, stderr=subprocess.PIPE, text=True)
        try:
            assert process.stderr is not None
            said = (re.search(r"http://127\.0\.0\.1:\d+/\S*token=\w+", line) for line in process.stderr)
            address = next(found[0] for found in said if found)
            while True:
                try:
                    page.goto(address)
                    break
                except Error:  # it says where it will be before it is there
                    time.sleep(0.1)
            page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=120_000)
            there = time.perf_counter() - began
            page.get_by_text("Python 3 (ipykernel) | Idle").wait_for(timeout=120_000)
            ready = time.perf_counter() - began
            page.locator(".jp-CodeCell .cm-content").first.click()
            page.keyboard.press("Shift+Enter")
            page.get_by_text("[1]:", exact=True).first.wait_for(timeout=120_000)
            ran = time.perf_counter() - began
        finally:
            process.terminate()
            process.wait(30)
    return there, ready, ran


if __name__ == "__main__":
    main()
