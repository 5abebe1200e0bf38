"""`judge` on logs of small trainings, healthy ones and ones with a planted fault, and `workbench judge`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import workbench as wb
from tests.helpers.foreign_logs import cosine, one_cycle, resumed, train, warmup_cosine
from workbench import cli
from workbench.errors import UsageError

DATA = Path(__file__).parents[1] / "data" / "logs"
HEALTHY: dict[str, Callable[[], pd.DataFrame]] = {
    "noisy": partial(train, batch=8, lr=0.02),
    "cosine": partial(train, schedule=cosine),
    "warmup": partial(train, schedule=warmup_cosine, rule="adam", lr=0.003),
    "one_cycle": partial(train, schedule=one_cycle, lr=0.1),
    "every_50": partial(train, every=50, steps=4000, schedule=cosine, evaluate=200, examples=50_000),
    "every_10_noisy": partial(train, every=10, steps=3000, batch=8, lr=0.02, evaluate=50, examples=20_000),
    "resumed": lambda: resumed(train(schedule=cosine), at=640, back=500),
    "regression": partial(train, regression=True, lr=0.005),
    "short": partial(train, steps=120, evaluate=20),
    "loss_alone": lambda: train(evaluate=None)[["step", "loss"]],
}
FAULTY: dict[str, tuple[Callable[[], pd.DataFrame], set[str]]] = {
    "lr_30_times": (partial(train, lr=1.5), {"stability.divergent", "lr.nothing_learns"}),
    "divergence": (partial(train, regression=True, lr=0.3), {"stability.divergent"}),
    "schedule_per_batch": (partial(train, schedule=lambda p: 0.9 ** (1000 * p)), {"schedule.collapse"}),
    "spike": (partial(train, bad_batches=(600, 620)), {"stability.mid", "stability.spike"}),
    "overfitting": (partial(train, examples=256, rule="adam", lr=0.003, width=128), {"evaluation.generalisation_gap"}),
    "shuffled_labels": (partial(train, random_labels=True, examples=100_000, lr=0.01), {"lr.nothing_learns"}),
    "detached_optimizer": (partial(train, detached=True), {"lr.nothing_learns"}),
}


def alarms(frame: Any, **given: Any) -> dict[str, str]:
    return {f.code: f.status for f in wb.judge(wb.read_log(frame, **given)) if f.status in ("warn", "fail")}


@pytest.mark.slow
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_log_raises_no_alarm(name: str) -> None:
    assert alarms(HEALTHY[name]()) == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTY)
def test_a_planted_fault_is_named(name: str) -> None:
    make, codes = FAULTY[name]
    assert codes & set(alarms(make()))


def curve(steps: int = 400, every: int = 1, noise: float = 0.05, lr: float = 0.1) -> pd.DataFrame:
    at = np.arange(0, steps * every, every)
    loss = 2.0 * np.exp(-np.arange(steps) / 60) + 0.3 + noise * np.random.default_rng(1).standard_normal(steps)
    return pd.DataFrame({"step": at, "loss": loss, "lr": lr})


@pytest.mark.parametrize("spikes", [(), (250,), (150, 280)])
def test_a_spike_that_costs_nothing_is_told_without_an_alarm(spikes: tuple[int, ...]) -> None:
    frame = curve()
    for at in spikes:
        frame.loc[at : at + 14, "loss"] += 3.0 * np.exp(-np.arange(15) / 5)
    found = wb.judge(wb.read_log(frame))
    line = next((line for line in repr(found).splitlines() if "stability.spike" in line), "")
    assert found["stability.spike"].status == "ok"
    assert bool(line) == bool(spikes)
    if spikes:
        course = re.search(
            r"\(peak loss ([\d.]+), up from about ([\d.]+), back after (\d+) steps(.*?)\)",
            found["stability.spike"].summary,
        )
        assert course
        onset = frame["loss"][spikes[0] - 20 : spikes[0] - 1].median()
        assert float(course[2]) == pytest.approx(onset, abs=0.2)
        assert float(course[1]) == pytest.approx(frame["loss"][spikes[0] - 5 :].max(), abs=0.3)
        assert 3 <= int(course[3]) <= 25
        assert course[4] == (", the first of 2" if len(spikes) == 2 else "")


def test_a_rise_is_told_by_the_steps_of_the_log() -> None:
    frame = curve(every=50)
    frame.loc[200:, "loss"] += 3.0
    found = wb.judge(wb.read_log(frame))["stability.mid"]
    assert found.status == "fail"
    assert abs(found.step - 200 * 50) <= 5 * 50
    assert alarms(curve(every=50)) == {}


def test_the_libraries_own_logs_are_judged_healthy() -> None:
    for library in ("lightning", "transformers", "tensorboard", "wandb"):
        found = wb.judge(wb.read_log(DATA / library))
        assert not [f for f in found if f.status in ("warn", "fail")], library
        assert found["stability.divergent"].status == "ok", library
        assert found["schedule.collapse"].status == "ok", library
        assert found["clipping.threshold"].value > 0, library


def test_several_logs_are_a_sweep_and_none_of_them_is_anybodys_own() -> None:
    falls = {0.01: 0.3, 0.03: 0.8, 0.1: 1.6, 0.3: 1.9}
    frames = []
    for k, (lr, fall) in enumerate(falls.items()):
        noise = 0.05 * np.random.default_rng(k).standard_normal(400)
        frames.append(
            pd.DataFrame(
                {"step": np.arange(400), "loss": 2.3 - fall * (1 - np.exp(-np.arange(400) / 50)) + noise, "lr": lr}
            )
        )
    frames.append(frames[-1].assign(lr=1.0, loss=np.where(np.arange(400) < 30, 2.3, np.inf)))
    found = wb.judge(wb.read_log(frames))
    assert found["lr.best"].value == 0.3
    assert 0.3 < found["lr.unstable"].value < 1.0
    assert found["stability.divergent"].status == "ok", "far above lr*: by nature"
    assert found["lr.too_low"].status == "not_measured"


def test_what_a_log_cannot_tell_is_not_measured_with_the_reason() -> None:
    found = wb.judge(wb.read_log(curve()[["step", "loss"]]))
    assert "no trial has a learning rate" in found["schedule.collapse"].summary
    assert "no gradient norm" in found["clipping.threshold"].summary
    assert "no validation" in found["evaluation.generalisation_gap"].summary
    assert "neither the model nor its data" in found["loop.no_gradient"].summary
    assert found["stability.mid"].status == "ok"
    assert "nan" not in repr(found)
    norms = np.random.default_rng(0).lognormal(0.0, 0.5, 400)
    found = wb.judge(wb.read_log(curve().drop(columns="lr").assign(grad_norm=norms), max_grad_norm=0.5))
    assert found["clipping.aggressive"].status == "warn"
    assert [f.summary for f in found if "nan" in f.summary] == []


def test_curves_too_short_constant_or_never_finite() -> None:
    assert wb.judge(wb.read_log(curve(5)))["stability.mid"].status == "not_measured"
    flat = wb.judge(wb.read_log(curve().assign(loss=np.log(10))))
    assert flat["lr.nothing_learns"].status == "warn"
    assert "guessing among 10 classes" in flat["lr.nothing_learns"].summary
    assert flat["stability.mid"].status == "ok"
    never = wb.judge(wb.read_log(curve().assign(loss=np.inf)))
    assert never["stability.divergent"].status == "fail"


def test_norms_logged_after_clipping_choose_no_threshold() -> None:
    norms = np.random.default_rng(0).lognormal(0.0, 0.5, 400)
    before = wb.judge(wb.read_log(curve().assign(grad_norm=norms)))
    assert before["clipping.threshold"].value == pytest.approx(np.quantile(norms[40:], 0.9), rel=0.01)
    after = wb.judge(wb.read_log(curve().assign(grad_norm=np.minimum(norms, 1.0))))
    assert "stop at 1, as if they were logged after clipping" in after["clipping.threshold"].summary
    told = wb.judge(wb.read_log(curve().assign(grad_norm=norms), max_grad_norm=0.3))
    assert told["clipping.aggressive"].status == "warn"


def test_a_log_kept_as_a_study_is_opened_and_judged_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "study"
    assert cli.main(["judge", str(DATA / "wandb"), "--out", str(out), "--fail-on", "fail"]) == 0
    said = capsys.readouterr().out
    assert "Diagnosis of run-" in said
    assert "loss from train/loss" in said
    record, log = wb.open(out), wb.read_log(DATA / "wandb")
    np.testing.assert_allclose(record.steps["loss"], log.steps["loss"])
    assert wb.stability.diagnose(record)["stability.mid"].summary == wb.stability.diagnose(log)["stability.mid"].summary
    assert (out / "report.html").exists()
    kept = {f["code"]: f["status"] for f in json.loads((out / "diagnosis.json").read_text())["findings"]}
    assert kept == {f.code: f.status for f in wb.judge(log)}
    with pytest.raises(UsageError, match="holds a study already"):
        wb.judge(log, out=out)


def test_the_commands_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.csv"
    curve().assign(loss=lambda f: np.where(f["step"] < 200, f["loss"], np.nan)).to_csv(path, index=False)
    assert cli.main(["judge", str(path), "--fail-on", "fail"]) == 3
    assert "stability.divergent" in capsys.readouterr().out
    assert cli.main(["judge", str(path)]) == 0
    assert cli.main(["judge", str(path), "--loss", "los"]) == 2
    assert cli.main(["judge", str(tmp_path / "none.csv")]) == 2
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "study.json").write_text("{}")
    assert cli.main(["judge", str(tmp_path / "study")]) == 2
    assert "workbench report" in capsys.readouterr().err
