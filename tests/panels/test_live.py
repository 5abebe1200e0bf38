"""The live view: what reaches the page is what the record holds, five times a second at most, whatever happens in the block."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ipywidgets import Widget

import workbench as wb
from tests.helpers.hooks import At
from tests.helpers.workloads import small_workload
from workbench.curves.smoothing import kept
from workbench.errors import StudyInterrupted
from workbench.record.read import StudyRecord, TrialRecord
from workbench.record.watch import early_wanted, watching
from workbench.topics.lr_sweep.study import LRSweep
from workbench.train import loop
from workbench.train.trainer import Trainer
from workbench.views.curves import CurvesWidget
from workbench.views.live import WHOLE_AGAIN, LiveFeed, live_view
from workbench.views.study_curves import METRICS, CurvePoints

LRS = [0.01, 0.05, 1e20]


class Page:
    """What the page makes of messages: curves by trial and metric, decoded byte by byte."""

    def __init__(self) -> None:
        self.curves: dict[tuple[int, str], list[tuple[int, float]]] = {}
        self.trials: dict[int, dict[str, Any]] = {}
        self.kinds: list[str] = []
        self.status: dict[str, Any] = {}
        self.name = ""
        self.bytes = 0

    def tell(self, content: dict[str, Any], buffers: list[Any]) -> None:
        content = json.loads(json.dumps(content, allow_nan=False))  # as it travels
        self.kinds.append(content["kind"])
        assert content["number"] == len(self.kinds) - 1
        if content["kind"] == "all":
            self.curves, self.trials, self.name = {}, {}, content["name"]
        self.trials |= {trial["trial"]: trial for trial in content["trials"]}
        self.status = content["status"]
        left = [bytes(buffer) for buffer in buffers]
        self.bytes += sum(map(len, left))
        for part in content["parts"]:
            steps = np.frombuffer(left.pop(0), "<i4")
            for metric in part["metrics"]:
                values, at = np.frombuffer(left.pop(0), "<f4"), 0
                for trial, rows in part["rows"]:
                    pairs = zip(steps[at : at + rows].tolist(), values[at : at + rows].tolist(), strict=True)
                    self.curves.setdefault((trial, metric), []).extend(pairs)
                    at += rows
                assert at == len(values) == len(steps)
        assert left == []


class Clock:
    """A clock that goes on by itself with every look at it."""

    def __init__(self, tick: float) -> None:
        self.now, self.tick = 0.0, tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


def same_curves(page: Page, record: StudyRecord | TrialRecord) -> None:
    """Every row is on the page, once and in order, as float32."""
    for trial, rows in record.steps.groupby("trial"):
        for metric in METRICS:
            steps, values = zip(*page.curves[int(trial), metric], strict=True)
            assert list(steps) == rows["step"].tolist()
            if metric == "seconds":
                np.testing.assert_allclose(values, rows["step_time_s"].cumsum(), rtol=1e-5)
                continue
            with np.errstate(over="ignore"):
                np.testing.assert_array_equal(np.array(values, np.float32), rows[metric].to_numpy(np.float32))
    assert len({trial for trial, _ in page.curves}) == record.steps["trial"].nunique()


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "SHOW_SECONDS", 0.0)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is displayed, and what ends a block, in order."""
    seen: list[Any] = []
    import IPython.display

    monkeypatch.setattr(IPython.display, "display", lambda widget, display_id: seen.append(widget))
    monkeypatch.setattr("workbench.views.summary.show_study", lambda record: seen.append(("summary", record.path)))
    return seen


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("tick", [0.001, 3.0])
def test_what_reaches_the_page_is_the_record(tmp_path: Path, tick: float) -> None:
    """However the rows are cut into messages, a diverged lane with its infinite loss among them."""
    page = Page()
    with watching(LiveFeed(page.tell, Clock(tick))):
        record = LRSweep(lrs=LRS).run(small_workload(), Trainer(device="cpu"), out=tmp_path / "s")
    same_curves(page, record)
    assert page.name == "s"
    assert {n: t["state"] for n, t in page.trials.items()} == {0: "complete", 1: "complete", 2: "diverged"}
    assert {n: t["lr"] for n, t in page.trials.items()} == dict(enumerate(LRS))
    assert page.status["states"] == {"complete": 2, "diverged": 1}
    assert page.status["steps"] == len(record.steps)
    assert (page.status["stage"], page.status["planned"]) == ("sweep", 0)
    assert not all(np.isfinite(value) for _, value in page.curves[2, "loss"])


def test_what_has_not_ended_when_its_study_is_closed_has_stopped(tmp_path: Path) -> None:
    page = Page()
    path = LRSweep(lrs=LRS).run(small_workload(), Trainer(device="cpu"), out=tmp_path / "s").path
    feed = LiveFeed(page.tell)
    feed.on_study(path, created=False)
    feed.on_trial(path, 9, stage="sweep", config=small_workload().config.to_dict())
    feed.everything()
    assert page.status["states"]["waiting"] == 1
    feed.on_closed(path)
    assert page.status["states"] == {"complete": 2, "diverged": 1, "stopped": 1}


@pytest.mark.usefixtures("always")
def test_a_diagnosis_says_its_stage_and_how_many_steps_are_planned(tmp_path: Path) -> None:
    page = Page()
    with watching(LiveFeed(page.tell)):
        wb.diagnose(small_workload(), tmp_path / "d", budget="6x")
    assert re.fullmatch(r"3 of 3: search: .+", page.status["plan"])
    assert page.status["stage"] in {trial["stage"] for trial in page.trials.values()}, "which lines are in colour"
    assert page.status["planned"] == 6 * small_workload().config.total_steps


@pytest.mark.usefixtures("always")
def test_there_are_at_most_five_messages_a_second(tmp_path: Path) -> None:
    """By the feed's own clock; one more says that the study is closed."""
    page, clock = Page(), Clock(0.02)
    times: list[float] = []

    def tell(content: dict[str, Any], buffers: list[Any]) -> None:
        times.append(clock.now)
        page.tell(content, buffers)

    with watching(LiveFeed(tell, clock)):
        Trainer(device="cpu").run(small_workload(config={"total_steps": 300}), out=tmp_path / "s")
    assert len(times) > 10
    assert np.diff(times[:-1]).min() >= 0.2
    assert page.kinds.count("all") == 1 + sum(seconds < times[-1] for seconds in WHOLE_AGAIN)


def test_rows_that_come_again_are_shown_once(tmp_path: Path, always: None) -> None:
    """After an error within a block: the trial goes on from its checkpoint, some steps back."""

    page = Page()
    with watching(LiveFeed(page.tell, Clock(0.1))):
        with pytest.raises(KeyboardInterrupt):
            Trainer(device="cpu", hooks=[At(29, KeyboardInterrupt())]).run(small_workload(), out=tmp_path / "s")
        record = Trainer(device="cpu").run(small_workload(), out=tmp_path / "s")
    same_curves(page, record)


def brute(steps: list[int], values: list[float], columns: int) -> set[tuple[int, float]]:
    """Lowest and highest of each column, one after the other."""
    span = steps[-1] - steps[0] + 1
    found: dict[int, list[tuple[float, int]]] = {}
    for step, value in zip(steps, values, strict=True):
        if np.isfinite(value):
            found.setdefault((step - steps[0]) * columns // span, []).append((value, step))
    return {
        (step, value) for each in found.values() for value, step in (min(each), max(each, key=lambda p: (p[0], -p[1])))
    }


@pytest.mark.parametrize("columns", [7, 50])
def test_thinning_keeps_the_lowest_and_the_highest_of_every_column(columns: int) -> None:
    rng = np.random.default_rng(0)
    steps = np.cumsum(rng.integers(1, 4, 900))
    values = rng.normal(size=900).round(1)  # with ties
    values[rng.integers(0, 900, 40)] = np.nan
    values[rng.integers(0, 900, 40)] = np.inf
    where = kept(steps, values, columns)
    assert (np.diff(where) > 0).all()
    assert {0, 899} <= set(where.tolist())
    pairs = {(int(steps[i]), float(values[i])) for i in where if np.isfinite(values[i])}
    oracle = brute(steps.tolist(), values.tolist(), columns)
    assert oracle <= pairs
    assert len(where) <= 2 * columns + 2
    ends = {(int(steps[i]), float(values[i])) for i in (0, -1)}
    assert pairs - ends <= oracle


def test_a_long_study_takes_bounded_memory_and_keeps_its_extremes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.views.study_curves.MOST_ROWS", 5000)
    monkeypatch.setattr("workbench.views.study_curves.THINNED", 200)
    rng, points = np.random.default_rng(0), CurvePoints()
    every = {trial: rng.lognormal(size=20_000) for trial in (3, 7)}
    for at in range(0, 20_000, 500):
        points.add([
            {"trial": np.full(500, t), "step": np.arange(at, at + 500)} | dict.fromkeys(METRICS, every[t][at : at + 500])
            for t in every
        ])  # fmt: skip
        assert points._held <= 5000
    for curve in points.curves(0, columns=100):
        assert len(curve.step) <= 202
        assert curve.value.max() == np.float32(every[curve.trial].max())
        assert curve.value.min() == np.float32(every[curve.trial].min())
        assert (np.diff(curve.step) > 0).all()
        assert curve.step[-1] == 19_999


def test_a_step_whose_time_is_missing_does_not_stop_the_clock_of_its_trial() -> None:
    points, taken = CurvePoints(), np.array([1.0, np.nan, 2.0, 3.0])
    for at in (0, 4):
        block = {"trial": np.zeros(4), "step": np.arange(at, at + 4), "step_time_s": taken}
        points.add([block | dict.fromkeys(("loss", "grad_norm", "lr"), np.ones(4))])
    (curve,) = points.curves(METRICS.index("seconds"))
    known = ~np.isnan(curve.value)
    assert dict(zip(curve.step[known].tolist(), curve.value[known].tolist(), strict=True)) == {
        0: 1,
        2: 3,
        3: 6,
        4: 7,
        6: 9,
        7: 12,
    }


@pytest.mark.usefixtures("always")
def test_a_block_shows_one_widget_and_ends_in_the_summary(tmp_path: Path, shown: list[Any]) -> None:
    with live_view(live=True) as view:
        assert view.record is None
        assert early_wanted()
        record = Trainer(device="cpu").run(small_workload(), out=tmp_path / "s")
        (widget,) = shown
        assert isinstance(widget, CurvesWidget)
        assert not widget.still
    assert widget.still, "a page that was reloaded meanwhile asks it for all"
    assert shown[1:] == [("summary", record.path)]
    assert view.record is not None
    assert view.record.path == record.path
    assert not early_wanted()


def _train_and_raise(out: Path, error: BaseException) -> None:
    Trainer(device="cpu").run(small_workload(), out=out)
    raise error


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt(), StudyInterrupted("stopped")])
def test_an_error_reaches_the_caller_after_what_there_is(
    tmp_path: Path, shown: list[Any], live: bool, error: BaseException
) -> None:
    with pytest.raises(type(error)), live_view(live=live):
        _train_and_raise(tmp_path / "s", error)
    assert (shown[-1:] == [("summary", tmp_path / "s")]) is not isinstance(error, StudyInterrupted)
    assert [w.still for w in shown if isinstance(w, Widget)] == [True] * live
    assert not early_wanted()
