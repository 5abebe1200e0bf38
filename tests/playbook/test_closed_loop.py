"""From a workload that trains badly to the cure, the proof and a config that keeps what was claimed."""

from __future__ import annotations

from pathlib import Path

import pytest

import workbench as wb
from workbench.findings.diagnosis import Diagnosis
from workbench.record.read import StudyRecord, open_record
from workbench.workloads.sklearn_data import digits_mlp

pytestmark = pytest.mark.usefixtures("no_figures")


@pytest.fixture(scope="module")
def cured(tmp_path_factory: pytest.TempPathFactory) -> Diagnosis:
    """`valley` is unstable beyond 2 / steepness, and a short warmup opens ten times that."""
    return wb.diagnose("valley", out=tmp_path_factory.mktemp("loop") / "s", device="cpu", budget="none")


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
    assert recommendation["proof"]["seeds"] == [1, 2, 3]


def test_the_pasted_config_gives_what_was_claimed(cured: Diagnosis, tmp_path: Path) -> None:
    recommendation = cured.recommendation
    assert recommendation is not None
    config = eval(recommendation["paste"], {"wb": wb})
    again = wb.Trainer(device="cpu").run(wb.load_workload("valley"), config, out=tmp_path / "again")
    assert cured.path is not None
    record = open_record(cured.path)
    assert isinstance(record, StudyRecord)
    claimed = record.trial(recommendation["chosen"]["trial"]).best()
    assert again.best().value == pytest.approx(claimed.value, rel=1e-6)
    assert claimed.value == pytest.approx(recommendation["chosen"]["validation/loss"])


@pytest.fixture(scope="module")
def badly_begun(tmp_path_factory: pytest.TempPathFactory) -> Diagnosis:
    """Weights ten times too large: under some seeds the network dies at the baseline's lr, under others it trains."""
    return wb.diagnose(
        digits_mlp(init_scale=10.0), out=tmp_path_factory.mktemp("begun") / "s", device="cpu", budget="none"
    )


@pytest.mark.slow
def test_what_is_recommended_for_them_wins_on_seeds_that_the_diagnosis_has_not_seen(
    badly_begun: Diagnosis, tmp_path: Path
) -> None:
    recommendation = badly_begun.recommendation
    assert recommendation is not None
    assert recommendation["adopted"] is True
    assert set(recommendation["changed"]) & {"max_grad_norm", "warmup_steps"}, "a cure, not only a smaller lr"
    workload = digits_mlp(init_scale=10.0)
    arms = (workload.config, wb.TrainConfig.from_dict(recommendation["config"]))
    won = sum(after < before for before, after in zip(*(fresh(workload, c, tmp_path) for c in arms), strict=True))
    assert won >= 4


def fresh(workload: wb.Workload, config: wb.TrainConfig, out: Path, *, seeds: int = 5) -> list[float]:
    """The selected validation loss under seeds that no diagnosis has seen."""
    again = [config.replace(shared_seed=1000 + k, per_host_seed=1000 + k) for k in range(seeds)]
    runs = [
        wb.Trainer(device="cpu").run(
            workload, c, out=out / f"{c.peak_lr}-{c.max_grad_norm}-{c.warmup_steps}-{c.shared_seed}"
        )
        for c in again
    ]
    return [run.best().value for run in runs]


def test_a_healthy_workload_is_left_alone(tmp_path: Path) -> None:
    """On a quadratic the best lr sits at the edge by nature: no cure is tried, and the baseline at lr* stays."""
    workload = wb.load_workload("quadratic")
    sweep = wb.lr_sweep.Study(steps=100).run(workload, wb.Trainer(device="cpu"), out=tmp_path / "first")
    best = wb.lr_sweep.diagnose(sweep)["lr.best"]
    config = workload.config.replace(peak_lr=best.evidence["measured_lr"], total_steps=100)
    diagnosis = wb.diagnose(workload.replace(config=config), out=tmp_path / "s", device="cpu")
    assert "warmup.shortest" not in diagnosis
    assert diagnosis.recommendation is not None
    assert diagnosis.recommendation["adopted"] is False
    assert diagnosis.recommendation["changed"] == []
