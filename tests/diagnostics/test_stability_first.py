"""Before anything is tuned: is there a verdict on stability, and is it good (F1.1)?"""

from __future__ import annotations

from pathlib import Path

import pytest

import workbench as wb
from tests.helpers.workloads import small_workload
from workbench.findings.diagnosis import Diagnosis, Finding
from workbench.topics.stability import diagnose_first as stability_first
from workbench.topics.stability.diagnose_first import check_stability
from workbench.workloads.analytic import quadratic

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
    """A parabola of curvature 1 or less trains below lr = 2: lr* = 0.3, and twice it, are stable. A catapult at lr 4.5 is not."""
    parabola = quadratic(dimension=5, condition=10.0, peak_lr=0.1, total_steps=100)
    study = wb.InstabilityStudy(probe_steps=100, sweep=wb.LRSweep(lrs=(0.03, 0.1, 0.3)))
    healthy = study.run(parabola, wb.Trainer(device="cpu"), out=tmp_path / "healthy")
    (finding,) = check_stability(healthy.path)
    assert (finding.status, finding.advice) == ("ok", ())
    assert "at peak_lr 0.1 with sgd" in finding.summary
    workload = wb.load_workload("catapult")
    workload = workload.replace(config=workload.config.replace(peak_lr=4.5))
    wild = wb.InstabilityStudy(best_lr=workload.config.peak_lr).run(
        workload, wb.Trainer(device="cpu"), out=tmp_path / "wild"
    )
    (finding,) = check_stability(wild.path)
    assert finding.status == "warn"
    assert f"at peak_lr {workload.config.peak_lr} with {workload.config.optimizer}. stability." in finding.summary


@pytest.mark.parametrize("steps", [5, 9])
def test_a_study_of_a_few_steps_is_no_verdict(tmp_path: Path, steps: int) -> None:
    """One lr diverges at once, and so is judged; the others end before anything could be said of them."""
    workload = small_workload(config={"total_steps": steps})
    sweep = wb.LRSweep(lrs=(0.01, 0.05, 0.1, 1e200))
    record = sweep.run(workload, wb.Trainer(device="cpu"), out=tmp_path / "s")
    assert "diverged" in set(record.trials["state"])
    (finding,) = check_stability(record.path)
    assert finding.status == "not_measured"
    assert "at peak_lr 0.05" in finding.summary
    assert "stability.mid" in finding.summary
