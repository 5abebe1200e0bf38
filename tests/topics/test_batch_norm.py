"""Verdicts on batch norm: of planted facts, of a study's arms, of simulated devices; whose examples make a statistic; and the figures."""

from __future__ import annotations

import math
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
from scipy import stats

import workbench as wb
from tests.helpers.simulated_norms import row, study
from tests.helpers.simulated_records import record
from workbench.findings.diagnosis import Diagnosis
from workbench.findings.finding import Finding
from workbench.plots.style import why_not_measured
from workbench.record.json_values import to_json
from workbench.topics.batch_norm.diagnose import better_arms
from workbench.topics.batch_norm.replicas import CODES


def judged(*args: Any, **facts: Any) -> Diagnosis:
    return wb.batch_norm.diagnose(study(*args, **facts))


def ema(warm: float) -> list[dict[str, Any]]:
    return [{"layer": "1", "momentum": 0.1, "batches": 10, "warm": warm}]


def estimate(shift: float | None, noise: float | None) -> dict[str, Any]:
    layers = [{"layer": "1", "shift": 0.01, "noise": 0.01}, {"layer": "4", "shift": shift, "noise": noise}]
    return {"batches": 20, "layers": layers, "loss": None}


@pytest.mark.parametrize(
    ("made", "status"),
    [
        (judged(), "ok"),
        (wb.batch_norm.diagnose(record([], facts={})), "not_measured"),
        (wb.batch_norm.diagnose(record([], facts={"batch_norm": None})), "not_measured"),
        (wb.batch_norm.diagnose(record([], facts={"batch_norm": {"layers": 0}})), "ok"),
        (judged(batch_norm={"unused": 2, "examples": None, "ema": [], "estimate": None}), "ok"),
    ],
)
def test_each_code_is_given_once_with_its_clause(made: Diagnosis, status: str) -> None:
    assert {f.code: f.clause for f in made} == CODES
    assert {f.status for f in made} == {status}


@pytest.mark.parametrize(
    ("facts", "code", "status"),
    [
        ({"examples": 15}, "small_batch", "warn"),
        ({"examples": 16}, "small_batch", "ok"),
        ({"examples": None}, "small_batch", "not_measured"),
        ({"examples": 4, "independent": 15.9}, "small_batch", "warn"),  # values that are steady stand in for examples,
        ({"examples": 4, "independent": 16.0}, "small_batch", "ok"),
        ({"examples": 64, "independent": 3.0}, "small_batch", "ok"),  # and not the other way round
        ({"examples": 64, "refused": 1}, "small_batch", "fail"),
        ({"examples": None, "refused": 3}, "small_batch", "fail"),
        ({"ema": ema(0.95)}, "cold_ema", "ok"),
        ({"ema": ema(0.8)}, "cold_ema", "warn"),
        ({"ema": ema(0.4)}, "cold_ema", "fail"),
        ({"ema": ema(math.nan)}, "cold_ema", "not_measured"),
        ({"unused": 1, "layers": 2, "frozen_new": ["b1"]}, "cold_ema", "warn"),
        ({"unused": 2, "layers": 2, "frozen_new": ["b1"]}, "cold_ema", "warn"),
        ({"unused": 2, "layers": 2, "frozen_new": []}, "cold_ema", "ok"),
        ({"estimate": estimate(0.4, 0.01)}, "stale", "ok"),
        ({"estimate": estimate(0.6, 0.01)}, "stale", "warn"),
        ({"estimate": estimate(0.6, 0.3)}, "stale", "ok"),  # noise explains it
        ({"estimate": estimate(math.nan, 0.1)}, "stale", "not_measured"),
        ({"estimate": estimate(None, None)}, "stale", "not_measured"),  # what JSON makes of it
        ({"asked": 64, "examples": 16}, "ghost_size", "warn"),
        ({"asked": 64, "examples": 64}, "ghost_size", "ok"),
        ({"examples": None}, "ghost_size", "not_measured"),
    ],
)
def test_planted_facts(facts: dict[str, Any], code: str, status: str) -> None:
    assert judged(batch_norm=facts)[f"batch_norm.{code}"].status == status


@pytest.mark.parametrize(("stored", "status"), [(0.31, "ok"), (1.5, "warn"), (0.2, "ok"), (math.nan, "warn")])
def test_where_the_loss_is_known_it_decides(stored: float, status: str) -> None:
    """Statistics that differ and cost nothing are no alarm; what they cost is a share of what training learned."""
    loss = {"start": 2.3, "stored": stored, "anew": 0.3}
    far = estimate(0.9, 0.01)
    assert judged(batch_norm={"ema": ema(0.8), "loss": loss})["batch_norm.cold_ema"].status == status
    assert judged(batch_norm={"estimate": far, "loss": loss})["batch_norm.stale"].status == status
    if stored == 1.5:
        both = judged(batch_norm={"ema": ema(0.8), "estimate": far, "loss": loss})
        assert [both[f"batch_norm.{name}"].status for name in ("cold_ema", "stale")] == ["warn", "ok"], "told once"


# The arms of a study.

WHOLE = [0.50, 0.52, 0.48, 0.51, 0.49]


def test_a_virtual_batch_that_is_better_beyond_chance_is_named() -> None:
    arms = {
        None: WHOLE,
        64: [v + 0.001 for v in WHOLE],
        16: [v - 0.1 for v in WHOLE[::-1]],
        8: [v + 0.1 for v in WHOLE],
    }
    ghost = judged(arms)["batch_norm.ghost_size"]
    assert ghost.status == "warn"
    assert "bn_stat_examples=16" in ghost.advice[0]
    assert {row["statistic"] for row in ghost.evidence["arms"]} == {128, 64, 16, 8}
    larger = {size: [v + 3 for v in values] for size, values in arms.items()}
    assert "bn_stat_examples=8" in judged(larger, select_mode="max")["batch_norm.ghost_size"].advice[0]
    for values in ([math.nan] * 3, [0.5], []):
        few = judged({None: [0.5] * max(len(values), 1), 16: values})["batch_norm.ghost_size"]
        assert few.status == "ok", "what says little is told and not judged"


def test_the_chance_that_is_allowed_is_the_one_that_was_given() -> None:
    """Paired gains 3, 1, 2 and 2 hundredths: t = 4.9 with 3 degrees of freedom, 0.8 % by chance, 2.4 % with three arms."""
    whole = [0.5, 0.5, 0.5, 0.5]
    arms: dict[int | None, list[float]] = {None: whole, 16: [0.47, 0.49, 0.48, 0.48], 8: [0.6] * 4, 32: [0.6] * 4}
    chance = judged(arms)["batch_norm.ghost_size"].evidence["chance"][16]
    assert chance == pytest.approx(3 * stats.ttest_1samp([0.03, 0.01, 0.02, 0.02], 0, alternative="greater").pvalue)
    for alpha, status in ((chance * 1.01, "warn"), (chance * 0.99, "ok"), (0.05, "warn")):
        assert wb.batch_norm.diagnose(study(arms), alpha=alpha)["batch_norm.ghost_size"].status == status


def test_chance_names_a_virtual_batch_as_rarely_as_asked_for() -> None:
    """Arms that are all alike, and seeds that lift all of them together, as shared seeds do."""
    rng, named, studies = np.random.default_rng(0), 0, 2000
    for _ in range(studies):
        seed = rng.normal(0.5, 0.05, 4)
        drawn = [seed + rng.normal(0, 0.02, 4) for _ in range(5)]
        whole, *others = (
            {"statistic": size, "values": values, "seeds": range(4)}
            for size, values in zip((128, 8, 16, 32, 64), drawn, strict=True)
        )
        named += min(better_arms(others, whole, sign=1.0).values()) < 0.05
    assert named < studies * 0.05 + 3 * math.sqrt(studies * 0.05 * 0.95)
    assert named > studies * 0.02, "a test that never fires is none"


# Simulated devices.


@pytest.mark.parametrize(
    ("devices", "rank_local", "variance_of_means"),
    [
        ([row(1, spread=0), row(4, spread=0.049)], "ok", "ok"),
        ([row(1, spread=0), row(4, spread=0.06)], "warn", "ok"),
        ([row(1, spread=0), row(4, spread=math.nan)], "not_measured", "ok"),
        ([row(4, missing=0.2)], "ok", "warn"),
        ([row(4), row(4, shards="sorted", spread=0.5, missing=0.9)], "ok", "ok"),  # nobody sorts
        ([row(4, shards="sorted", spread=0.5, missing=0.9)], "warn", "warn"),
    ],
)
def test_a_loss_and_a_variance_that_depend_on_the_device_are_found(
    devices: list[dict[str, Any]], rank_local: str, variance_of_means: str
) -> None:
    found = judged(batch_norm_devices=devices)
    assert found["batch_norm.rank_local"].status == rank_local
    assert found["batch_norm.variance_of_means"].status == variance_of_means
    assert ("50.00%" in found["batch_norm.rank_local"].summary) == any(row["shards"] == "sorted" for row in devices)
    rows = [{"norm": norm, "batch_size": 4, "lr": lr, "values": [v], "mean": v} for norm, lr, v in
            (("batch", 0.1, 0.9), ("batch", 0.2, 0.8), ("layer", 0.1, 0.5), ("layer", 0.2, math.inf))]  # fmt: skip
    summary = judged(batch_norm_swap=rows)["batch_norm.small_batch"].summary
    assert "4: batch 0.8, layer 0.5" in summary, "each norm at its best lr"


@pytest.mark.parametrize(
    ("gains", "said"),
    [
        ([1.0, 1.1, 0.9], "layer is better at 4 (p = 0.0033)"),  # by 2 degrees of freedom p = 1 - t / sqrt(t^2 + 2)
        ([-1.0, -1.1, -0.9], "layer is worse at 4 (p = 0.0033)"),
        ([1.0, 2.0, -1.0], "None differs significantly from batch norm"),
    ],
)
def test_another_norm_differs_where_seeds_agree(gains: list[float], said: str) -> None:
    values = {"batch": [5.0, 7.0, 6.0], "layer": [b - g for b, g in zip([5.0, 7.0, 6.0], gains, strict=True)]}
    rows = [{"norm": n, "batch_size": 4, "lr": 0.1, "values": v, "mean": sum(v) / 3} for n, v in values.items()]
    assert said in judged(batch_norm_swap=rows)["batch_norm.small_batch"].summary


# Figures.

ARMS: dict[int | None, list[float]] = {8: [0.6, 0.7], 32: [0.5, 0.52], None: [0.55, 0.55]}
DEVICES = [row(k, shards=kind, spread=0.01 * k) for kind in ("dealt", "sorted") for k in (1, 2, 8)]


@pytest.fixture(autouse=True)
def close_figures() -> Any:
    yield
    plt.close("all")


@pytest.mark.parametrize("plot", [wb.batch_norm.plot, wb.batch_norm.plot_devices])
def test_a_diagnosis_that_was_read_back_is_drawn_alike_and_nothing_says_so(plot: Any) -> None:
    r = study(ARMS, batch_norm_devices=DEVICES)
    found = wb.batch_norm.diagnose(r)
    fields = Finding.__dataclass_fields__
    again = Diagnosis(findings=tuple(Finding(**{n: to_json(getattr(f, n)) for n in fields}) for f in found))
    one, other = plot(r, found), plot(r, again)
    if plot is wb.batch_norm.plot:
        bars: Any = next(
            c for c in one.containers if c.get_label() == "statistics from a subsample (± standard error)"
        )[0]
        assert bars.get_ydata().tolist() == pytest.approx([0.65, 0.51, 0.55])
        assert [t.get_text() for t in one.get_xticklabels()] == ["8", "32", "128"]
    else:
        loss: Any = next(line for line in one.get_lines() if line.get_label() == "validation loss, sorted shards")
        assert (list(loss.get_xdata()), list(loss.get_ydata())) == ([2, 8], pytest.approx([0.02, 0.08]))
    assert [list(a.get_ydata()) for a in one.get_lines()] == [list(b.get_ydata()) for b in other.get_lines()]
    for nothing in (
        record([]),
        study(),
        record([], facts={"batch_norm": {"layers": 0}}),
        study({None: [math.nan] * 2}),
    ):
        assert why_not_measured(plot(nothing))
