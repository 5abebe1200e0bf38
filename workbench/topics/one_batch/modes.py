"""Which modules are in which mode after `model.train()` and `model.eval()`, and whether evaluation is the same twice."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from workbench.topics.architecture.dataflow import trace_dataflow
from workbench.topics.one_batch.batch import OneBatch

__all__ = ["find_modes"]

_MASKS = frozenset({"bernoulli", "native_dropout", "_fused_dropout", "alpha_dropout", "feature_dropout"})
_DRAWS = ("normal", "rand", "uniform", "exponential", "multinomial", "poisson", "cauchy", "log_normal", "geometric")


def find_modes(one: OneBatch) -> dict[str, Any]:
    """Return the modules that act differently in training and are in the wrong mode, and what is random in evaluation.

    "train_in_eval" and "eval_in_train" map a module's name to "dropout", "batch_norm" or "frozen" (batch norm whose running
    statistics were set, or a part of the model that is not trained). "change": how far outputs differ between two seeds over
    their spread; "masks" and "draws": the modules of the random operations that made them. "batch_statistics": batch norm without running ones.
    """
    kinds = {name: _kind(m) for name, m in one.model.named_modules()}
    first = one.flat(one.forward())
    left = {name: kinds[name] for name, m in one.model.named_modules() if kinds[name] and m.training}
    second = one.flat(one.forward(seed=1))
    size = float((first - first.mean(0)).square().mean().sqrt()) if first.numel() else 0.0
    apart = float((first - second).square().mean().sqrt()) if first.numel() and first.shape == second.shape else 0.0
    found: dict[str, Any] = {"train_in_eval": left, "change": apart, "size": size, "masks": [], "draws": [], "batch_statistics": [
        name for name, m in one.model.named_modules()
        if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.running_mean is None
    ]}  # fmt: skip
    if apart > 0:
        one.model.eval()
        with torch.no_grad():
            flow = trace_dataflow(one.model, lambda: one.workload.forward(one.model, one.batch), one.batch)
        for node in flow.nodes:
            if node.op in _MASKS:
                found["masks"].append(node.module)
            elif node.op.startswith(_DRAWS):
                found["draws"].append(node.module)
    one.forward(train=True)
    parents = _frozen_parts(one.model)
    found["eval_in_train"] = {
        name: "frozen" if name in parents or (kinds[name] == "batch_norm" and _was_set(m)) else kinds[name]
        for name, m in one.model.named_modules()
        if kinds[name] and not m.training
    }
    return found


def _kind(module: nn.Module) -> str | None:
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return "batch_norm" if module.track_running_stats else None
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return "dropout" if module.p > 0 else None
    if isinstance(module, nn.RNNBase):
        return "dropout" if module.dropout > 0 and module.num_layers > 1 else None
    if isinstance(module, nn.MultiheadAttention):
        return "dropout" if module.dropout > 0 else None
    return None


def _was_set(module: nn.Module) -> bool:
    """Whether running statistics are others than those that a fresh layer has."""
    mean, var = getattr(module, "running_mean", None), getattr(module, "running_var", None)
    return mean is not None and var is not None and (bool(mean.any()) or bool((var != 1).any()))


def _frozen_parts(model: nn.Module) -> set[str]:
    """Return the names of modules that lie in a part of the model whose parameters are all frozen."""
    found: set[str] = set()
    for name, module in model.named_modules():
        parameters = list(module.parameters())
        if parameters and not any(p.requires_grad for p in parameters):
            found |= {f"{name}.{inner}".strip(".") for inner, _ in module.named_modules()} | {name}
    return found
