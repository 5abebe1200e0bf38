"""TrainConfig: every field is checked early, and the error names it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import workbench as wb
from workbench.config import TrainConfig, code_hash
from workbench.errors import ConfigError, UnknownNameError

REQUIRED = {"peak_lr": 0.1, "total_steps": 100, "batch_size": 8}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peak_lr": 0.0}, r"peak_lr=0.0 must be a finite number above 0"),
        ({"peak_lr": math.nan}, "peak_lr=nan"),
        ({"total_steps": 0}, "total_steps=0 must be an integer of at least 1"),
        ({"batch_size": True}, "batch_size=True"),
        ({"momentum": 1.0}, "momentum=1.0 must be a finite number at least 0 and below 1"),
        ({"warmup_steps": 100}, "warmup_steps=100 must be below total_steps=100"),
        ({"eval_batch_size": 4}, r"eval_batch_size=4 must be at least batch_size=8.*P2.7"),
        ({"accumulate_steps": 3}, "batch_size=8 must be a multiple of accumulate_steps=3"),
        ({"select": "loss"}, "select='loss' must be 'split/metric'"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainConfig.from_dict(REQUIRED | changes)


@pytest.mark.parametrize(
    ("changes", "suggestion"),
    [
        ({"optimizer": "adamm"}, "Did you mean 'adam'"),
        ({"precision": "bf16"}, "Allowed: bfloat16, float16, float32, float64"),
        ({"learning_rate": 1.0}, "no field 'learning_rate'"),
        ({"warmup_step": 10}, "Did you mean 'warmup_steps'"),
    ],
)
def test_an_unknown_name_suggests_the_nearest(changes: dict[str, object], suggestion: str) -> None:
    with pytest.raises(UnknownNameError, match=suggestion):
        TrainConfig.from_dict(REQUIRED | changes)
    with pytest.raises(UnknownNameError, match=suggestion):
        TrainConfig(**REQUIRED).replace(**changes)
    with pytest.raises(AttributeError, match=r"no field 'lr'\. Did you mean peak_lr"):
        _ = TrainConfig(**REQUIRED).lr


def test_round_trip_through_plain_values() -> None:
    config = TrainConfig(**REQUIRED, optimizer="nadam", max_grad_norm=1.0, schedule="linear")
    assert TrainConfig.from_dict(config.to_dict()) == config
    with pytest.raises(ConfigError, match="needs total_steps, batch_size"):
        TrainConfig.from_dict({"peak_lr": 0.1})


def test_paste_builds_the_same_config() -> None:
    config = TrainConfig(**REQUIRED, optimizer="adamw", weight_decay=0.1, schedule="cosine", eval_every_steps=7)
    assert eval(config.paste(), {"wb": wb}) == config


def _power(exponent: float) -> Any:
    return lambda progress: (1 - progress) ** exponent


def test_the_name_of_a_callable_changes_with_its_code_and_what_it_closes_over() -> None:
    names = [TrainConfig(**REQUIRED, schedule=s).to_dict()["schedule"] for s in (_power(1.0), _power(1.0), _power(2.0))]
    assert names[0] == names[1] != names[2]
    inline = [TrainConfig(**REQUIRED, schedule=s).to_dict()["schedule"] for s in (lambda p: 1.0 - p, lambda p: 1.0)]
    assert inline[0].rpartition("#")[0] == inline[1].rpartition("#")[0]
    assert inline[0] != inline[1]
    factories = [partial(_power, exponent) for exponent in (1.0, 2.0)]
    assert code_hash(factories[0]) != code_hash(factories[1])


def test_defaults_are_resolved() -> None:
    config = TrainConfig(**REQUIRED)
    assert (config.eval_interval, config.checkpoint_interval, config.evaluation_batch) == (10, 10, 32)
    config = config.replace(total_steps=101, eval_batch_size=8, checkpoint_every_steps=3)
    assert (config.eval_interval, config.checkpoint_interval, config.evaluation_batch) == (11, 3, 8)


@pytest.mark.parametrize("given", ["built", "replaced", "from plain values"])
def test_an_unnamed_seed_is_refused_and_both_kinds_are_named(given: str) -> None:
    """P7.7: it would not say whether it is equal on all hosts."""
    fields: dict[str, Any] = {"peak_lr": 0.1, "total_steps": 10, "batch_size": 4}
    build: dict[str, Callable[[], TrainConfig]] = {
        "built": lambda: TrainConfig(**fields, seed=3),
        "replaced": lambda: TrainConfig(**fields).replace(seed=3),
        "from plain values": lambda: TrainConfig.from_dict({**fields, "seed": 3}),
    }
    with pytest.raises(ConfigError, match=r"seed=3 does not say which one.*shared_seed.*per_host_seed"):
        build[given]()
