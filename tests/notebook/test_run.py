"""Notebooks as functions: checked parameters in, an executed copy, its page and its verdicts out, and no hang."""

from __future__ import annotations

import base64
import contextlib
import re
import sys
import textwrap
from functools import partial
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from tests.helpers.notebooks import write_notebook
from workbench.errors import NotebookError
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.finding import Finding
from workbench.notebook import engine
from workbench.notebook.html import write_notebook_html
from workbench.notebook.runner import find_notebook, is_complete, list_notebooks, read_verdict, run_notebook
from workbench.plots.render import Picture

PARAMETERS = "count: int = 1  # how many\nlrs: list[float] = [0.1]  # which"


write = partial(write_notebook, parameters=PARAMETERS)


def printed(path: Path) -> str:
    cells = nbformat.read(path, as_version=4).cells
    return "".join(o.get("text", "") for cell in cells for o in cell.get("outputs", []))


def test_parameters_reach_the_notebook_and_the_original_stays(tmp_path: Path) -> None:
    path = write(
        tmp_path / "n.ipynb", "import os, sys", "print(count, lrs, os.environ['WORKBENCH_LIVE'], sys.executable)"
    )
    before = path.read_bytes()
    done = run_notebook(path, {"count": 3, "lrs": (0.1, 1)}, output=tmp_path / "deep" / "out.ipynb")
    assert done == tmp_path / "deep" / "out.ipynb"
    assert printed(done) == f"3 [0.1, 1] 0 {sys.executable}\n"
    assert path.read_bytes() == before


def test_without_a_terminal_each_section_and_each_part_of_a_study_is_told_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "n.ipynb", "1")
    notebook = nbformat.read(path, as_version=4)
    new = nbformat.v4
    trains = """
        from workbench import live_view
        from workbench.progress import progress_bar
        with live_view(), progress_bar(None, "wine", show=False) as bar:
            bar.expect(100)
            for part in ("1 of 2: baseline", "2 of 2: learning rates"):
                for lr in (0.1, 0.2):
                    bar.status(part, f", lr {lr}")
                    bar.advance(25)
    """
    cells = new.new_markdown_cell("## Data\n\nsome"), new.new_code_cell(textwrap.dedent(trains)), new.new_code_cell("3")
    notebook.cells += cells
    nbformat.write(notebook, path)
    run_notebook(path, {}, output=tmp_path / "out.ipynb", progress=True)
    section, *parts = capfd.readouterr().err.splitlines()[-3:]
    assert (section, parts[0]) == ("Data", "cell 3 of 4: wine: 1 of 2: baseline")
    assert re.fullmatch(r"cell 3 of 4: wine: 2 of 2: learning rates \(50%, about \d+ s left\)", parts[1])
    assert not nbformat.read(tmp_path / "out.ipynb", as_version=4).cells[-2].outputs
    run_notebook(path, {}, output=tmp_path / "out.ipynb")
    assert "Data" not in capfd.readouterr().err


@pytest.mark.parametrize("last", ["", "1 / 0"])
def test_an_executed_notebook_keeps_no_password_it_was_given(tmp_path: Path, last: str) -> None:
    declared = 'count: int = 1  # how many\nledger: str = ""  # where\nhub_token: str = ""  # of the hub'
    path = write_notebook(tmp_path / "n.ipynb", "print(len(ledger), len(hub_token), count)", last, parameters=declared)
    given = {"count": 3, "ledger": "postgresql://me:hunter2@h/d", "hub_token": 'a"b hunter2'}
    with pytest.raises(NotebookError, match="ZeroDivision") if last else contextlib.nullcontext():
        run_notebook(path, given, output=tmp_path / "out.ipynb")
    assert printed(tmp_path / "out.ipynb") == f"{len(given['ledger'])} {len(given['hub_token'])} 3\n"
    kept = [file for file in tmp_path.rglob("*") if file.is_file() and b"hunter2" in file.read_bytes()]
    assert not kept
    assert is_complete(tmp_path / "out.ipynb", path, given) == (not last)


def test_an_error_in_a_cell_is_named_and_kept(tmp_path: Path) -> None:
    path = write(
        tmp_path / "n.ipynb", "print('before')", "# a comment\nimport json\njson.loads('{')  # here", "print('after')"
    )
    with pytest.raises(
        NotebookError, match=r"""n.ipynb stopped at In \[3\], "json.loads\('\{'\)  # here": JSONDecodeError"""
    ) as error:
        run_notebook(path, output=tmp_path / "out.ipynb")
    assert str(tmp_path / "out.ipynb") in str(error.value)
    assert "before" in printed(tmp_path / "out.ipynb")
    assert "after" not in printed(tmp_path / "out.ipynb")


def test_a_dead_kernel_is_an_error_not_a_wait(tmp_path: Path) -> None:
    path = write(tmp_path / "n.ipynb", "import os", "os._exit(9)")
    with pytest.raises(NotebookError, match="kernel died"):
        run_notebook(path, output=tmp_path / "out.ipynb")


def test_verdicts_are_read_back(tmp_path: Path) -> None:
    source = (
        "from workbench.findings.diagnosis import Diagnosis, Finding\nfrom IPython.display import display\n"
        "make = lambda status: Diagnosis(findings=(Finding(code='lr.best', status=status, summary='s', "
        "value=float('inf')),), workload='w')\n"
        "display(make('warn'))\nmake('ok')"
    )
    done = run_notebook(write(tmp_path / "n.ipynb", source), output=tmp_path / "out.ipynb")

    def expected(status: Any) -> dict[str, Any]:
        finding = Finding(code="lr.best", status=status, summary="s", value=float("inf"))
        return Diagnosis(findings=(finding,), workload="w").rows()

    assert read_verdict(done) == [expected("warn"), expected("ok")]


@pytest.mark.parametrize("name", ["01_lr_sweep", "lr_sweep", "lr_sweep.ipynb", "notebooks/01_lr_sweep.ipynb"])
def test_a_notebook_is_found_by_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "notebooks" / "01_lr_sweep.ipynb")
    write(tmp_path / "notebooks" / "02_instability.ipynb")
    assert find_notebook(name) == Path("notebooks/01_lr_sweep.ipynb")
    assert [info.path.stem for info in list_notebooks()] == ["01_lr_sweep", "02_instability"]


def test_the_engine_uses_the_polling_channel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    original = engine._PollingShellChannel.get_msg

    async def counted(self: Any, timeout: float | None = None) -> Any:
        asked.append(timeout)
        return await original(self, timeout)

    monkeypatch.setattr(engine._PollingShellChannel, "get_msg", counted)
    run_notebook(write(tmp_path / "n.ipynb", "1"), output=tmp_path / "out.ipynb")
    assert None in asked, "nbclient asks for an endless wait, and does not get it"


PICTURE = base64.b64encode(Picture([lambda ax: ax], "").png()).decode()


@pytest.fixture
def notebook(tmp_path: Path) -> Path:
    outputs = [
        new_output("stream", name="stdout", text="printed & <shown>"),
        new_output("display_data", {"image/png": PICTURE, "text/plain": "Figure"}),
        new_output("display_data", {"text/html": "<table><tr><td>cell</td></tr></table>", "text/plain": "t"}),
        new_output(
            "display_data", {"application/vnd.jupyter.widget-view+json": {"model_id": "x"}, "text/plain": "a widget"}
        ),
    ]
    cells = [
        new_markdown_cell("# Is *this* <it>?\n\nText with `code` and [a link](https://example.org)."),
        new_code_cell("secret = 41 + 1", outputs=outputs, execution_count=1),
    ]
    made = new_notebook(cells=cells)
    made.metadata["widgets"] = {"application/vnd.jupyter.widget-state+json": {"state": {}}}
    nbformat.write(made, tmp_path / "n.ipynb")
    return tmp_path / "n.ipynb"


def asks_for(text: str) -> list[str]:
    """Addresses that a browser would fetch for showing a page."""
    fetched = re.findall(
        r"<(?:script|link|img|iframe|source|object|embed)\b[^>]*?\b(?:src|href|data)=[\"']([^\"']*)", text
    )
    return [url for url in fetched + re.findall(r"url\(([^)]*)\)|@import", text) if not url.startswith("data:")]


def test_everything_is_in_the_page_and_nothing_outside_it(notebook: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = notebook.read_bytes()
    made = write_notebook_html(notebook)
    text = made.read_text()
    assert made == notebook.with_suffix(".html")
    assert notebook.read_bytes() == before
    assert caplog.text == ""
    for shown in (
        "printed &amp; &lt;shown&gt;",
        f"data:image/png;base64,{PICTURE[:40]}",
        "<td>cell</td>",
        "secret",
        "a widget",
    ):
        assert shown in text
    assert asks_for(text) == []
    assert "<script" not in text
    assert "default-src 'none'" in text
    assert "<title>Is *this* &lt;it&gt;?</title>" in text
