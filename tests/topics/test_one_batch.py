"""One batch before training: planted faults are named, healthy twins are silent, nothing is left changed."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from tests.helpers.simulated_records import record, trial
from tests.helpers.workloads import Having, small_workload
from workbench.config import TrainConfig
from workbench.record.json_values import to_json
from workbench.topics.one_batch.batch import first_batch
from workbench.topics.one_batch.collect import collect_one_batch
from workbench.topics.one_batch.collect_preflight import collect_preflight
from workbench.topics.one_batch.diagnose import CODES, diagnose_one_batch
from workbench.topics.one_batch.diagnose_preflight import diagnose_preflight
from workbench.topics.one_batch.losses import find_loss
from workbench.topics.one_batch.probes import find_coupling, find_layers, find_modes, find_spread, find_unused
from workbench.workloads.base import Workload
from workbench.workloads.losses import classification, regression
from workbench.workloads.registry import load_workload

CPU = torch.device("cpu")
DRAWS = torch.Generator().manual_seed(0)
X = torch.randn(160, 12, generator=DRAWS)
CLASS = (X[:, :4] @ torch.randn(4, 3, generator=DRAWS)).argmax(1)
NUMBER = X[:, 0] + X[:, 1] * X[:, 2] + 0.1 * torch.randn(160, generator=DRAWS)
SERIES = torch.randn(160, 9, 2, generator=DRAWS)


def mlp(inputs: int = 12, outputs: int = 3, *, act: Callable[[], nn.Module] = nn.ReLU, depth: int = 2, extra: Any = ()) -> nn.Sequential:  # fmt: skip
    layers: list[nn.Module] = []
    for k in range(depth):
        layers += [nn.Linear(24 if k else inputs, 24), *(make() for make in extra), act()]
    return nn.Sequential(*layers, nn.Linear(24, outputs))


def changed(model: nn.Module, change: Callable[[Tensor], Any], *, least_dim: int = 2) -> nn.Module:
    with torch.no_grad():
        [change(p) for p in model.parameters() if p.dim() >= least_dim]
    return model


def settings(**given: Any) -> TrainConfig:
    return TrainConfig(**({"peak_lr": 3e-3, "total_steps": 50, "batch_size": 32, "optimizer": "adam"} | given))


def classes(build: Callable[[], nn.Module], x: Tensor = X, y: Tensor = CLASS, loss: Any = None, **config: Any) -> Workload:  # fmt: skip
    data = TensorDataset(x, y)
    made = classification(name="c", build_model=build, train_data=data, validation_data=data, config=settings(**config))
    return made if loss is None else made.replace(loss=loss, metrics={})


def numbers(build: Callable[[], nn.Module], x: Tensor = X, y: Tensor = NUMBER, loss: Any = None) -> Workload:
    data = TensorDataset(x, y)
    made = regression(name="r", build_model=build, train_data=data, validation_data=data, config=settings())
    return made if loss is None else made.replace(loss=loss, metrics={})


def alarms(workload: Workload) -> dict[str, str]:
    """Return code -> status of everything that is not ok, of the pre-flight and of one batch."""
    facts = {
        "preflight": to_json(collect_preflight(workload, workload.config, CPU)),
        "one_batch": to_json(collect_one_batch(workload, workload.config, CPU)),
    }
    study = record([], facts=facts)
    found = [*diagnose_preflight(study), *diagnose_one_batch(study)]
    assert [f.code for f in found[5:]] == list(CODES)
    return {f.code: f.status for f in found if f.status != "ok"}


def flat(model: nn.Module) -> nn.Sequential:
    return nn.Sequential(model, nn.Flatten(0))


def cross_entropy(outputs: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(outputs, batch[1], reduction="none")


def eval_inside(module: Any, x: Tensor) -> Any:
    module.eval()
    return module.m(x)


FAULTS: dict[str, tuple[str, Callable[[], Workload]]] = {
    "softmax over axis 0": ("loop.batch_dependence", lambda: classes(lambda: Having(lambda s, x: s.m(x).log_softmax(0), m=mlp()))),
    "half of the columns": ("input.unused_features", lambda: classes(lambda: Having(lambda s, x: s.m(x[:, :6]), m=mlp(6)))),
    "input ignored": ("init.constant_output", lambda: classes(lambda: Having(lambda s, x: s.m(torch.zeros_like(x)), m=mlp()))),
    "dropout in evaluation": ("evaluation.nondeterministic", lambda: classes(lambda: Having(lambda s, x: s.m(F.dropout(x, 0.4)), m=mlp()))),
    "eval in forward": ("loop.eval_mode_in_training", lambda: classes(lambda: Having(eval_inside, m=mlp(extra=[lambda: nn.BatchNorm1d(24)])))),
    "dead relu": ("units.dead", lambda: classes(lambda: changed(mlp(), lambda p: p.fill_(-9.0) if p.dim() == 1 else None, least_dim=1))),
    "saturated tanh": ("units.saturated", lambda: classes(lambda: changed(mlp(act=nn.Tanh), lambda p: p.mul_(60)))),
    "nearly all dropped": ("units.dropped", lambda: classes(lambda: mlp(extra=[lambda: nn.Dropout(0.95)]))),
    "no activation": ("units.linear", lambda: classes(lambda: mlp(act=nn.Identity))),
    "all zero": ("units.equal", lambda: classes(lambda: changed(mlp(), lambda p: p.zero_(), least_dim=1))),
    "huge weights": ("gradients.exploding", lambda: classes(lambda: changed(mlp(depth=4), lambda p: p.mul_(20)))),
    "huge outputs": ("init.loss", lambda: numbers(lambda: flat(changed(mlp(12, 1), lambda p: p.mul_(15))))),
    "softmax in the model": ("loss.double_softmax", lambda: classes(lambda: nn.Sequential(mlp(), nn.Softmax(-1)))),
    "softmax in the loss": ("loss.double_softmax", lambda: classes(mlp, loss=lambda o, b: cross_entropy(o.softmax(-1), b))),
    "sigmoid head": ("loss.output_range", lambda: numbers(lambda: flat(nn.Sequential(mlp(12, 1), nn.Sigmoid())))),
    "broadcast over targets": ("loss.broadcast", lambda: numbers(lambda: mlp(12, 1), loss=lambda o, b: (o - b[1]).square().mean(1))),
    "sign of an error": ("loss.unbounded", lambda: classes(mlp, loss=lambda o, b: -cross_entropy(o, b))),
    "sign of a probability's loss": ("loss.unbounded", lambda: numbers(lambda: flat(nn.Sequential(mlp(12, 1), nn.Sigmoid())), y=(NUMBER > 0).float(), loss=lambda o, b: -F.binary_cross_entropy(o, b[1], reduction="none"))),
    "ascent": ("loop.overfit_one_batch", lambda: classes(mlp, optimizer=lambda p, lr: torch.optim.SGD(p, lr, maximize=True))),
    "detached": ("loop.no_gradient", lambda: classes(lambda: Having(lambda s, x: s.b(s.a(x).detach()), a=nn.Linear(12, 24), b=mlp(24)))),
    "forgotten layer": ("loop.no_gradient", lambda: classes(lambda: Having(lambda s, x: s.m(x), m=mlp(), left=nn.Linear(30, 30)))),
    "optimizer of the head": ("loop.no_update", lambda: classes(mlp, optimizer=lambda p, lr: torch.optim.Adam(list(p)[-2:], lr))),
}  # fmt: skip


WORKING: dict[str, Callable[[], Workload]] = {
    "relu": lambda: classes(mlp),
    "zero branch": lambda: classes(lambda: Having(lambda s, x: s.c(x + s.b(s.a(x).relu())), a=nn.Linear(12, 12), b=changed(nn.Linear(12, 12), lambda p: p.zero_(), least_dim=1), c=nn.Linear(12, 3))),
    "gru": lambda: classes(lambda: Having(lambda s, x: s.b(s.a(x)[0][:, -1]), a=nn.GRU(2, 16, batch_first=True), b=nn.Linear(16, 3)), SERIES),
    "frozen on purpose": lambda: classes(lambda: Having(lambda s, x: s.b(s.a(x).relu()), a=nn.Linear(12, 24).requires_grad_(False), b=nn.Linear(24, 3)), peak_lr=1e-2),
    **{name: (lambda name=name: load_workload(name)) for name in ("digits_cnn", "quadratic")},
}  # fmt: skip


def averaged(workload: Workload) -> Workload:
    """Return the workload with one loss for a whole batch, as most people write it."""
    return workload.replace(loss=lambda outputs, batch: workload.loss(outputs, batch).mean(), metrics={})


@pytest.mark.parametrize("mean", [False, True], ids=["each", "mean"])
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(name: str, mean: bool) -> None:
    code, workload = FAULTS[name]
    assert alarms(averaged(workload()) if mean else workload()).get(code) in ("warn", "fail")


@pytest.mark.parametrize("mean", [False, True], ids=["each", "mean"])
@pytest.mark.parametrize("name", WORKING)
def test_a_healthy_training_is_silent(name: str, mean: bool) -> None:
    workload = WORKING[name]()
    assert alarms(averaged(workload) if mean else workload) == {}


def pinball(error: Tensor) -> Tensor:
    return torch.maximum(0.9 * error, -0.1 * error)


COSTS = {
    "cost": lambda o, b: 9 * pinball(b[1] - o),
    "absolute": lambda o, b: (o - b[1]).abs(),
    "logarithms": lambda o, b: (o.clamp_min(-0.9).log1p() - b[1].log1p()).square(),
    "covered": lambda o, b: (b[1] <= o).double(),
    "low": lambda o, b: pinball(o - b[1]),
}


@pytest.mark.parametrize(("metrics", "disagrees"), [
    ("cost", True), ("cost absolute", True), ("cost low", False), ("absolute", False), ("logarithms", False), ("covered", False),
])  # fmt: skip
def test_a_quantile_loss_with_the_sign_of_the_error_swapped_wants_what_no_metric_wants(metrics: str, disagrees: bool) -> None:  # fmt: skip
    y = (NUMBER - NUMBER.min()) / 5
    workload = numbers(lambda: flat(mlp(12, 1)), y=y, loss=lambda o, b: pinball(o - b[1]))
    found = alarms(workload.replace(metrics={name: COSTS[name] for name in metrics.split()}))
    assert found.get("loss.metric_disagrees") == ("warn" if disagrees else None)
    right = workload.replace(loss=lambda o, b: pinball(b[1] - o), metrics={"cost": COSTS["cost"]})
    assert "loss.metric_disagrees" not in alarms(right)


@pytest.mark.parametrize(("logarithm", "metric", "disagrees"), [
    (True, lambda o, b: (o - b[1]).abs(), True), (False, lambda o, b: (o - b[1]).abs(), False), (True, lambda o, b: (o.exp() - b[1]).abs(), False),
])  # fmt: skip
def test_a_loss_that_takes_logarithms_is_least_elsewhere_than_a_metric_of_rates(logarithm: bool, metric: Any, disagrees: bool) -> None:  # fmt: skip
    counts = (3 * (NUMBER - NUMBER.min())).round()
    workload = numbers(lambda: flat(nn.Sequential(mlp(12, 1), nn.Softplus())), y=counts, loss=lambda o, b: F.poisson_nll_loss(o, b[1], log_input=logarithm, reduction="none"))  # fmt: skip
    assert alarms(workload.replace(metrics={"mae": metric})).get("loss.metric_disagrees") == (
        "warn" if disagrees else None
    )


def test_a_loss_that_compares_two_sets_of_values_is_no_broadcast() -> None:
    workload = numbers(
        lambda: flat(mlp(12, 1)), loss=lambda o, b: (o.sort().values - b[1].sort().values).square().mean()
    )
    assert "loss.broadcast" not in alarms(workload)


def test_nothing_that_is_asked_of_one_batch_changes_it() -> None:
    workload = classes(lambda: mlp(extra=[lambda: nn.BatchNorm1d(24), lambda: nn.Dropout(0.2)]))
    one = first_batch(workload, workload.config, CPU)
    before = [t.clone() for t in one.model.state_dict().values()]
    seen = [t.clone() for t in one.batch]
    assert (coupling := find_coupling(one))["ratio"] == pytest.approx(0.0, abs=1e-6), "an example is its own affair"
    assert coupling["own"] > 1e-3
    for look in (find_loss, find_layers, find_spread, find_modes, find_coupling, find_unused):
        look(one)
        assert all(map(torch.equal, before, one.model.state_dict().values())), look.__name__
        assert all(map(torch.equal, seen, one.batch))


def test_the_callers_random_state_is_untouched_and_the_facts_are_the_same_again() -> None:
    workload = small_workload(build_model=lambda: nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1)))
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    before = (torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate())
    facts = to_json(collect_one_batch(workload, workload.config, CPU))
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (np.random.get_state()[1].tolist(), random.getstate())
    torch.manual_seed(4)
    assert to_json(collect_one_batch(workload, workload.config, CPU)) == facts


def test_what_cannot_be_looked_at_is_said_and_ends_nothing() -> None:
    def fussy(module: Any, x: Tensor) -> Any:
        if not module.training:
            raise KeyError("no evaluation here")
        return module.m(x)

    workload = classes(lambda: Having(fussy, m=mlp()))
    facts = collect_one_batch(workload, workload.config, CPU)
    assert facts["spread"] == {"reason": "KeyError: 'no evaluation here'"}
    late = collect_one_batch(workload, workload.config, CPU, seconds=-1.0)
    assert set(late) == set(facts)
    assert all("too long" in part["reason"] for name, part in late.items() if name != "examples")


def test_a_model_that_ignores_its_inputs_has_no_gap() -> None:
    ignores = classes(lambda: Having(lambda s, x: s.m(torch.ones_like(x)), m=mlp()))
    fit = collect_one_batch(ignores, ignores.config, CPU)["fit"]
    assert (len(fit["runs"]), {run["gap"][-1] for run in fit["runs"]}) == (8, {0.0})
    assert min(run["loss"][-1] for run in fit["runs"]) < fit["runs"][0]["loss"][0], "though the loss falls all the same"


def test_a_run_that_blows_up_has_fitted_nothing() -> None:
    """Units that are off for every input come alive at random in a run that diverges; that is no progress."""

    def off() -> nn.Module:
        model = mlp()
        nn.init.constant_(next(m for m in model if isinstance(m, nn.Linear)).bias, -8.0)  # type: ignore[union-attr]
        return model

    workload = classes(off, optimizer="momentum", peak_lr=0.05)
    found = alarms(workload)
    assert [found.get(code) for code in ("units.dead", "loop.overfit_one_batch")] == ["fail", "fail"]


class Language(nn.Module):
    """A layer of attention over 16 symbols, with a mask of later positions or without."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal, self.token, self.place = causal, nn.Embedding(16, 24), nn.Parameter(0.1 * torch.randn(9, 24))
        self.mix, self.head = nn.Linear(24, 72), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.token(x) + self.place[: x.shape[1]]
        q, k, v = self.mix(h).chunk(3, -1)
        return self.head(h + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal))


SENTENCES = torch.randint(16, (64, 10), generator=torch.Generator().manual_seed(4))
MASKED = torch.where(torch.rand(64, 9, generator=torch.Generator().manual_seed(5)) < 0.15, 15, SENTENCES[:, :9])


@pytest.mark.parametrize(
    ("causal", "inputs", "targets", "status"),
    [
        (True, SENTENCES[:, :-1], SENTENCES[:, 1:], None),
        (False, SENTENCES[:, :-1], SENTENCES[:, 1:], "fail"),
        (True, SENTENCES[:, :-1], SENTENCES[:, :-1], "warn"),
        (False, MASKED, torch.where(SENTENCES[:, :9] == MASKED, -100, SENTENCES[:, :9]), None),
    ],
    ids=["language model", "no mask", "not shifted", "masked tokens"],
)
def test_the_token_to_predict_stands_in_what_is_seen(
    causal: bool, inputs: Tensor, targets: Tensor, status: str | None
) -> None:
    def loss(outputs: Tensor, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(outputs.transpose(1, 2), batch[1], reduction="none").sum(1)

    workload = classes(lambda: Language(causal), x=inputs.contiguous(), y=targets.contiguous(), loss=loss)
    assert alarms(workload).get("loop.sees_target") == status


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


@pytest.mark.parametrize("part", [name for name in HEALTHY if name != "examples"])
def test_a_part_that_could_not_be_looked_at_is_not_measured_and_says_why(part: str) -> None:
    assert {f.status for f in said({"one_batch": HEALTHY}).values()} == {"ok"}
    assert {f.status for f in said({}).values()} == {"not_measured"}
    found = with_part(part, {"reason": "ZeroDivisionError: division by zero"}).values()
    unmeasured = [f for f in found if f.status == "not_measured"]
    assert unmeasured
    assert all("division by zero" in f.summary for f in unmeasured)
    assert {f.status for f in found} <= {"ok", "not_measured"}


STEPS = np.arange(400)
RATES = (0.05, 0.1, 0.2)


@pytest.mark.parametrize(
    ("name", "curves", "status"),
    [
        ("exactly twice as deep at twice the lr", [-(2.0**k) * (1 + STEPS) for k in range(4)], "fail"),
        ("one run alone, and a million times as deep", [1.0 - 2.0 ** (STEPS / 16)], "fail"),
        ("one run alone, that may have a minimum", [1.0 - 360 * -np.expm1(-0.1 * STEPS)], "ok"),
        ("a deep minimum", [1.0 - 360 * -np.expm1(-lr * STEPS) for lr in RATES], "ok"),  # counts of 100 under Poisson's loss
        ("rounding of one that explodes", [np.full(400, 0.1), 0.1 + 0 * STEPS, np.where(STEPS % 9 == 8, -1.0, 3.0) * np.exp(STEPS / 8)], "ok"),
        ("not a number", [np.full(400, np.nan) for _ in RATES], "ok"),
    ],
)  # fmt: skip
def test_a_loss_that_falls_without_end_is_seen_in_the_runs(name: str, curves: list[Any], status: str) -> None:
    rates = RATES if len(curves) < 4 else (0.05, 0.1, 0.2, 0.4)
    study = record([trial(c, lr) for c, lr in zip(curves, rates, strict=False)], facts={"one_batch": HEALTHY})
    assert diagnose_one_batch(study)["loss.unbounded"].status == status, name


@pytest.mark.parametrize(
    ("path", "value", "code", "status"),
    [
        ("fit/runs/0/progress", 0.009, "loop.overfit_one_batch", "fail"),
        ("fit/runs/0/progress", 0.011, "loop.overfit_one_batch", "ok"),
        ("fit/runs", [RUN | {"progress": 0.0}, RUN], "loop.overfit_one_batch", "ok"),
        ("coupling/ratio", 1.1e-3, "loop.batch_dependence", "fail"),
        ("coupling/ratio", 0.9e-3, "loop.batch_dependence", "ok"),
        ("unused/0/unused", [1, 5], "input.unused_features", "warn"),  # 2 of 12 columns, or of as many rows
        ("unused/0/unused", [1], "input.unused_features", "ok"),
        ("unused", [SLICES | {"unused": [1, 5]}], "input.unused_features", "ok"),
        ("unused", [SLICES | {"unused": [1, 5, 7]}], "input.unused_features", "warn"),
        ("modes/change", 1.1e-3, "evaluation.nondeterministic", "warn"),
        ("modes/change", 0.9e-3, "evaluation.nondeterministic", "ok"),
        ("modes/eval_in_train", {"bn": "frozen"}, "loop.eval_mode_in_training", "ok"),
        ("modes/train_in_eval", {"d": "dropout"}, "loop.train_mode_in_eval", "warn"),
        ("modes/train_in_eval", {"bn": "batch_norm"}, "loop.train_mode_in_eval", "fail"),
        ("loss/broadcast", "targets", "loss.broadcast", "fail"),
        ("loss/reversed", True, "loss.unbounded", "fail"),
        ("loss/escape/falls", ["-inf", "inf", None], "loss.unbounded", "ok"),
        ("loss/escape", {"start": 2.0, "falls": [-10.0, -100.0, -1000.0], "share": 1.0}, "loss.unbounded", "fail"),
        ("loss/escape", {"start": 2.0, "falls": [-10.0, -100.0, -1000.0], "share": 0.5}, "loss.unbounded", "ok"),
        ("loss/escape", {"start": 2.0, "falls": [-10.0, -30.0, -31.0], "share": 1.0}, "loss.unbounded", "ok"),
        ("fit/runs/0/metrics", [{"accuracy": 0.1}, {"accuracy": 0.1}], "loss.metric_disagrees", "warn"),
        ("layers/layers/2/signal", 1e-7, "gradients.vanishing", "warn"),
        ("layers/layers/0/gradient", 1e-7, "gradients.vanishing", "warn"),
        ("layers/layers/2/signal", 1e5, "gradients.exploding", "warn"),
    ],
)
def test_one_number_decides(path: str, value: Any, code: str, status: str) -> None:
    assert with_part(path, value)[code].status == status


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


def test_outputs_are_constant_only_where_they_stay_so() -> None:
    facts = HEALTHY | {"spread": SPREAD | {"spread": 0.0, "size": 0.0}}
    assert said({"one_batch": facts})["init.constant_output"].status == "ok", "a head of zeros moves away"
    facts |= {"fitted_spread": SPREAD | {"spread": 1e-9}}
    assert said({"one_batch": facts})["init.constant_output"].status == "fail"
    facts |= {"spread": SPREAD | {"inputs_vary": False}}
    assert said({"one_batch": facts})["init.constant_output"].status == "ok"
