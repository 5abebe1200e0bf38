"""Items of three parts: what the model reads and what the loss compares with are found, in whatever order they stand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from tests.helpers.workloads import small_workload
from workbench.topics.data.collect import audit_data, paired
from workbench.topics.data.diagnose import diagnose_data

CPU = torch.device("cpu")
N = 400
G = torch.Generator().manual_seed(0)
X, Y = torch.randn(N, 3, generator=G, dtype=torch.float64), torch.randn(N, generator=G, dtype=torch.float64)
MASK = (torch.rand(N, 3, generator=G) < 0.8).double()
W = torch.rand(N, generator=G, dtype=torch.float64)


def workload(parts: tuple[Tensor, ...], forward: Any, loss: Any) -> Any:
    data = TensorDataset(*parts)
    return small_workload(
        build_model=lambda: nn.Linear(3, 1), train_data=data, validation_data=TensorDataset(*(p[:100] for p in parts)),
        forward=forward, loss=loss, metrics={},
    )  # fmt: skip


CASES: dict[str, tuple[tuple[Tensor, ...], Any, Any, tuple[tuple[int, ...], int]]] = {
    "a mask before the target": ((X, MASK, Y), lambda m, b: m(b[0] * b[1]), lambda o, b: (o.squeeze(-1) - b[2]) ** 2, ((0, 1), 2)),
    "the target first": ((Y, X, W), lambda m, b: m(b[1]), lambda o, b: (o.squeeze(-1) - b[0]) ** 2 * b[2], ((1,), 0)),
    "a part that nobody reads": ((W, X, Y), lambda m, b: m(b[1]), lambda o, b: (o.squeeze(-1) - b[2]) ** 2, ((1,), 2)),
}  # fmt: skip


@pytest.mark.parametrize(("parts", "forward", "loss", "roles"), CASES.values(), ids=CASES)
def test_parts_are_told_by_what_they_change(parts: Any, forward: Any, loss: Any, roles: tuple[Any, int]) -> None:
    found = paired(workload(parts, forward, loss), CPU)
    assert (found["train"].inputs, found["train"].target) == roles
    inputs, target = found["validation"][7]
    assert torch.equal(target, parts[roles[1]][7])
    assert all(
        torch.equal(a, parts[k][7])
        for a, k in zip(inputs if isinstance(inputs, tuple) else (inputs,), roles[0], strict=True)
    )


def test_inputs_and_target_first_stay_as_they_are() -> None:
    weighted = workload((X, Y, W), lambda m, b: m(b[0]), lambda o, b: (o.squeeze(-1) - b[1]) ** 2 * b[2])
    assert paired(weighted, CPU)["train"] is weighted.train_data
    raises = workload((X, MASK, Y), lambda m, b: m(b[0]), lambda o, b: b["no such part"])
    assert paired(raises, CPU)["train"] is raises.train_data


class Ratings(Dataset[Any]):
    """Cells of a table in random order, as (user, item, rating) of plain numbers."""

    def __init__(self, cells: Tensor) -> None:
        self.cells = cells

    def __len__(self) -> int:
        return len(self.cells)

    def __getitem__(self, index: int) -> tuple[int, int, float]:
        cell = int(self.cells[index])
        return cell // 30, cell % 30, float(TASTE[cell // 30, cell % 30])


TASTE = torch.randn(40, 1, generator=G) + torch.randn(1, 30, generator=G) + 0.3 * torch.randn(40, 30, generator=G)


class Factors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(40, 1), nn.Embedding(30, 1)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return (self.user(user) + self.item(item)).squeeze(-1)


def test_ratings_of_items_by_users_are_no_classes_of_users() -> None:
    cells = torch.randperm(1200, generator=G)
    data = small_workload(
        build_model=Factors, train_data=Ratings(cells[:1000]), validation_data=Ratings(cells[1000:]), metrics={},
        forward=lambda model, batch: model(batch[0], batch[1]), loss=lambda outputs, batch: (outputs - batch[2]) ** 2,
        config={"precision": "float32"},
    )  # fmt: skip
    facts = audit_data(data).facts["data"]
    assert facts["target_part"] == 2
    assert facts["yardsticks"]["classes"] is None
    assert facts["yardsticks"]["z"]["linear"] > 10, "users and items tell much of the rating"
    found = diagnose_data(audit_data(data))
    assert {f.code: f.summary for f in found if f.status in ("warn", "fail")} == {}
