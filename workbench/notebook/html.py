"""An executed notebook as one page that asks for nothing outside itself: text, code, tables and pictures, no script."""

from __future__ import annotations

import logging
import re
import urllib.parse
from html import escape, unescape
from pathlib import Path
from typing import Any

from workbench.errors import NotebookError
from workbench.notebook.parameters import read_parameters
from workbench.record.folder import write_atomic
from workbench.report.templates import page_css, render, shown_line

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; font-src data:"
"""What the page may load: what is written in it. Scripts of an output do not run, and nothing goes to a network."""


def write_notebook_html(notebook: str | Path) -> Path:
    """Write a notebook, as it stands, as a page beside it, and return the page's path.

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
    head = _parameters(cells)
    quiet = logging.Logger("workbench.nbconvert", logging.ERROR)  # it warns of every figure that has no text of its own
    exporter: Any = HTMLExporter(template_name="basic", log=quiet)  # type: ignore[no-untyped-call]
    exporter.exclude_input_prompt, exporter.exclude_output_prompt = True, True
    body, _ = exporter.from_notebook_node(cells)
    title = next(
        (c.source.strip().partition("\n")[0].lstrip("# ") for c in cells.cells if c.cell_type == "markdown"), ""
    )
    target = source.with_suffix(".html")
    body = head + _live_links(body, target.parent)
    write_atomic(target, page(title or source.stem, body).encode())
    return target


def _parameters(cells: Any) -> str:
    """Take the cells of parameters, of defaults and of what was set instead, out of a run's copy, and return what they came to, as HTML."""
    given = cells.metadata.get("papermill", {}).get("parameters")
    if not given:
        return ""
    declared: dict[str, str] = {}
    for cell in [c for c in cells.cells if c.cell_type == "code"]:
        tags = cell.metadata.get("tags", [])
        if "parameters" in tags:
            declared |= {p.name: p.default for p in read_parameters(cell.source)}
        if {"parameters", "injected-parameters"} & set(tags):
            cells.cells.remove(cell)
    chosen = {name: repr(value) for name, value in given.items()}
    rows = [("Set for this run", chosen), ("Defaults", {n: v for n, v in declared.items() if n not in given})]
    lines = [
        f"{head}: {', '.join(f'{n} = {shown_line(v)}' for n, v in values.items())}." for head, values in rows if values
    ]
    return "\n".join(f"<p class='soft'>{escape(line)}</p>" for line in lines) + "\n"


def _live_links(body: str, folder: Path) -> str:
    """Return a page's body in which only links that lead somewhere are left: to the web, to a place in it, to a file below its folder."""

    def kept(found: re.Match[str]) -> str:
        address = urllib.parse.urlsplit(unescape(found[1]))
        if address.scheme or address.netloc:
            return found[0]
        if not address.path:
            return found[0] if f'id="{address.fragment}"' in body else found[2]
        file = (folder / urllib.parse.unquote(address.path)).resolve()
        return found[0] if file.exists() and file.is_relative_to(folder.resolve()) else found[2]

    return re.sub(r'<a\b[^>]*\bhref="([^"]*)"[^>]*>(.*?)</a>', kept, body, flags=re.S)


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
    return render("page.html.j2", here, title=title, body=body, style=page_css("notebook.css", here), policy=POLICY)
