"""Whether the output of an example depends on the others of its batch, or one axis is taken for another: what mixes them by mistake, beside what mixes them on purpose or not at all."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import workbench as wb
from workbench.instruments.losses.classes import turns

ROWS, LENGTH, FEATURES = 32, 12, 5


class Experts(nn.Module):
    """Four of them and a gate, whose softmax runs over `axis`."""

    def __init__(self, axis: int, norm: type[nn.Module] = nn.Identity, width: int = 16) -> None:
        super().__init__()
        self.experts = nn.Sequential(nn.Linear(FEATURES, width), norm(width), nn.ReLU(), nn.Linear(width, 4))
        self.gate, self.axis = nn.Linear(FEATURES, 4), axis

    def forward(self, x: Tensor) -> Tensor:
        return (torch.softmax(self.gate(x[:, 0]), self.axis) * self.experts(x[:, 0])).sum(1, keepdim=True)  # type: ignore[no-any-return]


class Sequences(nn.Module):
    """A recurrent or attention layer, which takes the batch first or second; `turned` gives it as it asks for."""

    def __init__(self, kind: type[nn.Module], *, first: bool, turned: bool = False, width: int = 16) -> None:
        super().__init__()
        self.inner: nn.Module = nn.Linear(FEATURES, width)
        heads = (2, width) if kind is nn.TransformerEncoderLayer else (width,)
        self.mixes, self.turned, self.outer = kind(width, *heads, batch_first=first), turned, nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        out = self.mixes(self.inner(x.transpose(0, 1) if self.turned else x))
        out = out[0] if isinstance(out, tuple) else out
        return self.outer(out[-1] if self.turned else out[:, -1])  # type: ignore[no-any-return]


class Raw(Sequences):
    """The same without a layer before it."""

    def __init__(self, *, first: bool) -> None:
        super().__init__(nn.LSTM, first=first)
        self.inner, self.mixes = nn.Identity(), nn.LSTM(FEATURES, 16, batch_first=first)


class Graph(nn.Module):
    """Rows are the nodes of one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.edges = (torch.rand(ROWS, ROWS) < 0.2).float() + torch.eye(ROWS)
        self.one, self.two = nn.Linear(FEATURES, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.edges @ self.one(self.edges @ x[:, 0]).relu())  # type: ignore[no-any-return]


class Mixed(nn.Module):
    """Manifold mixup: each example is mixed with one other within the network."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(FEATURES, ROWS), nn.Linear(ROWS, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.one(x[:, 0]).relu()
        return self.two(0.7 * hidden + 0.3 * hidden[torch.randperm(len(hidden))])  # type: ignore[no-any-return]


class Candidates(nn.Module):
    """Each example is held against itself and against all of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(FEATURES, 8)

    def forward(self, x: Tensor) -> Tensor:
        z = self.one(x[:, 0])
        return torch.cat([z.square().sum(1, keepdim=True), z @ z.T], 1)


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((outputs - targets) ** 2).mean()


def first_one(outputs: Tensor, _: Tensor) -> Tensor:
    return F.cross_entropy(outputs, torch.zeros(len(outputs), dtype=torch.long))


Case = tuple[Callable[[], nn.Module], Callable[[Tensor, Tensor], Tensor], int, bool]
"""A model, its loss, positions of an example, and whether a loader draws examples at random."""
COUPLED: dict[str, Case] = {
    "gate": (lambda: Experts(0), F.mse_loss, 1, False), "gate, by hand": (lambda: Experts(0), squares, 1, True),
    "gate behind batch norm": (lambda: Experts(0, nn.BatchNorm1d), F.mse_loss, 1, True),
    "lstm": (lambda: Sequences(nn.LSTM, first=False), F.mse_loss, LENGTH, True), "lstm of data": (lambda: Raw(first=False), F.mse_loss, LENGTH, True),
    "gru": (lambda: Sequences(nn.GRU, first=False), nn.L1Loss(), LENGTH, True),
    "attention": (lambda: Sequences(nn.TransformerEncoderLayer, first=False), squares, LENGTH, True),
}  # fmt: skip
WELL: dict[str, Case] = {
    "gate": (lambda: Experts(1), F.mse_loss, 1, True), "gate as wide as the batch": (lambda: Experts(1, width=ROWS), squares, 1, True),
    "batch norm": (lambda: Experts(1, nn.BatchNorm1d), F.mse_loss, 1, True),
    "lstm": (lambda: Sequences(nn.LSTM, first=True), F.mse_loss, LENGTH, True), "lstm of data": (lambda: Raw(first=True), F.mse_loss, LENGTH, True),
    "turned": (lambda: Sequences(nn.LSTM, first=False, turned=True), F.mse_loss, LENGTH, True),
    "turned, as many positions as rows": (lambda: Sequences(nn.GRU, first=False, turned=True), F.mse_loss, ROWS, True),
    "attention": (lambda: Sequences(nn.TransformerEncoderLayer, first=True), squares, LENGTH, True),
    "attention, as many positions as rows": (lambda: Sequences(nn.TransformerEncoderLayer, first=True, width=ROWS), squares, ROWS, True),
    "graph": (Graph, F.mse_loss, 1, False), "mixup": (Mixed, F.mse_loss, 1, True), "candidates": (Candidates, first_one, 1, True),
}  # fmt: skip


def judged(case: Case, out: Path) -> wb.Finding:
    torch.manual_seed(0)
    build, loss, length, loads = case
    model, x = build(), torch.randn(4 * ROWS, length, FEATURES)
    data, optimizer = TensorDataset(x, x.mean((1, 2))[:, None]), torch.optim.SGD(model.parameters(), lr=1e-3)
    with wb.watch(model, optimizer, out=out) as run:
        for _ in range(2):
            drawn = (
                DataLoader(data, ROWS, shuffle=True)
                if loads
                else (data[k : k + ROWS] for k in range(0, len(data), ROWS))
            )
            for a, b in drawn:
                optimizer.zero_grad()
                loss(model(a), b).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
    return run.diagnose()["loop.batch_dependence"]


@pytest.mark.parametrize("name", COUPLED)
def test_examples_that_are_mixed_by_a_wrong_axis_are_told_with_its_line(name: str, tmp_path: Path) -> None:
    found = judged(COUPLED[name], tmp_path / "run")
    assert found.status == "warn", found.summary
    assert "test_loop_rows.py" in found.summary
    assert ("softmax runs over axis 0" in found.summary) == name.startswith("gate")


@pytest.mark.parametrize("name", WELL)
def test_examples_that_are_not_mixed_or_on_purpose_rouse_nothing(name: str, tmp_path: Path) -> None:
    found = judged(WELL[name], tmp_path / "run")
    assert found.status == "ok", found.summary


@pytest.mark.parametrize(("axes", "rows", "status"), [("0", 32, "warn"), ("1", 32, "ok"), ("0", 6, "ok"), ("01", 32, "ok")])  # fmt: skip
def test_the_softmax_of_a_loss_over_the_examples_of_a_batch_is_found(axes: str, rows: int, status: str, tmp_path: Path) -> None:  # fmt: skip
    """Of six documents for each query; as many queries may be pairs of all with all, as may be what a loss goes through both ways."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, 1), nn.Flatten(1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(torch.randn(192, 6, FEATURES), torch.randn(192, 6)), rows, shuffle=True)
    with wb.watch(model, optimizer, out=tmp_path / "run") as run:
        for x, grades in loader:
            scores = model(x)
            losses = [-(grades.softmax(int(axis)) * scores.log_softmax(int(axis))).sum() for axis in axes]
            optimizer.zero_grad()
            torch.stack(losses).mean().backward()
            optimizer.step()
    found = run.diagnose()["loop.batch_dependence"]
    assert (found.status, "over axis 0" in found.summary) == (status, status == "warn"), found.summary


@pytest.mark.parametrize(
    ("place", "said", "limit"),
    [("before", "before the backward pass", None), ("between", "between backward and step", 1.0), ("after", "after the step", None)],
)  # fmt: skip
def test_a_threshold_is_in_force_only_where_a_step_uses_what_it_clips(
    place: str, said: str, limit: float | None, tmp_path: Path
) -> None:
    """A learning rate that falls out of sight does not stretch the axis of loss and gradient norm."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with wb.watch(model, optimizer, out=tmp_path / "loop") as run:
        for step in range(30):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 3)).square().mean()
            for call in ("before", "between", "after"):
                if call == "between":
                    loss.backward()
                if call == "after":
                    optimizer.step()
                if call == place:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.param_groups[0]["lr"] = 0.1 ** (step + 1)
    diagnosis, record = run.diagnose(), wb.open(tmp_path / "loop")
    assert said in diagnosis["clipping.after_step"].summary
    assert record.config["max_grad_norm"] == limit
    assert diagnosis["clipping.aggressive"].applies is (limit is not None)
    axes = wb.loop.plot(record)
    assert any("clipped above" in text.get_text() for text in axes.get_legend().get_texts()) is (limit is not None)
    assert axes.get_ylim()[0] > 1e-9


class Heads(nn.Module):
    """Attention by hand over positions, whose heads are split, or merged, by a view alone, or whose softmax runs over `axis`."""

    def __init__(self, wrong: str = "", axis: int = -1, width: int = 32) -> None:
        super().__init__()
        self.wrong, self.axis, self.heads = wrong, axis, 4
        self.qkv, self.out = nn.Linear(FEATURES, 3 * width), nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        rows, places, width = len(x), x.shape[1], self.out.in_features
        parts = self.qkv(x).chunk(3, -1)
        if self.wrong == "split":
            q, k, v = (part.reshape(rows, self.heads, places, -1) for part in parts)
        else:
            q, k, v = (part.view(rows, places, self.heads, -1).transpose(1, 2) for part in parts)
        found = F.dropout(((q @ k.mT) / 3).softmax(self.axis), 0.1, self.training) @ v
        found = found if self.wrong == "merge" else found.transpose(1, 2)
        return self.out(found.reshape(rows, places, width)[:, 0])  # type: ignore[no-any-return]


class Viewed(nn.Module):
    """Places of a convolution, which come last, or the states of both directions, which come first, laid out by `view`."""

    def __init__(self, view: Callable[[Tensor], Tensor], width: int = 12, *, directions: bool = False) -> None:
        super().__init__()
        self.one: nn.Module = nn.GRU(FEATURES, 6, bidirectional=True, batch_first=True) if directions else nn.Conv1d(FEATURES, 12, 3, padding=1)  # fmt: skip
        self.view, self.two = view, nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        out = self.one(x)[1] if isinstance(self.one, nn.GRU) else self.one(x.mT)
        out = self.two(self.view(out).relu())
        return out.flatten(1).mean(1, keepdim=True)  # type: ignore[no-any-return]


class Relative(Heads):
    """The same with distances between places, which are shifted by a view as in Transformer-XL: filled up before it, or cut off after it."""

    def forward(self, x: Tensor) -> Tensor:
        q = self.qkv(x)[:, None, :, :16]
        scores = q @ torch.randn(16, x.shape[1])
        padded = F.pad(scores, (1, 0)) if self.wrong == "pad" else torch.cat([scores[..., :1], scores], -1).relu()
        shifted = padded.view(len(x), 1, x.shape[1] + 1, x.shape[1])[:, :, 1:]
        return self.out((shifted.softmax(-1) @ q.repeat(1, 1, 1, 2))[:, 0, 0])  # type: ignore[no-any-return]


class Shared(nn.Module):
    """Places that are shared out among clusters, or whose heads' weights are mixed, on purpose."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.one, self.two = how, nn.Linear(FEATURES, 16), nn.Linear(16, 1)
        self.mix = nn.Parameter(torch.rand(4, 4))
        self.centres = nn.Parameter(torch.randn(5, 16))

    def forward(self, x: Tensor) -> Tensor:
        h = self.one(x)
        if self.how == "heads":
            q = h.view(len(h), -1, 4, 4).transpose(1, 2)
            weights = torch.einsum("bhij,hg->bgij", (q @ q.mT).softmax(-1), self.mix)
            out = (weights @ q).transpose(1, 2).flatten(2)
        elif self.how == "centres":
            out = torch.einsum("bnk,bnd->bkd", torch.einsum("bnd,kd->bnk", h, self.centres).softmax(-1), h)
        elif self.how == "examples":
            out = (h @ h[:, :3].mT).softmax(-1).mT @ h
        else:
            blocks = h.reshape(len(h), 16, -1)
            out = (blocks / blocks.std(-1, keepdim=True)).reshape(h.shape).relu()
        return self.two(out).flatten(1).mean(1, keepdim=True)  # type: ignore[no-any-return]


TURNED: dict[str, tuple[Callable[[], nn.Module], int, str]] = {
    "heads are merged": (lambda: Heads("merge"), 11, "viewed from (32, 4, 11, 8) as (32, 11, 32)"),
    "heads are merged, sizes that divide each other": (lambda: Heads("merge"), 16, "viewed from (32, 4, 16, 8) as (32, 16, 32)"),
    "heads are split": (lambda: Heads("split"), 11, "viewed from (32, 11, 32) as (32, 4, 11, 8)"),
    "places": (lambda: Viewed(lambda out: out.view(len(out), -1, 12)), 9, "viewed from (32, 12, 9) as (32, 9, 12)"),
    "softmax over heads": (lambda: Heads(axis=1), 11, "sum to 1 over axis 1, and weigh a sum over axis 3"),
    "softmax over queries": (lambda: Heads(axis=2), 11, "sum to 1 over axis 2, and weigh a sum over axis 3"),
}  # fmt: skip
IN_PLACE: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "heads": (Heads, 11), "heads, sizes that divide each other": (Heads, 16), "heads as many as places": (Heads, 4),
    "places": (lambda: Viewed(lambda out: out.mT.reshape(len(out), -1, 12)), 9),
    "pairs of places": (lambda: Viewed(lambda out: out.mT.reshape(len(out), -1, 24), 24), 10),
    "channels in two": (lambda: Viewed(lambda out: out.view(len(out), 2, 6, -1).transpose(1, 2).reshape(len(out), 12, -1).mT), 9),
    "both directions": (lambda: Viewed(lambda out: torch.cat([*out], -1), directions=True), 9),
    "all at once": (lambda: Viewed(lambda out: out.reshape(len(out), -1), 108), 9),
    "distances, filled up": (lambda: Relative("pad"), 9), "distances, cut off": (lambda: Relative("cut"), 9),
    "heads are mixed": (lambda: Shared("heads"), 11), "clusters that are learned": (lambda: Shared("centres"), 11),
    "clusters of the example": (lambda: Shared("examples"), 11), "blocks of a norm": (lambda: Shared("blocks"), 11),
    "attention of torch": (lambda: Sequences(nn.TransformerEncoderLayer, first=True), 11),
}  # fmt: skip


@pytest.mark.parametrize("name", TURNED)
def test_an_axis_that_is_taken_for_another_is_told_with_the_layer_before_it(name: str, tmp_path: Path) -> None:
    build, length, said = TURNED[name]
    found = judged((build, F.mse_loss, length, True), tmp_path / "run")
    assert found.status == "warn", found.summary
    assert said in found.summary
    assert re.search(r"behind (qkv|one) .*\(.*test_loop_rows.py:\d+\)", found.summary), found.summary


@pytest.mark.parametrize("name", IN_PLACE)
def test_axes_that_are_merged_split_or_turned_as_they_should_be_rouse_nothing(name: str, tmp_path: Path) -> None:
    build, length = IN_PLACE[name]
    found = judged((build, F.mse_loss, length, True), tmp_path / "run")
    assert found.status == "ok", found.summary


@pytest.mark.parametrize(
    ("before", "after", "wrong"),
    [
        ((64, 32, 7, 7), (64, 49, 32), True), ((64, 32, 7, 7), (64, 32, 49), False), ((32, 20, 16), (20, 32, 16), True), ((2, 33, 16), (33, 32), True),
        ((8, 100, 40), (8, 50, 80), False), ((8, 64, 32), (8, 32, 64), False), ((64, 128), (64, 8, 4, 4), False), ((64, 1, 7), (7, 64), True),
        ((), (1,), False), ((0, 4), (4, 0), False), ((5,), (5,), False), ((2, 3, 5, 7, 11, 13), (3, 2, 5, 7, 11, 13), False),
    ],
)  # fmt: skip
def test_views_that_permute_are_told_from_those_that_merge_split_or_stack(before: tuple[int, ...], after: tuple[int, ...], wrong: bool) -> None:  # fmt: skip
    """Of more than five axes nothing is said."""
    assert turns(before, after) is wrong
    assert math.prod(before) == math.prod(after)
