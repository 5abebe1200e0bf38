"""`EventFile`: scalars in the file format that TensorBoard reads, a few bytes a value and no further package (T4.10).

A file is a sequence of records: length, checksum of the length, contents, checksum of the contents. The contents are an `Event`
message of protocol buffers. Checksums are CRC-32C, rotated and shifted by a constant.
"""

import itertools
import os
import socket
import struct
import time
from pathlib import Path

_POLYNOMIAL = 0x82F63B78  # Castagnoli's, reflected
_NUMBERS = itertools.count()


def crc32c(data: bytes) -> int:
    """Return the CRC-32C checksum (RFC 3720)."""
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = (value >> 1) ^ (_POLYNOMIAL if value & 1 else 0)
    return value ^ 0xFFFFFFFF


class EventFile:
    """A new file of scalars in `folder`; every value is on its way to the disk when `scalar` returns, and nothing is left open."""

    def __init__(self, folder: str | Path) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}.{next(_NUMBERS)}"
        self.path = folder / name
        self._write(_text(3, b"brain.Event:2"))

    def scalar(self, tag: str, value: float, step: int) -> None:
        """Append a value, stored in 32 bits, to the curve `tag`."""
        entry = _text(1, tag.encode()) + b"\x15" + struct.pack("<f", value)
        self._write(b"\x10" + _varint(step) + _text(5, _text(1, entry)))

    def _write(self, contents: bytes) -> None:
        contents = b"\x09" + struct.pack("<d", time.time()) + contents
        length = struct.pack("<Q", len(contents))
        with self.path.open("ab") as file:
            file.write(length + _masked(length) + contents + _masked(contents))


def _masked(data: bytes) -> bytes:
    value = crc32c(data)
    return struct.pack("<I", (((value >> 15) | (value << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def _text(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value
