"""How long the study browser takes: a study of 1,000 trials, a folder of 200 studies, and both in a page of JupyterLab.

The parts are timed alone, then what a person waits for: from the click on a study to its trials, and to its picture. Without a
Chromium the page is left out.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from playwright.sync_api import sync_playwright

from tests.browser.lab import CHROMIUM, FLAGS, SIZE, Desk, start_lab
from tests.helpers.study_folders import write_study
from workbench.ledger.push import push
from workbench.ledger.studies import list_studies, set_note
from workbench.views.studies import studies_panel
from workbench.views.studies_data import draw_study, open_study

TRIALS, STUDIES, ROUNDS = 1000, 200, 5

FILTER = """(input) => {
  const began = performance.now();
  input.value = "complete 0.9";
  input.dispatchEvent(new Event("input"));
  return performance.now() - began;
}"""
SORT = "(button) => { const began = performance.now(); button.click(); return performance.now() - began; }"


def seconds(what: Callable[[], object]) -> float:
    """Return the wall time of one call."""
    began = time.perf_counter()
    what()
    return time.perf_counter() - began


def say(name: str, took: list[float]) -> None:
    """Print the median of all rounds but the first."""
    print(f"{name:<52} {np.median(took[1:]):.2f} s ({min(took[1:]):.2f} to {max(took[1:]):.2f})", flush=True)


def kernel(many: Path, big: Path) -> None:
    """Time what the kernel does."""
    parts: dict[str, Callable[[], object]] = {
        f"list_studies over {STUDIES} studies": lambda: list_studies(many),
        f"panel over {STUDIES} studies": lambda: studies_panel(many, live=True),
        f"trials of a study of {TRIALS:,}": lambda: len(open_study(big)[0].to_dict()),
        "its picture": lambda: draw_study(open_study(big)[1]),
    }
    measured: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(ROUNDS + 1):
        for name, part in parts.items():
            measured[name].append(seconds(part))
    for name, took in measured.items():
        say(name, took)
    print(f"{'its rows into the ledger, once':<52} {seconds(lambda: push(big)):.2f} s", flush=True)
    say("a note", [seconds(lambda k=k: set_note(big, f"note {k}")) for k in range(ROUNDS + 1)])


def page(root: Path, private: Path) -> None:
    """Time what a person sees."""
    for lab in start_lab(root, private):
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
            desk = Desk.at(browser.new_context(viewport=SIZE), lab, private)  # type: ignore[arg-type]
            trials, picture, whole = [], [], []
            answers: dict[str, list[float]] = {"filter": [], "sort": []}
            for number in range(ROUNDS + 1):
                cells = ["import workbench as wb", f"wb.studies_panel({str(root / 'big')!r})"]
                desk.open(lab.write(f"{number}.ipynb", cells))
                desk.run_all()
                panel = desk.page.get_by_role("region", name="studies").last
                row = panel.get_by_role("gridcell", name="thousand", exact=True)
                row.wait_for()
                began = time.perf_counter()
                row.click()
                panel.get_by_text(f"{TRIALS} trials", exact=True).wait_for()
                trials.append(time.perf_counter() - began)
                panel.get_by_role("img").wait_for()
                picture.append(time.perf_counter() - began)
                panel.get_by_text("thousand is open below.").wait_for()
                whole.append(time.perf_counter() - began)
                answers["filter"].append(panel.get_by_label("filter trials").evaluate(FILTER) / 1000)
                answers["sort"].append(panel.get_by_role("button", name="peak_lr").evaluate(SORT) / 1000)
            say("in the page, a fresh kernel: click to trials", trials)
            say("in the page, a fresh kernel: click to curves", picture)
            say("in the page, a fresh kernel: click to whole picture", whole)
            for name, took in answers.items():
                print(f"{f'in the page: {name} {TRIALS:,} trials':<52} {1000 * np.median(took):.1f} ms")
            browser.close()


def main() -> None:
    """Write the folders, time all of it."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "root"
        big = root / "big" / "thousand"
        took = seconds(lambda: write_study(big, trials=TRIALS, seeds=2))
        print(f"{f'writing {TRIALS:,} trials, without the ledger':<52} {took:.2f} s")
        for number in range(STUDIES):
            write_study(root / "many" / f"s{number:03d}", trials=10)
        if CHROMIUM is not None:
            page(root, Path(folder) / "private")
        kernel(root / "many", big)


if __name__ == "__main__":
    main()
