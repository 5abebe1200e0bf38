"""The verdicts on one batch, from facts alone: nothing to go by, what does not apply, numbers that are not finite."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from tests.helpers.simulated_records import record, trial
from workbench.topics.one_batch.diagnose import CODES, diagnose_one_batch

RUN: dict[str, Any] = {
    "lr": 0.1, "optimizer": "sgd", "loss": [2.3, 0.2], "gap": [0.0, 0.9], "progress": 0.9, "descent": 0.5, "steps": 60,
    "metrics": [{"accuracy": 0.1}, {"accuracy": 1.0}],
}  # fmt: skip
LAYERS: dict[str, Any] = {
    "inputs": 1.0, "not_in_graph": [], "not_in_forward": [], "equal": [],
    "units": [{"module": "1", "op": "relu", "units": 16, "dead": 0.1}, {"module": "3", "op": "tanh", "units": 16, "saturated": 0.1}],
    "layers": [{"module": name, "size": 1.0, "signal": 0.5, "gradient": 0.1} for name in ("0", "2", "4")],
}  # fmt: skip
SPREAD: dict[str, Any] = {"outputs": 10, "size": 1.0, "mean": 0.0, "spread": 0.5, "inputs_vary": True}
HEALTHY: dict[str, Any] = {
    "examples": 32,
    "modes": {"train_in_eval": {}, "eval_in_train": {}, "change": 0.0, "size": 1.0, "masks": [], "draws": [], "batch_statistics": []},
    "loss": {
        "kind": "classes", "head": "Addmm", "range": None, "reversed": False, "broadcast": None, "classes": 10,
        "escape": {"start": 2.3, "falls": [1.0, 10.0, 100.0], "share": 0.0},
        "floor": 0.0, "ignorant": 2.3, "reachable": 0.0, "floor_ratios": [0.0, 0.0],
    },
    "layers": LAYERS, "fitted": LAYERS, "spread": SPREAD, "fitted_spread": SPREAD,
    "fit": {
        "examples": 32, "parameters": 100, "informative": True, "runs": [RUN], "cut_short": False, "larger_is_better": ["accuracy"],
        "without_gradient": [],
    },
    "coupling": {"own": 1.0, "other": 0.0, "ratio": 0.0},
    "answer": None,
    "unused": [{"tensor": 0, "shape": [12], "axis": 1, "looked": 12, "unused": []}],
}  # fmt: skip
SLICES: dict[str, Any] = {"tensor": 0, "shape": [12, 12], "axis": 1, "looked": 12}


def said(facts: dict[str, Any]) -> dict[str, Any]:
    found = diagnose_one_batch(record([], facts=facts))
    assert tuple(f.code for f in found) == tuple(CODES)
    return {f.code: f for f in found}


def with_part(path: str, value: Any) -> dict[str, Any]:
    """Return the healthy facts with one value changed, `path` as in "fit/runs/0/progress"."""
    facts = copy.deepcopy(HEALTHY)
    *way, last = path.split("/")
    inside: Any = facts
    for key in way:
        inside = inside[int(key) if key.isdigit() else key]
    inside[last] = value
    return said({"one_batch": facts})


STEPS = np.arange(400)
RATES = (0.05, 0.1, 0.2)


@pytest.mark.parametrize(
    ("name", "curves", "status"),
    [
        ("reward without end", [1.0 - lr * STEPS**2 for lr in RATES], "fail"),
        ("exponential", [1.0 - np.expm1(lr * STEPS / 4) for lr in RATES], "fail"),
        ("exactly twice as deep at twice the lr", [-(2.0**k) * (1 + STEPS) for k in range(4)], "fail"),
        ("a deep minimum", [1.0 - 360 * -np.expm1(-lr * STEPS) for lr in RATES], "ok"),  # counts of 100 under Poisson's loss
        ("rounding of one that explodes", [np.full(400, 0.1), 0.1 + 0 * STEPS, np.where(STEPS % 9 == 8, -1.0, 3.0) * np.exp(STEPS / 8)], "ok"),
        ("one lr alone", [1.0 - STEPS**2], "ok"),
        ("a density that grows", [2.8 - 0.02 * STEPS * lr for lr in RATES], "ok"),
        ("not a number", [np.full(400, np.nan) for _ in RATES], "ok"),
        ("too short", [[1.0, -1e9]] * 3, "ok"),
    ],
)  # fmt: skip
def test_a_loss_that_falls_without_end_is_seen_in_the_runs(name: str, curves: list[Any], status: str) -> None:
    rates = RATES if len(curves) < 4 else (0.05, 0.1, 0.2, 0.4)
    study = record([trial(c, lr) for c, lr in zip(curves, rates, strict=False)], facts={"one_batch": HEALTHY})
    assert diagnose_one_batch(study)["loss.unbounded"].status == status, name


@pytest.mark.parametrize(
    ("constant", "first", "status"),
    [(4e-7, 0.5, "fail"), (6e-7, 0.5, "ok"), (None, 0.5, "ok"), (1e-9, None, "ok"), (-3.0, 0.5, "ok")],
)
def test_a_loss_that_a_constant_output_makes_nothing_asks_nothing_of_the_inputs(
    constant: float | None, first: float | None, status: str
) -> None:
    """A squared error over a variance, without the variance's logarithm: the larger the variance, the better."""
    facts = {"one_batch": HEALTHY, "chance_loss": constant, "preflight": {"train": {"loss": first}}}
    assert diagnose_one_batch(record([], facts=facts))["loss.unbounded"].status == status


def test_healthy() -> None:
    assert {f.status for f in said({"one_batch": HEALTHY}).values()} == {"ok"}


def test_without_facts_nothing_is_called_healthy() -> None:
    assert {f.status for f in said({}).values()} == {"not_measured"}


@pytest.mark.parametrize("part", [name for name in HEALTHY if name != "examples"])
def test_a_part_that_could_not_be_looked_at_is_not_measured_and_says_why(part: str) -> None:
    found = with_part(part, {"reason": "ZeroDivisionError: division by zero"}).values()
    unmeasured = [f for f in found if f.status == "not_measured"]
    assert unmeasured
    assert all("division by zero" in f.summary for f in unmeasured)
    assert {f.status for f in found} <= {"ok", "not_measured"}


@pytest.mark.parametrize(
    ("path", "value", "code", "status"),
    [
        ("fit/runs/0/progress", 0.009, "loop.overfit_one_batch", "fail"),
        ("fit/runs/0/progress", 0.011, "loop.overfit_one_batch", "ok"),
        ("fit/runs/0/descent", -1.0, "loop.overfit_one_batch", "fail"),
        ("fit/runs", [RUN | {"progress": 0.0}], "loop.overfit_one_batch", "fail"),
        ("fit/runs", [RUN | {"progress": 0.0}, RUN], "loop.overfit_one_batch", "ok"),
        ("coupling/ratio", 1.1e-3, "loop.batch_dependence", "fail"),
        ("coupling/ratio", 0.9e-3, "loop.batch_dependence", "ok"),
        ("coupling/ratio", None, "loop.batch_dependence", "ok"),
        (
            "unused/0/unused",
            [1, 5],
            "input.unused_features",
            "warn",
        ),  # 2 of 12 columns, or of as many rows of a picture
        ("unused/0/unused", [1], "input.unused_features", "ok"),
        ("unused", [SLICES | {"unused": [1, 5]}], "input.unused_features", "ok"),
        ("unused", [SLICES | {"unused": [1, 5, 7]}], "input.unused_features", "warn"),
        ("unused", [], "input.unused_features", "ok"),
        ("modes/change", 1.1e-3, "evaluation.nondeterministic", "warn"),
        ("modes/change", 0.9e-3, "evaluation.nondeterministic", "ok"),
        ("modes/eval_in_train", {"bn": "frozen"}, "loop.eval_mode_in_training", "ok"),
        ("modes/eval_in_train", {"bn": "batch_norm"}, "loop.eval_mode_in_training", "warn"),
        ("modes/train_in_eval", {"d": "dropout"}, "loop.train_mode_in_eval", "warn"),
        ("modes/train_in_eval", {"bn": "batch_norm"}, "loop.train_mode_in_eval", "fail"),
        ("loss/broadcast", "targets", "loss.broadcast", "fail"),
        ("loss/reversed", True, "loss.unbounded", "fail"),
        ("loss/escape/falls", ["-inf", "inf", None], "loss.unbounded", "ok"),
        ("loss/escape", None, "loss.unbounded", "ok"),
        ("loss/kind", None, "loss.double_softmax", "ok"),
        ("fit/runs/0/metrics", [{"accuracy": 0.1}, {"accuracy": 0.1}], "loss.metric_disagrees", "warn"),
        ("fit/runs/0/loss", [2.3, 2.0], "loss.metric_disagrees", "ok"),
        ("fit/larger_is_better", [], "loss.metric_disagrees", "ok"),
        ("layers/layers/2/signal", 1e-7, "gradients.vanishing", "warn"),
        ("layers/layers/0/gradient", 1e-7, "gradients.vanishing", "warn"),
        ("layers/layers/0/gradient", 0.0, "gradients.vanishing", "ok"),
        ("layers/layers/2/signal", 1e5, "gradients.exploding", "warn"),
        ("layers/layers", [], "gradients.exploding", "ok"),
    ],
)
def test_one_number_decides(path: str, value: Any, code: str, status: str) -> None:
    assert with_part(path, value)[code].status == status


@pytest.mark.parametrize(("parameters", "status"), [(3, "ok"), (4, "fail")])
def test_a_model_of_three_parameters_is_not_asked_to_fit_a_batch(parameters: int, status: str) -> None:
    fit = HEALTHY["fit"] | {"parameters": parameters, "runs": [RUN | {"progress": 0.0}]}
    assert said({"one_batch": HEALTHY | {"fit": fit}})["loop.overfit_one_batch"].status == status


@pytest.mark.parametrize(("ratio", "status"), [(0.9e-6, "fail"), (1.1e-6, "ok")])
def test_outputs_that_differ_by_rounding_alone_are_constant(ratio: float, status: str) -> None:
    flat = SPREAD | {"spread": 2 * ratio, "size": 2.0}
    assert (
        said({"one_batch": HEALTHY | {"spread": flat, "fitted_spread": flat}})["init.constant_output"].status == status
    )


def test_a_loss_that_falls_ever_faster_has_no_bound() -> None:
    away = {"start": 2.0, "falls": [-10.0, -100.0, -1000.0], "share": 1.0}
    assert with_part("loss/escape", away)["loss.unbounded"].status == "fail"
    assert with_part("loss/escape", away | {"share": 0.5})["loss.unbounded"].status == "ok", (
        "as of rewards of both signs"
    )
    settles = {"start": 2.0, "falls": [-10.0, -30.0, -31.0], "share": 1.0}
    assert with_part("loss/escape", settles)["loss.unbounded"].status == "ok"


def test_outputs_are_constant_only_where_they_stay_so() -> None:
    facts = HEALTHY | {"spread": SPREAD | {"spread": 0.0, "size": 0.0}}
    assert said({"one_batch": facts})["init.constant_output"].status == "ok", "a head of zeros moves away"
    facts |= {"fitted_spread": SPREAD | {"spread": 1e-9}}
    assert said({"one_batch": facts})["init.constant_output"].status == "fail"
    facts |= {"spread": SPREAD | {"inputs_vary": False}}
    assert said({"one_batch": facts})["init.constant_output"].status == "ok"


def test_what_a_mode_explains_is_said_once() -> None:
    modes = HEALTHY["modes"] | {"train_in_eval": {"bn": "batch_norm"}, "change": 0.5}
    found = said({"one_batch": HEALTHY | {"modes": modes, "coupling": HEALTHY["coupling"] | {"ratio": 0.3}}})
    assert [code for code, f in found.items() if f.status != "ok"] == ["loop.train_mode_in_eval"]


def test_dead_and_equal_units_have_to_stay_so() -> None:
    dead = copy.deepcopy(LAYERS)
    dead["units"][0]["dead"] = 1.0
    assert said({"one_batch": HEALTHY | {"layers": dead}})["units.dead"].status == "ok"
    assert said({"one_batch": HEALTHY | {"layers": dead, "fitted": dead}})["units.dead"].status == "warn"
    zero = LAYERS | {"equal": [{"name": "4.weight", "zero": True, "product": True}]}
    assert said({"one_batch": HEALTHY | {"layers": zero}})["units.equal"].status == "ok"
    assert said({"one_batch": HEALTHY | {"layers": zero, "fitted": zero}})["units.equal"].status == "fail"
    norm = LAYERS | {"equal": [{"name": "norm.weight", "zero": False, "product": False}]}
    assert said({"one_batch": HEALTHY | {"layers": norm}})["units.equal"].status == "ok"
