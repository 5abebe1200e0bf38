"""A ledger that somebody else holds is waited for and named; no message ever holds a password."""

from __future__ import annotations

import logging
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.workloads import small_workload
from tests.test_ledger import study
from tests.test_record_writer import CONFIG, opened
from workbench import cli
from workbench.errors import RecordError, UsageError
from workbench.record.json_values import scrub
from workbench.record.ledger.index import LEDGER, index, list_studies, rebuild
from workbench.record.ledger.storage import lock_holders, shared_url
from workbench.train.trainer import Trainer

SECRET = "s3cret/word"


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("postgresql://me:pw@host/db", "postgresql://me:***@host/db"),
        ("postgresql+psycopg://me:a/b:c@host:5432/db?x=1", "postgresql+psycopg://me:***@host:5432/db?x=1"),
        ("mysql://root:%40pw@h/d", "mysql://root:***@h/d"),
        ("postgresql://host/db?user=me&password=pw&x=1", "postgresql://host/db?user=me&password=***&x=1"),
        ("train.py --ledger postgresql://me:pw@host/db --lr 1", "train.py --ledger postgresql://me:***@host/db --lr 1"),
        ("PGPASSWORD=pw python train.py", "PGPASSWORD=*** python train.py"),
        ("https://me:token@host/x", "https://me:***@host/x"),
        ("postgresql://me:pa@ss@host/db", "postgresql://me:***@host/db"),
        ("mysql://me:p@a/b@host:5432/db", "mysql://me:***@host:5432/db"),
        ("python x.py 'postgresql://me:two words@host/db' --lr 1", "python x.py 'postgresql://me:***@host/db' --lr 1"),
        ("https://me:to@ken@host/x", "https://me:***@host/x"),
        ("PGPASSWORD='two words' python train.py", "PGPASSWORD=*** python train.py"),
        (
            "DB_PASSWORD=pw python train.py --db-password pw --lr 1",
            "DB_PASSWORD=*** python train.py --db-password *** --lr 1",
        ),
        ("host=h password = pw user=me", "host=h password = *** user=me"),
        ("train.py --password --lr 1", "train.py --password --lr 1"),
        ("postgresql://me@host:5432/db", "postgresql://me@host:5432/db"),
        ("https://host:8080/x@v1", "https://host:8080/x@v1"),
        ("pip install git+https://host/x@v1", "pip install git+https://host/x@v1"),
        ("workbench diagnose file.py:name", "workbench diagnose file.py:name"),
    ],
)
def test_passwords_are_scrubbed_and_nothing_else(given: str, shown: str) -> None:
    assert scrub(given) == shown


def test_a_command_with_a_password_is_stored_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "workbench.record.repro.git_state", lambda _: (None, b"")
    )  # this file is part of a dirty tree's patch
    opened(tmp_path / "one", config=CONFIG, command=f"python x.py --db postgresql://u:{SECRET}@h/d").close()
    for path in (tmp_path / "one").rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes()
    assert "u:***@h" in list_studies(tmp_path)["reproduce"].iloc[0]


@pytest.mark.parametrize("given", [f"postgresql:/u:{SECRET}@h", "not an address", f"://u:{SECRET}@h", "runs/ledger.db"])
def test_what_is_no_address_is_refused(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("WORKBENCH_LEDGER", given)
    with pytest.raises(UsageError, match=r"WORKBENCH_LEDGER=.* is no address of a database\. Write postgresql://"):
        shared_url()


@pytest.mark.parametrize(
    "given", ["postgresql://me:pa@ss@h:1/d", "postgresql://m:p@ss/word@h/d", "postgresql://me@h:1/d?password=pa@ss"]
)
def test_a_password_with_a_sign_that_ends_it_is_refused_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    """SQLAlchemy would take what is behind the first @ for the server's name, and name it in its error."""
    monkeypatch.setenv("WORKBENCH_LEDGER", given)
    with pytest.raises(UsageError, match=r"has an @ too many: .* as %40") as caught:
        shared_url()
    assert "ss" not in str(caught.value).replace("PGPASSWORD", "").replace("password", "").replace(".pgpass", "")
    assert shared_url("postgresql://me%40corp:p%40ss@h/d") == "postgresql+psycopg://me%40corp:p%40ss@h/d"
    assert str(shared_url("sqlite:////a@b/c@d.db")).startswith("sqlite:////a"), "a file has no password"


@pytest.mark.parametrize("word", ["sec ret", "s3cret#1", "sec%20ret", "s%C3%A9cret", "abc"])
def test_a_password_in_any_form_is_in_no_message(tmp_path: Path, word: str) -> None:
    plain = urllib.parse.unquote(word)
    with pytest.raises(RecordError, match=r"cannot use the ledger .*:\*\*\*@127\.0\.0\.1") as caught:
        list_studies(tmp_path, ledger=f"postgresql://me:{word}@127.0.0.1:1/none")
    for form in {word, plain, urllib.parse.quote(plain), urllib.parse.quote_plus(plain)}:
        assert form not in str(caught.value)


def test_an_address_that_is_none_is_refused_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WORKBENCH_LEDGER", "runs/ledger.db")
    with pytest.raises(UsageError, match="is no address of a database"):
        Trainer().run(small_workload(), out=tmp_path / "one")
    assert not (tmp_path / "one").exists()
    monkeypatch.delenv("WORKBENCH_LEDGER")
    writer = opened(tmp_path / "one", config=CONFIG)
    monkeypatch.setenv("WORKBENCH_LEDGER", "changed meanwhile")
    writer.close()
    assert "is no address of a database" in caplog.text


@pytest.mark.parametrize("given", [f"mysql://u:{SECRET}@h/d", f"oracle://u:{SECRET}@h/d"])
def test_another_database_is_refused_by_its_name(given: str) -> None:
    with pytest.raises(UsageError, match=r"an address of '(mysql|oracle)', .*PostgreSQL") as caught:
        shared_url(given)
    assert SECRET not in str(caught.value)


def test_a_message_ends_where_its_link_to_a_class_of_errors_begins(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="cannot use the ledger") as caught:
        list_studies(tmp_path, ledger="postgresql://me@127.0.0.1:1/none")
    assert "sqlalche.me" not in str(caught.value)
    assert "Background" not in str(caught.value)


def test_a_shared_ledger_without_an_address_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It listed the ledger of the folder here, as if that were the shared one."""
    monkeypatch.delenv("WORKBENCH_LEDGER", raising=False)
    study(tmp_path / "one")
    with pytest.raises(UsageError, match="WORKBENCH_LEDGER is not set"):
        list_studies(tmp_path, ledger="")


def test_an_argument_comes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORKBENCH_LEDGER", raising=False)
    assert shared_url() is None
    monkeypatch.setenv("WORKBENCH_LEDGER", "sqlite:////a.db")
    assert shared_url() == "sqlite:////a.db"
    assert shared_url("postgresql://u:p@h/d") == "postgresql+psycopg://u:p@h/d"


def test_a_shared_ledger_lists_the_studies_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two machines, each with its own folder and a study of the same name, over one database."""
    url = f"sqlite:///{tmp_path / 'shared.db'}"
    monkeypatch.setenv("WORKBENCH_LEDGER", url)
    study(tmp_path / "here" / "one")
    monkeypatch.setattr("workbench.record.ledger.index.socket.gethostname", lambda: "other")
    times = iter(["2030-01-01T00:00:00+00:00"] * 9)

    class Later:
        @staticmethod
        def now(_: object) -> object:
            class Said:
                def isoformat(self, **__: str) -> str:
                    return next(times)

            return Said()

    monkeypatch.setattr("workbench.record.write.datetime", Later)
    study(tmp_path / "there" / "one", mode="max")
    table = list_studies(ledger=url, extra=["failed"])
    assert table["study"].tolist() == ["one", "one"]
    assert sorted(table["best_value"]) == [0.25, 0.9]
    assert [link.partition(":")[0] for link in table["config"]].count("other") == 1
    assert list_studies(ledger="").equals(list_studies(ledger=url)), "the environment's"
    assert not (tmp_path / "here" / LEDGER).exists()


HOLDS = """
import sqlite3, sys, time
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN IMMEDIATE")
print("held", flush=True)
time.sleep(float(sys.argv[2]))
connection.execute("COMMIT")
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the ledger of a folder with one study."""
    study(tmp_path / "one")
    words = [sys.executable, "-c", HOLDS, str(tmp_path / LEDGER), "60"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="only Linux tells who holds a lock")
def test_a_locked_ledger_is_waited_for_and_its_holder_named(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    began = time.perf_counter()
    with pytest.raises(
        RecordError, match=rf"is locked by process {holder.pid} \(.*python.*\) on .*; waited 1 s for it"
    ) as caught:
        index(tmp_path / "one", wait_s=1.0)
    assert time.perf_counter() - began > 0.9
    assert "The study in" in str(caught.value)
    assert "is whole" in str(caught.value)
    assert len(list_studies(tmp_path)) == 1, "the table needs no ledger"


def test_a_ledger_that_somebody_writes_is_not_replaced_under_his_hands(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    before = (tmp_path / LEDGER).stat().st_ino
    with pytest.raises(RecordError, match=rf"is locked by process {holder.pid} .*; waited 0.2 s for it"):
        rebuild(tmp_path, wait_s=0.2)
    assert (tmp_path / LEDGER).stat().st_ino == before
    holder.kill()
    holder.wait()
    assert rebuild(tmp_path, wait_s=0.2) == 1


def test_a_study_that_ends_meanwhile_is_kept(
    tmp_path: Path, holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("workbench.record.ledger.storage.WAIT_S", 0.3)
    with caplog.at_level(logging.WARNING):
        study(tmp_path / "two")
    assert "is locked by" in caplog.text
    assert list_studies(tmp_path)["study"].tolist() == ["one", "two"]


def test_a_lock_that_is_given_back_in_time_is_only_waited_for(tmp_path: Path) -> None:
    study(tmp_path / "one")
    connection = sqlite3.connect(tmp_path / LEDGER, isolation_level=None, check_same_thread=False)
    connection.execute("BEGIN IMMEDIATE")
    timer = threading.Timer(0.7, lambda: connection.execute("COMMIT"))
    timer.start()
    began = time.monotonic()
    index(tmp_path / "one", wait_s=30.0)
    assert time.monotonic() - began >= 0.5, "it waited for the lock"
    timer.join()
    connection.close()


def test_nobody_holds_what_is_not_there(tmp_path: Path) -> None:
    assert "cannot be seen from here" in lock_holders(tmp_path / "nothing.db")


def test_a_server_out_of_reach_is_told_without_the_password(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = f"postgresql://me:{SECRET.replace('/', '%2F')}@127.0.0.1:1/none"
    monkeypatch.setenv("WORKBENCH_LEDGER", url)
    monkeypatch.setattr("workbench.record.ledger.storage.WAIT_S", 1.0)
    monkeypatch.setattr("time.sleep", lambda _: None)
    study(tmp_path / "one")
    assert "cannot use the ledger postgresql+psycopg://me:***@127.0.0.1:1/none" in caplog.text
    assert cli.main(["studies", str(tmp_path), "--ledger"]) == 1
    said = capsys.readouterr()
    assert "cannot use the ledger" in said.err
    for text in (caplog.text, said.out, said.err):
        assert SECRET not in text
        assert "s3cret" not in text
