"""Best against last, what choosing wins by luck, and early stopping: found where planted, silent where luck explains it (P4)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import TensorDataset

import workbench as wb
from tests.helpers.simulated_checkpoints import TOTAL, evaluated, overfitted
from tests.helpers.simulated_records import evaluations
from tests.helpers.workloads import small_workload
from workbench.errors import ConfigError
from workbench.findings.finding import Finding
from workbench.record.json_values import dumps
from workbench.topics.checkpoints.diagnose import CODES
from workbench.topics.checkpoints.early_stopping import RULES
from workbench.train.checkpoint import load_model
from workbench.train.evaluation import evaluate
from workbench.train.trainer import Trainer
from workbench.workloads.base import Workload

NAN, INF = math.nan, math.inf


def best_not_last(*curves: Any, test: Any = None, **how: Any) -> Finding:
    return wb.checkpoints.diagnose(evaluated(curves, test, **how))["checkpoints.best_not_last"]


def selection(*curves: Any, test: Any = None, **how: Any) -> Finding:
    return wb.checkpoints.diagnose(evaluated(curves, test, **how))["checkpoints.selection"]


def noisy(level: float, *, seed: int, count: int = 41, sd: float = 0.02) -> np.ndarray:
    """Learned in the first evaluation, and noise around a level from there on."""
    return np.r_[2.3, level + sd * np.random.default_rng(seed).standard_normal(count - 1)]


def test_overfitting_is_found_where_the_test_split_agrees() -> None:
    curves = [overfitted(seed=k) for k in range(5)]
    test = [overfitted(seed=100 + k, rise=0.3) for k in range(5)]
    found = best_not_last(*curves, test=test)
    assert (found.status, found.clause) == ("warn", "P4.3")
    gains = [t[-1] - t[int(np.argmin(c))] for c, t in zip(curves, test, strict=True)]
    assert found.value == pytest.approx(np.mean(gains))
    assert found.evidence["se"] == pytest.approx(np.std(gains, ddof=1) / math.sqrt(5))
    assert found.threshold == pytest.approx(2.131847 * found.evidence["se"], rel=1e-5), (
        "Student's t, 4 degrees of freedom"
    )
    for row, c in zip(found.evidence["runs"], curves, strict=True):
        assert row["best_step"] == int(np.argmin(c)) * TOTAL // 40
        assert row["gain"] == pytest.approx(c[-1] - c.min())
    chosen_by_noise = best_not_last(*curves, test=[noisy(0.6, seed=50 + k) for k in range(5)])
    assert (chosen_by_noise.status, "not beyond chance" in chosen_by_noise.summary) == ("ok", True)
    higher = best_not_last(
        *[1 - c / 3 for c in curves], metric="accuracy", select="validation/accuracy", select_mode="max"
    )
    assert (higher.status, higher.evidence["runs"][0]["best"]) == ("warn", pytest.approx(1 - curves[0].min() / 3))


def test_selection_noise_is_not_called_a_gain() -> None:
    """A plateau: validation picks its luckiest moment, and on the test split nothing is left of it. 40 studies of 5 seeds."""
    alarms = 0
    for study in range(40):
        curves, test = ([noisy(0.5, seed=1000 * study + 10 * k + s) for k in range(5)] for s in (0, 1))
        found = best_not_last(*curves, test=test)
        alarms += found.status == "warn"
        assert found.evidence["selected_gain"] > 0
    assert alarms <= 5, "5 % of 40 are 2; more than 5 come in one of 70 such tests"


@pytest.mark.parametrize("seeds", [1, 4])
def test_without_a_test_split_luck_is_subtracted(seeds: int) -> None:
    alarms = sum(
        best_not_last(*[noisy(0.5, seed=100 * n + k) for k in range(seeds)]).status == "warn" for n in range(40)
    )
    assert alarms <= 2
    found = best_not_last(*[overfitted(seed=k) for k in range(seeds)])
    assert found.status == "warn"
    assert "How much of that holds on new data was not measured" in found.summary
    judge = found.evidence
    assert found.threshold == pytest.approx(judge["luck"] + max(4 * judge["noise"], judge["spread"]))


def test_one_run_that_ends_on_a_bad_evaluation_is_no_gain_that_the_seeds_share() -> None:
    plateaus = [noisy(0.5, seed=k) for k in range(4)]
    plateaus[2][-1] += 0.6
    assert best_not_last(*plateaus).status == "ok"
    for curve in plateaus:
        curve[-1] = 1.1
    assert best_not_last(*plateaus).status == "warn"


@pytest.mark.parametrize(("rise", "status"), [(0.002, "ok"), (0.09, "ok"), (0.11, "warn")])
@pytest.mark.parametrize("tested", [False, True])
def test_what_does_not_matter_is_ok_and_says_so(rise: float, status: str, tested: bool) -> None:
    """1.0 is learned in the first half, and no evaluation is noisy: a tenth of that is the least that matters."""
    at = np.linspace(0, 1, 41)
    curves = [2.0 - np.minimum(at / 0.5, 1) + rise * np.maximum(at / 0.5 - 1, 0) for _ in range(3)]
    found = best_not_last(*curves, test=curves if tested else None)
    assert (found.status, found.value) == (status, pytest.approx(rise))
    less = "but less than 0.1, 10% of what training learned, and so too little to matter"
    assert (less in found.summary) is (status == "ok")


@pytest.mark.parametrize(("ends", "said"), [(0.01, True), (1.0, False), (NAN, False)])
def test_a_run_overfits_where_its_training_loss_falls_on_while_validation_rises(ends: float, said: bool) -> None:
    made = evaluated([overfitted()])
    total = int(made.config["total_steps"])
    loss = np.interp(np.arange(total), [0, 0.4 * total, total], [2.3, 0.5, ends])
    made.steps = pd.DataFrame({"trial": 0, "step": np.arange(total), "loss": loss})
    found = wb.checkpoints.diagnose(made)["checkpoints.best_not_last"]
    best = found.evidence["runs"][0]["best_step"]
    assert found.status == "warn"
    assert (f"the model overfits from step {best:,} on" in found.summary) is said


RISING = [0.1, *np.linspace(0.5, 0.9, 20)]
SHARE = {"metric": "share", "select": "validation/share"}


@pytest.mark.parametrize(
    ("curves", "status", "words"),
    [
        ([2.3 * np.exp(-3 * np.linspace(0, 1, 21) - k) for k in range(3)], "ok", "is the best in each of 3 runs"),
        ([[2.0, 1.0, 0.9, 0.8, 0.7, NAN]], "warn", "not finite in 1 of 1 runs"),
        ([[0.7] * 12], "ok", "The best checkpoint is not the last in the only run"),
        ([[2.0, 1.0, 0.5]], "not_measured", "finite evaluations"),
        ([[INF] * 8], "not_measured", "finite evaluations"),
        ([], "not_measured", "no run has finished"),
    ],
)
def test_what_is_said_of_the_last_checkpoint(curves: Any, status: str, words: str) -> None:
    found = wb.checkpoints.diagnose(evaluated(curves))
    assert [f.code for f in found] == list(CODES)
    last = found["checkpoints.best_not_last"]
    assert (last.status, words in last.summary) == (status, True), last
    assert dumps(last.to_dict())


@pytest.mark.parametrize(
    ("curves", "how", "status", "words"),
    [
        ([RISING] * 3, SHARE, "fail", "where smaller is better, selects the untrained model in all 3 runs"),
        ([RISING] * 3, SHARE | {"select_mode": "max"}, "ok", "validation/share moves by"),
        ([[0.7] * 12], {}, "warn", "cannot rank checkpoints"),
        ([[NAN] * 8, [NAN] * 8], {}, "fail", "never finite in 2 of 2 runs"),
        ([[2.0, NAN, 1.0, 0.9, 0.8, 0.7]], {}, "warn", "1 of 6 evaluations"),
        ([[0.1, 0.5, 0.2, 0.6, 0.3, 0.7, 0.4]], {}, "fail", "selects the untrained model in 1 run."),
        ([[1.0, 0.99, 1.3, 0.98, 1.4, 0.99, 1.2]], {}, "warn", "more than all that training learned"),
        ([[2.0, 1.0, 0.9, 0.8, 0.7]], {"select": "validation/f1"}, "fail", "validation/f1 was never evaluated"),
        ([[2.0, 1.0, 0.9, 0.8, 0.7]], {"select": "train/loss"}, "fail", "the one that memorises most"),
        ([[2.0, 1.0, 0.9, 0.8, 0.7]], {"select": "test/loss"}, "fail", "no independent test"),
        ([[2.0, 1.0, 0.5]], {}, "not_measured", "finite evaluations"),
    ],
)
def test_what_is_said_of_the_metric_that_selects(curves: Any, how: dict[str, str], status: str, words: str) -> None:
    found = selection(*curves, **how)
    assert (found.status, words in found.summary) == (status, True), found


@pytest.mark.parametrize(("rows", "status"), [(500, "fail"), (31, "ok")])
def test_a_split_that_copies_the_training_set_chooses_what_memorises(rows: int, status: str) -> None:
    r = evaluated([[2.0, 1.0, 0.9, 0.8, 0.7]])
    r.facts["data"] = {"overlap": {"train_rows": rows, "train_duplicates": 0, "splits": {"validation": {"same": True}}}}
    assert wb.checkpoints.diagnose(r)["checkpoints.selection"].status == status, "few rows may well be all there is"


def test_selection_by_noise_is_found_and_its_luck_is_the_expected_maximum() -> None:
    """Each evaluation draws 20 other examples: an accuracy that wobbles by 0.1 while the model gained 0.4."""
    curves = [np.r_[0.6, 0.2 + 0.1 * np.random.default_rng(k).standard_normal(40)] for k in range(4)]
    found = selection(*curves)
    assert found.status == "warn"
    assert selection(*[noisy(0.2, seed=k, sd=0.005) for k in range(4)]).status == "ok", "the healthy twin"
    assert found.evidence["noise"] == pytest.approx(0.1, rel=0.25)
    assert found.evidence["luck"] == pytest.approx(2.16 * 0.1, rel=0.25), "the best of 40 lies 2.16 deviations out"
    assert found.evidence["carried_over"] is None
    other = [np.r_[0.6, 0.3 + 0.1 * np.random.default_rng(50 + k).standard_normal(40)] for k in range(4)]
    for test, carried in (([c + 0.1 for c in curves], pytest.approx(1.0)), (other, pytest.approx(0.0, abs=0.6))):
        assert selection(*curves, test=test).evidence["carried_over"] == carried


def test_another_metric_that_is_not_finite_is_named_with_its_first_step() -> None:
    r = evaluated([[2.0, 1.2, 1.0, 0.9, 0.8, 0.7]])
    rows = evaluations(0, range(0, 1200, 200), [0.1, 0.5, NAN, INF, 0.8, 0.8], split="test", metric="f1")
    r.evals = pd.concat([r.evals, pd.DataFrame(rows)])
    found = wb.checkpoints.diagnose(r)["checkpoints.selection"]
    assert found.status == "warn"
    assert "test/f1 was not finite in 2 of 6 evaluations, first at step 400" in found.summary
    assert "validation/loss moves by" in found.summary, "what is said of the selected metric stays"


RULE = {name: stop for name, _, stop in RULES}


@pytest.mark.parametrize(
    ("name", "costs", "place"),
    [
        ("patience 1", [3, 2, 1, 2, 0], 3),
        ("patience 1", [3, 2, 2, 1], 2),  # a tie is no improvement
        ("patience 3", [3, 1, 2, 2, 0.5, 2, 2, 2, 2], 7),
        ("patience 3", [3, 2, 1], None),
        ("patience 3", [1, NAN, NAN, NAN, 0], 3),
        ("patience 3", [NAN, NAN, NAN, NAN, 1], 3),
        ("patience 10", [1.0] + [2.0] * 9 + [0.5], None),
        ("patience 3, by 1 %", [1, 0.995, 0.992, 0.991, 0.5], 3),
        ("patience 3, by 1 %", [1, 0.98, 0.97, 0.96, 0.95], None),
        ("GL 2", [1, 1.01, 1.0199, 1.021], 3),
        ("GL 5", [1, 1.04, 1.06], 2),
        ("GL 5", [0, 1, 2], None),  # a share of nothing
        ("GL 5", [-1, 1, 2], None),
        ("UP 3", [1, 2, 3, 2.5, 2.6, 2.7, 2.8], 6),
        ("UP 3", [1, 2, 3, 3, 4, 5], None),
        ("twice as long", [3, 2, 1, 2, 2, 2, 2], 5),
        ("twice as long", [9, 8, 7, 6, 1, 2, 2, 2, 2], 8),
    ],
)
def test_where_a_rule_stops(name: str, costs: list[float], place: int | None) -> None:
    assert RULE[name](np.array(costs, dtype=float)) == place


def test_the_table_holds_what_can_be_counted() -> None:
    """Best at the last evaluation; patience 3 stops at the fourth of ten intervals and keeps the second value."""
    curve = [1.0, 0.5, 0.6, 0.6, 0.6, 0.4, 0.3, 0.2, 0.1, 0.05, 0.0]
    other = np.linspace(1, 0, 11)
    table = wb.checkpoints.early_stopping(evaluated([curve, other], [np.array(curve) + 1, other + 1])).set_index("rule")
    names = ["runs", "stopped", "steps_saved", "lost", "lost_frac", "worst_lost_frac", "test_lost"]
    assert table.loc["patience 3", names].tolist() == pytest.approx([2, 1, 0.3, 0.25, 0.25, 0.5, 0.25])
    late = evaluated([[NAN, NAN, NAN, NAN, 2.0, 1.0, 0.5, 0.4]])
    assert wb.checkpoints.early_stopping(late).set_index("rule").loc["patience 3", "lost"] == math.inf


def with_test() -> Workload:
    x, y = small_workload().train_data.tensors
    return small_workload(test_data=TensorDataset(x[20:41], y[20:41]))


def test_every_seed_is_evaluated_on_both_splits_of_which_one_decides_nothing(tmp_path: Path) -> None:
    workload = with_test()
    record = wb.checkpoints.Study(seeds=3, evaluations=8).run(workload, Trainer(gradients="vmap"), out=tmp_path / "s")
    assert record.trials["stage"].tolist() == ["checkpoints"] * 3
    assert record.trials["shared_seed"].tolist() == [0, 1, 2]
    assert record.evals[record.evals["metric"] == "loss"].groupby(["trial", "split"]).size().tolist() == [9] * 6
    found = wb.checkpoints.diagnose(record)
    assert found["checkpoints.best_not_last"].evidence["runs_tested"] == 3
    assert found["checkpoints.resume_jump"].status == "ok"
    study = wb.checkpoints.Study(seeds=3, evaluations=8, resume=False)
    plain = study.run(small_workload(), Trainer(gradients="vmap"), out=tmp_path / "plain")
    assert plain.trials["best_step"].tolist() == record.trials["best_step"].tolist()
    assert plain.steps["loss"].tolist() == record.steps["loss"].tolist()
    best = record.trial(1).best()
    assert best.checkpoint is not None
    model = load_model(workload.build_model().double(), best.checkpoint)
    loss = evaluate(workload, model, split="test", batch_size=21, device=torch.device("cpu"), precision="float64")[0]
    rows = record.trial(1).evals.query(f"split == 'test' and metric == 'loss' and step == {best.step}")
    assert rows["value"].tolist() == [pytest.approx(loss.value, rel=1e-12)]
    assert rows["num_examples"].tolist() == [21]
    for field in ({"seeds": 0}, {"evaluations": 3}):
        with pytest.raises(ConfigError, match=next(iter(field))):
            wb.checkpoints.Study(**field)
