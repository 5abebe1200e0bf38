"""The tables of a study as Parquet parts: written while training, readable after a crash at any byte.

A part is written under a temporary name, flushed to disk and renamed. `part-000004-000009.parquet` replaces the
parts 4 to 9: merging is one rename, so a reader never sees a row twice or not at all.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from workbench.errors import RecordError
from workbench.record.folder import write_atomic
from workbench.record.watch import tell

_NAME = re.compile(r"part-(\d{6})(?:-(\d{6}))?\.parquet$")


class PartWriter:
    """Collects column blocks and writes them as parts of one folder; without a folder it takes everything and keeps nothing."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._blocks: list[dict[str, Any]] = []
        self.written = 0
        self._next = 1 if folder is None else 1 + max((last for _, last, _ in _all_parts(folder)), default=0)

    def add(self, columns: Mapping[str, Any]) -> None:
        """Keep one block of rows in memory until the next `flush`."""
        if self.folder is None:
            return
        lengths = {name: len(values) for name, values in columns.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"columns of one block must have the same length, not {lengths}")
        self._blocks.append(dict(columns))
        tell("on_rows", self.folder.parent, self.folder.name, columns)

    def show(self, columns: Mapping[str, Any]) -> None:
        """Let those who look on see rows that will be added later."""
        if self.folder is not None:
            tell("on_rows", self.folder.parent, "steps", columns, early=True)

    def flush(self) -> None:
        """Write everything collected so far as one part; keep it in memory when the disk refuses."""
        if self._blocks and self.folder is not None:
            write_atomic(self.folder / f"part-{self._next:06d}.parquet", _parquet(_table(self._blocks)))
            self._blocks.clear()
            self._next += 1
            self.written += 1

    def merge(self, keep: Callable[[pd.DataFrame], pd.Series] | None = None) -> None:
        """Join all parts into one, dropping the rows for which `keep` is False."""
        self.flush()
        self.written = 0
        if self.folder is None:
            return
        live = _live_parts(self.folder)
        if not live or (len(live) == 1 and keep is None):
            return
        table = pd.concat([_read(path) for _, _, path in live], ignore_index=True)
        if keep is not None:
            table = table[keep(table)]
        merged = f"part-{live[0][0]:06d}-{live[-1][1]:06d}.parquet"
        write_atomic(self.folder / merged, _parquet(table))
        for _, _, path in _all_parts(self.folder):
            if path.name != merged:
                path.unlink(missing_ok=True)


def _parquet(table: pd.DataFrame) -> bytes:
    sink = pa.BufferOutputStream()
    arrow = pa.table({str(c): pa.array(table[c].to_numpy(), from_pandas=False) for c in table.columns})
    floats = [f.name for f in arrow.schema if pa.types.is_floating(f.type)]
    pq.write_table(
        arrow,
        sink,
        compression="zstd",
        use_dictionary=[f.name for f in arrow.schema if f.name not in floats],
        use_byte_stream_split=floats,
        write_page_checksum=True,
    )
    content: bytes = sink.getvalue().to_pybytes()
    return content


def _table(blocks: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return all rows of the blocks; a table is made once for all neighbours that have the same columns."""
    tables = []
    for names, alike in itertools.groupby(blocks, key=tuple):
        group = list(alike)
        tables.append(pd.DataFrame({name: np.concatenate([np.asarray(b[name]) for b in group]) for name in names}))
    return pd.concat(tables, ignore_index=True)


def read_parts(folder: Path, *, columns: list[str] | None = None) -> pd.DataFrame:
    """Return all rows of a folder of parts, floats as float64, in the order they were written.

    A leftover temporary file is ignored; a truncated part is an error that names it.
    """
    frames = _read_live(folder)
    if not frames:
        return pd.DataFrame(columns=columns or [])
    table = pd.concat(frames, ignore_index=True)
    single = [c for c in table.columns if table[c].dtype == np.float32]
    return table.astype(dict.fromkeys(single, np.float64))


def missing_parts(folder: Path) -> list[int]:
    """Return the numbers of the parts that no file of the folder covers, up to the last one."""
    live = _live_parts(folder)
    covered = {number for first, last, _ in live for number in range(first, last + 1)}
    return sorted(set(range(1, max(covered, default=0))) - covered)


def trial_column(folder: Path) -> np.ndarray:
    """Return the trial of each row."""
    frames = [_read(path, ["trial"]) for _, _, path in _live_parts(folder)]
    return np.concatenate([frame["trial"].to_numpy() for frame in frames]) if frames else np.empty(0, int)


def _read_live(folder: Path, *, tries: int = 5) -> list[pd.DataFrame]:
    """Read the live parts; look again where the study's writer has merged one away in the meantime."""
    for _ in range(tries - 1):
        with contextlib.suppress(FileNotFoundError):
            return [_read(path) for _, _, path in _live_parts(folder)]
    return [_read(path) for _, _, path in _live_parts(folder)]


def _all_parts(folder: Path) -> list[tuple[int, int, Path]]:
    found = [(m, p) for p in sorted(folder.glob("part-*.parquet")) if (m := _NAME.search(p.name))]
    return [(int(m[1]), int(m[2] or m[1]), p) for m, p in found]


def _live_parts(folder: Path) -> list[tuple[int, int, Path]]:
    """Parts that no merged part covers, in order; of `part-000003` and `part-000003-000003` the second is newer."""
    newest = {(first, last): path for first, last, path in sorted(_all_parts(folder), key=lambda p: len(p[2].name))}
    covered = [(a, b) for a, b in newest if any(c <= a and b <= d and (c, d) != (a, b) for c, d in newest)]
    return sorted((a, b, path) for (a, b), path in newest.items() if (a, b) not in covered)


def _read(path: Path, columns: list[str] | None = None) -> pd.DataFrame:
    try:
        # half the time of `read_table` on a small part
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            table = file.read(columns, use_threads=False)
        return pd.DataFrame({name: table[name].to_numpy() for name in table.column_names})
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise RecordError(
            f"{path} is truncated or damaged ({str(error).splitlines()[0]}). Delete this one part to read the rest of the "
            "study; to have the rows in it again, run the study in a new folder."
        ) from error
