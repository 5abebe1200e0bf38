"""The curves panel: the record's own curves in a widget, and a picture where nobody is looking."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from IPython.display import Image as Still
from matplotlib import image

from tests.helpers.records import one_trial
from tests.helpers.workloads import small_workload
from tests.panels.test_live import Page, brute, same_curves
from workbench.record.read import StudyRecord, TrialRecord, open_record
from workbench.record.write import StudyWriter
from workbench.topics.lr_sweep.study import LRSweep
from workbench.train.trainer import Trainer
from workbench.views.curves import CurvesWidget, curves_panel
from workbench.views.study_curves import COLUMNS, METRICS


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> StudyRecord:
    out = tmp_path_factory.mktemp("runs") / "sweep"
    return LRSweep(lrs=[0.01, 0.05, 1e20]).run(small_workload(), Trainer(device="cpu"), out=out)


def told(panel: Any) -> Page:
    """What a page is told that asks, as it does when it is drawn."""
    page = Page()
    panel.send = page.tell
    panel._handle_custom_msg({"kind": "all"}, [])
    return page


def test_a_study_is_a_widget_that_answers_with_its_curves(study: StudyRecord) -> None:
    panel = curves_panel(study, live=True)
    assert isinstance(panel, CurvesWidget)
    assert panel.still
    page = told(panel)
    same_curves(page, study)
    assert {n: t["state"] for n, t in page.trials.items()} == {0: "complete", 1: "complete", 2: "diverged"}
    assert page.trials[2]["lr"] == 1e20
    assert [t["note"] for t in page.trials.values()] == ["", "", ""]
    panel.close()


def test_one_trial_and_a_part_of_a_study_are_shown_alone(study: StudyRecord) -> None:
    for record in (study.trial(1), StudyRecord(study.path, frozenset([1]))):
        page = told(curves_panel(record, live=True))
        assert set(page.trials) == {1}
        same_curves(page, record)


def test_a_trial_trained_alone_and_a_study_that_still_runs(tmp_path: Path) -> None:
    record = Trainer(device="cpu").run(small_workload(), out=tmp_path / "s")
    page = told(curves_panel(open_record(tmp_path / "s"), live=True))
    same_curves(page, record)
    writer = StudyWriter.open(tmp_path / "t", kind="trial", workload="w", config=small_workload().config.to_dict())
    shown = curves_panel(StudyRecord(tmp_path / "t"), live=True)  # not a row yet
    assert "no step yet. Run wb.LRSweep()" in shown.words.value
    assert "open it again" in shown.words.value
    writer.close()


def long_study(out: Path, *, lanes: int, steps: int) -> StudyRecord:
    config = small_workload().config.to_dict()
    writer = StudyWriter.open(out, kind="lr_sweep", workload="w", config=config)
    rng = np.random.default_rng(0)
    for lane in range(lanes):
        trial = writer.trial(config | {"peak_lr": 0.01 * (lane + 1), "total_steps": steps}, stage="s", train_examples=9)
        rows = {name: rng.lognormal(size=steps) for name in METRICS}
        writer.steps.add({"trial": np.full(steps, lane), "step": np.arange(steps)} | rows)
        trial.event("ended", state="complete")
    writer.close()
    return StudyRecord(out)


def test_long_curves_are_thinned_and_keep_what_is_seen_of_them(tmp_path: Path) -> None:
    record = long_study(tmp_path / "s", lanes=3, steps=10_000)
    page = told(curves_panel(record, live=True))
    assert len(page.curves) == 9
    for (trial, metric), pairs in page.curves.items():
        rows = record.steps[record.steps["trial"] == trial]
        assert len(pairs) <= 2 * COLUMNS + 2
        values = rows[metric].to_numpy(np.float32).astype(float).tolist()
        assert brute(rows["step"].tolist(), values, COLUMNS) <= set(pairs)
    assert page.bytes < 9 * 2002 * 8 + 1


def test_without_a_page_it_is_one_picture(study: StudyRecord) -> None:
    shown = curves_panel(study)
    assert isinstance(shown, Still)
    assert "training loss" in shown.alt
    assert image.imread(io.BytesIO(shown.data), format="png").std() > 0


def test_a_record_that_is_on_no_disk_is_a_picture_also_with_a_page() -> None:
    record = one_trial(np.ones(30))
    assert not isinstance(record, (StudyRecord, TrialRecord))
    assert isinstance(curves_panel(record, live=True), Still)
