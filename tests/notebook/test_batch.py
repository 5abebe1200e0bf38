"""Many runs of one notebook: each its copy, its study and its row; a crash stops none; the same call goes on."""

from __future__ import annotations

import csv
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from tests.helpers.notebooks import VERDICT, write_notebook
from workbench import cli
from workbench.errors import UsageError
from workbench.notebook.batch import NotebookRun, NotebookRuns, run_notebooks, write_summary
from workbench.notebook.runner import read_verdict

CRASH = 'assert status != "crash", "asked to"'
COUNT = "open('ran.txt', 'a').write(status + ' ' + out + '\\n');"


@pytest.fixture
def notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_notebook(tmp_path / "notebooks" / "03_asked.ipynb", COUNT, CRASH, VERDICT)


def rows(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((folder / "summary.csv").read_text().splitlines()))


def never(*_: Any, **__: Any) -> None:
    pytest.fail("a kernel started")


def test_a_crash_stops_none_of_the_others_and_each_run_has_its_row(notebook: Path) -> None:
    done = run_notebooks(notebook, [{"status": s} for s in ("ok", "crash", "fail")])
    assert done.folder == Path("runs/notebooks/03_asked")
    assert [(run.state, run.verdict) for run in done.runs] == [
        ("complete", "ok"),
        ("crashed", None),
        ("complete", "fail"),
    ]
    assert "AssertionError: asked to" in str(done.runs[1].error)
    assert done.verdict == "fail"
    assert [run.number for run in done.crashed] == [2]
    made = sorted(path.name for path in done.folder.iterdir())
    assert made == sorted(
        [f"00{n}.{kind}" for n in (1, 2, 3) for kind in ("ipynb", "html")] + ["summary.csv", "summary.html"]
    )
    stored = rows(done.folder)
    assert [row["status"] for row in stored] == ["ok", "crash", "fail"]
    assert [(row["verdict"], row["fail"], row["ok"], row["worst"]) for row in stored] == [
        ("ok", "0", "1", ""), ("", "0", "0", ""), ("fail", "1", "0", "lr.best")
    ]  # fmt: skip
    assert "asked to" in stored[1]["error"]
    assert read_verdict(stored[2]["notebook"])[0]["verdict"] == "fail"
    page = (done.folder / "summary.html").read_text()
    assert 'href="003.html"' in page
    assert "Run 2 crashed" in page
    shown = repr(done)
    assert "run 2 crashed" in shown
    assert "lr.best" in shown
    studies = [line.split()[1] for line in Path("ran.txt").read_text().splitlines()]
    assert studies == [f"runs/03_asked-00{n}" for n in (1, 2, 3)], "each run has a study folder of its own"
    assert [run.study for run in done.runs] == studies


def test_the_same_call_into_the_same_folder_keeps_what_is_complete(notebook: Path) -> None:
    asked = [{"status": "ok"}, {"status": "crash"}]
    run_notebooks(notebook, asked, out="mine")
    again = run_notebooks(notebook, asked, out="mine")
    assert [run.kept for run in again.runs] == [True, False], "what crashed is tried again"
    assert [run.verdict for run in again.runs] == ["ok", None]
    changed = run_notebooks(notebook, [{"status": "warn"}, *asked[1:]], out="mine")
    assert [run.kept for run in changed.runs] == [False, False], "other parameters are another run"
    write_notebook(notebook, COUNT, CRASH, VERDICT, "'one cell more'")
    assert not run_notebooks(notebook, [{"status": "warn"}], out="mine").runs[0].kept, "as is another notebook"


MEASURED = """\
import workbench as wb
from pathlib import Path
from tests.helpers.study_folders import write_study
write_study(Path(out), scale=lrs[0])
display({"application/vnd.workbench.verdict+json": {"schema": 1, "workload": "w", "verdict": "ok", "findings": [
    {"code": "lr.best", "status": "ok", "summary": "s", "value": lrs[0]}, {"code": "lr.grid_edge", "status": "ok", "summary": "s", "value": 7}]}, "text/plain": "w"}, raw=True)"""
LINKED = "# A title\n\n[next](00_next.ipynb) [glossary](../docs/glossary.md#lr) [web](https://pytorch.org) [here](#A-title) [nowhere](#x)"


def test_pages_show_what_was_set_and_measured_and_every_link_leads_somewhere(
    notebook: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    write_notebook(notebook, "from IPython.display import display", MEASURED, text=LINKED)
    write_notebook(notebook.with_name("00_next.ipynb"))
    done = run_notebooks(notebook, [{"lrs": [0.5]}, {"lrs": [2.0]}])
    assert not done.crashed, done
    stored = rows(done.folder)
    values = [wb.list_studies("runs").set_index("study").loc[f"03_asked-00{n}", "best_value"] for n in (1, 2)]
    assert [(float(row["lr.best"]), float(row["best validation/loss"])) for row in stored] == [
        (0.5, pytest.approx(values[0])),
        (2.0, pytest.approx(values[1])),
    ]
    assert "lr.grid_edge" not in stored[0], "measurements, and no other finding's value"
    assert "best validation/loss" in repr(done)
    pages = sorted(done.folder.glob("*.html"))
    assert [page.name for page in pages] == ["001.html", "002.html", "summary.html"]
    for page in pages:
        links = re.findall(r'href="([^"]+)"', page.read_text())
        assert links
        for link in links:
            web, local = link.startswith("https://"), link.startswith("#") and f'id="{link[1:]}"' in page.read_text()
            assert web or local or (page.parent / link).is_file(), f"{page.name}: {link}"
    text = pages[0].read_text()
    assert "Set for this run: lrs = [0.5]" in text
    assert "Defaults: status = " in text
    assert ">glossary<" not in text
    assert "glossary" in text, "its words stay"
    assert 'href="https://pytorch.org"' in text


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ([], "no run at all"),
        ([{}, {}], "run 2 is the same as run 1"),
        ([{"status": "ok"}, {"statsu": "ok"}], r"run 2: .*Did you mean 'status'"),
        ([{"lrs": [0.1]}, {"lrs": 0.1}], r"run 2: parameter lrs=0.1 must be of type list\[float\]"),
        ([{"out": "a"}, {"out": "a", "status": "warn"}], "study folder of an earlier run"),
    ],
)
def test_everything_is_checked_before_the_first_kernel(
    asked: list[dict[str, Any]], said: str, notebook: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("papermill.execute_notebook", never)
    with pytest.raises(UsageError, match=said):
        run_notebooks(notebook, asked)
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["-p", "status=fail", "--fail-on", "fail"], 3, "w: fail"),
        (["-p", "status=crash", "--fail-on", "warn"], 1, "stopped at"),
        (["-p", "statsu=ok"], 2, "Did you mean 'status'"),
        (["--sweep", "status=fail,crash", "--fail-on", "fail"], 1, "run 2 crashed"),
    ],
)
def test_exit_codes_of_the_command(words: list[str], code: int, said: str, notebook: Path, capsys) -> None:
    """As CI sees them: 0 ran, 1 a crash, which outranks a verdict, 2 wrong usage, 3 a verdict at or above --fail-on."""
    assert cli.main(["run", "asked", *words]) == code
    done = capsys.readouterr()
    assert said in done.out + done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize("more", [[], ["--sweep", "status=ok,warn"]])
def test_without_a_verdict_fail_on_cannot_pass(notebook: Path, more: list[str], capsys) -> None:
    write_notebook(notebook, COUNT)
    assert cli.main(["run", "asked", *more, "--fail-on", "fail"]) == 1
    assert "reached no verdict" in capsys.readouterr().err


def test_a_summary_holds_no_formula(tmp_path: Path) -> None:
    runs = [
        NotebookRun(number=n, parameters={"a": a}, state="complete", verdicts=(), seconds=1.0, kept=False, notebook=tmp_path / "n.ipynb", study=None, error=None)
        for n, a in enumerate(["=HYPERLINK(1)", "b"])
    ]  # fmt: skip
    write_summary(NotebookRuns(folder=tmp_path, title="t", runs=tuple(runs)))
    assert [row["a"] for row in rows(tmp_path)] == ["'=HYPERLINK(1)", "b"]


def test_an_interrupted_batch_is_130_and_the_same_command_goes_on(notebook: Path) -> None:
    cell = "import os, time, pathlib\npathlib.Path('begun').touch()\nif status == 'warn' and not os.path.exists('go'):\n    time.sleep(60)"
    write_notebook(notebook, COUNT, cell, VERDICT)
    command = [sys.executable, "-m", "workbench", "run", "asked", "--sweep", "status=ok,warn", "--out", "mine"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        end = time.monotonic() + 60
        while not (Path("ran.txt").exists() and "warn" in Path("ran.txt").read_text()) and time.monotonic() < end:
            time.sleep(0.05)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "--out mine resumes" in said
    assert [row["state"] for row in rows(Path("mine"))] == ["complete", "interrupted"]
    Path("go").touch()
    assert cli.main(["run", "asked", "--sweep", "status=ok,warn", "--out", "mine", "--fail-on", "fail"]) == 0
    assert [row["verdict"] for row in rows(Path("mine"))] == ["ok", "warn"]
    assert Path("ran.txt").read_text().count("ok") == 1, "what was complete did not run again"


def test_what_a_run_was_given_and_said_is_text_without_secrets_in_the_summary(tmp_path: Path) -> None:
    """A page that CI keeps for all to see: markup is escaped, and the password in an address is cut out."""
    address = "postgresql://me:hunter2@db/wb"
    given = [{"status": f"<img src=x>{address}"}, {"status": "=HYPERLINK(1)"}]
    made = [
        NotebookRun(
            number=n, parameters=row, state="crashed", verdicts=(), seconds=1.0, kept=False, notebook=tmp_path / f"00{n}.ipynb",
            study=None, error=f"no <b>way</b> to {address}",
        )
        for n, row in enumerate(given, start=1)
    ]  # fmt: skip
    runs = NotebookRuns(folder=tmp_path, title="<i>Which?</i>", runs=tuple(made))
    page = write_summary(runs).read_text()
    for shown in (page, runs._repr_html_()):
        assert "<img" not in shown
        assert "<b>" not in shown
        assert "<i>" not in shown
        assert "&lt;img src=x&gt;" in shown
        assert "no &lt;b&gt;way" in shown
    assert ",'=HYPERLINK(1)," in (tmp_path / "summary.csv").read_text(), "no spreadsheet computes it"
    for shown in (page, (tmp_path / "summary.csv").read_text(), repr(runs), str(made[0]), runs._repr_html_()):
        assert "hunter2" not in shown
        assert "db/wb" in shown
