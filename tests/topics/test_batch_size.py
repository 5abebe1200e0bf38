"""Batch sizes with planted optima, the gradient noise scale in closed form, and the study that tunes each."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import workbench as wb
from tests.helpers.simulated_batches import OWN_LR, STEPS, batches, level
from tests.helpers.simulated_records import record
from tests.helpers.workloads import Having, small_workload
from workbench.topics.batch_size.arms import next_points, read_arms
from workbench.topics.batch_size.collect import NoiseScale, measure_noise_scale
from workbench.topics.batch_size.diagnose import CODES, diagnose_noise_scale, equivalence

TUNED, RETUNE, EQUAL, NOISE, REGULARISE = tuple(CODES)


def test_a_difference_that_tuning_takes_away():
    """F6.2, F6.3: with all else fixed the small batch looks worse; each at its own lr, they are equal."""
    found = wb.batch_size.diagnose(batches({16: 0.0125, 64: 0.1, 256: 0.4}))
    assert found[TUNED].status == "ok"
    (steps,) = found[TUNED].evidence["factors"]
    assert (steps["equal"], steps["fixed"]) == ("steps", pytest.approx(level(0.1, 0.0125) / 0.2, rel=0.05))
    assert steps["tuned"] == pytest.approx(1.0, abs=0.05)
    assert found[RETUNE].status == "warn"
    shifts = {r["batch_size"]: r["lr_shift"] for r in found[RETUNE].evidence["rows"]}
    assert shifts == pytest.approx({16: 1 / 8, 256: 4.0})
    assert found[RETUNE].value == pytest.approx(level(0.1, 0.0125) / 0.2, rel=0.05)
    assert "peak_lr=0.0125" in found[RETUNE].advice[1]
    assert found[EQUAL].status == "ok"
    assert [r["verdict"] for r in found[EQUAL].evidence["rows"]] == ["equivalent", "equivalent"]


def test_a_longer_run_is_no_better_batch_size():
    """F6.3, F6.7: the metric falls with the number of updates alone, so at equal steps the batch sizes are equal."""
    lengths = {16: {160: 0.5, 40: 1.0}, 64: {40: 1.0}, 256: {40: 1.0, 10: 2.0}}
    found = wb.batch_size.diagnose(batches({16: 0.1, 64: 0.1, 256: 0.1}, lengths=lengths))
    steps, examples = found[TUNED].evidence["factors"]
    for kind in ("fixed", "tuned"):
        assert steps[kind] == pytest.approx(1.0, abs=0.05)
        assert examples[kind] == pytest.approx(4.0, rel=0.05)
    assert found[EQUAL].status == "ok"
    assert "16 at equal steps, 256 at equal steps" in found[EQUAL].summary
    ratios = {(row["equal"], row["batch_size"]): row["ratio"] for row in found[EQUAL].evidence["rows"]}
    assert (ratios["examples", 16], ratios["examples", 256]) == pytest.approx((0.5, 2.0), rel=0.05)


def test_better_at_equal_steps_and_worse_at_equal_examples_is_neither():
    """It saw more examples, then fewer updates; a batch size that is worse by either length is worse."""
    sizes, lengths = {64: 0.1, 256: 0.1}, {256: {40: 0.7, 10: 1.4}}
    assert wb.batch_size.diagnose(batches(sizes, lengths=lengths))[EQUAL].status == "not_measured"
    worse = wb.batch_size.diagnose(batches(sizes, lengths={256: {40: 1.3, 10: 1.4}}))[EQUAL]
    assert (worse.status, worse.summary.count("worse)"), len(worse.advice)) == ("warn", 2, 1)
    alone = wb.batch_size.diagnose(batches({16: 0.0125, 64: 0.1}, lrs=[OWN_LR]))
    assert (alone[TUNED].status, alone[TUNED].clause) == ("warn", "F6.1"), "nothing else was tuned"
    assert "not which one is better" in alone[TUNED].summary
    assert alone[RETUNE].status == "not_measured"


def test_the_advice_is_a_config_with_the_momentum_that_was_tuned_and_its_length():
    """F6.4: lr 0.4 was best at momentum 0.5; with the baseline's 0.9 it is another, eight times longer, step."""
    r = batches({64: 0.1, 256: 0.4}, memory={256: 0.5}, warmup={256: 7}, optimizer="momentum")
    found = wb.batch_size.diagnose(r)[RETUNE]
    assert "256 (40 steps): lr 0.4, momentum 0.5" in found.summary
    assert "64 is best at lr 0.1, momentum 0.9" in found.summary
    begin = found.advice[1]
    source = begin[begin.index("config.replace") : begin.rindex(".")]
    pasted = eval(source, {"config": wb.TrainConfig.from_dict(r.config)})
    assert (pasted.batch_size, pasted.total_steps, pasted.peak_lr) == (256, STEPS, 0.4)
    assert (pasted.momentum, pasted.warmup_steps) == (0.5, 7)
    assert "for 40 steps" in begin


def test_a_decay_that_helps_the_large_batch_only():
    """F6.6, and the gap that F6.5 speaks of."""
    r = batches({16: 0.1, 64: 0.1, 256: 0.1}, decays=(1e-4, 1e-3), decayed={(256, 1e-3): 0.7})
    found = wb.batch_size.diagnose(r)[REGULARISE]
    assert found.status == "warn"
    tried = {row["batch_size"]: row for row in found.evidence["tried"]}
    assert (tried[256]["helps"], tried[256]["weight_decay"]) == (True, 1e-3)
    assert tried[256]["gain"] == pytest.approx(0.3 * 0.2, rel=0.1)
    assert {row["batch_size"]: row["gap"] for row in found.evidence["gaps"]} == pytest.approx(
        {16: 0.016, 64: 0.064, 256: 0.256}
    )
    assert "weight_decay=0.001" in found.advice[0]


@pytest.mark.parametrize("decayed", [
    {(256, 1e-3): 0.95}, {(256, 1e-3): 0.7, (16, 1e-3): 0.7}, {(256, 1e-3): 0.8, (16, 1e-3): 0.75}, {(16, 1e-3): 0.5},
])  # fmt: skip
def test_a_decay_that_the_large_batch_wants_no_more_than_the_small_one_is_no_alarm(decayed):
    found = wb.batch_size.diagnose(batches({16: 0.1, 64: 0.1, 256: 0.1}, decays=(1e-3,), decayed=decayed))[REGULARISE]
    assert (found.status, found.advice) == ("ok", ())
    assert "256 gains no more from it, to within 10%" in found.summary
    (_, tells) = max((key[0], key) for key in decayed)
    assert f"At {tells[0]}, a weight decay of 0.001 lowers validation/loss by" in found.summary


def moment(step, value, low=1.0, high=1e9):
    return {"step": step, "value": value, "low": low, "high": high, "examples": 1024, "micro_batch": 16}


@pytest.mark.parametrize(("rows", "value", "word"), [
    ([moment(0, 500.0), moment(10, 700.0), moment(20, 900.0)], 700.0, "larger than 64"),
    ([moment(0, 4.0)], 4.0, "smaller than 64"), ([moment(0, 60.0), moment(9, 70.0)], 65.0, "near the point where"),
    ([moment(0, 60.0), moment(9, math.inf, low=900.0)], None, "at least 900"),
])  # fmt: skip
def test_the_noise_scale_as_a_prediction(rows, value, word):
    found = diagnose_noise_scale(record([], facts={"noise_scale": rows}, batch_size=64, total_steps=10))[NOISE]
    assert (found.status, found.value, found.unit) == ("ok", value and pytest.approx(value), "examples")
    assert word in found.summary


def test_a_mean_gradient_of_zero_has_no_noise_scale():
    rows = [moment(0, math.inf, low=math.inf)]
    found = diagnose_noise_scale(record([], facts={"noise_scale": rows}, batch_size=64, total_steps=10))[NOISE]
    assert (found.status, found.value) == ("not_measured", None)


@pytest.mark.parametrize("best", [0.1, 0.1 / 16, 0.1 * 32])
def test_the_search_ends_with_a_worse_neighbour_on_both_sides(best):
    tried = {}
    for _ in range(20):
        asked = next_points(tried, 0.1, ratio=2.0, reach=8)
        if not asked:
            break
        tried |= {lr: level(lr, best) for lr in asked}
    assert min(tried, key=tried.get) == pytest.approx(best)
    assert min(tried) < best < max(tried)
    assert len(tried) <= 3 + 8


FAST = {"finalists": 1, "choosing_seeds": 2, "seeds": 2, "reach": 2, "memories": (0.5,), "weight_decays": (1e-2,)}


def run(out: Path, **settings: Any) -> wb.StudyRecord:
    workload = small_workload(examples=96)
    config = workload.config.replace(optimizer="momentum", total_steps=20, batch_size=16, peak_lr=0.05, warmup_steps=4)
    return wb.batch_size.Study(**settings).run(workload.replace(config=config), wb.Trainer(device="cpu"), out=out)


@pytest.fixture(scope="module")
def study_record(tmp_path_factory: pytest.TempPathFactory) -> wb.StudyRecord:
    return run(tmp_path_factory.mktemp("batch_size") / "s", batch_sizes=[32], **FAST)


def test_equal_steps_and_equal_examples_side_by_side(study_record: wb.StudyRecord) -> None:
    """F6.7: the same number of updates, and the same number of examples."""
    found = {(arm.batch_size, arm.total_steps) for arm in read_arms(study_record)}
    assert found == {(16, 20), (32, 20), (32, 10)}
    shares = {row["warmup_steps"] / row["total_steps"] for row in study_record.trials.to_dict("records")}
    assert shares == {0.2}, "a warmup keeps its share of the run"


def test_lr_and_momentum_are_tuned_for_each(study_record: wb.StudyRecord) -> None:
    for arm in read_arms(study_record):
        assert {p.memory for p in arm.points} == {0.9, 0.5}
        assert all(len({p.lr for p in arm.points if p.memory == m}) >= 3 for m in (0.9, 0.5))
        centred = [p.lr for p in arm.points if p.memory == 0.5]
        assert any(lr == pytest.approx(0.05 * 0.5 / 0.1) for lr in centred), "the grid keeps lr / (1 - momentum)"
        assert sorted(arm.fixed) == sorted(arm.tuned) == [2, 3]
        assert arm.best is not None
        assert arm.best.seeds == 2


DIM, ERROR, NOISE_NOISE = 20, 0.5, 1.0
CPU = torch.device("cpu")


def fixed(error: float) -> nn.Module:
    """A linear model that is off by `error` in every weight."""
    return Having(lambda m, x: x @ m.weight, weight=nn.Parameter(torch.full((DIM,), error)))


def regression(
    examples: int = 20_000, *, error: float = ERROR, scale: float = 1.0, batch_size: int = 64
) -> wb.Workload:
    """y = noise, x standard normal: B_simple = (d + 1) + d s^2 / |e|^2 at weights e."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(examples, DIM, generator=generator), NOISE_NOISE * torch.randn(examples, generator=generator)

    def loss(outputs: Tensor, batch: Any) -> Tensor:
        return scale * (outputs - batch[1]).square()

    return wb.Workload(
        name="regression", build_model=lambda: fixed(error), train_data=TensorDataset(x, y),
        validation_data=TensorDataset(x[:100], y[:100]), loss=loss,
        config=wb.TrainConfig(optimizer="sgd", peak_lr=1e-4, total_steps=10, batch_size=batch_size),
    )  # fmt: skip


def measure(workload: wb.Workload, **more: Any) -> NoiseScale:
    found = measure_noise_scale(workload, workload.config, CPU, **more)
    assert isinstance(found, NoiseScale), found
    return found


@pytest.mark.parametrize("error", [0.5, 0.15])
def test_the_closed_form_lies_within_the_interval(error: float) -> None:
    found = measure(regression(error=error), micro_batches=1000, micro_batch=16)
    exact = (DIM + 1) + DIM * NOISE_NOISE**2 / (DIM * error**2)
    assert found.low < exact < found.high
    assert found.value == pytest.approx(exact, rel=0.1)
    assert (found.examples, found.micro_batch) == (16_000, 16)


def test_every_example_once_gives_the_unbiased_estimates() -> None:
    workload = regression(64)
    x, y = (part.double().numpy() for part in workload.train_data.tensors)
    gradients = 2 * (ERROR * x.sum(1) - y)[:, None] * x
    trace = gradients.var(axis=0, ddof=1).sum()
    signal = (gradients.mean(0) ** 2).sum() - trace / 64
    assert measure(workload, micro_batches=64, micro_batch=1).value == pytest.approx(trace / signal, rel=1e-3)


def test_too_few_examples_and_nan_give_a_reason_and_no_number() -> None:
    few = regression(15)
    assert measure_noise_scale(few, few.config, CPU) == (
        "the training data have 15 micro-batches of 1, and the noise scale takes 16"
    )
    enough = regression(100)
    assert not isinstance(measure_noise_scale(enough, enough.config, CPU), str), "a batch of 64 is no reason for fewer"
    x = torch.full((1_000, DIM), math.nan)
    broken = regression().replace(train_data=TensorDataset(x, torch.zeros(1_000)))
    assert measure_noise_scale(broken, broken.config, CPU) == "a gradient is not finite"


def test_at_a_checkpoint_and_nothing_of_the_caller_moves(tmp_path: Any) -> None:
    workload = regression(error=0.5)
    config = workload.config.replace(peak_lr=0.02, total_steps=200)
    best = wb.Trainer(device="cpu").run(workload, config, out=tmp_path / "run").best()
    state = torch.get_rng_state()
    trained = measure(workload, checkpoint=best.checkpoint)
    assert torch.equal(torch.get_rng_state(), state)
    assert trained.low > measure(workload).value, "as the gradient shrinks its noise stays"


RNG = np.random.default_rng(0)


def lognormal(mean, sd, count, rng=RNG):
    return np.exp(rng.normal(mean, sd, count))


def test_the_p_value_is_the_larger_of_two_welch_tests_by_scipy():
    ours, theirs = lognormal(0.0, 0.1, 6), lognormal(0.03, 0.2, 9)
    found = equivalence(ours, theirs, margin=0.2)
    bound = math.log(1.2)
    upper = stats.ttest_ind(np.log(ours) - bound, np.log(theirs), equal_var=False, alternative="less").pvalue
    lower = stats.ttest_ind(np.log(ours) + bound, np.log(theirs), equal_var=False, alternative="greater").pvalue
    assert found.chance == pytest.approx(max(upper, lower), rel=1e-9)
    interval = stats.ttest_ind(np.log(ours), np.log(theirs), equal_var=False).confidence_interval(0.9)
    assert (found.low, found.high) == pytest.approx(tuple(np.exp(interval)), rel=1e-9)
    assert found.ratio == pytest.approx(math.exp(np.log(ours).mean() - np.log(theirs).mean()))


NEAR, FAR, WIDE = [1.0, 1.01, 0.99, 1.0], [2.0, 2.02, 1.98, 2.0], [0.7, 1.0, 1.4]


@pytest.mark.parametrize(("ours", "theirs", "verdict"), [
    (NEAR, NEAR[::-1], "equivalent"), (FAR, NEAR, "different"), (NEAR, FAR, "different"), (WIDE, WIDE, "undecided"),
    ([1.05, 1.05], [1.0, 1.0], "equivalent"), ([1.2, 1.2], [1.0, 1.0], "different"), ([1.0], NEAR, None), ([], NEAR, None),
    ([1.0, math.nan], NEAR, None), (NEAR, [1.0, math.inf], None), ([1.0, 0.0], NEAR, None),
])  # fmt: skip
def test_equal_and_different_within_a_margin(ours, theirs, verdict):
    found = equivalence(ours, theirs)
    assert (None if found is None else found.verdict) == verdict
    for wrong in ({"margin": 0.0}, {"alpha": 0.5}):
        with pytest.raises(wb.errors.UsageError, match=next(iter(wrong))):
            equivalence(NEAR, NEAR, **wrong)
