"""Four notebooks in JupyterLab as a person runs them: no error, no word from the console, the verdicts that papermill and nbval give."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.browser.lab import Desk
from workbench.notebook.runner import VERDICT_MIME, read_verdict, run_notebook

pytestmark = pytest.mark.browser

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
FOUR = ("00_quickstart", "01_lr_sweep", "04_clipping", "12_batch_norm")


def shown(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The verdicts in the outputs of cells, in order."""
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    return [o["data"][VERDICT_MIME] for o in outputs if VERDICT_MIME in o.get("data", {})]


def statuses(verdicts: list[dict[str, Any]]) -> list[dict[str, str]]:
    return [{finding["code"]: finding["status"] for finding in verdict["findings"]} for verdict in verdicts]


@pytest.mark.parametrize("name", FOUR)
def test_it_gives_the_same_verdicts_in_jupyterlab_by_papermill_and_as_stored(
    desk: Desk, name: str, tmp_path: Path
) -> None:
    root = desk.lab.root / name
    root.mkdir()
    shutil.copy(NOTEBOOKS / f"{name}.ipynb", root)
    desk.open(f"{name}/{name}.ipynb")
    desk.run_all()
    assert desk.errors() == []
    cells = desk.cells()
    assert [c["execution_count"] for c in cells if c["cell_type"] == "code"] == [
        *range(1, len([c for c in cells if c["cell_type"] == "code"]) + 1)
    ]
    desk.cell(0)
    desk.screenshot(f"{name}-first")
    desk.cell(len(cells) - 1)
    desk.screenshot(f"{name}-last")
    desk.save()
    stored = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)  # what nbval holds every run against
    done = run_notebook(NOTEBOOKS / f"{name}.ipynb", output=tmp_path / "done.ipynb", cwd=tmp_path, timeout_s=300)
    in_lab = statuses(shown(cells))
    assert in_lab == statuses(read_verdict(done))
    assert in_lab == statuses(shown(stored.cells))
    assert in_lab, "there is a verdict"
