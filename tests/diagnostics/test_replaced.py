"""Settings far from usual: which of them are worth a run, and what that run has to gain before one is blamed."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from tests.helpers.simulated_records import evaluations, record, trial
from workbench.curves.judged import judged
from workbench.curves.replaced import CODES, diagnose_replaced, replaced
from workbench.record.json_values import dumps
from workbench.topics.recommendation.replaced import constants_of, suspects

STEPS = 200
CONSTANTS, DECAY = CODES


def falling(end, *, start=2.3):
    return end + (start - end) * np.exp(-np.arange(STEPS) / 20)


def one(*, norms=None, **config):
    """The baseline of a study, and its constants."""
    columns = {"param_norm": np.ones(STEPS), "update_norm": np.full(STEPS, 0.01), "grad_norm": np.ones(STEPS)} | (
        norms or {}
    )
    own = {"optimizer": "momentum", "batch_size": 50, "warmup_steps": 0} | config
    r = record(
        [trial(falling(0.1), own.pop("peak_lr", 0.1), stage="baseline", columns=columns, total_steps=STEPS)], **own
    )
    return judged(r).curves[0], constants_of(r.config)


def asked(*, noise_scale=None, **config):
    return [(s.field, s.usual) for s in suspects(*one(**config), noise_scale=noise_scale)]


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"weight_decay": 0.3}, "weight_decay"),
        ({"optimizer": "adam", "weight_decay": 0.3}, "weight_decay"),
        ({"optimizer": "adamw", "weight_decay": 3.0, "peak_lr": 1e-3}, "weight_decay"),
        ({"optimizer": "adam", "eps": 1.0}, "eps"),
        ({"optimizer": "adam", "eps": 0.0}, "eps"),
        ({"optimizer": "adam", "beta2": 0.1}, "beta2"),
        ({"optimizer": "adam", "beta1": 0.999}, "beta1"),
        ({"optimizer": "rmsprop", "rho": 0.9999}, "rho"),
        ({"momentum": 0.999}, "momentum"),
        ({"warmup_steps": 150}, "warmup_steps"),
        ({"batch_size": 1, "noise_scale": 100.0}, "batch_size"),
    ],
)  # fmt: skip
def test_what_is_far_from_usual_is_worth_a_run(config, field):
    assert [name for name, _ in asked(**config)] == [field]


@pytest.mark.parametrize(
    "config",
    [
        {}, {"weight_decay": 5e-4}, {"optimizer": "adamw", "weight_decay": 0.1, "peak_lr": 1e-3}, {"optimizer": "adamw", "beta2": 0.95},
        {"optimizer": "sgd", "momentum": 0.999}, {"optimizer": "sgd", "eps": 1.0}, {"warmup_steps": 20}, {"batch_size": 1, "noise_scale": 8.0},
        {"batch_size": 32, "noise_scale": 5000.0}, {"optimizer": "rmsprop", "rho": 0.99}, {"momentum": 0.95},
    ],
)  # fmt: skip
def test_what_people_train_with_costs_no_run(config):
    """A constant that the rule does not have is none of its settings."""
    assert asked(**config) == []


HALF_MOVED, HARDLY_MOVED, FLAT = ({"update_norm": np.full(STEPS, 0.02)}, {"update_norm": np.full(STEPS, 0.001)}, {"grad_norm": np.full(STEPS, 0.001)})  # fmt: skip


@pytest.mark.parametrize(
    ("config", "field", "usual", "far"),
    [
        ({"optimizer": "adam"}, "eps", (1e-12, 1e-4), (0.9e-12, 1.1e-4)),
        ({"optimizer": "adam"}, "beta2", (0.5, 0.9995), (0.49, 0.9996)),
        ({"optimizer": "adam"}, "beta1", (0.95,), (0.951,)),
        ({"optimizer": "rmsprop"}, "rho", (0.5, 0.995), (0.49, 0.996)),
        ({}, "momentum", (0.95,), (0.951,)),
        ({}, "warmup_steps", (20,), (21,)),
        ({"noise_scale": 100.0}, "batch_size", (5,), (3, 4)),
        ({"batch_size": 4}, "noise_scale", (63.0,), (64.0,)),
        # 0.05 of the gradient, or where it is decoupled of the update: 200 steps at lr 0.001 with weights 50 times as long
        ({}, "weight_decay", (0.045,), (0.055,)),
        ({"optimizer": "adam"}, "weight_decay", (0.045,), (0.055,)),
        ({"optimizer": "adamw", "peak_lr": 1e-3, "norms": HALF_MOVED}, "weight_decay", (0.9,), (1.1,)),
        # 0.1 in all: 200 steps at lr 0.001, or at lr 0.1 with a momentum that makes ten of each
        ({"optimizer": "adamw", "peak_lr": 1e-3, "norms": HARDLY_MOVED}, "weight_decay", (0.45,), (0.55,)),
        ({"norms": FLAT}, "weight_decay", (4.5e-4,), (5.5e-4,)),
    ],
)  # fmt: skip
def test_how_far_is_far(config, field, usual, far):
    name = "batch_size" if field == "noise_scale" else field
    for values, found in ((usual, []), (far, [name])):
        for value in values:
            assert [name for name, _ in asked(**config, **{field: value})] == found, value


@pytest.mark.parametrize(
    ("steps", "momentum", "found"),
    [(400, 0.973, []), (400, 0.976, ["momentum"]), (100, 0.94, []), (100, 0.96, ["momentum"])],
)
def test_a_memory_of_more_than_a_tenth_of_the_steps_is_long_and_that_of_a_usual_constant_is_none(
    steps, momentum, found
):
    """1 / (1 - 0.975) is 40, and 1 / (1 - 0.94) is 17."""
    r = record([trial(falling(0.1), 0.1, total_steps=steps)], optimizer="momentum", batch_size=50, momentum=momentum)
    assert [s.field for s in suspects(judged(r).curves[0], constants_of(r.config))] == found


def test_decay_that_gradients_outweigh_is_no_suspect():
    """The same sum of lr * weight_decay, with gradients a hundred times as long."""
    assert asked(weight_decay=0.3, norms={"grad_norm": np.full(STEPS, 100.0)}) == []


def study(own, other, *, validation=None, code=DECAY, field="weight_decay", value=0.3, usual=0.0, full_batch=True):
    trials = [trial(own, 0.1, stage="baseline", **{field: value}), trial(other, 0.1, stage="replaced")]
    evals = []
    for number, ends in enumerate(validation or ()):
        evals += evaluations(number, [0, STEPS], [2.3, ends], split="validation")
    rows = [{"code": code, "field": field, "own": value, "usual": usual, "baseline": 0, "trial": 1}]
    facts = {"replaced": {"constants": {field: value}, "rows": rows}}
    return record(trials, evals=evals, facts=facts, full_batch=full_batch, **{field: value})


LOST = np.full(STEPS, math.nan)
LOST[:5] = 2.3


@pytest.mark.parametrize(
    ("own", "validation", "status"),
    [
        (falling(2.29), (2.29, 0.2), "fail"),
        (falling(1.2), (1.2, 0.2), "warn"),
        (falling(0.2), (0.15, 0.2), "ok"),  # a worse fit that generalises better is what decay is for
        (falling(0.12), (0.22, 0.2), "ok"),
        (falling(0.05), (9.0, 0.2), "fail"),  # a perfect fit to the training data, and nothing else
        (LOST, (math.nan, 0.2), "fail"),
        (falling(1.2), None, "warn"),
        # of the 2.2 that are learned, or of 2.1 by a metric that a better fit does not make up for
        (falling(0.298), None, "ok"), (falling(0.342), None, "warn"), (falling(2.058), None, "warn"), (falling(2.102), None, "fail"),
        (falling(0.05), (1.23, 0.2), "ok"), (falling(0.05), (1.27, 0.2), "warn"),
    ],
    ids=["nothing", "half", "regularises", "little", "overflows", "not finite", "no validation", "0.09", "0.11", "0.89", "0.91",
         "metric 0.49", "metric 0.51"],
)  # fmt: skip
@pytest.mark.parametrize("code", CODES)
def test_what_the_run_with_the_usual_value_gains_decides(own, validation, status, code):
    field, value, usual = ("weight_decay", 0.3, 0.0) if code == DECAY else ("eps", 1.0, 1e-8)
    found = diagnose_replaced(
        study(own, falling(0.1), validation=validation, code=code, field=field, value=value, usual=usual)
    )
    assert found[code].status == status
    assert bool(found[code].advice) is (status != "ok")
    assert f"{value:g}" in found[code].summary
    (other,) = set(CODES) - {code}
    assert found[other].status == "ok"


def test_a_run_that_learns_nothing_either_blames_nobody():
    assert diagnose_replaced(study(falling(2.29), falling(2.31)))[DECAY].status == "ok"


@pytest.mark.parametrize(("shift", "costs"), [(0.2, False), (0.3, True)])
def test_a_difference_within_its_noise_is_none(shift, costs):
    """0.27 is 1.6 standard errors of 0.169, and 0.37 is 2.2; where every batch is the whole, there is no such noise."""
    noise = 0.5 * np.random.default_rng(0).standard_normal((2, STEPS))
    runs = (falling(0.8 + shift) + noise[0], falling(0.8) + noise[1])
    assert replaced(study(*runs, full_batch=False))[DECAY][0].costs is costs
    assert replaced(study(*runs))[DECAY][0].costs


def test_larger_is_better_where_the_metric_says_so():
    trials = [trial(falling(1.5), 0.1, stage="baseline"), trial(falling(0.1), 0.1, stage="replaced")]
    evals = [
        row
        for n, end in ((0, 0.3), (1, 0.9))
        for row in evaluations(n, [0, STEPS], [0.1, end], split="validation", metric="accuracy")
    ]
    rows = [{"code": DECAY, "field": "weight_decay", "own": 0.3, "usual": 0.0, "baseline": 0, "trial": 1}]
    r = record(
        trials,
        evals=evals,
        facts={"replaced": {"constants": {}, "rows": rows}},
        select="validation/accuracy",
        select_mode="max",
    )
    assert replaced(r)[DECAY][0].lost == pytest.approx(0.6 / 0.8)


@pytest.mark.parametrize("facts", [{}, {"replaced": None}, {"replaced": {"constants": {}, "rows": []}}])
def test_every_code_once_and_valid_json(facts):
    found = diagnose_replaced(record([], facts=facts))
    assert tuple(f.code for f in found) == CODES
    assert {f.status for f in found} == ({"not_measured"} if not facts.get("replaced") else {"ok"})
    json.loads(dumps(found.to_dict()), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
