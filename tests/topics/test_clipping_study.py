"""The clipping study end to end: what clipping cures, what it only hides, and where there is nothing to do."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import workbench as wb
from workbench.curves.clipping import clipped_runs
from workbench.studies.session import open_session
from workbench.workloads.analytic import Quadratic, eigenvalues, quadratic, valley


def run(workload: wb.Workload, out: Path, **settings: Any) -> tuple[wb.StudyRecord, wb.Diagnosis]:
    record = wb.clipping.Study(**settings).run(workload, wb.Trainer(device="cpu"), out=out / "s")
    return record, wb.clipping.diagnose(record)


def stages(record: wb.StudyRecord) -> list[str]:
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


def spiking(at: int, *, factor: float = 1000.0, lr: float = 0.5) -> wb.Workload:
    curvature = eigenvalues(dimension=8, condition=4.0)
    workload = quadratic(dimension=8, condition=4.0, noise=0.1, num_examples=512, peak_lr=lr, total_steps=300)
    return workload.replace(build_model=lambda: Spiking(curvature, at, factor))


def test_the_healthy_twin_has_nothing_to_cure_and_stops_at_the_first_threshold(tmp_path: Path) -> None:
    record, found = run(spiking(10**6), tmp_path)
    assert stages(record) == ["lr_sweep", "clipping"]
    assert "Nothing to cure" in found["clipping.cures"].summary
    assert found.verdict == "ok"
    measured = record.trial(1).steps["clipped"].mean()
    assert found["clipping.aggressive"].value == pytest.approx(measured)
    assert 0.03 < record.trial(1).steps["clipped"][150:].mean() < 0.2, "about a tenth, once the way down is done"


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


def test_the_lr_comes_from_a_sweep_in_the_same_folder(tmp_path: Path) -> None:
    workload = quadratic(dimension=2, condition=2.0, total_steps=60, peak_lr=0.25)
    with open_session(
        workload, stem="diagnosis", settings={}, trainer=wb.Trainer(device="cpu"), out=tmp_path / "s"
    ) as session:
        wb.lr_sweep.Study(lrs=(0.25, 1.0, 1.9, 2.1)).extend(session)
        wb.clipping.Study().extend(session)
        record = session.record
    clipped = record.trials[record.trials["stage"] == "clipping"]
    assert clipped["peak_lr"].unique() == pytest.approx([1.5 * math.sqrt(1.9 * 2.1)])
    assert record.facts["clipping_reference_lr"] == 0.25
    (control,) = record.trials["stage"][(record.trials["peak_lr"] > 2.5) & record.trials["max_grad_norm"].isna()]
    assert control == "clipping_control"
    edge = wb.lr_sweep.diagnose(record)["lr.unstable"].evidence
    assert (edge["lower"], edge["upper"]) == pytest.approx((1.9, 2.1)), "the control leaves the sweep as it was"
    assert len(clipped_runs(record)) == len(clipped)
    assert all(row["twin"] is not None for row in clipped_runs(record)), "and is found all the same"
    assert wb.clipping.diagnose(record)["clipping.cures"].status == "warn", "the edge of a quadratic is everywhere"


def test_an_unstable_baseline_gives_its_norms_at_a_smaller_lr(tmp_path: Path) -> None:
    record, found = run(valley(peak_lr=0.1), tmp_path, percentiles=(90.0,))
    assert record.facts["clipping_lr"] == 0.1
    assert record.facts["clipping_reference_lr"] == pytest.approx(0.1 / 16), "stable below 2 / 201: the third try"
    assert found["clipping.threshold"].evidence["lr"] == pytest.approx(0.1 / 16)
    assert found["clipping.cures"].status == "ok"
