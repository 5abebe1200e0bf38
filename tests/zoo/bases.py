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


def of(name: str) -> Recipe:
    """Return the base of a name."""
    return BASES[name]()


def recipe(name: str, kind: str, build: nets.Build, data: tables.Splits, peak_lr: float, steps: int, batch: int, **more: Any) -> Recipe:  # fmt: skip
    """Return a recipe; what a recipe has no name for belongs to the config."""
    parts = {key: more.pop(key) for key in ("loss", "dataset", "fields") if key in more}
    config = TrainConfig(peak_lr=peak_lr, total_steps=steps, batch_size=batch, **more)
    return Recipe(name=name, kind=kind, build=build, train=data[0], validation=data[1], config=config, **parts)


def _binary(outputs: Tensor, batch: Any) -> Tensor:
    return F.binary_cross_entropy_with_logits(outputs, batch[1].float(), reduction="none")


def _binary_accuracy(outputs: Tensor, batch: Any) -> Tensor:
    return ((outputs > 0) == (batch[1] > 0.5)).float()


def _reconstruction(outputs: Tensor, batch: Any) -> Tensor:
    return F.mse_loss(outputs, batch[-1], reduction="none").mean(-1)


def _elbo(outputs: Any, batch: Any) -> Tensor:
    mean_x, mean, log_var = outputs
    error = 0.5 * (mean_x - batch[1]).square().sum(-1) / 0.05
    return error - 0.5 * (1 + log_var - mean.square() - log_var.exp()).sum(-1)


def _contrast(outputs: Tensor, batch: Any) -> Tensor:
    own = torch.arange(len(outputs))
    return F.cross_entropy(outputs, own, reduction="none")


def _views(model: nn.Module, batch: Any) -> Tensor:
    return model(batch)


def _negative_log(outputs: Tensor, _: Any) -> Tensor:
    return -outputs


def _every_label(outputs: Tensor, batch: Any) -> Tensor:
    return F.binary_cross_entropy_with_logits(outputs, batch[1], reduction="none").mean(-1)


def _label_accuracy(outputs: Tensor, batch: Any) -> Tensor:
    return ((outputs > 0) == (batch[1] > 0.5)).float().mean(-1)


def _poisson(outputs: Tensor, batch: Any) -> Tensor:
    return outputs.exp() - batch[1] * outputs


def adagrad(params: Any, lr: float) -> torch.optim.Optimizer:
    """Return an optimizer that the config has no name for."""
    return torch.optim.Adagrad(params, lr=lr)


def _steep(name: str, build: nets.Build, rows: int, columns: int, peak_lr: float, steps: int, batch: int, **more: Any) -> Recipe:  # fmt: skip
    """Steep where training starts: a warmup opens ten times the learning rate that is unstable without."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    x[:, -1] += x[:, :-1].sum(1)
    held = rows // 5
    return recipe(name, "own", build, ((x[held:],), (x[:held],)), peak_lr, steps, batch, loss=loss_itself, **more)


BASES: dict[str, Callable[[], Recipe]] = {
    "digits_mlp": lambda: recipe(
        "digits_mlp", "classes", lambda: nets.mlp(64, 48, 32, 10), tables.digits(), 0.05, 300, 64),
    "digits_deep": lambda: recipe(
        "digits_deep", "classes", lambda: nets.deep_mlp(64, 10, width=32, blocks=4), tables.digits(), 8e-3, 200, 32,
            optimizer="adamw", weight_decay=0.01, schedule="cosine", warmup_steps=15),
    "digits_tanh": lambda: recipe(
        "digits_tanh", "classes", lambda: nets.mlp(64, 64, 32, 10, act=nn.Tanh), tables.digits(), 0.5, 300, 32,
            optimizer="sgd"),
    "digits_cnn": lambda: recipe(
        "digits_cnn", "classes", lambda: nets.cnn(norm=False), tables.digits(flat=False), 8e-3, 150, 32,
            optimizer="adam"),
    "digits_cnn_bn": lambda: recipe(
        "digits_cnn_bn", "classes", lambda: nets.cnn(norm=True), tables.digits(flat=False), 0.08, 150, 64,
            schedule="cosine"),
    "digits_resnet": lambda: recipe(
        "digits_resnet", "classes", nets.resnet, tables.digits(flat=False), 0.1, 150, 32, optimizer="nesterov",
            schedule="linear", warmup_steps=10),
    "wine": lambda: recipe(
        "wine", "classes", lambda: nets.mlp(13, 24, 3, act=nn.Tanh), tables.table("wine"), 0.01, 150, 16,
            optimizer="adam"),
    "iris": lambda: recipe(
        "iris", "classes", lambda: nets.mlp(4, 16, 3), tables.table("iris"), 0.5, 200, 28, optimizer="sgd",
            momentum=0.0),
    "breast_cancer": lambda: recipe(
        "breast_cancer", "own", lambda: nets.mlp(30, 16, 1, squeeze=True), tables.table("breast_cancer"), 0.04, 150, 32,
            loss=_binary, fields={"metrics": {"accuracy": _binary_accuracy}}),
    "diabetes": lambda: recipe(
        "diabetes", "numbers", lambda: nets.mlp(10, 16, 1, squeeze=True), tables.table("diabetes"), 0.04, 150, 32,
            optimizer="sgd"),
    "friedman": lambda: recipe(
        "friedman", "numbers", lambda: nets.mlp(10, 48, 48, 1, squeeze=True), tables.made("friedman1", n_samples=1000,
            noise=0.5), 0.02, 300, 32, optimizer="adam", schedule="cosine", warmup_steps=20),
    "linear_numbers": lambda: recipe(
        "linear_numbers", "numbers", lambda: nets.mlp(20, 1, squeeze=True), tables.made("regression", n_samples=600,
            n_features=20, n_informative=10, noise=30.0), 0.02, 200, 64, optimizer="nesterov", schedule="linear"),
    "spirals": lambda: recipe(
        "spirals", "classes", lambda: nets.mlp(2, 48, 48, 3, act=nn.Tanh), tables.spirals(), 0.03, 400, 64,
            optimizer="adam", schedule="cosine"),
    "moons": lambda: recipe(
        "moons", "classes", lambda: nets.mlp(2, 32, 32, 2), tables.made("moons", n_samples=600, noise=0.2), 0.05, 250,
            32, optimizer="momentum"),
    "tones_gru": lambda: recipe(
        "tones_gru", "classes", lambda: nets.Recurrent(nn.GRU, 1, 24, 3), tables.tones(), 0.02, 200, 32,
            optimizer="adam", max_grad_norm=5.0),
    "sums_lstm": lambda: recipe(
        "sums_lstm", "numbers", lambda: nets.Recurrent(nn.LSTM, 2, 24, 1), tables.sums(), 0.04, 250, 32,
            optimizer="rmsprop", momentum=0.0, schedule="cosine"),
    "brackets_transformer": lambda: recipe(
        "brackets_transformer", "classes", lambda: nets.Transformer(8, 4, width=32, layers=1, length=12, causal=False),
            tables.brackets(), 3e-3, 200, 32, optimizer="adamw", weight_decay=0.01, schedule="linear", warmup_steps=20),
    "text_transformer": lambda: recipe(
        "text_transformer", "tokens", lambda: nets.Transformer(64, 64, width=32, layers=2, length=24, causal=True),
            tables.text(), 0.01, 150, 16, optimizer="adamw", weight_decay=0.01, schedule="cosine", warmup_steps=15,
            max_grad_norm=2.0),
    "text_gru": lambda: recipe(
        "text_gru", "tokens", lambda: nets.Recurrent(nn.GRU, 24, 48, 64, tokens=64, every=True), tables.text(), 0.03,
            150, 16, optimizer="adam", schedule="linear"),
    "autoencoder": lambda: recipe(
        "autoencoder", "own", lambda: nets.Autoencoder(64, 48, 8, sampled=False), tables.pixels(), 8e-3, 250, 64,
            optimizer="adam", loss=_reconstruction),
    "vae": lambda: recipe(
        "vae", "own", lambda: nets.Autoencoder(64, 48, 6, sampled=True), tables.pixels(), 8e-3, 250, 64,
            optimizer="adam", loss=_elbo),
    "contrastive": lambda: recipe(
        "contrastive", "own", lambda: nets.TwoTowers(64, 48), tables.pixels(views=True), 0.01, 150, 64,
            optimizer="adam", eval_batch_size=64, loss=_contrast, fields={"forward": _views}),
    "density": lambda: recipe(
        "density", "own", lambda: nets.Mixture(8, 2), tables.clouds(), 0.03, 250, 64, optimizer="adam",
            loss=_negative_log),
    "factors": lambda: recipe(
        "factors", "numbers", lambda: nets.Factors(60, 40, 4), tables.ratings(), 0.04, 200, 64, optimizer="adam"),
    "multilabel": lambda: recipe(
        "multilabel", "own", lambda: nets.mlp(20, 32, 5), tables.made("multilabel_classification", n_samples=900,
            n_features=20, n_classes=5), 0.1, 200, 32, optimizer="nesterov", loss=_every_label, fields={"metrics":
            {"label_accuracy": _label_accuracy}}),
    "stream": lambda: recipe(
        "stream", "classes", lambda: nets.mlp(64, 32, 10), tables.digits(), 0.3, 200, 32, optimizer="sgd",
            dataset=Stream),
    "counts": lambda: recipe(
        "counts", "own", lambda: nets.mlp(8, 32, 1, squeeze=True), tables.counts(), 5e-3, 200, 32, optimizer="adam",
            loss=_poisson),
    "wine_adagrad": lambda: recipe(
        "wine_adagrad", "classes", lambda: nets.mlp(13, 32, 16, 3), tables.table("wine"), 0.03, 150, 16,
            optimizer=adagrad),
    "valley": lambda: _steep("valley", nets.Steep, 1000, 1, 0.1, 220, 40, optimizer="sgd", warmup_steps=20),
    "valley_long": lambda: _steep(
        "valley_long", lambda: nets.Steep(steepness=401.0, slow=40.0), 600, 1, 0.05, 640, 20, optimizer="sgd",
            warmup_steps=40),
    "valley_regression": lambda: _steep(
        "valley_regression", lambda: nets.Steep(5, steepness=401.0, slow=30.0), 1200, 6, 0.05, 330, 60, optimizer="sgd",
            warmup_steps=30),
}  # fmt: skip
