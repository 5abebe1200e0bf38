"""Notebooks as functions: checked parameters in, an executed copy and its verdicts out, and no hang."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from queue import Empty
from typing import Any

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from workbench.errors import NotebookError, UnknownNameError, UsageError
from workbench.findings.diagnosis import Diagnosis, Finding
from workbench.notebook import engine as engine
from workbench.notebook import runner as runner
from workbench.notebook.runner import describe_notebook, find_notebook, list_notebooks, read_verdict, run_notebook

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


def test_live_view_is_off_even_where_it_was_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_LIVE", "1")
    path = write(tmp_path / "n.ipynb", "import os; print(os.environ['WORKBENCH_LIVE'])")
    assert printed(run_notebook(path, output=tmp_path / "out.ipynb")) == "0\n"
    assert os.environ["WORKBENCH_LIVE"] == "1"


def test_figures_are_kept_although_tests_draw_without_a_window(tmp_path: Path) -> None:
    assert os.environ["MPLBACKEND"] == "Agg"
    path = write(tmp_path / "n.ipynb", "import matplotlib.pyplot as plt\nplt.plot([1, 2]);")
    cells = nbformat.read(run_notebook(path, output=tmp_path / "out.ipynb"), as_version=4).cells
    assert [list(o["data"]) for o in cells[-1].outputs] == [["image/png", "text/plain"]]


def test_the_folder_it_runs_in_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    path = write(tmp_path / "n.ipynb", "import os; print(os.getcwd())")
    assert printed(run_notebook(path)) == f"{tmp_path / 'here'}\n"
    assert printed(run_notebook(path, cwd=tmp_path / "there")) == f"{tmp_path / 'there'}\n"
    assert Path.cwd() == tmp_path / "here"
    assert sorted(p.name for p in (tmp_path / "here" / "runs" / "notebooks").iterdir()) == ["n", "n-2"]


def test_unknown_parameter_names_the_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("papermill.execute_notebook", never)
    path = write(tmp_path / "n.ipynb")
    with pytest.raises(UnknownNameError, match=r"'cuont'\. Did you mean 'count'"):
        run_notebook(path, {"cuont": 2})
    with pytest.raises(UnknownNameError, match="no parameters at all"):
        run_notebook(write(tmp_path / "none.ipynb", parameters=None), {"count": 2})


@pytest.mark.parametrize("value", ["3", 3.5, True, None, [1]])
def test_wrong_type_is_refused(value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("papermill.execute_notebook", never)
    with pytest.raises(UsageError, match=r"count=.* must be of type int, for example count=1"):
        run_notebook(write(tmp_path / "n.ipynb"), {"count": value})


def test_output_and_folder_are_checked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("papermill.execute_notebook", never)
    path = write(tmp_path / "n.ipynb")
    with pytest.raises(UsageError, match="the notebook itself"):
        run_notebook(path, output=path)
    with pytest.raises(UsageError, match="not a folder"):
        run_notebook(path, cwd=tmp_path / "missing")


def test_an_error_in_a_cell_is_named_and_kept(tmp_path: Path) -> None:
    path = write(tmp_path / "n.ipynb", "print('before')", "# a comment\n1 / 0", "print('after')")
    with pytest.raises(
        NotebookError, match=r"n.ipynb stopped at In \[3\], '1 / 0': ZeroDivisionError: division by zero"
    ) as error:
        run_notebook(path, output=tmp_path / "out.ipynb")
    assert str(tmp_path / "out.ipynb") in str(error.value)
    assert "before" in printed(tmp_path / "out.ipynb")
    assert "after" not in printed(tmp_path / "out.ipynb")


def test_the_line_that_is_named_is_that_of_the_cell_not_of_what_it_calls(tmp_path: Path) -> None:
    path = write(tmp_path / "n.ipynb", "# NBVAL_IGNORE_OUTPUT\nimport json\njson.loads('{')  # here\nprint(1)")
    with pytest.raises(NotebookError, match=r"""stopped at In \[2\], "json.loads\('\{'\)  # here": JSONDecodeError"""):
        run_notebook(path, output=tmp_path / "out.ipynb")


def test_a_dead_kernel_is_an_error_not_a_wait(tmp_path: Path) -> None:
    path = write(tmp_path / "n.ipynb", "import os", "os._exit(9)")
    with pytest.raises(NotebookError, match="kernel died"):
        run_notebook(path, output=tmp_path / "out.ipynb")


def test_a_cell_that_takes_too_long_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "n.ipynb", "import time", "time.sleep(60)")
    with pytest.raises(NotebookError, match="timeout_s=1"):
        run_notebook(path, output=tmp_path / "out.ipynb", timeout_s=1)


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


def test_a_verdict_stored_as_text_is_read(tmp_path: Path) -> None:
    cell = new_code_cell(
        "1", outputs=[new_output("display_data", {runner.VERDICT_MIME: json.dumps({"verdict": "ok"})})]
    )
    nbformat.write(new_notebook(cells=[cell]), tmp_path / "n.ipynb")
    assert read_verdict(tmp_path / "n.ipynb") == [{"verdict": "ok"}]


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


def test_an_unknown_notebook_names_the_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnknownNameError, match=r"no notebook in 'notebooks'"):
        find_notebook("lr_sweep")
    write(tmp_path / "notebooks" / "01_lr_sweep.ipynb")
    with pytest.raises(UnknownNameError, match="Did you mean 'lr_sweep'"):
        find_notebook("lr_sweeep")
    with pytest.raises(UnknownNameError, match="elsewhere/lr_sweep"):
        find_notebook("elsewhere/lr_sweep.ipynb")


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


def test_a_wait_with_an_end_ends() -> None:
    socket = DeafSocket(arrives_at_poll=10**9)
    with pytest.raises(Empty):
        asyncio.run(asyncio.wait_for(channel(socket).get_msg(timeout=0.1), 5))
    assert all(poll <= 100 for poll in socket.polls)


def test_the_engine_uses_the_polling_channel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    original = engine._PollingShellChannel.get_msg

    async def counted(self: Any, timeout: float | None = None) -> Any:
        asked.append(timeout)
        return await original(self, timeout)

    monkeypatch.setattr(engine._PollingShellChannel, "get_msg", counted)
    run_notebook(write(tmp_path / "n.ipynb", "1"), output=tmp_path / "out.ipynb")
    assert None in asked, "nbclient asks for an endless wait, and does not get it"


@pytest.mark.slow
def test_a_hundred_cells_of_widget_output_do_not_hang(tmp_path: Path) -> None:
    cell = "out = widgets.Output()\ndisplay(out)\nwith out:\n    print(1)"
    first = "import ipywidgets as widgets\nfrom IPython.display import display"
    path = write(tmp_path / "n.ipynb", first, *[cell] * 100)
    done = run_notebook(path, output=tmp_path / "out.ipynb", timeout_s=20)
    assert all(c.execution_count for c in nbformat.read(done, as_version=4).cells if c.cell_type == "code")


def test_a_terminal_shows_the_words_of_links_and_no_code_to_copy(tmp_path: Path) -> None:
    words = "# Why?\n\nA [probe](../docs/glossary.md#probe) ([F1.10](p.md#a)).\n\n```python\nx = 1\n```\n\nGo to [03](03.ipynb).\n\n"
    words += "← [01](01.ipynb) · [all](README.md) · [words](g.md) · [03](03.ipynb) →"
    parameters = new_code_cell("steps: int = 3  # updates", metadata={"tags": ["parameters"]})
    nbformat.write(new_notebook(cells=[new_markdown_cell(words), parameters]), tmp_path / "n.ipynb")
    assert describe_notebook(tmp_path / "n.ipynb").question == "A probe (F1.10).\n\nGo to 03."
