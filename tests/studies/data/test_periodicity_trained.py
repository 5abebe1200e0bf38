"""The two bugs of P2.9, planted in the digits and trained: validation shows them, the clean run is silent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from tests.helpers.records import MemoryRecord
from tests.helpers.streams import digits_streams
from workbench.findings.diagnosis import Finding


def trained(kind: str, folder: Path, *, audit: bool = True, **changes: Any) -> Finding:
    """Train 600 steps of plain SGD, evaluate every fourth, and judge with what an audit of the data found."""
    workload = digits_streams()[kind]
    settings = {
        "optimizer": "sgd",
        "peak_lr": 0.02,
        "total_steps": 600,
        "eval_every_steps": 4,
        "checkpoint_every_steps": 600,
    }
    config = workload.config.replace(**(settings | changes))
    made = wb.Trainer(device="cpu", gradients="loop").run(workload, config, out=folder / kind)
    facts = wb.audit_data(workload).facts if audit else {}
    return wb.diagnose_periodicity(
        MemoryRecord(made.trials, made.steps, made.evals, made.config, workload.name, None, facts)
    )["evaluation.periodic"]


def test_a_clean_run_has_no_period(tmp_path: Path) -> None:
    assert trained("clean", tmp_path).status == "ok"


def test_training_data_sorted_by_class(tmp_path: Path) -> None:
    finding = trained("sorted", tmp_path)
    assert (finding.status, finding.evidence["cause"]) == ("fail", "shuffling")
    assert finding.value == pytest.approx(19, rel=0.05)  # 1,258 examples in batches of 64
    assert "sorted by class" in finding.summary


def test_validation_rows_at_the_end_of_every_epoch(tmp_path: Path) -> None:
    finding = trained("leaked", tmp_path, peak_lr=0.1)
    assert finding.status == "fail"
    assert "leakage" in finding.evidence["cause"]
    assert finding.value == pytest.approx(23, rel=0.05)  # 1,527 examples in batches of 64
    assert "100.00% of validation" in finding.summary


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_stream_that_is_shuffled_anew_has_no_period(tmp_path: Path, optimizer: str) -> None:
    lr = {"sgd": 0.05, "adam": 0.001}[optimizer]
    assert trained("clean stream", tmp_path, optimizer=optimizer, peak_lr=lr).status == "ok"
