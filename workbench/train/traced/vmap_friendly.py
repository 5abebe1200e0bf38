"""Losses that `torch.func.vmap` takes apart in Python, written in a form that it need not take apart.

Its own form of the negative log-likelihood gives the same numbers, but imports a symbolic algebra package first, which costs
half a second: as much as a small sweep.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

__all__ = ["VmapFriendly"]

_DEFAULTS = {"weight": None, "size_average": None, "reduce": None, "label_smoothing": 0.0}
_signatures = {function: inspect.signature(function) for function in (F.cross_entropy, F.nll_loss)}


class VmapFriendly(TorchFunctionMode):
    """Replaces calls inside its block; whatever it does not know passes through."""

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call `func`, or what stands in for it."""
        kwargs = dict(kwargs or {})
        if func in _signatures:
            replaced = _negative_log_likelihood(func, _signatures[func].bind(*args, **kwargs))
            if replaced is not None:
                return replaced
        return func(*args, **kwargs)


def _negative_log_likelihood(func: Any, bound: inspect.BoundArguments) -> Tensor | None:
    """Return the loss of a call with integer classes and no frills; None for any other."""
    bound.apply_defaults()
    given = bound.arguments
    outputs, targets, reduction = given["input"], given["target"], given["reduction"]
    plain = all(given[name] == default for name, default in _DEFAULTS.items() if name in given)
    if not plain or outputs.dim() < 2 or targets.shape != (outputs.shape[0], *outputs.shape[2:]):
        return None
    if targets.dtype != torch.int64 or reduction not in ("none", "mean", "sum"):
        return None
    log_probabilities = outputs.log_softmax(1) if func is F.cross_entropy else outputs
    counted = targets != given["ignore_index"]
    chosen = log_probabilities.gather(1, torch.where(counted, targets, 0).unsqueeze(1)).squeeze(1)
    losses = torch.where(counted, -chosen, 0.0)
    if reduction == "none":
        return losses
    return losses.sum() / counted.sum() if reduction == "mean" else losses.sum()
