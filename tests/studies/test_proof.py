"""The arms of a proof: the same seeds, nothing trained twice, a third arm only where the run gets longer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.workloads import small_net, small_workload
from workbench.config import TrainConfig
from workbench.errors import ConfigError
from workbench.record.read import StudyRecord, open_record
from workbench.schedules import prepend_warmup
from workbench.studies.session import Session, open_session
from workbench.topics.recommendation.study import Proof


def run(out: Path, candidate: TrainConfig, *, seeds: int = 3, more: int = 0, first: Any = ()) -> StudyRecord:
    workload = small_workload(build_model=lambda: small_net(0.3))
    with open_session(workload, stem="proof", settings={"seeds": seeds}, out=out) as session:
        for config in first:
            _trained(session, config)
        Proof(seeds=seeds, more_seeds=more).extend(session, candidate)
    record = open_record(out)
    assert isinstance(record, StudyRecord)
    return record


def _trained(session: Session, config: TrainConfig) -> None:
    session.trial(config, stage="baseline")


BASE = small_workload().config


def test_both_arms_see_the_same_seeds_and_what_is_there_is_taken(tmp_path: Path) -> None:
    trials = run(tmp_path / "s", BASE.replace(peak_lr=0.1), first=[BASE]).trials
    assert trials["stage"].tolist() == ["baseline"] + ["proof"] * 6
    arms = trials.groupby("peak_lr")
    for name in ("shared_seed", "per_host_seed"):
        seeds = {lr: sorted(rows[name]) for lr, rows in arms}
        assert seeds == {0.05: [0, 1, 2, 3], 0.1: [1, 2, 3]}, "the seed that chose the candidate proves nothing"
    assert trials["lanes"].max() >= 6


def test_the_baselines_are_those_of_the_proof(tmp_path: Path) -> None:
    """Trained beside a sweep, they are not trained again."""
    study = Proof(seeds=3)
    asked = [one.config for one in study.baselines(BASE)]
    assert [config.shared_seed for config in asked] == [1, 2, 3]
    trials = run(tmp_path / "s", BASE.replace(peak_lr=0.1), first=asked).trials
    assert trials["stage"].tolist() == ["baseline"] * 3 + ["proof"] * 3
    assert Proof(seeds=1).baselines(BASE) == []


def test_a_longer_candidate_adds_the_baseline_at_its_length(tmp_path: Path) -> None:
    trials = run(tmp_path / "s", prepend_warmup(BASE.replace(peak_lr=0.1), 10), seeds=2).trials
    counts = trials.groupby(["total_steps", "warmup_steps"]).size().to_dict()
    assert counts == {(40, 0): 2, (50, 10): 2, (50, 0): 2}


def test_a_single_seed_proves_nothing_and_trains_nothing(tmp_path: Path) -> None:
    assert not len(
        run(tmp_path / "s", BASE.replace(peak_lr=0.1), seeds=1, first=[BASE]).trials.query("stage == 'proof'")
    )


def test_seeds_that_do_not_decide_are_followed_by_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three, then two: both arms, the first three not trained again."""
    monkeypatch.setattr(
        "workbench.topics.recommendation.study.worth_more_seeds", lambda proof: len(proof["seeds"]) == 3
    )
    trials = run(tmp_path / "s", BASE.replace(peak_lr=0.1), more=2, first=[BASE]).trials
    assert trials["stage"].tolist() == ["baseline"] + ["proof"] * 10
    seeds = {lr: sorted(rows["shared_seed"]) for lr, rows in trials.groupby("peak_lr")}
    assert seeds == {0.05: [0, 1, 2, 3, 4, 5], 0.1: [1, 2, 3, 4, 5]}


@pytest.mark.parametrize("seeds", [0, -1, 2.5, True])
def test_bad_seeds(seeds: Any) -> None:
    with pytest.raises(ConfigError, match="seeds="):
        Proof(seeds=seeds)


@pytest.mark.parametrize("more", [-1, 2.5, True])
def test_bad_numbers_of_more_seeds(more: Any) -> None:
    with pytest.raises(ConfigError, match="more_seeds="):
        Proof(more_seeds=more)
