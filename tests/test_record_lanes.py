"""What the record says of how its trials were trained."""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd

from tests.helpers.workloads import small_workload
from workbench.record.read import StudyRecord, how_trained
from workbench.record.write import StudyWriter
from workbench.train.trainer import Trainer


def rows(count: int, **columns: object) -> pd.DataFrame:
    return pd.DataFrame([columns] * count)


def test_every_way_is_named_with_its_reason_and_its_gain() -> None:
    vmap = rows(32, lanes=32, gradients="vmap", reason="the fastest here", faster=7.96)
    loop = rows(2, lanes=1, gradients="loop", reason="asked for", faster=math.nan)
    assert how_trained(pd.concat([vmap, loop])) == (
        "34 trials, up to 32 of them together. 2 one after the other by plain autograd (asked for). "
        "32 by one traced program, 8 times as fast as plain autograd (the fastest here)."
    )


def test_numbers_in_a_reason_are_left_to_the_table() -> None:
    short = rows(3, lanes=3, gradients="loop", reason="too short to measure: about 0.3 s", faster=math.nan)
    assert how_trained(short).endswith("3 one after the other by plain autograd (too short to measure).")


def test_nothing_trained_yet(tmp_path: Path) -> None:
    given = small_workload()
    study = StudyWriter.open(tmp_path / "s", kind="lr_sweep", workload="small", config=given.config.to_dict())
    assert how_trained(study.record.lanes) == "No trial yet."
    Trainer().run_trial(given, given.config, study, stage="lr_sweep")
    study.close()
    record = StudyRecord(tmp_path / "s")
    assert record.lanes.loc[0, ["trial", "stage", "lanes", "gradients"]].tolist() == [0, "lr_sweep", 1, "loop"]
    assert how_trained(record.lanes).startswith("1 trial, up to 1 of them together.")
