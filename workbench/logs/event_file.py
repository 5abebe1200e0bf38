"""The wire format of protocol buffers, as far as logs need it: fields that are read, and `EventFile`, scalars in the files that TensorBoard reads (T4.10)."""

import itertools
import os
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield number and contents of every field: an int for a varint, else the bytes."""
    at, size = 0, len(data)
    while at < size:
        key, at = _varint(data, at)
        kind = key & 7
        if kind == _VARINT:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        length = 8 if kind == _FIXED64 else 4 if kind == _FIXED32 else None
        if kind == _BYTES:
            length, at = _varint(data, at)
        if length is None or at + length > size:
            raise ValueError(f"no field of wire type {kind} at byte {at}")
        yield key >> 3, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise ValueError(f"a number is cut off at byte {at}")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def signed(value: int) -> int:
    """Return a varint as the 64-bit integer that it stands for."""
    return value - (1 << 64) if value >> 63 else value


def double(data: bytes) -> float:
    """Return eight or four little-endian bytes as a number."""
    return float(struct.unpack("<d" if len(data) == 8 else "<f", data)[0])


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
        self._write(b"\x10" + _as_varint(step) + _text(5, _text(1, entry)))

    def _write(self, contents: bytes) -> None:
        contents = b"\x09" + struct.pack("<d", time.time()) + contents
        length = struct.pack("<Q", len(contents))
        with self.path.open("ab") as file:
            file.write(length + _masked(length) + contents + _masked(contents))


def _masked(data: bytes) -> bytes:
    value = crc32c(data)
    return struct.pack("<I", (((value >> 15) | (value << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


def _as_varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def _text(field: int, value: bytes) -> bytes:
    return _as_varint(field << 3 | 2) + _as_varint(len(value)) + value
