"""Real and made data, standardised and split; each function returns ((train tensors), (validation tensors))."""

from __future__ import annotations

import math
from functools import cache

import torch
from sklearn import datasets
from torch import Tensor
from torch.nn import functional as F

from tests.zoo.recipe import Tensors

Splits = tuple[Tensors, Tensors]


def split(*tensors: Tensor, share: float = 0.25, seed: int = 0) -> Splits:
    """Return a random split of the rows."""
    rows = torch.randperm(len(tensors[0]), generator=torch.Generator().manual_seed(seed))
    held = int(share * len(rows))
    return tuple(t[rows[held:]] for t in tensors), tuple(t[rows[:held]] for t in tensors)


def standard(train: Tensor, validation: Tensor) -> tuple[Tensor, Tensor]:
    """Return both by mean and deviation of the training rows."""
    mean, sd = train.mean(0), train.std(0).clamp(min=1e-6)
    return (train - mean) / sd, (validation - mean) / sd


@cache
def table(name: str) -> Splits:
    """Return a table of scikit-learn by the name of its loader; numeric targets are standardised."""
    bunch = getattr(datasets, f"load_{name}")()
    (x, y), (vx, vy) = split(torch.tensor(bunch.data).float(), torch.tensor(bunch.target))
    x, vx = standard(x, vx)
    y, vy = standard(y.float(), vy.float()) if name == "diabetes" else (y.long(), vy.long())
    return (x, y), (vx, vy)


@cache
def digits(flat: bool = True, rows: int = 1797) -> Splits:
    """Return the digits, by one mean and deviation of all training pixels."""
    bunch = datasets.load_digits()
    (x, y), (vx, vy) = split(torch.tensor(bunch.images[:rows]).float(), torch.tensor(bunch.target[:rows]).long())
    mean, sd = x.mean(), x.std()
    shape = (-1, 64) if flat else (-1, 1, 8, 8)
    return (((x - mean) / sd).reshape(shape), y), (((vx - mean) / sd).reshape(shape), vy)


@cache
def pixels(views: bool = False) -> Splits:
    """Return digits in [0, 1] as input and target, or as two noisy views of one image."""
    bunch = datasets.load_digits()
    x = torch.tensor(bunch.images).float().reshape(-1, 64) / 16
    if not views:
        return split(x, x)
    g = torch.Generator().manual_seed(1)
    return split(*[(x - 0.3) / 0.37 + 0.3 * torch.randn(x.shape, generator=g) for _ in range(2)])


@cache
def made(name: str, seed: int = 0, **options: float) -> Splits:
    """Return a generator's data of scikit-learn (`make_<name>`), standardised where it is numeric."""
    x, y = getattr(datasets, f"make_{name}")(random_state=seed, **options)
    x, y = torch.tensor(x).float(), torch.tensor(y)
    (x, y), (vx, vy) = split(x, y)
    x, vx = standard(x, vx)
    if y.dim() == 2:
        return (x, y.float()), (vx, vy.float())
    y, vy = standard(y.float(), vy.float()) if y.dtype.is_floating_point else (y.long(), vy.long())
    return (x, y), (vx, vy)


@cache
def spirals(arms: int = 3, rows: int = 900, noise: float = 0.12) -> Splits:
    """Return points on spiral arms."""
    g = torch.Generator().manual_seed(0)
    y = torch.arange(rows) % arms
    t = torch.rand(rows, generator=g).sqrt()
    angle = 2 * math.pi * (0.75 * t + y / arms)
    x = 2 * t[:, None] * torch.stack([angle.cos(), angle.sin()], 1) + noise * torch.randn(rows, 2, generator=g)
    return split(x, y)


@cache
def tones(rows: int = 800, length: int = 16) -> Splits:
    """Return noisy series of three wave forms, shape (rows, length, 1), to be told apart."""
    g = torch.Generator().manual_seed(0)
    y = torch.arange(rows) % 3
    phase, period = torch.rand(rows, 1, generator=g), 5 + 3 * torch.rand(rows, 1, generator=g)
    t = (torch.arange(length) / period + phase) % 1
    waves = torch.stack([(2 * math.pi * t).sin(), 2 * (t < 0.5).float() - 1, 2 * t - 1])
    x = waves[y, torch.arange(rows)] + 0.25 * torch.randn(rows, length, generator=g)
    return split(x[..., None], y)


@cache
def sums(rows: int = 800, length: int = 12) -> Splits:
    """Return series of numbers with a marker, shape (rows, length, 2); the target is the mean of those marked."""
    g = torch.Generator().manual_seed(0)
    values = torch.randn(rows, length, generator=g)
    marks = (torch.rand(rows, length, generator=g) < 0.3).float()
    y = (values * marks).sum(1)
    return split(torch.stack([values, marks], -1), y / y.std())


@cache
def brackets(rows: int = 1000, length: int = 12) -> Splits:
    """Return token rows of 8 symbols; the class is the symbol out of the first four that is most frequent."""
    g = torch.Generator().manual_seed(0)
    x = torch.randint(8, (rows, length), generator=g)
    y = (F.one_hot(x, 8)[..., :4].sum(1) + 1e-3 * torch.rand(rows, 4, generator=g)).argmax(-1)
    return split(x, y)


@cache
def text(rows: int = 1200, length: int = 24) -> Splits:
    """Return pieces of the documentation that comes with Python, as (tokens, next tokens) over 64 symbols."""
    import pydoc_data.topics

    source = "".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)).lower()
    common = " etaoinsrhldcumpfgybwvkxqzj\n.,_'`\"()[]{}:;=*-+/\\0123456789<>@#%!&|~^$?"[:64]
    codes = torch.tensor([max(common.find(c), 0) for c in source[: 3 * rows * (length + 1)]])
    pieces = codes[: len(codes) // (length + 1) * (length + 1)].view(-1, length + 1)[:rows]
    return split(pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous())


@cache
def ratings(users: int = 60, items: int = 40, rows: int = 1800) -> Splits:
    """Return (user, item) pairs and a rating of rank 3 with noise."""
    g = torch.Generator().manual_seed(0)
    u, i = torch.randn(users, 3, generator=g), torch.randn(items, 3, generator=g)
    pairs = torch.randperm(users * items, generator=g)[:rows]
    pairs = torch.stack([pairs // items, pairs % items], 1)
    y = (u[pairs[:, 0]] * i[pairs[:, 1]]).sum(1) / math.sqrt(3) + 0.3 * torch.randn(rows, generator=g)
    return split(pairs, y)


@cache
def counts(rows: int = 900, inputs: int = 8) -> Splits:
    """Return counts whose log rate is a smooth function of the inputs."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(rows, inputs, generator=g)
    rate = (0.8 + 0.6 * x[:, 0] + 0.5 * x[:, 1].sin() - 0.4 * x[:, 2]).clamp(max=3).exp()
    return split(x, torch.poisson(rate, generator=g))


@cache
def clouds(rows: int = 1000) -> Splits:
    """Return points of five tight clouds in the plane: their log density is positive, the loss negative."""
    g = torch.Generator().manual_seed(0)
    centres = 1.5 * torch.randn(5, 2, generator=g)
    return split(centres[torch.arange(rows) % 5] + 0.08 * torch.randn(rows, 2, generator=g))
