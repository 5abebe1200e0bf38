"""What every notebook of this project keeps to; each rule returns what is wrong, in words."""

from __future__ import annotations

import ast
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat

from workbench.notebook.parameters import read_parameters
from workbench.notebook.runner import VERDICT_MIME

MAX_BYTES = 500_000
BANNED = {"Output", "interact", "interactive", "interactive_output", "clear_output"}  # they hang, or nbval ignores them
PLACES = re.compile(r"(?:/home/|/root/|/Users/|/tmp/|/work/|[A-Z]:\\\\)")
SPINE = ("markdown", "code", "code", "code", "code", "code")


def problems(path: Path) -> list[str]:
    """Everything that is wrong with a notebook."""
    notebook = nbformat.read(path, as_version=4)
    said = [] if path.stat().st_size <= MAX_BYTES else [f"larger than {MAX_BYTES} bytes"]
    if "widgets" in notebook.metadata:
        said.append("metadata.widgets is stored")
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for rule in (_executed, _outputs, _sources):
        said += list(rule(code))
    said += _parameters(code)
    closing = notebook.cells[-1]
    words = closing.cell_type == "markdown" and closing.source.startswith("## ")  # where to go next
    said += _spine(notebook.cells[:-1] if words else notebook.cells)
    return said


def _executed(code: list[Any]) -> Iterator[str]:
    counts = [cell.execution_count for cell in code]
    if counts != list(range(1, len(code) + 1)):
        yield f"cells were not all run once from top to bottom: {counts}"


def _outputs(code: list[Any]) -> Iterator[str]:
    for number, cell in enumerate(code, start=1):
        for output in cell.outputs:
            if output.output_type == "error":
                yield f"In [{number}] ended in {output.ename}"
            if "application/vnd.jupyter.widget-view+json" in output.get("data", {}):
                yield f"In [{number}] stored a widget, which a reader without a kernel cannot see"
            text = {k: v for k, v in output.get("data", {}).items() if not k.startswith("image/png")}
            found = PLACES.search(json.dumps(text) + output.get("text", ""))
            if found:
                yield f"In [{number}] shows a place on one machine: {found.group()}"


def _sources(code: list[Any]) -> Iterator[str]:
    for number, cell in enumerate(code, start=1):
        for line in cell.source.splitlines():
            if "NBVAL_" in line and not re.fullmatch(r"# NBVAL_\w+", line):
                yield f"In [{number}] has a marker that nbval does not see: it stands alone on its line"
        for node in ast.walk(ast.parse(re.sub(r"(?m)^\s*[%!].*$", "", cell.source))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                yield f"In [{number}] defines {node.name}: that belongs in the package"
            name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
            names = {alias.name for alias in node.names} if isinstance(node, ast.ImportFrom) else {name}
            for banned in names & BANNED:
                yield f"In [{number}] uses {banned}"


def _parameters(code: list[Any]) -> list[str]:
    tagged = [cell for cell in code if "parameters" in cell.metadata.get("tags", [])]
    if len(tagged) != 1:
        return [f"{len(tagged)} cells are tagged parameters, not one"]
    tree = ast.parse(tagged[0].source)
    said = [f"line {n.lineno} of the parameters is not `name: type = value`" for n in tree.body if not _annotated(n)]
    declared = read_parameters(tagged[0].source)
    said += [f"parameter {p.name} has no comment behind it" for p in declared if not p.help]
    return said if declared else [*said, "there are no parameters"]


def _annotated(node: ast.stmt) -> bool:
    return isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None


def _spine(cells: list[Any]) -> list[str]:
    """Question | imports | parameters | study | diagnosis | figure; a tutorial has sections, each under a heading, for its study."""
    kinds = tuple(cell.cell_type for cell in cells)
    if kinds != SPINE and not _sections(cells):
        return [f"the six cells are {', '.join(SPINE)}, not {', '.join(kinds)}"]
    title, imports, parameters, *_, diagnosis, figure = cells
    said = []
    if not title.source.startswith("# ") or "?" not in title.source:
        said.append("the first cell is no title with a question")
    if not all(isinstance(node, (ast.Import, ast.ImportFrom)) for node in ast.parse(imports.source).body):
        said.append("the second cell does more than import")
    if "parameters" not in parameters.metadata.get("tags", []):
        said.append("the third cell is not the parameters")
    if not any(VERDICT_MIME in output.get("data", {}) for output in diagnosis.outputs):
        said.append("the last cell but one shows no verdict")
    if not any("image/png" in output.get("data", {}) for output in figure.outputs):
        said.append("the last cell shows no figure")
    if not any(output.get("text") or "text/markdown" in output.get("data", {}) for output in figure.outputs):
        said.append("the last cell says nothing in words beside its figure")
    return said


def _sections(cells: list[Any]) -> bool:
    """Whether what lies between parameters and diagnosis is headings with cells of code under them."""
    kinds = tuple(cell.cell_type for cell in cells)
    middle, ends = cells[3:-2], (*kinds[:3], *kinds[-2:])
    if ends != (*SPINE[:3], *SPINE[-2:]) or len(middle) < 2 or middle[-1].cell_type != "code":
        return False
    headed = all(cell.source.startswith("## ") for cell in middle if cell.cell_type == "markdown")
    pairs = itertools.pairwise(middle)
    return (
        headed
        and middle[0].cell_type == "markdown"
        and not any(a.cell_type == b.cell_type == "markdown" for a, b in pairs)
    )
