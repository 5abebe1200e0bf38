"""`Logits`: the largest attention logit of each layer and the size of the output logits, in single forward passes of a model."""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from workbench.instruments.losses.graphs import MAX_NODES, walked
from workbench.instruments.norms import stacked
from workbench.instruments.surroundings import has_values, tensors

MOST = 2**22
"""Numbers of a tensor that are looked at (rule of thumb: some milliseconds on one core): the first examples, or heads and positions evenly apart."""
MAX_LAYERS = 48
"""Layers that have a column each (rule of thumb); of more only the largest is kept."""
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_CALLS = ((F, "scaled_dot_product_attention"), (F, "softmax"), (torch, "softmax"), (Tensor, "softmax"))
_ATTENTION = ("attn", "attention")
_PRODUCTS, _FAR = ("Bmm", "Mm"), 6
_WORDS = (*_ATTENTION, "embed", "wte", "token")
_OVER: dict[Any, Any] = {}
"""What stands in for a function and whose look is over -> what it stands in for; None where that is inherited."""
_OF_LOOKING = (AttributeError, RuntimeError, TypeError, ValueError, IndexError)
"""What a look may raise on values that it was not made for; what is wrong with them torch says itself."""


def may_have_logits(model: nn.Module) -> bool:
    """Tell by the names and kinds of its modules whether a model may attend, or predict tokens."""
    return any(
        isinstance(part, (nn.Embedding, nn.MultiheadAttention)) or any(word in name.lower() for word in _WORDS)
        for name, part in model.named_modules()
    )


def is_compiled(model: nn.Module) -> bool:
    """Tell whether a part of a model is compiled: it shows nothing, and would be compiled anew where the functions it calls are replaced."""
    return any("_orig_mod" in part._modules or part._compiled_call_impl is not None for part in model.modules())


class Logits:
    """Looks into forward passes on a cadence; what it finds stays on its device until the rows are written.

    Attention is known by its calls, `scaled_dot_product_attention`, or a softmax over (..., queries, keys) that is inside a module whose name or class
    says so, or multiplies a matrix; output logits by their shape: at each of the integer tokens that the model was given, a number for each row of their embedding.
    A layer is called what its module is.

    Args:
        every: updates between two looks (rule of thumb).
    """

    def __init__(self, every: int = 50) -> None:
        self._every, self._next, self.looks = every, 0, 0
        self._without = weakref.WeakSet[nn.Module]()  # that were looked into, and have neither
        self._undo: list[Callable[[], None]] = []
        self._attention: dict[str, list[Tensor]] = {}
        self._output: dict[str, Tensor] = {}
        self._within: list[tuple[str, bool]] = []  # modules: name, and whether they attend
        self._soft: list[tuple[str, Tensor, Any]] = []  # softmaxes elsewhere: module, largest logit, node of the result
        self._called = False  # whether one of the replaced functions is running
        self._softmaxes: int | None = None  # operations of a pass that may attend

    def begin(self, model: nn.Module, given: Any, updates: int = 0) -> None:
        """Look into the forward pass of `model` that begins, given its arguments, where the cadence has come round after so many updates."""
        if updates < self._next or model in self._without:
            return
        self.end()
        if is_compiled(model):
            self._without.add(model)
            return
        self._next, self.looks = (updates // self._every + 1) * self._every, self.looks + 1
        self._attention, self._output, self._within, self._soft = {}, {}, [("", False)], []
        names = {id(part): name for name, part in model.named_modules()}
        tokens = {t.shape for t in tensors(given) if t.dim() > 1 and t.dtype in _INTEGERS}
        rows: set[int] = set()

        def enter(part: nn.Module, _: Any) -> None:
            outer, attends = self._within[-1]
            name = names.get(id(part), outer)
            says = part is not model and any(word in f"{name} {type(part).__name__}".lower() for word in _ATTENTION)
            self._within.append((name, attends or says))

        def leave(part: nn.Module, _: Any, output: Any) -> None:
            whole = part is model
            weight = getattr(part, "weight", None)
            head = isinstance(weight, Tensor) and weight.dim() == 2 and weight.shape[0] in rows
            with contextlib.suppress(*_OF_LOOKING):
                if isinstance(part, nn.Embedding):
                    rows.update({part.num_embeddings} if output.shape[:-1] in tokens else ())
                elif whole or head:
                    of_tokens = (t for t in tensors(output) if t.dim() > 2 and t.shape[:-1] in tokens)
                    logits = next((t for t in of_tokens if t.is_floating_point() and t.shape[-1] in rows), None)
                    self._output = self._output if logits is None else _sizes(logits)
            if whole:
                self.end()
                self._attention = self._attention or self._weighing(output)
                if not (self._attention or self._output):
                    self._without.add(model)
                elif not self._attention and self._softmaxes is None:
                    self._softmaxes = _softmaxes(output)
            elif len(self._within) > 1:
                self._within.pop()

        self._undo = [register_module_forward_pre_hook(enter).remove]
        self._undo.append(register_module_forward_hook(leave, always_call=True).remove)
        for owner, name in _CALLS:
            self._replace(owner, name)

    def end(self) -> None:
        """Stop looking; nothing is left behind."""
        while self._undo:
            self._undo.pop()()

    def to_dict(self) -> dict[str, Any]:
        """Return how many passes were looked into, none where the model is compiled, and how many operations of one may attend, as JSON values."""
        return {"looks": self.looks, "softmaxes": self._softmaxes}

    def take(self) -> dict[str, Tensor]:
        """Return the columns of the pass that was looked into, tensors of one element, and forget them."""
        found: dict[str, Tensor] = {}
        if self._attention:
            largest = {name: stacked(values).amax() for name, values in self._attention.items()}
            found["attention_logit"] = stacked(list(largest.values())).amax()
            if len(largest) <= MAX_LAYERS:
                found |= {f"attention_logit/{name or 'the model'}": value for name, value in largest.items()}
        found |= self._output
        self._attention, self._output = {}, {}
        return found

    def _replace(self, owner: Any, name: str) -> None:
        own = name in vars(owner)
        original, tell = getattr(owner, name), self._attends if name != "softmax" else None

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._called or not self._undo or torch.compiler.is_compiling():
                return original(*args, **kwargs)
            with contextlib.suppress(*_OF_LOOKING), torch.no_grad():
                if tell is not None and (found := tell(*args, **kwargs)) is not None:
                    self._attention.setdefault(self._within[-1][0], []).append(found)
            self._called = True  # what it calls in its turn is the same softmax
            try:
                result = original(*args, **kwargs)
            finally:
                self._called = False
            with contextlib.suppress(*_OF_LOOKING), torch.no_grad():
                if tell is None:
                    self._softened(result, *args, **kwargs)
            return result

        def undo() -> None:
            _OVER[call] = original if own else None
            while (top := vars(owner).get(name)) in _OVER:  # what replaced it since stays, until its own look is over
                under = _OVER.pop(top)
                delattr(owner, name) if under is None else setattr(owner, name, under)

        setattr(owner, name, call)
        self._undo.append(undo)

    def _attends(
        self, query: Tensor, key: Tensor, _: Any = None, attn_mask: Tensor | None = None, *rest: Any, **options: Any
    ) -> Tensor | None:
        if not (_readable(query) and _readable(key)):
            return None
        causal, scale = rest[1] if len(rest) > 1 else options.get("is_causal", False), options.get("scale")
        (length, width), keys, heads = query.shape[-2:], key.shape[-2], query.shape[1:-2].numel()
        examples = max(1, MOST // (heads * max(length, width) * keys))
        q, k = query[:examples], key[:examples]
        some = torch.arange(0, q.shape[-3], -(-heads * keys * width // MOST), device=q.device)
        every = -(-q.shape[:-3].numel() * len(some) * length * keys // MOST)
        k = k.index_select(-3, some * k.shape[-3] // q.shape[-3])  # several heads may share their keys
        q = q[..., ::every, :].index_select(-3, some)
        scores: Tensor = q.float() @ k.float().mT * (width**-0.5 if scale is None else scale)
        if causal:
            later = torch.arange(keys, device=q.device) > torch.arange(0, length, every, device=q.device)[:, None]
            scores = scores.masked_fill(later, -math.inf)
        if attn_mask is not None:
            mask = attn_mask.broadcast_to(*query.shape[:-1], keys)[:examples, ..., ::every, :].index_select(-3, some)
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        return scores.amax()

    def _softened(self, result: Tensor, scores: Tensor, dim: int | None = None, *_: Any, **__: Any) -> None:
        if dim not in (-1, scores.dim() - 1) or scores.dim() < 3 or not _readable(scores):
            return
        some = scores[: max(1, MOST // scores[0].numel()), ..., :: -(-scores[0].numel() // MOST), :]
        (name, attends), largest = self._within[-1], some.amax().float()
        if attends and (scores.dim() > 3 or scores.shape[-1] == scores.shape[-2] > 1):
            self._attention.setdefault(name, []).append(largest)
        elif len(self._soft) < MAX_LAYERS:
            self._soft.append((name, largest, result.grad_fn))

    def _weighing(self, output: Any) -> dict[str, list[Tensor]]:
        """Return by their modules the largest logits of the softmaxes elsewhere whose results multiply a matrix."""
        soft, self._soft, found = self._soft, [], dict[str, list[Tensor]]()
        nodes = walked([t.grad_fn for t in tensors(output) if t.grad_fn is not None])[1] if soft else ()
        factors = {
            _plain(parent) for node in nodes if node.name().startswith(_PRODUCTS) for parent, _ in node.next_functions
        }
        for name, largest, node in soft:
            if node is not None and node in factors:
                found.setdefault(name, []).append(largest)
        return found


def _plain(node: Any) -> Any:
    """Return the softmax behind the views and the dropout of a factor, else whatever stands there."""
    for _ in range(_FAR):
        parents = (
            []
            if node is None or node.name().startswith("Softmax")
            else [p for p, _ in node.next_functions if p is not None]
        )
        if len(parents) != 1:
            break
        node = parents[0]
    return node


def _readable(values: Tensor) -> bool:
    return (
        type(values) in (Tensor, nn.Parameter)
        and values.is_floating_point()
        and values.numel() > 0
        and has_values(values)
    )


def _softmaxes(output: Any) -> int | None:
    """Return how many operations of the graph behind an output may attend; None where there is no graph, or a large one."""
    names = [node.name() for node in walked([t.grad_fn for t in tensors(output) if t.grad_fn is not None])[1]]
    found = sum("Attention" in name or ("oftmax" in name and "Log" not in name) for name in names)
    return found if 0 < len(names) < MAX_NODES else None


def _sizes(logits: Tensor) -> dict[str, Tensor]:
    """Return the mean log Z and the largest finite |logit| of positions evenly apart; an entry of -inf is left out, as of a padded vocabulary."""
    with torch.no_grad():
        rows = logits.detach().flatten(0, -2)
        rows = rows[:: -(-rows.numel() // MOST)].float()
        largest = rows.nan_to_num(nan=math.nan, posinf=math.inf, neginf=0.0).abs().amax()
        return {"output_log_z": rows.logsumexp(-1).mean(), "output_logit": largest}
