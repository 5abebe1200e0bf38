"""What an audit of the data finds in workloads and loaders: leaks, classes, scale, codes, workers; healthy look-alikes are silent."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_diabetes, load_iris
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import workbench as wb
from tests.helpers.simulated_records import record
from tests.helpers.workloads import Having, small_workload
from workbench.errors import ConfigError, UsageError
from workbench.findings.audited import Audit
from workbench.record.json_values import dumps
from workbench.topics.data.collect import collect_data

G = torch.Generator().manual_seed(0)
X = torch.randn(400, 20, generator=G)
Y = torch.randint(0, 4, (400,), generator=G)
CODES = [
    "data.leakage", "data.duplicates", "data.unshuffled", "data.weak_shuffle", "data.no_signal", "data.label_shift",
    "data.train_validation_shift", "data.scale", "data.imbalance", "data.worker_rng",
]  # fmt: skip
HEALTHY = {"ok", "not_measured"}


def said(data: Any, code: str, **options: Any) -> Any:
    diagnosis = wb.data.diagnose(wb.data.audit(data, **options))
    assert [f.code for f in diagnosis] == CODES
    return diagnosis[code]


def random_states() -> Any:
    return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()


@pytest.mark.parametrize("name", ["breast_cancer", "source_text"])
def test_bundled_workloads_raise_no_alarm(name: str) -> None:
    found = wb.data.audit(wb.load_workload(name), max_examples=4000)
    assert {f.status for f in wb.data.diagnose(found)} <= HEALTHY
    dumps(found.facts)


def test_leaked_rows_are_named_with_share_and_labels() -> None:
    validation = TensorDataset(torch.cat([X[:30], torch.randn(70, 20, generator=G)]), torch.cat([Y[:30], Y[100:170]]))
    finding = said(DataLoader(TensorDataset(X, Y), shuffle=True), "data.leakage", validation=validation)
    assert (finding.status, finding.value) == ("fail", 0.3)
    assert finding.evidence["splits"]["validation"]["pairs"][:2] == [[0, 0, 0.0], [1, 1, 0.0]]
    assert finding.evidence["splits"]["validation"]["same_label"] == 30
    assert "validation[0] and train[0]" in finding.advice[0]
    one = TensorDataset(torch.cat([X[:1], torch.randn(199, 20, generator=G)]))
    few = said(TensorDataset(X), "data.leakage", validation=one)
    assert (few.status, few.value, "too few" in few.summary) == ("ok", 0.005, True)


def test_rows_of_few_values_agree_by_chance() -> None:
    binary = torch.randint(0, 2, (3000, 8), generator=G).float()
    for rows in (binary, binary.long()):
        found = wb.data.diagnose(wb.data.audit(TensorDataset(rows[:2000]), validation=TensorDataset(rows[2000:])))
        assert {found["data.leakage"].status, found["data.duplicates"].status} == {"ok"}
        assert "few distinct values" in found["data.leakage"].summary


GIVEN_AWAY: dict[str, tuple[Any, Any, str]] = {
    "rounded": (lambda y: (y * 2).round(), None, "warn"),
    "its logarithm, turned": (lambda y: -(y + 9).log(), None, "warn"),
    "its unit": (lambda y: 1000 * y + 3, None, "warn"),
    "its class": (lambda y: (y == 1) * 7.0, lambda y: (y > 0).long() + (y > 1), "warn"),
    "nearly": (lambda y: (y * 2 + 0.2 * torch.randn(len(y))).round(), None, "ok"),
    "its sign alone": (lambda y: (y > 0).float(), None, "ok"),
    "noise": (torch.randn_like, None, "ok"),
}


@pytest.mark.parametrize("name", GIVEN_AWAY)
def test_a_column_that_gives_the_target_away(name: str) -> None:
    """Columns that are made from the target; others are what a model is to learn from."""
    torch.manual_seed(0)
    make, classes, status = GIVEN_AWAY[name]
    x, y = torch.randn(500, 4), torch.randn(500)
    x[:, 2] = make(y if classes is None else classes(y))
    data = TensorDataset(x, y if classes is None else classes(y))
    found = said(data, "data.leakage", validation=TensorDataset(torch.randn(100, 4), data.tensors[1][:100]))
    assert found.status == status, found
    assert status == "ok" or "olumn 2 of the inputs, of 4" in found.summary


@pytest.mark.parametrize(
    ("again", "tokens", "status", "words"),
    [
        (266, False, "fail", "with the same label): that metric measures memorisation."),
        (268, False, "fail", "and 40.12% of the training rows repeat as well: copies from before the split."),
        (268, True, "ok", "and 40.12% of the training rows repeat as well: short rows of tokens do."),
    ],
)
def test_a_leak_beside_as_many_repeats_in_training(again: int, tokens: bool, status: str, words: str) -> None:
    """Half of validation is in training; 266 of 666 training rows, or 268 of 668, are on either side of 0.8 times that."""
    g = torch.Generator().manual_seed(1)
    rows = torch.randint(0, 1000, (450, 20), generator=g) if tokens else torch.randn(450, 20, generator=g)
    train = TensorDataset(torch.cat([rows[:400], rows[:again]]), torch.cat([Y, Y[:again]]))
    finding = said(train, "data.leakage", validation=TensorDataset(rows[350:], torch.cat([Y[350:], Y[:50]])))
    assert (finding.status, finding.value) == (status, 0.5), finding.summary
    assert finding.summary.endswith(words), finding.summary


class Drawn(Dataset[Any]):
    """Rows with what `draw` makes of each index; it may hold a generator that was made once, in the parent process."""

    def __init__(self, draw: Any, rows: Tensor = X[:40]) -> None:
        self.draw, self.rows = draw, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.draw(self.rows[index]), int(Y[index % 400])


class OwnGenerator:
    """The fault: a generator that every worker gets a copy of."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __call__(self, x: Tensor) -> Tensor:
        return x + float(self.rng.standard_normal())


def from_torch(x: Tensor) -> Tensor:
    return x + 0.1 * torch.randn(20)


def coin(x: Tensor) -> Tensor:
    return x + float(torch.rand(()) < 0.5)


@pytest.mark.parametrize(
    ("draw", "options", "status", "words"),
    [
        (OwnGenerator(), {}, "warn", "Worker processes make the same random draws and every epoch repeats"),
        (OwnGenerator(), {"persistent_workers": True}, "warn", "Worker processes make the same random draws:"),
        (coin, {}, "ok", "of their own"),
    ],
)
def test_random_draws_of_workers(draw: Any, options: dict[str, Any], status: str, words: str) -> None:
    loader: DataLoader[Any] = DataLoader(Drawn(draw), **({"batch_size": 4, "num_workers": 2, "shuffle": True} | options))  # fmt: skip
    before = random_states()
    finding = said(loader, "data.worker_rng")
    assert (finding.status, words in finding.summary) == (status, True), finding.summary
    assert before == random_states()


OWN = torch.Generator().manual_seed(1)
HELD = torch.randn(100, 20, generator=G)
AUGMENTED: dict[str, tuple[Dataset[Any], Any, tuple[str, str], str]] = {
    "copies": (Drawn(from_torch, X[:160].repeat(10, 1)), Drawn(from_torch, HELD), ("ok", "warn"), "augmented at random"),
    "leaked": (Drawn(from_torch, X), Drawn(from_torch, X[:100]), ("fail", "ok"), "in the training split too"),
    "drawn": (Drawn(lambda x: torch.randn(20), X), TensorDataset(X[:100]), ("ok", "ok"), "generated anew"),
    "own generator": (Drawn(lambda x: x + torch.randn(20, generator=OWN), X), TensorDataset(X[:100]), ("not_measured", "not_measured"), "change from one reading"),
}  # fmt: skip


@pytest.mark.parametrize("name", AUGMENTED)
def test_augmented_items_are_compared_under_one_random_state(name: str) -> None:
    train, validation, expected, words = AUGMENTED[name]
    before = random_states()
    diagnosis = wb.data.diagnose(wb.data.audit(train, validation=validation))
    assert (diagnosis["data.leakage"].status, diagnosis["data.duplicates"].status) == expected
    assert words in diagnosis["data.leakage"].summary
    assert before == random_states()


@pytest.mark.parametrize(("counts", "status"), [((299, 30), "ok"), ((300, 30), "warn")])
def test_imbalance(counts: tuple[int, int], status: str) -> None:
    labels = torch.repeat_interleave(torch.arange(2), torch.tensor(counts))
    finding = said(TensorDataset(torch.randn(sum(counts), 20, generator=G), labels), "data.imbalance")
    assert (finding.status, finding.value) == (status, pytest.approx(counts[0] / counts[1]))
    assert said(TensorDataset(X, torch.arange(400)), "data.imbalance").summary.startswith("Does not apply")


def far(count: int, times: float = 1000.0) -> Tensor:
    return torch.cat([times * X[:count], X[count:]])


SCALES: dict[str, Any] = {
    "standardised, with outliers": (X * (1 + 9 * (torch.rand(400, 20, generator=G) < 0.01)), "ok"),
    "rare binary": ((torch.rand(400, 30, generator=G) < torch.logspace(-2.5, -0.5, 30)).float(), "ok"),
    "standardised and constant": (torch.cat([X, torch.full((400, 3), 1e6)], 1), "ok"),
    "heavy tails": ((2 * X).exp(), "ok"),
    "bytes": (torch.randint(0, 256, (400, 64), generator=G).to(torch.uint8), "ok"),
    "another kind of row": (far(120), "ok"),
    "raw bytes": (torch.randint(0, 256, (400, 64), generator=G).float(), "warn"),
    "tiny": (1e-4 * X, "warn"),
    "a quarter in other units": (X * torch.tensor([1.0] * 14 + [1e-4] * 6), "warn"),
    "3 far rows": (far(3), "warn"),
}  # fmt: skip


@pytest.mark.parametrize("name", SCALES)
def test_scale(name: str) -> None:
    rows, status = SCALES[name]
    finding = said(TensorDataset(rows), "data.scale")
    assert finding.status == status, finding.summary
    assert ("of 400 training examples" in finding.summary) == ("far row" in name)


def coded(values: Any, code: float, share: float) -> Tensor:
    missing = np.random.default_rng(0).random(values.shape) < share
    return torch.tensor(np.where(missing, code, values)).float()


@pytest.mark.parametrize(
    ("rows", "cure"),
    [(far(3), lambda x: x.sign() * x.abs().log1p()), (coded(X.numpy(), -999.0, 0.03), lambda x: torch.where(x == -999, 0, x))],
    ids=["far rows", "codes"],
)  # fmt: skip
def test_a_model_may_mend_its_inputs_itself(rows: Tensor, cure: Any) -> None:
    for before, status in ((cure, "ok"), (lambda x: x, "warn")):
        data, config = TensorDataset(rows, Y), {"precision": None}
        build = lambda b=before: Having(lambda m, x: m.head(b(x)), head=nn.Linear(20, 2))  # noqa: E731
        workload = small_workload(train_data=data, validation_data=data, build_model=build, config=config)
        found = wb.data.diagnose(record([], facts={"data": collect_data(workload)}))
        assert found["data.scale"].status == status


def codes(values: Any) -> Any:
    rows = torch.as_tensor(values)
    rows = rows.float() if rows.is_floating_point() else rows
    return wb.data.audit(TensorDataset(rows, torch.zeros(len(rows)))).facts["data"]["codes"]


@pytest.mark.parametrize("table", [load_iris, load_diabetes])
def test_a_code_for_missing_values_is_named_with_its_share(table: Any) -> None:
    values = table().data
    assert codes(values) == []
    for code, share in ((-999.0, 0.01), (99999.0, 0.15)):
        audited = wb.data.audit(TensorDataset(coded(values, code, share)))
        finding, first = wb.data.diagnose(audited)["data.scale"], audited.facts["data"]["codes"][0]
        assert finding.status == "warn"
        assert f"{code:g} fills {first['share']:.1%} of the cells" in finding.summary
        assert first["share"] == pytest.approx(share, rel=0.5)
    pictures = np.random.default_rng(1).normal(size=(100, 1, 12, 12))
    assert [c["value"] for c in codes(coded(pictures, -9999.0, 0.02))] == [-9999.0]


R = np.random.default_rng(0)
NO_CODES: dict[str, Any] = {
    "a sensor that is off": np.where(R.random((400, 8)) < 0.05, 0, 3000 + 50 * R.normal(size=(400, 8))),
    "a saturated tail": np.minimum(R.pareto(0.5, (400, 8)), 1e4),
    "single cells": np.where(np.arange(400)[:, None] < 1, -999.0, R.normal(size=(400, 2))),
    "half of a column": np.where(np.arange(400)[:, None] < 200, -999.0, R.normal(size=(400, 2))),
}


@pytest.mark.parametrize("name", NO_CODES)
def test_no_code_is_made_up(name: str) -> None:
    assert codes(NO_CODES[name]) == []


def test_no_more_examples_are_read_than_asked_for() -> None:
    read: set[int] = set()

    class Counted(Drawn):
        def __getitem__(self, index: int) -> Any:
            read.add(index)
            return super().__getitem__(index)

    facts = collect_data(small_workload(train_data=Counted(from_torch, X)), max_examples=50)
    assert (read, facts["read"], facts["examples"]["train"]) == (set(range(50)), 50, 400)


def test_what_was_not_there_is_not_measured() -> None:
    for code in ("data.unshuffled", "data.leakage"):
        assert said(TensorDataset(X, Y), code).status == "not_measured"
    diagnosis = wb.data.diagnose(Audit(facts={}, workload="x"))
    assert [(f.code, f.status) for f in diagnosis] == [(code, "not_measured") for code in CODES]
    empty = TensorDataset(X[:0], Y[:0])
    assert said(TensorDataset(X, Y), "data.leakage", validation=empty).status == "not_measured"
    assert {f.status for f in wb.data.diagnose(wb.data.audit(empty, validation=empty))} <= HEALTHY


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: wb.data.audit(3), UsageError, "not int"),
        (lambda: wb.data.audit(small_workload(), validation=TensorDataset(X)), UsageError, "leave validation= and test= out"),
        (lambda: wb.data.audit(TensorDataset(X), max_examples=1), ConfigError, "max_examples=1 must be an integer of at least 2"),
        (lambda: wb.data.audit(TensorDataset(X), memory_mb=-1), ConfigError, "memory_mb=-1 must be above 0"),
    ],
)  # fmt: skip
def test_bad_arguments(call: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()


def test_ratings_of_items_by_users_are_no_classes_of_users() -> None:
    def build() -> nn.Module:
        parts = {"user": nn.Embedding(40, 1), "item": nn.Embedding(30, 1)}
        return Having(lambda m, user, item: (m.user(user) + m.item(item)).squeeze(-1), **parts)

    taste = torch.randn(40, 1, generator=G) + torch.randn(1, 30, generator=G) + 0.3 * torch.randn(40, 30, generator=G)
    cells = [(c // 30, c % 30, float(taste[c // 30, c % 30])) for c in torch.randperm(1200, generator=G).tolist()]
    data = small_workload(
        build_model=build, train_data=cells[:1000], validation_data=cells[1000:], metrics={},
        forward=lambda model, batch: model(batch[0], batch[1]), loss=lambda outputs, batch: (outputs - batch[2]) ** 2,
        config={"precision": "float32"},
    )  # fmt: skip
    audited = wb.data.audit(data)
    facts = audited.facts["data"]
    assert (facts["target_part"], facts["yardsticks"]["classes"]) == (2, None)
    assert facts["yardsticks"]["z"]["linear"] > 10, "users and items tell much of the rating"
    assert {f.code: f.summary for f in wb.data.diagnose(audited) if f.status in ("warn", "fail")} == {}


@pytest.mark.parametrize(("kind", "status"), [("after", "warn"), ("easy", "ok"), ("empty", "ok")])
def test_a_column_that_is_known_after_the_outcome_alone(kind: str, status: str) -> None:
    """Months paid are 3 where nobody left and fewer where they did; that one column tells classes apart is no leak, nor are examples without a content."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(600, 5)), rng.integers(0, 2, 600)
    if kind == "after":
        x[:, 3] = np.where(y == 1, rng.integers(0, 3, 600), 3)
    if kind == "easy":
        x[:, 3] = np.abs(x[:, 3]) * (2 * y - 1)
    if kind == "empty":
        x[y == 0, :4] = 0.0
    rows = TensorDataset(torch.tensor(x, dtype=torch.float32), torch.tensor(y))
    held = torch.utils.data.Subset(rows, range(450, 600))
    found = said(torch.utils.data.Subset(rows, range(450)), "data.leakage", validation=held)
    assert found.status == status, found.summary
    assert status == "ok" or "Column 3" in found.summary


def test_pairs_of_inputs_are_examples_of_two_parts() -> None:
    """Forty articles in 600 pairs: the first parts repeat, the pairs hardly."""
    articles = torch.randn(40, 6, generator=G)
    first, second = torch.randint(40, (2, 700), generator=G)
    pairs = TensorDataset(articles[first], articles[second])
    data = small_workload(
        build_model=lambda: nn.Linear(6, 1), train_data=torch.utils.data.Subset(pairs, range(600)), validation_data=torch.utils.data.Subset(pairs, range(600, 700)), metrics={},
        forward=lambda model, batch: torch.cat([model(batch[0]), model(batch[1])], 1), loss=lambda outputs, batch: nn.functional.softplus(outputs[:, 0] - outputs[:, 1]),
        config={"precision": "float32"},
    )  # fmt: skip
    assert wb.data.diagnose(wb.data.audit(data))["data.duplicates"].value == pytest.approx(1 - len({*zip(first[:600].tolist(), second[:600].tolist(), strict=True)}) / 600)  # fmt: skip


def prices(kind: str) -> TensorDataset:
    """A table whose target is linear in it; "joined" gives 40 % of the rows the target of another one, "heavy" and "law" are healthy."""
    rng = np.random.default_rng(0)
    x, some = rng.normal(size=(1000, 6)), rng.random(1000) < 0.4
    y = x @ [2.0, 1.0, 0.5, 0.0, -1.0, 0.3] + 0.1 * rng.normal(size=1000)
    if kind == "joined":
        y[some] = y[rng.permutation(np.flatnonzero(some))]
    if kind == "heavy":
        y += 0.2 * rng.standard_t(1, 1000)
    if kind == "law":
        y[some] = x[some] @ [0.0, -1.0, 1.0, 2.0, 0.5, 1.0]
    y = (y - np.median(y)) / 3.0
    return TensorDataset(torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32))


@pytest.mark.parametrize(("kind", "status"), [("joined", "warn"), ("heavy", "ok"), ("law", "ok"), ("clean", "ok")])
def test_targets_of_other_rows_are_told_from_noise_and_from_another_law(kind: str, status: str, tmp_path: Path) -> None:
    rows = prices(kind)
    model = torch.nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with wb.watch(model, optimizer, out=tmp_path / "run") as run:
        for x, y in DataLoader(rows, 20, shuffle=True):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x)[:, 0], y).backward()
            optimizer.step()
    found = run.diagnose()["data.labels"]
    assert found.status == status
    assert status == "ok" or found.value == pytest.approx(0.36, abs=0.08)
