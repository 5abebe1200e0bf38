"""Before anything is tuned: is there a verdict on stability, and is it good (F1.1)?"""

from __future__ import annotations

from pathlib import Path

import pytest

import workbench as wb
from tests.helpers.workloads import small_workload
from workbench.diagnostics import stability_first
from workbench.diagnostics.base import Diagnosis, Finding
from workbench.diagnostics.stability_first import check_stability

KINDS = ("early", "early_recovers", "mid", "divergent", "spike")


def planted(monkeypatch: pytest.MonkeyPatch, **statuses: str) -> None:
    findings = tuple(
        Finding(code=f"stability.{kind}", status=statuses.get(kind, "ok"), summary=f"said of {kind}", step=7)  # type: ignore[arg-type]
        for kind in KINDS
    )
    monkeypatch.setattr(stability_first, "diagnose_instability", lambda record: Diagnosis(findings=findings))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sweep = wb.LRSweep(lrs=(0.01, 0.1))
    return sweep.run(small_workload(), wb.Trainer(device="cpu"), out=tmp_path_factory.mktemp("s") / "s").path


@pytest.mark.parametrize("missing", ["", None])
def test_without_a_study_there_is_no_verdict(missing: str | None) -> None:
    (finding,) = check_stability(missing, workload="small")
    assert (finding.code, finding.status, finding.clause) == ("stability.verdict", "not_measured", "F1.1")
    assert "02_instability" in finding.advice[0]


def test_a_folder_that_is_none_and_a_study_of_something_else(tmp_path: Path, folder: Path) -> None:
    assert check_stability(tmp_path / "nowhere")["stability.verdict"].status == "not_measured"
    finding = check_stability(folder, workload="digits_cnn")["stability.verdict"]
    assert finding.status == "not_measured"
    assert "of 'small', not of 'digits_cnn'" in finding.summary


@pytest.mark.parametrize("status", ["warn", "fail"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_unstable_study_warns_and_says_what_cures(
    monkeypatch: pytest.MonkeyPatch, folder: Path, kind: str, status: str
) -> None:
    planted(monkeypatch, **{kind: status})
    finding = check_stability(folder)["stability.verdict"]
    assert (finding.status, finding.step) == ("warn", 7)
    assert f"stability.{kind}: said of {kind}" in finding.summary
    assert finding.advice


def test_silence_is_not_health(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    planted(monkeypatch, mid="not_measured")
    finding = check_stability(folder)["stability.verdict"]
    assert finding.status == "not_measured"
    assert "did not measure stability.mid" in finding.summary


def test_a_stable_study_is_ok(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    planted(monkeypatch)
    assert check_stability(folder, workload="small").verdict == "ok"


def test_on_real_studies(tmp_path: Path) -> None:
    """A least-squares fit at half of its lr* is stable; the catapult at three times the critical lr is not."""
    quiet = wb.InstabilityStudy(probe_steps=20, fixes=(), sweep=wb.LRSweep(lrs=(0.01, 0.05, 0.1)))
    healthy = quiet.run(small_workload(), wb.Trainer(device="cpu"), out=tmp_path / "healthy")
    assert check_stability(healthy.path).verdict != "warn"
    workload = wb.load_workload("catapult")
    wild = wb.InstabilityStudy(best_lr=workload.config.peak_lr).run(
        workload, wb.Trainer(device="cpu"), out=tmp_path / "wild"
    )
    assert check_stability(wild.path).verdict == "warn"
