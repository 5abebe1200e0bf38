"""The audit of a workload and the sweeps of its variants, on networks whose largest stable learning rate is arithmetic."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from workbench.config import TrainConfig
from workbench.errors import ConfigError, UsageError
from workbench.record.read import open_record
from workbench.topics.architecture.diagnose import architecture_depths, diagnose_architecture
from workbench.topics.architecture.study import VARIANTS, ArchitectureStudy
from workbench.workloads.analytic import half_squared_length
from workbench.workloads.base import Workload
from workbench.workloads.registry import load_workload
from workbench.workloads.sklearn_data import deep_residual


class Chain(nn.Module):
    """y = curvature^(1/2) * w x: the loss 1/2 y^2 has this curvature, and gradient descent is stable iff lr * curvature < 2."""

    def __init__(self, curvature: float) -> None:
        super().__init__()
        self.curvature = curvature
        self.w = nn.Parameter(torch.ones(1, 1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return math.sqrt(self.curvature) * (x @ self.w)


def chain(depth: int, steep: float = 1.0) -> Workload:
    data = TensorDataset(torch.ones(2, 1, dtype=torch.float64))
    return Workload(
        name=f"chain_{depth}", build_model=lambda: Chain(steep * depth), train_data=data, validation_data=data,
        loss=half_squared_length, config=TrainConfig(optimizer="sgd", peak_lr=0.1, total_steps=200, batch_size=2),
    )  # fmt: skip


GRID = [0.03, 0.06, 0.12, 0.24, 0.48, 0.96]


def dead(depth: int) -> Workload:
    """Learns nothing at any learning rate: the loss does not depend on the weights at the start."""
    return chain(depth).replace(build_model=lambda: Chain(0.0), name="dead")


def test_the_largest_stable_lr_is_bracketed_by_the_grid(tmp_path: Path) -> None:
    variants = {"gentle": chain, "far too steep": lambda depth: chain(depth, 1e4)}
    study = ArchitectureStudy(variants=variants, depths=(1, 12), lrs=GRID, steps=100)
    record = study.run(load_workload("digits_mlp"), out=tmp_path / "study")
    table = architecture_depths(record).set_index(["variant", "depth"])
    assert len(table) == 4
    for (variant, depth), row in table.iterrows():
        edge = 2 / (depth * {"gentle": 1, "far too steep": 1e4}[variant])
        stable = [lr for lr in GRID if lr < edge]
        if len(stable) == len(GRID):
            assert (row["stable_lr"], row["censored"]) == (GRID[-1], "above")
        elif not stable:
            assert (row["censored"], row["unstable_lr"]) == ("below", GRID[0])
            assert math.isnan(row["stable_lr"])
        else:
            assert row["stable_lr"] == stable[-1]
            assert row["unstable_lr"] == GRID[len(stable)]
            assert row["censored"] is None


def test_nothing_learned_at_any_lr_is_said(tmp_path: Path) -> None:
    study = ArchitectureStudy(variants={"dead": dead}, depths=(1,), lrs=GRID[:2], steps=20)
    (row,) = architecture_depths(study.run(chain(1), out=tmp_path / "study")).to_dict("records")
    assert row["censored"] == "untrained"
    assert math.isnan(row["stable_lr"])


def test_the_audit_is_of_the_workload_that_was_given(tmp_path: Path) -> None:
    record = ArchitectureStudy(variants={}).run(load_workload("source_text_post_norm"), out=tmp_path / "study")
    assert len(record.trials) == 0
    assert record.facts["architecture"]["num_joins"] == 24
    assert diagnose_architecture(open_record(tmp_path / "study"))["architecture.norm_after_add"].status == "warn"  # type: ignore[arg-type]
    json.loads((tmp_path / "study" / "study.json").read_text())


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_is_what_it_is_called(name: str, tmp_path: Path) -> None:
    """By its own audit: which placement, and whether it begins as the identity (F2.8)."""
    study = ArchitectureStudy(variants={name: VARIANTS[name]}, depths=(2,), lrs=[0.01], steps=12)
    record = study.run(VARIANTS[name](2), out=tmp_path / "study")
    facts = record.facts["architecture"]
    places = {"x + f(x)": "none", "x + Norm(f(x))": "branch", "Norm(x + f(x))": "after_add", "x + f(Norm(x))": "pre"}
    expected = places.get(name.partition(",")[0])
    assert {join["placement"] for join in facts["joins"]} == ({expected} if expected else set())
    assert architecture_depths(record)["identity_at_start"].tolist() == [name.endswith("at first")]


def test_the_same_call_again_trains_nothing_again(tmp_path: Path) -> None:
    study = ArchitectureStudy(variants={"gentle": chain}, depths=(1, 2), lrs=GRID[:2], steps=20)
    first = study.run(chain(1), out=tmp_path / "study")
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "study" / "variants").rglob("events.jsonl")}
    again = study.run(chain(1), out=tmp_path / "study")
    assert len(files) == 4
    assert files == {path: path.stat().st_mtime_ns for path in files}
    assert architecture_depths(again).equals(architecture_depths(first))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"depths": (2, 0)}, r"depths\[1\]=0 must be an integer of at least 1"),
        ({"lrs": []}, "holds no learning rate"),
        ({"seeds": 0}, "seeds=0"),
        ({"variants": ["plain"]}, "must map names to functions"),
        ({"variants": {"mine": deep_residual()}}, r"variants\['mine'\].*must be a function of the depth"),
    ],
)
def test_fields_out_of_range_are_named(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ArchitectureStudy(**fields)


def test_a_variant_that_returns_no_workload_is_named(tmp_path: Path) -> None:
    study = ArchitectureStudy(variants={"mine": lambda depth: depth}, depths=(3,))  # type: ignore[dict-item,return-value]
    with pytest.raises(UsageError, match=r"variants\['mine'\]\(3\) returned int"):
        study.run(chain(1), out=tmp_path / "study")


def test_a_variant_that_cannot_be_trained_leaves_the_table_of_those_before(tmp_path: Path) -> None:
    def broken(depth: int) -> Workload:
        return chain(depth).replace(loss=lambda outputs, batch: outputs.mean())

    study = ArchitectureStudy(variants={"gentle": chain, "broken": broken}, depths=(1,), lrs=GRID[:2], steps=20)
    with pytest.raises(Exception, match="loss"):
        study.run(chain(1), out=tmp_path / "study")
    assert architecture_depths(open_record(tmp_path / "study"))["variant"].tolist() == ["gentle"]  # type: ignore[arg-type]
