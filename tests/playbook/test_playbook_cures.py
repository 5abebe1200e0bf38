"""Which sign makes `diagnose` try which cure (F2.10), and what it says of a schedule of the user's own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import workbench as wb
from tests.helpers.workloads import small_workload
from workbench.config import TrainConfig
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.finding import Finding
from workbench.playbook import diagnose as playbook
from workbench.record.read import open_record
from workbench.topics.clipping.study import ClippingStudy
from workbench.topics.lr_sweep.study import LRSweep
from workbench.topics.stability.study import InstabilityStudy
from workbench.topics.warmup.study import WarmupStudy

pytestmark = pytest.mark.usefixtures("no_figures")
QUIET = (
    "lr.too_high",
    "lr.nothing_learns",
    "stability.early",
    "stability.early_recovers",
    "stability.mid",
    "stability.spike",
    "lr.probabilistic",
)
CONFIG = TrainConfig(peak_lr=0.1, total_steps=1000, batch_size=8)


def planted(
    *, wrong: str = "", status: str = "warn", harmful: bool | None = None, unstable: float | None = 1.0,
    star: float | None = 0.1,
) -> Diagnosis:  # fmt: skip
    """The findings of a walk as far as its cures."""
    codes = dict.fromkeys((*QUIET, "init.loss"), "ok") | ({wrong: status} if wrong else {})
    found = {code: Finding(code=code, status=s, summary="planted") for code, s in codes.items()}  # type: ignore[arg-type]
    found["lr.at_edge"] = Finding(code="lr.at_edge", status="warn", summary="planted", evidence={"harmful": harmful})
    found["lr.unstable"] = Finding(code="lr.unstable", status="ok", summary="planted", value=unstable)
    found["lr.best"] = Finding(code="lr.best", status="ok", summary="", value=star, evidence={"measured_lr": star})
    return Diagnosis(findings=tuple(found.values()))


def tried(monkeypatch: pytest.MonkeyPatch, known: Diagnosis, *, config: TrainConfig = CONFIG) -> list[Any]:
    """What the cures ask for, given what is known."""
    calls: list[Any] = []
    monkeypatch.setattr(playbook, "run_round", lambda session, asked: calls.extend(("fix", a.config) for a in asked))
    monkeypatch.setattr(WarmupStudy, "extend", lambda self, session: calls.append("warmup"))
    monkeypatch.setattr(
        ClippingStudy,
        "extend",
        lambda self, session: calls.append(("clipping", self.peak_lr, self.reference_lr, self.tries)),
    )
    playbook._cure(SimpleNamespace(record=None, config=config), known)  # type: ignore[arg-type]
    return calls


WARMED = ("fix", CONFIG.replace(warmup_steps=100, total_steps=1100))
AT_OWN = [WARMED, ("clipping", 0.1, 0.1, 1)]
BEYOND = [("clipping", None, None, 3)]


@pytest.mark.parametrize("status", ["warn", "fail"])
@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ("stability.early", AT_OWN),
        ("init.loss", AT_OWN),
        ("lr.probabilistic", AT_OWN),
        ("lr.too_high", AT_OWN),
        ("stability.mid", BEYOND),
        ("stability.spike", BEYOND),
        ("stability.early_recovers", AT_OWN),
        ("", []),
    ],
)
def test_a_sign_and_its_cures(monkeypatch: pytest.MonkeyPatch, wrong: str, status: str, expected: list[Any]) -> None:
    assert tried(monkeypatch, planted(wrong=wrong, status=status)) == expected


def test_the_threshold_is_that_of_a_smaller_lr_that_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    known = planted(wrong="lr.too_high", status="fail", star=0.02)
    assert tried(monkeypatch, known) == [WARMED, ("clipping", 0.1, 0.02, 1)]
    known = planted(wrong="lr.nothing_learns", status="fail", star=None)
    assert tried(monkeypatch, known) == [WARMED, ("clipping", 0.1, None, 1)]


def test_a_baseline_that_clips_is_held_against_itself_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """At its own lr, whatever the signs: clipping may be what hides them (F4.11)."""
    clipped = CONFIG.replace(max_grad_norm=1.0)
    assert tried(monkeypatch, planted(), config=clipped) == [("clipping", 0.1, None, 3)]


def restarting(progress: float) -> float:
    return 1.0 - (4 * progress) % 1.0


def test_the_restarts_of_a_schedule_of_ones_own_are_planned(tmp_path: Path) -> None:
    workload = small_workload()
    workload = workload.replace(config=workload.config.replace(schedule=restarting))
    diagnosis = wb.diagnose(
        workload, out=tmp_path / "s", device="cpu", sweep=LRSweep(lrs=(0.01, 0.1)), proof_seeds=1, command="c",
        instability=InstabilityStudy(probe_steps=20, fixes=()),
    )  # fmt: skip
    finding = diagnosis["schedule.restarts"]
    assert (finding.status, len(finding.evidence["restarts"])) == ("ok", 3)


def own_descent(params: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr)


@pytest.mark.parametrize(("limit", "rule"), [(1e-3, "sgd"), (1e-3, own_descent), (100.0, "sgd")])
def test_where_nearly_every_step_is_clipped_no_sweep_looks_for_an_lr(tmp_path: Path, limit: float, rule: Any) -> None:
    """The lr would make up for the threshold: the clip is loosened, at the person's own lr."""
    config = {"optimizer": rule, "peak_lr": 0.05, "total_steps": 100, "batch_size": 48, "max_grad_norm": limit}
    workload = small_workload(config=config, validation_data=small_workload(examples=64).train_data)
    found = wb.diagnose(workload, out=tmp_path / "s", instability=InstabilityStudy(confirm_all=False, fixes=()))
    highest = float(open_record(tmp_path / "s").trials["peak_lr"].max())
    fixed = limit < 1
    assert (highest <= 1.5 * 0.05) is fixed
    assert (found["lr.best"].status == "not_measured") is fixed
    if fixed:
        said = "nearly every step is clipped, so the learning rate sets the length of every step; raise max_grad_norm first"
        assert all(said in found[code].summary for code in ("lr.best", "lr.unstable", "lr.too_low", "lr.too_high"))
        assert found["clipping.aggressive"].status == "fail", "with it the model learns next to nothing"
        assert found.recommendation is not None
        assert found.recommendation["changed"] == ["max_grad_norm"]
