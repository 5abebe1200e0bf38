"""`RawLog`: the columns of one log as they were written, before anybody knows what they mean."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from workbench.errors import RecordError

_MISSING = {"", "none", "null", "-", "n/a", "na"}
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class RawLog:
    """One run's log.

    Attributes:
        path: its file, or a name where it came from memory.
        columns: name -> the cells that were written, in order, their index the row of the log.
        rows: how many there are.
        known: what else the log says: "total_steps" planned, "lr" of its config, "max_grad_norm", "notes" for the reader.
        text: missing cells at the end may be a NaN that was written as an empty cell.
    """

    path: Path
    columns: Mapping[str, pd.Series]
    rows: int
    known: Mapping[str, Any] = field(default_factory=dict)
    text: bool = False

    def numbers(self, name: str) -> tuple[Ints, Floats]:
        """Return rows and values of a column; cells that say that there is none are left out."""
        cells = self.columns[name]
        if not pd.api.types.is_numeric_dtype(cells.dtype):
            said = cells.astype(str).str.strip()
            there = ~said.str.lower().isin(_MISSING)
            cells, said = cells[there], said[there]
            values = pd.to_numeric(said, errors="coerce")
            bad = values.isna() & (said.str.lower().str.lstrip("+-") != "nan")
            if bad.any():
                row = int(bad.to_numpy().argmax())
                raise RecordError(
                    f"{self.path}: column {name!r} holds {said.iloc[row][:60]!r} in row {int(said.index[row]) + 1}, which is not a number, "
                    f"and {int(bad.sum()) - 1} more like it. Write plain numbers (float(loss), loss.item()), or name another column."
                )
            cells = values
        return cells.index.to_numpy(dtype=np.int64), cells.to_numpy(dtype=np.float64)


def columns_of(frame: pd.DataFrame) -> dict[str, pd.Series]:
    """Return the written cells of each column of a frame whose rows are numbered 0, 1, 2, ..."""
    numbered = frame.reset_index(drop=True)
    return {str(name): numbered[name].dropna() for name in numbered.columns}
