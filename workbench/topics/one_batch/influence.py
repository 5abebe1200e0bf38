"""What reaches the outputs of an example: its own inputs, all of them, and nothing of the other examples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from workbench.topics.one_batch.batch import OneBatch

__all__ = ["find_coupling", "find_spread", "find_unused"]

MOST_SLICES = 64
PASSES = 6


def find_spread(one: OneBatch) -> dict[str, Any]:
    """Return "outputs" (values an example), their root mean square "size", "mean", "spread" between examples, and "inputs_vary"."""
    values = one.flat(one.forward())
    size = float(values.square().mean().sqrt()) if values.numel() else None
    apart = float((values - values.mean(0)).square().mean().sqrt()) if values.numel() else None
    return {
        "outputs": values.shape[1],
        "size": size,
        "mean": float(values.mean()) if values.numel() else None,
        "spread": apart,
        "inputs_vary": any(bool((t != t[:1]).any()) for t in one.inputs()),
    }


def find_coupling(one: OneBatch) -> dict[str, Any]:
    """Return how far the outputs of an example move in evaluation mode when the others are exchanged, over what they move by its own.

    One half of the batch is replaced by the other half, and the outputs of the half that stayed are compared.
    """
    half = one.examples // 2
    if half < 1 or not one.exchangeable or one.pairs or _are_losses(one):
        return {"ratio": None}
    a, b = torch.arange(half), torch.arange(half, 2 * half)
    whole = one.rows(torch.cat([a, b]))
    both, firsts, lasts = (one.rows(torch.cat(order)) for order in ((a, b), (a, a), (b, b)))
    there, first, last = (whole.flat(w.forward()) for w in (both, firsts, lasts))
    if not there.numel() or not there.shape == first.shape == last.shape:
        return {"ratio": None}
    stayed = torch.cat([first[:half] - there[:half], last[half:] - there[half:]])
    moved = torch.cat([first[half:] - there[half:], last[:half] - there[:half]])
    own, other = (float(t.square().mean().sqrt()) for t in (moved, stayed))
    return {"own": own, "other": other, "ratio": other / own if own > 0 else None}


def _are_losses(one: OneBatch) -> bool:
    """Whether the model returns its losses, which may compare examples on purpose."""
    outputs = one.forward()
    tensors = one.tensors(outputs)
    return len(tensors) == 1 and torch.equal(tensors[0].double().reshape(-1), one.losses(outputs))


def find_unused(one: OneBatch, *, seed: int = 0) -> list[dict[str, Any]]:
    """Return for each tensor of inputs, and each of its axes, which of its slices never reach the outputs, in evaluation mode.

    In each pass every example gets another one of its slices from another example; what never made a difference is tried
    again, together and then by halves. Slices that never vary are left out, and so are places in time where a recurrent
    layer forgets them.
    """
    recurrent = any(isinstance(m, (nn.RNNBase, nn.RNNCellBase)) for m in one.model.modules())
    generator = torch.Generator().manual_seed(seed)
    there = one.flat(one.forward())
    found = []
    for place, tensor in enumerate(one.inputs()):
        for axis in range(1, tensor.dim()):
            in_time = (tensor.dim() == 2 and not tensor.is_floating_point()) or (tensor.dim() == 3 and axis == 1)
            if tensor.shape[axis] < 2 or (recurrent and in_time):
                continue
            looked, unused = _slices(one, tensor, axis, there, generator)
            if len(looked) > len(unused):  # else it is no input, but a target or an index
                found.append({
                    "tensor": place, "shape": list(tensor.shape[1:]), "axis": axis, "looked": len(looked), "unused": unused,
                })  # fmt: skip
    return found


def _slices(
    one: OneBatch, tensor: Tensor, axis: int, there: Tensor, generator: torch.Generator
) -> tuple[list[int], list[int]]:
    n, across = one.examples, tensor.movedim(axis, 1).flatten(2) if tensor.dim() > 2 else tensor[:, :, None]
    varies = (across != across[:1]).any(0).any(-1).nonzero().flatten().cpu()
    looked = varies[torch.randperm(len(varies), generator=generator)[:MOST_SLICES]]
    if not len(looked):
        return [], []
    reached = torch.zeros(len(looked), dtype=torch.bool)
    for number in range(PASSES):
        which = (torch.arange(n) + number * 7) % len(looked)
        mask = torch.zeros(n, tensor.shape[axis], dtype=torch.bool)
        mask[torch.arange(n), looked[which]] = True
        changed = _moved(one, tensor, axis, mask, there, shift=number + 1)
        reached[which[changed]] = True
    todo = [looked[~reached]]
    unused: list[int] = []
    while todo:
        few = todo.pop()
        if not len(few):
            continue
        mask = torch.zeros(n, tensor.shape[axis], dtype=torch.bool)
        mask[:, few] = True
        if not _moved(one, tensor, axis, mask, there, shift=1).any():
            unused += few.tolist()
        elif len(few) > 1:
            todo += [few[: len(few) // 2], few[len(few) // 2 :]]
    return looked.tolist(), sorted(unused)


def _moved(one: OneBatch, tensor: Tensor, axis: int, mask: Tensor, there: Tensor, *, shift: int) -> Tensor:
    """Return which examples' outputs differ when the masked slices (examples, slices) come from the example `shift` before."""
    shape = [tensor.shape[0], *(tensor.shape[axis] if i == axis else 1 for i in range(1, tensor.dim()))]
    given = mask.reshape(shape).to(tensor.device)
    values = one.flat(one.forward(one.changed(lambda t: torch.where(given, t.roll(shift, 0), t), only=tensor)))
    if values.shape != there.shape:
        return torch.ones(one.examples, dtype=torch.bool)
    return (values != there).any(1).cpu()
