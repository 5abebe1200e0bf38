"""What a notebook shows of an error: the message and the caller's own lines; all of it where another error is behind it."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

import workbench as wb
from workbench.errors import StudyInterrupted, UsageError, WorkloadError
from workbench.notebook.runner import run_notebook


def raised(source: str, tmp_path: Path) -> list[str]:
    """The lines that a cell's error shows."""
    cells = ["import workbench as wb", source]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbformat.write(notebook, tmp_path / "raises.ipynb")
    with pytest.raises(wb.errors.NotebookError):
        run_notebook(tmp_path / "raises.ipynb", output=tmp_path / "done.ipynb", cwd=tmp_path)
    done = nbformat.read(tmp_path / "done.ipynb", as_version=4)
    outputs = [o for cell in done.cells for o in cell.get("outputs", []) if o.output_type == "error"]
    return "\n".join(outputs[-1].traceback).splitlines()


def test_a_cell_shows_the_message_and_its_own_line(tmp_path: Path) -> None:
    first, second = raised("steps = 3\nworkload = wb.load_workload('digits_cn')", tmp_path)
    assert first.startswith("UnknownNameError: ")
    assert "digits_cnn" in first
    assert second == "  line 2 of the cell: workload = wb.load_workload('digits_cn')"


def test_with_debug_there_is_no_short_form(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (UsageError, StudyInterrupted):
        assert error("said")._render_traceback_() == [f"{error.__name__}: said"]
    monkeypatch.setenv("WORKBENCH_DEBUG", "1")
    assert not hasattr(UsageError("said"), "_render_traceback_")


def test_a_cause_in_the_callers_code_is_shown_whole_and_one_of_the_system_is_not() -> None:
    for cause in (raise_here, Path("/nowhere/at/all").read_text):
        try:
            cause()
        except Exception as error:
            behind = error
        told = WorkloadError("said")
        told.__cause__ = behind
        assert not hasattr(told, "_render_traceback_")  # both begin in this file, which is nobody's library
        behind.__traceback__ = behind.__traceback__ and behind.__traceback__.tb_next
        assert hasattr(told, "_render_traceback_") == (cause is not raise_here)


def raise_here() -> None:
    raise KeyError("mine")
