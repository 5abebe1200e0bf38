"""How a study evaluates: interval, batch size, proxy and memory; planted faults are found, healthy twins are not (P2)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.figure import Figure
from scipy import stats
from torch import nn
from torch.utils.data import TensorDataset

import workbench as wb
from tests.helpers.evaluations import evaluated, paused
from tests.helpers.records import empty
from tests.helpers.simulated_records import evaluations
from tests.helpers.workloads import small_workload
from workbench.errors import ConfigError, UsageError
from workbench.plots.style import why_not_measured
from workbench.topics.evaluation.collect import memory_per_example
from workbench.topics.evaluation.proxy import rank_correlation, trend_free_correlation
from workbench.train.trainer import Trainer
from workbench.workloads.base import Workload

FALLING = np.geomspace(2.0, 0.1, 21)


def changed(config: dict[str, Any] | None = None, *, values: Any = FALLING, steps: Any = None, **changes: Any) -> Any:
    """A trial of 10 s in steps of 10 from a batch of 64, evaluated at `steps`; `changes` are facts, or seconds of its evaluations."""
    record = evaluated(values)
    if steps is not None:
        record.evals = pd.DataFrame(evaluations(0, list(steps), np.ones(len(steps)), split="validation"))
    record.trials["seconds"], record.evals["seconds"] = 10.0, changes.pop("seconds", 0.0) / len(FALLING)
    record.config |= config or {}
    record.facts |= changes
    return record


MEMORY = {"training_bytes_per_example": 4096.0, "evaluation_bytes_per_example": 1024.0}
COUPLED = {"coupled": True, "metric": "loss", "values": [1.0, 2.0], "weights": [1.0, 1.0], "cases": []}
COUPLED_64: Any = {"eval_batch_size": 64, "accumulate_steps": 4}


@pytest.mark.parametrize(
    ("record", "code", "status", "value", "words"),
    [
        (changed(), "interval", "ok", 20, "every 10 steps"),
        (changed(values=[2.0, 1.0, 0.5]), "interval", "warn", 2, "little to choose from"),
        (changed(steps=(0, 31, 62, 80, 111, 142, 200)), "interval", "warn", 6, "18 to 31 steps apart"),
        (changed(steps=(0, 31, 62, 93, 124, 155, 186, 200)), "interval", "ok", 7, "every 31 steps"),
        (changed(seconds=0.2), "interval", "ok", 20, "every 10 steps"),
        (changed(seconds=6.0), "interval", "warn", 20, "takes 60% of the trial's time"),
        (changed(memory=MEMORY), "batch_size", "ok", 256, "4,096 bytes in training and 1,024 in evaluation"),
        (changed({"eval_batch_size": 64}), "batch_size", "ok", 64, "at least the training batches of 64"),
        (changed({"eval_batch_size": 32}), "batch_size", "warn", 32, "smaller than training batches of 64"),
        (changed({"accumulate_steps": 4}, evaluation=COUPLED), "batch_size", "ok", 16, "as in training"),
        (changed({"eval_batch_size": 16, "accumulate_steps": 4}, evaluation=COUPLED), "batch_size", "ok", 16, "as in training"),
        (changed(COUPLED_64, evaluation=COUPLED), "batch_size", "warn", 64, "it is another loss"),
        (empty(), "interval", "not_measured", None, "no trial has been evaluated"),
    ],
)  # fmt: skip
def test_how_often_and_in_which_batches_a_run_is_evaluated(
    record: Any, code: str, status: str, value: Any, words: str
) -> None:
    diagnosis = wb.evaluation.diagnose(record)
    codes = ["interval", "batch_size", "weighting", "coverage", "bad_proxy"]
    assert [f.code.partition(".")[2] for f in diagnosis] == codes
    found = diagnosis[f"evaluation.{code}"]
    assert (found.status, found.value, words in found.summary) == (status, value, True), found
    assert ("time_frac" in found.evidence) == ("time" in words), "two honest runs must say the same"


def noisy(correlation: float, count: int = 40, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    one = rng.standard_normal(count)
    return one, correlation * one + math.sqrt(1 - correlation**2) * rng.standard_normal(count)


def proxy(record: Any, **options: Any) -> Any:
    return wb.evaluation.diagnose(record, **options)["evaluation.bad_proxy"]


def wobbling(shared: float, seed: int = 0, sd: float = 0.1) -> tuple[np.ndarray, np.ndarray]:
    """Two falling curves whose noise is the same up to a share."""
    a, b = noisy(shared, len(FALLING), seed)
    return FALLING * np.exp(sd * a), 1.3 * FALLING * np.exp(sd * b)


def test_a_trend_alone_makes_no_proxy_good() -> None:
    """Both fall, and what each does beside that is its own: a correlation of 0.97 that says nothing of the proxy."""
    one, other = wobbling(0.98)
    good = proxy(evaluated(one, other, subset="random-8"))
    assert (good.status, good.value) == ("ok", pytest.approx(stats.spearmanr(one, other).statistic))
    assert (good.evidence["regret"], "beside the trend" in good.summary) == (0, True)
    found = proxy(evaluated(*wobbling(0.0), subset="random-8"))
    assert found.value > 0.95
    assert found.status == "not_measured"
    assert "any two curves that fall have" in found.summary
    alike = proxy(evaluated(FALLING, FALLING * 1.3 + 0.01))
    assert (alike.status, "nothing is left of it" in alike.summary) == ("not_measured", True)


@pytest.mark.parametrize("correlation", [-0.8, 0.4])
def test_a_bad_proxy_is_flagged_with_what_it_costs(correlation: float) -> None:
    one, other = noisy(correlation)
    found = proxy(evaluated(one, other))
    assert found.status == "warn"
    assert found.value == pytest.approx(stats.spearmanr(one, other).statistic)
    assert found.evidence["regret"] == pytest.approx(other[one.argmin()] - other.min())
    assert found.evidence["low"] < found.value < found.evidence["high"] < found.threshold


def test_noise_on_a_plateau_does_not_make_a_proxy_bad() -> None:
    rng = np.random.default_rng(4)
    curve = np.r_[np.geomspace(2.0, 0.3, 6), np.full(60, 0.3)]
    one, other = (curve * (1 + 0.01 * rng.standard_normal(66)) for _ in range(2))
    found = proxy(evaluated(one, other))
    assert found.evidence["high"] < 0.8
    assert found.status == "ok"
    assert "differ by less than" in found.summary
    assert proxy(evaluated(one[::-1], other)).status == "warn"


@pytest.mark.parametrize(
    ("one", "other", "options", "words"),
    [
        (FALLING[:7], FALLING[:7], {}, "7 checkpoints"),
        (FALLING, None, {"subset": "random-8-seed0"}, "0 checkpoints"),
        (np.arange(9.0), np.array([1.0, 0, 3, 2, 7, 4, 5, 6, 8]), {"min_correlation": 0.95}, "too few to tell it from 0.95"),
        (FALLING[:12], np.full(12, 0.5), {}, "is constant, or not finite"),
        (np.full(12, np.nan), FALLING[:12], {}, "is constant, or not finite"),
    ],
)  # fmt: skip
def test_what_cannot_be_told_of_a_proxy_is_not_measured(one: Any, other: Any, options: Any, words: str) -> None:
    found = proxy(evaluated(one, other, subset=options.pop("subset", "")), **options)
    assert (found.status, words in found.summary) == ("not_measured", True), found


def test_the_interval_is_the_published_one_and_covers() -> None:
    """Bonett and Wright (2000): z +- 1.96 sqrt((1 + r^2/2)/(n - 3)); 95 % of 400 draws from a known correlation."""
    found = rank_correlation(*noisy(0.7, 50))
    z, half = math.atanh(found.value), 1.959964 * math.sqrt((1 + found.value**2 / 2) / 47)
    assert (found.low, found.high) == pytest.approx((math.tanh(z - half), math.tanh(z + half)), rel=1e-5)
    truth = 6 / math.pi * math.asin(0.7 / 2)  # Spearman's of a bivariate normal
    inside = [(r := rank_correlation(*noisy(0.7, 50, seed))).low <= truth <= r.high for seed in range(400)]
    assert 0.92 <= np.mean(inside) <= 0.98


STEPS = np.arange(21.0) * 10


def test_a_trend_that_is_shared_is_found_to_be_no_more() -> None:
    """A false alarm at a level of 5 %; the curvature that is left raises it to 7 % where it is as large as the noise."""
    trend, found = 2.3 * np.exp(-4 * np.linspace(0, 1, 21)), []
    for seed in range(200):
        a, b = 0.1 * np.random.default_rng(seed).standard_normal((2, 21))
        found.append(trend_free_correlation(STEPS, trend + a, 1.3 * trend + b))
    assert 0.01 <= np.mean([f.low > 0 for f in found]) <= 0.1
    assert abs(np.mean([f.value for f in found])) < 0.25


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.ones(21), STEPS), (STEPS, 3 * STEPS + 1), (np.exp(-STEPS / 50), np.exp(-STEPS / 40)), (np.full(21, np.nan), STEPS),
        (np.r_[1.0, 2.0, np.full(19, np.inf)], STEPS),
    ],
    ids=["constant", "straight", "curved alike", "NaN", "too short"],
)  # fmt: skip
def test_where_nothing_is_left_it_is_nan(one: np.ndarray, other: np.ndarray) -> None:
    found = trend_free_correlation(STEPS, one, other)
    assert (math.isnan(found.value), found.low > 0) == (True, False)


def workload() -> Workload:
    """Learns sin of a sum; the last four of its 60 validation examples have the sign of their labels wrong."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(160, 3, generator=generator)
    y = torch.sin(x.sum(1)) + 0.05 * torch.randn(160, generator=generator)
    y[156:] = -torch.sin(x[156:].sum(1))
    return small_workload(
        train_data=TensorDataset(x[:100], y[:100]),
        validation_data=TensorDataset(x[100:], y[100:]),
        test_data=TensorDataset(x[:30], y[:30]),
        config={"peak_lr": 0.01, "momentum": 0.5, "total_steps": 120, "batch_size": 16},
    )


def test_a_random_proxy_ranks_checkpoints_as_the_whole_split_does(tmp_path: Path) -> None:
    study = wb.evaluation.Study(examples=40, evaluations=24, pause_s=0.05)
    record = study.run(workload(), Trainer(track=2), out=tmp_path / "study")
    found = wb.evaluation.diagnose(record)
    assert [f.status for f in found] == ["ok"] * 5, found
    assert found["evaluation.bad_proxy"].evidence["checkpoints"] == 25
    assert "(40 of 60 examples)" in found["evaluation.bad_proxy"].summary
    counts = record.evals[record.evals["metric"] == "loss"].groupby(["setting", "split", "num_examples"]).size()
    wanted = {("offline", "test", 30): 25, ("offline", "validation", 60): 25, ("periodic", "validation", 40): 50}
    assert counts.to_dict() == wanted
    assert record.facts["subset"]["size"] == 40
    assert record.facts["memory"]["training_bytes_per_example"] > 0
    one, held_up = (
        record.evals[(record.evals["trial"] == n) & (record.evals["setting"] == "periodic")] for n in (0, 1)
    )
    assert one["step"].tolist() == held_up["step"].tolist()
    assert one["value"].tolist() == held_up["value"].tolist()
    assert record.steps["step_time_s"].max() > 0.05
    for draw in (wb.evaluation.plot, wb.evaluation.plot_timed):
        assert why_not_measured(draw(record)) is None
    fields: tuple[dict[str, Any], ...] = ({"examples": ["x"]}, {"evaluations": 0}, {"pause_s": -1})
    for field in fields:
        with pytest.raises((ConfigError, UsageError), match=next(iter(field))):
            wb.evaluation.Study(**field)


def test_evaluation_keeps_no_activations_however_deep_the_network() -> None:
    """A layer more is an activation more in training, shape (width,) in float32, and none in evaluation."""
    width = 96

    def bytes_of(depth: int) -> dict[str, float]:
        layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())]
        workload = small_workload(
            build_model=lambda: nn.Sequential(nn.Linear(3, width), *layers, nn.Linear(width, 1)),
            validation_data=TensorDataset(torch.randn(512, 3), torch.randn(512)), config={"precision": None, "batch_size": 512},
        )  # fmt: skip
        return memory_per_example(workload, workload.config, torch.device("cpu"))

    shallow, deep = bytes_of(2), bytes_of(12)
    assert deep["evaluation_bytes_per_example"] == shallow["evaluation_bytes_per_example"]
    more = deep["training_bytes_per_example"] - shallow["training_bytes_per_example"]
    assert more == 10 * width * 4


def test_by_steps_no_evaluation_moves_and_by_seconds_the_rest_does() -> None:
    """100 steps of 10 ms; at 0.1 s intervals the marks are steps 9, 19, ..., until a pause of 0.25 s at step 31."""
    ax = wb.evaluation.plot_timed(paused(), ax=Figure().subplots())
    rows = {line.get_ydata()[0]: [int(x) for x in line.get_xdata()] for line in ax.lines}
    assert rows[3.0] == rows[2.0] == list(range(10, 101, 10))
    assert rows[1.0][:3] == rows[0.0][:3]
    assert set(rows[0.0][3:]).isdisjoint(rows[1.0][3:])
    nothing = (wb.evaluation.plot(evaluated([1.0] * 9)), wb.evaluation.plot_timed(evaluated([1.0, 2.0])))
    assert all(map(why_not_measured, nothing))
