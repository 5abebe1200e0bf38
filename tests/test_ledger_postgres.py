"""One ledger for several machines, in a real PostgreSQL that the test starts itself; Optuna's dashboard reads it as well."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import optuna
import pytest

from tests.helpers.postgres import Server, binaries, server
from tests.helpers.workloads import small_workload
from tests.test_ledger import study
from workbench import cli
from workbench.errors import RecordError
from workbench.record.ledger.index import LEDGER, index, list_studies, rebuild
from workbench.train.trainer import Trainer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(binaries() is None, reason="PostgreSQL is not installed: apt-get install postgresql"),
    pytest.mark.skipif(find_spec("psycopg") is None, reason="no driver: pip install 'workbench[postgres]'"),
]


@pytest.fixture(scope="module")
def database() -> Iterator[Server]:
    with server() as running:
        yield running


def test_studies_are_kept_in_the_database_and_listed_from_it(
    database: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORKBENCH_LEDGER", database.url())
    record = Trainer().run(small_workload(), out=tmp_path / "trained", note="over the wire")
    study(tmp_path / "one")
    assert not (tmp_path / LEDGER).exists()
    table = list_studies(ledger=database.url(), extra=["failed"]).set_index("study")
    assert table.loc["trained", "best_value"] == record.best().value
    assert table.loc["trained", "note"] == "over the wire"
    assert (table.loc["one", "trials"], table.loc["one", "failed"]) == (6, 2)
    assert table.loc["one", "config"] == f"{socket.gethostname()}:{(tmp_path / 'one' / 'config.json').resolve()}"
    index(tmp_path / "one")
    assert rebuild(tmp_path) == 2
    assert len(list_studies(ledger="")) == 2, "again and again, and still one row a study"
    assert cli.main(["studies", str(tmp_path), "--ledger"]) == 0
    assert "over the wire" in capsys.readouterr().out
    url = database.url().replace("postgresql://", "postgresql+psycopg://")
    storage = optuna.storages.RDBStorage(url)
    assert optuna.load_study(study_name="one", storage=storage).best_value == 0.25
    storage.remove_session()
    storage.engine.dispose()


def test_a_wrong_password_is_in_no_message_record_or_report(
    database: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    wrong = "hunter2-wrong"
    monkeypatch.setenv("WORKBENCH_LEDGER", database.url(wrong))
    monkeypatch.setattr("workbench.record.repro.git_state", lambda _: (None, b""))
    monkeypatch.setattr("time.sleep", lambda _: None)
    with caplog.at_level(logging.DEBUG):
        record = Trainer().run(small_workload(), out=tmp_path / "one")
    assert record.state == "complete", "training does not depend on the ledger"
    with pytest.raises(RecordError, match=r"bench:\*\*\*@127\.0\.0\.1.*password authentication failed") as caught:
        index(tmp_path / "one")
    shown: BaseException | None = caught.value
    while shown is not None:  # everything that a traceback would print
        assert wrong not in str(shown)
        shown = shown.__cause__ or (None if shown.__suppress_context__ else shown.__context__)
    assert cli.main(["studies", str(tmp_path), "--ledger"]) == 1
    assert cli.main(["report", str(tmp_path / "one")]) == 0
    said = capsys.readouterr()
    assert "password authentication failed" in said.err
    assert all(wrong not in text for text in (said.out, said.err, caplog.text))
    assert (tmp_path / "one" / "report.html").exists()
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or wrong.encode() not in path.read_bytes(), path


def test_a_table_that_another_session_locks_is_waited_for(
    database: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import psycopg

    monkeypatch.setenv("WORKBENCH_LEDGER", database.url())
    study(tmp_path / "locked")
    with psycopg.connect(database.url()) as other:
        other.execute("LOCK TABLE studies, study_user_attributes IN ACCESS EXCLUSIVE MODE")
        with pytest.raises(RecordError, match="is locked by another session of the database; waited 2 s"):
            index(tmp_path / "locked", wait_s=2.0)
    index(tmp_path / "locked", wait_s=2.0)


def _answer(url: str, *, within_s: float = 60.0) -> Any:
    until = time.monotonic() + within_s
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5) as reply:
                return json.load(reply)
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)


@pytest.mark.skipif(find_spec("optuna_dashboard") is None, reason="pip install 'workbench[dashboard]'")
@pytest.mark.parametrize("where", ["file", "database"])
def test_optunas_dashboard_lists_the_studies(
    database: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    url = f"sqlite:///{tmp_path / LEDGER}"
    if where == "database":
        monkeypatch.setenv("WORKBENCH_LEDGER", database.url())
        url = database.url().replace("postgresql://", "postgresql+psycopg://")
    study(tmp_path / f"seen-{where}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = "import sys; from optuna_dashboard._cli import main; main()"
    words = [sys.executable, "-c", program, url, "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        found = _answer(f"http://127.0.0.1:{port}/api/studies")
        names = {one["study_name"]: one["study_id"] for one in found["study_summaries"]}
        assert f"seen-{where}" in names
        detail = _answer(f"http://127.0.0.1:{port}/api/studies/{names[f'seen-{where}']}?after=0")
        assert len(detail["trials"]) == 5
    finally:
        process.terminate()
        process.wait(timeout=30)
