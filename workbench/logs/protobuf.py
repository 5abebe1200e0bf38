"""The wire format of protocol buffers, as far as the logs of other tools need it: fields of a message, nothing decoded by a schema.

Source: https://protobuf.dev/programming-guides/encoding/
"""

import struct
from collections.abc import Iterator

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
