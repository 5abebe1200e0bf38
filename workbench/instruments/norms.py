"""Norms of lists of tensors, on their own device, where nothing waits for a GPU; and the size of what reaches a model's first layer, once."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from workbench.errors import UsageError
from workbench.instruments.caller import own_line

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
MOST, FEW = 50, 20
"""Passes of a batch norm layer that are looked at, and updates before which running statistics may be those of a new model (rules of thumb)."""
SMALL = 2**18
"""Elements up to which one concatenated copy is faster than a kernel a tensor (measured on a CPU: 15 against 50 us for a small MLP)."""


def gradients_of(optimizer: torch.optim.Optimizer, *, to_change: bool = False) -> list[Tensor]:
    """Return the gradients that an optimizer is about to use, in the order of its groups; those of sparse ones are their values.

    Values that are summed for this are a copy: with `to_change` the optimizer uses that copy, and what is done to it counts.
    """
    if to_change:
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if p.grad is not None and p.grad.is_sparse:
                p.grad = p.grad.coalesce()
    found = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    return [g.coalesce().values() if g.is_sparse else g for g in found]


def total_norm(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return the L2 norm over all elements, a tensor of shape (); None without tensors, or where they are spread over processes."""
    if not tensors or not {type(t) for t in tensors} <= {Tensor, nn.Parameter}:
        return None
    kinds = {(t.dtype, t.get_device(), t.is_cpu) for t in tensors}  # `device` costs more
    with torch.no_grad():
        if len(kinds) == 1 and sum([t.numel() for t in tensors]) <= SMALL:
            norm: Tensor = torch.cat([t.reshape(-1) for t in tensors]).norm()
        else:
            norm = nn.utils.get_total_norm([t.detach() for t in tensors])
    return norm.float() if norm.dtype in (torch.float16, torch.bfloat16) else norm


def clip_to(gradients: Sequence[Tensor], limit: float, scale: Tensor | None = None) -> Tensor | None:
    """Shorten gradients, `scale` times the true ones, in place to a norm of `limit`; return whether they were longer, None where there are none. Processes that hold shards of the same gradients call it together."""
    if not gradients:
        return None
    norm = total_norm(gradients)
    if norm is None:
        kinds = sorted({type(g).__name__ for g in gradients if not hasattr(g, "full_tensor")} - {"Tensor", "Parameter"})
        if kinds:
            raise UsageError(
                f"gradients of type {', '.join(kinds)} cannot be clipped to max_grad_norm={limit:.4g} from outside: only those of type Tensor "
                "and DTensor can; clip them where they are made."
            )
        norm = _norm_over_processes(gradients)
    if scale is not None:
        norm = norm / scale.to(norm.device)
    with torch.no_grad():
        factor = (limit / (norm + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            local: Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient.detach()
            local.mul_(factor.to(local.device, local.dtype))
    return norm > limit


def _norm_over_processes(gradients: Sequence[Tensor]) -> Tensor:
    meshes: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        meshes.setdefault(getattr(gradient, "device_mesh", None), []).append(gradient.detach())
    with torch.no_grad():
        norms: list[Any] = [nn.utils.get_total_norm(alike) for alike in meshes.values()]
        whole: list[Tensor] = [n.full_tensor() if hasattr(n, "full_tensor") else n for n in norms]
        norm: Tensor = torch.linalg.vector_norm(stacked(whole).float())
    return norm


def stacked(scalars: Sequence[Tensor]) -> Tensor:
    """Return tensors of one element as one tensor, on the device of the first."""
    plain = [each if each.ndim == 0 else each.reshape(()) for each in scalars]
    if len({(each.get_device(), each.is_cpu) for each in plain}) > 1:  # `device` costs more
        plain = [each.to(plain[0].device) for each in plain]
    return torch.stack(plain)


def each_norm(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the L2 norm of each tensor."""
    with torch.no_grad():
        return list(torch._foreach_norm([t if t.is_complex() else t.float() for t in tensors]))


WEIGHED = (nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm)
_LOOKUPS = (nn.Embedding, nn.EmbeddingBag)
KINDS: tuple[type[nn.Module], ...] = (*WEIGHED, *_NORMS, *_LOOKUPS)
"""Layers that tell how large the inputs are for a model."""


class FirstLayer:
    """What reaches the first layer with weights, in the first forward pass that is trained on."""

    def __init__(self, names: Callable[[], Mapping[nn.Module, str]]) -> None:
        self._names, self._called = names, list[tuple[nn.Module, Any]]()
        self._found: dict[str, Any] | None = None

    def entered(self, part: nn.Module, args: Any) -> bool:
        """Take in a forward pass; True where nothing is left to be seen."""
        if (
            self._found is None
            and isinstance(part, KINDS)
            and torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
        ):
            over = any(isinstance(module, WEIGHED) for module, _ in self._called)  # what comes behind may be a norm
            self._called.append((part, None if over or not args else _beginning(args[0])))
            if over or isinstance(part, _LOOKUPS):
                self.to_dict()
        return self._found is not None

    def to_dict(self) -> dict[str, Any]:
        """Return `first_layer`, as JSON values."""
        if self._found is None and self._called:
            called, self._called, self._found = self._called, [], {"unseen": True}
            with contextlib.suppress(
                RuntimeError, TypeError, ValueError, MemoryError
            ):  # as of values within a transform
                self._found = first_layer(called, self._names())
        return self._found or {"unseen": True}


def _beginning(values: Any, most: int = 2**20) -> Tensor | None:
    """Return the first examples of plain floating-point numbers, up to `most` numbers (rule of thumb: what is sorted in a fraction of a second)."""
    if (
        type(values) is not Tensor
        or values.layout is not torch.strided
        or values.is_nested
        or not values.is_floating_point()
    ):
        return None
    return values.detach()[: max(1, most // max(values[:1].numel(), 1))]


def first_layer(called: Sequence[tuple[nn.Module, Any]], names: Mapping[nn.Module, str]) -> dict[str, Any]:
    """Return the size of what reaches the first layer with weights: `called` are layers in the order of their calls, with their first argument.

    Returns:
        "layer" (name and type) and `sizes_of`; "reason": it does not apply; "unseen": no layer with weights was called, or with one row.
    """
    kinds = [module for module, _ in called]
    at = next((k for k, module in enumerate(kinds) if isinstance(module, WEIGHED)), len(kinds))
    if any(isinstance(module, _LOOKUPS) for module in kinds[:at]):
        return {"reason": "the model looks its inputs up in an embedding", "lookup": True}
    if at == len(kinds) or not isinstance(called[at][1], Tensor):
        return {"unseen": True}
    if any(isinstance(module, _NORMS) for module in kinds[: at + 2]):
        return {"reason": "the model normalises its inputs, or what its first layer makes of them"}
    module, values = called[at]
    rows = values.detach().cpu().double()  # not every accelerator has float64
    axis = 1 if isinstance(module, nn.modules.conv._ConvNd) and rows.dim() > 2 else rows.dim() - 1
    columns = rows.movedim(axis, -1).reshape(-1, rows.shape[axis]).numpy()
    return {"layer": [names.get(module, ""), type(module).__name__]} | sizes_of(columns)


def sizes_of(rows: NDArray[np.float64]) -> dict[str, Any]:
    """Return the sizes of columns; a column that never varies has none, and of fewer than two rows nothing is known ("unseen")."""
    if len(rows) < 2:
        return {"unseen": True}
    values = np.where(np.isfinite(rows), rows, 0.0)
    varies = np.flatnonzero(values.max(0) > values.min(0))
    known = {"columns": values.shape[1], "constant": values.shape[1] - len(varies)}
    if not len(varies):
        return known | {"reason": "the inputs never vary"}
    sizes = np.abs(values[:, varies])
    share = (sizes > 0).mean(0)
    sizes[sizes == 0] = np.nan
    size = np.nanmedian(sizes, axis=0)
    return known | {
        "size": float(np.sqrt((share * size**2).mean())), "median": float(np.median(size)), "quarter": float(np.quantile(size, 0.25)),
        "smallest": float(size.min()), "smallest_at": int(varies[size.argmin()]),
        "largest": float(size.max()), "largest_at": int(varies[size.argmax()]),
    }  # fmt: skip


class Statistics:
    """Of how many values a channel the batch norm layers take their statistics in training, and whether a model is evaluated without any."""

    def __init__(self) -> None:
        self._values: weakref.WeakKeyDictionary[nn.Module, list[int]] = weakref.WeakKeyDictionary()
        self._looks: weakref.WeakKeyDictionary[nn.Module, _Look] = weakref.WeakKeyDictionary()
        self.trained = 0  # backward passes so far

    def entered(self, part: nn.Module, args: tuple[Any, ...]) -> bool:
        """Take in a forward pass; True where enough were seen of this layer. One that is synchronised has the values of other processes, too."""
        if (
            not isinstance(part, BATCH_NORMS)
            or isinstance(part, nn.SyncBatchNorm)
            or not part.training
            or not torch.is_grad_enabled()
        ):
            return False
        seen = self._values.setdefault(part, [])
        if len(seen) < MOST and args and isinstance(args[0], Tensor) and args[0].dim() > 1:
            seen.append(args[0].numel() // max(args[0].shape[1], 1))
        return len(seen) >= MOST

    def evaluated(self, model: nn.Module) -> None:
        """Take in a pass in evaluation: of the first, second, fourth, ... after some updates the running statistics and some weights are kept."""
        norm = next((part for part in model.modules() if isinstance(part, BATCH_NORMS)), None) if self.trained >= FEW else None  # fmt: skip
        if norm is None or norm.training or norm.running_mean is None or norm.running_var is None:
            return
        look = self._looks.setdefault(model, _Look())
        look.passes += 1
        if look.passes & (look.passes - 1) == 0:
            weights = next(model.parameters()).detach().flatten()[:64].clone()
            look.first = weights if look.first is None else look.first
            look.last, look.line = weights, own_line()
            look.unset = (norm.running_mean == 0).all() & (norm.running_var == 1).all()

    def fewest(self) -> int | None:
        """Return the median over the passes, so that the last batch of an epoch does not stand for all, of the layer with the fewest; None without one."""
        return min((sorted(seen)[len(seen) // 2] for seen in self._values.values() if seen), default=None)

    def unset(self) -> str | None:
        """Return the line in which a model that trains, or follows one that does, was last evaluated with the running statistics of a new model: mean 0 and variance 1."""
        lines = (look.line for look in self._looks.values() if bool(look.unset) and look.moved())
        return next(lines, None)


@dataclass
class _Look:
    """What was seen of one model in evaluation."""

    passes: int = 0
    first: Tensor | None = None
    last: Tensor | None = None
    unset: Tensor | None = None
    line: str = ""

    def moved(self) -> bool:
        """Tell whether its weights changed between the first look and the last."""
        return self.first is not None and self.last is not None and not torch.equal(self.first, self.last)
