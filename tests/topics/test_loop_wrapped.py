"""Loops that call torch in a roundabout way, as trainers of other libraries do: closures, wrapped optimizers, models called by their parts."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

import workbench as wb
from workbench.instruments.losses.criteria import Criteria

STEPS = 12


class Parted(nn.Module):
    """A model whose parts are called, never it itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.head = nn.Linear(8, 2)

    def loss(self, inputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        return F.cross_entropy(self.head(self.body(inputs)), targets, reduction=reduction)


class Wrapper(torch.optim.Optimizer):
    """Hands everything on to another optimizer, as Accelerate's does; like it, without the constructor of its base."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


def batches() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [(torch.randn(16, 4, generator=draw), torch.randint(0, 2, (16,), generator=draw)) for _ in range(2 * STEPS)]


Loop = Callable[[Parted, torch.optim.Optimizer], list[tuple[float, float]]]


def in_closures(model: Parted, optimizer: torch.optim.Optimizer) -> list[tuple[float, float]]:
    """Return loss and gradient norm before clipping of every update; all of a pass is in the closure, as in Lightning."""
    seen = []
    for inputs, targets in batches()[:STEPS]:

        def closure(inputs: Tensor = inputs, targets: Tensor = targets) -> Tensor:
            loss = model.loss(inputs, targets)
            optimizer.zero_grad()
            loss.backward()
            seen.append((loss.item(), float(nn.utils.clip_grad_norm_(model.parameters(), 0.01))))
            return loss

        optimizer.step(closure)
    return seen


def plainly(model: Parted, optimizer: torch.optim.Optimizer) -> list[tuple[float, float]]:
    seen = []
    for inputs, targets in batches()[:STEPS]:
        optimizer.zero_grad()
        loss = model.loss(inputs, targets)
        loss.backward()
        seen.append((loss.item(), float(nn.utils.get_total_norm([p.grad for p in model.parameters()]))))
        optimizer.step()
    return seen


def trained(
    loop: Loop, out: Path | None, rule: Callable[..., torch.optim.Optimizer], *, evaluation: bool = False
) -> tuple[Any, list[tuple[float, float]], Tensor]:
    torch.manual_seed(0)
    model = Parted().train(not evaluation)
    optimizer = rule(model.parameters())
    run = None
    if out is None:
        seen = loop(model, optimizer)
    else:
        with wb.watch(model, optimizer, out=out) as run:
            seen = loop(model, optimizer)
    return run, seen, nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize("loop", [in_closures, plainly])
@pytest.mark.parametrize("rule", [torch.optim.Adam, lambda p: Wrapper(torch.optim.Adam(p))], ids=["plain", "wrapped"])
def test_every_update_is_recorded_and_none_changed(loop: Loop, rule: Any, tmp_path: Path) -> None:
    run, seen, weights = trained(loop, tmp_path / "run", rule)
    _, alone, same = trained(loop, None, rule)
    assert torch.equal(weights, same)
    assert seen == alone
    steps = run.record.steps
    assert steps["loss"].tolist() == [loss for loss, _ in seen]
    assert steps["grad_norm"].tolist() == pytest.approx([norm for _, norm in seen], rel=1e-5)
    found = run.diagnose()
    wrong = {f.code for f in found if f.code.startswith(("loop", "clipping")) and f.status in ("warn", "fail")}
    assert wrong == ({"clipping.aggressive"} if loop is in_closures else set())  # it clips at a hundredth of the norm
    assert found["loop.repeated_batch"].status == "ok", "the inputs of each update were seen"


def test_lbfgs_gives_the_loss_it_begins_an_update_with(tmp_path: Path) -> None:
    firsts = []

    def loop(model: Parted, optimizer: torch.optim.Optimizer) -> list[tuple[float, float]]:
        for inputs, targets in batches()[:STEPS]:
            seen = []

            def closure(inputs: Tensor = inputs, targets: Tensor = targets, seen: list[float] = seen) -> Tensor:
                optimizer.zero_grad()
                loss = model.loss(inputs, targets)
                loss.backward()
                seen.append(loss.item())
                return loss

            optimizer.step(closure)
            firsts.append(seen[0])
        return []

    run, _, _ = trained(loop, tmp_path / "run", lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3))
    assert run.record.steps["loss"].tolist() == firsts
    found = run.diagnose()
    assert [found[code].status for code in ("loop.repeated_step", "loop.accumulation_scale")] == ["ok", "ok"]


@pytest.mark.parametrize("evaluation", [False, True])
def test_the_mode_of_a_model_is_seen_where_only_its_parts_are_called(evaluation: bool, tmp_path: Path) -> None:
    run, _, _ = trained(plainly, tmp_path / "run", torch.optim.Adam, evaluation=evaluation)
    found = run.diagnose()["loop.eval_mode_in_training"]
    assert found.status == ("fail" if evaluation else "ok")
    assert "Does not apply" not in found.summary


@pytest.mark.parametrize("by", ["examples", "passes"])
def test_a_last_window_that_is_shorter_counts_where_the_loss_is_divided_by_the_usual_length(
    by: str, tmp_path: Path
) -> None:
    """Hugging Face's Trainer divides a sum by the examples of the whole window: right, however many passes there are."""

    def loop(model: Parted, optimizer: torch.optim.Optimizer) -> list[tuple[float, float]]:
        for first in range(0, len(batches()) - 1, 4):
            window = batches()[first : first + (4 if first else 2)]
            for inputs, targets in window:
                if by == "examples":
                    loss = model.loss(inputs, targets, "sum") / sum(len(t) for _, t in window)
                else:
                    loss = model.loss(inputs, targets) / 4
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return []

    run, _, _ = trained(loop, tmp_path / "run", torch.optim.Adam)
    assert run.diagnose()["loop.accumulation_scale"].status == ("ok" if by == "examples" else "warn")


def test_two_optimizers_that_share_their_examples_repeat_no_batch(tmp_path: Path) -> None:
    """As in a GAN, whose generator runs on the same noise for its own update and for the discriminator's."""
    torch.manual_seed(0)
    made, judge = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 4)), nn.Linear(4, 2)
    rules = [torch.optim.Adam(model.parameters()) for model in (made, judge)]
    data = TensorDataset(*(torch.cat(parts) for parts in zip(*batches()[:STEPS], strict=True)))
    with wb.watch([made, judge], rules, out=tmp_path / "run") as run:
        for inputs, targets in DataLoader(data, 16):
            for rule in rules:
                rule.zero_grad()
                F.cross_entropy(judge(made(inputs)), targets).backward()
                rule.step()
    assert len(run.record.steps) == STEPS
    assert run.diagnose()["loop.repeated_batch"].status == "ok"


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    assert b"workbench" not in file.getvalue()  # whoever loads it needs nothing of ours
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "copied": copy.deepcopy,
    "averaged": lambda model: AveragedModel(model).module,
    "saved": saved,
}


@pytest.mark.parametrize("how", COPIES)
def test_a_watched_model_is_copied_averaged_and_saved_as_it_is(how: str, tmp_path: Path) -> None:
    updates = 205  # after the first 200 a model tells of itself in another way

    def losses(out: Path | None) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen: list[float] = []

        def loop() -> None:
            for i in range(updates):
                inputs, targets = batches()[i % 8]
                loss = F.cross_entropy(model(inputs), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                seen.append(loss.item())
                if i in (0, updates - 1):
                    other = COPIES[how](model)
                    assert torch.equal(other(inputs), model(inputs))

        if out is None:
            loop()
        else:
            with wb.watch(model, optimizer, out=out) as run:
                loop()
            assert run.record.steps["loss"].tolist() == seen
        return seen

    assert losses(tmp_path / "run") == losses(None)


CALLED = {F.mse_loss: "loss", Tensor.double: "double"}


class Named(Tensor):
    """Tells functions of torch apart by which they are, as subclasses of tensors do."""

    seen: tuple[str, ...] = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Named.seen += (CALLED[func],) if func in CALLED else ()
        return super().__torch_function__(func, types, args, kwargs)


def test_what_torch_is_given_within_a_watch_is_its_own_affair(tmp_path: Path) -> None:
    model = Parted()
    with wb.watch(model, torch.optim.Adam(model.parameters()), out=tmp_path / "run"):
        assert nn.LazyLinear(3).double().weight.dtype is torch.float64  # which has no shape yet
        named = torch.ones(3).as_subclass(Named)
        F.mse_loss(named.double(), torch.zeros(3))
    assert Named.seen == ("double", "loss")


def test_losses_within_torch_func_leave_the_rest_to_be_seen(tmp_path: Path) -> None:
    model, draw = Parted(), torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)

    def one(weights: dict[str, Tensor], features: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model.head, weights, (features[None],)), target[None])

    each = torch.func.vmap(torch.func.grad(one), in_dims=(None, 0, 0))
    with wb.watch(model.head, optimizer, out=tmp_path / "run") as run:
        for _ in range(STEPS):
            features, targets = torch.randn(16, 8, generator=draw), torch.randint(0, 2, (16,), generator=draw)
            optimizer.zero_grad()
            F.cross_entropy(model.head(features), targets).backward()
            gradients = each({n: p.detach() for n, p in model.head.named_parameters()}, features, targets)
            assert torch.allclose(gradients["bias"].mean(0), model.head.bias.grad, atol=1e-6)
            optimizer.step()
    found = run.diagnose()
    codes = ("loss.double_softmax", "loop.repeated_batch", "loop.no_zero_grad")
    assert [found[code].status for code in codes] == ["ok"] * 3


def test_a_fact_that_cannot_be_read_is_the_only_one_that_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, seen = Criteria.floor, set()

    def breaks(criteria: Criteria) -> dict[str, Any]:
        if criteria.to_dict():
            seen.add("calls")
            raise RuntimeError("no value")
        return read(criteria)

    monkeypatch.setattr(Criteria, "floor", breaks)
    run, _, _ = trained(plainly, tmp_path / "run", lambda p: torch.optim.SGD(p, lr=0.0))
    assert seen
    found = run.diagnose()
    assert found["loop.no_update"].status in ("warn", "fail"), "what is wrong was seen all the same"
    assert found["loss.floor"].status == "not_measured"
    assert "floor could not be determined" in found["loss.floor"].summary
