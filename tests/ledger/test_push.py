"""A ledger that studies are pushed to: what Optuna reads in it, who holds it, and that no message has a password."""

from __future__ import annotations

import contextlib
import math
import sqlite3
import subprocess
import sys
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import optuna
import pytest
from sqlalchemy import make_url

import workbench as wb
from tests.helpers.study_folders import PLAIN, edited, opened, study, write_study
from tests.helpers.workloads import small_workload
from workbench import cli
from workbench.errors import RecordError, UsageError
from workbench.ledger.push import LEDGER, push, rebuild, shared_url
from workbench.train.hooks import Hook, Step

SECRET = "s3cret/word"


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of a ledger beside the studies, configured."""
    monkeypatch.setenv("WORKBENCH_LEDGER", address := f"sqlite:///{tmp_path / LEDGER}")
    return address


def stored(root: Path) -> dict[str, list[tuple[Any, ...]]]:
    """Everything that the ledger holds but ids and times."""
    storage, found = f"sqlite:///{root / LEDGER}", {}
    for name in optuna.get_all_study_names(storage):
        loaded = optuna.load_study(study_name=name, storage=storage)
        rows = [(t.state.name, t.value, t.params, t.user_attrs) for t in loaded.get_trials()]
        found[name] = [(loaded.direction.name,), *rows]
    return found


def test_optuna_loads_what_was_pushed(tmp_path: Path, beside: str) -> None:
    study(tmp_path / "one")
    loaded = optuna.load_study(study_name="one", storage=beside)
    assert (loaded.best_value, loaded.best_params) == (0.25, {"peak_lr": pytest.approx(0.2)})
    assert [t.state.name for t in loaded.trials] == ["COMPLETE", "COMPLETE", "FAIL", "FAIL", "FAIL"]
    assert loaded.best_trial.user_attrs["row"]["batch_size"] == PLAIN["batch_size"]
    assert (
        wb.list_studies(ledger=beside).drop(columns="config").equals(wb.list_studies(tmp_path).drop(columns="config"))
    )


def test_pushing_again_and_rebuilding_give_what_was_there(tmp_path: Path) -> None:
    study(tmp_path / "one")
    study(tmp_path / "two", mode="max", values=(math.nan,))
    assert not (tmp_path / LEDGER).exists(), "no address, no ledger"
    assert cli.main(["studies", str(tmp_path), "--rebuild"]) == 0
    before = stored(tmp_path)
    assert [rows[0] for rows in before.values()] == [("MINIMIZE",), ("MAXIMIZE",)]
    push(tmp_path / "one")
    assert stored(tmp_path) == before
    assert rebuild(tmp_path) == 2
    assert stored(tmp_path) == before
    (tmp_path / LEDGER).write_bytes(b"this is no database" * 100)
    assert rebuild(tmp_path) == 2
    assert stored(tmp_path) == before
    study(tmp_path / "three")
    assert list(stored(tmp_path)) == ["one", "two", "three"], "a ledger.db that is there is kept up to date"


def test_a_failed_trial_that_is_trained_again_is_entered_anew(tmp_path: Path, beside: str) -> None:
    class Breaks(Hook):
        def on_step(self, step: Step) -> None:
            if step.index == 5:
                raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        wb.Trainer(hooks=[Breaks()]).run(small_workload(), out=tmp_path / "one")
    assert [row[0] for row in stored(tmp_path)["one"]] == ["MINIMIZE", "FAIL"]
    record = wb.Trainer().run(small_workload(), out=tmp_path / "one")
    _, row = stored(tmp_path)["one"]
    assert row[:2] == ("COMPLETE", record.best().value)


def test_a_note_reaches_the_ledger_and_a_ledger_that_cannot_be_written_is_a_warning(
    tmp_path: Path, beside: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_study(tmp_path / "one", note="before")
    wb.set_note(tmp_path / "one", "after")  # entered, though nobody had pushed it
    wb.set_note(tmp_path / "one", "later")
    assert wb.list_studies(ledger=beside)["note"].tolist() == ["later"]
    monkeypatch.setattr("time.sleep", lambda _: None)
    (tmp_path / LEDGER).write_bytes(b"this is no database" * 100)
    record = wb.Trainer().run(small_workload(), out=tmp_path / "two")
    assert record.state == "complete"
    assert "is whole; make the ledger again with: workbench studies" in caplog.text
    assert wb.set_note(tmp_path / "one", "last") == "last"
    assert len(wb.list_studies(tmp_path)) == 2, "the table is read from the folders"
    with pytest.raises(RecordError, match="cannot write the ledger"):
        push(tmp_path / "two")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (f"postgresql:/u:{SECRET}@h", r"is not an address of a database\. Write postgresql://"),
        (f"://u:{SECRET}@h", "is not an address of a database"),
        ("runs/ledger.db", "is not an address of a database"),
        (f"mysql://u:{SECRET}@h/d", "an address of 'mysql', .*PostgreSQL"),
        # SQLAlchemy would take what is behind the first @ for the server's name, and name it in its error.
        (f"postgresql://me:pa@{SECRET}@h:1/d", r"has one @ too many: .* as %40"),
        (f"postgresql://me@h:1/d?password=pa@{SECRET}", r"has one @ too many: .* as %40"),
    ],
)
def test_what_is_no_address_is_refused_without_its_password(
    monkeypatch: pytest.MonkeyPatch, given: str, said: str
) -> None:
    monkeypatch.setenv("WORKBENCH_LEDGER", given)
    with pytest.raises(UsageError, match=rf"WORKBENCH_LEDGER=.*{said}") as caught:
        shared_url()
    assert SECRET not in str(caught.value)
    assert shared_url("postgresql://me%40corp:p%40ss@h/d") == "postgresql+psycopg://me%40corp:p%40ss@h/d"
    assert make_url(str(shared_url("sqlite:////a@b/c@d.db"))).database == "/a@b/c@d.db", "a file has no password"


@pytest.mark.parametrize("word", ["sec ret", "s3cret#1", "sec%20ret", "s%C3%A9cret", "abc"])
def test_a_password_in_any_form_is_in_no_message(tmp_path: Path, word: str) -> None:
    plain = urllib.parse.unquote(word)
    with pytest.raises(RecordError, match=r"cannot use the ledger .*//\*\*\*@127\.0\.0\.1") as caught:
        wb.list_studies(tmp_path, ledger=f"postgresql://me:{word}@127.0.0.1:1/none")
    for form in (word, plain, urllib.parse.quote(plain), urllib.parse.quote_plus(plain), "sqlalche.me", "Background"):
        assert form not in str(caught.value)


def test_a_command_with_a_password_is_stored_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.record.repro.git_state", lambda _: (None, b""))  # this file may be part of a patch
    opened(tmp_path / "one", command=f"python x.py --db postgresql://u:{SECRET}@h/d").close()
    assert not any(SECRET.encode() in path.read_bytes() for path in (tmp_path / "one").rglob("*") if path.is_file())
    assert "//***@h" in wb.list_studies(tmp_path)["reproduce"].iloc[0]


def test_a_shared_ledger_lists_the_studies_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two machines, each with its own folder and a study of the same name, over one database."""
    url = f"sqlite:///{tmp_path / 'shared.db'}"
    monkeypatch.setenv("WORKBENCH_LEDGER", url)
    study(tmp_path / "here" / "one")
    monkeypatch.setattr("workbench.ledger.push.socket.gethostname", lambda: "other")
    monkeypatch.delenv("WORKBENCH_LEDGER")
    there = study(tmp_path / "there" / "one", mode="max")
    edited(there, created="2030-01-01T00:00:00+00:00")
    push(there, url)
    table = wb.list_studies(ledger=url, extra=["failed"])
    assert table["study"].tolist() == ["one", "one"]
    assert table["best_value"].tolist()[-1] == 0.9
    assert [link.partition(":")[0] for link in table["config"]].count("other") == 1
    assert set(optuna.get_all_study_names(url)) == {"one", "one (2030-01-01T00:00:00+00:00)"}


def test_processes_may_push_at_once(tmp_path: Path, beside: str) -> None:
    code = (
        "import sys; from pathlib import Path; from tests.helpers.study_folders import study; study(Path(sys.argv[1]))"
    )
    words = [sys.executable, "-W", "error::UserWarning", "-c", code]
    root = Path(__file__).parents[2]
    ran = [subprocess.Popen([*words, str(tmp_path / f"s{i}")], stderr=subprocess.PIPE, cwd=root) for i in range(3)]
    said = [process.communicate(timeout=120)[1].decode() for process in ran]
    assert [process.returncode for process in ran] == [0, 0, 0], said
    assert {name: len(rows) for name, rows in stored(tmp_path).items()} == {"s0": 6, "s1": 6, "s2": 6}, said


def test_a_locked_ledger_is_waited_for_and_not_replaced(tmp_path: Path) -> None:
    push(study(tmp_path / "one"))
    before = (tmp_path / LEDGER).stat().st_ino
    with contextlib.closing(sqlite3.connect(tmp_path / LEDGER, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(RecordError, match=r"is locked by another process; waited 0.5 s for it. The study in .* is"):
            push(tmp_path / "one", wait_s=0.5)
        with pytest.raises(RecordError, match=r"is locked by another process; waited 0.2 s"):
            rebuild(tmp_path, wait_s=0.2)
        assert (tmp_path / LEDGER).stat().st_ino == before
        other.execute("ROLLBACK")
    assert rebuild(tmp_path, wait_s=5.0) == 1
