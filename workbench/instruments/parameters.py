"""`Parameters`: which parameters get gradients, which are updated, and which no optimizer has."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from workbench.instruments.caller import own_line
from workbench.instruments.modes import Modes, shapes_of
from workbench.instruments.norms import each_norm, stacked

MAX_NAMES = 20
MAX_LAYERS = 64
"""Parameter tensors up to which each has a column of its own (rule of thumb)."""
FIRST_LOOKS = (10, 25)
"""Updates at which parameters are looked at besides those on the cadence: a warmup may leave the first one without effect."""


def described(optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's class, how many parameters it has, and the constants of its first groups, None where they are no numbers."""
    groups = [
        {
            "lr": _plain(group.get("lr")), "weight_decay": _plain(group.get("weight_decay", 0.0)), "parameters": len(group["params"]),
            "vectors": sum(p.ndim <= 1 for p in group["params"]), "momentum": _plain(group.get("momentum")),
            "betas": [_plain(b) for b in group.get("betas") or ()], "eps": _plain(group.get("eps")), "nesterov": bool(group.get("nesterov")),
            "alpha": _plain(group.get("alpha")),
        }
        for group in optimizer.param_groups[:8]
    ]  # fmt: skip
    return {
        "name": type(optimizer).__name__,
        "groups": groups,
        "parameters": sum(len(group["params"]) for group in optimizer.param_groups),
        "decoupled": isinstance(optimizer, torch.optim.AdamW),
    }


class Parameters:
    """Looks at the gradients of each optimizer's parameters before its updates."""

    def __init__(self) -> None:
        self._optimizers: dict[int, dict[str, Any]] = {}
        self._owned: dict[int, Tensor] = {}
        self._with_grad: set[int] = set()
        self._elsewhere: set[int] = set()
        self._reached: set[int] = set()  # by losses that `backward` was called on
        self._homeless: dict[int, Tensor] = {}
        self._looks = self._moves = 0
        self._lr = self._highest = self._moved_at = (
            0.0  # the lr now, the largest so far, and the largest at which updates were measured
        )
        self._largest: dict[str, Tensor] = {}
        self._swallowed: list[Tensor] = []
        self.survival = Survival()

    def elsewhere(self, optimizer: Optimizer) -> None:
        """Note the parameters of an optimizer that is not observed."""
        self._elsewhere.update(id(p) for group in optimizer.param_groups for p in group["params"])

    def look(self, number: int, optimizer: Optimizer, leaves: Collection[Tensor]) -> bool:
        """Note which parameters have a gradient now, and return whether none has; `leaves` are those that the loss depends on."""
        self._looks += 1
        empty = True
        if number == 0:
            self._lr = max((lr for g in optimizer.param_groups if isinstance(lr := g.get("lr"), float)), default=0.0)
            self._highest = max(self._highest, self._lr)
        if number not in self._optimizers:
            shared = sum(id(p) in self._owned for group in optimizer.param_groups for p in group["params"])
            self._optimizers[number] = described(optimizer) | {"shared": shared}  # with those that stepped before
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    empty = False
                    self._with_grad.add(id(p))
                self._owned.setdefault(id(p), p)
        self._reached.update(map(id, leaves))
        self._homeless |= {id(p): p for p in leaves if id(p) not in self._owned and p.grad is not None}
        return empty

    def moved(self, updates: Sequence[tuple[str, Tensor]], swallowed: Tensor | None) -> None:
        """Note the largest update of each parameter so far, and which share of numbers of 16 bits that have a gradient it left as they were."""
        self._moves += 1
        self._swallowed += [swallowed] if swallowed is not None and len(self._swallowed) < MAX_LAYERS else []
        self._moved_at = max(self._moved_at, self._lr)
        for name, size in updates:
            known = self._largest.get(name)
            self._largest[name] = size if known is None else torch.fmax(known, size)  # of a lost training, until then

    def to_dict(self, modes: Modes) -> dict[str, Any]:
        """Return optimizers and the names of the parameters that something is missing of, as JSON values."""
        names = modes.names()
        models = list(modes.roots())
        silent = [key for key in self._owned if key not in self._with_grad]
        homeless = [key for key in self._homeless if key not in self._owned and key not in self._elsewhere]
        unowned = [
            names.get(key, f"a parameter of shape {tuple(self._homeless[key].shape)} outside of the model")
            for key in homeless
        ]
        in_models = set(names)
        strangers = [key for key in self._owned if key not in in_models] if models else []
        frozen = sum(1 for p in self._owned.values() if not p.requires_grad)
        unrecorded = modes.unrecorded.lines()
        trained = {
            key: names.get(key, f"a parameter of shape {tuple(self._owned[key].shape)}")
            for key in silent
            if self._owned[key].requires_grad
        }
        hidden = [key for key in trained if key in unrecorded]
        uncalled = set().union(*map(modes.unrecorded.uncalled, models))
        still = [name for name, size in self._largest.items() if float(size) == 0]
        return {
            "optimizers": {str(number): found for number, found in self._optimizers.items()},
            "owned": len(self._owned), "with_gradient": len(self._with_grad), "frozen": frozen, "looks": self._looks,
            "without_gradient": [*trained.values()][:MAX_NAMES], "without_grad_mode": [trained[key] for key in hidden][:MAX_NAMES],
            "uncalled": [name for key, name in trained.items() if key in uncalled][:MAX_NAMES],
            "wiped": [name for key, name in trained.items() if key in self._reached][:MAX_NAMES],
            "without_grad_mode_line": unrecorded[hidden[0]] if hidden else "",
            "unowned": unowned[:MAX_NAMES], "strangers": len(strangers), "strangers_without_gradient": sum(key not in self._with_grad for key in strangers),
            "unowned_in_model": sum(key in in_models for key in homeless), "moves": self._moves,
            "swallowed": median(map(float, self._swallowed)) if self._swallowed else None,
            "moved_at": self._moved_at / self._highest if self._highest else 1.0,
            "still": still[:MAX_NAMES], "named": bool(models), "numbers": sum(p.numel() for model in models for p in model.parameters()),
            "asleep": _asleep(models), "kept": self.survival.to_dict(),
        }  # fmt: skip


_NUMBERS, _FEW = 4096, 64
"""Of a tensor whose distribution is looked at, and of one whose updates are followed (rules of thumb)."""


def _asleep(models: Iterable[nn.Module]) -> list[dict[str, Any]]:
    """Return name, numbers and "random" of frozen parameters that have two dimensions or more: whether they are as torch draws them for a new layer.

    That is evenly within 1/sqrt(fan in), or of a recurrent layer 1/sqrt(units), and trained weights are not. Other initialisations are not known.
    Left out: a model that is frozen as a whole, beside a trained one of the same names and shapes, as a target network or a teacher is; and
    parameters without values here, or whose type holds them in its own way, as quantised ones.
    """
    parts: list[list[nn.Module]] = [[], []]
    for model in models:
        parts[any(p.requires_grad for p in model.parameters())].append(model)
    still, trained = parts
    shapes = [shapes_of(model) for model in trained]
    found = []
    for model in (*trained, *(model for model in still if shapes_of(model) not in shapes)):
        for place, part in model.named_modules():
            known = isinstance(part, (nn.Linear, nn.modules.conv._ConvNd, nn.RNNBase))
            for name, p in part.named_parameters(recurse=False):
                if p.requires_grad or p.ndim < 2 or p.is_meta or not p.numel():
                    continue
                fan = part.hidden_size if isinstance(part, nn.RNNBase) else p.shape[1:].numel()
                with contextlib.suppress(RuntimeError, TypeError, ValueError):  # as of values that are packed
                    values = p.to_local() if hasattr(p, "to_local") else p  # a DTensor's own shard
                    if type(values) in (Tensor, nn.Parameter):
                        random = known and _even(values, fan**-0.5)
                        found.append({"name": f"{place}.{name}".lstrip("."), "numbers": p.numel(), "random": random})
    return found


def _even(values: Tensor, bound: float, *, least: int = 64, sds: float = 1.95) -> bool:
    """Tell whether values are drawn evenly from within a bound: Kolmogorov and Smirnov's test, at one in a thousand.

    Args:
        least: values below which nothing is said (rule of thumb).
        sds: largest distance between the distributions, times the root of the number of values, that chance explains (0.1 % of cases are beyond).
    """
    shares = np.sort(
        (values.detach().flatten()[:: values.numel() // _NUMBERS + 1].cpu().double().numpy() / bound + 1) / 2
    )
    expected = (np.arange(shares.size) + 0.5) / max(shares.size, 1)
    inside = shares.size >= least and shares[0] > -1e-6 and shares[-1] < 1 + 1e-6
    return bool(inside and np.abs(shares - expected).max() * shares.size**0.5 < sds)


def _plain(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float, Tensor)):
        return None
    return float(value) if not isinstance(value, Tensor) or value.numel() == 1 else None


class Survival:
    """What is left of updates: how many of some numbers keep `least` of their step until the next update begins, or beyond the loading of weights.

    A moving average that is written into the model leaves a thousandth of each step; clipped, masked or projected weights leave some of the numbers be.
    """

    def __init__(self, *, least: float = 0.05, most: int = 40) -> None:
        self._least, self._most = least, most  # updates that are looked at (rules of thumb)
        self._begun: tuple[int, Tensor] | None = None  # the update that is looked at, and the numbers before it
        self._ended: Tensor | None = None  # after it
        self._origin: Tensor | None = None  # in the first update, or that after the last loading
        self._loaded: Tensor | None = None  # before a loading, until the next update
        self._kept: dict[str, list[Tensor]] = {"updates": [], "loads": []}
        self._first: Tensor | None = None  # before the first update
        # of an update, which part of the way from there is left when it begins; 1 where all is
        self._set_back: list[tuple[int, Tensor]] = []
        self.again = 0  # the update by which all are drawn back once more, where that is done on a cadence
        self._ids, self._line = set[int](), ""
        self._own = ""  # line in which a model is given its own parameters to load
        self._equal: list[
            tuple[str, Tensor]
        ] = []  # of loadings, the line, and whether all numbers are what they were already

    @property
    def due(self) -> bool:
        """Tell whether weights were loaded since the last update."""
        return self._loaded is not None

    def begins(self, optimizer: Optimizer, update: int, *, alone: bool = False) -> None:
        """Take in that an update begins that is looked at, `alone` where the next one is not, or the first one after a loading."""
        follows = self._begun is not None and self._begun[0] == update - 1
        wanted = len(self._kept["updates"]) < self._most and (follows or not alone)
        if not (wanted or self.due) or (now := self._some(optimizer)) is None:
            return
        if follows and self._begun is not None and self._ended is not None:
            self._note("updates", self._begun[1], self._ended, now)
            if self._first is not None and self._first.shape == now.shape == self._ended.shape:
                left = _left(self._first, self._ended, now)
                self._set_back.append((update, left))
                self.again = 2 * update if left.is_cpu and bool(left < 1) else self.again
        if self._loaded is not None and self._origin is not None:
            self._note("loads", self._origin, self._loaded, now)
            self._origin = None
        self._first = now if self._first is None else self._first
        self._origin = now if self._origin is None else self._origin
        self._begun, self._ended, self._loaded = (update, now), None, None

    def ends(self, optimizer: Optimizer) -> None:
        """Take in that it has ended."""
        if self._begun is not None and self._ended is None:
            self._ended = self._some(optimizer)

    def loads(self, module: nn.Module, state: Any, optimizer: Optimizer | None, *, chosen: bool) -> None:
        """Take in that weights are about to be loaded into a module, `chosen` after an evaluation: those that it has may be the best so far."""
        mine = any(id(p) in self._ids for p in module.parameters())
        if mine and isinstance(state, Mapping):
            pairs = [(p, state[name]) for name, p in module.named_parameters() if name in state]
            plain = [
                (p.detach(), kept)
                for p, kept in pairs
                if type(kept) in (Tensor, nn.Parameter) and kept.shape == p.shape and not kept.is_meta
            ]
            if plain and len(plain) == len(pairs) and all(kept.data_ptr() == p.data_ptr() for p, kept in plain):
                self._own = own_line()
            if plain and len(self._equal) < self._most and not chosen:
                some = [(p.flatten()[:_FEW], kept.detach().flatten()[:_FEW].to(p)) for p, kept in plain[:4]]
                same = stacked([torch.isclose(p, kept, rtol=1e-5).all() for p, kept in some]).all()
                self._equal.append((own_line(), same))
        if optimizer is not None and not self.due and mine:
            self._loaded, self._line = self._some(optimizer), own_line()

    def _some(self, optimizer: Optimizer) -> Tensor | None:
        params = [
            p for group in optimizer.param_groups for p in group["params"] if p.grad is not None or id(p) in self._ids
        ]
        some = [
            p
            for p in params[:: len(params) // 4 or 1]
            if type(p) in (Tensor, nn.Parameter) and p.device == params[0].device
        ]
        self._ids = self._ids or {id(p) for p in params}
        real = (torch.view_as_real(p) if p.is_complex() else p for p in (each.detach() for each in some))
        return torch.cat([p.reshape(-1)[:_FEW].float() for p in real]) if some else None

    def _note(self, what: str, before: Tensor, after: Tensor, now: Tensor) -> None:
        if before.shape == after.shape == now.shape and len(self._kept[what]) < self._most:
            moved = after - before
            left = ((now - before).abs() >= self._least * moved.abs()) & (moved != 0)
            self._kept[what].append(left.sum() / (moved != 0).sum())

    def to_dict(self) -> dict[str, Any]:
        """Return the shares of numbers that keep a part of their step, of updates and of what stands between loadings, and which part of the way from the first values is left after each, as JSON values."""
        shares = {what: [x for x in map(float, kept) if math.isfinite(x)] for what, kept in self._kept.items()}
        return shares | {
            "line": self._line,
            "own": self._own,
            "equal": [(line, bool(same)) for line, same in self._equal],
            "set_back": [(update, float(left)) for update, left in self._set_back],
        }


def _left(first: Tensor, ended: Tensor, now: Tensor, *, rounding: float = 0.01) -> Tensor:
    """Return which part of the way from first values is left, where all numbers have gone back by the same part; else 1, as where all began at 0 and are scaled (rule of thumb: what rounding leaves of differences)."""
    way, back = ended - first, now - first
    part = (way @ back) / (way @ way)
    return torch.where(((back - part * way).norm() <= rounding * way.norm()) & first.any(), part, 1.0)


def _swallowed(params: Sequence[Tensor], before: Sequence[Tensor]) -> Tensor | None:
    """Return which share of numbers of 16 bits that have a gradient are as they were; None where there are none."""
    short = [(p, old) for p, old in zip(params, before, strict=True) if p.dtype in (torch.bfloat16, torch.float16)]
    counts = [torch.stack([(torch.eq(p, old) & p.grad.ne(0)).sum(), p.grad.ne(0).sum()]) for p, old in short if p.grad is not None and p.grad.layout == torch.strided]  # fmt: skip
    if not counts:
        return None
    same, wanted = torch.stack([each.to(counts[0].device) for each in counts]).sum(0)
    share: Tensor = same / wanted.clamp(min=1)
    return share


class Snapshot:
    """Parameters as they are before an update, on a cadence of `every` updates, so that the update can be measured."""

    def __init__(self, every: int) -> None:
        self._every, self._next = every, 0
        self._before: list[Tensor] = []
        self._layers: list[tuple[str, Tensor]] = []
        self._rounds = False  # whether what an update leaves over is lost; optimizers of others may keep it

    def take(self, optimizer: Optimizer, updates: int, names: Callable[[], dict[int, str]]) -> None:
        """Keep the parameters where the cadence has come round after so many updates; `names` gives theirs by their ids."""
        if updates < self._next:
            return
        self._next = min(k for k in (*FIRST_LOOKS, (updates // self._every + 1) * self._every) if k > updates)
        params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if any(type(p) not in (Tensor, nn.Parameter) for p in params):
            return
        if [id(p) for p in params] != [id(p) for _, p in self._layers]:
            known = names()
            self._layers = [(known.get(id(p), f"parameter{i}"), p) for i, p in enumerate(params)]
        self._before = [p.detach().clone() for p in params]
        self._rounds = type(optimizer).__module__.startswith("torch.optim")

    def measured(
        self, moved: Callable[[Sequence[tuple[str, Tensor]], Tensor | None], None]
    ) -> dict[str, Tensor | float]:
        """Return the columns of an update whose parameters were kept, else none; `moved` is told the norm of each one's update."""
        if not self._before:
            return {}
        before, self._before = self._before, []
        with torch.no_grad():
            norms = each_norm(torch._foreach_sub([p for _, p in self._layers], before))
            updates, held = stacked(norms), stacked(each_norm(before))
        row: dict[str, Tensor | float] = {
            "update_norm": torch.linalg.vector_norm(updates),
            "param_norm": torch.linalg.vector_norm(held),
        }
        names = [name for name, _ in self._layers]
        swallowed = _swallowed([p for _, p in self._layers], before) if self._rounds else None
        moved(list(zip(names, norms, strict=True)), swallowed)
        if len(names) <= MAX_LAYERS:
            ratios = (updates / held).unbind()
            row |= {f"update_ratio/{name}": ratio for name, ratio in zip(names, ratios, strict=True)}
        return row
