"""What a loop does to its model between updates, beside a healthy twin: dropout in evaluation, softmax over examples, weights that are written over."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import workbench as wb
from workbench.findings.diagnosis import Diagnosis

torch.manual_seed(0)
X, Y = torch.randn(256, 8), torch.randint(5, (256,))
FRESH, HELD = torch.randn(1000, 8), torch.randn(64, 8)
Evaluate = Callable[[nn.Module, int], object]
Loss = Callable[[Tensor, Tensor], Tensor]


class Net(nn.Module):
    """Drops units by a function, in evaluation too unless it `asks`."""

    def __init__(self, *, asks: bool = True, again: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.asks, self.again = nn.Linear(8, 16), nn.Linear(16, 5), asks, again

    def drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.2, self.training) if self.asks else F.dropout(x, 0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x).relu()
        return self.b(checkpoint(self.drop, x, use_reentrant=True) if self.again and self.training else self.drop(x))


def trained(
    out: Path, model: nn.Module, after: Evaluate = lambda m, k: None, loss: Loss = F.cross_entropy, updates: int = 60
) -> Diagnosis:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with wb.watch(model, optimizer, out=out) as run:
        for k in range(updates):
            rows = torch.randint(256, (32,))
            optimizer.zero_grad()
            loss(model(X[rows]), Y[rows]).backward()
            optimizer.step()
            after(model, k)
    return run.diagnose()


def evaluated(every: int, *, mode: bool, draws: int = 1, fresh: bool = False) -> Evaluate:
    def evaluate(model: nn.Module, k: int) -> None:
        if k % every == every - 1:
            model.train(mode)
            with torch.no_grad():
                for _ in range(draws):
                    model(FRESH[k : k + 8] if fresh else HELD)
            model.train()

    return evaluate


MODES = [
    pytest.param(Net(asks=False), evaluated(10, mode=False), "warn", "F.dropout drops", id="by function"),
    pytest.param(Net(), evaluated(10, mode=False), "ok", "", id="by function, that asks"),
    pytest.param(Net(again=True), evaluated(10, mode=False), "ok", "", id="checkpointed"),
    pytest.param(nn.Sequential(nn.Dropout(0.2), nn.Linear(8, 5)), evaluated(20, mode=True, fresh=True), "warn", "training mode", id="one batch"),
    pytest.param(nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 5)), evaluated(1, mode=True), "warn", "training mode", id="after every update"),
    pytest.param(nn.Sequential(nn.Dropout(0.2), nn.Linear(8, 5)), evaluated(20, mode=False), "ok", "", id="eval"),
    pytest.param(nn.Sequential(nn.Dropout(0.2), nn.Linear(8, 5)), evaluated(20, mode=True, draws=9), "ok", "", id="many draws"),
    pytest.param(Net(asks=False), evaluated(20, mode=False, draws=9), "ok", "", id="many draws by function"),
    pytest.param(nn.Sequential(nn.Dropout(0.2), nn.Linear(8, 5)), evaluated(1, mode=True, fresh=True), "ok", "", id="labels of its own"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "evaluate", "status", "says"), MODES)
def test_an_evaluation_that_drops_units_is_told_from_draws_that_are_averaged(
    model: nn.Module, evaluate: Evaluate, status: str, says: str, tmp_path: Path
) -> None:
    found = trained(tmp_path / "run", model, evaluate)["loop.train_mode_in_eval"]
    assert (found.status, says in found.summary) == (status, True), found.summary


def one_hot(z: Tensor, y: Tensor, dim: int) -> Tensor:
    return -(F.one_hot(y, 5).float() * torch.log(z.softmax(dim) + 1e-9)).sum(1).mean()


PICKS: list[Callable[[Tensor, Tensor, int], Tensor]] = [
    lambda z, y, dim: F.nll_loss(z.log_softmax(dim), y),
    one_hot,
    lambda z, y, dim: -z.log_softmax(dim)[torch.arange(32), y].mean(),
    lambda z, y, dim: -z.log_softmax(dim).gather(1, y[:, None]).mean(),
    lambda z, y, dim: -z.T.log_softmax(1 - dim % 2).gather(0, y[None]).mean(),
    lambda z, y, dim: F.kl_div(z.log_softmax(dim), 0.9 * F.one_hot(y, 5) + 0.02, reduction="sum") / 32,
    lambda z, y, dim: F.nll_loss(z.reshape(4, 8, 5).log_softmax((0, 2)[dim % 2]).reshape(-1, 5), y),
]
OTHERS: list[Loss] = [
    lambda z, y: -(z @ z.T).log_softmax(0).diagonal().mean() - (z @ z.T).log_softmax(1).diagonal().mean(),
    lambda z, y: F.cross_entropy(z @ z.T, torch.arange(32)) + F.cross_entropy((z @ z.T).T, torch.arange(32)),
    lambda z, y: -z.reshape(4, 8, 5).log_softmax(2)[torch.arange(4), y[:4]].max(-1).values.mean(),  # the last place of each text
    lambda z, y: (z.reshape(4, 8, 5).softmax(1) * X[:8, :1]).sum(1).square().mean(),  # attention over places
    lambda z, y: -(z[:, :1].log_softmax(0) * (y == 0)[:, None] / (y == 0).sum()).sum(),  # a choice among examples
    lambda z, y: -(z.log_softmax(1) * (y % 2)[:, None]).sum(1).mean(),
]  # fmt: skip


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("pick", PICKS)
def test_a_softmax_over_the_examples_is_found_by_the_axis_of_the_classes(
    pick: Callable[[Tensor, Tensor, int], Tensor], dim: int, tmp_path: Path
) -> None:
    found = trained(tmp_path / "run", nn.Linear(8, 5), loss=lambda z, y: pick(z, y, dim), updates=8)
    assert found["loop.batch_dependence"].status == ("ok" if dim else "fail")


@pytest.mark.parametrize("loss", OTHERS)
def test_a_softmax_that_is_meant_over_examples_or_places_rouses_nothing(loss: Loss, tmp_path: Path) -> None:
    found = trained(tmp_path / "run", nn.Linear(8, 5), loss=loss, updates=8)["loop.batch_dependence"]
    assert found.status == "ok", found.summary


class Kept:
    """Weights kept beside a model, and what is done with them after update number k."""

    def __init__(self, does: Callable[[Kept, nn.Module, int], object]) -> None:
        self.does, self.held = does, dict[str, Tensor]()

    def __call__(self, model: nn.Module, k: int) -> None:
        with torch.no_grad():
            self.does(self, model, k)

    def average(self, model: nn.Module, share: float) -> None:
        for name, value in model.state_dict().items():
            self.held[name].lerp_(value, share)

    def write(self, model: nn.Module) -> None:
        for name, p in model.named_parameters():
            p.copy_(self.held[name])


def plateau(kept: Kept, model: nn.Module, k: int) -> None:
    if k == 9:
        kept.average(model, 1.0)
    elif k % 10 == 9:
        model.load_state_dict(kept.held)


WEIGHTS: list[tuple[str, str, Callable[[Kept, nn.Module, int], object]]] = [
    ("fail", "average loaded", lambda kept, m, k: (kept.average(m, 0.001), m.load_state_dict(kept.held))),
    ("fail", "average written", lambda kept, m, k: (kept.average(m, 0.001), kept.write(m))),
    ("fail", "never leaves", lambda kept, m, k: k % 10 == 9 and m.load_state_dict(kept.held)),
    ("fail", "lookahead whose slow weights stay", lambda kept, m, k: k % 10 == 9 and [p.lerp_(kept.held[name], 0.5) for name, p in m.named_parameters()]),
    ("ok", "average beside", lambda kept, m, k: kept.average(m, 0.001)),
    ("ok", "lookahead", lambda kept, m, k: k % 5 == 4 and (kept.average(m, 0.5), kept.write(m))),
    ("ok", "back to the best", plateau),
    ("ok", "once, at the end", lambda kept, m, k: k == 59 and m.load_state_dict(kept.held)),
    ("ok", "bounded", lambda kept, m, k: [p.clamp_(-0.1, 0.1) for p in m.parameters()]),
    ("ok", "pruned", lambda kept, m, k: [p.mul_((torch.arange(p.numel()) % 20 == 0).view_as(p)) for p in m.parameters()]),
    ("ok", "swapped to evaluate", lambda kept, m, k: (kept.average(m, 1.0), m.load_state_dict({n: 0 * v for n, v in kept.held.items()}), m.load_state_dict(kept.held))),
]  # fmt: skip


@pytest.mark.parametrize(("status", "does"), [pytest.param(status, does, id=name) for status, name, does in WEIGHTS])
def test_weights_that_are_written_over_so_that_updates_are_lost_are_found(
    status: str, does: Callable[[Kept, nn.Module, int], object], tmp_path: Path
) -> None:
    model, kept = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5)), Kept(does)
    kept.held = {name: value.clone() for name, value in model.state_dict().items()}
    finding = trained(tmp_path / "run", model, kept)["loop.no_update"]
    assert finding.status == status, finding.summary
    assert status == "ok" or finding.summary.startswith(("Of each update", "Weights are loaded", "After"))


@pytest.mark.parametrize("keep", [dict, copy.deepcopy])
def test_weights_that_are_kept_without_a_copy_restore_nothing(
    keep: type[dict[str, Tensor]] | Callable[..., dict[str, Tensor]], tmp_path: Path
) -> None:
    def best(kept: Kept, model: nn.Module, k: int) -> None:
        if k == 20:
            kept.held = keep(model.state_dict())
        elif k == 59:
            model.load_state_dict(kept.held)

    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5))
    finding = trained(tmp_path / "run", model, Kept(best))["loop.restores_nothing"]
    assert (finding.status, "(tests/topics/test_loop_modes.py:" in finding.summary) == (("warn", True) if keep is dict else ("ok", False))  # fmt: skip


@pytest.mark.parametrize("keep", [dict, copy.deepcopy])
def test_states_that_are_averaged_are_told_where_none_is_a_copy(
    keep: type[dict[str, Tensor]] | Callable[..., dict[str, Tensor]], tmp_path: Path
) -> None:
    """Two clients in turn, of five updates each, that begin with the weights of the server."""
    states: list[dict[str, Tensor]] = []

    def federated(kept: Kept, model: nn.Module, k: int) -> None:
        if k % 5 == 4:
            states.append(keep(model.state_dict()))
        if k % 10 == 4:
            model.load_state_dict(kept.held)
        elif k % 10 == 9:
            one, other = states
            model.load_state_dict({name: (one[name] + other[name]) / 2 for name in one})
            kept.held = copy.deepcopy(model.state_dict())
            states.clear()

    model, kept = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5)), Kept(federated)
    kept.held = copy.deepcopy(model.state_dict())
    found = trained(tmp_path / "run", model, kept)["loop.restores_nothing"]
    assert (found.status, "All 6 times" in found.summary) == (("warn", True) if keep is dict else ("ok", False))


def test_the_best_weights_so_far_that_are_the_last_ones_rouse_nothing(tmp_path: Path) -> None:
    def best(kept: Kept, model: nn.Module, k: int) -> None:
        if k % 10 == 9:
            if model(X).square().mean() >= 0:
                kept.held = copy.deepcopy(model.state_dict())
            model.load_state_dict(kept.held)

    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5))
    assert trained(tmp_path / "run", model, Kept(best))["loop.restores_nothing"].status == "ok"


class Exact(torch.optim.Optimizer):
    """Keeps the weights of a model in float64 beside it."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.exact = {p: p.detach().double() for group in self.param_groups for p in group["params"]}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p, exact in self.exact.items():
            p.copy_(exact.sub_(p.grad, alpha=self.param_groups[0]["lr"]))


@pytest.mark.parametrize(("make", "lr", "sparse"), [(Exact, 0.01, False), (torch.optim.SGD, 1.0, True)])
def test_16_bits_with_exact_weights_beside_them_and_sparse_gradients_rouse_nothing(
    make: Callable[..., torch.optim.Optimizer], lr: float, sparse: bool, tmp_path: Path
) -> None:
    model = nn.EmbeddingBag(8, 5, sparse=sparse).bfloat16()
    optimizer = make(model.parameters(), lr=lr)
    with wb.watch(model, optimizer, out=tmp_path / "run") as run:
        for _ in range(30):
            optimizer.zero_grad()
            F.cross_entropy(model(torch.arange(8).view(4, 2)), torch.arange(4)).backward()
            optimizer.step()
    finding = run.diagnose()["loop.no_update"]
    assert finding.status == "ok", finding.summary


def test_a_loss_that_is_checkpointed_with_its_head_trains_on(tmp_path: Path) -> None:
    body, head = nn.Linear(8, 8), nn.Linear(8, 5, bias=False)

    def loss(hidden: Tensor, y: Tensor) -> Tensor:
        return checkpoint(lambda h: F.cross_entropy(head(h), y), hidden, use_reentrant=False)  # type: ignore[no-any-return]

    assert trained(tmp_path / "run", body, loss=loss)["loop.no_update"].status == "ok"


@pytest.mark.parametrize(("dtype", "lr", "status"), [(torch.bfloat16, 1e-5, "fail"), (torch.bfloat16, 1.0, "ok"), (torch.float32, 1e-5, "ok")])  # fmt: skip
def test_updates_that_16_bits_round_away_are_told(dtype: torch.dtype, lr: float, status: str, tmp_path: Path) -> None:
    """Of numbers near 1 the next one in bfloat16 is 1/128 away, and the gradient is of size 1."""
    model = nn.Linear(8, 5).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    with wb.watch(model, optimizer, out=tmp_path / "run") as run:
        for _ in range(30):
            optimizer.zero_grad()
            model(torch.ones(4, 8, dtype=dtype)).sum().backward()
            optimizer.step()
    finding = run.diagnose()["loop.no_update"]
    assert (finding.status, "16 bits" in finding.summary) == (status, status == "fail"), finding.summary


def test_folds_that_begin_with_the_same_weights_rouse_nothing(tmp_path: Path) -> None:
    model = nn.Linear(8, 5)
    first = {name: value.clone() for name, value in model.state_dict().items()}
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for _ in range(5)]
    with wb.watch(model, optimizers, out=tmp_path / "run") as run:
        for optimizer in optimizers:
            model.load_state_dict(first)
            for _ in range(20):
                optimizer.zero_grad()
                F.cross_entropy(model(X), Y).backward()
                optimizer.step()
    assert run.diagnose()["loop.no_update"].status == "ok"


@pytest.mark.parametrize(("as_teacher", "to_evaluate", "status"), [
    (None, False, "fail"), (None, True, "ok"), (False, False, "ok"), (True, False, "fail"), (False, None, "ok"),
])  # fmt: skip
def test_a_moving_average_in_training_mode_may_teach_and_not_be_evaluated(
    as_teacher: bool | None, to_evaluate: bool | None, status: str, tmp_path: Path
) -> None:
    """It has dropout. `as_teacher` is whether it is evaluated, too, where it gives targets before each update; `to_evaluate` whether eval() is called."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 5))
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    train, other = (DataLoader(TensorDataset(X[part], Y[part]), 16) for part in (slice(0, 24), slice(24, 32)))
    with wb.watch([model, average], optimizer, out=tmp_path / "run") as run:
        for _ in range(10):
            model.train()
            for x, y in train:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                if as_teacher is not None:
                    with torch.no_grad():
                        targets = average(x).softmax(1)
                    loss = loss + F.mse_loss(model(x).softmax(1), targets)
                loss.backward()
                optimizer.step()
                for kept, new in zip(average.parameters(), model.parameters(), strict=True):
                    kept.lerp_(new, 0.1)
            model.eval()
            if to_evaluate:
                average.eval()
            evaluated = model if as_teacher is False or to_evaluate is None else average
            with torch.no_grad():
                for x, y in other:
                    run.log(validation_loss=F.cross_entropy(evaluated(x), y))
    finding = run.diagnose()["loop.train_mode_in_eval"]
    assert finding.status == status, finding.summary


class Reads(nn.Module):
    """Reads a row as four steps in both directions."""

    def __init__(self, *, last: bool) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(2, 8, bidirectional=True, batch_first=True), nn.Linear(16, 5)
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        outputs, states = self.rnn(x.view(len(x), 4, 2))
        return self.head(outputs[:, -1] if self.last else torch.cat([states[0], states[1]], 1))


@pytest.mark.parametrize("last", [True, False])
def test_a_reverse_direction_that_has_seen_one_step_is_told_where_its_whole_output_is(
    last: bool, tmp_path: Path
) -> None:
    finding = trained(tmp_path / "run", Reads(last=last))["loop.no_update"]
    assert finding.status == ("warn" if last else "ok"), finding.summary
    if last:
        assert "rnn.weight_hh_l0_reverse" in finding.summary
        assert "or h_n" in finding.advice[0]
