"""The clipping study end to end: what clipping cures, what it only hides, and where there is nothing to do."""

from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.helpers.workloads import small_workload
from workbench.curves.clipped_runs import clipped_runs
from workbench.errors import ConfigError, StudyInterrupted
from workbench.findings.diagnosis import Diagnosis
from workbench.record.read import StudyRecord, open_record
from workbench.schedules import prepend_warmup
from workbench.studies.session import open_session
from workbench.topics.clipping.diagnose import diagnose_clipping
from workbench.topics.clipping.study import ClippingStudy
from workbench.topics.lr_sweep.diagnose import diagnose_lr_sweep
from workbench.topics.lr_sweep.study import LRSweep
from workbench.train.hooks.base import Hook, Step
from workbench.train.trainer import Trainer
from workbench.workloads.analytic import Quadratic, eigenvalues, quadratic, valley
from workbench.workloads.base import Workload


def run(workload: Workload, out: Path, **settings: Any) -> tuple[StudyRecord, Diagnosis]:
    record = ClippingStudy(**settings).run(workload, Trainer(device="cpu"), out=out / "s")
    return record, diagnose_clipping(record)


def stages(record: StudyRecord) -> list[str]:
    return record.trials["stage"].tolist()


def test_early_instability_is_cured_by_the_first_threshold(tmp_path: Path) -> None:
    """The valley is steep at its start only: from lr 2 / 201 it is unstable, and with clipping ten times that trains."""
    record, found = run(valley(), tmp_path, peak_lr=0.1)
    assert stages(record) == ["lr_sweep", "lr_sweep", *["clipping"] * 5]
    reference, control = record.trial(0), record.trial(1)
    assert control.trials["state"].item() == "diverged"
    norms = reference.steps["grad_norm"].to_numpy()
    limits = record.trials["max_grad_norm"][2:].to_numpy(dtype=float)
    assert limits == pytest.approx(np.percentile(norms[40:], [90, 75, 50, 25, 10]))
    cures = found["clipping.cures"]
    assert (cures.status, cures.value) == ("ok", limits[0])
    first = record.trial(2).steps
    assert found["clipping.aggressive"].value == pytest.approx((first["grad_norm"] > limits[0]).mean())
    assert found.verdict == "ok"
    assert first["loss"].iloc[-40:].mean() < 0.1 * reference.steps["loss"].iloc[-40:].mean()


def test_where_no_percentile_cures_smaller_thresholds_are_tried(tmp_path: Path) -> None:
    """At 100 times the unstable lr the percentiles, which differ by 15 %, all leap from wall to wall; a quarter does not."""
    record, found = run(valley(), tmp_path, peak_lr=100 * 2 / 201)
    limits = record.trials["max_grad_norm"][2:].to_numpy(dtype=float)
    assert limits[5:] == pytest.approx(limits[4] * np.array([0.5, 0.25, 0.125]))
    ladder = found["clipping.cures"].evidence["ladder"]
    assert [rung["cures"] for rung in ladder] == [False] * 6 + [True] * 2
    assert all(rung["masks"] for rung in ladder[:5])
    assert found["clipping.cures"].value == limits[6]
    assert found["clipping.aggressive"].value < 0.2
    none, _ = run(valley(), tmp_path / "none", peak_lr=100 * 2 / 201, halvings=0)
    assert stages(none).count("clipping") == 5


def test_a_warmup_cures_what_no_threshold_does(tmp_path: Path) -> None:
    """F4.4: the length of Adam's step does not depend on that of the gradient, so clipping cannot shorten its first ones."""
    workload = valley()
    workload = workload.replace(config=workload.config.replace(optimizer="adam", peak_lr=0.1))
    record, found = run(workload, tmp_path, peak_lr=10.0)
    control = record.trial(1).steps["loss"]
    assert control.max() > 1000 * control[0], "it must be unstable for this test to mean anything"
    assert found["clipping.cures"].status == "warn"
    assert "longer warmup" in found["clipping.cures"].advice[0]
    assert not any(rung["cures"] for rung in found["clipping.cures"].evidence["ladder"])
    config = prepend_warmup(workload.config.replace(peak_lr=10.0), 80)
    ramped = Trainer(device="cpu").run(workload, config, out=tmp_path / "ramped").steps["loss"]
    assert ramped.max() < 1.5 * ramped[0]
    assert ramped.iloc[-1] < 1e-10


@pytest.mark.parametrize("start", range(3))
def test_clipping_far_above_the_edge_is_a_2_cycle_and_is_called_one(tmp_path: Path, start: int) -> None:
    """lr 2.5, curvature 1: theta steps by lr * threshold to and fro, as -0.575 and 0.675 do for a threshold of 0.5."""
    workload = quadratic(dimension=1, condition=1.0, total_steps=150, peak_lr=0.05)
    workload = workload.replace(config=workload.config.replace(shared_seed=start))
    record, found = run(workload, tmp_path, peak_lr=2.5, percentiles=(50.0,))
    limit = record.trials["max_grad_norm"][2]
    tail = record.trial(2).steps["grad_norm"].to_numpy()[-20:]  # |theta|, on either side of 0
    assert tail[::2] + tail[1::2] == pytest.approx(np.full(10, 2.5 * limit))
    assert found["clipping.masks_lr"].status == "warn"
    assert found["clipping.aggressive"].status == "warn"
    assert found["clipping.cures"].status == "warn"


class Spiking(nn.Module):
    """A quadratic whose batch at training step `at` counts `factor` times; a buffer counts the steps."""

    seen: Tensor

    def __init__(self, curvature: Tensor, at: int, factor: float) -> None:
        super().__init__()
        self.quadratic, self.at, self.factor = Quadratic(curvature), at, factor
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        weight: Tensor = torch.where(self.seen == self.at + 1, math.sqrt(self.factor), 1.0)
        return weight * self.quadratic(x)


def spiking(at: int, *, factor: float = 1000.0, lr: float = 0.5) -> Workload:
    curvature = eigenvalues(dimension=8, condition=4.0)
    workload = quadratic(dimension=8, condition=4.0, noise=0.1, num_examples=512, peak_lr=lr, total_steps=300)
    return workload.replace(build_model=lambda: Spiking(curvature, at, factor))


@pytest.mark.parametrize("at", [20, 150])
def test_one_outlier_batch_is_cured_at_the_price_of_a_tenth_of_the_steps(tmp_path: Path, at: int) -> None:
    """A single batch x 1000 at a known step throws training back; clipped, it does not (F4.3)."""
    record, found = run(spiking(at), tmp_path)
    own, clipped = record.trial(0).steps, record.trial(1).steps
    for steps in (own, clipped):
        assert steps["grad_norm"].idxmax() == at, "recorded before clipping (F4.7)"
        assert steps["grad_norm"][at] > 30 * steps["grad_norm"].drop(at).iloc[5:].median()
    assert own["loss"][at + 1] > 20 * own["loss"][at - 1], "the outlier must do harm for this test to mean anything"
    assert clipped["loss"][at + 1] < 3 * clipped["loss"][at - 5 : at].mean()
    cures = found["clipping.cures"]
    assert cures.status == "ok"
    assert "keeps lr 0.5 stable; without it the loss rises and comes back" in cures.summary
    assert found["clipping.aggressive"].value < 0.35
    assert found["clipping.masks_lr"].status == "ok"


def test_the_healthy_twin_has_nothing_to_cure_and_stops_at_the_first_threshold(tmp_path: Path) -> None:
    record, found = run(spiking(10**6), tmp_path)
    assert stages(record) == ["lr_sweep", "clipping"]
    assert "Nothing to cure" in found["clipping.cures"].summary
    assert found.verdict == "ok"
    measured = record.trial(1).steps["clipped"].mean()
    assert found["clipping.aggressive"].value == pytest.approx(measured)
    assert 0.03 < record.trial(1).steps["clipped"][150:].mean() < 0.2, "about a tenth, once the way down is done"


def test_clipping_every_step_is_a_smaller_lr(tmp_path: Path) -> None:
    """F4.11: the same steps as without clipping at lr * threshold / norm, and the same end at the mean of that."""
    workload = small_workload(config={"optimizer": "sgd", "peak_lr": 0.3, "batch_size": 48, "total_steps": 60})
    config = workload.config
    trainer = Trainer(device="cpu")
    first = trainer.run(workload, config.replace(peak_lr=1e-4), out=tmp_path / "first").steps["grad_norm"]
    limit = float(first.iloc[0]) / 20
    clipped = trainer.run(workload, config.replace(max_grad_norm=limit), out=tmp_path / "clipped")
    row = diagnose_clipping(clipped)["clipping.masks_lr"].evidence["runs"][0]
    assert row["clip_frac"] == 1.0
    updates = clipped.steps["update_norm"].dropna().to_numpy()
    assert updates == pytest.approx(np.full(updates.size, 0.3 * limit), rel=1e-6)
    losses, norms = (clipped.steps[name].to_numpy() for name in ("loss", "grad_norm"))
    assert losses[-1] < 0.5 * losses[0], "it must learn for this test to mean anything"
    shrinking = config.replace(schedule=lambda progress: limit / norms[round(progress * config.total_steps)])
    same = trainer.run(workload, shrinking, out=tmp_path / "shrinking").steps["loss"].to_numpy()
    assert same == pytest.approx(losses, rel=1e-9)
    constant = config.replace(peak_lr=row["effective_lr"])
    end = trainer.run(workload, constant, out=tmp_path / "constant").steps["loss"].iloc[-1]
    assert end == pytest.approx(losses[-1], abs=0.02 * (losses[0] - losses[-1]))


def test_norms_that_shrink_put_the_percentile_over_all_steps_first(tmp_path: Path) -> None:
    workload = quadratic(dimension=8, condition=4.0, noise=0.1, num_examples=512, peak_lr=0.05, total_steps=300)
    record, found = run(workload, tmp_path, peak_lr=2.4, percentiles=(90.0, 50.0), halvings=0)
    norms = record.trial(0).steps["grad_norm"].to_numpy()
    expected = [np.percentile(norms, 90), np.percentile(norms[30:], 90), np.percentile(norms[30:], 50)]
    assert expected[0] > 1.25 * expected[1], "they must differ for this test to mean anything"
    assert record.trials["max_grad_norm"][2:].to_numpy(dtype=float) == pytest.approx(expected)
    ladder = found["clipping.cures"].evidence["ladder"]
    assert [(r["percentile"], r["percentile_of"]) for r in ladder] == [
        (90.0, "all"),
        (90.0, "steady"),
        (50.0, "steady"),
    ]


def test_one_after_the_other_it_stops_at_the_first_that_passes(tmp_path: Path) -> None:
    record, found = run(valley(), tmp_path, peak_lr=0.1, at_once=False)
    assert stages(record).count("clipping") == 1
    assert found["clipping.cures"].status == "ok"


def test_the_lr_comes_from_a_sweep_in_the_same_folder(tmp_path: Path) -> None:
    workload = quadratic(dimension=2, condition=2.0, total_steps=60, peak_lr=0.25)
    with open_session(
        workload, stem="diagnosis", settings={}, trainer=Trainer(device="cpu"), out=tmp_path / "s"
    ) as session:
        LRSweep(lrs=(0.25, 1.0, 1.9, 2.1)).extend(session)
        ClippingStudy().extend(session)
        record = session.record
    clipped = record.trials[record.trials["stage"] == "clipping"]
    assert clipped["peak_lr"].unique() == pytest.approx([1.5 * math.sqrt(1.9 * 2.1)])
    assert record.facts["clipping_reference_lr"] == 0.25
    (control,) = record.trials["stage"][(record.trials["peak_lr"] > 2.5) & record.trials["max_grad_norm"].isna()]
    assert control == "clipping_control"
    edge = diagnose_lr_sweep(record)["lr.unstable"].evidence
    assert (edge["lower"], edge["upper"]) == pytest.approx((1.9, 2.1)), "the control leaves the sweep as it was"
    assert all(row["twin"] is not None for row in clipped_runs(record)), "and is found all the same"
    assert diagnose_clipping(record)["clipping.cures"].status == "warn", "the edge of a quadratic is everywhere"


def test_an_unstable_baseline_gives_its_norms_at_a_smaller_lr(tmp_path: Path) -> None:
    record, found = run(valley(peak_lr=0.1), tmp_path, percentiles=(90.0,))
    assert record.facts["clipping_lr"] == 0.1
    assert record.facts["clipping_reference_lr"] == pytest.approx(0.1 / 16), "stable below 2 / 201: the third try"
    assert found["clipping.threshold"].evidence["lr"] == pytest.approx(0.1 / 16)
    assert found["clipping.cures"].status == "ok"


def test_a_baseline_that_clips_is_held_against_itself_without(tmp_path: Path) -> None:
    workload = valley(peak_lr=0.1)
    workload = workload.replace(config=workload.config.replace(max_grad_norm=2.0))
    record, found = run(workload, tmp_path, percentiles=(90.0,), reference_lr=0.005)
    own = record.trials[record.trials["stage"] == "baseline"]
    assert own["max_grad_norm"].item() == 2.0
    assert found["clipping.cures"].value == 2.0
    assert found["clipping.cures"].status == "ok"


def test_a_warmup_that_the_baseline_has_already_stays(tmp_path: Path) -> None:
    workload = valley()
    workload = workload.replace(config=workload.config.replace(warmup_steps=2))
    record, found = run(workload, tmp_path, peak_lr=0.1)
    assert stages(record).count("clipping") == 5, "unstable all the same, so the whole ladder is trained at once"
    assert set(record.trials["warmup_steps"]) == {2}
    assert found["clipping.cures"].status == "ok"


def test_every_threshold_is_tried_with_every_seed(tmp_path: Path) -> None:
    record, found = run(spiking(150), tmp_path, seeds=2, percentiles=(90.0, 50.0), looser=100.0, halvings=0)
    clipped = record.trials[record.trials["stage"] == "clipping"]
    assert sorted(zip(clipped["seed"], clipped["max_grad_norm"].rank(method="dense"), strict=True)) == [
        (0, 1.0), (0, 2.0), (1, 1.0), (1, 2.0),
    ]  # fmt: skip
    assert [row["seeds"] for row in found["clipping.cures"].evidence["ladder"]] == [2, 2]


def test_the_same_call_again_trains_nothing(tmp_path: Path) -> None:
    first, said = run(valley(), tmp_path, peak_lr=0.1)
    again, same = run(valley(), tmp_path, peak_lr=0.1)
    assert again.steps.equals(first.steps)
    assert same.to_dict() == said.to_dict()


class StopsAt(Hook):
    """Presses Ctrl-C at the nth update that is made."""

    def __init__(self, count: int) -> None:
        self.left = count

    def on_step(self, step: Step) -> None:
        self.left -= 1
        if self.left == 0:
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("at", [30, 500])
def test_stopped_in_its_first_round_or_on_the_ladder_it_goes_on_and_says_the_same(tmp_path: Path, at: int) -> None:
    whole, said = run(valley(), tmp_path, peak_lr=0.1)
    study, out = ClippingStudy(peak_lr=0.1), tmp_path / "stopped"
    with pytest.raises(StudyInterrupted):
        study.run(valley(), Trainer(device="cpu", hooks=[StopsAt(at)]), out=out)
    assert ("clipping" in open_record(out).trials["stage"].tolist()) is (at == 500)
    again = study.run(valley(), Trainer(device="cpu"), out=out)
    columns = ["trial", "step", "loss", "grad_norm", "clipped"]
    assert again.steps[columns].equals(whole.steps[columns])
    assert diagnose_clipping(again).to_dict()["findings"] == said.to_dict()["findings"]


def test_a_model_that_no_gradient_reaches_chooses_nothing(tmp_path: Path) -> None:
    workload = small_workload(loss=lambda outputs, batch: 0.0 * outputs.squeeze(-1) + batch[1] ** 2)
    record, found = run(workload, tmp_path)
    assert "clipping" not in stages(record)
    assert "all gradient norms are 0" in found["clipping.threshold"].summary
    assert found["clipping.aggressive"].status == "not_measured"


def test_a_run_too_short_for_a_percentile_says_so(tmp_path: Path) -> None:
    record, found = run(small_workload(), tmp_path, steps=12)
    assert "clipping" not in stages(record)
    assert "20 are needed" in found["clipping.threshold"].summary


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"peak_lr": 0.0}, r"peak_lr=0\.0 must be a finite number above 0"),
        ({"peak_lr": math.inf}, "peak_lr=inf"),
        ({"reference_lr": "x"}, "reference_lr='x'"),
        ({"multiple": -1.0}, r"multiple=-1\.0"),
        ({"seeds": 0}, "seeds=0 must be an integer of at least 1"),
        ({"tries": True}, "tries=True"),
        ({"halvings": -1}, "halvings=-1 must be an integer of at least 0"),
        ({"lower": 1.0}, r"lower=1\.0 must be a finite number above 1"),
        ({"looser": 0.5}, r"looser=0\.5 must be a finite number above 1"),
        ({"percentiles": ()}, "must hold at least one number"),
        ({"percentiles": (90.0, 0.0)}, "each above 0 and at most 100"),
        ({"percentiles": (50.0, 90.0)}, "must decrease"),
        ({"percentiles": (50.0, 50.0)}, "must decrease"),
    ],
)
def test_wrong_arguments_are_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ClippingStudy(**changes)
