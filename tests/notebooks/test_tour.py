"""The notebooks are a tour: in order, each with its minutes, what to look at, what to do next, and words that are explained."""

from __future__ import annotations

import re
import runpy
import shutil
from pathlib import Path

import nbformat
import pytest

from tests.notebooks.tour import broken_links, chain_problems, glossary_problems, tour_problems
from workbench.notebook.runner import VERDICT_MIME, read_verdict, run_notebook

ROOT = Path(__file__).parents[2]
NOTEBOOKS, DOCS = ROOT / "notebooks", ROOT / "docs"
GLOSSARY, CLAUSES = DOCS / "glossary.md", DOCS / "playbook.md"
THERE = sorted(NOTEBOOKS.glob("*.ipynb"))
INDEX = (NOTEBOOKS / "README.md").read_text()


@pytest.mark.parametrize("path", THERE, ids=lambda p: p.stem)
def test_a_notebook_says_what_a_newcomer_asks(path: Path) -> None:
    assert tour_problems(path, CLAUSES) == []


def test_the_notebooks_are_a_chain_in_the_order_of_the_playbook() -> None:
    assert len(THERE) > 10
    assert chain_problems(NOTEBOOKS) == []


def test_the_glossary_is_in_order_and_every_link_in_it_leads_somewhere() -> None:
    assert glossary_problems(GLOSSARY) == []


@pytest.mark.parametrize("page", [ROOT / "README.md", NOTEBOOKS / "README.md", CLAUSES], ids=lambda p: p.parent.name)
def test_links_of_the_pages_find_their_headings(page: Path) -> None:
    assert list(broken_links(page.read_text(), page.parent)) == []


@pytest.mark.parametrize("path", THERE, ids=lambda p: p.stem)
def test_the_index_has_each_title_and_its_minutes(path: Path) -> None:
    first = nbformat.read(path, as_version=4).cells[0].source
    title = first.splitlines()[0].removeprefix("# ")
    minutes = re.search(r"\*\*Time\.\*\* About (\d+) minutes?", first)
    assert minutes is not None
    assert f"| {title} | [{path.name}]({path.name}) | {minutes[1]} |" in INDEX


def test_the_quickstart_shows_the_file_that_lies_beside_it_and_that_file_is_a_workload(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = re.findall(r"```python\n(.*?)```", nbformat.read(THERE[0], as_version=4).cells[0].source, re.DOTALL)
    assert shown == [(NOTEBOOKS / "my_workload.py").read_text()]
    monkeypatch.chdir(NOTEBOOKS)
    mine = runpy.run_path("my_workload.py")["mine"]
    assert len(mine.train_data) + len(mine.validation_data) == 1797
    image, label = mine.train_data[0]
    assert mine.build_model()(image[None]).shape == (1, 10)
    assert 0 <= int(label) < 10


@pytest.mark.slow
def test_a_newcomer_gets_a_verdict_on_a_model_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(NOTEBOOKS / "my_workload.py", tmp_path)
    monkeypatch.chdir(tmp_path)  # a kernel of JupyterLab starts where the notebook lies
    values = {"workload": "my_workload.py:mine", "steps": 40, "out": "runs/mine"}
    done = run_notebook(THERE[0], values, output=tmp_path / "done.ipynb", timeout_s=300)
    verdict = read_verdict(done)[-1]
    assert verdict["workload"] == "mine"
    assert "lr.best" in {finding["code"] for finding in verdict["findings"]}
    assert (tmp_path / "runs" / "mine" / "report.html").is_file()


def test_every_finding_of_the_quickstart_is_told_where_to_go() -> None:
    cells = nbformat.read(THERE[0], as_version=4).cells
    (verdict,) = [
        out.data[VERDICT_MIME]
        for cell in cells
        for out in cell.get("outputs", [])
        if VERDICT_MIME in out.get("data", {})
    ]
    table = cells[-1].source
    assert table.startswith("## Where to go next")
    named = set(re.findall(r"`(\w+)\.\*`", table))
    assert {finding["code"].split(".")[0] for finding in verdict["findings"]} <= named
    assert {path.name for path in THERE[1:]} <= set(re.findall(r"\(([\w.]+ipynb)\)", table)), (
        "each notebook is somebody's next"
    )
