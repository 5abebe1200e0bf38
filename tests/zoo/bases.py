"""The healthy trainings that faults are planted in: real or made data, one model and one tuned config each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo import nets, tables
from tests.zoo.recipe import Recipe, Stream
from workbench import TrainConfig
from workbench.workloads.analytic import loss_itself

BASES: dict[str, Callable[[], Recipe]] = {}


def base(make: Callable[[], Recipe]) -> Callable[[], Recipe]:
    """Register a base under its function's name."""
    BASES[make.__name__] = make
    return make


def of(name: str) -> Recipe:
    """Return the base of a name."""
    return BASES[name]()


def recipe(name: str, kind: str, build: nets.Build, data: tables.Splits, peak_lr: float, steps: int, batch: int, **more: Any) -> Recipe:  # fmt: skip
    """Return a recipe; what a recipe has no name for belongs to the config."""
    parts = {key: more.pop(key) for key in ("loss", "dataset", "fields") if key in more}
    config = TrainConfig(peak_lr=peak_lr, total_steps=steps, batch_size=batch, **more)
    return Recipe(name=name, kind=kind, build=build, train=data[0], validation=data[1], config=config, **parts)


@base
def digits_mlp() -> Recipe:
    return recipe("digits_mlp", "classes", lambda: nets.mlp(64, 48, 32, 10), tables.digits(), 0.05, 300, 64)


@base
def digits_deep() -> Recipe:
    build = lambda: nets.deep_mlp(64, 10, width=32, blocks=4)  # noqa: E731
    return recipe("digits_deep", "classes", build, tables.digits(), 8e-3, 200, 32, optimizer="adamw", weight_decay=0.01, schedule="cosine", warmup_steps=15)  # fmt: skip


@base
def digits_tanh() -> Recipe:
    build = lambda: nets.mlp(64, 64, 32, 10, act=nn.Tanh)  # noqa: E731
    return recipe("digits_tanh", "classes", build, tables.digits(), 0.5, 300, 32, optimizer="sgd")


@base
def digits_cnn() -> Recipe:
    return recipe("digits_cnn", "classes", lambda: nets.cnn(norm=False), tables.digits(flat=False), 8e-3, 150, 32, optimizer="adam")  # fmt: skip


@base
def digits_cnn_bn() -> Recipe:
    return recipe("digits_cnn_bn", "classes", lambda: nets.cnn(norm=True), tables.digits(flat=False), 0.08, 150, 64, schedule="cosine")  # fmt: skip


@base
def digits_resnet() -> Recipe:
    return recipe("digits_resnet", "classes", nets.resnet, tables.digits(flat=False), 0.1, 150, 32, optimizer="nesterov", schedule="linear", warmup_steps=10)  # fmt: skip


@base
def wine() -> Recipe:
    return recipe("wine", "classes", lambda: nets.mlp(13, 24, 3, act=nn.Tanh), tables.table("wine"), 0.01, 150, 16, optimizer="adam")  # fmt: skip


@base
def iris() -> Recipe:
    return recipe("iris", "classes", lambda: nets.mlp(4, 16, 3), tables.table("iris"), 0.5, 200, 28, optimizer="sgd", momentum=0.0)  # fmt: skip


def _binary(outputs: Tensor, batch: Any) -> Tensor:
    return F.binary_cross_entropy_with_logits(outputs, batch[1].float(), reduction="none")


def _binary_accuracy(outputs: Tensor, batch: Any) -> Tensor:
    return ((outputs > 0) == (batch[1] > 0.5)).float()


@base
def breast_cancer() -> Recipe:
    build = lambda: nets.mlp(30, 16, 1, squeeze=True)  # noqa: E731
    return recipe("breast_cancer", "own", build, tables.table("breast_cancer"), 0.04, 150, 32, loss=_binary, fields={"metrics": {"accuracy": _binary_accuracy}})  # fmt: skip


@base
def diabetes() -> Recipe:
    build = lambda: nets.mlp(10, 16, 1, squeeze=True)  # noqa: E731
    return recipe("diabetes", "numbers", build, tables.table("diabetes"), 0.04, 150, 32, optimizer="sgd")


@base
def friedman() -> Recipe:
    build = lambda: nets.mlp(10, 48, 48, 1, squeeze=True)  # noqa: E731
    data = tables.made("friedman1", n_samples=1000, noise=0.5)
    return recipe("friedman", "numbers", build, data, 0.02, 300, 32, optimizer="adam", schedule="cosine", warmup_steps=20)  # fmt: skip


@base
def linear_numbers() -> Recipe:
    build = lambda: nets.mlp(20, 1, squeeze=True)  # noqa: E731
    data = tables.made("regression", n_samples=600, n_features=20, n_informative=10, noise=30.0)
    return recipe("linear_numbers", "numbers", build, data, 0.02, 200, 64, optimizer="nesterov", schedule="linear")


@base
def spirals() -> Recipe:
    build = lambda: nets.mlp(2, 48, 48, 3, act=nn.Tanh)  # noqa: E731
    return recipe("spirals", "classes", build, tables.spirals(), 0.03, 400, 64, optimizer="adam", schedule="cosine")


@base
def moons() -> Recipe:
    build = lambda: nets.mlp(2, 32, 32, 2)  # noqa: E731
    return recipe("moons", "classes", build, tables.made("moons", n_samples=600, noise=0.2), 0.05, 250, 32, optimizer="momentum")  # fmt: skip


@base
def tones_gru() -> Recipe:
    build = lambda: nets.Recurrent(nn.GRU, 1, 24, 3)  # noqa: E731
    return recipe("tones_gru", "classes", build, tables.tones(), 0.02, 200, 32, optimizer="adam", max_grad_norm=5.0)


@base
def sums_lstm() -> Recipe:
    build = lambda: nets.Recurrent(nn.LSTM, 2, 24, 1)  # noqa: E731
    return recipe("sums_lstm", "numbers", build, tables.sums(), 0.04, 250, 32, optimizer="rmsprop", momentum=0.0, schedule="cosine")  # fmt: skip


@base
def brackets_transformer() -> Recipe:
    build = lambda: nets.Transformer(8, 4, width=32, layers=1, length=12, causal=False)  # noqa: E731
    return recipe("brackets_transformer", "classes", build, tables.brackets(), 3e-3, 200, 32, optimizer="adamw", weight_decay=0.01, schedule="linear", warmup_steps=20)  # fmt: skip


@base
def text_transformer() -> Recipe:
    build = lambda: nets.Transformer(64, 64, width=32, layers=2, length=24, causal=True)  # noqa: E731
    return recipe("text_transformer", "tokens", build, tables.text(), 0.01, 150, 16, optimizer="adamw", weight_decay=0.01, schedule="cosine", warmup_steps=15, max_grad_norm=2.0)  # fmt: skip


@base
def text_gru() -> Recipe:
    build = lambda: nets.Recurrent(nn.GRU, 24, 48, 64, tokens=64, every=True)  # noqa: E731
    return recipe("text_gru", "tokens", build, tables.text(), 0.03, 150, 16, optimizer="adam", schedule="linear")


def _reconstruction(outputs: Tensor, batch: Any) -> Tensor:
    return F.mse_loss(outputs, batch[-1], reduction="none").mean(-1)


@base
def autoencoder() -> Recipe:
    build = lambda: nets.Autoencoder(64, 48, 8, sampled=False)  # noqa: E731
    return recipe("autoencoder", "own", build, tables.pixels(), 8e-3, 250, 64, optimizer="adam", loss=_reconstruction)


def _elbo(outputs: Any, batch: Any) -> Tensor:
    mean_x, mean, log_var = outputs
    error = 0.5 * (mean_x - batch[1]).square().sum(-1) / 0.05
    return error - 0.5 * (1 + log_var - mean.square() - log_var.exp()).sum(-1)


@base
def vae() -> Recipe:
    build = lambda: nets.Autoencoder(64, 48, 6, sampled=True)  # noqa: E731
    return recipe("vae", "own", build, tables.pixels(), 8e-3, 250, 64, optimizer="adam", loss=_elbo)


def _contrast(outputs: Tensor, batch: Any) -> Tensor:
    own = torch.arange(len(outputs))
    return F.cross_entropy(outputs, own, reduction="none")


def _views(model: nn.Module, batch: Any) -> Tensor:
    return model(batch)


@base
def contrastive() -> Recipe:
    build = lambda: nets.TwoTowers(64, 48)  # noqa: E731
    return recipe("contrastive", "own", build, tables.pixels(views=True), 0.01, 150, 64, optimizer="adam", eval_batch_size=64, loss=_contrast, fields={"forward": _views})  # fmt: skip


def _negative_log(outputs: Tensor, _: Any) -> Tensor:
    return -outputs


@base
def density() -> Recipe:
    return recipe("density", "own", lambda: nets.Mixture(8, 2), tables.clouds(), 0.03, 250, 64, optimizer="adam", loss=_negative_log)  # fmt: skip


@base
def factors() -> Recipe:
    return recipe("factors", "numbers", lambda: nets.Factors(60, 40, 4), tables.ratings(), 0.04, 200, 64, optimizer="adam")  # fmt: skip


def _every_label(outputs: Tensor, batch: Any) -> Tensor:
    return F.binary_cross_entropy_with_logits(outputs, batch[1], reduction="none").mean(-1)


def _label_accuracy(outputs: Tensor, batch: Any) -> Tensor:
    return ((outputs > 0) == (batch[1] > 0.5)).float().mean(-1)


@base
def multilabel() -> Recipe:
    data = tables.made("multilabel_classification", n_samples=900, n_features=20, n_classes=5)
    return recipe("multilabel", "own", lambda: nets.mlp(20, 32, 5), data, 0.1, 200, 32, optimizer="nesterov", loss=_every_label, fields={"metrics": {"label_accuracy": _label_accuracy}})  # fmt: skip


@base
def stream() -> Recipe:
    build = lambda: nets.mlp(64, 32, 10)  # noqa: E731
    return recipe("stream", "classes", build, tables.digits(), 0.3, 200, 32, optimizer="sgd", dataset=Stream)


def _poisson(outputs: Tensor, batch: Any) -> Tensor:
    return outputs.exp() - batch[1] * outputs


@base
def counts() -> Recipe:
    build = lambda: nets.mlp(8, 32, 1, squeeze=True)  # noqa: E731
    return recipe("counts", "own", build, tables.counts(), 5e-3, 200, 32, optimizer="adam", loss=_poisson)


def adagrad(params: Any, lr: float) -> torch.optim.Optimizer:
    """Return an optimizer that the config has no name for."""
    return torch.optim.Adagrad(params, lr=lr)


@base
def wine_adagrad() -> Recipe:
    return recipe("wine_adagrad", "classes", lambda: nets.mlp(13, 32, 16, 3), tables.table("wine"), 0.03, 150, 16, optimizer=adagrad)  # fmt: skip


def _steep(name: str, build: nets.Build, rows: int, columns: int, peak_lr: float, steps: int, batch: int, **more: Any) -> Recipe:  # fmt: skip
    """Steep where training starts: a warmup opens ten times the learning rate that is unstable without."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    x[:, -1] += x[:, :-1].sum(1)
    held = rows // 5
    return recipe(name, "own", build, ((x[held:],), (x[:held],)), peak_lr, steps, batch, loss=loss_itself, **more)


@base
def valley() -> Recipe:
    return _steep("valley", nets.Steep, 1000, 1, 0.1, 220, 40, optimizer="sgd", warmup_steps=20)


@base
def valley_long() -> Recipe:
    build = lambda: nets.Steep(steepness=401.0, slow=40.0)  # noqa: E731
    return _steep("valley_long", build, 600, 1, 0.05, 640, 20, optimizer="sgd", warmup_steps=40)


@base
def valley_regression() -> Recipe:
    build = lambda: nets.Steep(5, steepness=401.0, slow=30.0)  # noqa: E731
    return _steep("valley_regression", build, 1200, 6, 0.05, 330, 60, optimizer="sgd", warmup_steps=30)
