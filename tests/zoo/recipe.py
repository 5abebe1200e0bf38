"""`Recipe`: a small training in parts that a fault can change one at a time, and the workload that it makes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

import workbench as wb
from workbench import TrainConfig, Workload

Tensors = tuple[Tensor, ...]
HELPERS = {"classes": wb.classification, "numbers": wb.regression, "tokens": wb.language_model}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A training in parts.

    Attributes:
        kind: "classes", "numbers" and "tokens" take the loss of the package's helper of that sort; "own" brings `loss`.
        train: tensors with one row an example; the first is the input, the last the target.
        validation: the same for the other split.
        dataset: what makes a dataset of such tensors; one for training, `TensorDataset` for validation.
        fields: any other field of a workload.
        evaluated: rows of the validation split that periodic evaluation reads; None is all of them.
    """

    name: str
    kind: str
    build: Callable[[], nn.Module]
    train: Tensors
    validation: Tensors
    config: TrainConfig
    loss: Callable[[Any, Any], Tensor] | None = None
    dataset: Callable[..., Any] = TensorDataset
    fields: Mapping[str, Any] = field(default_factory=dict)
    evaluated: Sequence[int] | None = None

    def but(self, **changes: Any) -> Recipe:
        """Return a copy with `changes`."""
        return dataclasses.replace(self, **changes)

    def tuned(self, **changes: Any) -> Recipe:
        """Return a copy whose config has `changes`."""
        return self.but(config=self.config.replace(**changes))

    def having(self, **fields: Any) -> Recipe:
        """Return a copy with other `fields` of the workload."""
        return self.but(fields={**self.fields, **fields})

    def inputs(self, change: Callable[[Tensor], Tensor], *, train: bool = True, validation: bool = True) -> Recipe:
        """Return a copy whose inputs went through `change`."""
        return self._changed(change, 0, train, validation)

    def targets(self, change: Callable[[Tensor], Tensor], *, train: bool = True, validation: bool = True) -> Recipe:
        """Return a copy whose targets went through `change`."""
        return self._changed(change, -1, train, validation)

    def _changed(self, change: Callable[[Tensor], Tensor], at: int, train: bool, validation: bool) -> Recipe:
        def new(tensors: Tensors) -> Tensors:
            k = at % len(tensors)
            return (*tensors[:k], change(tensors[k].clone()), *tensors[k + 1 :])

        splits = {"train": new(self.train) if train else self.train}
        return self.but(**splits, validation=new(self.validation) if validation else self.validation)

    def rows(self, train: Tensor, validation: Tensor | None = None) -> Recipe:
        """Return a copy with these rows (indices or a mask) of each split; None leaves the validation split."""
        kept = self.validation if validation is None else tuple(t[validation] for t in self.validation)
        return self.but(train=tuple(t[train] for t in self.train), validation=kept)

    def model(self, change: Callable[[nn.Module], nn.Module | None]) -> Recipe:
        """Return a copy whose fresh model goes through `change`, which edits it or returns another one."""
        return self.but(build=partial(_edited, self.build, change))

    def wrong(self, loss: Callable[[Any, Any], Tensor]) -> Recipe:
        """Return a copy with another loss; metrics stay."""
        return self.but(loss=loss)

    def workload(self) -> Workload:
        """Return what the workbench is asked about."""
        workload = self._whole()
        return workload if self.evaluated is None else wb.evaluation.periodic_subset(workload, self.evaluated)

    def _whole(self) -> Workload:
        fields = {
            "name": self.name, "build_model": self.build, "config": self.config, **self.fields,
            "train_data": self.dataset(*self.train), "validation_data": TensorDataset(*self.validation),
        }  # fmt: skip
        if self.kind == "own":
            return Workload(loss=self.loss, **fields)
        metrics = fields.pop("metrics", None)
        workload = HELPERS[self.kind](**fields)
        changes = {name: value for name, value in (("loss", self.loss), ("metrics", metrics)) if value is not None}
        return workload.replace(**changes) if changes else workload


def _edited(build: Callable[[], nn.Module], change: Callable[[nn.Module], nn.Module | None]) -> nn.Module:
    model = build()
    return change(model) or model


class Stream(IterableDataset):
    """Rows one after the other, as a file is read.

    Args:
        tensors: one row an example.
        order: "shuffled" anew each time, "stored", or the size of a shuffle buffer.
    """

    def __init__(self, *tensors: Tensor, order: str | int = "shuffled") -> None:
        self.tensors, self.order, self.readings = tensors, order, 0

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __iter__(self):
        self.readings += 1
        generator = torch.Generator().manual_seed(self.readings)
        if self.order == "shuffled":
            rows = torch.randperm(len(self), generator=generator).tolist()
        elif self.order == "stored":
            rows = range(len(self))
        else:
            rows = _buffered(len(self), int(self.order), generator)
        return (tuple(t[k] for t in self.tensors) for k in rows)


def _buffered(total: int, size: int, generator: torch.Generator) -> list[int]:
    """Return the order that a shuffle buffer of `size` gives."""
    waiting, out = list(range(min(size, total))), []
    for following in [*range(len(waiting), total), *[None] * len(waiting)]:
        k = int(torch.randint(len(waiting), (1,), generator=generator))
        out.append(waiting[k])
        waiting[k] = following if following is not None else waiting[-1]
        if following is None:
            waiting.pop()
    return out


def swap(model: nn.Module, kind: type | tuple[type, ...], new: Callable[[nn.Module], nn.Module], at: int = 0, every: bool = False) -> None:  # fmt: skip
    """Replace the `at`-th submodule of a kind (or each one) by `new` of it, in place."""
    found = [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, kind)
    ]
    for parent, name in found if every else [found[at]]:
        setattr(parent, name, new(getattr(parent, name)))


class After(nn.Module):
    """A module with a function behind it (and one before it)."""

    def __init__(self, inner: nn.Module, after: Callable[[Any], Any] = lambda x: x, before: Callable[[Any], Any] = lambda x: x) -> None:  # fmt: skip
        super().__init__()
        self.inner, self.after, self.before = inner, after, before

    def forward(self, x: Any) -> Any:
        return self.after(self.inner(self.before(x)))


def normed(r: Recipe) -> Recipe:
    """Return a recipe with batch norm in its model, whether it has one or not."""
    if any(isinstance(m, nn.BatchNorm2d) for m in r.build().modules()):
        return r
    return r.model(lambda m: swap(m, nn.Linear, lambda a: nn.Sequential(a, nn.BatchNorm1d(a.out_features))))
