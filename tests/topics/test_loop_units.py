"""What a watched loop shows of its units and its initial values: a fault planted in them is found, and what is meant is none."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import workbench as wb

CODES = (
    "units.equal", "units.dead", "units.saturated", "units.linear", "gradients.vanishing", "gradients.exploding", "init.constant_output", "init.loss",
)  # fmt: skip
SEEDS = [pytest.param(k, marks=[pytest.mark.slow, pytest.mark.nightly] if k else []) for k in range(5)]
Fill = Callable[[nn.Module], object]


def batch() -> tuple[Tensor, Tensor]:
    inputs = torch.randn(32, 64)
    return inputs, inputs[:, :10].argmax(1)


def mlp(activation: type[nn.Module] = nn.ReLU, width: int = 64) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(64, width), activation(), nn.Linear(width, width), activation(), nn.Linear(width, 10)
    )


def deep(activation: type[nn.Module], *before: nn.Module, width: int = 64, layers: int = 10) -> nn.Sequential:
    pairs = (part for _ in range(layers) for part in (nn.Linear(width, width), activation()))
    return nn.Sequential(*before, *pairs, nn.Flatten(), nn.Linear(64, 10))


def filters(activation: type[nn.Module] = nn.ReLU, layers: int = 2) -> nn.Sequential:
    pairs = (part for _ in range(layers) for part in (nn.Conv2d(8, 8, 3, padding=1), activation()))
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 8, 3, padding=1), *pairs, nn.Flatten(), nn.Linear(512, 10)
    )


class Pictures(nn.Module):
    """Calls its activation functions by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(1, 16, 3), nn.Conv2d(16, 32, 3), nn.Linear(512, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = F.relu(self.second(self.first(inputs.view(-1, 1, 8, 8)).clamp(min=0)))
        return self.head(hidden.flatten(1))


class Sequences(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.recurrent, self.head = kind(8, 32, batch_first=True), nn.Linear(32, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        states, _ = self.recurrent(inputs.view(-1, 8, 8))
        return self.head(states[:, -1])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, activation="gelu", batch_first=True, norm_first=True)
        self.first, self.body, self.head = (
            nn.Linear(8, 32), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(32, 10),
        )  # fmt: skip

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.body(self.first(inputs.view(-1, 8, 8))).mean(1))


class Branches(nn.Module):
    """Begins as what stands before its branches: one ends in weights of 0, the other is multiplied by 0; and a gate begins open."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.a, self.b, self.c, self.gate, self.head = (
            nn.Linear(64, 32), nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 10),
        )  # fmt: skip
        nn.init.zeros_(self.b.weight)
        nn.init.constant_(self.gate.bias, 8.0)
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.first(inputs)
        x = x + self.b(F.relu(self.a(x)))
        x = x + self.scale * F.relu(self.c(x))
        return self.head(x * torch.sigmoid(self.gate(x)))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = mlp(), nn.Linear(10, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = checkpoint(self.body, inputs, use_reentrant=False)
        return self.head(hidden)


class Behind(nn.Module):
    """Sees its inputs through something that leaves nothing of them."""

    def __init__(self, before: nn.Module) -> None:
        super().__init__()
        self.before, self.body = before, mlp()

    def forward(self, inputs: Tensor) -> Tensor:
        seen = self.before(inputs)
        return self.body(seen.mean(0, keepdim=True).expand_as(seen))


def weights(model: nn.Module, fill: Callable[[Tensor], object], *, biases: bool = False) -> None:
    for p in model.parameters():
        if biases or p.dim() > 1:
            fill(p.data)


def train(model: nn.Module, out: Path, *, scale: float = 1.0, updates: int = 60) -> wb.Diagnosis:
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    with wb.watch(model, optimizer, out=out) as run:
        for _ in range(updates):
            inputs, targets = batch()
            optimizer.zero_grad()
            F.cross_entropy(model(scale * inputs), targets).backward()
            optimizer.step()
    return run.diagnose()


def same_rows(weight: Tensor) -> None:
    weight.copy_(weight[:1].expand_as(weight).clone())


PLANTED: dict[str, tuple[str, Callable[[], nn.Module], Fill, float]] = {
    "a bias far below 0": ("units.dead", mlp, lambda m: nn.init.constant_(m[0].bias, -20.0), 1.0),
    "a convolution's bias": ("units.dead", Pictures, lambda m: nn.init.constant_(m.second.bias, -20.0), 1.0),
    "weights below 0 behind a ReLU": ("units.dead", mlp, lambda m: (m[2].weight.data.abs_().neg_(), m[2].bias.data.zero_()), 1.0),
    "normal weights before a tanh": ("units.saturated", partial(mlp, nn.Tanh, 128), lambda m: weights(m, lambda w: w.normal_(0, 2)), 1.0),
    "large inputs to a tanh": ("units.saturated", partial(mlp, nn.Tanh, 128), lambda _: None, 300.0),
    "normal weights before a sigmoid": ("units.saturated", partial(mlp, nn.Sigmoid, 128), lambda m: weights(m, lambda w: w.normal_(0, 3)), 1.0),
    "weights of deviation 1": ("init.loss", mlp, lambda m: weights(m, lambda w: w.normal_()), 1.0),
    "filters of deviation 1": ("init.loss", Pictures, lambda m: weights(m, lambda w: w.normal_()), 1.0),
    "layers by position of deviation 1": ("init.loss", lambda: nn.Sequential(nn.Unflatten(1, (8, 8)), nn.Linear(8, 64), nn.LeakyReLU(), nn.Flatten(), nn.Linear(512, 10)), lambda m: weights(m, lambda w: w.normal_()), 1.0),
    "all zero": ("units.equal", mlp, lambda m: weights(m, lambda w: w.zero_(), biases=True), 1.0),
    "all 0.01": ("units.equal", partial(mlp, nn.Tanh), lambda m: weights(m, lambda w: w.fill_(0.01), biases=True), 1.0),
    "filters all alike": ("units.equal", Pictures, lambda m: weights(m, same_rows), 1.0),
    "no activation": ("units.linear", partial(mlp, nn.Identity), lambda _: None, 1.0),
    "dropout and batch norm, but no activation": ("units.linear", lambda: nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout(0.1), nn.Linear(64, 10)), lambda _: None, 1.0),
    "filters without an activation": ("units.linear", partial(filters, nn.Identity), lambda _: None, 1.0),
    "many sigmoids": ("gradients.vanishing", partial(deep, nn.Sigmoid), lambda _: None, 1.0),
    "small weights of tanh layers by position": ("gradients.vanishing", lambda: deep(nn.Tanh, nn.Unflatten(1, (8, 8)), width=8), lambda m: weights(m, lambda w: w.normal_(0, 0.02)), 1.0),
    "small filters": ("gradients.vanishing", partial(filters, nn.LeakyReLU, 8), lambda m: weights(m, lambda w: w.mul_(0.3), biases=True), 1.0),
    "weights of deviation 1 in a deep net": ("gradients.exploding", partial(deep, nn.LeakyReLU), lambda m: weights(m, lambda w: w.normal_()), 1.0),
    "large weights by position": ("gradients.exploding", lambda: deep(nn.ReLU, nn.Unflatten(1, (8, 8)), width=8), lambda m: weights(m, lambda w: w.normal_(0, 2)), 1.0),
    "large filters": ("gradients.exploding", partial(filters, layers=8), lambda m: weights(m, lambda w: w.normal_(0, 0.6)), 1.0),
    "an input times 0": ("init.constant_output", lambda: Behind(nn.Threshold(1e9, 0.0)), lambda _: None, 1.0),
    "an average over what varies": ("init.constant_output", lambda: Behind(nn.Identity()), lambda _: None, 1.0),
    "a ReLU as the last layer": ("init.constant_output", lambda: nn.Sequential(mlp(), nn.ReLU()), lambda m: nn.init.constant_(m[0][-1].bias, -30.0), 1.0),
}  # fmt: skip


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", PLANTED)
def test_a_planted_fault_is_found(kind: str, seed: int, tmp_path: Path) -> None:
    code, build, fill, scale = PLANTED[kind]
    torch.manual_seed(seed)
    model = build()
    fill(model)
    found = train(model, tmp_path / "run", scale=scale)
    assert code in [f.code for f in found.findings if f.status in ("warn", "fail")][:2]


def test_the_layer_before_is_named_and_the_loss_decides_how_bad_it_is(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Pictures()
    nn.init.constant_(model.second.bias, -20.0)
    dead = train(model, tmp_path / "run")["units.dead"]
    assert dead.status == "fail"
    assert dead.summary.startswith("100% of the ReLU units behind second are off for every example")


def test_units_that_are_off_are_the_cause_though_the_outputs_begin_at_the_share_of_a_rare_class(tmp_path: Path) -> None:
    """The bias that a rare class asks of the last layer is given to all: the first loss is low, and nothing is learned yet."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 1, 1)
    )
    model.apply(lambda m: nn.init.constant_(m.bias, -4.6) if isinstance(m, nn.Conv2d) else None)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with wb.watch(model, optimizer, out=tmp_path / "run") as run:
        for _ in range(60):
            x = torch.randn(16, 1, 12, 12)
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(model(x), (x > 2.2).float()).backward()
            optimizer.step()
    found = run.diagnose()
    assert next(iter(found)).code == "units.dead"
    assert found["loop.no_update"].follows_from == found["init.constant_output"].follows_from == "units.dead"


HEALTHY: dict[str, Callable[[], nn.Module]] = {
    "plain": mlp,
    "deep": lambda: nn.Sequential(*(part for _ in range(8) for part in (nn.Linear(64, 64), nn.ReLU())), nn.Linear(64, 10)),
    "pictures": Pictures,
    "batch norm and dropout": lambda: nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(64, 10)),
    "attention": Attention,
    "LSTM with open gates": lambda: opened(Sequences(nn.LSTM)),
    "GRU with open gates": lambda: opened(Sequences(nn.GRU)),
    "branches of 0": Branches,
    "a last layer of 0": lambda: zero_head(mlp()),
    "frozen and mostly off": lambda: nn.Sequential(frozen(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)),
    "many sigmoids behind norms": lambda: nn.Sequential(*(part for _ in range(10) for part in (nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Sigmoid())), nn.Linear(64, 10)),
    "a linear model": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)),
    "a narrow layer": lambda: nn.Sequential(nn.Linear(64, 4), nn.Linear(4, 10)),
    "filters, one behind the other": lambda: filters(layers=6),
    "few units": lambda: nn.Sequential(nn.Linear(64, 4), nn.ReLU(), nn.Linear(4, 10)),
}  # fmt: skip


def opened(model: Sequences) -> nn.Module:
    with torch.no_grad():
        model.recurrent.bias_hh_l0[32:64] += 6.0
    return model


def zero_head(model: nn.Sequential) -> nn.Module:
    nn.init.zeros_(model[-1].weight)
    return model


def frozen() -> nn.Module:
    part = nn.Sequential(nn.Linear(64, 64), nn.ReLU()).requires_grad_(False)
    part[0].bias[8:] = -20.0
    return part


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", HEALTHY)
def test_what_is_meant_is_no_fault(kind: str, seed: int, tmp_path: Path) -> None:
    torch.manual_seed(seed)
    found = train(HEALTHY[kind](), tmp_path / "run")
    assert {code: found[code].status for code in CODES} == dict.fromkeys(CODES, "ok")


def test_a_trained_model_and_probabilities_at_their_bounds_are_no_fault(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = mlp(nn.Tanh)
    train(model, tmp_path / "first", updates=600)
    weights(model, lambda w: w.mul_(4))
    assert (
        train(model, tmp_path / "second")["units.saturated"].summary == "Does not apply: the model was trained before."
    )
    coder = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64), nn.Sigmoid())
    optimizer = torch.optim.Adam(coder.parameters(), lr=0.02)
    bits = (torch.randn(32, 64) > 0).float()
    with wb.watch(coder, optimizer, out=tmp_path / "coder") as run:
        for _ in range(150):
            optimizer.zero_grad()
            F.binary_cross_entropy(coder(bits), bits).backward()
            optimizer.step()
    assert run.diagnose()["units.saturated"].status == "ok"


def test_what_a_graph_does_not_show_is_not_measured(tmp_path: Path) -> None:
    found = train(Checkpointed(), tmp_path / "run")
    assert [found[code].status for code in CODES] == ["not_measured"] * 6 + ["ok"] * 2


@pytest.mark.parametrize(
    ("activation", "order", "status"),
    [(nn.ReLU, 2, "fail"), (nn.LeakyReLU, 2, "fail"), (nn.ReLU6, 2, "fail"), (nn.ReLU, 1, "ok"), (nn.Tanh, 2, "ok"), (nn.SiLU, 2, "ok"), (nn.ELU, 2, "ok")],
)  # fmt: skip
def test_second_derivatives_that_are_zero_everywhere_are_told(
    activation: type[nn.Module], order: int, status: str, tmp_path: Path
) -> None:
    """A loss of first derivatives, as a gradient penalty, takes ReLU."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 16), activation(), nn.Linear(16, 16), activation(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with wb.watch(model, optimizer, out=tmp_path / "run") as run:
        for _ in range(12):
            x = torch.rand(32, 2, requires_grad=True)
            u = first = model(x)
            for _ in range(order):
                first = torch.autograd.grad(first.sum(), x, create_graph=True)[0][:, :1]
            optimizer.zero_grad()
            (first + u).square().mean().backward()
            optimizer.step()
    found = run.diagnose()["gradients.vanishing"]
    assert (found.status, "second derivatives" in found.summary) == (status, status == "fail"), found.summary


def test_first_derivatives_of_several_relu_networks_rouse_nothing(tmp_path: Path) -> None:
    """Of each the other networks' part is 0 everywhere, as in a divergence or in penalties of several critics."""
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1)) for _ in range(2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with wb.watch(model, optimizer, out=tmp_path / "run") as run:
        for _ in range(12):
            x = torch.rand(32, 2, requires_grad=True)
            field = torch.cat([part(x) for part in model], 1)
            parts = [torch.autograd.grad(field[:, k].sum(), x, create_graph=True)[0][:, k] for k in range(2)]
            optimizer.zero_grad()
            ((parts[0] + parts[1]).square().mean() + (field - x).square().mean()).backward()
            optimizer.step()
    found = run.diagnose()["gradients.vanishing"]
    assert found.status == "ok", found.summary


def test_products_of_second_derivatives_and_a_vector_are_recorded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with wb.watch(model, optimizer, out=tmp_path / "run") as run:
        for _ in range(12):
            weights = [*model.parameters()]
            loss = nn.functional.cross_entropy(model(torch.randn(32, 4)), torch.randint(3, (32,)))
            grads = torch.autograd.grad(loss, weights, create_graph=True)
            products = torch.autograd.grad(sum(g.sum() for g in grads), weights, create_graph=True)
            optimizer.zero_grad()
            (loss + sum(p.square().sum() for p in products)).backward()
            optimizer.step()
    found = run.diagnose()["loop.no_step"]
    assert found.status == "ok", found.summary
