"""`Logits`: the largest attention logit of each layer and the size of the output logits, in single forward passes of a model."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from workbench.instruments.norms import stacked
from workbench.instruments.surroundings import has_values, tensors

MOST = 2**22
"""Numbers of a tensor that are looked at (rule of thumb: some milliseconds on one core): the first examples, or positions evenly apart."""
MAX_LAYERS = 48
"""Layers that have a column each (rule of thumb); of more only the largest is kept."""
_CALLS = ((F, "scaled_dot_product_attention"), (F, "softmax"), (torch, "softmax"), (Tensor, "softmax"))
_WORDS = ("attn", "attention", "embed", "wte", "token")


def may_have_logits(model: nn.Module) -> bool:
    """Tell by the names and kinds of its modules whether a model may attend, or predict tokens."""
    return any(
        isinstance(part, (nn.Embedding, nn.MultiheadAttention)) or any(word in name.lower() for word in _WORDS)
        for name, part in model.named_modules()
    )


class Logits:
    """Looks into forward passes on a cadence; what it finds stays on its device until the rows are written.

    Attention is known by its calls, `scaled_dot_product_attention` or a softmax over (..., queries, keys), output logits by their shape:
    a number for each entry of a vocabulary at each of the integer tokens that the model was given. A layer is called what its module is.

    Args:
        every: updates between two looks (rule of thumb).
    """

    def __init__(self, every: int = 50) -> None:
        self._every, self._next, self.looks = every, 0, 0
        self._without = weakref.WeakSet[nn.Module]()  # that were looked into, and have neither
        self._undo: list[Callable[[], None]] = []
        self._attention: dict[str, list[Tensor]] = {}
        self._output: dict[str, Tensor] = {}
        self._within: list[str] = []

    def begin(self, model: nn.Module, given: Any, updates: int = 0) -> None:
        """Look into the forward pass of `model` that begins, given its arguments, where the cadence has come round after so many updates."""
        if (
            updates < self._next or model in self._without or hasattr(model, "_orig_mod")
        ):  # a compiled one shows nothing
            return
        self.end()
        self._next, self.looks = (updates // self._every + 1) * self._every, self.looks + 1
        self._attention, self._output, self._within = {}, {}, [""]
        names = {id(part): name for name, part in model.named_modules()}
        tokens = {t.shape for t in tensors(given) if t.dim() > 1 and not t.is_floating_point()}
        rows = {part.num_embeddings for part in model.modules() if isinstance(part, nn.Embedding)}

        def enter(part: nn.Module, _: Any) -> None:
            self._within.append(names.get(id(part), self._within[-1]))

        def leave(part: nn.Module, _: Any, output: Any) -> None:
            whole = part is model
            weight = getattr(part, "weight", None)
            head = (
                isinstance(weight, Tensor)
                and weight.dim() == 2
                and weight.shape[0] in rows
                and not isinstance(part, nn.Embedding)
            )
            for values in tensors(output) if whole or head else ():
                if values.dim() > 2 and values.is_floating_point() and values.shape[:-1] in tokens:
                    self._output = _sizes(values)
                    break
            if whole:
                self.end()
                if not (self._attention or self._output):
                    self._without.add(model)
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
        """Return how many passes were looked into, as JSON values: none where the model is compiled."""
        return {"looks": self.looks}

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
        original, tell = getattr(owner, name), self._attends if name != "softmax" else self._softened

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                try:
                    with torch.no_grad():
                        found = tell(*args, **kwargs)
                except (RuntimeError, TypeError, ValueError, IndexError):  # what torch is to say of it, it says below
                    found = None
                if found is not None:
                    self._attention.setdefault(self._within[-1], []).append(found)
            return original(*args, **kwargs)

        def undo() -> None:
            if vars(owner).get(name) is call:  # somebody else may have replaced it since: theirs stays
                setattr(owner, name, original) if own else delattr(owner, name)

        setattr(owner, name, call)
        self._undo.append(undo)

    def _attends(
        self, query: Tensor, key: Tensor, _: Any = None, attn_mask: Tensor | None = None, *rest: Any, **options: Any
    ) -> Tensor | None:
        causal = rest[1] if len(rest) > 1 else options.get("is_causal", False)
        scale, count = options.get("scale"), max(1, MOST // max(query.shape[:-1][1:].numel() * key.shape[-2], 1))
        if not (_readable(query) and _readable(key)):
            return None
        q, k = query[:count].float(), key[:count].float()
        if q.dim() > 3 and k.shape[-3] != q.shape[-3]:  # several heads share their keys
            k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
        scores: Tensor = q @ k.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
        if attn_mask is not None:
            mask = attn_mask[:count] if attn_mask.dim() == scores.dim() and attn_mask.shape[0] > 1 else attn_mask
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        return scores.amax()

    def _softened(self, scores: Tensor, dim: int | None = None, *_: Any, **__: Any) -> Tensor | None:
        last = dim in (-1, scores.dim() - 1)
        square = scores.dim() == 3 and scores.shape[-1] == scores.shape[-2] > 1
        if not (last and _readable(scores) and (scores.dim() > 3 or square)):
            return None
        largest: Tensor = scores[: max(1, MOST // scores[0].numel())].amax().float()
        return largest


def _readable(values: Tensor) -> bool:
    return (
        type(values) in (Tensor, nn.Parameter)
        and values.is_floating_point()
        and values.numel() > 0
        and has_values(values)
    )


def _sizes(logits: Tensor) -> dict[str, Tensor]:
    """Return the mean log Z and the largest finite |logit| of positions evenly apart; an entry of -inf is left out, as of a padded vocabulary."""
    with torch.no_grad():
        rows = logits.detach().flatten(0, -2)
        rows = rows[:: -(-rows.numel() // MOST)].float()
        largest = rows.nan_to_num(nan=math.nan, posinf=math.inf, neginf=0.0).abs().amax()
        return {"output_log_z": rows.logsumexp(-1).mean(), "output_logit": largest}
