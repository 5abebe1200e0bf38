"""Where a step fetches numbers from the device, which waits for all work before it (P1.6); and the step without that.

On CUDA `torch.cuda.set_sync_debug_mode` names every synchronisation; elsewhere calls that would be one on an accelerator are
counted: `.item()`, `float(tensor)`, `.cpu()`, `.tolist()`, `.numpy()` and their like, on anything that is no part of the batch.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from workbench.topics.input.loop import Step
from workbench.workloads.items import fresh_containers, leaves

__all__ = ["StaleFetches", "count_syncs"]

_FETCHES = frozenset(
    [
        "item",
        "tolist",
        "numpy",
        "cpu",
        "__array__",
        "__float__",
        "__int__",
        "__bool__",
        "__index__",
        "__complex__",
        "__format__",
        "__repr__",
    ]
)


def count_syncs(batches: Sequence[Any], step: Step, *, steps: int = 20) -> dict[str, Any]:
    """Return where and how often a step fetches numbers from the device.

    Args:
        batches: to go through, again and again.
        step: is called `steps` times.
        steps: enough to tell every step from every tenth.

    Returns:
        "steps", "share" (of the steps that fetch at least once), "per_step" (fetches), "places" ({"file:line function": fetches
        per step}, most first), "how".
    """
    on_cuda = torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
    count = _cuda_syncs if on_cuda else _fetches
    found = [count(batches, step, k) for k in range(steps)]
    total: Counter[str] = sum(found, Counter())
    return {
        "steps": steps,
        "share": sum(bool(places) for places in found) / steps,
        "per_step": total.total() / steps,
        "places": {place: n / steps for place, n in total.most_common(10)},
        "how": "CUDA's sync debug mode" if on_cuda else "calls that fetch a tensor's values",
    }


def _fetches(batches: Sequence[Any], step: Step, k: int) -> Counter[str]:
    batch = batches[k % len(batches)]
    counter = _Counter(leaf for _, leaf in leaves(batch) if isinstance(leaf, Tensor))
    with counter:
        step(fresh_containers(batch))
    return counter.places


class _Counter(TorchFunctionMode):
    """Counts the calls that fetch values of tensors which are no part of the batch, nor computed from it alone."""

    def __init__(self, given: Any) -> None:
        super().__init__()
        self.places: Counter[str] = Counter()
        self._given = {id(tensor): tensor for tensor in given}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note a fetch with the line that asks for it."""
        if getattr(func, "__name__", "") in _FETCHES and not (args and id(args[0]) in self._given):
            place = _asking(sys._getframe(1))
            if place is not None:
                self.places[place] += 1
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            asked = [leaf for _, leaf in leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
            if asked and all(id(t) in self._given for t in asked):  # such as the longest text, which the host knows
                self._given[id(result)] = result
        return result


class StaleFetches(TorchFunctionMode):
    """The same step without its synchronisations: each place gets the value that it fetched the first time.

    Losses that are printed are then wrong, and a step that decides by them decides by old ones; what it costs in time is right.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kept: dict[tuple[str, str], Any] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return what was fetched at this place before, where it was a fetch."""
        name = getattr(func, "__name__", "")
        place = _asking(sys._getframe(1)) if name in _FETCHES else None
        if place is None:
            return func(*args, **(kwargs or {}))
        if (place, name) not in self._kept:
            self._kept[place, name] = func(*args, **(kwargs or {}))
        return self._kept[place, name]


def _asking(frame: FrameType | None) -> str | None:
    """Return the person's own line that asks; None for what an optimizer or scaler of torch does by itself."""
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith(("torch.optim", "torch.amp", "torch.cuda.amp")):
            return None
        if not module.startswith(("torch.", "workbench.topics.input")):
            code = frame.f_code
            return f"{code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno} {code.co_name}"
        frame = frame.f_back
    return None


def _cuda_syncs(batches: Sequence[Any], step: Step, k: int) -> Counter[str]:
    """Count what CUDA itself reports; a warning each, whose line is the person's own."""
    before: Any = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step(fresh_containers(batches[k % len(batches)]))
        finally:
            torch.cuda.set_sync_debug_mode(before)
    places = (f"{w.filename.rsplit('/', 1)[-1]}:{w.lineno}" for w in said if "synchroniz" in str(w.message))
    return Counter(places)
