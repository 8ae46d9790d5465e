"""A msgpack reader in plain Python, for what the codec refuses: maps with keys that are ints."""

from __future__ import annotations

import struct
from typing import Any

__all__ = ["Unreadable", "read"]

_NUMBERS = {
    0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q",
    0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q",
}  # fmt: skip
# First byte to kind and the width of the length that follows.
_SIZED = {
    0xC4: ("bin", 1), 0xC5: ("bin", 2), 0xC6: ("bin", 4),
    0xC7: ("ext", 1), 0xC8: ("ext", 2), 0xC9: ("ext", 4),
    0xD9: ("str", 1), 0xDA: ("str", 2), 0xDB: ("str", 4),
    0xDC: ("array", 2), 0xDD: ("array", 4), 0xDE: ("map", 2), 0xDF: ("map", 4),
}  # fmt: skip
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}


class Unreadable(ValueError):
    """Not exactly one msgpack object."""


def read(data: bytes) -> Any:
    """The object that ``data`` is; extension types come as their bytes.

    Raises:
        Unreadable: Whatever is wrong with the bytes.
    """
    try:
        value, end = _read(data, 0)
    except (IndexError, KeyError, TypeError, UnicodeDecodeError, RecursionError, struct.error) as e:
        raise Unreadable(f"malformed msgpack: {e!r}") from e
    if end != len(data):
        raise Unreadable("bytes follow the first object")
    return value


def _read(data: bytes, at: int) -> tuple[Any, int]:
    first = data[at]
    at += 1
    if first < 0x80 or first >= 0xE0:
        return first - (256 if first >= 0xE0 else 0), at
    if first in _CONSTANTS:
        return _CONSTANTS[first], at
    if first in _NUMBERS:
        form = _NUMBERS[first]
        return struct.unpack_from(form, data, at)[0], at + struct.calcsize(form)
    if first < 0x90:
        return _read_sized(data, at, "map", first & 0x0F)
    if first < 0xA0:
        return _read_sized(data, at, "array", first & 0x0F)
    if first < 0xC0:
        return _read_sized(data, at, "str", first & 0x1F)
    if 0xD4 <= first <= 0xD8:
        return _read_sized(data, at, "ext", 1 << (first - 0xD4))
    kind, width = _SIZED[first]
    size = int.from_bytes(_take(data, at, width), "big")
    return _read_sized(data, at + width, kind, size)


def _read_sized(data: bytes, at: int, kind: str, size: int) -> tuple[Any, int]:
    if kind == "array":
        items = []
        for _ in range(size):
            item, at = _read(data, at)
            items.append(item)
        return items, at
    if kind == "map":
        entries = {}
        for _ in range(size):
            key, at = _read(data, at)
            entries[key], at = _read(data, at)
        return entries, at
    at += kind == "ext"  # its type byte
    raw = _take(data, at, size)
    return (raw.decode() if kind == "str" else raw), at + size


def _take(data: bytes, at: int, size: int) -> bytes:
    raw = data[at : at + size]
    if len(raw) != size:
        raise IndexError("truncated")
    return raw
