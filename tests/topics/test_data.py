"""What an audit of the data finds in workloads and loaders: leaks, classes, scale, codes, workers; healthy look-alikes are silent."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_iris, load_wine
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import workbench as wb
from tests.helpers.simulated_records import record
from tests.helpers.workloads import small_workload
from workbench.errors import ConfigError, UsageError
from workbench.findings.audited import Audit
from workbench.record.json_values import dumps
from workbench.topics.data.collect import collect_data, paired

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
    for finding in diagnosis:
        assert finding.clause
        assert finding.advice or finding.status not in ("warn", "fail")
    return diagnosis[code]


def of_workload(workload: Any) -> Any:
    return wb.data.diagnose(record([], facts={"data": collect_data(workload)}))


def random_states() -> Any:
    return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()


@pytest.mark.parametrize("name", ["digits_mlp", "breast_cancer", "source_text", "quadratic", "valley"])
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
    clean = TensorDataset(torch.randn(100, 20, generator=G))
    worse = said(TensorDataset(X), "data.leakage", validation=clean, test=DataLoader(TensorDataset(X[:50])))
    assert (worse.status, "of test" in worse.summary) == ("fail", True)


def test_rows_of_few_values_agree_by_chance() -> None:
    binary = torch.randint(0, 2, (3000, 8), generator=G).float()
    for rows in (binary, binary.long()):
        found = wb.data.diagnose(wb.data.audit(TensorDataset(rows[:2000]), validation=TensorDataset(rows[2000:])))
        assert {found["data.leakage"].status, found["data.duplicates"].status} == {"ok"}
        assert "few distinct values" in found["data.leakage"].summary


@pytest.mark.parametrize(
    ("again", "tokens", "status", "words"),
    [
        (266, False, "fail", "with the same label): that metric measures memory."),
        (268, False, "fail", "and 40.12% of the training rows repeat as well: copies from before the split."),
        (266, True, "fail", "with the same label): that metric measures memory."),
        (268, True, "ok", "and 40.12% of the training rows repeat as well: short rows of tokens do."),
    ],
)
def test_a_leak_beside_as_many_repeats_in_training(again: int, tokens: bool, status: str, words: str) -> None:
    """Half of validation is in training; 266 of 666 training rows, or 268 of 668, are on either side of 0.8 times that."""
    generator = torch.Generator().manual_seed(1)
    rows = (
        torch.randint(0, 1000, (450, 20), generator=generator) if tokens else torch.randn(450, 20, generator=generator)
    )
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


def global_numpy(x: Tensor) -> Tensor:
    return x + float(np.random.standard_normal())


def from_torch(x: Tensor) -> Tensor:
    return x + 0.1 * torch.randn(20)


def from_python(x: Tensor) -> Tensor:
    return x + random.random()


def coin(x: Tensor) -> Tensor:
    return x + float(torch.rand(()) < 0.5)


def constant_seed(worker: int) -> None:
    np.random.seed(0)


@pytest.mark.parametrize(
    ("draw", "options", "status", "words"),
    [
        (OwnGenerator(), {}, "warn", "Worker processes make the same random draws and every epoch repeats"),
        (OwnGenerator(), {"persistent_workers": True}, "warn", "Worker processes make the same random draws:"),
        (global_numpy, {"worker_init_fn": constant_seed}, "warn", "same random draws and every epoch repeats"),
        (global_numpy, {"worker_init_fn": np.random.seed}, "warn", "Every epoch repeats"),
        (global_numpy, {}, "ok", "of their own"),
        (from_torch, {}, "ok", "of their own"),
        (from_python, {}, "ok", "of their own"),
        (coin, {}, "ok", "of their own"),
        (torch.clone, {}, "ok", "nothing to draw"),
        (OwnGenerator(), {"num_workers": 0}, "ok", "no workers"),
    ],
)
def test_random_draws_of_workers(draw: Any, options: dict[str, Any], status: str, words: str) -> None:
    loader: DataLoader[Any] = DataLoader(
        Drawn(draw), **({"batch_size": 4, "num_workers": 2, "shuffle": True} | options)
    )
    before = random_states()
    finding = said(loader, "data.worker_rng")
    assert (finding.status, words in finding.summary) == (status, True), finding.summary
    assert options.get("num_workers") == 0 or before == random_states()


OWN = torch.Generator().manual_seed(1)
HELD = torch.randn(100, 20, generator=G)
AUGMENTED: dict[str, tuple[Dataset[Any], Any, tuple[str, str], str]] = {
    "noise": (Drawn(from_torch, X), TensorDataset(HELD), ("ok", "ok"), "augmented at random"),
    "half of the readings": (Drawn(lambda x: -x if torch.rand(()) < 0.5 else x, X), TensorDataset(HELD), ("ok", "ok"), "augmented at random"),
    "copies": (Drawn(from_torch, X.repeat(10, 1)), Drawn(from_torch, HELD), ("ok", "warn"), "augmented at random"),
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


@pytest.mark.parametrize(("counts", "status"), [((250, 148), "ok"), ((299, 30), "ok"), ((300, 30), "warn"), ((395, 5), "warn")])  # fmt: skip
def test_imbalance(counts: tuple[int, int], status: str) -> None:
    labels = torch.repeat_interleave(torch.arange(2), torch.tensor(counts))
    finding = said(TensorDataset(torch.randn(sum(counts), 20, generator=G), labels), "data.imbalance")
    assert (finding.status, finding.value) == (status, pytest.approx(counts[0] / counts[1]))


def test_labels_that_are_no_classes() -> None:
    for labels in (torch.randn(400), torch.arange(400), torch.randn(400, 2)):
        assert said(TensorDataset(X, labels), "data.imbalance").summary.startswith("Does not apply")


def far(count: int, times: float = 1000.0) -> Tensor:
    return torch.cat([times * X[:count], X[count:]])


SCALES: dict[str, Any] = {
    "standardised, with outliers": (X * (1 + 9 * (torch.rand(400, 20, generator=G) < 0.01)), "ok"),
    "one-hot": (torch.nn.functional.one_hot(torch.randint(0, 300, (400,), generator=G)).float(), "ok"),
    "rare binary": ((torch.rand(400, 30, generator=G) < torch.logspace(-2.5, -0.5, 30)).float(), "ok"),
    "bytes over 255": (torch.randint(0, 256, (400, 64), generator=G) / 255, "ok"),
    "standardised and constant": (torch.cat([X, torch.full((400, 3), 1e6)], 1), "ok"),
    "with NaN": (torch.where(torch.rand(400, 20, generator=G) < 0.1, torch.nan, X), "ok"),
    "raw bytes": (torch.randint(0, 256, (400, 64), generator=G).float(), "warn"),
    "tiny": (1e-4 * X, "warn"),
    "one in dollars": (torch.cat([X, 50_000 + 10_000 * torch.randn(400, 1, generator=G)], 1), "warn"),
    "years": (torch.cat([X, torch.randint(1990, 2020, (400, 1), generator=G).float()], 1), "warn"),
    "a quarter in other units": (X * torch.tensor([1.0] * 14 + [1e-4] * 6), "warn"),
    "heavy tails": ((2 * X).exp(), "ok"),
    "bytes": (torch.randint(0, 256, (400, 64), generator=G).to(torch.uint8), "ok"),
    "constant": (torch.ones(400, 20), "ok"),
    "3 far rows": (far(3), "warn"),
    "1 far row": (far(1, 300.0), "warn"),
    "near ones": (far(3, 20.0), "ok"),
    "another kind of row": (far(120), "ok"),
}  # fmt: skip


@pytest.mark.parametrize("name", SCALES)
def test_scale(name: str) -> None:
    rows, status = SCALES[name]
    finding = said(TensorDataset(rows), "data.scale")
    assert finding.status == status, finding.summary
    assert ("of 400 training examples" in finding.summary) == ("far row" in name)


def test_the_feature_that_is_off_is_named() -> None:
    rows = X.clone()
    rows[:, 7] *= 1e4
    finding = said(TensorDataset(rows), "data.scale")
    assert (finding.evidence["largest_at"], "feature 7" in finding.summary) == (7, True)
    two_thirds = 0.67e4 / math.sqrt(20)  # of a deviation, the median size
    assert finding.value == pytest.approx(two_thirds, rel=0.2)


class Net(nn.Module):
    """A linear model behind a function of its inputs."""

    def __init__(self, columns: int, before: Any) -> None:
        super().__init__()
        self.head, self.before = nn.Linear(columns, 2), before

    def forward(self, x: Tensor) -> Any:
        return self.head(self.before(x))


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
        data = TensorDataset(rows, Y)
        workload = small_workload(
            train_data=data, validation_data=data, build_model=lambda b=before: Net(20, b), config={"precision": None}
        )
        assert of_workload(workload)["data.scale"].status == status


TABLES = {"iris": load_iris, "wine": load_wine, "diabetes": load_diabetes, "breast cancer": load_breast_cancer, "digits": load_digits}  # fmt: skip


def codes(values: Any) -> Any:
    rows = torch.as_tensor(values)
    rows = rows.float() if rows.is_floating_point() else rows
    return wb.data.audit(TensorDataset(rows, torch.zeros(len(rows)))).facts["data"]["codes"]


@pytest.mark.parametrize("name", TABLES)
def test_a_code_for_missing_values_is_named_with_its_share(name: str) -> None:
    values = TABLES[name]().data
    assert codes(values) == []
    for code, share in ((-999.0, 0.01), (99999.0, 0.15)):
        audited = wb.data.audit(TensorDataset(coded(values, code, share)))
        finding, first = wb.data.diagnose(audited)["data.scale"], audited.facts["data"]["codes"][0]
        assert finding.status == "warn"
        assert f"{code:g} stands in {first['share']:.1%} of the cells" in finding.summary
        assert first["share"] == pytest.approx(share, rel=0.5)


def test_a_code_is_found_in_one_column_after_standardising_and_in_pictures() -> None:
    one = load_diabetes().data.copy()
    one[:, 4] = coded(one[:, 4], -999.0, 0.03)
    assert [c["columns"] for c in codes(one)] == [1]
    assert [c["cells"] for c in codes((one - one.mean(0)) / one.std(0))] == [c["cells"] for c in codes(one)]
    pictures = np.random.default_rng(1).normal(size=(100, 1, 12, 12))
    assert [c["value"] for c in codes(coded(pictures, -9999.0, 0.02))] == [-9999.0]


NO_CODES: dict[str, Callable[[np.random.Generator], Any]] = {
    "counts": lambda r: r.poisson(r.uniform(0.01, 20, 8), (400, 8)).astype(float),
    "counts with a cap": lambda r: np.minimum(r.zipf(1.7, (400, 8)), 500).astype(float),
    "sparse": lambda r: np.where(r.random((400, 8)) < 0.95, 0, r.lognormal(size=(400, 8))),
    "a sensor that is off": lambda r: np.where(r.random((400, 8)) < 0.05, 0, 3000 + 50 * r.normal(size=(400, 8))),
    "one-hot": lambda r: 50 * np.eye(10)[r.choice(10, 400)],
    "bytes": lambda r: r.integers(0, 256, (400, 64)).astype(np.uint8),
    "saturated": lambda r: np.clip(r.normal(size=(400, 8)), -1.5, 1.5),
    "a saturated tail": lambda r: np.minimum(r.pareto(0.5, (400, 8)), 1e4),
    "heavy tails": lambda r: r.standard_cauchy((400, 8)),
    "single cells": lambda r: np.where(np.arange(400)[:, None] < 1, -999.0, r.normal(size=(400, 2))),
    "half of a column": lambda r: np.where(np.arange(400)[:, None] < 200, -999.0, r.normal(size=(400, 2))),
}


@pytest.mark.parametrize("name", NO_CODES)
def test_no_code_is_made_up(name: str) -> None:
    for seed in range(3):
        assert codes(NO_CODES[name](np.random.default_rng(seed))) == []


def test_only_so_many_examples_are_read_and_collecting_leaves_no_trace() -> None:
    read: set[int] = set()

    class Counted(Drawn):
        def __getitem__(self, index: int) -> Any:
            read.add(index)
            return super().__getitem__(index)

    before = random_states()
    facts = collect_data(small_workload(train_data=Counted(from_torch, X)), max_examples=50)
    assert (read, facts["read"], facts["examples"]["train"]) == (set(range(50)), 50, 400)
    assert before == random_states()


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


A, B = torch.randn(400, 3, generator=G, dtype=torch.float64), torch.randn(400, generator=G, dtype=torch.float64)
MASK = (torch.rand(400, 3, generator=G) < 0.8).double()
W = torch.rand(400, generator=G, dtype=torch.float64)
PARTS: dict[str, tuple[tuple[Tensor, ...], Any, Any, tuple[tuple[int, ...], int] | None]] = {
    "a mask before the target": ((A, MASK, B), lambda m, b: m(b[0] * b[1]), lambda o, b: (o.squeeze(-1) - b[2]) ** 2, ((0, 1), 2)),
    "the target first": ((B, A, W), lambda m, b: m(b[1]), lambda o, b: (o.squeeze(-1) - b[0]) ** 2 * b[2], ((1,), 0)),
    "a part that nobody reads": ((W, A, B), lambda m, b: m(b[1]), lambda o, b: (o.squeeze(-1) - b[2]) ** 2, ((1,), 2)),
    "as it stands": ((A, B, W), lambda m, b: m(b[0]), lambda o, b: (o.squeeze(-1) - b[1]) ** 2 * b[2], None),
    "a loss that raises": ((A, MASK, B), lambda m, b: m(b[0]), lambda o, b: b["no such part"], None),
}  # fmt: skip


@pytest.mark.parametrize("name", PARTS)
def test_parts_of_an_item_are_told_by_what_they_change(name: str) -> None:
    parts, forward, loss, roles = PARTS[name]
    workload = small_workload(
        build_model=lambda: nn.Linear(3, 1), train_data=TensorDataset(*parts), metrics={}, forward=forward, loss=loss,
        validation_data=TensorDataset(*(p[:100] for p in parts)),
    )  # fmt: skip
    found = paired(workload, torch.device("cpu"))
    if roles is None:
        assert found["train"] is workload.train_data
        return
    assert (found["train"].inputs, found["train"].target) == roles
    inputs, target = found["validation"][7]
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    assert torch.equal(target, parts[roles[1]][7])
    assert all(torch.equal(a, parts[k][7]) for a, k in zip(inputs, roles[0], strict=True))


TASTE = torch.randn(40, 1, generator=G) + torch.randn(1, 30, generator=G) + 0.3 * torch.randn(40, 30, generator=G)


class Factors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(40, 1), nn.Embedding(30, 1)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return (self.user(user) + self.item(item)).squeeze(-1)


def test_ratings_of_items_by_users_are_no_classes_of_users() -> None:
    cells = [(c // 30, c % 30, float(TASTE[c // 30, c % 30])) for c in torch.randperm(1200, generator=G).tolist()]
    data = small_workload(
        build_model=Factors, train_data=cells[:1000], validation_data=cells[1000:], metrics={},
        forward=lambda model, batch: model(batch[0], batch[1]), loss=lambda outputs, batch: (outputs - batch[2]) ** 2,
        config={"precision": "float32"},
    )  # fmt: skip
    audited = wb.data.audit(data)
    facts = audited.facts["data"]
    assert (facts["target_part"], facts["yardsticks"]["classes"]) == (2, None)
    assert facts["yardsticks"]["z"]["linear"] > 10, "users and items tell much of the rating"
    assert {f.code: f.summary for f in wb.data.diagnose(audited) if f.status in ("warn", "fail")} == {}
