"""Notebooks as functions: checked parameters in, an executed copy, its page and its verdicts out, and no hang."""

from __future__ import annotations

import asyncio
import base64
import re
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from workbench.errors import NotebookError, UnknownNameError, UsageError
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.finding import Finding
from workbench.notebook import engine as engine
from workbench.notebook import runner as runner
from workbench.notebook.html import write_notebook_html
from workbench.notebook.runner import describe_notebook, find_notebook, list_notebooks, read_verdict, run_notebook
from workbench.plots.render import png

PARAMETERS = "count: int = 1  # how many\nlrs: list[float] = [0.1]  # which"


def write(path: Path, *cells: str, parameters: str | None = PARAMETERS, text: str = "# Title\n\nA question.") -> Path:
    made: list[Any] = [new_markdown_cell(text)]
    if parameters is not None:
        made.append(new_code_cell(parameters, metadata={"tags": ["parameters"]}))
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(new_notebook(cells=[*made, *map(new_code_cell, cells)]), path)
    return path


def printed(path: Path) -> str:
    cells = nbformat.read(path, as_version=4).cells
    return "".join(o.get("text", "") for cell in cells for o in cell.get("outputs", []))


def never(*_: Any, **__: Any) -> None:
    pytest.fail("the notebook ran")


def test_parameters_reach_the_notebook_and_the_original_stays(tmp_path: Path) -> None:
    path = write(
        tmp_path / "n.ipynb", "import os, sys", "print(count, lrs, os.environ['WORKBENCH_LIVE'], sys.executable)"
    )
    before = path.read_bytes()
    done = run_notebook(path, {"count": 3, "lrs": (0.1, 1)}, output=tmp_path / "deep" / "out.ipynb")
    assert done == tmp_path / "deep" / "out.ipynb"
    assert printed(done) == f"3 [0.1, 1] 0 {sys.executable}\n"
    assert path.read_bytes() == before


def test_the_folder_it_runs_in_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    path = write(tmp_path / "n.ipynb", "import os; print(os.getcwd())")
    assert printed(run_notebook(path)) == f"{tmp_path / 'here'}\n"
    assert printed(run_notebook(path, cwd=tmp_path / "there")) == f"{tmp_path / 'there'}\n"
    assert Path.cwd() == tmp_path / "here"
    assert sorted(p.name for p in (tmp_path / "here" / "runs" / "notebooks").iterdir()) == ["n", "n-2"]


def test_parameters_are_checked_before_a_kernel_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("papermill.execute_notebook", never)
    path = write(tmp_path / "n.ipynb")
    with pytest.raises(UnknownNameError, match=r"'cuont'\. Did you mean 'count'"):
        run_notebook(path, {"cuont": 2})
    with pytest.raises(UsageError, match=r"count=True must be of type int, for example count=1"):
        run_notebook(path, {"count": True})
    with pytest.raises(UnknownNameError, match="no parameters at all"):
        run_notebook(write(tmp_path / "none.ipynb", parameters=None), {"count": 2})


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


def test_a_notebook_without_verdict_says_so(tmp_path: Path) -> None:
    path = write(tmp_path / "n.ipynb", "1")
    with pytest.raises(NotebookError, match="no verdict"):
        read_verdict(path)
    assert read_verdict(path, required=False) == []
    (tmp_path / "bad.ipynb").write_text("{not json")
    for name in ("bad.ipynb", "missing.ipynb"):
        with pytest.raises(NotebookError, match="cannot be read as a notebook"):
            read_verdict(tmp_path / name)


def test_describe_reads_without_running(tmp_path: Path) -> None:
    info = describe_notebook(write(tmp_path / "n.ipynb", "1 / 0"))
    assert (info.title, info.question) == ("Title", "A question.")
    assert [(p.name, p.type, p.default, p.help) for p in info.parameters] == [
        ("count", "int", "1", "how many"),
        ("lrs", "list[float]", "[0.1]", "which"),
    ]
    assert "count: int = 1  # how many" in str(info)
    assert "No parameters" in str(describe_notebook(write(tmp_path / "m.ipynb", parameters=None)))


@pytest.mark.parametrize("name", ["01_lr_sweep", "lr_sweep", "lr_sweep.ipynb", "notebooks/01_lr_sweep.ipynb"])
def test_a_notebook_is_found_by_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "notebooks" / "01_lr_sweep.ipynb")
    write(tmp_path / "notebooks" / "02_instability.ipynb")
    assert find_notebook(name) == Path("notebooks/01_lr_sweep.ipynb")
    assert [info.path.stem for info in list_notebooks()] == ["01_lr_sweep", "02_instability"]


class DeafSocket:
    """Misses what arrives during a wait; only a poll that starts afterwards sees it. An endless wait never ends."""

    def __init__(self, arrives_at_poll: int) -> None:
        self.polls: list[int] = []
        self.arrives_at_poll = arrives_at_poll

    async def poll(self, timeout_ms: int | None) -> int:
        assert timeout_ms is not None, "an endless wait: this is the hang"
        self.polls.append(timeout_ms)
        await asyncio.sleep(min(timeout_ms, 20) / 1000)
        return int(len(self.polls) >= self.arrives_at_poll)


def channel(socket: DeafSocket) -> Any:
    made = object.__new__(engine._PollingShellChannel)
    made.socket = socket  # type: ignore[assignment]

    async def receive() -> dict[str, Any]:
        return {"content": "reply"}

    made._recv = receive  # type: ignore[assignment,method-assign]
    return made


def test_the_wait_for_a_reply_polls() -> None:
    socket = DeafSocket(arrives_at_poll=3)
    assert asyncio.run(asyncio.wait_for(channel(socket).get_msg(), 5)) == {"content": "reply"}
    assert socket.polls == [500, 500, 500]


def test_the_engine_uses_the_polling_channel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    original = engine._PollingShellChannel.get_msg

    async def counted(self: Any, timeout: float | None = None) -> Any:
        asked.append(timeout)
        return await original(self, timeout)

    monkeypatch.setattr(engine._PollingShellChannel, "get_msg", counted)
    run_notebook(write(tmp_path / "n.ipynb", "1"), output=tmp_path / "out.ipynb")
    assert None in asked, "nbclient asks for an endless wait, and does not get it"


PICTURE = base64.b64encode(png([lambda ax: ax])).decode()


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
    text = write_notebook_html(notebook, show_input=False).read_text()
    assert "secret" not in text
    assert "printed" in text
