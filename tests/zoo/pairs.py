"""Changes that change nothing: what is found of a training has to be found of it after each of them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.zoo.recipe import Recipe

OF = ("control/breast_cancer-seed0", "control/counts-seed0", "control/digits_mlp-seed0", "lr-x30/moons", "lr-over-30/friedman", "weights-x10/digits_tanh")  # fmt: skip
"""Cases that each change is tried on."""
SAME: dict[str, Callable[[Recipe], Recipe]] = {}


def same(change: Callable[[Recipe], Recipe]) -> Callable[[Recipe], Recipe]:
    """Register a change under its function's name."""
    SAME[change.__name__.replace("_", "-")] = change
    return change


@same
def loss_x100(r: Recipe) -> Recipe:
    """SGD's learning rate is divided by 100; Adam's stays."""
    right, adaptive = r.workload().loss, r.config.optimizer in ("adam", "adamw", "rmsprop")
    scaled = r.wrong(lambda outputs, batch: 100 * right(outputs, batch))
    return scaled if adaptive else scaled.tuned(peak_lr=r.config.peak_lr / 100)


@same
def examples_twice(r: Recipe) -> Recipe:
    return r.rows(torch.arange(len(r.train[0])).repeat(2))


@same
def other_order(r: Recipe) -> Recipe:
    return r.tuned(per_host_seed=17)


@same
def other_weights(r: Recipe) -> Recipe:
    return r.tuned(shared_seed=17)


@same
def rows_permuted(r: Recipe) -> Recipe:
    return r.rows(torch.randperm(len(r.train[0]), generator=torch.Generator().manual_seed(5)))


@same
def float64(r: Recipe) -> Recipe:
    return r.tuned(precision="float64")


@same
def evaluated_more_often(r: Recipe) -> Recipe:
    return r.tuned(eval_every_steps=max(1, r.config.total_steps // 15))


@same
def two_threads(r: Recipe) -> Recipe:
    torch.set_num_threads(2)
    return r
