"""What a model keeps in attributes: changes are seen, differences between models are named, copies stand alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from workbench.train.lanes.recorder import CannotBatch
from workbench.train.lanes.step import _changed as changed
from workbench.train.lanes.step import _copied as copy_model
from workbench.train.lanes.step import check_alike, module_state


class Holder(nn.Module):
    def __init__(self, value: Any = None) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.inner.kept = value  # type: ignore[assignment]


def held(model: nn.Module) -> Any:
    return model.inner.kept  # type: ignore[union-attr]


CHANGES: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "number": (1, lambda value: 2),
    "bool for number": (1, lambda value: True),
    "list": ([1, 2], lambda value: value.append(3) or value),
    "deep": ({"a": [(1, {2: 3})]}, lambda value: value["a"][0][1].update({2: 4}) or value),
    "deque": (deque([1]), lambda value: value.append(1) or value),
    "set": ({1}, lambda value: value.add(2) or value),
    "object": (SimpleNamespace(n=0), lambda value: setattr(value, "n", 1) or value),
    "tensor in place": (torch.zeros(2), lambda value: value.add_(1)),
    "another tensor": (torch.zeros(2), lambda value: value.clone()),
    "nan": (1.0, lambda value: float("nan")),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_is_seen_and_named(kind: str) -> None:
    value, change = CHANGES[kind]
    model = Holder(value)
    before = module_state(model)
    assert list(changed(before, module_state(model))) == []
    model.inner.kept = change(held(model))  # type: ignore[assignment]
    assert list(changed(before, module_state(model))) == ["inner.kept"]


def test_a_new_attribute_is_a_change() -> None:
    model = Holder()
    before = module_state(model)
    model.fresh = 1
    assert list(changed(before, module_state(model))) == ["fresh"]


def test_parameters_buffers_and_nan_do_not_count() -> None:
    model = nn.BatchNorm1d(3)
    model.note = float("nan")
    before = module_state(model)
    model(torch.randn(4, 3))
    with torch.no_grad():
        model.weight.add_(1)
    assert list(changed(before, module_state(model))) == []


ALIKE: dict[str, Callable[[int], Any]] = {
    "equal tensors": lambda k: torch.arange(4),
    "functions": lambda k: lambda x: x,
    "nested": lambda k: {"a": [1, (2.5, None)]},
}
UNLIKE: dict[str, Callable[[int], Any]] = {
    "number": lambda k: 0.1 * k,
    "tensor": lambda k: torch.arange(4) + k,
    "type": lambda k: torch.arange(4).to(torch.int32 if k else torch.int64),
    "module that nobody trains": lambda k: [nn.Linear(2, 2)],
    "mask": lambda k: torch.tensor([True, bool(k)]),
}


@pytest.mark.parametrize("kind", ALIKE)
def test_models_that_differ_in_parameters_alone_are_alike(kind: str) -> None:
    check_alike([Holder(ALIKE[kind](k)) for k in range(3)])


@pytest.mark.parametrize("kind", UNLIKE)
def test_what_differs_is_named(kind: str) -> None:
    with pytest.raises(CannotBatch, match=r"the attribute 'inner\.kept' of the model is not the same in all trials"):
        check_alike([Holder(UNLIKE[kind](k)) for k in range(2)])


def test_registered_members_in_a_list_are_no_difference() -> None:
    models = [Holder() for _ in range(2)]
    for model in models:
        model.inner.kept = [model.inner, model.inner.weight]  # type: ignore[assignment]
    check_alike(models)


def test_hooks_are_compared_by_what_they_are() -> None:
    models = [Holder() for _ in range(2)]
    for model in models:
        model.register_forward_hook(print)
    check_alike(models)
    models[1].register_forward_hook(print)
    with pytest.raises(CannotBatch, match="_forward_hooks"):
        check_alike(models)


def test_a_copy_has_memory_of_its_own_and_brings_no_stack_along() -> None:
    model = nn.BatchNorm1d(3)
    stack = torch.zeros(1000, 3)
    model._buffers["running_mean"] = stack[7]
    twin = copy_model(model)
    assert twin.running_mean.untyped_storage().nbytes() == 12  # type: ignore[union-attr]
    twin.running_mean.add_(1)  # type: ignore[operator, union-attr]
    with torch.no_grad():
        twin.weight.add_(1)  # type: ignore[operator, union-attr]
    assert stack.sum() == 0
    assert model.weight.sum() == 3


def test_tied_weights_stay_tied_in_a_copy() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    twin = copy_model(model)
    assert twin[1].weight is twin[0].weight  # type: ignore[index]
    assert twin[0].weight is not model[0].weight  # type: ignore[index]


def test_what_cannot_be_copied_is_refused() -> None:
    model = Holder(i for i in range(3))
    with pytest.raises(CannotBatch, match="the model cannot be copied .TypeError"):
        copy_model(model)
