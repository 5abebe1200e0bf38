"""`Conversions`: tensors that a loop converts to another dtype or moves to another device, and what that takes; and which functions of torch are listened to."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import handle_torch_function, has_torch_function

from workbench.instruments.caller import own_line

DIFFERENCE = "A difference"
_LINE = "workbench line"
METHODS = ("to", "double", "float", "half", "bfloat16", "type", "cpu", "cuda")
"""Methods of `torch.Tensor` that return another one of another dtype, or on another device."""
CRITERIA = (
    "cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "poisson_nll_loss", "binary_cross_entropy",
    "binary_cross_entropy_with_logits", "kl_div",
)  # fmt: skip
"""Functions of `torch.nn.functional` that compare outputs with targets; the loss modules of `torch.nn` call them."""
DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
"""Functions of `torch.nn.functional` that the modules of these names call."""
CALLS = (("torch", "multinomial"), ("torch", "manual_seed"), ("numpy.random", "seed"), ("random", "seed"))
HOOKS: tuple[tuple[Any, str], ...] = ((Tensor, "register_hook"), (saved_tensors_hooks, "__enter__"), (Function, "_register_hook"))  # fmt: skip
PAIRED = {"__sub__": DIFFERENCE, "sub": DIFFERENCE, "__mul__": "A product", "mul": "A product"}
"""Functions and methods that losses written by hand are made of, and what they give."""
SQUASHED = tuple((owner, name) for owner in (torch, Tensor, F) for name in ("softmax", "sigmoid"))
"""Functions and methods whose results a loss may not take; the modules of `torch.nn` call them."""
LEAST = 10_000
"""Elements below which a conversion costs nothing worth telling (rule of thumb)."""
MAX_PLACES = 50


def is_costly(tensor: Any, result: Any) -> bool:
    """Tell whether a call has converted or moved enough for its time to say something: on an accelerator casts run on by themselves."""
    if not isinstance(result, Tensor) or not isinstance(tensor, Tensor) or result is tensor or tensor.numel() < LEAST:
        return False
    if tensor.device == result.device:
        return tensor.dtype != result.dtype and tensor.device.type == "cpu"
    return True


def pairs_all(one: Any, other: Any) -> bool:
    """Tell whether broadcasting pairs each of so many examples with all of them, as (64, 1) with (64,), which nobody asks for who gives both an axis."""
    if type(one) is not Tensor or type(other) is not Tensor or one.dim() == other.dim():
        return False
    short, long = sorted((one.shape, other.shape), key=len)
    return bool(short) and 1 < short[0] == long[0] and long[-len(short)] == 1


def compares(gives: str, one: Any, other: Any) -> bool:
    """Tell whether a difference or product may be of outputs and targets: of so many examples with all of them, or a difference of one shape of which one is trained."""
    if gives == DIFFERENCE and isinstance(one, Tensor) and isinstance(other, Tensor) and one.shape == other.shape:
        return one.requires_grad != other.requires_grad and one.dim() > 0
    return pairs_all(one, other)


class Conversions:
    """Adds up the conversions of training steps by the line that asks for them; those of evaluations do not count."""

    def __init__(self) -> None:
        self._places: dict[str, dict[str, Any]] = {}
        self._last: dict[str, tuple[weakref.ref[Tensor], int]] = {}

    def add(self, tensor: Tensor, result: Tensor, seconds: float) -> None:
        """Take in one."""
        if not torch.is_grad_enabled() or tensor.is_inference():
            return
        line = own_line()
        if line not in self._places and len(self._places) >= MAX_PLACES:
            return
        row = self._places.setdefault(line, {"line": line, "count": 0, "same": 0, "seconds": 0.0, "double": False})
        last, version = self._last.get(line, (None, -1))
        row["same"] += last is not None and last() is tensor and version == tensor._version
        self._last[line] = (weakref.ref(tensor), tensor._version)
        row["count"] += 1
        row["seconds"] += seconds
        row["double"] = row["double"] or (
            tensor.dtype != result.dtype and torch.float64 in (tensor.dtype, result.dtype)
        )
        row |= {"elements": tensor.numel(), "from": _named(tensor), "to": _named(result)}

    def to_dict(self) -> list[dict[str, Any]]:
        """Return one row a line, those that take longest first, as JSON values."""
        return sorted(self._places.values(), key=lambda row: -row["seconds"])[:10]


def _named(tensor: Tensor) -> str:
    kind = str(tensor.dtype).removeprefix("torch.")
    return kind if tensor.device.type == "cpu" else f"{kind} on {tensor.device.type}"


def placed(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Return what a call gives; the node of its result keeps the line that asked for it."""
    result = dispatched(original, *args, **kwargs)
    if (node := getattr(result, "grad_fn", None)) is not None:
        node.metadata.setdefault(_LINE, own_line())
    return result


def line_of(tensor: Tensor, *, far: int = 4) -> str:
    """Return the line in which a softmax or sigmoid made a tensor, views and slices aside; "" where none is known."""
    node: Any = tensor.grad_fn
    for _ in range(far):
        if node is None or _LINE in node.metadata:
            break
        node = node.next_functions[0][0] if len(node.next_functions) == 1 else None
    return "" if node is None else str(node.metadata.get(_LINE, ""))


def dispatched(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Return what a call gives: subclasses of tensors and modes, which ask which function of torch it is, are given the original."""
    given = (*args, *kwargs.values())
    if has_torch_function(given):
        return handle_torch_function(original, given, *args, **kwargs)
    return original(*args, **kwargs)
