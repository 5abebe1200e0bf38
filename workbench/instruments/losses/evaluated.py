"""`Evaluated`: whether a model is evaluated on examples that it is trained on, as far as both were seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from workbench.instruments.caller import own_line

MAX_ROWS = 20_000
"""Examples of either kind that are kept (rule of thumb)."""
_ROWS, _NUMBERS, _FEWEST = 2048, 64, 4
"""Examples of one pass, and numbers of one example, that are read; those of fewer are no content, but the number of a user, say (rules of thumb)."""
_OWN = 0.5
_CLEAR = 8.0
"""Matches that a part of what is evaluated would have at the rate of the whole, and has none: it is validation data (chance leaves it none once in 3,000)."""


class Evaluated:
    """Compares a digest of each example by its values: those of forward passes with gradients, and of those in evaluation mode without."""

    def __init__(self) -> None:
        self._kinds: set[type[nn.Module]] = set()
        self._trained: list[Tensor] = []
        self._passes: list[tuple[int | None, int, str, Tensor]] = []  # loader or, without one, examples; and line
        self._rows = [0, 0]
        self.open = True  # whether more is to be seen of evaluations

    def entered(self, module: nn.Module, given: Sequence[Tensor], *, trains: bool, loader: int | None) -> None:
        """Take in a forward pass of a whole model on these tensors."""
        if self._rows[not trains] >= MAX_ROWS or not (trains or (type(module) in self._kinds and not module.training)):
            return
        try:
            rows = digests(given)
        except (RuntimeError, TypeError):  # of tensors that are no plain ones
            return
        self._rows[not trains] += len(rows)
        if trains:
            self._kinds.add(type(module))
        if not len(rows):  # nor counted as seen: there may be any number of them
            return
        if trains:
            self._trained.append(rows)
        else:
            self.open = self._rows[1] < MAX_ROWS
            self._passes.append((loader, len(given[0]) if loader is None else 0, own_line(), rows))

    def to_dict(self, is_trained_on: Callable[[int | None], bool]) -> dict[str, Any] | None:
        """Return how many examples that are evaluated were among the first that were trained on, as JSON values; None where that cannot be told."""
        trained = _first_time(self._trained)
        if not trained or not self._passes:
            return None
        groups: dict[Any, list[set[int]]] = {}
        for loader, size, line, rows in self._passes:
            if not is_trained_on(loader):
                groups.setdefault((loader, size, line), []).append(set(rows.tolist()) - {0})
        wholes = {key: set[int]().union(*passes) for key, passes in groups.items()}
        wholes = {
            key: rows for key, rows in wholes.items() if len(rows & trained) <= _OWN * len(trained)
        }  # else the training set itself
        every = set[int]().union(*wholes.values())
        hits = len(every & trained)
        passes = [rows for key in wholes if key[0] is None for rows in groups[key]]  # of several splits by one line
        clear = any(
            len(rows) * hits > _CLEAR * len(every) and not rows & trained for rows in [*wholes.values(), *passes]
        )
        line = max(wholes, key=lambda key: len(wholes[key] & trained), default=("",))[-1]
        return {"trained": len(trained), "evaluated": len(every), "both": hits, "clear": clear, "line": line}


def _first_time(passes: Sequence[Tensor]) -> set[int]:
    """Return the examples before the first one that comes again: from there on the data begin anew, or repeat themselves."""
    found: set[int] = set()
    last: list[int] = []
    for rows in (each.tolist() for each in passes):
        if rows != last:  # of the same batch given twice
            for row in rows:
                if row and row in found:
                    return found
                found.add(row)
        last = rows
    return found - {0}


def digests(given: Sequence[Tensor]) -> Tensor:
    """Return one number for each example of a batch, of all tensors that have a row for each; 0 where all numbers of one are the same; none where an example has few numbers."""
    size = len(given[0]) if given and given[0].dim() else 0
    parts = []
    for part in (each for each in given if each.dim() and len(each) == size > 1 and not each.is_complex()):
        rows = part.detach()[:_ROWS].reshape(min(size, _ROWS), -1)
        rows = rows[:, :: max(-(-rows.shape[1] // _NUMBERS), 1)]
        parts.append((rows.float().contiguous().view(torch.int32) if rows.is_floating_point() else rows).long())
    bits = torch.cat([part.to(parts[0].device) for part in parts], 1) if parts else torch.zeros(0, 0)
    if bits.shape[1] < _FEWEST:
        return torch.zeros(0)
    odd = torch.arange(1, bits.shape[1] + 1, device=bits.device) * -7046029254386353131  # wraps around
    return (bits * (odd ^ (odd >> 31)) * (bits != bits[:, :1]).any(1, keepdim=True)).sum(1)
