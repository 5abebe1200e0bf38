"""Codes for missing values: found where they stand, and not made up where an end of a scale repeats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_iris, load_wine
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.helpers.simulated_records import record
from tests.helpers.workloads import small_workload
from workbench.topics.data.collect import audit_data, collect_data
from workbench.topics.data.diagnose import diagnose_data

Draw = np.random.Generator
TABLES = {"iris": load_iris, "wine": load_wine, "diabetes": load_diabetes, "breast cancer": load_breast_cancer, "digits": load_digits}  # fmt: skip


def table(name: str) -> Any:
    return TABLES[name]().data


def coded(values: Any, code: float, share: float, *, seed: int = 0) -> Tensor:
    missing = np.random.default_rng(seed).random(values.shape) < share
    return torch.tensor(np.where(missing, code, values)).float()


def found(values: Any) -> Any:
    rows = torch.as_tensor(values)
    rows = rows.float() if rows.is_floating_point() else rows
    return audit_data(TensorDataset(rows, torch.zeros(len(rows)))).facts["data"]["codes"]


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize(("code", "share"), [(-999.0, 0.01), (-999.0, 0.03), (99999.0, 0.15)])
def test_a_code_is_named_with_its_share(name: str, code: float, share: float) -> None:
    audited = audit_data(TensorDataset(coded(table(name), code, share)))
    finding = diagnose_data(audited)["data.scale"]
    first = audited.facts["data"]["codes"][0]
    assert finding.status == "warn"
    assert f"{code:g} stands in {first['share']:.1%} of the cells" in finding.summary
    assert first["share"] == pytest.approx(share, rel=0.5)
    assert first["deviations"] >= 10


def test_a_code_is_found_in_one_column_after_standardising_and_in_pictures() -> None:
    one = table("diabetes").copy()
    one[:, 4] = coded(one[:, 4], -999.0, 0.03)
    assert [c["columns"] for c in found(one)] == [1]
    scaled = (one - one.mean(0)) / one.std(0)
    assert [c["cells"] for c in found(scaled)] == [c["cells"] for c in found(one)]
    pictures = np.random.default_rng(1).normal(size=(100, 1, 12, 12))
    assert [c["value"] for c in found(coded(pictures, -9999.0, 0.02))] == [-9999.0]


HEALTHY: dict[str, Callable[[Draw], Any]] = {
    "counts": lambda r: r.poisson(r.uniform(0.01, 20, 8), (400, 8)).astype(float),
    "integers": lambda r: r.poisson(5.0, (400, 8)).astype(np.int16),
    "geometric": lambda r: r.geometric(r.uniform(0.02, 0.9, 8), (400, 8)).astype(float),
    "counts with a cap": lambda r: np.minimum(r.zipf(1.7, (400, 8)), 500).astype(float),
    "sparse": lambda r: np.where(r.random((400, 8)) < 0.95, 0, r.lognormal(size=(400, 8))),
    "a sensor that is off": lambda r: np.where(r.random((400, 8)) < 0.05, 0, 3000 + 50 * r.normal(size=(400, 8))),
    "one-hot": lambda r: 50 * np.eye(10)[r.choice(10, 400)],
    "ratings": lambda r: r.choice([1.0, 2.0, 3.0, 4.0, 5.0], (400, 8), p=[0.02, 0.08, 0.2, 0.4, 0.3]),
    "bytes": lambda r: r.integers(0, 256, (400, 64)).astype(np.uint8),
    "saturated": lambda r: np.clip(r.normal(size=(400, 8)), -1.5, 1.5),
    "a saturated tail": lambda r: np.minimum(r.pareto(0.5, (400, 8)), 1e4),
    "heavy tails": lambda r: r.standard_cauchy((400, 8)),
    "rounded tails": lambda r: np.round(r.pareto(0.8, (400, 8))),
}


@pytest.mark.parametrize("name", HEALTHY)
@pytest.mark.parametrize("seed", range(5))
def test_no_code_is_made_up(name: str, seed: int) -> None:
    assert found(HEALTHY[name](np.random.default_rng(seed))) == []


@pytest.mark.parametrize("name", TABLES)
def test_real_tables_have_none(name: str) -> None:
    assert found(table(name)) == []


def test_single_cells_and_half_of_a_column_are_no_codes() -> None:
    values = np.random.default_rng(0).normal(size=(400, 8))
    values[:2, 0] = -999
    values[:200, 1] = -999
    assert found(values) == []


@pytest.mark.parametrize("replaced", [False, True])
def test_a_model_may_put_something_in_the_place_of_a_code(replaced: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(10, 1)

        def forward(self, x: Tensor) -> Any:
            return self.head(torch.where(x == -999, 0, x) if replaced else x)

    data = load_diabetes()
    rows = TensorDataset(coded(data.data, -999.0, 0.03), torch.tensor(data.target).float())
    workload = small_workload(train_data=rows, validation_data=rows, build_model=Net, config={"precision": None})
    facts = collect_data(workload)
    assert bool(facts["codes"]) == (not replaced)
    if not replaced:
        assert "a code for a missing value" in diagnose_data(record([], facts={"data": facts}))["data.scale"].summary
