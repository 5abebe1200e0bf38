"""`collect_parameters`: which parameters are trained at all, and whether the others hold anything."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from workbench.config import TrainConfig
from workbench.errors import WorkbenchError
from workbench.train.batches import train_batches
from workbench.train.forward import per_example
from workbench.train.gradients import needs_gradient
from workbench.train.own.torch_optimizer import build_optimizer
from workbench.train.rng import isolated_rng
from workbench.train.stacked_weights import build_model
from workbench.workloads.base import Workload

_LINEAR = frozenset(
    f"{name}Backward0"
    for name in ("T", "Transpose", "Permute", "View", "UnsafeView", "Expand", "Unsqueeze", "Squeeze", "Addmm", "Mm", "Mv", "Bmm",
    "Add", "Sub", "Mul", "Div", "Neg", "ToCopy", "Convolution")
) | {"AccumulateGrad"}  # fmt: skip
_WAVES = frozenset({"SinBackward0", "CosBackward0"})
"""A random projection and then a sine or cosine are random Fourier features (Rahimi and Recht, 2007), which nobody makes by accident."""


def collect_parameters(workload: Workload, config: TrainConfig, device: torch.device) -> dict[str, Any]:
    """Return JSON facts about parameters that stay as they begin: frozen, not given to the optimizer, or unknown to the model.

    Whether they hold anything is told by a second model under another seed: what was loaded or set to a constant is equal in both,
    and so is a net that was made once and for all. The model does not know what a list holds; such parameters are found where the
    loss would send them a gradient. Those of the loss alone, without a gradient, are its own affair.

    Returns:
        "numbers" (of the model, and of random parameters outside it), and under "frozen", "unowned" and "outside" a row for each parameter:
        "name", "numbers", "random", "waves" (only a sine or cosine takes what it makes), "by_loss" (the model does not use it).
    """
    needs_gradient(workload)
    with isolated_rng():
        model = build_model(workload, config, device)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        frozen, unowned = {name: p for name, p in model.named_parameters() if not p.requires_grad}, {}
        if callable(config.optimizer):
            optimizer = build_optimizer(config, model, list(trained.values()))
            owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
            unowned = {name: p for name, p in trained.items() if id(p) not in owned}
        used = _used(workload, config, model, device)
        outside, idle = _outside(model, used), frozen | unowned
        random: set[str] = set()
        if idle or outside:
            second = build_model(workload, config.replace(shared_seed=config.shared_seed + 1), device)
            other = dict(second.named_parameters())
            random = {name for name, p in idle.items() if name in other and not _equal_values(p, other[name])}
            if outside:
                seeded = bool(trained) and all(
                    name in other and _equal_values(p, other[name]) for name, p in trained.items()
                )
                again = _outside(second, _used(workload, config, second, device))
                random |= _random_outside(model, outside, again, seeded=seeded)
    in_use = {name: p for name, p in outside.items() if p.requires_grad}
    frozen |= {name: p for name, p in outside.items() if name not in in_use and id(p) not in used.by_loss}
    counted = (*model.parameters(), *(p for name, p in outside.items() if name in random))
    found: dict[str, Any] = {"numbers": sum(p.numel() for p in counted)}
    for kind, each in (("frozen", frozen), ("unowned", unowned), ("outside", in_use)):
        found[kind] = [
            {"name": name, "numbers": p.numel(), "random": name in random, "waves": id(p) in used.waves, "by_loss": id(p) in used.by_loss}
            for name, p in each.items()
        ]  # fmt: skip
    return found


class _Used(NamedTuple):
    """Parameters that the loss of a batch depends on; by id, those that only the loss itself uses, and those that only waves take."""

    parameters: list[nn.Parameter]
    by_loss: set[int]
    waves: set[int]


def _used(workload: Workload, config: TrainConfig, model: nn.Module, device: torch.device) -> _Used:
    """Return the parameters that the loss of a batch depends on, frozen ones that the model holds too."""
    held = (*model.parameters(), *(p for _, p in _held_in_containers(model)))
    for asleep in ([p for p in held if not p.requires_grad and p.is_floating_point()], []):
        with contextlib.suppress(WorkbenchError, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError):
            batch, examples = next(train_batches(workload, config, device))[0]
            try:
                for p in asleep:
                    p.requires_grad_(True)
                outputs, losses, _ = per_example(workload, model.train(), batch, examples)
            finally:
                for p in asleep:
                    p.requires_grad_(False)
            by_model, _ = _graph(leaf.grad_fn for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor))
            leaves, takers = _graph([losses.grad_fn])
            waves = {at for at, leaf in leaves.items() if _only_waves_take(leaf, takers)}
            return _Used([leaf.variable for leaf in leaves.values()], leaves.keys() - by_model.keys(), waves)
    return _Used([], set(), set())  # the pre-flight says what is wrong


def _graph(roots: Iterable[Any]) -> tuple[dict[int, Any], dict[Any, list[Any]]]:
    """Return the nodes of parameters, by their ids, that a backward pass from some nodes would reach, and who takes what each node makes."""
    waiting, takers, leaves = [root for root in roots if root is not None], dict[Any, list[Any]](), dict[int, Any]()
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if isinstance(getattr(node, "variable", None), nn.Parameter):
            leaves[id(node.variable)] = node
        for child in (child for child, _ in node.next_functions if child is not None):
            takers.setdefault(child, []).append(node)
            if child not in seen:
                seen.add(child)
                waiting.append(child)
    return leaves, takers


def _only_waves_take(leaf: Any, takers: Mapping[Any, Sequence[Any]]) -> bool:
    """Tell whether all that is made of a leaf, by linear operations, goes into a sine or a cosine."""
    waiting = [leaf]
    while waiting:
        node = waiting.pop()
        if node.name() not in _WAVES:
            if node.name().rsplit("::")[-1] not in _LINEAR or not takers.get(node):
                return False
            waiting.extend(takers[node])
    return True


def _outside(model: nn.Module, used: _Used) -> dict[str, nn.Parameter]:
    """Return what is used and `model.parameters()` does not hold."""
    known, places = {id(p) for p in model.parameters()}, {id(p): name for name, p in _held_in_containers(model)}
    found = {}
    for k, p in enumerate(p for p in used.parameters if id(p) not in known):
        found[places.get(id(p), f"a parameter of shape {tuple(p.shape)}{f' ({k + 1})' if k else ''}")] = p
    return dict(sorted(found.items()))


def _random_outside(
    model: nn.Module, outside: Mapping[str, nn.Parameter], again: Mapping[str, nn.Parameter], *, seeded: bool
) -> set[str]:
    """Return which parameters outside a model differ from all those outside another build of it, and are no copies of its own."""
    others = list(again.values())

    def is_random(p: nn.Parameter) -> bool:
        if any(p is q for q in others) or any(_equal_values(p, q) for q in model.parameters()):
            return False
        alike = any(_equal_values(p, q) for q in others)
        return not alike or (seeded and p.requires_grad and bool((p != p.flatten()[0]).any()))

    return {name for name, p in outside.items() if is_random(p)}


def _equal_values(p: Tensor, q: Tensor) -> bool:
    return p.device == q.device and p.dtype == q.dtype and torch.equal(p, q)


def _held_in_containers(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield parameters, and those of modules, that attributes of the model hold in plain lists, tuples and mappings."""
    own = vars(nn.Module())
    for place, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in own:
                yield from _parameters_in(value, f"{place}.{name}".lstrip("."))


def _parameters_in(value: Any, where: str, depth: int = 3) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield what a value holds, containers in containers down to some depth (rule of thumb)."""
    if isinstance(value, nn.Parameter):
        yield where, value
    elif isinstance(value, nn.Module):
        yield from ((f"{where}.{inner}", p) for inner, p in value.named_parameters())
    elif depth and isinstance(value, (Mapping, Sequence)) and not isinstance(value, (str, bytes)):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _parameters_in(item, f"{where}[{key!r}]", depth - 1)
