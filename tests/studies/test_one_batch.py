"""One batch before training: planted faults are named, healthy twins are silent, nothing is left changed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from tests.helpers.simulated_records import record
from tests.helpers.workloads import small_workload
from workbench.config import TrainConfig
from workbench.record.json_values import to_json
from workbench.topics.one_batch.batch import first_batch
from workbench.topics.one_batch.collect import collect_one_batch
from workbench.topics.one_batch.diagnose import CODES, diagnose_one_batch
from workbench.topics.one_batch.losses import find_loss
from workbench.topics.one_batch.probes import find_coupling, find_layers, find_modes, find_spread, find_unused
from workbench.topics.preflight.collect import collect_preflight
from workbench.topics.preflight.diagnose import diagnose_preflight
from workbench.workloads.base import Workload
from workbench.workloads.losses import classification, language_model, regression
from workbench.workloads.registry import load_workload

CPU = torch.device("cpu")
DRAWS = torch.Generator().manual_seed(0)
X = torch.randn(160, 12, generator=DRAWS)
CLASS = (X[:, :4] @ torch.randn(4, 3, generator=DRAWS)).argmax(1)
NUMBER = X[:, 0] + X[:, 1] * X[:, 2] + 0.1 * torch.randn(160, generator=DRAWS)
SERIES = torch.randn(160, 9, 2, generator=DRAWS)
IMAGES = torch.randn(160, 2, 6, 6, generator=DRAWS)
TOKENS = torch.randint(0, 7, (160, 13), generator=DRAWS).cumsum(1) % 7


class Having(nn.Module):
    """A module whose forward pass is a function of it and its input."""

    def __init__(self, forward: Callable[[Any, Tensor], Any], **parts: nn.Module) -> None:
        super().__init__()
        self.said = forward
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Any:
        return self.said(self, x)


def mlp(inputs: int = 12, outputs: int = 3, *, act: Callable[[], nn.Module] = nn.ReLU, depth: int = 2, extra: Any = ()) -> nn.Sequential:  # fmt: skip
    layers: list[nn.Module] = []
    for k in range(depth):
        layers += [nn.Linear(24 if k else inputs, 24), *(make() for make in extra), act()]
    return nn.Sequential(*layers, nn.Linear(24, outputs))


def changed(model: nn.Module, change: Callable[[Tensor], Any], *, least_dim: int = 2) -> nn.Module:
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() >= least_dim:
                change(p)
    return model


def settings(**given: Any) -> TrainConfig:
    return TrainConfig(**({"peak_lr": 3e-3, "total_steps": 50, "batch_size": 32, "optimizer": "adam"} | given))


def classes(build: Callable[[], nn.Module], x: Tensor = X, y: Tensor = CLASS, loss: Any = None, **config: Any) -> Workload:  # fmt: skip
    data = TensorDataset(x, y)
    made = classification(name="c", build_model=build, train_data=data, validation_data=data, config=settings(**config))
    return made if loss is None else made.replace(loss=loss, metrics={})


def numbers(build: Callable[[], nn.Module], x: Tensor = X, y: Tensor = NUMBER, loss: Any = None) -> Workload:
    data = TensorDataset(x, y)
    made = regression(name="r", build_model=build, train_data=data, validation_data=data, config=settings())
    return made if loss is None else made.replace(loss=loss, metrics={})


def tokens(build: Callable[[], nn.Module]) -> Workload:
    return language_model(
        name="t", build_model=build, train_data=TOKENS, validation_data=TOKENS[:40], config=settings()
    )


def alarms(workload: Workload) -> dict[str, str]:
    """Return code -> status of everything that is not ok, of the pre-flight and of one batch."""
    facts = {
        "preflight": to_json(collect_preflight(workload, workload.config, CPU)),
        "one_batch": to_json(collect_one_batch(workload, workload.config, CPU)),
    }
    study = record([], facts=facts)
    found = [*diagnose_preflight(study), *diagnose_one_batch(study)]
    assert [f.code for f in found[5:]] == list(CODES)
    return {f.code: f.status for f in found if f.status != "ok"}


def flat(model: nn.Module) -> nn.Sequential:
    return nn.Sequential(model, nn.Flatten(0))


def cross_entropy(outputs: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(outputs, batch[1], reduction="none")


def smallest(outputs: Tensor, batch: Any) -> Tensor:
    return (outputs.argmin(-1) == batch[1]).float()


def noisy(module: Any, x: Tensor) -> Any:
    return module.m(x + torch.randn_like(x))


def eval_inside(module: Any, x: Tensor) -> Any:
    module.eval()
    return module.m(x)


class Stuck(nn.BatchNorm1d):
    def train(self, mode: bool = True) -> Stuck:
        return super().train(True)


class Transformer(nn.Module):
    def __init__(self, *, batch_first: bool = True, zero: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.e, self.o = nn.Embedding(7, 16), nn.Linear(16, 7, bias=False)
        self.p = nn.Parameter(torch.zeros(12, 16))
        self.b = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=batch_first, norm_first=True)
        nn.init.normal_(self.e.weight, std=0.1)
        if tied:
            self.o.weight = self.e.weight
        if zero:
            for layer in (self.o, self.b.linear2, self.b.self_attn.out_proj):
                nn.init.zeros_(layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        first = self.b.self_attn.batch_first
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1]) if first else None
        out: Tensor = self.o(self.b(self.e(x) + self.p[: x.shape[1]], src_mask=mask))
        return out


class Autoencoder(nn.Module):
    """A variational one, as in the example of PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.d = nn.Linear(12, 6), nn.Linear(3, 12)

    def forward(self, x: Tensor) -> Any:
        mean, log_var = self.e(x).chunk(2, 1)
        return self.d(mean + torch.randn_like(mean) * (0.5 * log_var).exp()), mean, log_var


def evidence(outputs: Any, batch: Any) -> Tensor:
    x, mean, log_var = outputs
    return (x - batch[0]).square().sum(1) - 0.5 * (1 + log_var - mean**2 - log_var.exp()).sum(1)


def density(outputs: Tensor, batch: Any) -> Tensor:
    return F.gaussian_nll_loss(outputs[:, 0], batch[1], F.softplus(outputs[:, 1]) + 1e-6, reduction="none")


def info_nce(outputs: Any, batch: Any) -> Tensor:
    return F.cross_entropy(outputs, torch.arange(len(batch[0])), reduction="none")


def similarities(module: Any, x: Tensor) -> Tensor:
    z, other = (F.normalize(module.m(x + 0.1 * torch.randn_like(x)), dim=1) for _ in range(2))
    return z @ other.T / 0.2


def alignment(outputs: Tensor, batch: Any) -> Tensor:
    lengths = torch.full((len(outputs),), outputs.shape[1])
    targets = batch[1][:, None] + 1
    return F.ctc_loss(outputs.transpose(0, 1), targets, lengths, torch.ones_like(lengths), reduction="none")


def logits_loss(outputs: Tensor, batch: Any) -> Tensor:
    return F.binary_cross_entropy_with_logits(outputs.squeeze(-1), (batch[1] > 0).float(), reduction="none")


FAULTS: dict[str, tuple[str, Callable[[], Workload]]] = {
    "reshape mixes examples": ("loop.batch_dependence", lambda: classes(lambda: Having(lambda s, x: s.b(s.a(x).t().reshape(len(x), 24)), a=nn.Linear(12, 24), b=nn.Linear(24, 3)))),
    "softmax over axis 0": ("loop.batch_dependence", lambda: classes(lambda: Having(lambda s, x: s.m(x).log_softmax(0), m=mlp()))),
    "lstm over the batch": ("loop.batch_dependence", lambda: classes(lambda: Having(lambda s, x: s.b(s.a(x)[0][:, -1]), a=nn.LSTM(2, 16), b=nn.Linear(16, 3)), SERIES)),
    "attention over the batch": ("loop.batch_dependence", lambda: tokens(lambda: Transformer(batch_first=False))),
    "half of the columns": ("input.unused_features", lambda: classes(lambda: Having(lambda s, x: s.m(x[:, :6]), m=mlp(6)))),
    "one of two channels": ("input.unused_features", lambda: classes(lambda: Having(lambda s, x: s.m(x[:, :1]), m=nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))), IMAGES)),
    "input ignored": ("init.constant_output", lambda: classes(lambda: Having(lambda s, x: s.m(torch.zeros_like(x)), m=mlp()))),
    "dropout in evaluation": ("evaluation.nondeterministic", lambda: classes(lambda: Having(lambda s, x: s.m(F.dropout(x, 0.4)), m=mlp()))),
    "noise in evaluation": ("evaluation.nondeterministic", lambda: classes(lambda: Having(noisy, m=mlp()))),
    "norm stays in training": ("loop.train_mode_in_eval", lambda: classes(lambda: mlp(extra=[lambda: Stuck(24)]))),
    "eval in forward": ("loop.eval_mode_in_training", lambda: classes(lambda: Having(eval_inside, m=mlp(extra=[lambda: nn.BatchNorm1d(24)])))),
    "dead relu": ("units.dead", lambda: classes(lambda: changed(mlp(), lambda p: p.fill_(-9.0) if p.dim() == 1 else None, least_dim=1))),
    "saturated tanh": ("units.saturated", lambda: classes(lambda: changed(mlp(act=nn.Tanh), lambda p: p.mul_(60)))),
    "saturated sigmoid": ("units.saturated", lambda: classes(lambda: changed(mlp(act=nn.Sigmoid), lambda p: p.mul_(200)))),
    "no activation": ("units.linear", lambda: classes(lambda: mlp(act=nn.Identity))),
    "no activation, batch norm": ("units.linear", lambda: classes(lambda: mlp(act=nn.Identity, extra=[lambda: nn.BatchNorm1d(24)]))),
    "convolutions alone": ("units.linear", lambda: classes(lambda: nn.Sequential(nn.Conv2d(2, 8, 3), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(32, 3)), IMAGES)),
    "all zero": ("units.equal", lambda: classes(lambda: changed(mlp(), lambda p: p.zero_(), least_dim=1))),
    "constant weights": ("units.equal", lambda: classes(lambda: changed(mlp(act=nn.Tanh), lambda p: p.fill_(0.1)))),
    "constant weights, dropout": ("units.equal", lambda: classes(lambda: changed(mlp(extra=[lambda: nn.Dropout(0.3)]), lambda p: p.fill_(0.1)))),
    "eight sigmoids": ("gradients.vanishing", lambda: classes(lambda: mlp(act=nn.Sigmoid, depth=8))),
    "tiny weights": ("gradients.vanishing", lambda: numbers(lambda: flat(changed(mlp(12, 1, depth=3), lambda p: p.mul_(0.01))))),
    "huge weights": ("gradients.exploding", lambda: classes(lambda: changed(mlp(depth=4), lambda p: p.mul_(20)))),
    "huge outputs": ("init.loss", lambda: numbers(lambda: flat(changed(mlp(12, 1), lambda p: p.mul_(15))))),
    "huge logits, a loss of one's own": ("init.loss", lambda: classes(lambda: changed(mlp(), lambda p: p.mul_(4)), loss=lambda o, b: 100 * cross_entropy(o, b))),
    "huge logits, two classes": ("init.loss", lambda: numbers(lambda: flat(changed(mlp(12, 1), lambda p: p.mul_(6))), y=(NUMBER > 0).float(), loss=logits_loss)),
    "targets off centre": ("init.loss", lambda: numbers(lambda: flat(mlp(12, 1)), y=NUMBER + 200)),
    "softmax in the model": ("loss.double_softmax", lambda: classes(lambda: nn.Sequential(mlp(), nn.Softmax(-1)))),
    "softmax in the loss": ("loss.double_softmax", lambda: classes(mlp, loss=lambda o, b: cross_entropy(o.softmax(-1), b))),
    "sigmoid before logits": ("loss.double_softmax", lambda: numbers(lambda: nn.Sequential(mlp(12, 1), nn.Sigmoid()), y=(NUMBER > 0).float(), loss=logits_loss)),
    "sigmoid in the loss": ("loss.double_softmax", lambda: numbers(lambda: flat(mlp(12, 1)), y=(NUMBER > 0).float(), loss=lambda o, b: logits_loss(o.sigmoid(), b))),
    "sigmoid head": ("loss.output_range", lambda: numbers(lambda: flat(nn.Sequential(mlp(12, 1), nn.Sigmoid())))),
    "relu head": ("loss.output_range", lambda: numbers(lambda: flat(nn.Sequential(mlp(12, 1), nn.ReLU())))),
    "tanh logits": ("loss.output_range", lambda: classes(lambda: nn.Sequential(mlp(), nn.Tanh()))),
    "broadcast over targets": ("loss.broadcast", lambda: numbers(lambda: mlp(12, 1), loss=lambda o, b: (o - b[1]).square().mean(1))),
    "broadcast over outputs": ("loss.broadcast", lambda: numbers(lambda: mlp(12, 1), loss=lambda o, b: (o - b[1]).square().mean(0))),
    "sign of an error": ("loss.unbounded", lambda: classes(mlp, loss=lambda o, b: -cross_entropy(o, b))),
    "sign of a likelihood": ("loss.unbounded", lambda: classes(lambda: nn.Sequential(mlp(), nn.LogSoftmax(-1)), loss=lambda o, b: o.gather(1, b[1][:, None])[:, 0])),
    "sign of a probability's loss": ("loss.unbounded", lambda: numbers(lambda: flat(nn.Sequential(mlp(12, 1), nn.Sigmoid())), y=(NUMBER > 0).float(), loss=lambda o, b: -F.binary_cross_entropy(o, b[1], reduction="none"))),
    "metric of another target": ("loss.metric_disagrees", lambda: classes(mlp).replace(metrics={"accuracy": smallest})),
    "ascent": ("loop.overfit_one_batch", lambda: classes(mlp, optimizer=lambda p, lr: torch.optim.SGD(p, lr, maximize=True))),
    "nothing to fit with": ("loop.overfit_one_batch", lambda: classes(lambda: Having(lambda s, x: s.m(x).detach() + s.b.bias, m=mlp(), b=nn.Linear(1, 3)))),
    "detached": ("loop.no_gradient", lambda: classes(lambda: Having(lambda s, x: s.b(s.a(x).detach()), a=nn.Linear(12, 24), b=mlp(24)))),
    "forgotten layer": ("loop.no_gradient", lambda: classes(lambda: Having(lambda s, x: s.m(x), m=mlp(), left=nn.Linear(30, 30)))),
    "optimizer of the head": ("loop.no_update", lambda: classes(mlp, optimizer=lambda p, lr: torch.optim.Adam(list(p)[-2:], lr))),
}  # fmt: skip

HEALTHY: dict[str, Callable[[], Workload]] = {
    "relu": lambda: classes(mlp),
    "deep relu": lambda: classes(lambda: mlp(depth=8)),
    "tanh": lambda: classes(lambda: mlp(act=nn.Tanh)),
    "gelu, layer norm": lambda: classes(lambda: mlp(act=nn.GELU, extra=[lambda: nn.LayerNorm(24)])),
    "batch norm": lambda: classes(lambda: mlp(extra=[lambda: nn.BatchNorm1d(24)])),
    "dropout": lambda: classes(lambda: mlp(extra=[lambda: nn.Dropout(0.5)])),
    "linear": lambda: classes(lambda: nn.Linear(12, 3), optimizer="sgd", peak_lr=0.1),
    "difference of two outputs": lambda: classes(lambda: Having(lambda s, x: s.m(x[:, :6]) - s.m(x[:, 6:]), m=mlp(6))),
    "embeddings alone": lambda: classes(lambda: Having(lambda s, x: s.b(s.a(x).mean(1)), a=nn.Embedding(7, 16), b=nn.Linear(16, 3)), TOKENS),
    "linear, one input": lambda: numbers(lambda: flat(nn.Linear(1, 1)), X[:, :1]),
    "zero head": lambda: classes(lambda: (m := mlp(), changed(m[-1], lambda p: p.zero_(), least_dim=1))[0]),
    "zero branch": lambda: classes(lambda: Having(lambda s, x: s.c(x + s.b(s.a(x).relu())), a=nn.Linear(12, 12), b=changed(nn.Linear(12, 12), lambda p: p.zero_(), least_dim=1), c=nn.Linear(12, 3))),
    "causal, zero branches": lambda: tokens(lambda: Transformer(zero=True)),
    "causal, tied": lambda: tokens(lambda: Transformer(tied=True)),
    "gru": lambda: classes(lambda: Having(lambda s, x: s.b(s.a(x)[0][:, -1]), a=nn.GRU(2, 16, batch_first=True), b=nn.Linear(16, 3)), SERIES),
    "gru, time first": lambda: classes(lambda: Having(lambda s, x: s.b(s.a(x.transpose(0, 1))[0][-1]), a=nn.GRU(2, 16), b=nn.Linear(16, 3)), SERIES),
    "convolution, group norm": lambda: classes(lambda: nn.Sequential(nn.Conv2d(2, 8, 3, stride=2), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3)), IMAGES),
    "sigmoid head in range": lambda: numbers(lambda: flat(nn.Sequential(mlp(12, 1), nn.Sigmoid())), y=NUMBER.sigmoid()),
    "softplus head": lambda: numbers(lambda: flat(nn.Sequential(mlp(12, 1), nn.Softplus())), y=NUMBER.abs()),
    "log-softmax before cross-entropy": lambda: classes(lambda: nn.Sequential(mlp(), nn.LogSoftmax(-1))),
    "likelihood of probabilities": lambda: classes(lambda: nn.Sequential(mlp(), nn.Softmax(-1)), loss=lambda o, b: -(o.gather(1, b[1][:, None])[:, 0] + 1e-9).log()),
    "alignment of log-probabilities": lambda: classes(lambda: Having(lambda s, x: s.b(s.a(x)[0]).log_softmax(-1), a=nn.GRU(2, 16, batch_first=True), b=nn.Linear(16, 5)), SERIES, loss=alignment, peak_lr=1e-2),
    "label smoothing": lambda: classes(mlp, loss=lambda o, b: F.cross_entropy(o, b[1], reduction="none", label_smoothing=0.2)),
    "density": lambda: numbers(lambda: mlp(12, 2), loss=density),
    "variational": lambda: numbers(Autoencoder, loss=evidence),
    "contrastive": lambda: classes(lambda: Having(similarities, m=mlp(12, 8)), loss=info_nce),
    "all of one class": lambda: classes(lambda: mlp(12, 2), y=(torch.arange(160) == 0).long()),
    "one example a batch": lambda: classes(mlp, batch_size=1, peak_lr=1e-3),
    "accumulated": lambda: classes(mlp, accumulate_steps=4),
    "small unused head": lambda: classes(lambda: Having(lambda s, x: s.m(x), m=mlp(), left=nn.Linear(8, 8))),
    "frozen on purpose": lambda: classes(lambda: Having(lambda s, x: s.b(s.a(x).relu()), a=nn.Linear(12, 24).requires_grad_(False), b=nn.Linear(24, 3)), peak_lr=1e-2),
    **{name: (lambda name=name: load_workload(name)) for name in ("digits_mlp", "digits_cnn", "digits_resnet", "breast_cancer", "quadratic")},
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(name: str) -> None:
    code, workload = FAULTS[name]
    assert alarms(workload()).get(code) in ("warn", "fail")


@pytest.mark.parametrize(("low", "words"), [(-3.0, ", more than "), (0.5, "; it is ")])
def test_what_a_bounded_output_cannot_reach_is_said_as_a_loss(low: float, words: str) -> None:
    workload = numbers(lambda: flat(nn.Sequential(mlp(12, 1), nn.ReLU())), y=NUMBER / NUMBER.std() + low)
    facts = collect_one_batch(workload, workload.config, CPU)
    said = diagnose_one_batch(record([], facts={"one_batch": facts}))["loss.output_range"]
    assert said.status != "ok"
    assert f"no less than {facts['loss']['reachable']:.3g}{words}{facts['loss']['ignorant']:.3g} for" in said.summary
    assert "%" not in said.summary


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_training_is_silent(name: str) -> None:
    assert alarms(HEALTHY[name]()) == {}


def test_nothing_that_is_asked_of_one_batch_changes_it() -> None:
    workload = classes(lambda: mlp(extra=[lambda: nn.BatchNorm1d(24), lambda: nn.Dropout(0.2)]))
    one = first_batch(workload, workload.config, CPU)
    before = [t.clone() for t in one.model.state_dict().values()]
    seen = [t.clone() for t in one.batch]
    for look in (find_loss, find_layers, find_spread, find_modes, find_coupling, find_unused):
        look(one)
        assert all(map(torch.equal, before, one.model.state_dict().values())), look.__name__
        assert all(map(torch.equal, seen, one.batch))


def test_the_callers_random_state_is_untouched_and_the_facts_are_the_same_again() -> None:
    workload = small_workload(build_model=lambda: nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1)))
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    before = (torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate())
    facts = to_json(collect_one_batch(workload, workload.config, CPU))
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (np.random.get_state()[1].tolist(), random.getstate())
    torch.manual_seed(4)
    assert to_json(collect_one_batch(workload, workload.config, CPU)) == facts


def test_a_model_that_overwrites_its_input_sees_the_same_each_time() -> None:
    workload = classes(lambda: Having(lambda s, x: s.m(x.mul_(2.0)), m=mlp()))
    assert alarms(workload) == {}


def test_a_batch_whose_tensors_do_not_begin_with_the_examples_is_left_whole() -> None:
    def turned(items: list[Any]) -> Any:
        return torch.stack([x for x, _ in items], 1), torch.stack([y for _, y in items])

    build = lambda: Having(lambda s, x: s.b(s.a(x)[0][-1]), a=nn.GRU(2, 16), b=nn.Linear(16, 3))  # noqa: E731
    data = TensorDataset(SERIES, CLASS)
    workload = classification(
        name="t", build_model=build, train_data=data, validation_data=data, collate=turned, config=settings()
    )
    assert not first_batch(workload, workload.config, CPU).exchangeable
    assert alarms(workload) == {}


def test_what_cannot_be_looked_at_is_said_and_ends_nothing() -> None:
    def fussy(module: Any, x: Tensor) -> Any:
        if not module.training:
            raise KeyError("no evaluation here")
        return module.m(x)

    workload = classes(lambda: Having(fussy, m=mlp()))
    facts = collect_one_batch(workload, workload.config, CPU)
    assert facts["spread"] == {"reason": "KeyError: 'no evaluation here'"}
    found = diagnose_one_batch(record([], facts={"one_batch": facts}))
    assert found["init.constant_output"].status == "not_measured"
    assert "no evaluation here" in found["init.constant_output"].summary
    assert found["loop.overfit_one_batch"].status == "ok"


def test_a_model_that_takes_too_long_is_let_go() -> None:
    workload = classes(mlp)
    facts = collect_one_batch(workload, workload.config, CPU, seconds=-1.0)
    assert all("too long" in part["reason"] for name, part in facts.items() if name != "examples")


def test_the_gap_is_zero_for_a_model_that_ignores_its_input_and_its_loss_falls_all_the_same() -> None:
    workload = classes(lambda: Having(lambda s, x: s.m(torch.ones_like(x)), m=mlp()))
    fit = collect_one_batch(workload, workload.config, CPU)["fit"]
    assert len(fit["runs"]) == 8
    assert all(run["gap"][-1] == 0 for run in fit["runs"])
    assert min(run["loss"][-1] for run in fit["runs"]) < fit["runs"][0]["loss"][0]


def test_a_second_softmax_leaves_the_floor_that_the_formula_says() -> None:
    loss = collect_one_batch(*_asked(classes(lambda: nn.Sequential(mlp(), nn.Softmax(-1)))))["loss"]
    assert loss["reachable"] == pytest.approx(math.log(3 - 1 + math.e) - 1, rel=1e-4)
    assert loss["floor"] == pytest.approx(0, abs=1e-6)


def _asked(workload: Workload) -> tuple[Workload, TrainConfig, torch.device]:
    return workload, workload.config, CPU


def test_a_run_that_blows_up_has_fitted_nothing() -> None:
    """Units that are off for every input come alive at random in a run that diverges; that is no progress."""

    def off() -> nn.Module:
        model = mlp()
        nn.init.constant_(next(m for m in model if isinstance(m, nn.Linear)).bias, -8.0)  # type: ignore[union-attr]
        return model

    found = alarms(classes(off, optimizer="momentum", peak_lr=0.05))
    assert [found.get(code) for code in ("units.dead", "loop.overfit_one_batch")] == ["fail", "fail"]


class Language(nn.Module):
    """A layer of attention over 16 symbols, with a mask of later positions or without."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal, self.token, self.place = causal, nn.Embedding(16, 24), nn.Parameter(0.1 * torch.randn(9, 24))
        self.mix, self.head = nn.Linear(24, 72), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.token(x) + self.place[: x.shape[1]]
        q, k, v = self.mix(h).chunk(3, -1)
        return self.head(h + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal))


SENTENCES = torch.randint(16, (64, 10), generator=torch.Generator().manual_seed(4))
MASKED = torch.where(torch.rand(64, 9, generator=torch.Generator().manual_seed(5)) < 0.15, 15, SENTENCES[:, :9])


@pytest.mark.parametrize(
    ("causal", "inputs", "targets", "status"),
    [
        (True, SENTENCES[:, :-1], SENTENCES[:, 1:], None),
        (False, SENTENCES[:, :-1], SENTENCES[:, 1:], "fail"),
        (True, SENTENCES[:, :-1], SENTENCES[:, :-1], "warn"),
        (False, MASKED, torch.where(SENTENCES[:, :9] == MASKED, -100, SENTENCES[:, :9]), None),
        (False, SENTENCES[:, :-1], SENTENCES[:, :-1].flip(1), None),
        (False, SENTENCES[:, :-1], SENTENCES[:, :-1] % 3, None),
    ],
    ids=["language model", "no mask", "not shifted", "masked tokens", "reversed", "tags"],
)
def test_the_token_to_predict_stands_in_what_is_seen(
    causal: bool, inputs: Tensor, targets: Tensor, status: str | None
) -> None:
    def loss(outputs: Tensor, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(outputs.transpose(1, 2), batch[1], reduction="none").sum(1)

    workload = classes(lambda: Language(causal), x=inputs.contiguous(), y=targets.contiguous(), loss=loss)
    assert alarms(workload).get("loop.sees_target") == status
