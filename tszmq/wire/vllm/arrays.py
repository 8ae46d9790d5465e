"""Arrays in vLLM's messages: ``[dtype, shape, data]``, read without numpy.

The dtype is numpy's spelling (``<f4``) or torch's (``float32``). The data are raw bytes, little
endian, or the index of the frame that holds them: frame 0 is the message itself, and every
array that is too large for it gets a frame of its own after it (vLLM 0.33,
``v1/serial_utils.py``).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import attrs

from tszmq.errors import DecodeError
from tszmq.wire.described import described

__all__ = ["FLOATS", "INTEGERS", "Array", "ArrayReader"]

INTEGERS = frozenset("iq")
FLOATS = frozenset("efdB")

_BFLOAT16 = "B"  # the upper half of a float32; struct has no letter for it
# dtype: the kind of its items, and their size in bytes.
_DTYPES: dict[str, tuple[str, int]] = {
    "<i4": ("i", 4),
    "int32": ("i", 4),
    "<i8": ("q", 8),
    "int64": ("q", 8),
    "<f2": ("e", 2),
    "float16": ("e", 2),
    "<f4": ("f", 4),
    "float32": ("f", 4),
    "<f8": ("d", 8),
    "float64": ("d", 8),
    "bfloat16": (_BFLOAT16, 2),
}
_ELEMENTS = 3
_MAX_DIMENSIONS = 8


@attrs.frozen
class Array:
    """An array's items in a row.

    Attributes:
        kind: One letter, in ``INTEGERS`` or ``FLOATS``.
        shape: Its dimensions; none of them is negative.
        values: As many items as the shape says, the last dimension running fastest.
    """

    kind: str
    shape: tuple[int, ...]
    values: tuple[Any, ...]


class ArrayReader:
    """Reads the arrays of one message.

    Args:
        frames: All frames of the message.
    """

    __slots__ = ("_frames", "_used")

    def __init__(self, frames: Sequence[bytes]) -> None:
        self._frames = frames
        self._used: set[int] = set()

    def read(self, value: object, what: str) -> Array:
        """One array.

        Args:
            value: As it was decoded.
            what: What it is, for the error text.

        Raises:
            DecodeError: It is no array of a known dtype whose bytes are there, all of them and
                no more.
        """
        if type(value) is not list or len(value) != _ELEMENTS:
            raise DecodeError(
                f"{what} must be an array [dtype, shape, data], got {described(value)}"
            )
        dtype, shape, data = value
        known = _DTYPES.get(dtype) if type(dtype) is str else None
        if known is None:
            raise DecodeError(
                f"{what} must be of one of the types {', '.join(_DTYPES)}, got {described(dtype)}"
            )
        kind, size = known
        count = _count(shape, what)
        raw = data if type(data) is bytes else self._frame(data, what)
        if len(raw) != count * size:
            raise DecodeError(f"{what} must be {count} items of {size} bytes, got {len(raw)} bytes")
        return Array(kind, tuple(shape), _unpack(kind, count, raw))

    def _frame(self, index: object, what: str) -> bytes:
        """A frame after the first. Each is one array's: two that share one are a trick to make
        a small message large."""
        if type(index) is not int or not 0 < index < len(self._frames) or index in self._used:
            raise DecodeError(
                f"{what} must be bytes or the number of an unused frame below "
                f"{len(self._frames)}, got {described(index)}"
            )
        self._used.add(index)
        return self._frames[index]


def _count(shape: object, what: str) -> int:
    if (
        type(shape) is not list
        or len(shape) > _MAX_DIMENSIONS
        or not all(type(size) is int and size >= 0 for size in shape)
    ):
        raise DecodeError(
            f"{what} must have a shape of at most {_MAX_DIMENSIONS} sizes, got {described(shape)}"
        )
    return math.prod(shape)


def _unpack(kind: str, count: int, raw: bytes) -> tuple[Any, ...]:
    if kind != _BFLOAT16:
        return struct.unpack(f"<{count}{kind}", raw)
    halves = struct.unpack(f"<{count}H", raw)
    return struct.unpack(f"<{count}f", struct.pack(f"<{count}I", *(half << 16 for half in halves)))
