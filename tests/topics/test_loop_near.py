"""Near copies of training examples among those that a loop evaluates: made before the split they are told, and what is near by nature is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, make_blobs, make_moons
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import workbench as wb

Rows = tuple[NDArray[Any], NDArray[Any]]
Split = tuple[Rows, Rows]
CODE = "data.leakage"


def split(x: NDArray[Any], y: NDArray[Any], r: np.random.Generator) -> Split:
    order, held = r.permutation(len(x)), len(x) // 5
    x, y = x[order], y[order]
    return (x[held:], y[held:]), (x[:held], y[:held])


def copied(x: NDArray[Any], y: NDArray[Any], r: np.random.Generator, copies: int, size: float) -> Rows:
    more = [x + size * r.normal(size=x.shape) for _ in range(copies)]
    return np.concatenate([x, *more]), np.concatenate([y] * (copies + 1))


def table(load: Callable[..., Rows]) -> Rows:
    x, y = load(return_X_y=True)
    return (x - x.mean(0)) / x.std(0), y


def pictures() -> Rows:
    x, y = load_digits(return_X_y=True)
    return x[:800].reshape(-1, 1, 8, 8) / 16, y[:800]


def replicates(r: np.random.Generator, measured: float) -> Split:
    """Ten results each of 150 settings of four dials, which are read with an error."""
    x = np.repeat(r.random((150, 4)), 10, 0)
    return split(x + measured * r.normal(size=x.shape), (x.sum(1) + 0.3 * r.normal(size=1500) > 2).astype(int), r)


def settings(r: np.random.Generator, kinds: tuple[int, ...]) -> Split:
    """Dials of a few positions, read with an error, and all their combinations."""
    x = np.stack([r.integers(kind, size=1500) for kind in kinds], 1)
    return split(x + 0.01 * r.normal(size=x.shape), (2 * x.sum(1) > sum(kinds) - len(kinds)).astype(int), r)


def categories(r: np.random.Generator, values: int) -> Split:
    kinds = [r.integers(n, size=1500) for n in (5, 8, 4, 6)]
    x = [np.eye(n.max() + 1)[n] for n in kinds] + [r.normal(size=(1500, values))]
    return split(np.concatenate(x, 1), (kinds[0] + kinds[1] > 5).astype(int), r)


def ages(r: np.random.Generator) -> Split:
    """Categories beside whole numbers: one and two years apart is near, and other categories are far."""
    kinds = [r.integers(n, size=1500) for n in (5, 8, 4)]
    age = r.integers(18, 80, size=1500)
    x = [np.eye(n.max() + 1)[n] for n in kinds] + [age[:, None] / 18]
    return split(np.concatenate(x, 1), (kinds[0] + kinds[1] > 5).astype(int), r)


def spirals(r: np.random.Generator) -> Split:
    """Two lines: of neighbours in one direction, one is often far nearer than the next."""
    turn, y = 12 * r.random(1000), r.integers(2, size=1000)
    return split(np.stack([turn * np.cos(turn + y * np.pi), turn * np.sin(turn + y * np.pi)], 1), y, r)


def windows(r: np.random.Generator) -> Split:
    values = np.sin(np.arange(1510) / 9) + 0.02 * r.normal(size=1510)
    x, y = np.lib.stride_tricks.sliding_window_view(values, 8)[:1500], values[8:1508]
    return (x[:1200], y[:1200]), (x[1200:], y[1200:])


def words(r: np.random.Generator) -> Split:
    shares, y = r.dirichlet(np.full(120, 0.05), 4), r.integers(4, size=1000)
    return split(np.stack([r.multinomial(r.integers(3, 30), shares[k]) for k in y]).astype(float), y, r)


def augmented(load: Callable[..., Rows]) -> Callable[[np.random.Generator], Split]:
    def made(r: np.random.Generator) -> Split:
        train, held = split(*table(load), r)
        return copied(*train, r, 3, 0.05), held

    return made


def oversampled(r: np.random.Generator) -> Split:
    (x, y), held = split(*table(load_breast_cancer), r)
    more = r.choice(np.flatnonzero(y == 0), 600)
    return (np.concatenate([x, x[more]]), np.concatenate([y, y[more]])), held


FAULTS: dict[str, Callable[[np.random.Generator], Split]] = {
    "numbers": lambda r: split(*copied(*table(load_diabetes), r, 3, 0.05), r),
    "classes": lambda r: split(*copied(*table(load_breast_cancer), r, 1, 0.05), r),
    "two columns": lambda r: split(*copied(*make_moons(300, noise=0.1, random_state=0), r, 3, 2e-4), r),
    "pictures": lambda r: split(*copied(*pictures(), r, 1, 0.015), r),
}
TWINS: dict[str, Callable[[np.random.Generator], Split]] = {
    "numbers": lambda r: split(*table(load_diabetes), r),
    "classes": lambda r: split(*table(load_breast_cancer), r),
    "pictures": lambda r: split(*pictures(), r),
    "two spirals": spirals,
    "tight clusters": lambda r: split(*make_blobs(1000, 8, centers=5, cluster_std=0.01, random_state=0), r),
    "a cluster for each of many classes": lambda r: split(*make_blobs(1000, 16, centers=80, cluster_std=0.5, random_state=0), r),
    "bits": lambda r: split(r.integers(2, size=(1000, 9)).astype(float), r.integers(2, size=1000), r),
    "bits with noise": lambda r: settings(r, (2,) * 8), "settings": lambda r: settings(r, (5, 5, 4, 3)),
    "categories and two numbers": lambda r: categories(r, 2), "categories and five numbers": lambda r: categories(r, 5),
    "categories and ages": ages, "results that differ": lambda r: replicates(r, 0.002), "of equal settings": lambda r: replicates(r, 0.0),
    "windows in time": windows, "bags of words": words, "training augmented": augmented(load_breast_cancer),
    "training augmented, numbers": augmented(load_diabetes), "training oversampled": oversampled,
}  # fmt: skip


def found(
    data: Split,
    out: Path,
    *,
    late: bool = False,
    alter: float = 0.0,
    apart: tuple[int, ...] = (),
    share: float | None = None,
) -> wb.Finding:
    """Watch a training on the first of both splits, altered when drawn, that evaluates the second.

    Args:
        late: evaluate after the sixth epoch, from a loader; else after the first, all at once.
        apart: evaluate the training split, too, and both in parts of so many.
        share: of the time that looking may take.
    """
    torch.manual_seed(0)
    (x, y), (other, others) = ((torch.tensor(a).float(), torch.tensor(b)) for a, b in data)
    numbers = y.is_floating_point()
    y, others = (part.float()[:, None] if numbers else part for part in (y, others))
    outputs = 1 if numbers else int(y.max()) + 1
    model = nn.Sequential(nn.Flatten(), nn.Linear(x[0].numel(), 16), nn.ReLU(), nn.Linear(16, outputs))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        return (F.mse_loss if numbers else F.cross_entropy)(model(inputs), targets)

    evaluated: list[Any] = [(other, others)]
    if late:
        evaluated = DataLoader(TensorDataset(other, others), 50)  # type: ignore[assignment]
    if apart:
        pairs = [(x, y, apart[0]), (other, others, apart[-1])]
        evaluated = [part for a, b, size in pairs for part in zip(a.split(size), b.split(size), strict=True)]
    with wb.watch(model, optimizer, out=out, share=share) as run:
        for _ in range(6 if late else 1):
            for inputs, targets in DataLoader(TensorDataset(x, y), 25, shuffle=True):
                optimizer.zero_grad()
                loss(inputs + alter * torch.randn_like(inputs), targets).backward()
                optimizer.step()
        model.eval()
        with torch.no_grad():
            for inputs, targets in evaluated:
                loss(inputs, targets)
    return run.diagnose()[CODE]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", FAULTS)
def test_copies_from_before_the_split_are_told(kind: str, late: bool, tmp_path: Path) -> None:
    finding = found(FAULTS[kind](np.random.default_rng(int(late))), tmp_path / "run", late=late)
    assert (finding.status, "near copies with the same target" in finding.summary) == ("warn", True), finding.summary
    assert finding.evidence["both"] > 0.2 * finding.evidence["evaluated"]
    assert "test_loop_near.py" in finding.summary


def test_equal_examples_are_no_near_ones(tmp_path: Path) -> None:
    finding = found(
        split(*copied(*table(load_breast_cancer), np.random.default_rng(0), 1, 0.0), np.random.default_rng(0)),
        tmp_path / "run",
    )
    assert (finding.status, "are evaluated on, too" in finding.summary) == ("warn", True), finding.summary


def test_copies_are_told_where_few_updates_are_looked_at(tmp_path: Path) -> None:
    """The evaluation is not among them."""
    finding = found(FAULTS["numbers"](np.random.default_rng(0)), tmp_path / "run", share=1e-6)
    assert finding.status == "warn", finding.summary


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("kind", TWINS)
def test_what_is_near_by_nature_or_copied_in_training_alone_is_not(kind: str, seed: int, tmp_path: Path) -> None:
    finding = found(TWINS[kind](np.random.default_rng(seed)), tmp_path / "run")
    assert finding.status == "ok", finding.summary


@pytest.mark.parametrize("apart", [(1000, 1000), (20, 20)])
def test_training_examples_that_are_evaluated_beside_others_are_no_leak(apart: tuple[int, int], tmp_path: Path) -> None:
    """Each pass over the training set alters them; one line evaluates them as they are, and what is held out."""
    data = split(*table(load_breast_cancer), np.random.default_rng(0))
    finding = found(data, tmp_path / "run", alter=0.05, apart=apart)
    assert finding.status == "ok", finding.summary
