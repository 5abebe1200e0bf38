"""The source text of the installed Python's standard library, as bytes, for `source_text`."""

from __future__ import annotations

import hashlib
import sysconfig
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import TensorDataset

from workbench.errors import DataError

__all__ = ["SourceText", "source_data", "text_hash"]

MAX_BYTES = 2_000_000
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "__pycache__"}
EVERY = 20  # of twenty files one is for validation and one for testing


class SourceText(NamedTuple):
    """Three splits by file, so that no window is cut from a file of another split, and the hash of all text."""

    train: TensorDataset
    validation: TensorDataset
    test: TensorDataset
    sha256: str


@cache
def source_data(*, length: int = 64, max_bytes: int = MAX_BYTES) -> SourceText:
    """Return windows of the text; an item is (inputs, targets), bytes as int64 of shape (length,), targets one ahead.

    Args:
        length: bytes a window predicts; windows do not overlap.
        max_bytes: files are taken in the order of their paths until the text is this long.

    Raises:
        DataError: the standard library's source is not there.
    """
    files = _read_files(max_bytes)
    parts = [b"".join(text for i, text in enumerate(files) if _split(i) == split) for split in range(3)]
    train, validation, test = (_windows(part, length) for part in parts)
    digest = hashlib.sha256(b"".join(files)).hexdigest()
    for split in (train, validation, test):
        setattr(split, "sha256", digest)  # noqa: B010 - the record keeps the hash of a dataset that knows its own
    return SourceText(train, validation, test, digest)


def text_hash() -> str:
    """Return the SHA-256 of the text, in hexadecimal: it differs from one version of Python to the next."""
    return source_data().sha256


def _split(index: int) -> int:
    return {EVERY - 2: 1, EVERY - 1: 2}.get(index % EVERY, 0)


def _read_files(max_bytes: int) -> list[bytes]:
    root = Path(sysconfig.get_path("stdlib"))
    paths = [path for path in root.rglob("*.py") if not SKIPPED.intersection(path.relative_to(root).parts)]
    files: list[bytes] = []
    total = 0
    for path in sorted(paths, key=lambda path: path.relative_to(root).as_posix()):
        text = path.read_bytes()[: max_bytes - total]
        files.append(text)
        total += len(text)
        if total >= max_bytes:
            break
    if len(files) < EVERY:
        raise DataError(
            f"found {len(files)} source files of the standard library in {root} within max_bytes={max_bytes}, and the "
            f"three splits need at least {EVERY}. Raise max_bytes, install Python with its source, or take another workload."
        )
    return files


def _windows(text: bytes, length: int) -> TensorDataset:
    count = (len(text) - 1) // length
    tokens = torch.from_numpy(np.frombuffer(text, dtype=np.uint8)[: count * length + 1].astype(np.int64))
    return TensorDataset(tokens[:-1].view(count, length), tokens[1:].view(count, length))
