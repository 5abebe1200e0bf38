"""A ledger in a real PostgreSQL: studies are kept, a lock is waited for, and a wrong password is shown nowhere."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

import workbench as wb
from tests.helpers.postgres import Server, binaries, server
from tests.helpers.study_folders import study
from tests.helpers.workloads import small_workload
from workbench import cli
from workbench.errors import RecordError
from workbench.ledger.push import LEDGER, push, rebuild

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(binaries() is None, reason="PostgreSQL is not installed: apt-get install postgresql"),
    pytest.mark.skipif(find_spec("psycopg") is None, reason="no driver: pip install 'training-workbench[ledger]'"),
]


@pytest.fixture(scope="module")
def database() -> Iterator[Server]:
    with server() as running:
        yield running


def test_studies_are_kept_and_a_lock_is_waited_for(
    database: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import psycopg

    monkeypatch.setenv("WORKBENCH_LEDGER", database.url())
    record = wb.Trainer().run(small_workload(), out=tmp_path / "trained", note="over the wire")
    study(tmp_path / "one")
    assert not (tmp_path / LEDGER).exists()
    table = wb.list_studies(ledger=database.url(), extra=["failed"]).set_index("study")
    assert (table.loc["trained", "best_value"], table.loc["trained", "note"]) == (record.best().value, "over the wire")
    assert (table.loc["one", "trials"], table.loc["one", "failed"]) == (6, 1)
    push(tmp_path / "one")
    assert rebuild(tmp_path) == 2
    assert len(wb.list_studies(ledger="")) == 2, "pushed again and again, and still one row a study"
    assert cli.main(["studies", str(tmp_path), "--ledger"]) == 0
    assert "over the wire" in capsys.readouterr().out
    with psycopg.connect(database.url()) as other:
        other.execute("LOCK TABLE studies, study_user_attributes IN ACCESS EXCLUSIVE MODE")
        with pytest.raises(RecordError, match="is locked by another session of the database; waited 2 s"):
            push(tmp_path / "one", wait_s=2.0)
    push(tmp_path / "one", wait_s=2.0)


def test_a_wrong_password_is_in_no_message_record_or_report(
    database: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    wrong = "hunter2-wrong"
    monkeypatch.setenv("WORKBENCH_LEDGER", database.url(wrong))
    monkeypatch.setattr("workbench.record.repro.git_state", lambda _: (None, b""))
    with caplog.at_level(logging.DEBUG):
        wb.Trainer().run(small_workload(), out=tmp_path / "one")
    with pytest.raises(RecordError, match=r"//\*\*\*@127\.0\.0\.1.*password authentication failed") as caught:
        push(tmp_path / "one")
    shown: BaseException | None = caught.value
    while shown is not None:  # everything that a traceback would print
        assert wrong not in str(shown)
        shown = shown.__cause__ or (None if shown.__suppress_context__ else shown.__context__)
    assert cli.main(["report", str(tmp_path / "one")]) == 0
    said = capsys.readouterr()
    assert all(wrong not in text for text in (said.out, said.err, caplog.text))
    assert not any(wrong.encode() in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
