"""Small notebooks for tests: a text, a parameters cell, and cells that show a verdict without importing anything heavy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

VERDICT = """\
from IPython.display import display
finding = {"code": "lr.best", "status": status, "summary": "as asked"}
bundle = {"schema": 1, "workload": "w", "verdict": status, "findings": [finding]}
display({"application/vnd.workbench.verdict+json": bundle, "text/plain": status}, raw=True)"""
"""Shows one finding of the status that the parameter `status` holds."""

PARAMETERS = (
    'status: str = "ok"  # of the finding\nlrs: list[float] = [0.1]  # learning rates\nout: str = ""  # of the study'
)


def write_notebook(
    path: Path, *cells: str, parameters: str = PARAMETERS, text: str = "# A title\n\nA question."
) -> Path:
    """Write a notebook with a text, a parameters cell and these cells of code."""
    made: list[Any] = [
        new_markdown_cell(text),
        new_code_cell(parameters, metadata={"tags": ["parameters"]}),
        *map(new_code_cell, cells),
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(new_notebook(cells=made), path)
    return path
