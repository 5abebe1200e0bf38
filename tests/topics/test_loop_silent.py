"""Faults that leave the loss and its metric plausible: data that are written over, padding that is counted, a copy that is evaluated in the model's place."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

import workbench as wb

ROWS, WIDE = 160, 12


def alarms(diagnosis: wb.Diagnosis) -> set[str]:
    return {finding.code for finding in diagnosis if finding.status in ("warn", "fail")}


class Rows(Dataset[Any]):
    """Examples that are read by `how`, which is given all of them and a place, and gives one."""

    def __init__(self, how: Callable[[Any, int], Any], kind: str = "tensor") -> None:
        x = torch.randn(ROWS, WIDE, generator=torch.Generator().manual_seed(0))
        self.how, self.y = how, (x[:, 0] > 0).long()
        self.x = {"tensor": x, "arrays": [row.numpy() for row in x.clone()], "pairs": list(zip(x.clone(), self.y, strict=True))}[kind]  # fmt: skip
        self.soft = torch.full((ROWS, 4), 0.25)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, i: int) -> Any:
        self.soft[i] = (1.1 * self.soft[i].log()).softmax(0) + 1e-6 * torch.rand(4)  # labels of its own making
        return self.how(self.x, i), self.y[i]


def in_place(x: Any, i: int) -> Any:
    x[i] += 0.4 * torch.randn(WIDE)
    return x[i]


def into_an_array(x: Any, i: int) -> Any:
    return np.multiply(x[i], np.float32(1.2), out=x[i])


def of_a_pair(x: Any, i: int) -> Any:
    return x[i][0].mul_(0.9)


def on_a_copy(x: Any, i: int) -> Any:
    return x[i] + 0.2 * torch.randn(WIDE)


def turned(x: Any, i: int) -> Any:
    x[i] = x[i].flip(0)
    return x[i]


def noisy_batch(items: list[tuple[Tensor, Tensor]]) -> Any:
    for x, _ in items:
        x.add_(0.4 * torch.randn(WIDE))
    return torch.utils.data.default_collate(items)


def read_again(dataset: Dataset[Any], out: Path, **options: Any) -> wb.Diagnosis:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDE, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with wb.watch(model, optimizer, out=out) as run:
        for _ in range(5):
            for x, y in DataLoader(dataset, 16, shuffle=True, **options):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
    return run.diagnose()


@pytest.mark.parametrize(("dataset", "options"), [
    (Rows(in_place), {}), (Rows(into_an_array, "arrays"), {}), (Subset(Rows(of_a_pair, "pairs"), range(100)), {}),
    (TensorDataset(torch.randn(ROWS, WIDE), torch.arange(ROWS) % 2), {"collate_fn": noisy_batch}),
], ids=["tensor", "arrays", "pairs", "collate"])  # fmt: skip
def test_examples_that_are_written_over_when_they_are_read_are_found(
    dataset: Any, options: Any, tmp_path: Path
) -> None:
    finding = read_again(dataset, tmp_path / "run", **options)["data.train_validation_shift"]
    assert (finding.status, "before pass 4" in finding.summary) == ("fail", True), finding.summary


@pytest.mark.parametrize("dataset", [Rows(on_a_copy), Rows(turned), Subset(Rows(on_a_copy), range(100))], ids=["copy", "turned", "part"])  # fmt: skip
def test_examples_that_are_read_as_they_were_and_a_datasets_own_labels_rouse_nothing(
    dataset: Any, tmp_path: Path
) -> None:
    assert "data.train_validation_shift" not in alarms(read_again(dataset, tmp_path / "run"))


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(20, 16), nn.GRU(16, 24, batch_first=True), nn.Linear(24, 20)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.rnn(self.embed(x))[0])
        return out


def tagged(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, torch.where(x > 0, (7 * x) % 19 + 1, 0)


def next_token(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[:, :-1], x[:, 1:]


def counted(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), y.flatten())


def as_volumes(out: Tensor, y: Tensor) -> Tensor:
    return F.nll_loss(out.log_softmax(2).transpose(1, 2), y)


def left_out(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), y.flatten(), ignore_index=0)


def weighed(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), y.flatten(), weight=torch.arange(20).clamp(max=1).float())


def masked(out: Tensor, y: Tensor) -> Tensor:
    return (F.cross_entropy(out.transpose(1, 2), y, reduction="none") * (y > 0)).sum() / (y > 0).sum()


def marked(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), y.masked_fill(y == 0, -100).flatten())


@pytest.mark.parametrize(("task", "loss", "longest", "found"), [
    (tagged, counted, 40, True), (next_token, as_volumes, 40, True), (next_token, counted, 40, True),
    (tagged, left_out, 40, False), (next_token, weighed, 40, False), (tagged, masked, 40, False), (next_token, marked, 40, False),
    (tagged, counted, 9, False), (next_token, counted, 4, False), (tagged, counted, 0, False),
])  # fmt: skip
def test_padding_that_most_of_a_loss_is_about_is_told(
    task: Any, loss: Any, longest: int, found: bool, tmp_path: Path
) -> None:
    """Of sequences of 4 to 8 tokens one in a batch is longer, but for the last three cases, where padding is rare, or not there, or the same in all."""
    torch.manual_seed(0)
    model = Tagger()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with wb.watch(model, optimizer, out=tmp_path / "run") as run:
        for _ in range(40):
            lengths = [longest, *torch.randint(4, min(longest, 8) + 1, (15,)).tolist()] if longest else [6] * 16
            x = pad_sequence([torch.randint(1, 20, (n,)) for n in lengths], batch_first=True)
            x, y = task(x if longest else F.pad(x, (0, 20)))
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
    finding = run.diagnose()["data.imbalance"]
    assert (finding.status == "warn", "ignore_index=0" in str(finding.advice)) == (found, found), finding.summary


def pulled_back(own: nn.Module, other: nn.Module) -> None:
    for p, q in zip(own.parameters(), other.parameters(), strict=True):
        p.data.mul_(0.99).add_(q.data, alpha=0.01)


def averaged(own: nn.Module, other: nn.Module) -> None:
    pulled_back(other, own)


def hardly_averaged(own: nn.Module, other: nn.Module) -> None:
    for p, q in zip(own.parameters(), other.parameters(), strict=True):
        q.data.lerp_(p.data, 1e-4)


def nothing(own: nn.Module, other: nn.Module) -> None:
    pass


@pytest.mark.parametrize(("after", "evaluated", "lr", "status"), [
    (pulled_back, "copy", 0.1, "fail"), (nothing, "copy", 0.1, "fail"), (averaged, "copy", 0.1, "ok"), (nothing, "model", 0.1, "ok"),
    (nothing, "both", 0.1, "ok"), (nothing, "best", 0.1, "ok"), (nothing, "copy", 1e-4, "ok"), (hardly_averaged, "copy", 1.0, "warn"),
])  # fmt: skip
def test_an_evaluation_that_no_update_reaches_is_told(
    after: Any, evaluated: str, lr: float, status: str, tmp_path: Path
) -> None:
    """Where it is beside that of the model a copy is there to be compared with, and the best loss so far may be the first."""
    torch.manual_seed(0)
    model, (x, weights) = (
        nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)),
        (torch.randn(200, 6), torch.randn(6, 3)),
    )
    other, y = copy.deepcopy(model), (x @ weights).argmax(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    with wb.watch(model, optimizer, out=tmp_path / "run") as run:
        for _ in range(6):
            for rows in torch.randperm(150).split(15):
                optimizer.zero_grad()
                F.cross_entropy(model(x[rows]), y[rows]).backward()
                optimizer.step()
                after(model, other)
            with torch.no_grad():
                if evaluated != "model":
                    run.log(validation_loss=F.cross_entropy(other(x[150:]), y[150:]))
                if evaluated == "best":
                    model(x[150:])
                elif evaluated != "copy":
                    run.log(test_loss=F.cross_entropy(model(x[150:]), y[150:]))
    finding = run.diagnose()["loop.no_update"]
    said = {"fail": "to the last digit", "warn": "updates hardly reach", "ok": ""}[status]
    assert (finding.status, said in finding.summary) == (status, True), finding.summary


def parts() -> list[nn.Module]:
    return [
        nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)),
        nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)),
    ]


def adversarial(*, detach: bool, zero: bool, first: int = 1) -> Callable[..., None]:
    """A generator and what tells its outputs from the data; `first` steps of the second one for each of the first."""

    def train(made: nn.Module, told: nn.Module, steps: Any) -> None:
        steps[0].zero_grad()
        for _ in range(first):
            fake = made(torch.randn(16, 6))
            steps[1].zero_grad()
            loss = (
                F.softplus(-told(torch.randn(16, 6))).mean()
                + F.softplus(told(fake.detach() if detach else fake)).mean()
            )
            loss.backward(retain_graph=True)
            steps[1].step()
        if zero:
            steps[0].zero_grad()
        F.softplus(-told(fake if detach or first > 1 else made(torch.randn(16, 6)))).mean().backward()
        steps[0].step()

    return train


def actor_and_critic(made: nn.Module, told: nn.Module, steps: Any, *, shared: bool = False) -> None:
    """The critic is zeroed before its own loss, which then reaches it alone, or, not detached, the actor as well, which is not zeroed."""
    x = torch.randn(16, 6)
    steps[1].zero_grad()
    action = made(x) if shared else made(x).detach()
    F.mse_loss(told(action)[:, 0], x.sum(1)).backward()
    steps[1].step()
    if not shared:
        steps[0].zero_grad()
    (-told(made(x)).mean()).backward()
    steps[0].step()
    if shared:
        steps[0].zero_grad()


def not_detached(made: nn.Module, told: nn.Module, steps: Any) -> None:
    actor_and_critic(made, told, steps, shared=True)


def one_loss(made: nn.Module, told: nn.Module, steps: Any) -> None:
    for each in steps:
        each.zero_grad()
    x = torch.randn(16, 6)
    F.mse_loss(told(made(x))[:, 0], x.sum(1)).backward()
    for each in steps:
        each.step()


def more_often(made: nn.Module, told: nn.Module, steps: Any) -> None:
    """The second one steps on each of four losses, the first one on their sum."""
    steps[0].zero_grad()
    for _ in range(4):
        steps[1].zero_grad()
        x = torch.randn(16, 6)
        (F.mse_loss(told(made(x))[:, 0], x.sum(1)) / 4).backward()
        steps[1].step()
    steps[0].step()


@pytest.mark.parametrize(("train", "found"), [
    (adversarial(detach=False, zero=False), True), (adversarial(detach=False, zero=False, first=2), True), (not_detached, True),
    (adversarial(detach=True, zero=False), False), (adversarial(detach=False, zero=True), False), (adversarial(detach=True, zero=True, first=3), False),
    (actor_and_critic, False), (one_loss, False), (more_often, False),
])  # fmt: skip
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_what_another_optimizers_loss_leaves_in_a_gradient_is_told(
    train: Any, found: bool, order: tuple[int, int], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    models = parts()
    steps = [torch.optim.Adam(model.parameters(), 1e-3) for model in models]
    with wb.watch(models, [steps[k] for k in order], out=tmp_path / "run") as run:
        for _ in range(300):
            train(*models, steps)
    finding = run.diagnose()["loop.no_zero_grad"]
    assert (finding.status == "warn", "gradients of two losses" in finding.summary) == (found, found), finding.summary


def test_without_an_update_every_check_lacks_the_same(tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    with wb.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), out=tmp_path / "run") as run:
        for _ in range(10):
            model(torch.randn(8, 3)).square().mean().backward()
    found = run.diagnose()
    assert found["loop.no_step"].status == "fail"
    assert {f.summary for f in found if f.status == "not_measured"} == {"Not measured: no update was made."}


@pytest.mark.parametrize(
    ("trained", "stepped", "status", "said"),
    [
        ("both", "same", "warn", "no step of the optimizer given to wb.watch: another optimizer steps on the same parameters ("),
        ("both", "another", "fail", "are not trained; another optimizer steps on other parameters ("),
        ("other", "another", "warn", "none of the first ones goes through the parameters given to wb.watch: another optimizer steps on other parameters ("),
        ("both", "given", "ok", "The optimizer steps."),
    ],
)  # fmt: skip
def test_an_optimizer_that_was_not_given_and_steps_in_its_place_is_named(
    trained: str, stepped: str, status: str, said: str, tmp_path: Path
) -> None:
    model, other = nn.Linear(3, 1), nn.Linear(3, 1)
    given, same, another = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, model, other))
    with wb.watch(model, given, out=tmp_path / "run") as run:
        for _ in range(10):
            out = other(torch.randn(8, 3))
            (out + model(torch.randn(8, 3)) if trained == "both" else out).square().mean().backward()
            {"same": same, "another": another, "given": given}[stepped].step()
    found = run.diagnose()["loop.no_step"]
    assert found.status == status
    assert said in found.summary
    assert ("that train" in " ".join(found.advice)) == (trained == "other")


class Wrapper(torch.optim.Optimizer):
    """Steps by an optimizer inside of it, as sharpness-aware minimisation does."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> None:
        self.inner.step()


@pytest.mark.parametrize("case", ["half way", "first", "both given", "two players", "wrapped"])
def test_steps_of_another_optimizer_on_the_same_parameters_are_told(case: str, tmp_path: Path) -> None:
    model, other = nn.Linear(3, 1), nn.Linear(3, 1)
    adam, sgd = torch.optim.Adam(model.parameters(), lr=1e-3), torch.optim.SGD(model.parameters(), lr=0.01)
    theirs = torch.optim.SGD(other.parameters(), lr=0.01)
    given: Any = {"first": sgd, "both given": [adam, sgd], "wrapped": Wrapper(adam)}.get(case, adam)
    with wb.watch(model, given, out=tmp_path / "run") as run:
        for update in range(600):
            steps = [sgd] if update >= 400 and case in ("half way", "first", "both given") else [adam]
            steps = {"two players": [theirs] * 5 + steps, "wrapped": [given]}.get(case, steps)
            for optimizer in steps:
                x = torch.randn(8, 3)
                optimizer.zero_grad()
                (model(x) + other(x) - x.sum(1, keepdim=True)).square().mean().backward()
                optimizer.step()
    findings = run.diagnose()
    assert not any("did not collect" in f.summary for f in findings)
    found = findings["loop.second_training"]
    told = {"half way": "another optimizer made 200 more", "first": "another optimizer made 400 more"}.get(case)
    assert found.status == ("ok" if told is None else "not_measured"), found.summary
    assert told is None or f"{told} steps on the same parameters (tests/topics/test_loop_silent.py:" in found.summary


def test_where_nothing_is_trained_it_says_what_is_missing(tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    with wb.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), out=tmp_path / "run") as run:
        pass
    printed = " ".join(repr(run.diagnose()).split())
    assert "Not measured: no backward pass and no update was made while the loop was watched." in printed
    assert "1. Put the whole training loop between" in printed


@pytest.mark.parametrize(("by_hand", "status"), [(False, "fail"), (True, "not_measured")])
def test_steps_without_a_backward_pass_are_told_unless_gradients_are_made_by_hand(
    by_hand: bool, status: str, tmp_path: Path
) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with wb.watch(model, optimizer, out=tmp_path / "run") as run:
        for _ in range(20):
            optimizer.zero_grad()
            F.cross_entropy(model(torch.ones(8, 4)), torch.zeros(8, dtype=torch.long))
            if by_hand:
                for p in model.parameters():
                    p.grad = torch.full_like(p, 0.01)
            optimizer.step()
    found = run.diagnose()
    assert found["loop.no_gradient"].status == status
    assert (
        "20 steps of the optimizer and no backward pass (tests/topics/test_loop_silent.py:"
        in found["loop.no_gradient"].summary
    ) == (not by_hand)
    assert {f.status for f in found if f.code.startswith("loop.") and f.code != "loop.no_gradient"} == {"not_measured"}
