"""Splits that are not alike, targets that do not belong to their inputs, copies and scales: planted faults and their healthy twins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_diabetes, load_digits, load_wine
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from workbench.findings.diagnosis import Diagnosis
from workbench.topics.data.collect import audit_data
from workbench.topics.data.diagnose import diagnose_data

Pair = tuple[Tensor, Tensor]


def standard(x: Any) -> Tensor:
    values = torch.tensor(np.asarray(x), dtype=torch.float32)
    return (values - values.mean(0)) / values.std(0).clamp(min=1e-6)


def digits() -> Pair:
    bunch = load_digits()
    return torch.tensor(bunch.images).float().unsqueeze(1) / 16, torch.tensor(bunch.target)


def wine() -> Pair:
    return standard(load_wine().data), torch.tensor(load_wine().target)


def diabetes() -> Pair:
    return standard(load_diabetes().data), standard(load_diabetes().target)


def tokens(rows: int = 600) -> Pair:
    g = torch.Generator().manual_seed(3)
    x = (torch.rand(rows, 20, generator=g) ** 2 * 30).long()
    return x, ((x < 3).sum(1) > 6).long()


def sines(rows: int = 500) -> Pair:
    """Waves that differ in their phase alone: all are close to each other by nature."""
    phase = 6.28 * torch.rand(rows, 1, generator=torch.Generator().manual_seed(4))
    waves = torch.sin(torch.linspace(0, 6, 33) + phase)
    return waves[:, :32, None], waves[:, 32]


def lognormal(rows: int = 400) -> Pair:
    g = torch.Generator().manual_seed(5)
    x = torch.randn(rows, 20, generator=g)
    return (x * torch.linspace(0.3, 1.5, 20)).exp(), (x[:, 0] > 0).long()


SOURCES: dict[str, Callable[[], Pair]] = {f.__name__: f for f in (digits, wine, diabetes, tokens, sines, lognormal)}  # fmt: skip


def split(data: Pair, seed: int = 0, share: float = 0.25) -> tuple[Pair, Pair]:
    order = torch.randperm(len(data[0]), generator=torch.Generator().manual_seed(seed))
    cut = int(share * len(order))
    return tuple(t[order[cut:]] for t in data), tuple(t[order[:cut]] for t in data)  # type: ignore[return-value]


def found(train: Pair, held: Pair) -> Diagnosis:
    return diagnose_data(audit_data(TensorDataset(*train), validation=TensorDataset(*held)))


def alarms(diagnosis: Diagnosis) -> set[str]:
    return {f.code for f in diagnosis if f.status in ("warn", "fail")}


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("seed", range(2))
def test_random_splits_raise_no_alarm(name: str, seed: int) -> None:
    for share in (0.3, 0.1):
        assert alarms(found(*split(SOURCES[name](), seed, share))) == set()


SHIFTS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "bytes against [0, 1]": ("digits", lambda x: 255 * x),
    "pictures on their side": ("digits", lambda x: x.transpose(2, 3)),
    "columns in another order": ("wine", lambda x: x.roll(3, 1)),
}


@pytest.mark.parametrize("name", SHIFTS)
def test_inputs_that_were_prepared_in_another_way(name: str) -> None:
    source, change = SHIFTS[name]
    train, (x, y) = split(SOURCES[source]())
    assert "data.train_validation_shift" in alarms(found(train, (change(x), y)))


LABELS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "numbered from one": ("digits", lambda y: (y + 1) % 10),
    "numbers in other units": ("diabetes", lambda y: 77 * y + 150),
    "gains that are costs": ("diabetes", lambda y: -y),
}  # fmt: skip


@pytest.mark.parametrize("name", LABELS)
def test_targets_that_were_prepared_in_another_way(name: str) -> None:
    source, change = LABELS[name]
    train, (x, y) = split(SOURCES[source]())
    diagnosis = found(train, (x, change(y)))
    assert diagnosis["data.label_shift"].status == "fail", diagnosis
    assert diagnosis["data.train_validation_shift"].status == "ok"


def test_the_wrong_sign_is_said_of_targets_alone() -> None:
    train, (x, y) = split(diabetes())
    finding = found(train, (x, -y))["data.label_shift"]
    assert finding.status == "fail"
    assert "wrong sign" in finding.summary
    mixed = found(train, (x.flip(1), y))
    assert "wrong sign" not in mixed["data.label_shift"].summary
    moved = found(train, (3 - x, y))
    assert moved["data.label_shift"].status == "ok", "inputs that lie elsewhere are reason enough"
    assert moved["data.train_validation_shift"].status == "fail"


def test_a_set_that_is_sorted_by_class_and_cut_in_two() -> None:
    x, y = wine()
    order, cut = y.argsort(), int(0.7 * len(y))
    finding = found((x[order[:cut]], y[order[:cut]]), (x[order[cut:]], y[order[cut:]]))["data.label_shift"]
    assert finding.status == "fail"
    assert "training has none of class" in finding.summary


def test_a_row_between_inputs_and_targets() -> None:
    """Seen where nothing of its own target can be told from a row, in whatever part of the data it went."""
    x, y = digits()
    first, second = (torch.randperm(len(y), generator=torch.Generator().manual_seed(k)) for k in range(2))
    whole = TensorDataset(x[first], y[first].roll(1))
    for data in (whole, Subset(whole, second[:1700].tolist())):
        finding = diagnose_data(audit_data(data))["data.no_signal"]
        assert (finding.status, "of the row after it" in finding.summary) == ("fail", True)


def test_targets_without_signal_are_an_alarm_only_where_training_finds_none() -> None:
    (x, y), held = split(digits())
    mixed = y[torch.randperm(len(y), generator=torch.Generator().manual_seed(0))]
    audited = audit_data(TensorDataset(x, mixed), validation=TensorDataset(*held))
    assert diagnose_data(audited)["data.no_signal"].status == "ok", "a network may find what simple models do not"
    by_heart = {
        "examples": 400,
        "loss": 0.1,
        "se": 0.01,
        "score": 0.99,
        "chance": 0.1,
        "classes": 10,
        "renumbered": 0.99,
    }
    for score, status in ((0.11, "fail"), (0.3, "ok")):
        at = {"step": 9, "train": by_heart, "validation": by_heart | {"score": score, "renumbered": 0.2}}
        trained = type(audited)(facts=audited.facts | {"generalisation": {"last": at, "selected": at}}, workload="x")
        assert diagnose_data(trained)["data.no_signal"].status == status


def test_near_copies_are_told_from_neighbours() -> None:
    """In one large column, and in waves that differ in their phase alone, all rows are close to each other by nature."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(500, 20, generator=g)
    x[:, 3] = 50 * x[:, 3] + 3000
    y = (x[:, 0] > 0).long()
    assert found(*split((x, y)))["data.leakage"].status == "ok"
    train, (held, labels) = split((x, y))
    copied = held.clone()
    copied[:40] = train[0][:40] + 1e-3 * torch.randn(40, 20, generator=g)
    finding = found(train, (copied, labels))["data.leakage"]
    assert finding.status == "fail"
    assert finding.evidence["splits"]["validation"]["near"] == 40


def test_an_empty_input_and_copies() -> None:
    train, held = split(digits())
    assert "row for row" in found(train, train)["data.leakage"].summary
    blank = train[0].clone()
    blank[::8] = 0
    finding = found((blank, train[1]), held)["data.duplicates"]
    assert finding.status == "warn"
    assert finding.evidence["splits"]["train"]["top"] == [169, 0]
    many = tuple(t.repeat(6, *[1] * (t.dim() - 1)) for t in train)
    assert found(many, held)["data.duplicates"].status == "warn"  # type: ignore[arg-type]
    rare = train[1] == 7
    over = tuple(torch.cat([t, *[t[rare]] * 20]) for t in train)
    assert found(over, held)["data.duplicates"].status == "ok"  # type: ignore[arg-type]
