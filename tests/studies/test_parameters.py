"""Parameters that stay as they begin: random, or with something in them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.simulated_records import record
from tests.helpers.workloads import small_workload
from workbench.diagnostics.base import Diagnosis
from workbench.diagnostics.parameters import CODES, diagnose_parameters
from workbench.studies.parameters import collect_parameters

FROZEN, UNOWNED = CODES


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1), nn.Flatten(0))


LOADED = net().state_dict()


def frozen(*, loaded: bool = False, zero: bool = False, most: int = 2) -> nn.Sequential:
    model = net()
    if loaded:
        model.load_state_dict(LOADED)
    for p in list(model.parameters())[:most]:
        p.requires_grad_(False)
        if zero:
            nn.init.zeros_(p)
    return model


class Fixed(nn.Module):
    """Random positions, on purpose and few."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.randn(3), requires_grad=False)
        self.rest = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 1), nn.Flatten(0))

    def forward(self, x: torch.Tensor) -> Any:
        return self.rest(x + self.place)


class InAList(nn.Module):
    """Its first layer lies in a plain list, where no optimizer finds it."""

    def __init__(self, *, frozen: bool = False) -> None:
        super().__init__()
        self.layers = [nn.Linear(3, 8, dtype=torch.float64)]
        self.layers[0].requires_grad_(not frozen)
        self.rest = nn.Sequential(nn.Tanh(), nn.Linear(8, 1), nn.Flatten(0))

    def forward(self, x: torch.Tensor) -> Any:
        return self.rest(self.layers[0](x))


def head(params: Iterable[Any], lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(params)[-2:], lr=lr)


def looked_at(build: Any, **config: Any) -> Diagnosis:
    workload = small_workload(build_model=build, config=config)
    state = torch.get_rng_state()
    facts = collect_parameters(workload, workload.config, torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), state)
    return diagnose_parameters(record([], facts={"parameters": facts}))


@pytest.mark.parametrize(
    ("build", "config", "alarm"),
    [
        (net, {}, None),
        (frozen, {}, FROZEN),
        (lambda: frozen(loaded=True), {}, None),
        (lambda: frozen(zero=True), {}, None),
        (Fixed, {}, None),
        (net, {"optimizer": head}, UNOWNED),
        (lambda: frozen(loaded=True, most=0), {"optimizer": head}, None),
        (InAList, {}, UNOWNED),
        (lambda: InAList(frozen=True), {}, None),
        (net, {"optimizer": lambda params, lr: torch.optim.SGD(params, lr=lr)}, None),
    ],
    ids=["trained", "frozen", "loaded", "zeros", "a few", "the head only", "a loaded body", "in a list", "frozen in a list", "all of them"],
)  # fmt: skip
def test_only_what_is_random_and_never_trained_is_an_alarm(
    build: Any, config: dict[str, Any], alarm: str | None
) -> None:
    found = looked_at(build, **config)
    assert [f.code for f in found if f.status != "ok"] == ([] if alarm is None else [alarm])
    if alarm:
        assert ("layers[0].weight" if build is InAList else "0.weight") in found[alarm].summary
        assert found[alarm].advice


@pytest.mark.parametrize("facts", [{}, {"parameters": None}])
def test_nobody_looked(facts: dict[str, Any]) -> None:
    found = diagnose_parameters(record([], facts=facts))
    assert tuple(f.code for f in found) == CODES
    assert {f.status for f in found} == {"not_measured"}
