"""Rows of one split in another: planted copies are found with their places, distinct rows are not, memory is bounded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_diabetes, load_digits, load_wine
from torch.utils.data import Subset, TensorDataset

import workbench as wb
import workbench.topics.data.overlap as overlap
from workbench.instruments.examples.rows import read_rows
from workbench.topics.data.overlap import find_overlap

G = torch.Generator().manual_seed(0)
X = torch.randn(300, 40, generator=G)
Y = torch.arange(300) % 7
Z = torch.randn(80, 40, generator=G)


def found(train: Any, other: Any, **options: Any) -> dict[str, Any]:
    return find_overlap(train, {"validation": other}, **options)["splits"]["validation"]


def counted(train: Any, other: Any, **options: Any) -> tuple[int, int]:
    facts = found(train, other, **options)
    return facts["exact"], facts["near"]


def planted(change: Any = lambda rows: rows) -> tuple[TensorDataset, TensorDataset]:
    """A validation split of 80 whose rows 10, 20 and 30 are training rows 5, 150 and 299."""
    z, labels = Z.clone(), torch.zeros(80, dtype=torch.int64)
    z[[10, 20, 30]] = change(X[[5, 150, 299]])
    labels[[10, 20]] = Y[[5, 150]]
    labels[30] = Y[299] + 1
    return TensorDataset(X, Y), TensorDataset(z, labels)


def noise(size: float) -> Any:
    return lambda x: x + size * torch.randn(x.shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("memory_mb", [0.01, 500.0])
def test_copies_are_found_with_their_places_and_labels_within_the_memory(memory_mb: float, monkeypatch: Any) -> None:
    sizes = []

    def read(data: Any, **options: Any) -> Any:
        for rows in read_rows(data, **options):
            sizes.append(rows.inputs.nbytes)
            yield rows

    monkeypatch.setattr(overlap, "read_rows", read)
    facts = found(*planted(), memory_mb=memory_mb)
    assert (facts["rows"], facts["exact"], facts["near"]) == (80, 3, 0)
    assert facts["pairs"] == [[10, 5, 0.0], [20, 150, 0.0], [30, 299, 0.0]]
    assert (facts["same_label"], facts["labelled"]) == (2, 3)
    assert max(sizes) <= max(memory_mb * 1e6, 160)
    assert sum(sizes) == (300 + 80) * 160


@pytest.mark.parametrize("change", [lambda x: 0.3 * x + 2.0, noise(0.01), lambda x: (x * 50).round() / 50])
def test_near_copies_are_found(change: Any) -> None:
    facts = found(*planted(change))
    assert (facts["exact"], facts["near"]) == (0, 3)
    assert [pair[:2] for pair in sorted(facts["pairs"])] == [[10, 5], [20, 150], [30, 299]]
    assert all(0 <= pair[2] < 0.1 for pair in facts["pairs"])
    assert found(*planted(change), near=False)["near"] == 0
    assert counted(*planted(lambda x: change(x).roll(1, 1))) == (0, 0)


def test_any_map_style_dataset_and_type_of_number() -> None:
    train, validation = planted()
    expected = found(train, validation)
    named = [{"pixels": x.numpy(), "label": int(y)} for x, y in (validation[i] for i in range(80))]
    whole = TensorDataset(torch.cat([validation.tensors[0], X]), torch.cat([validation.tensors[1], Y]))
    subset = Subset(Subset(whole, list(range(80))[::-1]), list(range(80))[::-1])  # turned round twice
    for other in (named, subset):
        assert found(train, other) == expected
    bytes_ = torch.randint(0, 255, (50, 30), generator=G)
    for kind in (torch.uint8, torch.float16, torch.int32):
        assert counted(TensorDataset(bytes_.float()), TensorDataset(bytes_[:5].to(kind)))[0] == 5


def test_text_ignores_case_space_and_punctuation() -> None:
    train = [("The quick brown fox.", 0), ("Something else", 1), ("A third one", 0)]
    facts = found(train, [("the  QUICK brown fox", 0), ("Something else", 0), ("new", 1)])
    assert (facts["exact"], facts["near"], facts["same_label"], facts["labelled"]) == (1, 1, 1, 2)


TABLES: dict[str, Any] = {
    "wine": lambda r: load_wine().data,
    "integers": lambda r: r.integers(0, 50, (500, 8)).astype(float),
    "a walk": lambda r: np.cumsum(r.normal(size=(500, 4)), 0),
    "persons": lambda r: np.repeat(r.normal(size=(100, 6)), 5, 0) + 0.02 * r.normal(size=(500, 6)),
    "tails": lambda r: r.lognormal(0, 2, (500, 8)),
}


def tables(name: str, seed: int) -> tuple[Any, Any]:
    r = np.random.default_rng(seed)
    rows = torch.from_numpy(r.permutation(torch.tensor(TABLES[name](r)).float().numpy()))
    return rows[len(rows) // 4 :], rows[: len(rows) // 4]


def leaked(train: Any, held: Any) -> Any:
    return wb.data.diagnose(wb.data.audit(TensorDataset(train), validation=TensorDataset(held)))["data.leakage"]


@pytest.mark.parametrize("name", TABLES)
def test_neighbours_in_a_table_of_few_columns_are_no_copies(name: str) -> None:
    finding = leaked(*tables(name, 0))
    assert finding.status == "ok", finding.summary


@pytest.mark.parametrize("name", ["wine", "integers", "tails"])
@pytest.mark.parametrize("change", [lambda x: 1.0001 * x, lambda x: noise(1e-3)(x / x.std(0)) * x.std(0)])
def test_near_copies_in_a_table_of_few_columns(name: str, change: Any) -> None:
    train, held = tables(name, 0)
    held[:30] = change(train)[40:70]
    finding = leaked(train, held)
    assert finding.status == "fail", finding.summary
    split = finding.evidence["splits"]["validation"]
    assert 25 <= split["near"] <= 33
    copies = [(mine, theirs) for mine, theirs, _ in split["pairs"] if mine < 30]
    assert copies
    assert all(theirs == mine + 40 for mine, theirs in copies)


def test_huge_and_missing_numbers_are_near_nothing() -> None:
    train, held = torch.randn(200, 4, generator=G).double(), torch.randn(50, 4, generator=G).double()
    train[3, 1], train[5, 2], held[0, 1], held[1, 0] = 1e30, float("nan"), -1e30, float("inf")
    facts = find_overlap(TensorDataset(train), {"validation": TensorDataset(held)})
    assert (facts["near"], facts["splits"]["validation"]["near"]) == (True, 0)


def texts(count: int, seed: int) -> list[Any]:
    """Rows of 3 to 19 tokens, as a dataset of texts has them before a batch pads them."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(3, 20, (count,), generator=generator).tolist()
    return [(torch.randint(1, 50, (n,), generator=generator), k % 3) for k, n in enumerate(sizes)]


def test_rows_of_different_sizes_have_exact_copies_only() -> None:
    train, other, copies = texts(200, 0), texts(60, 1), [4, 9, 30]
    for place in copies:
        other[place] = train[3 * place]
    facts = find_overlap(train, {"validation": other}, memory_mb=0.005)
    (side,) = facts["splits"].values()
    assert (facts["near"], side["exact"], side["near"]) == (False, len(copies), 0)
    assert [pair[:2] for pair in sorted(side["pairs"])] == [[place, 3 * place] for place in copies]


def test_constant_rows_zeros_and_nan_equal_themselves_alone() -> None:
    flat = torch.arange(60.0)[:, None].expand(60, 40)
    assert counted(TensorDataset(flat), TensorDataset(flat[:10] + 0.5)) == (0, 0)
    assert counted(TensorDataset(flat), TensorDataset(flat[:10]))[0] == 10
    x = X.clone()
    x[0, 0] = torch.nan
    assert counted(TensorDataset(x), TensorDataset(x[:3]))[0] == 3


def digits(count: int, copies: int, size: float) -> tuple[TensorDataset, TensorDataset]:
    """Every fifth of so many noisy copies of so many digits, and the others."""
    pictures = torch.tensor(load_digits().data[:count] / 16, dtype=torch.float32)
    rows = noise(size)(pictures.repeat(copies, 1))[
        torch.randperm(count * copies, generator=torch.Generator().manual_seed(2))
    ]
    held = torch.arange(len(rows)) % 5 == 0
    return TensorDataset(rows[~held]), TensorDataset(rows[held])


def test_augmented_copies_on_both_sides_are_found_and_pictures_of_one_kind_are_not() -> None:
    train, validation = digits(320, 8, 0.01)
    assert counted(train, validation)[1] > 0.2 * len(validation)
    assert counted(*digits(1700, 1, 0.01)) == (0, 0)


def test_copies_among_the_training_rows_too_are_told_by_their_target() -> None:
    """Near rows of one split would be clumps by nature, were their targets not the same."""
    x, y = (torch.tensor(part).float() for part in load_diabetes(return_X_y=True))
    order = torch.randperm(5 * len(x), generator=torch.Generator().manual_seed(2))
    x, y = noise(0.05)((x / x.std(0)).repeat(5, 1))[order], y.repeat(5)[order]
    for targets, status in ((y, "fail"), (torch.randn(len(y), generator=G), "ok")):
        train, held = (TensorDataset(x[part], targets[part]) for part in (slice(400, None), slice(400)))
        finding = wb.data.diagnose(wb.data.audit(train, validation=held))["data.leakage"]
        assert finding.status == status, finding.summary
