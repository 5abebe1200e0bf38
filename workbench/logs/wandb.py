"""Weights & Biases' offline runs: the history of a `run-*.wandb` file, without wandb.

The file is LevelDB's log of `Record` messages behind seven bytes of its own: blocks of 32 KiB, in which a record is whole, or a first,
middle and last piece. Source: https://github.com/google/leveldb/blob/main/doc/log_format.md and wandb/proto/wandb_internal.proto.
"""

import json
import math
import struct
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from workbench.errors import RecordError
from workbench.logs.columns import RawLog
from workbench.logs.event_file import double, fields, signed
from workbench.record.json_values import number

_MAGIC, _HEADER, _BLOCK = b":W&B", 7, 32768
_WHOLE, _FIRST, _LAST = 1, 2, 4
_HISTORY, _CONFIG, _RUN, _RUN_CONFIG = 2, 5, 17, 4
_ITEM, _UPDATE, _KEY, _NESTED, _JSON = 1, 1, 1, 2, 16
_BOOLEAN, _INTEGER, _NUMBER = 4, 5, 6
_LR_FIELDS = ("learning_rate", "lr", "peak_lr")


def read_wandb(path: Path) -> RawLog:
    """Return the history of an offline run, and from its config the learning rate and clipping threshold."""
    data = path.read_bytes()
    if not data.startswith(_MAGIC):
        raise RecordError(
            f"{path} is not an offline run of Weights & Biases: it does not begin with {_MAGIC.decode()!r}."
        )
    cells: dict[str, tuple[list[int], list[float]]] = defaultdict(lambda: ([], []))
    row, config = 0, dict[str, Any]()
    try:
        for record in _records(data):
            for kind, message in fields(record):
                if not isinstance(message, bytes):
                    continue
                if kind == _HISTORY:
                    for key, value in _items(message, _ITEM):
                        if isinstance(value, (int, float)):
                            cells[key][0].append(row)
                            cells[key][1].append(float(value))
                    row += 1
                else:
                    config |= _config(kind, message)
    except ValueError as error:
        raise RecordError(f"{path} is damaged ({error}). `wandb sync` may still be able to read it.") from error
    if not row:
        raise RecordError(f"{path} holds no history: nothing was logged with wandb.log, or the run ended at once.")
    columns = {key: pd.Series(values, index=rows, dtype=np.float64) for key, (rows, values) in cells.items()}
    lrs = [value for name in _LR_FIELDS if (value := number(config.get(name))) > 0]
    known = {"lr": lrs[0] if lrs else math.nan, "max_grad_norm": number(config.get("max_grad_norm"))}
    return RawLog(
        path=path, columns=columns, rows=row, known={name: value for name, value in known.items() if value > 0}
    )


def _config(kind: int, message: bytes) -> dict[str, Any]:
    """Return what a record says of the run's config, "lr" and the like."""
    if kind == _CONFIG:
        return dict(_items(message, _UPDATE))
    parts = [part for inner, part in fields(message) if inner == _RUN_CONFIG] if kind == _RUN else []
    return {name: value for part in parts if isinstance(part, bytes) for name, value in _items(part, _UPDATE)}


def _records(data: bytes) -> Iterator[bytes]:
    """Yield every whole record; the pieces of one that was cut off are left out."""
    at, pieces = _HEADER, list[bytes]()
    while at + 7 <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < 7:  # padding
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        at += 7
        if at + length > len(data):
            return
        piece = data[at : at + length]
        at += length
        if kind in (_WHOLE, _FIRST):
            pieces = []
        pieces.append(piece)
        if kind in (_WHOLE, _LAST):
            yield b"".join(pieces)


def _items(message: bytes, wanted: int) -> Iterator[tuple[str, Any]]:
    """Yield names and values of a history or a config; the parts of a nested name are joined by dots."""
    for kind, item in fields(message):
        if kind != wanted or not isinstance(item, bytes):
            continue
        names, value = list[str](), None
        for inner, part in fields(item):
            if inner in (_KEY, _NESTED) and isinstance(part, bytes):
                names.append(part.decode())
            elif inner == _JSON and isinstance(part, bytes):
                value = _parsed(part)
            elif inner == _NUMBER and isinstance(part, bytes):
                value = double(part)
            elif inner in (_INTEGER, _BOOLEAN) and isinstance(part, int):
                value = signed(part)
        yield ".".join(name for name in names if name), value


def _parsed(text: bytes) -> Any:
    """Return a JSON value; NaN and the infinities are numbers, also where they were written as words."""
    value = json.loads(text)
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else value
