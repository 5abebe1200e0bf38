"""Faults of the model, the loss and the initial weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo import nets
from tests.zoo.faults import fault
from tests.zoo.recipe import After, Recipe, normed, swap

LAYERS = (nn.Linear, nn.Conv2d)


def _before(model: nn.Module, change: Callable[[Any], Any], at: int = 0) -> None:
    swap(model, LAYERS, lambda m: After(m, before=change), at=at)


def _after(model: nn.Module, change: Callable[[Any], Any], at: int = 0) -> None:
    swap(model, LAYERS, lambda m: After(m, after=change), at=at)


@fault("loop", "loop.frozen_random loop.no_gradient loop.no_update loop.unowned_parameters", on="digits_tanh digits_cnn_bn brackets_transformer")  # fmt: skip
def frozen_random_layers(r: Recipe) -> Recipe:
    def freeze(m: nn.Module) -> None:
        for layer in nets.layers_of(m, (*LAYERS, nn.Embedding))[:-1]:
            layer.requires_grad_(False)

    return r.model(freeze)


@fault("stability", "stability.attention_logits", on="text_transformer brackets_transformer")
def queries_and_keys_too_large(r: Recipe) -> Recipe:
    def change(m: nn.Module) -> None:
        for attention in nets.layers_of(m, nets.Attention):
            with torch.no_grad():
                attention.qkv.weight[: 2 * attention.qkv.in_features] *= 16

    return r.model(change)


@fault("stability", "stability.output_logits init.loss lr.too_high", on="text_transformer")
def logits_times_300(r: Recipe) -> Recipe:
    return r.model(lambda m: swap(m, nn.Linear, lambda head: After(head, after=lambda z: 300 * z)))


def _head_only(params: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(list(params)[-2:], lr=lr)


class Evaluating(nn.Module):
    """A module that is never in training mode."""

    def train(self, mode: bool = True) -> Evaluating:
        return super().train(False)


class EvalNorm1d(Evaluating, nn.BatchNorm1d): ...


class EvalNorm2d(Evaluating, nn.BatchNorm2d): ...


@fault("loop", "loop.eval_mode_in_training batch_norm.cold_ema batch_norm.stale", on="digits_cnn_bn digits_resnet digits_mlp", twin=normed)  # fmt: skip
def norm_left_in_eval(r: Recipe) -> Recipe:
    def change(m: nn.Module) -> None:
        for norm in nets.layers_of(m, (nn.BatchNorm1d, nn.BatchNorm2d)):
            norm.__class__ = EvalNorm1d if isinstance(norm, nn.BatchNorm1d) else EvalNorm2d
            norm.eval()

    return normed(r).model(change)


class TrainNorm(nn.BatchNorm2d):
    """A batch norm that is never in evaluation mode."""

    def train(self, mode: bool = True) -> TrainNorm:
        return super().train(True)


@fault("loop", "loop.train_mode_in_eval loop.batch_dependence evaluation.weighting evaluation.batch_size", on="digits_cnn_bn digits_resnet")  # fmt: skip
def norm_left_in_training(r: Recipe) -> Recipe:
    def change(m: nn.Module) -> None:
        for norm in nets.layers_of(m, nn.BatchNorm2d):
            norm.__class__ = TrainNorm

    return r.model(change)


class Listed(nn.Module):
    """Holds a layer in a list, where no optimizer finds it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.layers = [inner]

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x)


@fault("loop", "loop.unowned_parameters loop.frozen_random loop.no_gradient", on="digits_mlp digits_cnn friedman")
def layers_in_a_list(r: Recipe) -> Recipe:
    def change(m: nn.Module) -> None:
        for _ in nets.layers_of(m)[:-1]:  # a layer in a list is not found again
            swap(m, LAYERS, Listed)

    return r.model(change)


@fault("loop", "init.constant_output input.unused_features loop.no_gradient data.no_signal lr.nothing_learns", on="digits_mlp diabetes tones_gru")  # fmt: skip
def input_lost(r: Recipe) -> Recipe:
    kinds = (nn.Linear, nn.Conv2d, nn.GRU)
    return r.model(lambda m: swap(m, kinds, lambda layer: After(layer, before=torch.zeros_like)))


def _turned(h: Tensor) -> Tensor:
    return h.reshape(h.shape[1], h.shape[0], *h.shape[2:]).transpose(0, 1)


@fault("loop", "input.unused_features", on="digits_mlp linear_numbers friedman")
def half_of_the_features(r: Recipe) -> Recipe:
    def half(x: Tensor) -> Tensor:
        return x * (torch.arange(x.shape[1]) % 2)

    return r.model(lambda m: _before(m, half))


def _broadcasting(outputs: Tensor, batch: Any) -> Tensor:
    return (outputs - batch[1]).square().mean(-1)


@fault("loss", "loss.broadcast loop.batch_dependence", on="diabetes friedman sums_lstm")
def broadcast_targets(r: Recipe) -> Recipe:
    column = r.model(lambda m: After(m, after=lambda o: o[:, None]))
    return column.but(kind="own", loss=_broadcasting)


def _pinball(error: Tensor) -> Tensor:
    return torch.maximum(0.9 * error, -0.1 * error)


def _quantile(r: Recipe, sign: int = 1) -> Recipe:
    costs = {"cost": lambda outputs, batch: 10 * _pinball(batch[1] - outputs)}
    return r.wrong(lambda outputs, batch: _pinball(sign * (batch[1] - outputs))).having(metrics=costs)


@fault("loss", "loss.metric_disagrees", on="diabetes friedman sums_lstm", twin=_quantile)
def quantile_of_the_other_side(r: Recipe) -> Recipe:
    return _quantile(r, sign=-1)


@fault("loss", "lr.nothing_learns init.constant_output loop.overfit_one_batch", on="vae")
def reconstruction_a_mean_beside_a_summed_kl(r: Recipe) -> Recipe:
    def loss(outputs: Any, batch: Any) -> Tensor:
        _, mean, log_var = outputs
        nothing = (batch[1], torch.zeros_like(mean), torch.zeros_like(log_var))
        error, right = r.loss((outputs[0], *nothing[1:]), batch), r.loss((nothing[0], mean, log_var), batch)
        return error / batch[1].shape[1] + right

    return r.wrong(loss)


@fault("loss", "lr.nothing_learns loop.overfit_one_batch loop.sees_target", on="text_gru text_transformer")
def classes_and_places_viewed(r: Recipe) -> Recipe:
    return r.model(lambda m: After(m, after=lambda o: o.transpose(1, 2).reshape(o.shape)))


@fault("loss", "loss.unbounded loss.metric_disagrees", on="digits_mlp diabetes multilabel")
def sign_flipped(r: Recipe) -> Recipe:
    right = r.workload().loss
    return r.wrong(lambda outputs, batch: -right(outputs, batch))


def _worst(outputs: Tensor, batch: Any) -> Tensor:
    return (outputs.argmin(-1) == batch[1]).float()


def _weights(m: nn.Module, change: Callable[[Tensor], None]) -> None:
    with torch.no_grad():
        for p in m.parameters():
            if p.dim() > 1:
                change(p)


@fault("init", "units.equal loop.no_gradient gradients.vanishing init.constant_output units.dead", on="digits_mlp friedman multilabel")  # fmt: skip
def all_zeros(r: Recipe) -> Recipe:
    def change(m: nn.Module) -> None:
        for p in m.parameters():
            p.data.zero_()

    return r.model(change)


@fault("init", "units.dead loop.no_gradient gradients.vanishing init.constant_output", on="digits_mlp digits_cnn diabetes")  # fmt: skip
def dead_relus(r: Recipe) -> Recipe:
    def change(m: nn.Module) -> None:
        nets.layers_of(m)[-2].bias.data.fill_(-20.0)

    return r.model(change)


@fault("init", "units.saturated gradients.vanishing init.loss", on="digits_tanh spirals")
def saturated_tanh(r: Recipe) -> Recipe:
    def change(m: nn.Module) -> None:
        for layer in nets.layers_of(m)[:-1]:
            layer.weight.data.mul_(40)

    return r.model(change)


@fault("init", "init.loss", on="digits_mlp wine tones_gru")
def confident_head(r: Recipe) -> Recipe:
    def change(m: nn.Module) -> None:
        nets.layers_of(m)[-1].bias.data[0] = 25.0

    return r.model(change)


@fault("stability", "architecture.no_residual architecture.no_norm gradients.vanishing gradients.exploding", on="digits_mlp moons friedman")  # fmt: skip
def deep_plain(r: Recipe) -> Recipe:
    first, last = nets.layers_of(r.build())[0], nets.layers_of(r.build())[-1]
    make = partial(nets.deep_mlp, first.in_features, last.out_features, width=24, blocks=20, norm=False, residual=False)
    return r.but(build=lambda: make() if r.kind == "classes" else nn.Sequential(make(), nn.Flatten(0)))


@fault("stability", "architecture.branch_not_zero architecture.no_norm gradients.exploding init.loss", on="digits_mlp moons digits_tanh")  # fmt: skip
def deep_branches_of_unit_gain(r: Recipe) -> Recipe:
    first, last = nets.layers_of(r.build())[0], nets.layers_of(r.build())[-1]

    def build() -> nn.Module:
        m = nets.deep_mlp(first.in_features, last.out_features, width=32, blocks=8, norm=False)
        for block in nets.layers_of(m, nets.Residual):
            for layer in nets.layers_of(block):
                nn.init.kaiming_normal_(layer.weight)
        return m

    return r.but(build=build)


def _open(module: nn.Module) -> None:
    for attention in module.modules():
        if isinstance(attention, nets.Attention):
            attention.causal = False


@fault("stability", "architecture.norm_after_add warmup.needed warmup.insufficient stability.early lr.too_high", on="brackets_transformer text_transformer")  # fmt: skip
def post_norm_deep(r: Recipe) -> Recipe:
    m = r.build()
    tokens, outputs, length = m.token.num_embeddings, m.head.out_features, len(m.position)
    build = partial(nets.Transformer, tokens, outputs, width=32, layers=6, length=length, causal=m.causal, post=True)
    return r.but(build=build).tuned(warmup_steps=0, schedule="constant")


class PostNorm(nn.Module):
    """`norm(x + f(x))`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.branch, self.norm = nets.mlp(width, width, width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.branch(x))


@fault("stability", "architecture.norm_after_add warmup.needed warmup.insufficient stability.early lr.too_high", on="digits_mlp")  # fmt: skip
def post_norm_mlp(r: Recipe) -> Recipe:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 48), *[PostNorm(48) for _ in range(12)], nn.Linear(48, 10))

    return r.but(build=build).tuned(peak_lr=0.2)


class Gain(nn.Module):
    """Outputs times a gain that changes at a training step: a temperature annealed by a person's own counter."""

    def __init__(self, inner: nn.Module, at: int, gain: float) -> None:
        super().__init__()
        self.inner, self.at, self.gain = inner, at, gain
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        return self.inner(x) * torch.where(self.seen > self.at, self.gain, 1.0)


@fault("init", "units.dropped evaluation.underfits evaluation.generalisation_gap", on="digits_mlp digits_tanh")
def keep_probability_dropped(r: Recipe) -> Recipe:
    def change(m: nn.Module) -> None:
        swap(m, nn.Linear, lambda a: nn.Sequential(nn.Dropout(0.95), a), at=-1)

    return r.model(change)


for name, area, accepts, bases, plant in (
    ("detached", "loop", "loop.no_gradient loop.frozen_random", "digits_mlp digits_cnn text_gru",
        lambda r: r.model(lambda m: _before(m, Tensor.detach, at=-1))),
    ("head-only-optimizer", "loop", "loop.no_update loop.unowned_parameters loop.frozen_random", "digits_cnn friedman tones_gru",
        lambda r: r.tuned(optimizer=_head_only)),
    ("dropout-in-evaluation", "loop", "loop.train_mode_in_eval evaluation.nondeterministic", "digits_mlp friedman digits_cnn",
        lambda r: r.model(lambda m: swap(m, nn.ReLU, lambda a: After(a, after=lambda x: F.dropout(x, 0.5))))),
    ("examples-mixed", "loop", "loop.batch_dependence evaluation.weighting evaluation.coverage", "digits_mlp digits_cnn friedman",
        lambda r: r.model(lambda m: _after(m, _turned))),
    ("rounded-units", "loop", "loop.no_gradient gradients.vanishing loop.no_update", "digits_mlp diabetes spirals",
        lambda r: r.model(lambda m: _after(m, torch.sign))),
    ("softmax-twice", "loss", "loss.double_softmax", "digits_cnn brackets_transformer text_gru",
        lambda r: r.model(lambda m: After(m, after=lambda z: z.softmax(-1)))),
    ("sigmoid-twice", "loss", "loss.double_softmax loss.output_range", "breast_cancer multilabel",
        lambda r: r.model(lambda m: After(m, after=torch.sigmoid))),
    ("softmax-over-batch", "loss", "loop.batch_dependence loss.double_softmax evaluation.weighting", "digits_mlp wine tones_gru",
        lambda r: r.model(lambda m: After(m, after=lambda z: z.log_softmax(0)))),
    ("relu-head", "loss", "loss.output_range units.dead", "diabetes friedman sums_lstm",
        lambda r: r.model(lambda m: After(m, after=torch.relu))),
    ("sigmoid-head", "loss", "loss.output_range", "diabetes linear_numbers factors",
        lambda r: r.model(lambda m: After(m, after=torch.sigmoid))),
    ("metric-of-the-smallest", "loss", "loss.metric_disagrees", "digits_mlp brackets_transformer moons",
        lambda r: r.having(metrics={"accuracy": _worst})),
    ("dropout-of-nearly-all", "init", "units.dropped", "digits_mlp friedman moons",
        lambda r: r.model(lambda m: nn.Sequential(nn.Dropout(0.98), m))),
    ("weights-x10", "init", "init.loss units.saturated gradients.exploding stability.early", "digits_mlp digits_cnn digits_tanh",
        lambda r: r.model(partial(_weights, change=lambda p: p.mul_(10)))),
    ("weights-x001", "init", "gradients.vanishing init.constant_output lr.too_low", "digits_mlp friedman digits_cnn",
        lambda r: r.model(partial(_weights, change=lambda p: p.mul_(0.01)))),
    ("all-alike", "init", "units.equal init.constant_output", "digits_tanh spirals wine_adagrad",
        lambda r: r.model(partial(_weights, change=lambda p: p.fill_(0.1)))),
    ("targets-off-centre", "init", "init.loss data.scale", "diabetes friedman factors",
        lambda r: r.targets(lambda y: y + 300)),
    ("mask-left-out", "loop", "loop.sees_target", "text_transformer", lambda r: r.model(_open)),
    ("targets-not-shifted", "loop", "loop.sees_target", "text_transformer text_gru",
        lambda r: r.but(train=(r.train[0], r.train[0]), validation=(r.validation[0], r.validation[0]))),
    ("gain-jumps", "stability", "stability.mid stability.spike stability.divergent", "digits_mlp diabetes moons",
        lambda r: r.model(partial(Gain, at=r.config.total_steps // 2, gain=12.0))),
    ("no-activation", "init", "units.linear", "digits_mlp friedman digits_tanh",
        lambda r: r.model(lambda m: swap(m, (nn.ReLU, nn.Tanh), lambda _: nn.Identity(), every=True))),
):  # fmt: skip
    fault(area, accepts, on=bases, kind=name)(plant)
