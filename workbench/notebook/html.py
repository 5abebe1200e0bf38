"""An executed notebook as one page that asks for nothing outside itself: text, code, tables and pictures, no script."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from workbench.errors import NotebookError
from workbench.record.folder import write_atomic
from workbench.report.templates import render

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; font-src data:"
"""What the page may load: what is written in it. Scripts of an output do not run, and nothing goes to a network."""


def write_notebook_html(notebook: str | Path, *, show_input: bool = True) -> Path:
    """Write a notebook, as it stands, as a page beside it, and return the page's path.

    Without `show_input` text, outputs and pictures are left.

    Raises:
        NotebookError: the file is not a notebook.
        RecordError: the page cannot be written.
    """
    from nbconvert import HTMLExporter

    source = Path(notebook)
    cells = read_notebook(source)
    for cell in cells.cells:  # a widget needs scripts; what it says in words stays
        for output in cell.get("outputs", []):
            output.get("data", {}).pop("application/vnd.jupyter.widget-view+json", None)
    cells.metadata.pop("widgets", None)
    quiet = logging.Logger("workbench.nbconvert", logging.ERROR)  # it warns of every figure that has no text of its own
    exporter: Any = HTMLExporter(template_name="basic", log=quiet)  # type: ignore[no-untyped-call]
    exporter.exclude_input, exporter.exclude_input_prompt, exporter.exclude_output_prompt = not show_input, True, True
    body, _ = exporter.from_notebook_node(cells)
    title = next(
        (c.source.strip().partition("\n")[0].lstrip("# ") for c in cells.cells if c.cell_type == "markdown"), ""
    )
    target = source.with_suffix(".html")
    write_atomic(target, page(title or source.stem, body).encode())
    return target


def read_notebook(path: Path) -> Any:
    """Return a notebook's nodes; what is none is a `NotebookError`."""
    import nbformat

    try:
        return nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    except (OSError, ValueError, nbformat.ValidationError, AttributeError) as error:
        raise NotebookError(f"{path} cannot be read as a notebook: {error}") from error


def page(title: str, body: str) -> str:
    """Return a whole page around `body`, which is HTML already, in the house style."""
    here = Path(__file__).parent
    style = (here / "notebook.css").read_text(encoding="utf-8")
    return render("page.html.j2", here, title=title, body=body, style=style, policy=POLICY)
