"""`Modes`: which models a loop trains, and whether they are in training or evaluation mode when they should be."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.utils.hooks import RemovableHandle

from workbench.instruments.caller import own_line
from workbench.instruments.norms import BATCH_NORMS, KINDS, FirstLayer, Statistics
from workbench.instruments.taps import TAPS

_RATES = ("p", "drop_prob", "drop_p", "dropout")
MAX_ROOTS = 16
MAX_LOOKS = 50
"""Forward passes of a part without gradient after which it is no longer looked at."""


class _Trains(Protocol):
    def is_trained_on(self, loader: int | None) -> bool: ...


class Modes:
    """Follows the forward passes of whole models; `models` are these, or they are found as the outermost modules that are called."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._given = bool(models)
        self._roots: dict[int, _Root] = {}
        self._inner: set[int] = set()
        self._last: _Root | None = None
        self.weight = 1  # backward passes that the one in progress stands for, 0 where loss functions are not seen
        self.asked: _Root | None = None  # whose pass without gradient was the last of all passes
        self.unrecorded, self.statistics, self.first = _Unrecorded(), Statistics(), FirstLayer(self._places)
        self.passes = 0  # forward passes without gradient since the last backward pass
        self._entered, self._follows = 0, None  # type: int, list[_Root] | None
        for model in models:
            self._add(model)

    def roots(self) -> Iterator[nn.Module]:
        """Iterate over the models that are still alive."""
        return (model for root in list(self._roots.values()) if (model := root.model()) is not None)

    def _add(self, model: nn.Module) -> _Root:
        inside = {id(module) for module in model.modules()} - {id(model)}
        for key in [key for key in self._roots if key in inside]:
            del self._roots[key]
        self._inner |= inside
        root = self._roots[id(model)] = _Root(model, hold=not self._given)
        return root

    def entered(self, module: nn.Module, args: Any = (), loader: int | None = None) -> str | None:
        """Return "forward" or "evaluate" for the forward pass of a whole model, None for one of its parts."""
        if not self._given:
            self.unrecorded.entered(module)
            self.first.entered(module, args)
        root = self._roots.get(id(module))
        if root is None:
            known = self._given or id(module) in self._inner or len(self._roots) >= MAX_ROOTS
            if known or next(module.parameters(), None) is None:
                return None
            root = self._add(module)
        self._entered += 1
        if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            self._last, self.asked = root, None
            return "forward"
        self.passes, self.asked, root.weight = self.passes + 1, root, self.weight
        root.look_at_evaluation(next((each for each in args if isinstance(each, torch.Tensor)), None), loader)
        self.statistics.evaluated(module)
        return "evaluate"

    def switched(self, module: nn.Module) -> None:
        """Take in that `eval()` was called on a module."""
        if (root := self._roots.get(id(module))) is not None:
            root.lines["switched"] = own_line()

    def dropped(self) -> None:
        """Take in that a function drops units without gradient, unless that is the first pass of a checkpoint."""
        if self.asked is not None and not self.asked.wrong:
            self.asked.wrong, self.asked.lines["dropout"] = ["F.dropout"], own_line()

    def measured(self) -> None:
        """Take in that a loss function compares without gradient: the pass before was no question for targets, but an evaluation."""
        if self.asked is not None:
            self.asked.asks = False

    def drew(self) -> None:
        """Take in that a batch is drawn: passes without gradient that came before gave no targets for it."""
        for root in self._roots.values():
            root.asks = False

    def backward(self, weight: int) -> None:
        """Take in that a backward pass begins, which stands for `weight` of them: what ran forward last is what trains."""
        self.statistics.trained += weight
        seen = [self._last] if self._last is not None else list(self._roots.values()) if self._given else []
        for root in seen:  # of a model whose parts are called one by one only its mode is known
            root.look_at_training(weight)

    def end_of_run(self, drawn: Mapping[int, int]) -> None:
        """Take in that passes without gradient end here, if there were any; `drawn` are the batches since the last backward pass."""
        if self.passes:
            loader = max(drawn, key=lambda key: drawn[key], default=None)
            whose = loader if loader is not None and drawn[loader] * 2 >= self.passes else None
            for root in self._roots.values():
                if root.copies is None and not root.trained:
                    root.copies = self._is_copy(root)
                root.end_of_run(loader=whose)
            self.passes = 0

    def _is_copy(self, root: _Root) -> bool | None:
        """Tell whether a model has the parameters of one that is trained, as a moving average of its weights has; None where none is trained yet."""
        model, trained = root.model(), [each.model() for each in self._roots.values() if each.trained]
        same = (other is not None and model is not None and shapes_of(other) == shapes_of(model) for other in trained)
        return any(same) if trained else None

    def settle(self, trained: set[int]) -> None:
        """Forget models of which no parameter is trained."""
        self._follows = followed = self._followed()  # later evaluations are not told from questions
        for key, root in list(self._roots.items()):
            model = root.model()
            gone = model is None or not (
                root in followed or root.copies or any(id(p) in trained for p in model.parameters())
            )
            if not self._given and gone:
                del self._roots[key]

    def _followed(self) -> list[_Root]:
        """Return the models like a trained one, and not trained themselves, that run without gradient before most backward passes, as target networks do."""
        if self._follows is not None:
            return self._follows
        trained = [root for root in self._roots.values() if root.trained]
        shapes = [shapes_of(model) for root in trained if (model := root.model()) is not None]
        passes = max((root.trained for root in trained), default=0)
        rest = [root for root in self._roots.values() if not root.trained and root.asked * 2 > passes > 0]
        return [root for root in rest if (model := root.model()) is not None and shapes_of(model) in shapes]

    def attach(self, tell: Callable[[nn.Module, tuple[Any, ...]], None]) -> list[Any]:
        """Have the known models themselves tell of their forward passes."""
        handles: list[Any] = []
        for model in self.roots():
            handles.append(_Passes(model, tell))
            if self._given:
                own = [part for part in model.modules() if next(part.parameters(recurse=False), None) is not None]
                handles += _attached(own, self.unrecorded.entered)
                handles += _attached([part for part in model.modules() if isinstance(part, KINDS)], self.first.entered)
                handles += _attached(
                    [part for part in model.modules() if isinstance(part, BATCH_NORMS)], self.statistics.entered
                )
        return handles

    def _places(self) -> dict[nn.Module, str]:
        return {part: place for model in self.roots() for place, part in model.named_modules()}

    def names(self) -> dict[int, str]:
        """Return the id of each parameter of the models and its name."""
        models = list(self.roots())
        return {
            id(p): name if len(models) == 1 else f"{type(m).__name__}.{name}"
            for m in models
            for name, p in m.named_parameters()
        }

    def to_dict(self, loaders: _Trains, drawn: Mapping[int, int] | None = None) -> dict[str, Any]:
        """Return what was seen of each model, as JSON values."""
        self.end_of_run(drawn or {})
        models = [root.to_dict(loaders) for root in self._roots.values()]
        return {
            "entered": self._entered,
            "models": models,
            "followed_by": [name for root in self._followed() if (name := root.has_changed()) is not None],
            "norm_values": self.statistics.fewest(),
            "norm_unset": self.statistics.unset(),
            "inputs": self.first.to_dict(),
        }


class _Unrecorded:
    """Which parts with parameters of their own never run with gradients, as within `torch.no_grad()`, and in which line they are called."""

    def __init__(self) -> None:
        self._parts: dict[int, tuple[weakref.ref[nn.Module], Counter[str]]] = {}
        self._done: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # that ran with gradients, or often enough without

    def entered(self, part: nn.Module, _: Any = None) -> bool:
        """Take in a forward pass; True where nothing is left to be seen of this part."""
        if part in self._done:
            return True
        if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            self._parts.pop(id(part), None)
            self._done.add(part)
        elif next(part.parameters(recurse=False), None) is not None:
            _, lines = self._parts.setdefault(id(part), (weakref.ref(part), Counter()))
            lines[own_line()] += 1
            if lines.total() >= MAX_LOOKS:
                self._done.add(part)
        return part in self._done

    def uncalled(self, model: nn.Module) -> set[int]:
        """Return the parameters, by their ids, of the parts of a model that are never called; none where no part is known to be, as in a compiled model."""
        parts = [part for part in model.modules() if next(part.parameters(recurse=False), None) is not None]
        never = [part for part in parts if part not in self._done and id(part) not in self._parts]
        return {id(p) for part in never for p in part.parameters(recurse=False)} if len(never) < len(parts) else set()

    def lines(self) -> dict[int, str]:
        """Return the parameters of these parts, by their ids, and the line in which each part is called most often."""
        alive = [(part, lines) for ref, lines in self._parts.values() if (part := ref()) is not None]
        return {id(p): lines.most_common(1)[0][0] for part, lines in alive for p in part.parameters(recurse=False)}


class _Hook:
    """Tells of the forward passes of the module that it was given to; its copies, as in a copied or saved model, do nothing."""

    def __init__(self, told: Callable[..., None]) -> None:
        self._told = told

    def __call__(self, module: nn.Module, *args: Any) -> None:
        self._told(module, *args)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Return what is copied or saved: a function of Python's own that does nothing, so that the file needs nothing of ours."""
        return getattr, (contextlib.nullcontext(), "__exit__")


def _attached(parts: Iterable[nn.Module], entered: Callable[[nn.Module, Any], bool]) -> list[RemovableHandle]:
    """Have parts tell of their forward passes, each until `entered` says that nothing is left to be seen of it."""

    def told(held: list[RemovableHandle], part: nn.Module, args: Any) -> None:
        if is_compiling():
            return
        over = True
        with contextlib.suppress(Exception):  # of ours: the training goes on
            over = entered(part, args)
        if over:
            held[0].remove()

    handles: list[RemovableHandle] = []
    for part in parts:
        held: list[RemovableHandle] = []
        held.append(part.register_forward_pre_hook(_Hook(functools.partial(told, held))))
        handles += held
    return handles


class _Passes:
    """Tells of the forward passes of one model: its calls or, where it is never called as a whole, those of the part that comes first.

    Once it is called as a whole its class's `forward` tells of it, which costs a third of a hook.
    """

    __reduce__ = _Hook.__reduce__

    def __init__(self, model: nn.Module, tell: Callable[[nn.Module, tuple[Any, ...]], None]) -> None:
        self._model, self._tell = weakref.ref(model), tell
        self._whole = False
        self._first: dict[bool, int] = {}
        self._hooks = [
            part.register_forward_pre_hook(self, with_kwargs=True) for part in dict.fromkeys([model, *_parts(model)])
        ]

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_compiling():
            return
        passing = TAPS.passing
        if passing is not None and self._whole and torch.is_grad_enabled():
            passing.held = args or kwargs
            return
        model = self._model()
        if module is model and not self._whole:
            self._whole = True
            for handle in self._hooks[not TAPS.watch_forward(model, self) :]:
                handle.remove()  # nobody listens to them any more, and each costs a little
        first = id(model) if self._whole else self._first.setdefault(torch.is_grad_enabled(), id(module))
        if model is not None and id(module) == first:
            self._tell(model, (*args, kwargs))

    def remove(self) -> None:
        for handle in self._hooks:
            handle.remove()
        if (model := self._model()) is not None and TAPS.wholes.get(id(model)) is self:
            del TAPS.wholes[id(model)]


def _parts(model: nn.Module) -> Iterator[nn.Module]:
    """Iterate over the parts of a model that have parameters and are called."""
    for part in model.children():
        if isinstance(part, (nn.ModuleList, nn.ModuleDict)):
            yield from _parts(part)
        elif next(part.parameters(), None) is not None:
            yield part


class _Root:
    """One model: how often it trained or was evaluated in which mode."""

    def __init__(self, model: nn.Module, *, hold: bool) -> None:
        self.model: Callable[[], nn.Module | None] = (lambda: model) if hold else weakref.ref(model)
        self._random = [
            (f"{type(module).__name__} {name!r}" if name else type(module).__name__, weakref.ref(module))
            for name, module in model.named_modules()
            if _depends_on_mode(module)
        ]
        self.trained = self.trained_in_eval = 0
        self.copies: bool | None = None  # whether it has the shapes of a model that is trained, where that is known
        self.wrong: list[str] = []
        self._passes = self._again = 0  # without gradient in a row, and of them on the very tensor of the one before
        self.asked = 0  # backward passes before which it ran without gradient, on their batch as far as is known
        self.asks, self.weight = False, 1
        self._drawn_from = set[int | None]()  # the loaders that gave a batch last before its passes in a row
        self._given: Callable[[], torch.Tensor | None] = lambda: None  # what it ran on last then
        self._before: torch.Tensor | None = None  # some of its numbers then
        # by loader, training mode, and whether on the tensor of the run before
        self._runs: Counter[tuple[int | None, bool, bool]] = Counter()
        self.lines: dict[str, str] = {}

    def _training(self) -> list[str]:
        return [name for name, ref in self._random if (module := ref()) is not None and module.training]

    def look_at_training(self, weight: int) -> None:
        """Count a pass that is trained on."""
        self.trained += weight
        if self._random and not self._in_training() and not self._training():
            self.trained_in_eval += weight
            if "eval" not in self.lines:
                self.lines["eval"] = own_line()

    def _in_training(self) -> bool:
        """Tell the mode of the model, within wrappers that hold it and nothing else."""
        model = self.model()
        while model is not None and model.training and len(inner := list(model.children())) == 1:
            model = inner[0]
        return model is not None and model.training

    def look_at_evaluation(self, given: torch.Tensor | None, loader: int | None) -> None:
        """Note of a pass without gradient what of it is in training mode; one on the very tensor of the last time is an evaluation."""
        again = given is not None and given is self._given()
        self._drawn_from.add(loader)
        self._passes, self._again, self.asks = self._passes + 1, self._again + again, self.asks or not again
        self._given = self._given if given is None else weakref.ref(given)
        self._before = self._numbers() if self._before is None else self._before
        self.wrong = self._training()
        if self.wrong and "train" not in self.lines:
            self.lines["train"] = own_line()

    def end_of_run(self, *, loader: int | None) -> None:
        """Take in that passes without gradient in a row are over, on batches of this loader; many on one tensor are draws that are averaged on purpose."""
        self.asked += self.weight if self._passes > 0 and self.asks else 0
        if self._passes and (self.trained or self.copies) and not (self._passes > 2 and 2 * self._again > self._passes):
            for each in self._drawn_from if self.copies and loader is not None else [loader]:  # it may teach, too
                self._runs[each, bool(self.wrong), self._again == self._passes] += 1
        self.wrong, self._passes, self._again, self.asks, self._drawn_from = [], 0, 0, False, set()

    def _numbers(self) -> torch.Tensor:
        parameters = [] if (model := self.model()) is None else list(model.parameters())[-2:]
        return torch.cat([p.detach().flatten()[:64] for p in parameters])

    def has_changed(self) -> str | None:
        """Return the name of a model whose numbers are others than before its first pass without gradient, else None."""
        return (
            None if self._before is None or torch.equal(self._before, self._numbers()) else type(self.model()).__name__
        )

    def to_dict(self, loaders: _Trains) -> dict[str, Any]:
        """Return the counts; those before the model trains tell it the shapes of its inputs."""
        apart = {key: not loaders.is_trained_on(key[0]) and key[0] is not None for key in self._runs}
        wrong = {key: count for key, count in self._runs.items() if key[1]}
        model = self.model()
        return {
            "model": "a model that is gone" if model is None else type(model).__name__,
            "depends_on_mode": [name for name, _ in self._random][:5], "trained": self.trained, "trained_in_eval": self.trained_in_eval,
            "runs": sum(self._runs.values()), "runs_in_train": sum(wrong.values()),
            "runs_in_train_apart": sum(count for key, count in wrong.items() if apart[key]),
            "runs_in_train_no_loader": sum(count for key, count in wrong.items() if key[0] is None),
            "runs_in_train_again": sum(count for key, count in wrong.items() if key[0] is None and key[2]),
            "training": model is not None and model.training, "lines": self.lines,
        }  # fmt: skip


def shapes_of(model: nn.Module) -> dict[str, torch.Size]:
    """Return the shapes of a model's parameters, by their names."""
    return {name: p.shape for name, p in model.named_parameters()}


def _depends_on_mode(module: nn.Module) -> bool:
    """Tell whether a module does something else in evaluation: dropout that drops, batch norm that is trained."""
    if isinstance(module, BATCH_NORMS):
        affine = list(module.parameters(recurse=False))
        return module.track_running_stats and (not affine or any(p.requires_grad for p in affine))
    if "Drop" not in type(module).__name__ and not isinstance(module, (nn.RNNBase, nn.MultiheadAttention)):
        return False
    rate = next((v for name in _RATES if isinstance(v := getattr(module, name, None), float)), 0.0)
    return rate > 0.0
