"""What one watched run tells of its learning rate, its weight decay, and of a model that does worse than a simple one."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import workbench as wb
from workbench.findings.diagnosis import verdict_table

CODES = ("lr.too_high", "optimizers.weight_decay_shrinks", "evaluation.underfits")
DIGITS = TensorDataset(*(torch.as_tensor(part) for part in load_digits(return_X_y=True)))


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def narrow() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 1), nn.Tanh(), nn.Linear(1, 10))


def trained(out: Path, make: Callable[..., Any], model: Callable[[], nn.Module] = network, updates: int = 200) -> Any:
    torch.manual_seed(0)
    net = model()
    optimizer, loader = make(net.parameters()), DataLoader(DIGITS, 32, shuffle=True, drop_last=True)
    with wb.watch(net, optimizer, out=out) as run:
        for inputs, targets in islice((batch for _ in range(99) for batch in loader), updates):
            optimizer.zero_grad()
            F.cross_entropy(net(inputs.float() / 16), targets).backward()
            optimizer.step()
    return run


def alarms(diagnosis: Any) -> list[str]:
    return [f.code for f in diagnosis if f.code in CODES and f.status in ("warn", "fail")]


def adam(lr: float) -> Callable[..., Any]:
    return lambda p: torch.optim.Adam(p, lr=lr)


FAULTS: dict[str, tuple[Callable[..., Any], Callable[[], nn.Module], str]] = {
    "Adam at 0.3": (adam(0.3), network, "lr.too_high"),
    "AdamW's decay of 10": (lambda p: torch.optim.AdamW(p, lr=2e-3, weight_decay=10.0), network, "optimizers.weight_decay_shrinks"),
    "decay of 0.05 under momentum": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.05), network, "optimizers.weight_decay_shrinks"),
    "one unit between inputs and outputs": (adam(3e-2), narrow, "evaluation.underfits"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_setting_that_costs_training_is_told_by_one_run_and_again_from_its_folder(name: str, tmp_path: Path) -> None:
    make, model, code = FAULTS[name]
    run = trained(tmp_path / "run", make, model)
    diagnosis = run.diagnose()
    first = next(f for f in diagnosis if f.code.startswith(("lr.", "optimizers.", "evaluation.", "stability.")))
    assert (first.code, first.status in ("warn", "fail")) == (code, True), diagnosis
    assert first.advice
    again = wb.loop.judge(wb.open(run.path))[code]
    assert (again.status, again.summary) == (first.status, first.summary)


HEALTHY: dict[str, Callable[..., Any]] = {
    "Adam": adam(2e-3),
    "a large learning rate": adam(1e-2),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=2e-3, weight_decay=0.1),
    "momentum and decay": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=5e-4),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_the_same_training_with_usual_settings_rouses_nothing(name: str, tmp_path: Path) -> None:
    diagnosis = trained(tmp_path / "run", HEALTHY[name]).diagnose()
    assert alarms(diagnosis) == [], diagnosis


def test_too_few_updates_tell_nothing_of_any_of_them(tmp_path: Path) -> None:
    for name, (make, model, code) in FAULTS.items():
        finding = trained(tmp_path / name.replace(" ", "_"), make, model, updates=20).diagnose()[code]
        assert finding.status == "ok", finding.summary


def test_a_decay_of_one_group_alone_is_not_held_against_all_parameters(tmp_path: Path) -> None:
    def make(parameters: Any) -> Any:
        first, *rest = parameters
        return torch.optim.SGD([{"params": rest, "lr": 0.1, "weight_decay": 0.05}, {"params": [first], "lr": 1e-3}], momentum=0.9)  # fmt: skip

    finding = trained(tmp_path / "run", make, lambda: nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))).diagnose()["optimizers.weight_decay_shrinks"]  # fmt: skip
    assert finding.status == "ok", finding.summary


def flat(k: float) -> float:
    return 1.0


def risen(k: float) -> float:
    """A loss that is 3 times its first one until a quarter of the run, and ends at 0.6."""
    return 1.0 if k == 0 else 3.0 if k < 0.25 else 0.6


def grown(k: float) -> float:
    """Parameters that grow to 10 times their norm."""
    return 1.0 + 9.0 * min(k / 0.25, 1.0)


CURVES: dict[str, tuple[Callable[[float], float], Callable[[float], float], str]] = {
    "both": (risen, grown, "warn"),
    "nothing is learned": (lambda k: max(risen(k), 0.9), grown, "fail"),
    "the loss rises, the parameters stay, as of a new task": (risen, flat, "ok"),
    "small first parameters grow, the loss falls": (lambda k: 1.0 - 0.4 * k, grown, "ok"),
    "it comes back and learns": (lambda k: risen(k) if k < 0.25 else 0.05, grown, "ok"),
    "single losses rise": (lambda k: 3.0 if k and round(400 * k) % 4 == 0 else 0.6, grown, "ok"),
    "a constant loss": (flat, grown, "ok"),
    "losses of 0": (lambda k: 0.0, grown, "ok"),
    "NaN": (lambda k: math.nan if k > 0.5 else risen(k), lambda k: math.nan if k > 0.5 else grown(k), "warn"),
}


@pytest.mark.parametrize("name", CURVES)
def test_it_takes_a_risen_loss_and_grown_parameters_and_little_learned(name: str, tmp_path: Path) -> None:
    loss, norm, status = CURVES[name]
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with wb.watch(model, optimizer, out=tmp_path / "run") as run:
        for k in range(400):
            with torch.no_grad():
                model.weight.fill_(norm(k / 400))
            optimizer.zero_grad()
            (0 * model(torch.ones(4, 1))).mean().backward()
            run.log(loss=loss(k / 400))
            optimizer.step()
    finding = run.diagnose()["lr.too_high"]
    assert finding.status == status, finding.summary


WARMUPS: dict[str, tuple[Callable[[int], float], str]] = {
    "over the run": (lambda k: min((k + 1) / 2000, 1.0), "warn"),
    "over a tenth": (lambda k: min((k + 1) / 20, 1.0), "ok"),
    "none": (lambda k: 1.0, "ok"),
    "cycles that end at the top": (lambda k: 0.1 + 0.9 * (k % 50) / 49, "ok"),
    "zero": (lambda k: 0.0, "ok"),
    "a search for the largest one": (lambda k: 10.0 ** (k / 40), "ok"),
    "a root of the updates": (lambda k: (1 + k / 50) ** 0.5, "ok"),
}


@pytest.mark.parametrize("name", WARMUPS)
def test_a_learning_rate_that_rises_until_the_run_ends_is_told(name: str, tmp_path: Path) -> None:
    factor, status = WARMUPS[name]
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for count, told in ((200, status), (100, "ok")):
        with wb.watch(model, optimizer, out=tmp_path / str(count)) as run:
            for k in range(count):
                optimizer.param_groups[0]["lr"] = 0.01 * factor(k)
                optimizer.zero_grad()
                (model(torch.ones(4, 1)).tanh().mean() + 2).backward()  # its gradients end, whatever the learning rate
                optimizer.step()
        finding = run.diagnose()["warmup.over_cap"]
        assert finding.status == told, finding.summary


def test_a_run_that_is_well_says_that_other_settings_take_other_runs(tmp_path: Path) -> None:
    diagnosis = trained(tmp_path / "run", adam(2e-3)).diagnose()
    assert diagnosis.verdict == "ok"
    assert "takes other runs" in repr(diagnosis).splitlines()[0]
    assert "takes other runs" in verdict_table(diagnosis)


@pytest.mark.parametrize(("updates", "decay", "words"), [
    (20, 0.01, "this asks for 50 updates, and 20 were made"), (60, 0.0, "no weight decay"), (60, 0.01, "undoes no updates"),
])  # fmt: skip
def test_what_few_updates_or_no_weight_decay_cannot_tell_is_not_said_to_be_well(
    updates: int, decay: float, words: str, tmp_path: Path
) -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=decay)
    with wb.watch(model, optimizer, out=tmp_path / "run") as run:
        for _ in range(updates):
            optimizer.zero_grad()
            F.cross_entropy(model(torch.randn(8, 4)), torch.arange(8) % 3).backward()
            optimizer.step()
    found = run.diagnose()
    assert words in found["optimizers.weight_decay_shrinks"].summary
    assert found["lr.too_high"].applies is (updates >= 50)
    assert found["warmup.over_cap"].applies is (updates >= 50)
