"""Inputs that come again with another label: faults of a collate function, a dataset and a loop are told, and what only looks like them rouses nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, TensorDataset

import workbench as wb

ROWS, EPOCHS = 400, 6


def rows(count: int = ROWS, seed: int = 1) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    y = torch.randint(4, (count,), generator=random)
    return 2 * F.one_hot(y, 8) + torch.randn(count, 8, generator=random), y


class Net(nn.Module):
    """Takes numbers, or tokens with their lengths, and has heads for two tasks."""

    def __init__(self, width: int = 8, outputs: int = 20) -> None:
        super().__init__()
        self.words = nn.Embedding(60, width)
        self.heads = nn.ModuleList([nn.Linear(width, outputs) for _ in range(2)])

    def forward(
        self, x: Tensor, lengths: Tensor | None = None, *, head: int = 0, labels: Tensor | None = None
    ) -> Tensor:
        if not x.is_floating_point():
            x = self.words(x).sum(1) / (x.shape[1] if lengths is None else lengths[:, None])
        outputs = self.heads[head](x)
        return outputs if labels is None else F.cross_entropy(outputs, labels)


class Texts(Dataset[tuple[Tensor, int]]):
    """Sequences of 4 to 9 tokens, which tell their label."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(0)
        self.y = torch.randint(4, (ROWS,), generator=random).tolist()
        sizes = torch.randint(4, 10, (ROWS,), generator=random).tolist()
        self.x = [
            torch.randint(1 + 10 * y, 30 + 10 * y, (n,), generator=random) for y, n in zip(self.y, sizes, strict=True)
        ]

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return self.x[i], self.y[i]


@dataclass
class Collate:
    """Longest first; labels of sequences of one length in another order than these, where `wrong`."""

    wrong: bool
    filler: int

    def __call__(self, batch: list[tuple[Tensor, int]]) -> tuple[Tensor, ...]:
        lengths = torch.tensor([len(x) for x, _ in batch])
        order = torch.argsort(lengths, stable=True).flip(0)
        longest = sorted(batch, key=lambda item: len(item[0]), reverse=True)
        x = pad_sequence([batch[i][0] for i in order], batch_first=True, padding_value=self.filler)
        labels = [y for _, y in longest] if self.wrong else [batch[i][1] for i in order]
        return x, lengths[order], torch.tensor(labels)


class Joined(Dataset[tuple[Tensor, Tensor]]):
    """Reads its labels through an order of its own, drawn anew when a pass begins."""

    def __init__(self) -> None:
        self.x, self.y = rows()
        self.read = 0

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        if self.read % ROWS == 0:
            self.order = torch.randperm(ROWS)
        self.read += 1
        return self.x[i], self.y[self.order[i]]


Batches = Iterator[tuple[tuple[Any, ...], Tensor, int]]
"""What the model is given, the target, and the head that is trained."""


def plain(data: Any, **options: Any) -> Batches:
    loader = DataLoader(data, 20, shuffle=True, **options)
    for _ in range(EPOCHS):
        for *inputs, y in loader:
            yield tuple(inputs), y, 0


def each(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Batches:
    for (x,), y, head in plain(TensorDataset(*rows())):
        inputs, target = change(x, y)
        yield (inputs,), target, head


def tasks(by_epoch: bool) -> Batches:
    per_epoch = ROWS // 20
    for k, ((x,), y, _) in enumerate(plain(TensorDataset(*rows()))):
        head = (k // per_epoch if by_epoch else k) % 2
        yield (x,), y if head == 0 else (x[:, 0] > 1).long(), head


def copies(shuffle: bool) -> Batches:
    """Two people have labelled each example, and agree on some three quarters."""
    x, y = rows()
    theirs = torch.where(torch.rand(ROWS) < 0.75, y, (y + 1) % 4)
    loader = DataLoader(TensorDataset(x.repeat(2, 1), torch.cat([y, theirs])), 20, shuffle=shuffle)
    for _ in range(EPOCHS):
        for inputs, target in loader:
            yield (inputs,), target, 0


def contexts() -> Batches:
    """Four letters of a text and the one that comes next."""
    chain = (torch.rand(2000).square() * 8).long() + 1
    at = torch.arange(1990)[:, None] + torch.arange(5)
    yield from plain(TensorDataset(chain[at[:, :4]], chain[at[:, 4]] % 4))


def states() -> Batches:
    """One state of 30, and an action that is drawn."""
    for (state,), _, _ in plain(TensorDataset(F.one_hot(torch.arange(ROWS) % 30, 30).float(), torch.zeros(ROWS))):
        yield (state[:, :8] + state[:, 8:16] + 2 * state[:, 16:24],), torch.randint(4, (len(state),)), 0


def shuffled_in_batch(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x, y[torch.randperm(len(y))]


FAULTS: dict[str, Callable[[], Batches]] = {
    "collate": lambda: plain(Texts(), collate_fn=Collate(wrong=True, filler=0)),
    "collate, filled up with another token": lambda: plain(Texts(), collate_fn=Collate(wrong=True, filler=59)),
    "dataset": lambda: plain(Joined()),
    "loop": lambda: each(shuffled_in_batch),
}
HEALTHY: dict[str, Callable[[], Batches]] = {
    "collate": lambda: plain(Texts(), collate_fn=Collate(wrong=False, filler=0)),
    "rows": lambda: plain(TensorDataset(*rows())),
    "augmented, and drawn labels": lambda: each(lambda x, y: shuffled_in_batch(x + 0.1 * torch.randn_like(x), y)),
    "labels flipped once": lambda: plain(TensorDataset(rows()[0], torch.randint(4, (ROWS,)))),
    "two who label": lambda: copies(shuffle=True),
    "two who label, in order": lambda: copies(shuffle=False),
    "places in the batch": lambda: each(lambda x, y: (x, torch.arange(len(x)) % 4)),
    "which of the batch it belongs to": lambda: each(lambda x, y: (x, torch.randperm(len(y)))),
    "shares of two classes": lambda: each(lambda x, y: (x, (y % 2 * 3 * torch.rand(len(y))).clamp(max=1))),
    "two tasks by update": lambda: tasks(by_epoch=False),
    "two tasks by epoch": lambda: tasks(by_epoch=True),
    "contexts": contexts,
    "states": states,
}


def watched(batches: Batches, out: Path, teacher: nn.Module | None = None, *, given: bool = False) -> wb.Finding:
    """Train on these batches, with a loss of the model's own where it is `given` the labels."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with wb.watch([model] if teacher is None else [model, teacher], optimizer, out=out, share=None) as run:
        for inputs, y, head in batches:
            target = y
            if teacher is not None:
                with torch.no_grad():
                    target = (teacher(*inputs) + torch.randn(len(y), 20)).argmax(1)
            optimizer.zero_grad()
            if given:
                loss = model(*inputs, labels=target)
            elif target.is_floating_point():
                loss = F.binary_cross_entropy_with_logits(model(*inputs)[:, 0], target)
            else:
                loss = F.cross_entropy(model(*inputs, head=head)[:, : max(4, int(target.max()) + 1)], target)
            loss.backward()
            optimizer.step()
    assert "lost" not in run.record.facts["loop"]
    return run.diagnose()["data.labels"]


@pytest.mark.parametrize("fault", FAULTS)
def test_inputs_that_come_again_with_another_label_are_told(fault: str, tmp_path: Path) -> None:
    found = watched(FAULTS[fault](), tmp_path / "run", given=fault == "dataset")
    assert found.status == "warn", found
    assert "within a pass that differ: 0." in found.summary
    assert found.evidence["pairs"] == ROWS * EPOCHS * (EPOCHS - 1) / 2
    assert (found.value or 0.0) > 0.4
    kind = {"dataset": Joined.__getitem__, "loop": None}.get(fault, Collate.__call__)
    assert kind is None or f":{kind.__code__.co_firstlineno})" in found.advice[0], found.advice


@pytest.mark.parametrize("kind", HEALTHY)
def test_labels_that_change_for_a_reason_of_their_own_rouse_nothing(kind: str, tmp_path: Path) -> None:
    found = watched(HEALTHY[kind](), tmp_path / "run")
    assert found.status == "ok", found


def test_classes_that_a_network_says_are_no_labels(tmp_path: Path) -> None:
    found = watched(plain(TensorDataset(*rows())), tmp_path / "run", teacher=nn.Linear(8, 20))
    assert found.status == "ok", found


class Both(nn.Module):
    """Takes what tells the label, and the same places for each example, or a mark of another kind."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(41, 64), nn.ReLU(), nn.Linear(64, outputs))

    def forward(self, x: Tensor, beside: Tensor) -> Tensor:
        return self.layers(torch.cat([x.flatten(1), beside.reshape(len(x), -1)], 1))


def marked() -> tuple[Tensor, Tensor, Tensor]:
    """A mark tells which label some examples have, and that their other input does not matter."""
    y, mark = torch.randint(6, (1600,)), torch.randint(1, 7, (1600,)) * (torch.rand(1600) < 0.3)
    return 2 * F.one_hot(y, 40) + 0.5 * torch.randn(1600, 40), mark.float(), torch.where(mark > 0, mark - 1, y)


def placed() -> tuple[Tensor, Tensor, Tensor]:
    (x, y), places = rows(1600), torch.linspace(0, 1, 40).expand(1600, 40)
    return places, x[:, :1] + 2.0 * y[:, None], y


def renamed() -> tuple[Tensor, Tensor, Tensor]:
    x, mark, y = marked()
    return x, mark, y[torch.randperm(len(y))]


@pytest.mark.parametrize(("data", "alarms"), [(marked, set()), (placed, set()), (renamed, {"data.no_signal"})])
def test_the_largest_of_several_inputs_tells_what_it_can(data: Callable[[], Any], alarms: set[str], tmp_path: Path) -> None:  # fmt: skip
    torch.manual_seed(0)
    examples = data()
    model, loader = Both(int(examples[2].max()) + 1), DataLoader(TensorDataset(*examples), 20, shuffle=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with wb.watch(model, optimizer, out=tmp_path / "run", share=None) as run:
        for x, beside, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x, beside), y).backward()
            optimizer.step()
    diagnosis = run.diagnose()
    found = [f for f in diagnosis if f.code.startswith("data.") and f.status in ("warn", "fail")]
    assert {f.code for f in found} == alarms, found
    assert diagnosis["data.labels"].summary == "Does not apply: the model takes several inputs."
    assert all("the largest of the inputs" in f.summary for f in found)
