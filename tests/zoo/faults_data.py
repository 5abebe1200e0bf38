"""Faults of data, splits, validation and what is chosen on them."""

from __future__ import annotations

import math
import time
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from tests.zoo.faults import fault
from tests.zoo.recipe import Recipe, Stream

UNLEARNABLE = "data.no_signal data.labels lr.nothing_learns evaluation.generalisation_gap"


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _mixed(y: Tensor) -> Tensor:
    return y[torch.randperm(len(y), generator=_generator())]


@fault("data", "data.nonfinite", on="digits_mlp friedman autoencoder")
def nan_input(r: Recipe) -> Recipe:
    def change(x: Tensor) -> Tensor:
        x[len(x) // 2].view(-1)[0] = math.nan
        return x

    return r.inputs(change, validation=False)


@fault("data", "data.nonfinite", on="diabetes sums_lstm factors")
def inf_target(r: Recipe) -> Recipe:
    def change(y: Tensor) -> Tensor:
        y[7] = math.inf
        return y

    return r.targets(change, validation=False)


@fault("data", "data.nonfinite", on="counts linear_numbers")
def nan_validation(r: Recipe) -> Recipe:
    def change(y: Tensor) -> Tensor:
        y[3] = math.nan
        return y

    return r.targets(change, train=False)


@fault("data", "data.scale init.loss", on="wine breast_cancer diabetes")
def column_x10000(r: Recipe) -> Recipe:
    def change(x: Tensor) -> Tensor:
        x[:, 2] *= 1e4
        return x

    return r.inputs(change)


@fault("data", "data.train_validation_shift data.label_shift", on="friedman moons counts")
def split_by_feature(r: Recipe) -> Recipe:
    both = tuple(torch.cat(pair) for pair in zip(r.train, r.validation, strict=True))
    order, held = both[0][:, 0].argsort(), len(r.validation[0])
    return r.but(train=tuple(t[order[:-held]] for t in both), validation=tuple(t[order[-held:]] for t in both))


@fault("data", "data.leakage", on="digits_mlp breast_cancer spirals")
def validation_in_train(r: Recipe) -> Recipe:
    half = len(r.validation[0]) // 2
    return r.but(train=tuple(torch.cat([t, v[:half]]) for t, v in zip(r.train, r.validation, strict=True)))


@fault("data", "data.duplicates data.imbalance data.label_shift", on="digits_mlp friedman multilabel")
def one_row_copied(r: Recipe) -> Recipe:
    rows = torch.arange(len(r.train[0]))
    rows[len(rows) // 4 :] = 3
    return r.rows(rows[torch.randperm(len(rows), generator=_generator())])


class Noisy(TensorDataset):
    """Inputs with noise from a generator that every worker gets a copy of."""

    def __init__(self, *tensors: Tensor) -> None:
        super().__init__(*tensors)
        self.rng = np.random.default_rng(0)

    def __getitem__(self, k: int) -> tuple[Tensor, ...]:
        x, *rest = super().__getitem__(k)
        return (x + 0.1 * torch.as_tensor(self.rng.standard_normal(x.shape), dtype=x.dtype), *rest)


class Slow(TensorDataset):
    """Items that take a while to decode."""

    def __init__(self, *tensors: Tensor, seconds: float) -> None:
        super().__init__(*tensors)
        self.seconds = seconds

    def __getitem__(self, k: int) -> tuple[Tensor, ...]:
        time.sleep(self.seconds)
        return super().__getitem__(k)


@fault("data", "data.label_shift data.imbalance data.train_validation_shift", on="digits_mlp moons tones_gru")
def train_is_skewed(r: Recipe) -> Recipe:
    rare = r.train[-1] >= r.train[-1].max() / 2
    few = torch.rand(len(rare), generator=_generator()) < 0.04
    return r.rows(~rare | few)


@fault("data", "data.imbalance data.label_shift", on="digits_mlp digits_cnn tones_gru")
def class_hardly_there(r: Recipe) -> Recipe:
    last = r.train[-1] == r.train[-1].max()
    return r.rows(~last | (last.cumsum(0) <= 2))


@fault("checkpoints", "checkpoints.selection", on="digits_mlp diabetes multilabel")
def selected_on_test(r: Recipe) -> Recipe:
    half = len(r.validation[0]) // 2
    test = TensorDataset(*(t[:half] for t in r.validation))
    return r.but(validation=tuple(t[half:] for t in r.validation)).having(test_data=test).tuned(select="test/loss")


@fault("evaluation", "evaluation.skew data.label_shift", on="digits_mlp friedman breast_cancer")
def evaluated_on_the_first_rows(r: Recipe) -> Recipe:
    order = r.validation[-1].argsort()
    return r.but(validation=tuple(t[order] for t in r.validation), evaluated=range(len(order) // 3))


def _right(outputs: Tensor, batch: Any) -> Tensor:
    return (outputs.argmax(-1) == batch[1]).float()


@fault("evaluation", "evaluation.minority_counts evaluation.too_small", on="moons")
def chosen_by_a_rare_class(r: Recipe) -> Recipe:
    train, validation = ((t[-1] == 0) | (torch.arange(len(t[-1])) % 12 == 0) for t in (r.train, r.validation))
    chosen = r.rows(train, validation).having(metrics={"balanced_accuracy": _right})
    return chosen.tuned(select="validation/balanced_accuracy", select_mode="max")


OVERFIT = "evaluation.generalisation_gap checkpoints.best_not_last"


@fault("checkpoints", OVERFIT + " data.no_signal", on="wine diabetes tones_gru")
def noisy_labels_memorised(r: Recipe) -> Recipe:
    def change(y: Tensor) -> Tensor:
        wrong = torch.rand(len(y), generator=_generator(1)) < 0.4
        return torch.where(wrong, _mixed(y), y)

    few = torch.arange(min(120, len(r.train[0])))
    return r.targets(change, validation=False).rows(few).tuned(total_steps=4 * r.config.total_steps)


for name, area, accepts, bases, plant in (
    ("shuffled-labels", "data", UNLEARNABLE, "digits_mlp friedman brackets_transformer", lambda r: r.targets(_mixed)),
    ("misaligned-train", "data", UNLEARNABLE + " data.train_validation_shift", "digits_cnn diabetes multilabel",
        lambda r: r.targets(lambda y: y.roll(1, 0), validation=False)),
    ("labels-from-one", "data", "data.labels", "wine digits_cnn_bn tones_gru", lambda r: r.targets(lambda y: y + 1)),
    ("inputs-x255", "data", "data.scale init.loss", "digits_mlp digits_cnn autoencoder",
        lambda r: r.inputs(lambda x: 255 * x)),
    ("validation-not-standardised", "data", "data.train_validation_shift data.scale", "digits_cnn_bn breast_cancer friedman",
        lambda r: r.inputs(lambda x: 6 * x + 5, train=False)),
    ("sorted-stream", "data", "data.unshuffled data.weak_shuffle", "stream digits_cnn tones_gru",
        lambda r: r.rows(r.train[-1].argsort()).but(dataset=partial(Stream, order="stored"))),
    ("small-buffer", "data", "data.weak_shuffle data.unshuffled", "stream moons brackets_transformer",
        lambda r: r.rows(r.train[-1].argsort()).but(dataset=partial(Stream, order=20))),
    ("sorted-stream-watched", "data", "data.unshuffled evaluation.periodic data.weak_shuffle", "tones_gru moons digits_cnn",
        lambda r: r.rows(r.train[-1].argsort()).but(dataset=partial(Stream, order="stored")).tuned(eval_every_steps=2)),
    ("workers-draw-alike", "data", "data.worker_rng", "wine iris friedman",
        lambda r: r.but(dataset=Noisy).having(num_workers=2)),
    ("slow-items", "data", "input.bound", "iris diabetes digits_cnn",
        lambda r: r.but(dataset=partial(Slow, seconds=12.0 / (r.config.total_steps * r.config.batch_size)))),
    ("constant-inputs", "data", "data.no_signal data.scale input.unused_features init.constant_output lr.nothing_learns", "digits_mlp diabetes tones_gru",
        lambda r: r.inputs(torch.ones_like)),
    ("class-missing-in-train", "data", "data.label_shift data.labels data.imbalance data.train_validation_shift", "digits_cnn wine brackets_transformer",
        lambda r: r.rows(r.train[-1] != 1)),
    ("selected-on-train", "checkpoints", "checkpoints.selection", "wine friedman stream",
        lambda r: r.tuned(select="train/loss")),
    ("eight-validation-rows", "evaluation", "evaluation.too_small evaluation.minority_counts", "digits_mlp breast_cancer sums_lstm",
        lambda r: r.but(validation=tuple(t[:8] for t in r.validation))),
    ("chosen-on-twelve-rows", "evaluation", "evaluation.bad_proxy evaluation.too_small", "diabetes breast_cancer multilabel",
        lambda r: r.but(evaluated=range(12)).tuned(eval_every_steps=5, keep_best=50)),
    ("evaluated-once", "evaluation", "evaluation.interval", "digits_mlp sums_lstm text_gru",
        lambda r: r.tuned(eval_every_steps=r.config.total_steps)),
    ("few-rows", "checkpoints", OVERFIT, "digits_cnn breast_cancer friedman",
        lambda r: r.rows(torch.arange(24)).tuned(batch_size=8, total_steps=2 * r.config.total_steps)),
):  # fmt: skip
    fault(area, accepts, on=bases, kind=name)(plant)
