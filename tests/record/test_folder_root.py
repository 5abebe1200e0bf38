"""One place for the studies of a project, wherever in it a command, a notebook or a panel is started."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

import workbench as wb
from tests.helpers.hooks import At
from tests.helpers.workloads import small_workload
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


def test_copies_of_notebooks_follow_their_originals_until_they_are_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("notebooks").mkdir()
    for name in "ab":
        Path(f"notebooks/{name}.ipynb").write_text("old")
    assert working_copies(Path("notebooks")) == Path("my_notebooks")
    Path("my_notebooks/a.ipynb").write_text("changed")
    Path("notebooks/c.ipynb").write_text("old")
    working_copies(Path("notebooks"))
    assert capsys.readouterr().out == "", "nothing newer was passed over"
    for name in "abc":
        Path(f"notebooks/{name}.ipynb").write_text("new")
    working_copies(Path("notebooks"))
    assert [Path(f"my_notebooks/{name}.ipynb").read_text() for name in "abc"] == ["changed", "new", "new"]
    assert capsys.readouterr().out.startswith("Newer in notebooks, and kept as you changed them: a.ipynb. ")
    assert Path("my_notebooks/.gitignore").read_text() == "*\n"


NAMES = ["run1:try2", "s3:x", "file:x", "[v2]", "org/model", "../../x", "/etc/x", "x" * 300, "-x", "..", "é" * 200]


@pytest.mark.parametrize("name", NAMES)
def test_a_study_of_any_name_is_one_folder_of_the_root_and_goes_on_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a" / "b")
    workload = small_workload(config={"total_steps": 4}).replace(name=name)
    stopped = wb.Trainer(hooks=[At(1, signal.SIGINT)])
    with pytest.raises(wb.errors.StudyInterrupted):
        stopped.run(workload)
    wb.Trainer().run(workload)
    assert [path.name for path in Path().iterdir()] == ["runs"], "nothing is written beside the root"
    assert sorted(path.name for path in tmp_path.rglob("study.json")) == ["study.json"], "the same study goes on"
    assert wb.list_studies("runs", extra=["workload"])["workload"].tolist() == [name]


@pytest.mark.parametrize("name", ["a\nb", "nul\0l", "\udcff"])
def test_names_that_cannot_be_printed_are_refused_before_anything_is_written(tmp_path: Path, name: str) -> None:
    with pytest.raises(wb.errors.WorkloadError, match="that can be printed"):
        small_workload().replace(name=name)
    with pytest.raises(wb.errors.RecordError, match="can be printed"):
        wb.Trainer().run(small_workload(), out=tmp_path / name)
    with pytest.raises(wb.errors.RecordError, match="300 bytes; file systems allow 255"):
        wb.Trainer().run(small_workload(), out=tmp_path / ("x" * 300))
    assert list(tmp_path.iterdir()) == []


def test_one_folder_with_an_impossible_name_hides_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    wb.Trainer().run(small_workload(config={"total_steps": 4}), out=tmp_path / "good")
    shutil.copytree(tmp_path / "good", tmp_path / "bad\udcff")
    assert len(wb.list_studies(tmp_path)) == 1
    assert "can be printed" in caplog.text
