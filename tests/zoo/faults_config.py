"""Faults of the config: learning rate, schedule, clipping, optimizer constants, batch norm."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo import nets, plain
from tests.zoo.faults import fault
from tests.zoo.recipe import After, Recipe, normed, swap

TOO_HIGH = "lr.too_high stability.divergent stability.early stability.mid"


def _lr(times: float, r: Recipe) -> Recipe:
    return r.tuned(peak_lr=r.config.peak_lr * times)


for times, bases in (
    (10, "digits_mlp density digits_tanh"),
    (30, "moons stream digits_cnn"),
    (100, "friedman text_gru autoencoder"),
):
    fault("lr", TOO_HIGH, on=bases, kind=f"lr-x{times}")(partial(_lr, times))
for times, bases in (
    (30, "digits_mlp friedman tones_gru"),
    (100, "iris text_transformer factors"),
    (300, "diabetes digits_cnn_bn vae"),
):
    fault("lr", "lr.too_low", on=bases, kind=f"lr-over-{times}")(partial(_lr, 1 / times))


for times, bases in ((6, "digits_mlp"), (10, "diabetes"), (12, "moons")):
    fault("lr", "lr.probabilistic stability.headroom " + TOO_HIGH, on=bases, kind=f"lr-at-the-edge-x{times}")(partial(_lr, times))  # fmt: skip


def _schedule(shape: Callable[[float], float], r: Recipe) -> Recipe:
    return r.tuned(schedule=shape, warmup_steps=0)


def early_zero(progress: float) -> float:
    """Return a factor that is 0 after a tenth of the run."""
    return max(0.0, 1 - 10 * progress)


def jumping(progress: float) -> float:
    """Return a factor that is 20 for the second half."""
    return 20.0 if progress >= 0.5 else 1.0


fault("schedule", "schedule.collapse lr.too_low", on="digits_mlp text_gru multilabel", kind="decays-early")(partial(_schedule, early_zero))  # fmt: skip
fault("schedule", "schedule.discontinuity stability.mid stability.spike stability.divergent", on="digits_mlp digits_cnn friedman", kind="jumps-x20")(partial(_schedule, jumping))  # fmt: skip


@fault("schedule", "schedule.collapse lr.too_low", on="stream diabetes factors")
def decay_per_step(r: Recipe) -> Recipe:
    steps = r.config.total_steps
    return r.tuned(schedule=lambda progress: 0.9 ** round(progress * steps), warmup_steps=0)


@fault("schedule", "lr.at_edge warmup.needed warmup.lengthen lr.too_low", on="valley valley_long valley_regression")
def warmup_left_out(r: Recipe) -> Recipe:
    steps = r.config.total_steps - r.config.warmup_steps
    return r.tuned(peak_lr=0.05 * r.config.peak_lr, total_steps=steps, warmup_steps=0)


@fault("clip", "clipping.aggressive clipping.masks_lr lr.too_low", on="digits_tanh stream multilabel")
def clipped_to_nothing(r: Recipe) -> Recipe:
    norms = plain.train(r.workload(), r.config.replace(total_steps=30), 0)["norm"]
    return r.tuned(max_grad_norm=1e-3 * float(torch.tensor(norms).median()))


def _ascends(params: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr, momentum=0.9, maximize=True)


@fault("stability", "stability.spike data.scale stability.mid stability.divergent stability.early", on="digits_mlp diabetes friedman")  # fmt: skip
def few_huge_rows(r: Recipe) -> Recipe:
    def change(x: Tensor) -> Tensor:
        x[:: len(x) // 4] *= 1000
        return x

    return r.inputs(change, validation=False)


@fault(
    "batch_norm",
    "batch_norm.small_batch batch_norm.stale batch_size.noise_scale",
    on="digits_cnn_bn digits_resnet digits_mlp",
    twin=lambda r: normed(r).tuned(eval_batch_size=256),
)
def norm_of_two(r: Recipe) -> Recipe:
    return normed(r).tuned(batch_size=2, eval_batch_size=256)


class Skipping(torch.optim.Adam):
    """Leaves out the steps whose gradients are not finite."""

    def step(self, closure: Any = None) -> Any:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        return super().step(closure) if all(g.isfinite().all() for g in gradients) else None


def _blank(x: Tensor) -> Tensor:
    x[:: len(x) // 4] = 0.0
    return x


def _rms_normed(after: Callable[[Tensor], Tensor], r: Recipe) -> Recipe:
    def change(m: nn.Module) -> None:
        swap(m, nn.Linear, lambda a: After(nn.Linear(a.in_features, a.out_features, bias=False), after=after))

    return r.inputs(_blank, validation=False).model(change).tuned(optimizer=Skipping, peak_lr=0.01, max_grad_norm=5.0)


@fault("stability", "clipping.nonfinite data.nonfinite", on="digits_mlp friedman spirals", twin=partial(_rms_normed, lambda h: h / (h.square().mean(-1, keepdim=True) + 1e-6).sqrt()))  # fmt: skip
def eps_outside_the_root(r: Recipe) -> Recipe:
    return _rms_normed(lambda h: h / (h.square().mean(-1, keepdim=True).sqrt() + 1e-6), r)


@fault("batch_norm", "batch_norm.ghost_size", on="digits_cnn_bn digits_resnet digits_mlp", twin=normed)
def statistics_of_more_than_a_batch(r: Recipe) -> Recipe:
    return normed(r).tuned(bn_stat_examples=4 * r.config.batch_size)


def _norm_momentum(value: float, r: Recipe) -> Recipe:
    def change(m: nn.Module) -> None:
        for norm in nets.layers_of(m, (nn.BatchNorm1d, nn.BatchNorm2d)):
            norm.momentum = value

    return normed(r).model(change)


fault("batch_norm", "batch_norm.cold_ema batch_norm.stale", on="digits_cnn_bn digits_resnet digits_mlp", kind="norm-momentum-0.001", twin=normed)(partial(_norm_momentum, 0.001))  # fmt: skip


def _dropping(share: float, r: Recipe) -> Recipe:
    def layer(inputs: int) -> list[nn.Module]:
        return [nn.Linear(inputs, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(share)]

    build = lambda: nn.Sequential(*layer(r.train[0].shape[1]), *layer(128), nn.Linear(128, 10))  # noqa: E731
    return r.but(build=build).tuned(optimizer="adamw", peak_lr=8e-3, schedule="cosine", total_steps=400)


fault("init", "units.dropped evaluation.underfits", on="digits_mlp", kind="keep-probability-as-dropout", twin=partial(_dropping, 0.05))(partial(_dropping, 0.95))  # fmt: skip


for name, area, accepts, bases, plant in (
    ("warmup-all-along", "schedule", "warmup.over_cap lr.too_low warmup.shortest", "iris digits_tanh multilabel",
        lambda r: r.tuned(warmup_steps=r.config.total_steps - 1, schedule="constant")),
    ("clipped-at-high-lr", "clip", "clipping.cures clipping.masks_lr clipping.aggressive lr.too_high", "digits_mlp diabetes digits_cnn",
        lambda r: r.tuned(peak_lr=30 * r.config.peak_lr, max_grad_norm=1.0)),
    ("cosine-over-a-quarter", "schedule", "schedule.restarts", "digits_mlp digits_cnn_bn text_gru",
        lambda r: r.tuned(schedule=lambda p: 0.5 + 0.5 * math.cos(4 * math.pi * p), warmup_steps=0)),
    ("maximising", "optimizer", "loop.overfit_one_batch", "digits_mlp diabetes tones_gru",
        lambda r: r.tuned(optimizer=_ascends)),
    ("decay-dominates", "optimizer", "optimizers.weight_decay_shrinks", "digits_mlp digits_deep diabetes",
        lambda r: r.tuned(weight_decay=10.0 if r.config.optimizer == "adamw" else 1.0)),
    ("eps-of-one", "optimizer", "optimizers.constants lr.too_low", "wine digits_cnn friedman",
        lambda r: r.tuned(eps=1.0)),
    ("momentum-999", "optimizer", "optimizers.constants " + TOO_HIGH + " stability.spike stability.early_recovers", "digits_mlp moons digits_cnn_bn",
        lambda r: r.tuned(momentum=0.999)),
    ("evaluated-among-more", "evaluation", "evaluation.batch_size", "contrastive",
        lambda r: r.tuned(eval_batch_size=256)),
):  # fmt: skip
    fault(area, accepts, on=bases, kind=name)(plant)
