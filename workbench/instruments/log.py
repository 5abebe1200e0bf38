"""`log`: values that a training program reports itself."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping

from torch import Tensor

_SPLITS = {"val": "validation", "valid": "validation", "validation": "validation", "eval": "validation", "test": "test", "train": "train"}  # fmt: skip
_PREFIX = re.compile(rf"({'|'.join(_SPLITS)})[_/.\- ]+(.+)")
_LISTENERS: list[Callable[[Mapping[str, float]], None]] = []


def log(**values: float | Tensor) -> None:
    """Report values of the update in progress to whoever observes this program or loop, such as `wb.log(validation_loss=0.31)`; else nothing happens. A value that is no number is left out.

    `workbench diagnose -- python train.py` selects and compares by what is logged; `loss` stands in for the loss that `backward`
    is called on. Inside `with wb.watch(...)` it is the same as `run.log`.
    """
    if not _LISTENERS:
        return
    plain = numbers(values)
    for listener in tuple(_LISTENERS):
        with contextlib.suppress(Exception):
            listener(plain)


def numbers(values: Mapping[str, float | Tensor]) -> dict[str, float]:
    """Return the values that are numbers, whether they are part of a graph or not; others are left out, as what a program logs is never why it fails."""
    plain = {}
    for name, value in values.items():
        with contextlib.suppress(Exception):
            plain[name] = float(value.detach() if isinstance(value, Tensor) else value)
    return plain


def split_of(name: str, split: str = "validation") -> tuple[str, str]:
    """Return split and metric: "val_loss", "eval/loss" and the like are ("validation", "loss"), a name without a split is of `split`."""
    found = _PREFIX.fullmatch(name)
    return (_SPLITS[found[1]], found[2]) if found else (split, name)


def listen(listener: Callable[[Mapping[str, float]], None]) -> Callable[[], None]:
    """Call `listener` with everything that is logged, until what is returned is called."""
    _LISTENERS.append(listener)
    return lambda: _LISTENERS.remove(listener)
