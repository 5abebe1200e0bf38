"""The tables of a study as Parquet parts: written while training, readable after a crash at any byte.

A part is written under a temporary name, flushed to disk and renamed. `part-000004-000009.parquet` replaces the
parts 4 to 9: merging is one rename, so a reader never sees a row twice or not at all.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from workbench.errors import RecordError
from workbench.record.folder import write_atomic
from workbench.record.watch import tell

MAX_ROWS = 20_000
"""Rows that are in memory at a time while parts are joined (rule of thumb: some megabytes)."""
_NAME = re.compile(r"part-(\d{6})(?:-(\d{6}))?\.parquet$")


class PartWriter:
    """Collects column blocks and writes them as parts of one folder; without a folder it takes everything and keeps nothing."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._blocks: list[dict[str, Any]] = []
        self.written = 0
        self._joined = 0  # number of the last part that was joined with others
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

    def join(self) -> None:
        """Join the parts that were written since the last call: reading stays fast, and no row is written again and again."""
        if self.folder is not None:
            self._join([part for part in _live_parts(self.folder) if part[0] > self._joined], None)
            self._joined, self.written = self._next - 1, 0

    def merge(self, keep: Callable[[pd.DataFrame], pd.Series] | None = None) -> None:
        """Join all parts into one, dropping the rows for which `keep` is False."""
        self.flush()
        if self.folder is not None:
            self._join(_live_parts(self.folder), keep)
            self._joined, self.written = self._next - 1, 0

    def _join(self, live: list[tuple[int, int, Path]], keep: Callable[[pd.DataFrame], pd.Series] | None) -> None:
        """Join neighbours into one part, whose row groups are all that is in memory at a time."""
        if not live or (len(live) == 1 and keep is None):
            return
        assert self.folder is not None
        first, last, paths = live[0][0], live[-1][1], [path for _, _, path in live]
        # the second where no row is left
        heads = [next(itertools.chain(_batches(path, 1), _batches(path))) for path in paths]
        kinds = pd.concat(heads, ignore_index=True)  # whose dtypes are those of all rows together

        def write(file: IO[bytes]) -> None:
            with pq.ParquetWriter(file, (schema := _arrow(kinds).schema), **_options(schema)) as writer:
                for rows in _blocks(paths):
                    kept = rows if keep is None else rows[keep(rows)]
                    whole = kept.reindex(columns=kinds.columns).astype(kinds.dtypes)
                    writer.write_table(_arrow(whole, schema))

        merged = self.folder / f"part-{first:06d}-{last:06d}.parquet"
        write_atomic(merged, write)
        for begins, ends, path in _all_parts(self.folder):
            if first <= begins and ends <= last and path != merged:
                path.unlink(missing_ok=True)


def _arrow(table: pd.DataFrame, schema: pa.Schema | None = None) -> pa.Table:
    kinds = {} if schema is None else {field.name: field.type for field in schema}
    return pa.table(
        {str(c): pa.array(table[c].to_numpy(), type=kinds.get(c), from_pandas=False) for c in table.columns}
    )


def _options(schema: pa.Schema) -> dict[str, Any]:
    floats = [f.name for f in schema if pa.types.is_floating(f.type)]
    return {
        "compression": "zstd", "use_dictionary": [f.name for f in schema if f.name not in floats],
        "use_byte_stream_split": floats, "write_page_checksum": True,
    }  # fmt: skip


def _parquet(table: pd.DataFrame) -> bytes:
    sink, arrow = pa.BufferOutputStream(), _arrow(table)
    pq.write_table(arrow, sink, **_options(arrow.schema))
    content: bytes = sink.getvalue().to_pybytes()
    return content


def _blocks(paths: Sequence[Path]) -> Iterator[pd.DataFrame]:
    """Iterate over the rows of parts, `MAX_ROWS` or somewhat more at a time."""
    held: list[pd.DataFrame] = []
    for rows in itertools.chain.from_iterable(_batches(path, MAX_ROWS) for path in paths):
        held.append(rows)
        if sum(map(len, held)) >= MAX_ROWS:
            yield pd.concat(held, ignore_index=True)
            held = []
    if held:
        yield pd.concat(held, ignore_index=True)


def _table(blocks: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return all rows of the blocks; a table is made once for all neighbours that have the same columns."""
    tables = []
    for names, alike in itertools.groupby(blocks, key=tuple):
        group = list(alike)
        tables.append(pd.DataFrame({name: np.concatenate([np.asarray(b[name]) for b in group]) for name in names}))
    return pd.concat(tables, ignore_index=True)


def read_parts(folder: Path, *, columns: list[str] | None = None) -> pd.DataFrame:
    """Return all rows of a folder of parts, floats as float64, in the order they were written."""
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
    return next(_batches(path, columns=columns))


def _batches(path: Path, rows: int | None = None, columns: list[str] | None = None) -> Iterator[pd.DataFrame]:
    """Iterate over the rows of a part, so many at a time, None is all."""
    try:
        # half the time of `read_table` on a small part
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            whole = (
                [file.read(columns, use_threads=False)] if rows is None else file.iter_batches(rows, use_threads=False)
            )
            for batch in whole:
                yield pd.DataFrame(
                    {
                        name: batch[name].to_numpy(**({} if rows is None else {"zero_copy_only": False}))
                        for name in batch.schema.names
                    }
                )
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise RecordError(
            f"{path} is truncated or damaged ({str(error).splitlines()[0]}). Delete this one part to read the rest of the "
            "study; to have the rows in it again, run the study in a new folder."
        ) from error
