"""Parameters that stay as they begin: random, or with something in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.simulated_records import record
from tests.helpers.workloads import small_workload, squared
from workbench.findings.diagnosis import Diagnosis
from workbench.topics.one_batch.diagnose_layers import PARAMETER_CODES as CODES
from workbench.topics.one_batch.diagnose_layers import diagnose_parameters
from workbench.topics.one_batch.parameters import collect_parameters

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


def linear(size: int = 8) -> nn.Linear:
    return nn.Linear(3, size, dtype=torch.float64)


ONCE = linear()
WEIGHTS = linear().state_dict()


class InAList(nn.Module):
    """Its first layer lies in a plain list, where no optimizer finds it."""

    def __init__(self, *, frozen: bool = False, once: bool = False, loaded: bool = False) -> None:
        super().__init__()
        self.layers: list[Any] = [ONCE if once else linear()]
        if loaded:
            self.layers[0].load_state_dict(WEIGHTS)
        if frozen:
            self.layers[0].requires_grad_(False)
        self.rest = nn.Sequential(nn.Tanh(), nn.Linear(8, 1), nn.Flatten(0))

    def forward(self, x: torch.Tensor) -> Any:
        return self.rest(self.layers[0](x))


class Waves(nn.Module):
    """A frozen random layer whose results only a cosine takes, or another function."""

    def __init__(self, wave: Callable[[torch.Tensor], torch.Tensor] = torch.cos, *, listed: bool = False) -> None:
        super().__init__()
        projected, self.wave = linear(64).requires_grad_(False), wave
        self.projected = [projected] if listed else nn.ModuleList([projected])
        self.rest = nn.Sequential(nn.Linear(64, 1), nn.Flatten(0))

    def forward(self, x: torch.Tensor) -> Any:
        return self.rest(self.wave(2 * torch.pi * self.projected[0](x)))


def made_anew(outputs: Any, batch: Any) -> torch.Tensor:
    layer = nn.Linear(1, 64, dtype=torch.float64)
    return (layer(outputs.reshape(-1, 1)) - layer(batch[1].reshape(-1, 1).double())).square().mean(1)


def head(params: Iterable[Any], lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(params)[-2:], lr=lr)


def looked_at(build: Any, *, loss: Any = squared, **config: Any) -> Diagnosis:
    workload = small_workload(build_model=build, loss=loss, config=config)
    state = torch.get_rng_state()
    facts = collect_parameters(workload, workload.config, torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), state)
    return diagnose_parameters(record([], facts={"parameters": facts}))


@pytest.mark.parametrize(
    ("build", "config", "alarm"),
    [
        (net, {}, None),
        (frozen, {}, FROZEN),
        (lambda: frozen(zero=True), {}, None),
        (net, {"optimizer": head}, UNOWNED),
        (lambda: frozen(loaded=True, most=0), {"optimizer": head}, None),
        (InAList, {}, UNOWNED),
        (lambda: InAList(frozen=True, loaded=True), {}, None),
        (lambda: InAList(loaded=True), {}, None),
        (lambda: InAList(once=True), {}, None),
        (lambda: (torch.manual_seed(3), InAList())[1], {}, UNOWNED),
        (Waves, {}, None),
        (lambda: Waves(listed=True), {}, None),
        (lambda: Waves(lambda x: torch.cos(x) + x), {}, FROZEN),
        (net, {"loss": made_anew}, UNOWNED),
    ],
    ids=["trained", "frozen", "zeros", "the head only", "a loaded body", "in a list", "frozen and loaded in a list", "loaded in a list",
         "one and the same in a list", "a seed of its own", "waves", "waves in a list", "waves and more", "the loss makes"],
)  # fmt: skip
def test_only_what_is_random_and_never_trained_is_an_alarm(
    build: Any, config: dict[str, Any], alarm: str | None
) -> None:
    found = looked_at(build, **config)
    assert [f.code for f in found if f.status != "ok"] == ([] if alarm is None else [alarm])
    if alarm and (build is InAList or "loss" in config):
        assert ("layers[0].weight" if build is InAList else "of shape (64, 1)") in found[alarm].summary


def test_nobody_looked() -> None:
    assert {f.code: f.status for f in diagnose_parameters(record([], facts={}))} == dict.fromkeys(CODES, "not_measured")
