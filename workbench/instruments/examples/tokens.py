"""`Tokens`: which of the tokens that embeddings are given get a gradient."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

MOST = 4_000_000
"""Numbers of a table up to which its gradient is looked through (rule of thumb)."""
MAX_CALLS, MAX_TABLES = 20, 8
LEAST = 3
"""Backward passes in which a token has to come (rule of thumb: of a maximum over places, one in some place has a gradient sooner or later)."""


class Tokens:
    """Notes of each row of an embedding's weights in how many backward passes it was looked up, and whether it got a gradient in any."""

    def __init__(self) -> None:
        self._asked: list[tuple[Tensor, Tensor, int]] = []  # in this backward pass: weights, tokens, the one of padding
        self._tables: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def asked(self, lookups: Iterable[Any]) -> None:
        """Take in the nodes of embeddings in the graph of a loss that `backward` is about to be called on."""
        self._asked = []
        for node in itertools.islice(lookups, MAX_CALLS):
            weight = getattr(node.next_functions[0][0], "variable", None)
            hooked = weight is not None and (weight._backward_hooks or weight._post_accumulate_grad_hooks)
            if type(weight) is nn.Parameter and weight.numel() <= MOST and not (node._saved_sparse or hooked):
                self._asked.append((weight, node._saved_indices, node._saved_padding_idx))

    def backward_ends(self) -> None:
        """Look at the gradients as the backward pass has made them: a program may set those of some rows to 0 before it steps."""
        asked, self._asked = self._asked, []
        for weight, ids, padding in asked:
            known = id(weight) in self._tables or len(self._tables) < MAX_TABLES
            if weight.grad is not None and known:
                rows = torch.zeros(len(weight), dtype=torch.bool, device=weight.device)
                _, seen, reached = self._tables.get(id(weight), (weight, rows.int(), rows))
                rows = rows.index_fill(0, ids.flatten(), 1) & ~_counts_up(ids)
                if 0 <= padding < len(rows):
                    rows[padding] = False
                hit = rows & weight.grad.ne(0).any(1)
                self._tables[id(weight)] = (weight, seen + rows, reached | hit)

    def to_dict(self, names: Mapping[int, str]) -> list[dict[str, Any]]:
        """Return name, tokens that came in `LEAST` passes or more, and how many of these got a gradient, of each embedding, as JSON values."""
        found = []
        for weight, seen, reached in self._tables.values():
            often = seen >= LEAST
            name = names.get(id(weight), "an embedding")
            found.append({"name": name, "tokens": int(often.sum()), "reached": int((often & reached).sum())})
        return found


def _counts_up(ids: Tensor) -> Tensor:
    """Tell whether tokens are the places 0, 1, 2 ... of a sequence, which come where there is only padding too."""
    steps = [ids.diff(dim=axis).eq(1).all() for axis in range(ids.dim()) if ids.shape[axis] > 1]
    return torch.stack(steps).any() if steps else torch.zeros((), dtype=torch.bool, device=ids.device)
