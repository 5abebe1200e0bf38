"""Healthy trainings on which naive tools raise an alarm (and the bases themselves): nothing may be found here."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.zoo import nets, tables
from tests.zoo.bases import BASES, of
from tests.zoo.recipe import Recipe

CONTROLS: dict[str, Callable[[], Recipe]] = {}


def seeded(name: str, seed: int) -> Recipe:
    """Return a base under another seed of weights and order."""
    return of(name).tuned(shared_seed=seed, per_host_seed=seed)


for _name in BASES:
    for _seed in (0, 1):
        CONTROLS[f"{_name}-seed{_seed}"] = lambda name=_name, seed=_seed: seeded(name, seed)


def control(make: Callable[[], Recipe]) -> Callable[[], Recipe]:
    """Register a control under its function's name."""
    CONTROLS[make.__name__.replace("_", "-")] = make
    return make


@control
def edge_of_stability() -> Recipe:
    """Full batch, tanh: the curvature rises to 2 / lr and stays there."""
    r = of("wine")
    rows = len(r.train[0])
    return r.tuned(optimizer="sgd", peak_lr=0.5, batch_size=rows, total_steps=300)


@control
def large_inputs() -> Recipe:
    """Standardised inputs lie beyond [-1, 1]; these up to 12."""
    heavy = torch.distributions.StudentT(4.0)
    torch.manual_seed(0)
    x = heavy.sample((900, 12))
    y = (x[:, 0] + 0.5 * x[:, 1] * (x[:, 2] > 0)).clamp(-4, 4)
    train, validation = tables.split(x, (y - y.mean()) / y.std())
    build = lambda: nets.mlp(12, 32, 1, squeeze=True)  # noqa: E731
    return of("diabetes").but(build=build, train=train, validation=validation).tuned(optimizer="adam", peak_lr=0.01, total_steps=250)  # fmt: skip


@control
def separable() -> Recipe:
    """Validation accuracy is 100 %, and that is right."""
    data = tables.made("blobs", n_samples=600, centers=4, cluster_std=0.7)
    return of("moons").but(build=lambda: nets.mlp(2, 16, 4), train=data[0], validation=data[1]).tuned(peak_lr=0.15)


@control
def noisy_validation() -> Recipe:
    """A validation set so small that one evaluation jumps, with enough of it to choose a checkpoint."""
    r = of("breast_cancer")
    return r.but(validation=tuple(t[:70] for t in r.validation)).tuned(peak_lr=0.02)


@control
def imbalanced() -> Recipe:
    """One class in seven, separated well, in both splits alike."""
    r = of("moons")

    def kept(y: torch.Tensor) -> torch.Tensor:
        return (y == 0) | (torch.arange(len(y)) % 6 == 0)

    return r.rows(kept(r.train[-1]), kept(r.validation[-1])).tuned(peak_lr=0.1)


@control
def small_data() -> Recipe:
    """Sixty rows, regularised."""
    r = of("wine")
    return r.rows(torch.arange(60)).tuned(optimizer="adamw", weight_decay=0.05, peak_lr=5e-3, total_steps=120)


@control
def zero_head() -> Recipe:
    """The last layer begins at zero: the first gradient of every other layer is 0."""

    def change(m: nn.Module) -> None:
        for p in m[-1].parameters():
            p.data.zero_()

    return of("digits_mlp").model(change)


@control
def zero_branches() -> Recipe:
    """Residual branches that end in zeros at the start."""

    def change(m: nn.Module) -> None:
        for block in nets.layers_of(m, nets.Residual):
            block.branch[-1].weight.data.zero_()

    return of("digits_deep").model(change)


@control
def pretrained_features() -> Recipe:
    """Frozen layers that every build loads the same: an encoder from elsewhere, here the principal components."""
    r = of("digits_mlp")
    _, _, axes = torch.linalg.svd(r.train[0] - r.train[0].mean(0), full_matrices=False)

    def build() -> nn.Module:
        encoder = nn.Linear(64, 24)
        encoder.load_state_dict({"weight": axes[:24].clone(), "bias": torch.zeros(24)})
        return nn.Sequential(encoder.requires_grad_(False), nets.mlp(24, 48, 10))

    return r.but(build=build)


@control
def irreducible_noise() -> Recipe:
    """A third of the labels is random in both splits; what can be learned is learned."""
    r = of("moons")

    def change(y: torch.Tensor) -> torch.Tensor:
        g = torch.Generator().manual_seed(len(y))
        return torch.where(torch.rand(len(y), generator=g) < 0.33, torch.randint(2, (len(y),), generator=g), y)

    return r.targets(change).but(build=lambda: nets.mlp(2, 12, 2)).tuned(peak_lr=0.08, total_steps=200, batch_size=64)


@control
def hard_task() -> Recipe:
    """Overlapping classes: 60 % accuracy is near the best there is."""
    data = tables.made("classification", n_samples=1200, n_features=12, n_informative=8, n_redundant=0, n_classes=4, class_sep=0.35)  # fmt: skip
    return of("moons").but(build=lambda: nets.mlp(12, 32, 4), train=data[0], validation=data[1]).tuned(peak_lr=0.1, schedule="cosine", batch_size=64)  # fmt: skip


@control
def parity() -> Recipe:
    """The loss stays at chance for a while, then falls."""
    g = torch.Generator().manual_seed(0)
    x = (torch.rand(1200, 8, generator=g) > 0.5).float() * 2 - 1
    train, validation = tables.split(x, (x[:, :3].prod(1) > 0).long())
    return of("moons").but(build=lambda: nets.mlp(8, 48, 2), train=train, validation=validation).tuned(optimizer="adam", peak_lr=0.04, total_steps=300)  # fmt: skip


@control
def xor() -> Recipe:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(800, 2, generator=g)
    train, validation = tables.split(x, (x.prod(1) > 0).long())
    return of("moons").but(build=lambda: nets.mlp(2, 32, 2), train=train, validation=validation).tuned(peak_lr=0.06)


@control
def one_epoch() -> Recipe:
    """Every example is seen once."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(8000, 10, generator=g)
    y = (x[:, 0] * x[:, 1] + x[:, 2] + 0.2 * torch.randn(8000, generator=g)) / 1.5
    train, validation = tables.split(x, y)
    build = lambda: nets.mlp(10, 64, 1, squeeze=True)  # noqa: E731
    return (
        of("friedman")
        .but(build=build, train=train, validation=validation)
        .tuned(batch_size=32, total_steps=187, peak_lr=0.04)
    )


@control
def dead_pixels() -> Recipe:
    """Some features never vary; digits have such pixels."""
    r = of("digits_tanh")
    return r.inputs(lambda x: torch.cat([torch.zeros(len(x), 6), x[:, 6:]], 1))


@control
def mixed_scales() -> Recipe:
    """One-hot columns beside standardised ones."""
    r = of("diabetes")
    return r.inputs(
        lambda x: torch.cat([x[:, :1], (x[:, 1:2] > 0).float(), (x[:, 1:2] <= 0).float(), x[:, 2:]], 1)
    ).but(build=lambda: nets.mlp(11, 16, 1, squeeze=True))


@control
def oversampled() -> Recipe:
    """Every training row stands there twice, as after oversampling."""
    r = of("friedman")
    return r.rows(torch.arange(len(r.train[0])).repeat(2))


def _of_the_input(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    return (outputs - batch[0]).square().mean(-1)


CONTROLS |= {
    "lr-of-one": lambda: of("iris").tuned(peak_lr=1.0, batch_size=32),
    # Training loss above validation loss.
    "dropout": lambda:
        of("digits_mlp").but(build=lambda: nets.mlp(64, 96, 64, 10, dropout=0.3)).tuned(optimizer="adam", peak_lr=5e-3),
    "linear-by-design": lambda:
        of("digits_mlp").but(build=lambda: nets.mlp(64, 10)).tuned(optimizer="sgd", peak_lr=0.4),
    "deep-linear": lambda:
        of("linear_numbers").but(build=lambda: nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 1), nn.Flatten(0))),
    "negative-loss": lambda: of("density").tuned(optimizer="adamw", schedule="cosine", weight_decay=1e-3, peak_lr=0.08),
    # Updates go to 0 at the end by design.
    "cosine-tail": lambda: of("digits_mlp").tuned(schedule="cosine", peak_lr=0.1),
    # Small minibatches of a nearly solved task: norms rise while the loss falls.
    "rising-grad-norm": lambda: of("spirals").tuned(batch_size=16, peak_lr=0.03),
    "tied-embeddings": lambda:
        of("text_transformer").but(build=lambda: nets.Transformer(64, 64, width=32, layers=1, length=24, causal=True,
            tied=True)),
    "clipping-rarely-active": lambda: of("digits_mlp").tuned(max_grad_norm=4.0),
    "accumulated": lambda: of("digits_tanh").tuned(accumulate_steps=4),
    # A person's own schedule: two cosine cycles.
    "restarts-planned": lambda:
        of("digits_mlp").tuned(schedule=lambda p: 0.525 + 0.475 * math.cos(math.pi * (2 * p % 1))),
    "large-batch": lambda: of("digits_mlp").tuned(batch_size=256, peak_lr=0.15, total_steps=200),
    "small-batch": lambda: of("digits_mlp").tuned(batch_size=8, peak_lr=0.03, total_steps=400, schedule="cosine"),
    # Every example has a label that nothing is trained on: the largest output is no class.
    "labels-beside-a-reconstruction": lambda:
        of("autoencoder").but(train=tables.digits()[0], validation=tables.digits()[1], loss=_of_the_input),
    "double-precision": lambda: of("digits_tanh").tuned(precision="float64"),
    "layer-norm-recurrent": lambda:
        of("tones_gru").but(build=lambda: nn.Sequential(nets.Recurrent(nn.GRU, 1, 24, 24), nn.LayerNorm(24),
            nn.Linear(24, 3))).tuned(peak_lr=0.04, schedule="cosine", warmup_steps=20, max_grad_norm=5.0),
}  # fmt: skip
