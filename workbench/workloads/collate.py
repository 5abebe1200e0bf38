"""Batches of items, and what an item that cannot be part of one is."""

from collections.abc import Callable
from typing import Any

from torch.utils.data import default_collate

from workbench.errors import DataError


class Collate:
    """Makes a batch of items; an error says of which split, by which function, and what the items are. None is `default_collate`."""

    def __init__(self, collate: Callable[..., Any] | None, split: str) -> None:
        self.collate, self.split = collate or default_collate, split

    def __call__(self, items: Any) -> Any:
        """Return the batch of these items."""
        try:
            return self.collate(items)
        except DataError:
            raise
        except Exception as error:
            kinds = list(dict.fromkeys(_kind(item) for item in items)) if isinstance(items, list) else [_kind(items)]
            by = getattr(self.collate, "__name__", type(self.collate).__name__)
            raise DataError(
                f"{by} could not make a batch of the {self.split} split ({type(error).__name__}: {str(error).partition(chr(10))[0]}). Its items "
                f"are {', '.join(kinds[:3])}. Let the dataset return tensors, arrays and numbers of one shape, or give the workload collate=..."
            ) from error


def _kind(item: Any) -> str:
    if isinstance(item, (tuple, list)):
        return f"({', '.join(_kind(part) for part in item[:4])}{', ...' * (len(item) > 4)})"
    shape = getattr(item, "shape", None)
    return "None" if item is None else type(item).__name__ + ("" if shape is None else str(list(shape)))
