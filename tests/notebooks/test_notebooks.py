"""Every notebook keeps to the rules, is a stop of the tour, and runs as a function: small parameters in, a verdict out."""

from __future__ import annotations

import ast
import base64
import io
import json
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from PIL import Image

from workbench.notebook.runner import VERDICT_MIME, describe_notebook, read_verdict, run_notebook

ROOT = Path(__file__).parents[2]
NOTEBOOKS, DOCS = ROOT / "notebooks", ROOT / "docs"
THERE = sorted(NOTEBOOKS.glob("*.ipynb"))
SMALL: dict[str, Any] = {
    "workload": "digits_mlp",
    "steps": 30,
    "seeds": 1,
    "depths": [2],
    "epochs": 2,
    "processes": False,
}
MAX_BYTES = 250_000
BANNED = {"Output", "interact", "interactive", "interactive_output", "clear_output"}  # they hang, or nbval ignores them
PLACES = re.compile(r"(?:/home/|/root/|/Users/|/tmp/|/work/|[A-Z]:\\\\)")
CLAUSE = re.compile(r"\b(?:[FP]\d+\.\d+|T\d+(?:\.\d+)?)\b")
DEFINED = {"16_your_own_loop": ["train"]}
"""Definitions that a notebook is about: the reader's own."""
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")

every_notebook = pytest.mark.parametrize("path", THERE, ids=lambda p: p.stem)


@every_notebook
def test_it_was_run_from_top_to_bottom_and_stores_what_every_reader_can_see(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert path.stat().st_size <= MAX_BYTES
    assert "widgets" not in notebook.metadata
    for output in (output for cell in code for output in cell.outputs):
        data = output.get("data", {})
        assert output.output_type != "error"
        assert "application/vnd.jupyter.widget-view+json" not in data, "cannot be seen without a kernel"
        words = {kind: shown for kind, shown in data.items() if not kind.startswith("image/png")}
        if "image/png" in data:
            assert Image.open(io.BytesIO(base64.b64decode(data["image/png"]))).info.get("transparency"), (
                "white paper on a dark page"
            )
        assert PLACES.search(json.dumps(words) + output.get("text", "")) is None, "a place on one machine"


@every_notebook
def test_it_is_question_imports_parameters_study_diagnosis_figure(path: Path) -> None:
    cells = nbformat.read(path, as_version=4).cells
    title, imports, parameters, *_ = cells
    assert title.source.startswith("# ")
    assert "?" in title.source
    assert all(isinstance(node, (ast.Import, ast.ImportFrom)) for node in ast.parse(imports.source).body)
    assert [cell for cell in cells if "parameters" in cell.metadata.get("tags", [])] == [parameters]
    assert all(isinstance(node, ast.AnnAssign) for node in ast.parse(parameters.source).body)
    assert all(parameter.help for parameter in describe_notebook(path).parameters)
    passed_over = [cell for cell in cells if "nbval-ignore-output" in cell.metadata.get("tags", [])]
    assert not passed_over or path.stem == "15_parameter_server", (
        "nbval compares every verdict but those of measured rates"
    )
    assert cells[-1].cell_type == "code"
    assert any("text/markdown" in output.get("data", {}) for output in cells[-1].outputs), "the answer is the last cell"
    shown = {kind for cell in cells[-3:] for output in cell.get("outputs", []) for kind in output.get("data", {})}
    assert {VERDICT_MIME, "image/png"} - shown <= (
        {"image/png"} if path.stem == "10_tracking" else set()
    )  # a table there
    for cell in (cell for cell in cells if cell.cell_type == "code"):
        marks = [line for line in cell.source.splitlines() if "NBVAL_" in line]
        assert all(re.fullmatch(r"# NBVAL_\w+", line) for line in marks), "nbval sees a marker that stands alone"
        nodes = list(ast.walk(ast.parse(cell.source)))
        defined = [node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
        assert defined in ([], DEFINED.get(path.stem)), "belongs in the package"
        assert not BANNED & {
            node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "") for node in nodes
        }


@every_notebook
def test_a_newcomer_is_told_time_reading_clauses_and_the_way_on(path: Path) -> None:
    cells = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "markdown"]
    first = cells[0]
    minutes = re.search(r"\*\*Time\.\*\* About (\d+) minutes?", first)
    assert minutes is not None
    assert re.search(r"\*\*What to look at\.\*\* \S", first)
    assert re.search(r"\*\*What to do next\.\*\*\s+\S", first)
    title = first.splitlines()[0].removeprefix("# ")
    assert f"| {title} | [{path.name}]({path.name}) | {minutes[1]} |" in (NOTEBOOKS / "README.md").read_text()
    cited = set(CLAUSE.findall(" ".join(cells)))
    assert cited
    assert cited <= set(CLAUSE.findall((DOCS / "playbook.md").read_text()))
    here, last = THERE.index(path), first.rsplit("\n", 1)[-1]
    beside = [THERE[k].name for k in (here - 1, here + 1) if 0 <= k < len(THERE)]
    assert [target for target in LINK.findall(last) if target.endswith(".ipynb")] == beside
    for cell in cells:
        assert list(broken_links(re.sub(r"```.*?```", "", cell, flags=re.DOTALL), NOTEBOOKS)) == []


PAGES = (ROOT / "README.md", NOTEBOOKS / "README.md", DOCS / "playbook.md", DOCS / "glossary.md")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_links_of_the_pages_find_their_headings(page: Path) -> None:
    assert list(broken_links(page.read_text(), page.parent, of=page)) == []


def test_the_glossary_is_in_order() -> None:
    terms = re.findall(r"^## (.+)$", (DOCS / "glossary.md").read_text(), re.MULTILINE)
    assert terms == sorted(set(terms))


def broken_links(text: str, folder: Path, of: Path | None = None) -> Iterator[str]:
    """Links of a text in `folder` that lead nowhere, in JupyterLab or on a page of a repository."""
    for target in LINK.findall(text):
        page, _, anchor = target.partition("#")
        file = folder / page if page else of
        if re.match(r"[a-z]+:", target) or file is None:
            continue
        titles = re.findall(r"^## ([a-z][a-z -]*)$", file.read_text(), re.MULTILINE) if file.suffix == ".md" else []
        if not file.exists() or (anchor and anchor not in {title.replace(" ", "-") for title in titles}):
            yield target


def test_the_quickstart_shows_a_workload_that_lies_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    told = "".join(cell.source for cell in nbformat.read(THERE[0], as_version=4).cells if cell.cell_type == "markdown")
    shown = re.findall(r"```python\n(.*?)```", told, re.DOTALL)
    assert len(shown) == 1
    assert "mine = wb.classification(" in shown[0]
    assert (NOTEBOOKS / "my_workload.py").read_text().endswith(shown[0])
    monkeypatch.chdir(NOTEBOOKS)
    mine = runpy.run_path("my_workload.py")["mine"]
    image, label = mine.train_data[0]
    assert mine.build_model()(image[None]).shape == (1, 10)
    assert 0 <= int(label) < 10


@pytest.mark.slow
@every_notebook
def test_it_is_a_function_of_its_parameters(path: Path, tmp_path: Path) -> None:
    declared = {p.name for p in describe_notebook(path).parameters}
    own = DEFINED.get(path.stem)
    assert ({"out"} if own else {"workload", "out"}) <= declared
    values = {name: value for name, value in SMALL.items() if name in declared}
    done = run_notebook(path, {**values, "out": str(tmp_path / "study")}, output=tmp_path / "done.ipynb", timeout_s=300)
    verdicts = read_verdict(done)
    assert verdicts[-1]["workload"] == (own[0] if own else "digits_mlp")
    assert verdicts[-1]["findings"]
    assert list((tmp_path / "study").rglob("study.json"))
