"""Parquet parts: what is written is what is read, whatever moment the process dies at."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from workbench.errors import RecordError
from workbench.record import tables as record_tables
from workbench.record.tables import PartWriter, read_parts, trial_column

VALUES = np.array([1.5, np.nan, np.inf, -np.inf, -0.0, 5e-324, 1.7976931348623157e308])


def rows(first: int, count: int = 3, **more: Any) -> dict[str, Any]:
    return {"trial": np.zeros(count, np.int32), "step": np.arange(first, first + count), **more}


def steps_of(folder: Path) -> list[int]:
    return read_parts(folder)["step"].tolist()


def test_every_float_comes_back_bit_for_bit(tmp_path: Path) -> None:
    writer = PartWriter(tmp_path)
    single = np.array([0.1, np.nan, np.inf, -np.inf, -0.0, 1e-45, 3e38], dtype=np.float32)
    writer.add({"loss": VALUES, "single": single, "text": ["é"] * 7, "clipped": np.ones(7, np.int8)})
    writer.flush()
    table = read_parts(tmp_path)
    assert table["loss"].to_numpy().tobytes() == VALUES.tobytes()
    assert table["single"].dtype == np.float64
    np.testing.assert_array_equal(table["single"], single.astype(np.float64))
    assert table["text"].tolist() == ["é"] * 7
    assert table["clipped"].dtype == np.int8


def test_a_column_that_appears_later_is_nan_before(tmp_path: Path) -> None:
    writer = PartWriter(tmp_path)
    for first, more in ((0, {}), (3, {"user/x": np.array([1.0, 2.0, 3.0])})):
        writer.add(rows(first, **more))
        writer.flush()
    for _ in range(2):
        assert read_parts(tmp_path)["user/x"].isna().tolist() == [True] * 3 + [False] * 3
        writer.merge()


def test_a_table_keeps_its_columns_when_all_of_its_rows_are_dropped_twice(tmp_path: Path) -> None:
    for _ in range(3):
        writer = PartWriter(tmp_path)
        writer.add(rows(0))
        writer.merge(keep=lambda table: table["step"] < 0)
        writer.merge(keep=lambda table: table["step"] < 0)
        assert trial_column(tmp_path).tolist() == []
    writer.add(rows(3))
    writer.merge()
    assert steps_of(tmp_path) == [3, 4, 5]
    assert read_parts(tmp_path).dtypes.equals(pd.DataFrame(rows(3)).dtypes)


def test_a_merged_part_stands_for_those_it_names(tmp_path: Path) -> None:
    writer = PartWriter(tmp_path)
    for first in (0, 3, 6):
        writer.add(rows(first))
        writer.flush()
    writer.merge()
    assert [p.name for p in tmp_path.glob("*.parquet")] == ["part-000001-000003.parquet"]
    again = PartWriter(tmp_path)
    again.add(rows(9))
    again.flush()
    assert steps_of(tmp_path) == list(range(12)), "a later writer numbers on, so nothing is covered by accident"
    again.merge()
    assert [p.name for p in tmp_path.glob("*.parquet")] == ["part-000001-000004.parquet"]
    assert steps_of(tmp_path) == list(range(12))


def test_parts_are_joined_a_few_rows_at_a_time_and_each_row_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against pandas, which joins them all at once: the same rows and dtypes, of which no piece is larger than two parts."""
    monkeypatch.setattr(record_tables, "MAX_ROWS", 6)
    writer, blocks, sizes, arrow = PartWriter(tmp_path), [], [], record_tables._arrow

    def noted(table: pd.DataFrame, *more: Any) -> Any:
        sizes.append(len(table))
        return arrow(table, *more)

    monkeypatch.setattr(record_tables, "_arrow", noted)
    for part in range(9):
        more = {"user/x": np.full(5, part, np.int64 if part % 2 else np.int8)} if part > 2 else {}
        blocks.append(pd.DataFrame(rows(5 * part, 5, name=[f"n{part}"] * 5, **more)))
        writer.add({str(name): column.to_numpy() for name, column in blocks[-1].items()})
        writer.flush()
        if part in (3, 7):
            writer.join()
            assert steps_of(tmp_path) == list(range(5 * part + 5))
    assert [p.name for p in sorted(tmp_path.glob("*.parquet"))] == [
        "part-000001-000004.parquet", "part-000005-000008.parquet", "part-000009.parquet",
    ]  # fmt: skip
    writer.merge()
    assert len(list(tmp_path.glob("*.parquet"))) == 1
    pd.testing.assert_frame_equal(read_parts(tmp_path), pd.concat(blocks, ignore_index=True))
    assert max(sizes) <= 10


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("kept", [0, 1, 99])
def test_a_crash_within_a_merge_leaves_every_row_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: int, kept: int
) -> None:
    """The merged part is there, the old ones not yet deleted: `kept` of them are, then the process dies."""
    writer = PartWriter(tmp_path)
    for number in range(parts):
        writer.add(rows(3 * number))
        writer.flush()
    unlink, left = Path.unlink, [kept]

    def dies(path: Path, missing_ok: bool = False) -> None:
        if path.suffix == ".parquet":
            if left[0] == 0:
                raise KeyboardInterrupt
            left[0] -= 1
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", dies)
    if kept < parts:
        with pytest.raises(KeyboardInterrupt):
            writer.merge(keep=lambda t: t["step"] < 2)
    else:
        writer.merge(keep=lambda t: t["step"] < 2)
    monkeypatch.undo()
    assert steps_of(tmp_path) == [0, 1]
    after = PartWriter(tmp_path)
    after.add(rows(2))
    after.merge()
    assert steps_of(tmp_path) == [0, 1, 2, 3, 4]


def test_a_reader_looks_again_when_a_merge_takes_a_part_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = PartWriter(tmp_path)
    for first in (0, 3):
        writer.add(rows(first))
        writer.flush()
    read, merged = record_tables._read, []

    def reads_late(path: Path) -> Any:
        if not merged:
            merged.append(path)
            writer.merge()
            assert not path.exists()
        return read(path)

    monkeypatch.setattr(record_tables, "_read", reads_late)
    assert steps_of(tmp_path) == list(range(6))
    assert merged


@pytest.mark.parametrize("call", ["open", "fsync", "replace"])
def test_a_full_disk_loses_nothing_and_the_rows_come_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    writer = PartWriter(tmp_path)
    writer.add(rows(0))
    writer.flush()
    writer.add(rows(3))

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(*{"fsync": (os, "fsync", full)}.get(call, (Path, call, full)))
    with pytest.raises(RecordError, match=r"part-000002\.parquet: No space left on device\. Nothing.*free some space"):
        writer.flush()
    monkeypatch.undo()
    assert steps_of(tmp_path) == [0, 1, 2]
    assert [p.name for p in tmp_path.iterdir()] == ["part-000001.parquet"]
    writer.flush()
    assert steps_of(tmp_path) == list(range(6))
