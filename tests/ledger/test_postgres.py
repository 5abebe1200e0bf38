"""Studies copied to a real PostgreSQL, and a wrong password."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import optuna
import pytest

from tests.helpers.postgres import binaries, server
from tests.helpers.study_folders import study
from workbench import cli

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(binaries() is None, reason="PostgreSQL is not installed: apt-get install postgresql"),
    pytest.mark.skipif(find_spec("psycopg") is None, reason="no driver: pip install 'training-workbench[ledger]'"),
]


def test_studies_are_copied_and_a_wrong_password_is_shown_nowhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study(tmp_path / "one")
    with server() as database:
        for _ in range(2):
            assert cli.main(["studies", str(tmp_path), "--push", database.url()]) == 0
        storage = optuna.storages.RDBStorage(database.url().replace("postgresql://", "postgresql+psycopg://"))
        assert optuna.get_all_study_names(storage) == ["one"]
        assert optuna.load_study(study_name="one", storage=storage).best_value == 0.25
        storage.remove_session()
        storage.engine.dispose()
        capsys.readouterr()
        assert cli.main(["studies", str(tmp_path), "--push", database.url("hunter2-wrong")]) == 1
    said = capsys.readouterr()
    assert "password" in said.err
    assert "hunter2" not in said.err + said.out
