"""`Delayed`: a dataset as if it were read over a network, with a knob for the latency (P1.4)."""

from __future__ import annotations

import math
import time
from typing import Any

from torch.utils.data import Dataset

from workbench.errors import ConfigError, UsageError

__all__ = ["Delayed"]


class Delayed(Dataset[Any]):
    """A map-style dataset each of whose items comes later: what would it cost to keep the data elsewhere?

    Args:
        data: the dataset; its items are passed on unchanged.
        latency_s: seconds that an item takes longer.

    Raises:
        ConfigError: `latency_s` is no finite number of at least 0.
        UsageError: `data` is no map-style dataset.

    Source: P1.4 (data that do not live next to the training process).
    """

    def __init__(self, data: Any, latency_s: float) -> None:
        if isinstance(latency_s, bool) or not isinstance(latency_s, (int, float)) or not 0 <= latency_s < math.inf:
            raise ConfigError(f"latency_s={latency_s!r} must be a finite number of seconds of at least 0.")
        if not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
            raise UsageError(f"data must be a dataset with __len__ and __getitem__, not {type(data).__name__}.")
        self.data, self.latency_s = data, float(latency_s)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: Any) -> Any:
        time.sleep(self.latency_s)
        return self.data[index]
