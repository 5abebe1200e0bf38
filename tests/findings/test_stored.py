"""What is written to diagnosis.json is what is read back."""

from __future__ import annotations

from pathlib import Path

import pytest

from workbench.errors import RecordError
from workbench.findings.diagnosis import Diagnosis, read_diagnosis
from workbench.findings.finding import Finding
from workbench.record.json_values import dumps

FINDING = Finding(
    code="lr.unstable",
    status="warn",
    summary="s",
    value=float("inf"),
    unit="lr",
    threshold=float("-inf"),
    step=3,
    clause="F1.4",
    evidence={"bracket": [0.1, 0.2]},
    advice=("first", "second"),
)
PLAIN = Finding(code="lr.best", status="ok", summary="t", value=0.1)


def written(folder: Path) -> Diagnosis:
    diagnosis = Diagnosis(
        findings=(FINDING, PLAIN),
        workload="w",
        command="workbench diagnose w",
        cost={"steps": 5},
        recommendation={"config": {"peak_lr": 0.1}, "changed": []},
        path=folder,
    )
    (folder / "diagnosis.json").write_text(dumps(diagnosis.to_dict()))
    return diagnosis


def test_round_trip(tmp_path: Path) -> None:
    diagnosis = written(tmp_path)
    assert read_diagnosis(tmp_path) == diagnosis
    assert read_diagnosis(tmp_path / "diagnosis.json") == diagnosis


@pytest.mark.parametrize("damage", ["", "[]", "{", '{"findings": [{"code": 1}]}', "\x00"])
def test_a_damaged_file_says_what_to_do(damage: str, tmp_path: Path) -> None:
    (tmp_path / "diagnosis.json").write_text(damage)
    with pytest.raises(RecordError, match="diagnose the study again"):
        read_diagnosis(tmp_path)
