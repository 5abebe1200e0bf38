"""Facts on classes, scale and workers, from workloads and loaders, and their verdicts; healthy look-alikes are silent."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import workbench as wb
from tests.helpers.simulated_records import record
from tests.helpers.workloads import small_workload
from workbench.errors import ConfigError, UsageError
from workbench.record.json_values import dumps
from workbench.topics.data.collect import audit_data, collect_data
from workbench.topics.data.diagnose import diagnose_data

G = torch.Generator().manual_seed(0)
X = torch.randn(400, 20, generator=G)
Y = torch.randint(0, 4, (400,), generator=G)
CODES = [
    "data.leakage", "data.duplicates", "data.unshuffled", "data.weak_shuffle", "data.no_signal", "data.label_shift",
    "data.train_validation_shift", "data.scale", "data.imbalance", "data.worker_rng",
]  # fmt: skip


def said(data: Any, code: str, **options: Any) -> Any:
    diagnosis = diagnose_data(audit_data(data, **options))
    assert [f.code for f in diagnosis] == CODES
    for finding in diagnosis:
        assert finding.clause
        assert finding.advice or finding.status not in ("warn", "fail")
    return diagnosis[code]


@pytest.mark.parametrize("name", ["digits_mlp", "breast_cancer", "source_text"])
def test_bundled_workloads_raise_no_alarm(name: str) -> None:
    found = audit_data(wb.load_workload(name), max_examples=4000)
    assert {f.status for f in diagnose_data(found)} <= {"ok", "not_measured"}
    dumps(found.facts)


@pytest.mark.parametrize("name", ["quadratic", "catapult", "valley"])
def test_oracles_of_two_rows_raise_no_alarm(name: str) -> None:
    assert {f.status for f in diagnose_data(audit_data(wb.load_workload(name)))} <= {"ok", "not_measured"}


def test_leaked_rows_are_named_with_share_and_labels() -> None:
    validation = TensorDataset(torch.cat([X[:30], torch.randn(70, 20, generator=G)]), torch.cat([Y[:30], Y[100:170]]))
    finding = said(DataLoader(TensorDataset(X, Y), shuffle=True), "data.leakage", validation=validation)
    assert (finding.status, finding.value) == ("fail", 0.3)
    assert finding.evidence["splits"]["validation"]["pairs"][:2] == [[0, 0, 0.0], [1, 1, 0.0]]
    assert finding.evidence["splits"]["validation"]["same_label"] == 30
    assert "validation[0] and train[0]" in finding.advice[0]


def test_a_row_in_a_hundred_is_no_leak() -> None:
    validation = TensorDataset(torch.cat([X[:1], torch.randn(199, 20, generator=G)]))
    finding = said(TensorDataset(X), "data.leakage", validation=validation)
    assert (finding.status, finding.value) == ("ok", 0.005)
    assert "too few" in finding.summary


def test_copies_made_before_the_split_and_rows_of_few_values() -> None:
    twice = torch.cat([X, X])[torch.randperm(800, generator=G)]
    finding = said(TensorDataset(twice[:600]), "data.leakage", validation=TensorDataset(twice[600:]))
    assert (finding.status, finding.summary.endswith("that metric measures memory.")) == ("fail", True)
    binary = torch.randint(0, 2, (3000, 8), generator=G).float()
    for rows in (binary, torch.nn.functional.one_hot(binary.long()).flatten(1).float(), binary.long()):
        found = diagnose_data(audit_data(TensorDataset(rows[:2000]), validation=TensorDataset(rows[2000:])))
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
def test_a_leak_beside_as_many_repeats_in_training_has_another_reason(
    again: int, tokens: bool, status: str, words: str
) -> None:
    """Half of validation is in training; 266 of 666 training rows, or 268 of 668, are on either side of 0.8 times that."""
    rows = torch.randint(0, 1000, (450, 20), generator=torch.Generator().manual_seed(1))
    rows = rows if tokens else torch.randn(450, 20, generator=torch.Generator().manual_seed(1))
    train = TensorDataset(torch.cat([rows[:400], rows[:again]]), torch.cat([Y, Y[:again]]))
    validation = TensorDataset(rows[350:], torch.cat([Y[350:], Y[:50]]))
    finding = said(train, "data.leakage", validation=validation)
    assert (finding.status, finding.value) == (status, 0.5), finding.summary
    assert finding.summary.endswith(words), finding.summary


def test_the_worse_of_two_splits_speaks() -> None:
    clean = TensorDataset(torch.randn(100, 20, generator=G))
    finding = said(TensorDataset(X), "data.leakage", validation=clean, test=DataLoader(TensorDataset(X[:50])))
    assert finding.status == "fail"
    assert "of test" in finding.summary


class Jittered(Dataset[Any]):
    """Adds noise from `draw` to an example; `draw` may be made once, in the parent process."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return X[index] + self.draw(), int(Y[index])


class OwnGenerator:
    """The fault: a generator that every worker gets a copy of."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __call__(self) -> float:
        return float(self.rng.standard_normal())


def global_numpy() -> float:
    return float(np.random.standard_normal())


def from_torch() -> float:
    return float(torch.randn(()))


def from_python() -> float:
    return random.random()


def coin() -> float:
    return float(torch.rand(()) < 0.5)


def nothing() -> float:
    return 0.0


def constant_seed(worker: int) -> None:
    np.random.seed(0)


@pytest.mark.parametrize(
    ("draw", "init", "status", "words"),
    [
        (OwnGenerator(), None, "warn", "same random draws and every epoch repeats"),
        (global_numpy, constant_seed, "warn", "same random draws and every epoch repeats"),
        (global_numpy, None, "ok", "of their own"),
        (from_torch, None, "ok", "of their own"),
        (from_python, None, "ok", "of their own"),
        (coin, None, "ok", "of their own"),
        (nothing, None, "ok", "nothing to draw"),
    ],
)
def test_random_draws_of_workers(draw: Any, init: Any, status: str, words: str) -> None:
    loader: DataLoader[Any] = DataLoader(Jittered(draw), batch_size=4, num_workers=2, worker_init_fn=init, shuffle=True)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    finding = said(loader, "data.worker_rng")
    assert (finding.status, words in finding.summary) == (status, True), finding.summary
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == np.random.get_state()[1].tolist()


def test_workers_that_differ_and_repeat_by_the_epoch() -> None:
    loader: DataLoader[Any] = DataLoader(Jittered(global_numpy), num_workers=2, worker_init_fn=np.random.seed)
    finding = said(loader, "data.worker_rng")
    assert finding.status == "warn"
    assert finding.summary.startswith("Every epoch repeats")


def test_workers_that_stay_go_on_drawing_where_they_were() -> None:
    loader: DataLoader[Any] = DataLoader(Jittered(OwnGenerator()), num_workers=2, persistent_workers=True)
    finding = said(loader, "data.worker_rng")
    assert finding.status == "warn"
    assert finding.summary.startswith("Worker processes make the same random draws:"), "and no epoch repeats another"


def test_one_process_has_no_workers() -> None:
    assert said(DataLoader(Jittered(OwnGenerator())), "data.worker_rng").status == "ok"


@pytest.mark.parametrize(("counts", "status"), [((100, 100), "ok"), ((250, 148), "ok"), ((299, 30), "ok"), ((300, 30), "warn"), ((395, 5), "warn")])  # fmt: skip
def test_imbalance(counts: tuple[int, int], status: str) -> None:
    labels = torch.repeat_interleave(torch.arange(2), torch.tensor(counts))
    finding = said(TensorDataset(torch.randn(sum(counts), 20, generator=G), labels), "data.imbalance")
    assert finding.status == status
    assert finding.value == pytest.approx(counts[0] / counts[1])


def test_labels_that_are_no_classes() -> None:
    for labels in (torch.randn(400), torch.arange(400), torch.randn(400, 2)):
        assert said(TensorDataset(X, labels), "data.imbalance").summary.startswith("Does not apply")
    assert said(TensorDataset(X), "data.imbalance").status == "ok"


SCALES: dict[str, Any] = {
    "standardised, with outliers": (X * (1 + 9 * (torch.rand(400, 20, generator=G) < 0.01)), "ok"),
    "one-hot": (torch.nn.functional.one_hot(torch.randint(0, 300, (400,), generator=G)).float(), "ok"),
    "rare binary": ((torch.rand(400, 30, generator=G) < torch.logspace(-2.5, -0.5, 30)).float(), "ok"),
    "bytes over 255": (torch.randint(0, 256, (400, 64), generator=G) / 255, "ok"),
    "digits over 16": (torch.randint(0, 17, (400, 64), generator=G) * (torch.rand(400, 64, generator=G) < 0.2) / 16, "ok"),
    "standardised and constant": (torch.cat([X, torch.full((400, 3), 1e6)], 1), "ok"),
    "with NaN": (torch.where(torch.rand(400, 20, generator=G) < 0.1, torch.nan, X), "ok"),
    "raw bytes": (torch.randint(0, 256, (400, 64), generator=G).float(), "warn"),
    "tiny": (1e-4 * X, "warn"),
    "one in dollars": (torch.cat([X, 50_000 + 10_000 * torch.randn(400, 1, generator=G)], 1), "warn"),
    "years": (torch.cat([X, torch.randint(1990, 2020, (400, 1), generator=G).float()], 1), "warn"),
    "a quarter in other units": (X * torch.tensor([1.0] * 14 + [1e-4] * 6), "warn"),
    "heavy tails": ((2 * X).exp(), "ok"),
    "counts": (torch.poisson(torch.full((400, 10), 5.0), generator=G), "ok"),
    "bytes": (torch.randint(0, 256, (400, 64), generator=G).to(torch.uint8), "ok"),
    "constant": (torch.ones(400, 20), "ok"),
}  # fmt: skip


@pytest.mark.parametrize("name", SCALES)
def test_scale(name: str) -> None:
    rows, status = SCALES[name]
    finding = said(TensorDataset(rows), "data.scale")
    assert finding.status == status, finding.summary


def test_the_feature_that_is_off_is_named() -> None:
    rows = X.clone()
    rows[:, 7] *= 1e4
    finding = said(TensorDataset(rows), "data.scale")
    assert finding.evidence["largest_at"] == 7
    assert "feature 7" in finding.summary
    assert finding.value == pytest.approx(0.67e4 / math.sqrt(20), rel=0.2), (
        "two thirds of a deviation are the median size"
    )


def with_far_rows(count: int, *, times: float = 1000.0) -> TensorDataset:
    rows = X.clone()
    rows[:count] *= times
    return TensorDataset(rows, Y)


@pytest.mark.parametrize(
    ("count", "times", "status"),
    [(0, 1.0, "ok"), (3, 1000.0, "warn"), (1, 300.0, "warn"), (3, 20.0, "ok"), (120, 1000.0, "ok")],
)
def test_single_examples_far_from_all_others_are_named(count: int, times: float, status: str) -> None:
    finding = said(with_far_rows(count, times=times), "data.scale")
    assert finding.status == status, finding.summary
    assert (f"{count} of 400 training examples" in finding.summary) == (0 < count < 10 and status == "warn")


def test_a_model_that_takes_the_logarithm_of_its_inputs_may_have_them() -> None:
    class Logs(nn.Module):
        def __init__(self, *, logs: bool) -> None:
            super().__init__()
            self.head, self.logs = nn.Linear(20, 2), logs

        def forward(self, x: torch.Tensor) -> Any:
            return self.head(x.sign() * x.abs().log1p() if self.logs else x)

    for logs in (True, False):
        workload = small_workload(
            train_data=with_far_rows(3), build_model=lambda logs=logs: Logs(logs=logs), config={"precision": None}
        )
        finding = diagnose_data(record([], facts={"data": collect_data(workload)}))["data.scale"]
        assert finding.status == ("ok" if logs else "warn"), finding.summary


def test_only_so_many_examples_are_read() -> None:
    class Counted(Dataset[Any]):
        def __len__(self) -> int:
            return 400

        def __getitem__(self, index: int) -> Any:
            read.add(index)
            return X[index], int(Y[index])

    read: set[int] = set()
    data = small_workload(train_data=Counted())
    facts = collect_data(data, max_examples=50)
    assert read == set(range(50))
    assert (facts["read"], facts["examples"]["train"]) == (50, 400)


def test_collecting_leaves_no_trace() -> None:
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    before = (torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate())
    collect_data(small_workload(train_data=Jittered(from_torch)))
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (np.random.get_state()[1].tolist(), random.getstate())


def test_a_dataset_alone_has_no_order() -> None:
    assert said(TensorDataset(X, Y), "data.unshuffled").status == "not_measured"
    assert said(TensorDataset(X, Y), "data.leakage").status == "not_measured"


def test_without_facts_nothing_is_called_healthy() -> None:
    from workbench.topics.data.collect import DataAudit

    diagnosis = diagnose_data(DataAudit(facts={}, workload="x"))
    assert {f.status for f in diagnosis} == {"not_measured"}
    assert [f.code for f in diagnosis] == CODES


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: audit_data(3), UsageError, "not int"),
        (lambda: audit_data("digits_mlp"), UsageError, "not str"),
        (lambda: audit_data(small_workload(), validation=TensorDataset(X)), UsageError, "leave validation= and test= out"),
        (lambda: audit_data(TensorDataset(X), max_examples=1), ConfigError, "max_examples=1 must be at least 2"),
        (lambda: audit_data(TensorDataset(X), memory_mb=-1), ConfigError, "memory_mb=-1 must be above 0"),
    ],
)  # fmt: skip
def test_bad_arguments(call: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()


def test_an_empty_split_is_not_measured() -> None:
    empty = TensorDataset(X[:0], Y[:0])
    assert said(TensorDataset(X, Y), "data.leakage", validation=empty).status == "not_measured"
    assert {f.status for f in diagnose_data(audit_data(empty, validation=empty))} <= {"ok", "not_measured"}


class Augmented(Dataset[Any]):
    """Rows with noise that is drawn at each reading."""

    def __init__(self, rows: torch.Tensor, draw: Any = None) -> None:
        self.rows, self.draw = rows, draw or (lambda index: rows[index] + 0.1 * torch.randn(20))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.draw(index), Y[index % 400]


OWN = torch.Generator().manual_seed(1)
AUGMENTED: dict[str, tuple[Dataset[Any], Any, tuple[str, str], str]] = {
    "noise": (Augmented(X), TensorDataset(torch.randn(100, 20, generator=G)), ("ok", "ok"), "augmented at random"),
    "half of the readings": (Augmented(X, lambda i: -X[i] if torch.rand(()) < 0.5 else X[i]), TensorDataset(X[:1] * 0 + torch.randn(100, 20, generator=G)), ("ok", "ok"), "augmented at random"),
    "copies": (Augmented(X.repeat(10, 1)), Augmented(torch.randn(100, 20, generator=G)), ("ok", "warn"), "augmented at random"),
    "leaked": (Augmented(X), Augmented(X[:100]), ("fail", "ok"), "in the training split too"),
    "drawn": (Augmented(X, lambda _: torch.randn(20)), TensorDataset(X[:100]), ("ok", "ok"), "generated anew"),
    "own generator": (Augmented(X, lambda i: X[i] + torch.randn(20, generator=OWN)), TensorDataset(X[:100]), ("not_measured", "not_measured"), "change from one reading"),
}  # fmt: skip


@pytest.mark.parametrize("name", AUGMENTED)
def test_augmented_items_are_compared_under_one_random_state(name: str) -> None:
    train, validation, expected, words = AUGMENTED[name]
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    diagnosis = diagnose_data(audit_data(train, validation=validation))
    assert (diagnosis["data.leakage"].status, diagnosis["data.duplicates"].status) == expected
    assert words in diagnosis["data.leakage"].summary
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (np.random.get_state()[1].tolist(), random.getstate())
