"""The guard finds each fault that is planted, and nothing in a good notebook; nbval sees a changed number."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from tests.notebooks.guard import problems
from workbench.notebook.runner import VERDICT_MIME

HERE = Path(__file__).parent


def good() -> Any:
    verdict = new_output("execute_result", {"text/plain": "ok", VERDICT_MIME: {"verdict": "ok"}}, execution_count=4)
    figure = [new_output("display_data", {"image/png": "AAAA"}), new_output("stream", name="stdout", text="It fell.\n")]
    cells = [
        new_markdown_cell("# Which lr?\n\nHow to read it."),
        new_code_cell("import workbench as wb", execution_count=1),
        new_code_cell("steps: int = 3  # updates", execution_count=2, metadata={"tags": ["parameters"]}),
        new_code_cell("record = wb.open('x')", execution_count=3),
        new_code_cell("record", execution_count=4, outputs=[verdict]),
        new_code_cell("print('It fell.')", execution_count=5, outputs=figure),
    ]
    return new_notebook(cells=cells)


def with_source(index: int, source: str) -> Callable[[Any], Any]:
    return lambda nb: nb.cells[index].update(source=source)


def with_output(index: int, output: Any) -> Callable[[Any], Any]:
    return lambda nb: nb.cells[index].outputs.append(output)


FAULTS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "never run": (lambda nb: nb.cells[3].update(execution_count=None), "not all run"),
    "run out of order": (lambda nb: nb.cells[3].update(execution_count=9), "not all run"),
    "error kept": (with_output(3, new_output("error", ename="ValueError", evalue="x", traceback=[])), "ValueError"),
    "widget state": (lambda nb: nb.metadata.update(widgets={"state": {}}), "metadata.widgets"),
    "widget view": (
        with_output(3, new_output("display_data", {"application/vnd.jupyter.widget-view+json": {"model_id": "1"}})),
        "stored a widget",
    ),
    "too large": (with_output(3, new_output("display_data", {"image/png": "A" * 600_000})), "larger than"),
    "place": (with_output(3, new_output("stream", name="stdout", text="/home/me/runs")), "place on one machine"),
    "Output": (with_source(3, "from ipywidgets import Output"), "uses Output"),
    "interact": (with_source(3, "widgets.interact(1)"), "uses interact"),
    "function": (with_source(3, "def f():\n    pass"), "defines f"),
    "marker with a reason": (with_source(3, "# NBVAL_IGNORE_OUTPUT: noisy\nrecord"), "stands alone"),
    "no parameters": (lambda nb: nb.cells[2].metadata.clear(), "0 cells are tagged"),
    "two parameters": (lambda nb: nb.cells[3].metadata.update(tags=["parameters"]), "2 cells are tagged"),
    "no annotation": (with_source(2, "steps = 3  # updates"), "not `name: type = value`"),
    "no comment": (with_source(2, "steps: int = 3"), "no comment"),
    "empty parameters": (with_source(2, "# none"), "there are no parameters"),
    "a section without code": (
        lambda nb: nb.cells.__setitem__(slice(3, 3), [new_markdown_cell("## T1"), new_markdown_cell("## T2")]),
        "six cells",
    ),
    "words that are no heading": (lambda nb: nb.cells.insert(3, new_markdown_cell("T1")), "six cells"),
    "seven cells": (lambda nb: nb.cells.append(new_markdown_cell("more")), "six cells"),
    "no question": (with_source(0, "# A title"), "no title with a question"),
    "work among imports": (with_source(1, "import os\nx = 3"), "more than import"),
    "no verdict": (lambda nb: nb.cells[4].outputs.clear(), "shows no verdict"),
    "no figure": (lambda nb: nb.cells[5].outputs.pop(0), "shows no figure"),
    "no words": (lambda nb: nb.cells[5].outputs.pop(1), "says nothing in words"),
}


def test_a_good_notebook_passes(tmp_path: Path) -> None:
    nbformat.write(good(), tmp_path / "n.ipynb")
    assert problems(tmp_path / "n.ipynb") == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, tmp_path: Path) -> None:
    plant, expected = FAULTS[fault]
    notebook = good()
    plant(notebook)
    nbformat.write(notebook, tmp_path / "n.ipynb")
    said = problems(tmp_path / "n.ipynb")
    assert any(expected in line for line in said), said


COMPARED = [
    ("loss 0.0972 after 280 steps", "loss 0.0972 after 280 steps", "PASSED"),
    ("loss 0.0972 after 280 steps", "loss 0.0953 after 280 steps", "FAILED"),
    ("<A object at 0x7f00aa11bb22> in 3.1 s", "<A object at 0x55d1c0ffee00> in 12.7 s", "PASSED"),
    ("runs/a/r.html, 12.5 it/s, 2026-01-02 10:11", "other/place/r.html, 8.1 it/s, 2025-11-12 23:59", "PASSED"),
    ("verdict ok", "verdict fail", "FAILED"),
    ("lr 0.1 / 0.2", "lr 0.1 / 0.3", "FAILED"),
]


def test_nbval_compares_numbers_but_not_places_and_times(tmp_path: Path) -> None:
    cells = []
    for number, (prints, stored, _) in enumerate(COMPARED, start=1):
        output = new_output("stream", name="stdout", text=f"{stored}\n")
        cells.append(new_code_cell(f"print({prints!r})", execution_count=number, outputs=[output]))
    nbformat.write(new_notebook(cells=cells), tmp_path / "n.ipynb")
    command = [sys.executable, "-m", "pytest", "-v", "--nbval", "--nbval-current-env", "-p", "no:cacheprovider"]
    command += ["--nbval-sanitize-with", str(HERE / "nbval_sanitize.cfg"), "n.ipynb"]
    environment = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert re.findall(r"::Cell \d+ (PASSED|FAILED)", done.stdout) == [outcome for _, _, outcome in COMPARED], (
        done.stdout
    )
