"""One place for the studies of a project, wherever in it a command, a notebook or a panel is started."""

from __future__ import annotations

from pathlib import Path

import pytest

import workbench as wb
from workbench.cli.notebooks import working_copies
from workbench.record.folder import runs_root


@pytest.mark.parametrize("mark", [".git", "pyproject.toml"])
def test_every_folder_of_a_project_has_the_same_runs(
    mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORKBENCH_RUNS", raising=False)
    deep = tmp_path / "project" / "notebooks" / "more"
    deep.mkdir(parents=True)
    (tmp_path / "project" / mark).mkdir()
    for here in (deep, deep.parent, tmp_path / "project"):
        monkeypatch.chdir(here)
        assert runs_root().resolve() == tmp_path / "project" / "runs"
    assert str(runs_root()) == "runs"
    monkeypatch.chdir(tmp_path)
    assert runs_root().resolve() == tmp_path / "runs", "outside of a project it is here"
    monkeypatch.setenv("HOME", str(tmp_path / "project"))
    monkeypatch.chdir(deep)
    assert runs_root().resolve() == deep / "runs", "a home is no project, whatever lies in it"
    monkeypatch.setenv("WORKBENCH_RUNS", str(tmp_path / "there"))
    assert runs_root() == tmp_path / "there"


def test_a_study_of_a_notebook_is_in_the_table_of_the_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORKBENCH_RUNS", raising=False)
    (tmp_path / ".git").mkdir()
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    workload = wb.load_workload("quadratic")
    record = wb.Trainer().run(workload, workload.config.replace(total_steps=5))
    assert record.path.resolve().parent == tmp_path / "runs"
    monkeypatch.chdir(tmp_path)
    assert wb.list_studies()["study"].tolist() == [record.path.name]


def test_copies_of_notebooks_keep_what_was_done_in_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("notebooks").mkdir()
    Path("notebooks/a.ipynb").write_text("one")
    assert working_copies(Path("notebooks")) == Path("my_notebooks")
    Path("my_notebooks/a.ipynb").write_text("changed")
    Path("notebooks/b.ipynb").write_text("two")
    working_copies(Path("notebooks"))
    assert [Path("my_notebooks", name).read_text() for name in ("a.ipynb", "b.ipynb")] == ["changed", "two"]
