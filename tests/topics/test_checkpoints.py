"""Best against last, what choosing wins by luck, and early stopping: found where planted, silent where luck explains it (P4)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch.utils.data import TensorDataset

import workbench as wb
from tests.helpers.simulated_checkpoints import TOTAL, evaluated, overfitted
from tests.helpers.simulated_records import evaluations, record, trial
from tests.helpers.workloads import small_workload
from workbench.curves.selection import expected_maximum, wobble
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


def test_each_code_is_there_once_whatever_the_record() -> None:
    for r in (evaluated([overfitted()]), evaluated([]), evaluated([[NAN] * 5]), record([trial(np.ones(9), 0.1)])):
        assert [f.code for f in wb.checkpoints.diagnose(r)] == list(CODES)


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
        assert row["best_frac"] == row["best_step"] / TOTAL
        assert row["gain"] == pytest.approx(c[-1] - c.min())
    assert "5 of 5 runs" in found.summary


def test_a_gain_that_is_not_there_on_the_test_split_is_no_gain() -> None:
    """The curves rise where they are chosen; the test split has its own noise and no rise."""
    curves = [overfitted(seed=k, rise=0.2) for k in range(5)]
    found = best_not_last(*curves, test=[noisy(0.6, seed=50 + k) for k in range(5)])
    assert found.status == "ok"
    assert "does not carry over" in found.summary
    assert "not beyond chance" in found.summary
    assert found.evidence["selected_gain"] > 0.15


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
    assert "how much of that holds on new data was not measured" in found.summary
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
    assert ("but too little to matter (0.1)" in found.summary) is (status == "ok")


def test_higher_may_be_better() -> None:
    curves = [1 - overfitted(seed=k) / 3 for k in range(3)]
    found = best_not_last(*curves, metric="accuracy", select="validation/accuracy", select_mode="max")
    assert found.status == "warn"
    assert found.evidence["runs"][0]["best"] == pytest.approx(curves[0].max())
    assert found.value > 0


@pytest.mark.parametrize(
    ("curves", "status", "words"),
    [
        ([2.3 * np.exp(-3 * np.linspace(0, 1, 21) - k) for k in range(3)], "ok", "is the best in each of 3 runs"),
        ([[2.0, 1.0, 0.9, 0.8, 0.7, NAN]], "warn", "not finite in 1 of 1 runs"),
        ([[0.7] * 12], "ok", "The last checkpoint"),
        ([[2.0, 1.0, 0.5]], "not_measured", "finite evaluations"),
        ([[INF] * 8], "not_measured", "finite evaluations"),
        ([], "not_measured", "no run has finished"),
    ],
)
def test_what_is_said_of_the_last_checkpoint(curves: Any, status: str, words: str) -> None:
    found = best_not_last(*curves)
    assert (found.status, words in found.summary) == (
        status,
        status != "ok" or "best" in words or words in found.summary,
    ), found
    assert dumps(found.to_dict())


@pytest.mark.parametrize(
    ("curves", "how", "status", "words"),
    [
        ([[0.7] * 12], {}, "warn", "tells no checkpoint from another"),
        ([[NAN] * 8, [NAN] * 8], {}, "fail", "never finite in 2 of 2 runs"),
        ([[2.0, NAN, 1.0, 0.9, 0.8, 0.7]], {}, "warn", "1 of 6 evaluations"),
        ([[0.1, 0.5, 0.2, 0.6, 0.3, 0.7, 0.4]], {}, "fail", "selects the untrained model in 1 run."),
        ([[1.0, 0.99, 1.3, 0.98, 1.4, 0.99, 1.2]], {}, "warn", "more than all that training learned"),
        ([[2.0, 1.0, 0.9, 0.8, 0.7]], {"select": "validation/f1"}, "fail", "validation/f1 was never evaluated"),
        ([[2.0, 1.0, 0.9, 0.8, 0.7]], {"select": "train/loss"}, "fail", "the one that memorises most"),
        ([[2.0, 1.0, 0.9, 0.8, 0.7]], {"select": "test/loss"}, "fail", "no test of what was chosen"),
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
    assert found.evidence["luck"] == pytest.approx(2.16 * 0.1, rel=0.25), (
        "the best of 40 draws lies 2.16 deviations out"
    )


@pytest.mark.parametrize(("draws", "exact"), [(1, 0.0), (2, 1 / math.sqrt(math.pi)), (3, 1.5 / math.sqrt(math.pi))])
def test_the_expected_maximum_of_normal_draws_has_the_closed_form(draws: int, exact: float) -> None:
    assert expected_maximum(draws) == pytest.approx(exact, abs=1e-9)
    best = np.random.default_rng(0).standard_normal((40_000, 10)).max(1)
    assert expected_maximum(10) == pytest.approx(best.mean(), abs=4 * best.std() / 200)


def test_noise_is_that_of_the_draws_whatever_the_trend() -> None:
    k = np.arange(4000)
    noise = 0.3 * np.random.default_rng(1).standard_normal(k.size)
    for trend in (0 * k, 2 - 0.01 * k, 1e-6 * (k - 2000.0) ** 2):
        assert wobble(trend + noise) == pytest.approx(0.3, rel=0.05)
    for still in ([1.0, 2.0, 5.0], [2.0] * 9, [1.0, 2.0, 3.0, 4.0, 5.0]):
        assert wobble(np.array(still)) == pytest.approx(0.0, abs=1e-12)


def test_how_much_of_the_lead_carries_over_is_told() -> None:
    shared = [0.05 * np.random.default_rng(k).standard_normal(40) for k in range(20)]
    curves = [np.r_[2.3, 0.5 + s] for s in shared]
    same = selection(*curves, test=[np.r_[2.3, 0.6 + s] for s in shared])
    assert same.evidence["carried_over"] == pytest.approx(1.0)
    other = selection(*curves, test=[noisy(0.6, seed=500 + k, sd=0.05) for k in range(20)])
    assert abs(other.evidence["carried_over"]) < 0.3
    assert selection(*curves).evidence["carried_over"] is None


@pytest.mark.parametrize(("bad", "count"), [([0.1, 0.5, NAN, INF, 0.8, 0.8], 2), ([INF] * 6, 6)])
@pytest.mark.parametrize("split", ["test"])
def test_another_metric_that_is_not_finite_is_named_with_its_first_step(
    bad: list[float], count: int, split: str
) -> None:
    r = evaluated([[2.0, 1.2, 1.0, 0.9, 0.8, 0.7]])
    steps = [0, 200, 400, 600, 800, 1000]
    r.evals = pd.concat([r.evals, pd.DataFrame(evaluations(0, steps, bad, split=split, metric="f1"))])
    found = wb.checkpoints.diagnose(r)["checkpoints.selection"]
    first = steps[next(k for k, value in enumerate(bad) if not math.isfinite(value))]
    assert found.status == "warn"
    assert f"{split}/f1 was not finite in {count} of 6 evaluations, first at step {first}" in found.summary
    assert found.evidence["others_not_finite"][f"{split}/f1"]["not_finite"] == count
    assert "validation/loss moves by" in found.summary, "what is said of the selected metric stays"


def test_a_metric_that_is_read_the_wrong_way_round_fails() -> None:
    """An accuracy that rises, of which the smallest is selected: the untrained model, in every run."""
    rising = [1 - overfitted(seed=k, rise=0.0) / 2.5 for k in range(3)]
    found = selection(*rising, metric="share", select="validation/share")
    assert found.status == "fail"
    assert found.summary == "validation/share, where smaller is better, selects the untrained model in all 3 runs."
    assert "select_mode='max'" in found.advice[0]
    assert selection(*rising, metric="share", select="validation/share", select_mode="max").status == "ok"
    worse = selection(*rising)
    assert worse.status == "fail"
    assert "targets of this split" in worse.advice[0]


RULE = {rule.name: rule for rule in RULES}


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
    assert RULE[name].stop(np.array(costs, dtype=float)) == place


def test_the_table_holds_what_can_be_counted() -> None:
    """Best at the last evaluation; patience 3 stops at the fourth of ten intervals and keeps the second value."""
    curve = [1.0, 0.5, 0.6, 0.6, 0.6, 0.4, 0.3, 0.2, 0.1, 0.05, 0.0]
    other = np.linspace(1, 0, 11)
    table = wb.checkpoints.early_stopping(evaluated([curve, other], [np.array(curve) + 1, other + 1])).set_index("rule")
    row = table.loc["patience 3"]
    assert row["runs"] == 2
    assert row["stopped"] == 1
    assert row["steps_saved"] == pytest.approx((0.6 + 0.0) / 2)
    assert row["lost"] == pytest.approx((0.5 + 0.0) / 2)
    assert row["lost_frac"] == pytest.approx(0.25)
    assert row["worst_lost_frac"] == pytest.approx(0.5)
    assert row["test_lost"] == pytest.approx(0.25)


def test_the_full_budget_is_never_worse_where_it_is_watched() -> None:
    rng = np.random.default_rng(0)
    curves = [overfitted(seed=k, rise=rng.uniform(-0.3, 0.6), noise=rng.uniform(0, 0.2)) for k in range(200)]
    table = wb.checkpoints.early_stopping(evaluated(curves))
    assert (table["lost"] >= 0).all()
    assert table["lost"].max() > 0
    assert table["test_lost"].isna().all()


def test_a_rule_that_stops_before_anything_is_finite_loses_everything() -> None:
    table = wb.checkpoints.early_stopping(evaluated([[NAN, NAN, NAN, NAN, 2.0, 1.0, 0.5, 0.4]])).set_index("rule")
    assert table.loc["patience 3", "lost"] == math.inf
    assert table.loc["patience 10", "lost"] == 0


CURVE = [2.0, 1.5, 1.6, 1.7, 1.0, 1.1, 1.2, 1.3, 1.4, 0.5, 0.6]


def test_it_stops_after_so_many_evaluations_without_a_new_best() -> None:
    (run,) = wb.checkpoints.stop_with_patience(evaluated([CURVE]), 2).runs
    assert (run.stop_step, run.kept_step, run.kept) == (300, 100, 1.5)
    assert (run.best_step, run.best) == (900, 0.5)
    assert run.saved_frac == pytest.approx(0.7)
    assert run.lost_frac == pytest.approx((1.5 - 0.5) / (2.0 - 0.5))


@pytest.mark.parametrize("evaluations", [3])
def test_its_row_is_that_of_the_table(evaluations: int) -> None:
    made = evaluated([overfitted(seed=k, noise=0.1) for k in range(3)])
    row = wb.checkpoints.stop_with_patience(made, evaluations).row
    table = wb.checkpoints.early_stopping(made).set_index("rule").loc[f"patience {evaluations}"]
    assert row is not None
    assert {key: row[key] for key in ("steps_saved", "lost_frac", "worst_lost_frac", "stopped")} == {
        key: table[key] for key in ("steps_saved", "lost_frac", "worst_lost_frac", "stopped")
    }


def test_larger_is_better_where_the_metric_says_so() -> None:
    made = evaluated([[-v for v in CURVE]], metric="accuracy", select="validation/accuracy", select_mode="max")
    (run,) = wb.checkpoints.stop_with_patience(made, 2).runs
    assert (run.kept, run.best) == (-1.5, -0.5)


def test_a_run_that_is_stopped_before_anything_finite_keeps_nothing() -> None:
    (run,) = wb.checkpoints.stop_with_patience(
        evaluated([[np.nan, np.nan, np.nan, np.nan, 2.0, 1.0, 0.5, 0.4]]), 2
    ).runs
    assert run.kept_step is None
    assert "nothing finite to keep" in run.words


def at(ax: Axes, label: str) -> tuple[float, float]:
    (found,) = [line for line in ax.lines if str(line.get_label()).startswith(label)]
    return float(np.ravel(found.get_xdata())[0]), float(np.ravel(found.get_ydata())[0])


def test_the_stop_the_kept_and_the_best_are_marked() -> None:
    ax = wb.checkpoints.plot_patience(
        wb.checkpoints.stop_with_patience(evaluated([CURVE]), 2), step=400, ax=Figure().subplots()
    )
    assert at(ax, "stops at step 300")[0] == 300
    assert at(ax, "kept: 1.5") == (100, 1.5)
    assert at(ax, "best: 0.5") == (900, 0.5)
    assert at(ax, "step 400: 1")[0] == 400


def with_test() -> Workload:
    x, y = small_workload().train_data.tensors
    return small_workload(test_data=TensorDataset(x[20:41], y[20:41]))


def test_every_seed_is_evaluated_on_both_splits(tmp_path: Path) -> None:
    record = wb.checkpoints.Study(seeds=3, evaluations=8).run(with_test(), out=tmp_path / "s")
    assert record.trials["stage"].tolist() == ["checkpoints"] * 3
    assert record.trials["shared_seed"].tolist() == [0, 1, 2]
    counts = record.evals[record.evals["metric"] == "loss"].groupby(["trial", "split"]).size()
    assert counts.tolist() == [9] * 6
    found = wb.checkpoints.diagnose(record)
    assert found["checkpoints.best_not_last"].evidence["runs_tested"] == 3
    assert found["checkpoints.resume_jump"].status == "ok"


def test_the_test_split_decides_nothing(tmp_path: Path) -> None:
    plain, tested = (
        wb.checkpoints.Study(seeds=2, resume=False).run(w, out=tmp_path / n)
        for w, n in ((small_workload(), "a"), (with_test(), "b"))
    )
    assert plain.trials["best_step"].tolist() == tested.trials["best_step"].tolist()
    assert plain.steps["loss"].tolist() == tested.steps["loss"].tolist()
    assert wb.checkpoints.diagnose(plain)["checkpoints.best_not_last"].evidence["split"] == "selected"


@pytest.mark.parametrize("gradients", ["vmap"])
def test_the_logged_test_loss_is_that_of_the_checkpoint(tmp_path: Path, gradients: str) -> None:
    workload = with_test()
    trainer = Trainer(gradients=gradients)  # type: ignore[arg-type]
    record = wb.checkpoints.Study(seeds=2, resume=False).run(workload, trainer, out=tmp_path / "s")
    best = record.trial(1).best()
    assert best.checkpoint is not None
    model = load_model(workload.build_model().double(), best.checkpoint)
    loss = evaluate(workload, model, split="test", batch_size=21, device=torch.device("cpu"), precision="float64")[0]
    rows = record.trial(1).evals.query(f"split == 'test' and metric == 'loss' and step == {best.step}")
    assert rows["value"].tolist() == [pytest.approx(loss.value, rel=1e-12)]
    assert rows["num_examples"].tolist() == [21]


@pytest.mark.parametrize(("field", "value"), [("seeds", 0), ("evaluations", 3), ("seeds", True), ("evaluations", 2.5)])
def test_fields_are_checked(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"{field}="):
        wb.checkpoints.Study(**{field: value})  # type: ignore[arg-type]
