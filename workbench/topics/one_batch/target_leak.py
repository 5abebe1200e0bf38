"""`find_answer`: does the output of a position see the very token that it has to predict?"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from workbench.topics.one_batch.batch import OneBatch

__all__ = ["find_answer"]

FEWEST = 4
"""Positions of a sequence (rule of thumb)."""
AGREE = 0.95
"""Share of the targets that are the input `offset` places further on (rule of thumb: masked positions agree in fewer)."""


def find_answer(one: OneBatch) -> dict[str, Any] | None:
    """Return where the targets of token sequences stand in the inputs, and whether outputs depend on them; None without such targets.

    Args:
        one: the batch, in evaluation mode for as long as it takes.

    Returns:
        "offset": places from a position to its target in the inputs, 1 for a language model, 0 where nothing was shifted; "agree": share
        of targets that stand there; "sees": whether outputs up to a position change with inputs at the target's place.
    """
    tokens = [t for t in one.inputs() if t.dim() == 2 and not t.is_floating_point() and t.shape[1] >= FEWEST]
    outputs = _by_position(one, None)
    if outputs is None:
        return None
    for given in tokens:
        for target in (t for t in tokens if t is not given and t.shape == given.shape):
            for offset in (0, 1):
                agree = _agreement(given, target, offset)
                if agree >= AGREE and (sees := _depends(one, given, outputs, offset)) is not None:
                    return {"offset": offset, "agree": agree, "sees": sees}
    return None


def _agreement(given: Tensor, target: Tensor, offset: int) -> float:
    """Return the share of targets, ignored ones (below 0) left out, that are the input so many places further on."""
    wanted, there = target[:, : target.shape[1] - offset], given[:, offset:]
    counted = wanted >= 0
    if not counted.any() or bool((wanted == wanted[:1, :1]).all()):
        return 0.0
    return float((wanted == there)[counted].float().mean())


def _by_position(one: OneBatch, batch: Any) -> Tensor | None:
    """Return the outputs that have a row for each position, shape (examples, positions, values)."""
    found = [t for t in one.tensors(one.forward(batch)) if t.dim() == 3]
    return found[0].detach() if len(found) == 1 else None


def _depends(one: OneBatch, given: Tensor, outputs: Tensor, offset: int) -> bool | None:
    """Tell whether outputs before the middle change where inputs from the target's place on come from another example."""
    middle = given.shape[1] // 2
    late = torch.arange(given.shape[1], device=given.device) >= middle
    moved = _by_position(one, one.changed(lambda t: torch.where(late, t.roll(1, 0), t), only=given))
    if moved is None or moved.shape != outputs.shape or outputs.shape[1] < given.shape[1] - 1:
        return None
    seen = slice(middle, None) if offset == 0 else slice(0, middle)
    apart, size = (moved - outputs)[:, seen].abs().max(), outputs.abs().max()
    return bool(apart > 1e-5 * size)
