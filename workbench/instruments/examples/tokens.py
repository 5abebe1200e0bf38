"""`Tokens`: which of the tokens that embeddings are given get a gradient."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

MOST = 4_000_000
"""Numbers of a table up to which its gradient is looked through (rule of thumb)."""
MAX_CALLS, MAX_TABLES = 20, 8
LEAST = 3
"""Updates in which a token has to come (rule of thumb: of a maximum over places, one in some place has a gradient sooner or later)."""


class Tokens:
    """Notes of each row of an embedding's weights in how many updates it was looked up, and whether it got a gradient in any."""

    def __init__(self) -> None:
        self._asked: list[tuple[Tensor, Tensor, int]] = []  # since the last update: weights, tokens, the one of padding
        self._tables: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def asked(self, lookups: Iterable[Any]) -> None:
        """Take in the nodes of embeddings in the graph of a loss that `backward` is about to be called on."""
        for node in itertools.islice(lookups, MAX_CALLS):
            weight = getattr(node.next_functions[0][0], "variable", None)
            if type(weight) is nn.Parameter and weight.numel() <= MOST and not node._saved_sparse:
                self._asked.append((weight, node._saved_indices.flatten(), node._saved_padding_idx))

    def step_begins(self, optimizer: Optimizer) -> None:
        """Look at the gradients of the weights that an optimizer is about to change."""
        asked, self._asked = self._asked, []
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]} if asked else set()
        self._asked = [each for each in asked if id(each[0]) not in mine][:MAX_CALLS]
        for weight, ids, padding in asked:
            known = id(weight) in self._tables or len(self._tables) < MAX_TABLES
            if id(weight) in mine and weight.grad is not None and known:
                rows = torch.zeros(len(weight), dtype=torch.bool, device=weight.device)
                _, seen, reached = self._tables.get(id(weight), (weight, rows.int(), rows))
                rows = rows.index_fill(0, ids, 1)
                if 0 <= padding < len(rows):
                    rows[padding] = False
                hit = rows & weight.grad.ne(0).any(1)
                self._tables[id(weight)] = (weight, seen + rows, reached | hit)

    def to_dict(self, names: Mapping[int, str]) -> list[dict[str, Any]]:
        """Return name, tokens that came in `LEAST` updates or more, and how many of these got a gradient, of each embedding, as JSON values."""
        found = []
        for weight, seen, reached in self._tables.values():
            often = seen >= LEAST
            name = names.get(id(weight), "an embedding")
            found.append({"name": name, "tokens": int(often.sum()), "reached": int((often & reached).sum())})
        return found
