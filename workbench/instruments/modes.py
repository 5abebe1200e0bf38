"""`Modes`: which models a loop trains, and whether they are in training or evaluation mode when they should be."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from workbench.instruments.caller import own_line

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
MAX_ROOTS = 16


class Modes:
    """Follows the forward passes of whole models; `models` are these, or they are found as the outermost modules that are called."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._given = bool(models)
        self._roots: dict[int, _Root] = {}
        self._inner: set[int] = set()
        self._last: _Root | None = None
        self._run = 0  # forward passes without gradient since the last backward pass
        self._run_loader: int | None = None
        self._trained_from: set[int | None] = set()
        self._backwards = 0
        for model in models:
            self._add(model)

    @property
    def given(self) -> bool:
        """Whether models were named, so that no other is looked for."""
        return self._given

    def roots(self) -> Iterator[nn.Module]:
        """Iterate over the models that are still alive."""
        return (model for root in list(self._roots.values()) if (model := root.model()) is not None)

    def _add(self, model: nn.Module) -> _Root:
        inside = {id(module) for module in model.modules()} - {id(model)}
        for key in [key for key in self._roots if key in inside]:
            del self._roots[key]
        self._inner |= inside
        root = self._roots[id(model)] = _Root(model)
        return root

    def entered(self, module: nn.Module, *, loader: int | None) -> str | None:
        """Return "forward" or "evaluate" for the forward pass of a whole model, None for one of its parts."""
        root = self._roots.get(id(module))
        if root is None:
            known = self._given or id(module) in self._inner or len(self._roots) >= MAX_ROOTS
            if known or next(module.parameters(), None) is None:
                return None
            root = self._add(module)
        learns = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        if learns:
            self._last = root
            return "forward"
        self._run += 1
        self._run_loader = loader
        root.look_at_evaluation()
        return "evaluate"

    def backward(self, *, loader: int | None) -> None:
        """Take in that a backward pass begins: what ran forward last is what trains."""
        self._backwards += 1
        self._trained_from.add(loader)
        for root in list(self._roots.values()):
            root.end_of_run(self._run, loader=self._run_loader)
        self._run = 0
        if self._last is not None:
            self._last.look_at_training()

    def settle(self, trained: set[int]) -> None:
        """Forget models of which no parameter is trained."""
        for key, root in list(self._roots.items()):
            model = root.model()
            if not self._given and (model is None or not any(id(p) in trained for p in model.parameters())):
                del self._roots[key]

    def attach(self, tell: Callable[[nn.Module, tuple[Any, ...]], None]) -> list[RemovableHandle]:
        """Have the known models themselves tell of their forward passes."""
        return [
            module.register_forward_pre_hook(passes.entered, with_kwargs=True)
            for model in self.roots()
            for passes in [_Passes(model, tell)]
            for module in (model, *_parts(model))
        ]

    def names(self) -> dict[int, str]:
        """Return the id of each parameter of the models and its name."""
        models = list(self.roots())
        return {
            id(p): name if len(models) == 1 else f"{type(m).__name__}.{name}"
            for m in models
            for name, p in m.named_parameters()
        }

    def to_dict(self) -> dict[str, Any]:
        """Return what was seen of each model, as JSON values."""
        for root in list(self._roots.values()):
            root.end_of_run(self._run, loader=self._run_loader)
        self._run = 0
        return {"models": [root.to_dict(self._trained_from) for root in self._roots.values()]}


class _Passes:
    """Tells of the forward passes of one model: its calls or, where it is never called as a whole, those of the part that comes first."""

    def __init__(self, model: nn.Module, tell: Callable[[nn.Module, tuple[Any, ...]], None]) -> None:
        self._model, self._tell = weakref.ref(model), tell
        self._whole = False
        self._first: dict[bool, int] = {}

    def entered(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        model = self._model()
        self._whole = self._whole or module is model
        first = id(model) if self._whole else self._first.setdefault(torch.is_grad_enabled(), id(module))
        if model is not None and id(module) == first:
            self._tell(model, (*args, kwargs))


def _parts(model: nn.Module) -> Iterator[nn.Module]:
    """Iterate over the parts of a model that have parameters and are called."""
    for part in model.children():
        if isinstance(part, (nn.ModuleList, nn.ModuleDict)):
            yield from _parts(part)
        elif next(part.parameters(), None) is not None:
            yield part


class _Root:
    """One model: how often it trained or was evaluated in which mode."""

    def __init__(self, model: nn.Module) -> None:
        self.model = weakref.ref(model)
        self.kind = type(model).__name__
        self._random = [(name, module) for name, module in model.named_modules() if _depends_on_mode(module)]
        self._random = [(name, weakref.ref(module)) for name, module in self._random]
        self.trained = self.trained_in_eval = self.evaluated = self.evaluated_in_train = 0
        self._wrong_run: list[str] = []
        self._loaders: dict[int | None, int] = {}
        self._runs = 0
        self.lines: dict[str, str] = {}

    def _training(self) -> list[str]:
        return [name for name, ref in self._random if (module := ref()) is not None and module.training]

    def look_at_training(self) -> None:
        """Count a pass that is trained on; it is in evaluation mode where nothing that depends on the mode is in training mode."""
        self.trained += 1
        if self._random and not self._training():
            self.trained_in_eval += 1
            if "eval" not in self.lines:
                self.lines["eval"] = own_line()

    def look_at_evaluation(self) -> None:
        """Count a pass without gradient, and what of it is in training mode."""
        self.evaluated += 1
        self._wrong_run = self._training()
        if self._wrong_run and "train" not in self.lines:
            self.lines["train"] = own_line()

    def end_of_run(self, passes: int, *, loader: int | None) -> None:
        """Take in that so many passes without gradient stood in a row."""
        if passes < 2:
            self._wrong_run = []
            return
        self._runs += 1
        if self._wrong_run:
            self.evaluated_in_train += 1
            self._loaders[loader] = self._loaders.get(loader, 0) + 1
        self._wrong_run = []

    def to_dict(self, trained_from: set[int | None]) -> dict[str, Any]:
        apart = sum(
            count for loader, count in self._loaders.items() if loader is not None and loader not in trained_from
        )
        model = self.model()
        training = model is not None and model.training
        return {
            "model": self.kind, "depends_on_mode": [name for name, _ in self._random][:5], "trained": self.trained,
            "trained_in_eval": self.trained_in_eval, "runs": self._runs, "runs_in_train": self.evaluated_in_train,
            "runs_in_train_apart": apart, "runs_in_train_no_loader": self._loaders.get(None, 0), "training": training, "lines": self.lines,
        }  # fmt: skip


def _depends_on_mode(module: nn.Module) -> bool:
    """Tell whether a module does something else in evaluation: dropout that drops, batch norm that is trained."""
    if isinstance(module, _NORMS):
        affine = list(module.parameters(recurse=False))
        return module.track_running_stats and (not affine or any(p.requires_grad for p in affine))
    if "Drop" not in type(module).__name__:
        return False
    rate = next(
        (v for name in ("p", "drop_prob", "drop_p") if isinstance(v := getattr(module, name, None), float)), 0.0
    )
    return rate > 0.0
