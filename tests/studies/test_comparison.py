"""Three arms over one grid, on a valley whose edges, and the warmup that it needs, are arithmetic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from workbench.config import TrainConfig
from workbench.errors import ConfigError, WorkloadError
from workbench.plots.style import why_not_measured
from workbench.record.read import open_record
from workbench.topics.comparison.arms import Arms
from workbench.topics.comparison.diagnose import CODES, diagnose_comparison
from workbench.topics.comparison.figures import plot_comparison
from workbench.topics.comparison.study import ComparisonStudy
from workbench.topics.lr_sweep.diagnose import diagnose_lr_sweep
from workbench.topics.stability.diagnose import diagnose_instability
from workbench.topics.stability.study import InstabilityStudy
from workbench.train.trainer import Trainer
from workbench.workloads.analytic import valley
from workbench.workloads.sklearn_data import deep_residual

STEPS, STEEPNESS, GENTLE = 400, 201.0, 2.0
EDGE = 2 / STEEPNESS
"""The steep valley diverges at and above 0.00995, the gentle one at and above 1; with 40 warmup steps the steep one trains at 25 times
its edge and not at 100 times, by iterating wall *= 1 - lr (1 + 200 wall^2)."""
LRS = [EDGE * f for f in (1 / 8, 1 / 5, 1 / 4, 0.9, 2.5, 25.0, 150.0)]
QUICK = InstabilityStudy(fixes=(), probe_steps=20)


def survives(lr: float, warmup: int, *, steepness: float) -> bool:
    wall = 1.0
    for step in range(STEPS + warmup):
        wall *= 1 - lr * min(1.0, step / warmup if warmup else 1.0) * (1 + (steepness - 1) * wall**2)
        if not abs(wall) < 1e100:
            return False
    return True


def compare(out: Path | None, **settings: Any) -> Arms:
    study = ComparisonStudy(**({"lrs": LRS, "seeds": 2, "instability": QUICK} | settings))
    return study.run(
        valley(steepness=GENTLE, total_steps=STEPS), valley(total_steps=STEPS), Trainer(device="cpu"), out=out
    )


@pytest.fixture(scope="module")
def arms(tmp_path_factory: pytest.TempPathFactory) -> Arms:
    return compare(tmp_path_factory.mktemp("comparison"))


def test_the_oracle_is_what_the_docstring_says() -> None:
    without = [survives(lr, 0, steepness=STEEPNESS) for lr in LRS]
    warmed = [survives(lr, 40, steepness=STEEPNESS) for lr in LRS]
    gentle = [survives(lr, 0, steepness=GENTLE) for lr in LRS]
    assert without == [True] * 4 + [False] * 3
    assert warmed == [True] * 6 + [False]
    assert gentle == [True] * 6 + [False]


def test_all_three_statements_hold_where_arithmetic_says_so(arms: Arms) -> None:
    diagnosis = diagnose_comparison(*arms)
    assert {code: diagnosis[code].evidence["holds"] for code in CODES} == dict.fromkeys(CODES, True)
    high, cure = diagnosis["comparison.high_lr_lost"], diagnosis["comparison.warmup_cures"]
    assert [row["lr"] for row in high.evidence["lrs"]] == pytest.approx(LRS[4:6])
    assert high.evidence["when"] == {"early": 4}
    assert cure.value == pytest.approx(LRS[5])
    assert cure.evidence["warmup_steps"] == 40


def test_the_reverse_modification_loses_nothing(arms: Arms) -> None:
    diagnosis = diagnose_comparison(arms.modified, arms.baseline, arms.warmed)
    assert diagnosis["comparison.high_lr_lost"].evidence["holds"] is False
    assert diagnosis["comparison.warmup_cures"].evidence["holds"] is None


def test_each_arm_is_a_study_of_its_own_and_they_share_grid_seeds_and_length(arms: Arms) -> None:
    expected = {(f"{lr:.9e}", seed) for lr in LRS for seed in (0, 1)}
    for arm in arms:
        assert arm is not None
        sweep = arm.trials[arm.trials["stage"] == "lr_sweep"]
        assert {(f"{lr:.9e}", seed) for lr, seed in zip(sweep["peak_lr"], sweep["seed"], strict=True)} == expected
        assert set(sweep["total_steps"] - sweep["warmup_steps"]) == {STEPS}
        assert len(open_record(arm.path).trials) == len(arm.trials)
    assert arms.warmed is not None
    assert [arm.path.name for arm in (arms.baseline, arms.modified, arms.warmed)] == ["baseline", "modified", "warmed"]
    assert [set(arm.trials["warmup_steps"]) for arm in (arms.baseline, arms.warmed)] == [{0}, {40}]


def test_the_modified_arm_has_figure_7(arms: Arms) -> None:
    """7a: the best lr at the edge; 7b: the runs at 5 and 10 times it."""
    star = LRS[3]
    edge = diagnose_lr_sweep(arms.modified)["lr.at_edge"].evidence
    assert (edge["lr_star"], edge["at_edge"]) == (pytest.approx(star), True)
    confirm = diagnose_instability(arms.modified)["stability.mid"].evidence["confirm"]
    assert [row["lr"] for row in confirm] == pytest.approx([5 * star, 10 * star])
    assert [row["outcome"] for row in confirm] == ["divergent", "divergent"]


def test_the_same_call_again_trains_nothing_and_says_the_same(arms: Arms) -> None:
    stamps = {path: path.stat().st_mtime_ns for path in arms.baseline.path.parent.rglob("*.parquet")}
    again = compare(arms.baseline.path.parent)
    assert {path: path.stat().st_mtime_ns for path in arms.baseline.path.parent.rglob("*.parquet")} == stamps
    said = [diagnose_comparison(*found).to_dict()["findings"] for found in (arms, again)]
    assert said[0] == said[1]


def planned(monkeypatch: pytest.MonkeyPatch, config: TrainConfig, **settings: Any) -> list[dict[str, Any]]:
    """What each arm would train: its lrs and its config, without training it."""
    found: list[dict[str, Any]] = []

    def note(self: Any, workload: Any, **_: Any) -> Any:
        sweep = getattr(self, "sweep", self)
        found.append({"lrs": list(sweep.lrs), "steps": self.steps, "config": workload.config})

    monkeypatch.setattr("workbench.studies.base.Study.run", note)
    workload = valley().replace(config=config)
    ComparisonStudy(**settings).run(workload, workload)
    return found


@pytest.mark.parametrize(("total", "settings", "warmup"), [
    (400, {}, 40), (400, {"steps": 1000}, 100), (20_000, {}, 1000), (400, {"warmup_steps": 7}, 7), (400, {"cap_frac": 0.5}, 200),
])  # fmt: skip
def test_the_warmup_is_1000_steps_or_the_cap(
    monkeypatch: pytest.MonkeyPatch, total: int, settings: dict[str, Any], warmup: int
) -> None:
    """F3.16 and F3.10; prepended, so that the run grows by it (F3.13)."""
    base = TrainConfig(peak_lr=0.08, total_steps=total, batch_size=2)
    first, second, third = planned(monkeypatch, base, **settings)
    steps = settings.get("steps", total)
    assert first["steps"] == second["steps"] == steps
    assert first["lrs"] == second["lrs"] == third["lrs"] == [0.08 * 2.0**k for k in range(-4, 7)]
    assert (third["config"].warmup_steps, third["config"].total_steps) == (warmup, steps + warmup)


@pytest.mark.parametrize(("settings", "said"), [
    ({"lrs": []}, "at least one"), ({"seeds": 0}, "seeds=0"), ({"warmup_steps": 0}, "warmup_steps=0"),
    ({"warmup_steps": True}, "warmup_steps=True"), ({"cap_frac": 0.0}, "cap_frac=0.0"), ({"cap_frac": 1.5}, "a tenth"),
])  # fmt: skip
def test_bad_fields_are_named(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ComparisonStudy(**settings)


def test_a_run_too_short_for_a_warmup_says_so_before_anything_is_trained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="steps=9 leaves no warmup"):
        compare(tmp_path / "study", steps=9)
    assert not (tmp_path / "study").exists()


def test_a_broken_arm_is_named_by_its_workload(tmp_path: Path) -> None:
    broken = valley(total_steps=STEPS).replace(loss=lambda outputs, batch: outputs.mean())
    with pytest.raises(WorkloadError):
        ComparisonStudy(lrs=LRS, instability=QUICK).run(broken, valley(total_steps=STEPS), out=tmp_path / "study")


@pytest.mark.slow
def test_end_to_end_on_a_real_net_moving_the_norm_behind_the_addition_loses_the_high_lrs(tmp_path: Path) -> None:
    """F2.7 by way of F1.3: 12 residual blocks; at two of the lrs only the network with the norm before f trains."""
    study = ComparisonStudy(lrs=[0.004, 0.008, 0.064, 0.128], seeds=2, steps=400, warmup_steps=40, instability=QUICK)
    arms = study.run(deep_residual(norm="pre"), deep_residual(norm="after_add"), Trainer(device="cpu"), out=tmp_path)
    diagnosis = diagnose_comparison(*arms)
    high = diagnosis["comparison.high_lr_lost"]
    assert high.evidence["holds"] is True
    assert [row["lr"] for row in high.evidence["lrs"]] == [0.064, 0.128]
    low = diagnosis["comparison.low_lr_same"]
    assert [row["lr"] for row in low.evidence["lrs"]] == [0.004, 0.008]
    assert low.evidence["holds"] is not any(row["differs"] for row in low.evidence["lrs"])
    assert diagnosis["comparison.warmup_cures"].evidence["holds"] is not None
    ax = plot_comparison(*arms, diagnosis, ax=Figure().subplots())
    ax.get_figure(root=True).savefig(tmp_path / "figure4.png")
    assert why_not_measured(ax) is None
