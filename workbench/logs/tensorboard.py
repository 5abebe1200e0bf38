"""TensorBoard's event files: scalars, by their simple value or as a tensor, without TensorBoard.

A file is a sequence of records: length, checksum of the length, an `Event` message, its checksum. What a program that was killed
left unfinished at the end is passed over. Source: tensorboard/compat/proto/{event,summary,tensor}.proto.
"""

import struct
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from workbench.errors import RecordError
from workbench.logs.columns import RawLog
from workbench.logs.event_file import double, fields, signed

STEP = "step"
_STEP, _SUMMARY, _VALUE, _TAG, _SIMPLE, _TENSOR = 2, 5, 1, 1, 2, 8
_CONTENT, _FLOATS, _DOUBLES, _DTYPE = 4, 5, 6, 1
_WIDTHS = {1: "<f4", 2: "<f8", 3: "<i4", 9: "<i8", 19: "<f2"}  # number of a tensor's type -> how its bytes are read


def is_event_file(path: Path) -> bool:
    """Tell whether a file's name is that of an event file."""
    return "tfevents" in path.name


def read_event_files(paths: Sequence[Path]) -> RawLog:
    """Return the scalars of one run; of several files, as a resumed run leaves them, in the order of their names."""
    tags: dict[str, tuple[list[int], list[float]]] = defaultdict(lambda: ([], []))
    steps: list[int] = []
    for path in sorted(paths, key=lambda p: p.name):
        for step, tag, value in _scalars(path):
            rows, values = tags[tag]
            rows.append(len(steps))
            values.append(value)
            steps.append(step)
    where = paths[0].parent if len(paths) > 1 else paths[0]
    if not tags:
        raise RecordError(
            f"{where} holds no scalar. Was the writer flushed or closed? add_scalar, or close() at the end, writes."
        )
    columns = {tag: pd.Series(values, index=rows, dtype=np.float64) for tag, (rows, values) in tags.items()}
    return RawLog(path=where, columns={STEP: pd.Series(steps, dtype=np.int64), **columns}, rows=len(steps))


def _scalars(path: Path) -> Iterator[tuple[int, str, float]]:
    for event in _records(path):
        step, summaries = 0, []
        try:
            for number, value in fields(event):
                if number == _STEP and isinstance(value, int):
                    step = signed(value)
                elif number == _SUMMARY and isinstance(value, bytes):
                    summaries.append(value)
            entries = [entry for summary in summaries for number, entry in fields(summary) if number == _VALUE]
            for entry in entries:
                found = _entry(entry) if isinstance(entry, bytes) else None
                if found is not None:
                    yield step, *found
        except ValueError as error:
            raise RecordError(f"{path} is damaged ({error}), or not an event file.") from error


def _records(path: Path) -> Iterator[bytes]:
    data, at = path.read_bytes(), 0
    while at + 12 <= len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        if at + 16 + length > len(data):  # cut off, or never one
            if at == 0:
                raise RecordError(f"{path} is not an event file of TensorBoard, or it is cut off in its first record.")
            return
        yield data[at + 12 : at + 12 + length]
        at += 16 + length


def _entry(entry: bytes) -> tuple[str, float] | None:
    """Return tag and value of a scalar; None for an image, a histogram and the like."""
    tag, value = "", None
    for number, part in fields(entry):
        if number == _TAG and isinstance(part, bytes):
            tag = part.decode("utf-8", errors="replace")
        elif number == _SIMPLE and isinstance(part, bytes):
            value = double(part)
        elif number == _TENSOR and isinstance(part, bytes):
            value = _tensor(part)
    return None if value is None else (tag, value)


def _tensor(data: bytes) -> float | None:
    """Return the one number of a tensor, None where it holds another number of them."""
    kind, found = 1, b""
    for number, part in fields(data):
        if number == _DTYPE and isinstance(part, int):
            kind = part
        elif isinstance(part, bytes) and number in (_CONTENT, _FLOATS, _DOUBLES):
            found = part
    width = _WIDTHS.get(kind)
    if width is None or len(found) != np.dtype(width).itemsize:
        return None
    return float(np.frombuffer(found, dtype=width)[0])
