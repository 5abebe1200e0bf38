"""A function that builds and trains is diagnosed like a command: called again with changes at its optimizer's boundary, and left as it was."""

from __future__ import annotations

import functools
import gc
import math
import random
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import workbench as wb
from workbench.errors import StudyInterrupted, UsageError, WorkbenchError
from workbench.instruments.taps import TAPS
from workbench.playbook import function as playbook_function
from workbench.programs.function import Function, FunctionRun, run_function

CURVATURES = torch.tensor([1.25, 0.4, 0.05])
NOTHING: dict[str, Any] = {"factor": 1.0, "warmup_steps": 0, "max_grad_norm": None, "stop_after": None, "seed": 0}


class Bowl(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.tensor([1.0, -1.0, 1.0]))

    def forward(self, curvatures: Tensor) -> Tensor:
        return 0.5 * (curvatures * self.place**2).sum()


def bowl(run: FunctionRun) -> None:
    model = Bowl()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(60):
        optimizer.zero_grad()
        model(CURVATURES).backward()
        optimizer.step()


BUILT = bowl.__code__.co_firstlineno + 2


def noisy(run: FunctionRun, *, seeded: int | None = None, updates: int = 20, made: list[Any] | None = None) -> None:
    """Draws from every generator that is seeded for it."""
    if seeded is not None:
        torch.manual_seed(seeded)
    net = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    if made is not None:
        made += [weakref.ref(net), weakref.ref(optimizer)]
    for _ in range(updates):
        optimizer.zero_grad()
        loss = (net(torch.randn(8, 3)) - random.random() - float(np.random.rand())).square().mean()
        loss.backward()
        optimizer.step()
    run.log(validation_loss=loss)


def losses(**trial: Any) -> list[float]:
    return list(run_function(noisy, NOTHING | trial).columns["loss"])


def state() -> tuple[Any, ...]:
    """What a call could leave patched or moved."""
    functions = (
        torch.autograd.backward,
        torch.optim.Optimizer.zero_grad,
        torch.manual_seed,
        random.seed,
        np.random.seed,
    )
    criteria = (nn.functional.cross_entropy, nn.utils.clip_grad_norm_, torch.utils.data.DataLoader.__iter__)
    drawn = (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist())
    return (*functions, *criteria, *drawn, list(TAPS.listeners), dict(TAPS.on_fault))


def test_what_is_bound_to_a_function_tells_it_from_another_one() -> None:
    one, again, other = (Function(train=functools.partial(noisy, updates=n)) for n in (10, 10, 20))
    assert one.settings == again.settings != other.settings
    assert one.name == "noisy"
    assert one.settings["code"] == Function(train=noisy).settings["code"]


def test_the_unstable_lr_of_a_quadratic_is_two_over_its_curvature(tmp_path: Path) -> None:
    before = state()
    diagnosis = wb.diagnose_function(bowl, tmp_path / "study", seeds=1)
    assert diagnosis["lr.unstable"].value == pytest.approx(2 / 1.25, rel=0.05)
    assert diagnosis["loop.no_zero_grad"].status == "ok"
    assert wb.open(tmp_path / "study").facts["program"]["built"] == [f"tests/programs/test_function.py:{BUILT}"]
    assert "batch size and architecture, which cannot be steered" in (diagnosis.recommendation or {})["paste"]
    assert diagnosis["loss.broadcast"].status == "not_measured", "its loss is written by hand"
    assert diagnosis.verdict != "ok"
    assert (tmp_path / "study" / "report.html").exists()
    assert wb.open(tmp_path / "study").study["workload"] == "bowl"
    assert state() == before
    trials = wb.open(tmp_path / "study").trials
    again = wb.diagnose_function(bowl, tmp_path / "study", seeds=1)
    assert len(wb.open(tmp_path / "study").trials) == len(trials)
    assert again["lr.unstable"].value == diagnosis["lr.unstable"].value


def digits(run: FunctionRun) -> None:
    inputs, labels = load_digits(return_X_y=True)
    data = torch.utils.data.TensorDataset(torch.tensor(inputs, dtype=torch.float32) / 16, torch.tensor(labels))
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(4):
        for batch, targets in torch.utils.data.DataLoader(data, 64, shuffle=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch), targets).backward()
            optimizer.step()


@pytest.mark.slow
def test_a_healthy_function_is_plain_ok(tmp_path: Path) -> None:
    diagnosis = wb.diagnose_function(digits, tmp_path / "study", seeds=1)
    assert diagnosis.verdict == "ok", diagnosis


def test_a_seed_says_all_that_is_drawn_and_one_that_is_set_inside_is_moved() -> None:
    assert losses(seed=1) == losses(seed=1)
    assert losses(seed=1) != losses(seed=2)

    def own(run: FunctionRun) -> None:
        noisy(run, seeded=5)

    first, again, other = (run_function(own, NOTHING | {"seed": seed}) for seed in (0, 0, 1))
    assert first.columns["loss"] == again.columns["loss"] != other.columns["loss"]
    assert first.facts["seeded"][0].startswith("tests/programs/test_function.py:")
    given = [torch.initial_seed()]
    run_function(lambda run: (torch.manual_seed(run.seed), given.append(torch.initial_seed())), NOTHING | {"seed": 7})  # type: ignore[arg-type]
    assert given[1] == 7


@pytest.mark.parametrize(
    ("changes", "lr"), [({}, 0.1), ({"factor": 2.0}, 0.2), ({"factor": 0.5, "warmup_steps": 4}, None)]
)
def test_a_change_is_what_the_function_would_have_done_by_itself(changes: dict[str, Any], lr: float | None) -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    net, expected = nn.Linear(3, 1), []
    for k in range(20):
        loss = (net(torch.randn(8, 3)) - random.random() - float(np.random.rand())).square().mean()
        expected.append(loss.item())
        gradients = torch.autograd.grad(loss, list(net.parameters()))
        with torch.no_grad():
            for weights, gradient in zip(net.parameters(), gradients, strict=True):
                weights.sub_((lr or 0.05 * min(k / 4, 1)) * gradient)
    assert losses(**changes) == pytest.approx(expected, rel=1e-5)
    assert losses(**changes, stop_after=7) == pytest.approx(expected[:7], rel=1e-5)


def sparse(run: FunctionRun, *, moved: list[float]) -> None:
    """Two examples share a row, so that the gradient's values are summed only when it is used."""
    table = nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        before = table.weight.detach().clone()
        (10 * table(torch.tensor([1, 1, 3]))).sum().backward()
        optimizer.step()
        moved.append(float((table.weight.detach() - before).norm()))


def test_sparse_gradients_are_clipped_where_the_optimizer_uses_them() -> None:
    for limit, norm in ((None, math.sqrt(1000)), (0.1, 0.1)):
        moved: list[float] = []
        outcome = run_function(functools.partial(sparse, moved=moved), NOTHING | {"max_grad_norm": limit})
        assert moved == pytest.approx([0.5 * norm] * 3, rel=1e-3)
        assert outcome.columns["grad_norm"][::2] == pytest.approx([math.sqrt(1000)] * 2, rel=1e-5)


class Spread(Tensor):
    """Stands for a tensor of which each process holds a part."""


def spread(run: FunctionRun) -> None:
    weights = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weights], lr=0.5)
    for _ in range(6):
        optimizer.zero_grad()
        weights.square().sum().backward()
        weights.grad = torch.ones(2).as_subclass(Spread)
        optimizer.step()


def test_a_run_whose_gradients_cannot_be_clipped_says_so_and_still_ends() -> None:
    assert not run_function(spread, NOTHING | {"stop_after": 3}).facts.get("fault")
    outcome = run_function(spread, NOTHING | {"max_grad_norm": 0.1, "stop_after": 3})
    assert "gradients of type Spread cannot be clipped to max_grad_norm=0.1" in outcome.facts["fault"]
    assert outcome.facts["updates"] == 3


class Unhashable(torch.optim.SGD):
    __hash__ = None  # type: ignore[assignment]


def test_an_optimizer_without_a_hash_trains_on(tmp_path: Path) -> None:
    updates: list[int] = []

    def trains(run: FunctionRun) -> None:
        net = nn.Linear(2, 1)
        optimizer = Unhashable(net.parameters(), lr=0.1)
        for k in range(3):
            optimizer.zero_grad()
            net(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            updates.append(k)

    run_function(trains, NOTHING)
    assert updates == [0, 1, 2]


def test_nothing_of_a_call_is_left(tmp_path: Path) -> None:
    made: list[Any] = []
    before = state()

    def train(run: FunctionRun) -> None:
        noisy(run, made=made)

    outcome = run_function(train, NOTHING)
    gc.collect()
    assert [ref() for ref in made] == [None, None]
    assert state() == before
    assert [(row["update"], row["name"]) for row in outcome.metrics] == [(20, "validation_loss")]

    def fails(run: FunctionRun) -> None:
        noisy(run, updates=5)
        raise ValueError("no more data")

    failed = run_function(fails, NOTHING)
    assert (failed.code, failed.updates) == (1, 5)
    assert failed.tail.startswith("ValueError: no more data (tests/programs/test_function.py:")

    def interrupted(run: FunctionRun) -> None:
        noisy(run, updates=5)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_function(interrupted, NOTHING)
    assert state() == before


def test_a_call_that_fails_away_from_its_own_setting_has_diverged_and_ends_no_study(tmp_path: Path) -> None:
    def picky(run: FunctionRun) -> None:
        """Raises where its parameters have left what it takes, as distributions and some losses do."""
        model = Bowl()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        for _ in range(60):
            optimizer.zero_grad()
            model(CURVATURES).backward()
            optimizer.step()
            if model.place.abs().max() > 1.5:
                raise ValueError("out of its range")

    diagnosis = wb.diagnose_function(picky, tmp_path / "study", seeds=1)
    assert diagnosis["lr.unstable"].value == pytest.approx(2 / 1.25, rel=0.05)
    assert set(wb.open(tmp_path / "study").trials["state"]) == {"complete", "diverged"}


def test_an_interrupt_keeps_what_was_measured_and_the_same_call_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    calls: list[int] = []

    def train(run: FunctionRun) -> None:
        calls.append(len(calls))
        if len(calls) == 4:
            raise KeyboardInterrupt
        bowl(run)

    with pytest.raises(StudyInterrupted, match="is kept in runs/train-program-"):
        wb.diagnose_function(train, seeds=1)
    done = wb.diagnose_function(train, seeds=1)
    (study,) = (tmp_path / "runs").iterdir()
    alone = wb.diagnose_function(bowl, tmp_path / "alone", seeds=1)
    assert done["lr.unstable"].value == alone["lr.unstable"].value
    assert len(calls) == len(wb.open(study).trials) + 1, "no trial was called twice but the one that was interrupted"


def test_values_that_are_logged_are_what_is_compared(tmp_path: Path) -> None:
    wb.diagnose_function(noisy, tmp_path / "study", seeds=1)
    record = wb.open(tmp_path / "study")
    assert record.config["select"] == "validation/loss"
    with pytest.raises(UsageError, match="it gave \\['validation_loss'\\]"):
        wb.diagnose_function(noisy, tmp_path / "other", seeds=1, metric="accuracy")


@pytest.mark.parametrize(
    ("train", "options", "error", "message"),
    [
        (3, {}, UsageError, "given: int"),
        (lambda: None, {}, UsageError, "one argument"),
        (bowl, {"jobs": 0}, UsageError, "jobs=0"),
        (lambda run: None, {"jobs": 2}, UsageError, "file beside the notebook"),
        (lambda run: None, {}, WorkbenchError, "no step of a torch optimizer was observed"),
        (lambda run: {}[0], {}, WorkbenchError, "failed after 0 updates: KeyError"),
    ],
)
def test_a_function_that_cannot_be_diagnosed_says_why(
    tmp_path: Path, train: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        playbook_function.diagnose_function(train, tmp_path / "study", **options)


@pytest.mark.slow
def test_other_processes_give_the_same_and_one_that_dies_fails_alone(tmp_path: Path) -> None:
    for name, jobs in (("here", None), ("there", 2)):
        wb.diagnose_function(bowl, tmp_path / name, seeds=1, budget="4x", jobs=jobs)
    here, there = (wb.open(tmp_path / name).steps[["trial", "step", "loss", "lr"]] for name in ("here", "there"))
    assert here["trial"].nunique() >= 4
    pd.testing.assert_frame_equal(here, there, check_exact=True)
    dead = Function(train=dies, jobs=1).run(tmp_path, NOTHING)
    assert (dead.code, dead.updates) == (3, 0)
    assert "ended with code 3" in dead.tail


def dies(run: FunctionRun) -> None:
    import os

    os._exit(3)
