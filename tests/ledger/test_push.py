"""Studies copied to a database: what Optuna reads in it, again and again, and that no message has a password."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import optuna
import pytest

from tests.helpers.study_folders import PLAIN, edited, study, write_study
from workbench import cli
from workbench.errors import RecordError, UsageError
from workbench.ledger.push import push_studies
from workbench.record.folder import read_json

SECRET = "s3cret/word"


def stored(address: str) -> dict[str, list[tuple[Any, ...]]]:
    """Everything that the database holds but ids and times."""
    found = {}
    for name in optuna.get_all_study_names(address):
        loaded = optuna.load_study(study_name=name, storage=address)
        rows = [(t.state.name, t.value, t.params, t.user_attrs) for t in loaded.get_trials()]
        found[name] = [(loaded.direction.name, loaded.user_attrs["row"]["note"]), *rows]
    return found


def test_optuna_loads_what_was_pushed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    address = f"sqlite:///{tmp_path / 'studies.db'}"
    study(tmp_path / "one")
    study(tmp_path / "two", mode="max", values=(math.nan,))
    assert cli.main(["studies", str(tmp_path), "--push", address]) == 0
    assert "2 studies are in the database." in capsys.readouterr().out
    loaded = optuna.load_study(study_name="one", storage=address)
    assert (loaded.best_value, loaded.best_params) == (0.25, {"peak_lr": pytest.approx(0.2)})
    assert [t.state.name for t in loaded.trials] == ["COMPLETE", "COMPLETE", "FAIL", "FAIL", "FAIL"]
    assert loaded.best_trial.user_attrs["row"]["batch_size"] == PLAIN["batch_size"]
    before = stored(address)
    assert [rows[0] for rows in before.values()] == [("MINIMIZE", "a note"), ("MAXIMIZE", "a note")]
    assert push_studies(address, tmp_path) == 2
    assert stored(address) == before, "pushed again, and still the same"


def test_what_has_changed_is_entered_anew_and_another_study_of_the_name_beside_it(tmp_path: Path) -> None:
    address = f"sqlite:///{tmp_path / 'studies.db'}"
    write_study(tmp_path / "here" / "one", note="before")
    push_studies(address, tmp_path / "here")
    edited(tmp_path / "here" / "one", note="after")
    push_studies(address, tmp_path / "here")
    edited(study(tmp_path / "there" / "one"), created="2030-01-01T00:00:00+00:00")
    push_studies(address, tmp_path / "there")
    assert [(name, rows[0][1]) for name, rows in stored(address).items()] == [
        ("one", "after"), ("one (2030-01-01T00:00:00+00:00)", "a note")
    ]  # fmt: skip


def test_copies_of_a_folder_stand_beside_it_and_none_takes_the_place_of_another(tmp_path: Path) -> None:
    address, root = f"sqlite:///{tmp_path / 'studies.db'}", tmp_path / "runs"
    write_study(root / "two", note="two")
    push_studies(address, root)
    for copy in ("one", "three"):  # each has the name and the time of "two"; "one" comes before it
        shutil.copytree(root / "two", root / copy)
        edited(root / copy, note=copy)
    created = read_json(root / "two" / "study.json")["created"]
    for _ in range(2):
        assert push_studies(address, root) == 3
        assert {name: rows[0][1] for name, rows in stored(address).items()} == {
            "two": "two", f"two ({created})": "one", f"two ({created}), three": "three"
        }  # fmt: skip
        if (root / "two").exists():
            shutil.move(root / "two", root / "zz")  # and keeps its entry


@pytest.mark.parametrize("given", [f"mysql://u:{SECRET}@h/d", f"postgresql:/u:{SECRET}@h", "runs/studies.db"])
def test_what_is_no_address_is_refused_without_its_password(tmp_path: Path, given: str) -> None:
    with pytest.raises(UsageError, match="begins with neither") as caught:
        push_studies(given, tmp_path)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        f"postgresql://me:{SECRET}@127.0.0.1:1/none",
        f"postgresql://me:pa@{SECRET}@127.0.0.1:1/none",
        f"postgresql://me@127.0.0.1:1/none?password={SECRET}",
    ],
)
def test_a_database_that_cannot_be_used_is_an_error_without_a_password(tmp_path: Path, given: str) -> None:
    study(tmp_path / "one")
    with pytest.raises(RecordError, match=r"could not be used \(\w+\).* run the same command again") as caught:
        push_studies(given, tmp_path)
    assert SECRET not in str(caught.value)
    assert caught.value.__suppress_context__, "nor does a traceback"
