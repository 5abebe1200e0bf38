"""Numbers in sentences."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def number_text(value: Any) -> str:
    """Return a number with four digits and a comma each thousand, for a sentence; a dash for unknown."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{int(value):,}" if float(value).is_integer() and abs(value) < 1e9 else four_digits(float(value))


def counted(number: int, what: str) -> str:
    """Return "1 run", "1,200 runs"."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def first_and_end(values: Floats) -> tuple[float, float]:
    """Return the first value, and the mean of the last tenth, as the sweep judges a run."""
    return float(values[0]), float(values[-max(1, len(values) // 10) :].mean())


def four_digits(value: float) -> str:
    """Four digits, an exponent without padding: 0.05123, 1.36e32, 1e-5."""
    return re.sub(r"e\+?(-?)0*", r"e\1", f"{value:.4g}")
