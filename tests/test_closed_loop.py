"""From a workload that trains badly to the cure, the proof and a config that keeps what was claimed."""

from __future__ import annotations

from pathlib import Path

import pytest

import workbench as wb
from workbench.diagnostics.base import Diagnosis
from workbench.record import StudyRecord, open_record


@pytest.fixture(scope="module")
def cured(tmp_path_factory: pytest.TempPathFactory) -> Diagnosis:
    """`valley` is unstable beyond 2 / steepness, and a short warmup opens ten times that."""
    return wb.diagnose("valley", out=tmp_path_factory.mktemp("loop") / "s", device="cpu")


def test_the_walk_finds_the_warmup_that_the_sign_calls_for(cured: Diagnosis) -> None:
    assert cured["lr.at_edge"].evidence["harmful"] is True
    assert cured["warmup.shortest"].status == "ok"
    assert cured["warmup.shortest"].value is not None
    assert sorted({f.code for f in cured}) == sorted(f.code for f in cured), "each code once"


def test_what_is_recommended_beats_the_baseline_over_seeds_and_at_its_length(cured: Diagnosis) -> None:
    recommendation = cured.recommendation
    assert recommendation is not None
    assert recommendation["adopted"] is True
    assert recommendation["config"]["warmup_steps"] > 0
    assert recommendation["config"]["peak_lr"] > cured["lr.unstable"].value
    names = [arm["name"] for arm in recommendation["proof"]["arms"]]
    assert names == ["baseline", "baseline of the same length"]
    assert recommendation["proof"]["seeds"] == [0, 1, 2]


def test_the_pasted_config_gives_what_was_claimed(cured: Diagnosis, tmp_path: Path) -> None:
    recommendation = cured.recommendation
    assert recommendation is not None
    config = eval(recommendation["paste"], {"TrainConfig": wb.TrainConfig})
    again = wb.Trainer(device="cpu").run(wb.load_workload("valley"), config, out=tmp_path / "again")
    assert cured.path is not None
    record = open_record(cured.path)
    assert isinstance(record, StudyRecord)
    claimed = record.trial(recommendation["recommended"]["trials"][0]).best()
    assert again.best().value == pytest.approx(claimed.value, rel=1e-6)


def test_a_healthy_workload_is_left_alone(tmp_path: Path) -> None:
    """On a quadratic the best lr sits at the edge by nature: no cure is tried, and the baseline at lr* stays."""
    workload = wb.load_workload("quadratic")
    best = wb.diagnose(workload, out=tmp_path / "first", steps=100, device="cpu", proof_seeds=1)["lr.best"]
    config = workload.config.replace(peak_lr=best.evidence["measured_lr"], total_steps=100)
    diagnosis = wb.diagnose(workload.replace(config=config), out=tmp_path / "s", device="cpu")
    assert "warmup.shortest" not in diagnosis
    assert diagnosis.recommendation is not None
    assert diagnosis.recommendation["adopted"] is False
    assert diagnosis.recommendation["changed"] == []
