"""The table of studies: six columns, more on request, a config link that notices a change, and names that are unique."""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.workloads import small_workload
from tests.test_ledger import study
from tests.test_record_writer import CONFIG, opened
from workbench.errors import UsageError
from workbench.record.ledger.index import COLUMNS, EXTRA, list_studies
from workbench.record.ledger.table import study_row
from workbench.record.read import StudyRecord
from workbench.train.trainer import Trainer


def test_six_columns_and_those_that_are_asked_for(tmp_path: Path) -> None:
    study(tmp_path / "one")
    assert list_studies(tmp_path).columns.tolist() == COLUMNS
    table = list_studies(tmp_path, extra=["failed", "unfinished", "best_trial", "workload"])
    assert table.columns.tolist() == [*COLUMNS, "failed", "unfinished", "best_trial", "workload"]
    row = table.iloc[0]
    assert (row["trials"], row["failed"], row["unfinished"], row["best_trial"]) == (6, 2, 1, 1)
    assert list_studies(tmp_path, extra=list(EXTRA)).shape == (1, 6 + len(EXTRA))


def test_an_unknown_column_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no further column 'fialed'.*failed") as caught:
        list_studies(tmp_path, extra=["fialed"])
    assert str(caught.value).count("config_sha256") == 1, "what is allowed is listed once"


def test_the_table_agrees_with_the_record(tmp_path: Path) -> None:
    """Two readers of the same folder: the fast one of the table, and the frames of the record."""
    for mode in ("min", "max"):
        study(tmp_path / mode, mode=mode, values=(0.5, 0.25, math.nan, 0.75))
        row, trials = study_row(tmp_path / mode), StudyRecord(tmp_path / mode).trials
        assert row["trials"] == len(trials)
        values = trials["best_value"]
        assert row["best_value"] == (values.min() if mode == "min" else values.max())
        assert row["best_trial"] == StudyRecord(tmp_path / mode).best().number
        assert row["failed"] == trials["state"].isin(["failed", "diverged"]).sum()


def test_the_best_value_is_that_of_the_selected_checkpoint(tmp_path: Path) -> None:
    record = Trainer().run(small_workload(), out=tmp_path / "one")
    row = study_row(tmp_path / "one")
    assert (row["best_step"], row["best_value"]) == record.best()[:2]


def test_the_config_link_is_checked_by_its_hash(tmp_path: Path) -> None:
    study(tmp_path / "one")
    (row,) = list_studies(tmp_path, extra=["config_sha256"]).to_dict("records")
    path = Path(row["config"])
    assert hashlib.sha256(path.read_bytes()).hexdigest() == row["config_sha256"]
    stored = json.loads(path.read_text())
    assert stored["config"]["batch_size"] == CONFIG["batch_size"]
    path.write_text(json.dumps(stored | {"workload": "another"}))
    (changed,) = list_studies(tmp_path)["config"]
    assert changed.startswith(f"{path} (changed: was {row['config_sha256'][:12]}, is ")
    path.unlink()
    assert list_studies(tmp_path)["config"].tolist() == [f"{path} (missing)"]


def test_a_study_of_before_has_no_hash_and_links_to_what_it_has(tmp_path: Path) -> None:
    study(tmp_path / "one")
    path = tmp_path / "one" / "study.json"
    stored = json.loads(path.read_text())
    del stored["config_sha256"]
    path.write_text(json.dumps(stored))
    assert list_studies(tmp_path)["config"].tolist() == [str(path)]


def test_a_line_cut_off_by_a_crash_is_left_out(tmp_path: Path) -> None:
    study(tmp_path / "one", values=(0.5,))
    events = tmp_path / "one" / "trials" / "0" / "events.jsonl"
    events.write_bytes(events.read_bytes() + b'{"event": "ended", "best_value": 0.0')
    assert list_studies(tmp_path)["best_value"].tolist() == [0.5]


def test_two_studies_side_by_side_cannot_have_one_name(tmp_path: Path) -> None:
    opened(tmp_path / "one", config=CONFIG, name="sweep").close()
    with pytest.raises(
        UsageError, match=r"name='sweep' is that of the study in .*one already.*change \"name\" in .*study.json"
    ):
        opened(tmp_path / "two", config=CONFIG, name="sweep")
    assert not (tmp_path / "two" / "study.json").exists()
    opened(tmp_path / "one", config=CONFIG, name="sweep").close()


@pytest.mark.parametrize("note", ["", "  ", "\n"])
def test_an_empty_note_is_refused(tmp_path: Path, note: str) -> None:
    with pytest.raises(UsageError, match=r"note='' is empty"):
        opened(tmp_path / "one", config=CONFIG, note=note)
    assert list_studies(tmp_path).empty


def test_a_crash_leaves_its_row(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\nsys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\nfrom tests.test_ledger_table import CONFIG, opened\n"
        "writer = opened(Path(sys.argv[2]), config=CONFIG, note='to be killed')\n"
        "writer.trial(CONFIG, stage='trial', train_examples=3)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    words = [sys.executable, "-c", code, str(Path(__file__).parents[1]), str(tmp_path / "killed")]
    assert subprocess.run(words, check=False, timeout=120).returncode == -signal.SIGKILL
    (row,) = list_studies(tmp_path, extra=["unfinished"]).to_dict("records")
    assert (row["study"], row["note"], row["trials"], row["unfinished"]) == ("killed", "to be killed", 1, 1)
    assert math.isnan(row["best_value"])
    assert os.path.isfile(row["config"])
