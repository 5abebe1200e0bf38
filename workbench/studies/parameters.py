"""`collect_parameters`: which parameters are trained at all, and whether the others hold anything."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from workbench.config import TrainConfig
from workbench.errors import WorkbenchError
from workbench.train.batches import train_batches
from workbench.train.forward import per_example
from workbench.train.lanes import build_model
from workbench.train.rng import isolated_rng
from workbench.workloads.base import Workload

__all__ = ["collect_parameters"]


def collect_parameters(workload: Workload, config: TrainConfig, device: torch.device) -> dict[str, Any]:
    """Return JSON facts about parameters that stay as they begin: frozen, not given to the optimizer, or unknown to the model.

    Whether they hold anything is told by a second model under another seed: what was loaded or set to a constant is equal in both.
    The model does not know what a list holds; such parameters are found where the loss would send them a gradient.

    Args:
        workload: what is trained.
        config: the baseline's.
        device: where.
    """
    with isolated_rng():
        model = build_model(workload, config, device)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
        unowned = {}
        if callable(config.optimizer):
            optimizer = config.optimizer(list(trained.values()), config.peak_lr)
            owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
            unowned = {name: p for name, p in trained.items() if id(p) not in owned}
        idle = frozen | unowned
        outside = _outside(workload, config, model, device)
        random: set[str] = set()
        if idle:
            other = dict(
                build_model(workload, config.replace(shared_seed=config.shared_seed + 1), device).named_parameters()
            )
            random = {name for name, p in idle.items() if name in other and not torch.equal(p, other[name])}
        random |= {name for name, p in outside.items() if p.numel() > 1 and float(p.detach().float().std()) > 0}
    return {
        "numbers": sum(p.numel() for p in (*model.parameters(), *outside.values())),
        **{
            kind: [{"name": name, "numbers": p.numel(), "random": name in random} for name, p in each.items()]
            for kind, each in (("frozen", frozen), ("unowned", unowned), ("outside", outside))
        },
    }


def _outside(
    workload: Workload, config: TrainConfig, model: nn.Module, device: torch.device
) -> dict[str, nn.Parameter]:
    """Return the parameters that the loss of a batch depends on and `model.parameters()` does not hold."""
    try:
        batch, examples = next(train_batches(workload, config, device))[0]
        _, losses, _ = per_example(workload, model.train(), batch, examples)
    except (WorkbenchError, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError):
        return {}  # the pre-flight says what is wrong
    known, places = {id(p) for p in model.parameters()}, {id(p): name for name, p in _held_in_containers(model)}
    found = (
        (places.get(id(p), f"a parameter of shape {tuple(p.shape)}"), p)
        for p in _leaves(losses.grad_fn)
        if id(p) not in known
    )
    return dict(sorted(found, key=lambda named: named[0]))


def _leaves(root: Any) -> Iterator[nn.Parameter]:
    """Yield the parameters that a backward pass from here would reach, each once."""
    waiting, seen = [root], {None}
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(getattr(node, "variable", None), nn.Parameter):
            yield node.variable
        waiting.extend(child for child, _ in node.next_functions)


def _held_in_containers(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield parameters, and those of modules, that attributes of the model hold in plain lists, tuples and mappings."""
    for place, module in model.named_modules():
        for name, value in vars(module).items():
            if name.startswith("_"):
                continue
            items = (
                value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, Sequence) else ()
            )
            for key, item in items:
                where = f"{place}.{name}[{key!r}]".lstrip(".")
                if isinstance(item, nn.Parameter):
                    yield where, item
                elif isinstance(item, nn.Module):
                    yield from ((f"{where}.{inner}", p) for inner, p in item.named_parameters())
