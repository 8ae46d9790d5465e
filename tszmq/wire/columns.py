"""Columns of one value a row, read from their bytes: no row becomes a Python object.

On the wire a row of one value is 0x91 and the value. Where all rows are of one width, the
column is a table of bytes, and strided slices of it are the columns of that table.
"""

from __future__ import annotations

import sys
from array import array
from typing import TypeVar

__all__ = ["FLOAT_ROW", "single_floats", "single_ints"]

FLOAT_ROW = 10
"""Bytes of a row that holds a float of 64 bits."""
_N = TypeVar("_N", int, float)
_WIDE = 6  # bytes of a row that holds an int of 32 bits
_MOST_NARROW = 6  # one in so many rows may be below 128, or decoding them is quicker

# What precedes the value in a row of one int, and what makes such a row six bytes long.
_INT16, _INT16_WIDE = b"\x91\xcd", b"\x91\xce\0\0"
_INT8, _INT8_WIDE = b"\x91\xcc", b"\x91\xce\0\0\0"
_TINY_WIDE = b"\x91\xce\0\0\0"  # in place of 0x91: the value is all that follows it

# Kinds of bytes: the start of a row, a value below 128, and others.
_KINDS = bytes(ord("[") if b == 0x91 else ord("n") if b < 0x80 else ord(" ") for b in range(256))
_TINY = b"[n"


def single_ints(column: bytes, rows: int) -> array[int] | None:
    """The ints of a column of one int a row.

    Each row is made six bytes long by replacing bytes: ``91 cd hh ll`` by ``91 ce 00 00 hh ll``.
    Such a sequence may also stand in the middle of a value, where replacing it is wrong. So
    what counts is the result: every six bytes have to start with ``91 ce 00``. No wrong
    replacement gives that: what it wrote starts with ``91 ce 00`` as well, and these bytes fit
    into a row of this form only at its start, or as its last three; in that case the zero that
    is always written after them would be where the next row starts.

    Args:
        column: Without its header.
        rows: How many it has.

    Returns:
        Ints in [0, 2**24), one a row. None when the column is something else, or is not worth
        reading in this way.
    """
    size = rows * _WIDE
    table = column.replace(_INT16, _INT16_WIDE)
    if len(table) != size:
        table = table.replace(_INT8, _INT8_WIDE)
        if len(table) != size:
            if not size > len(table) > size - rows * (_WIDE - 2) // _MOST_NARROW:
                return None
            table = _widen_tiny(table)
    if (
        len(table) != size
        or table[::_WIDE] != b"\x91" * rows
        or table[1::_WIDE] != b"\xce" * rows
        or table[2::_WIDE] != bytes(rows)
    ):
        return None
    packed = bytearray(rows * 4)
    for at in (1, 2, 3):
        packed[at::4] = table[at + 2 :: _WIDE]
    return _from_network(array("I"), packed)


def _widen_tiny(table: bytes) -> bytes:
    """Rows of two bytes, which stand among rows of six, made as long as these."""
    kinds = table.translate(_KINDS)
    parts = []
    start = row = 0
    at = kinds.find(_TINY)
    while at >= 0:
        if (at - row) % _WIDE == 0:  # else it is in the middle of a value
            parts.append(table[start:at])
            start, row = at + 1, at + 2
        at = kinds.find(_TINY, at + 1)
    parts.append(table[start:])
    return _TINY_WIDE.join(parts)


def single_floats(column: bytes, rows: int) -> array[float] | None:
    """The floats of a column of one float of 64 bits a row; None when it is something else.

    Args:
        column: Without its header.
        rows: How many it has.
    """
    if (
        len(column) != rows * FLOAT_ROW
        or column[::FLOAT_ROW] != b"\x91" * rows
        or column[1::FLOAT_ROW] != b"\xcb" * rows
    ):
        return None
    packed = bytearray(rows * 8)
    for at in range(8):
        packed[at::8] = column[at + 2 :: FLOAT_ROW]
    return _from_network(array("d"), packed)


def _from_network(numbers: array[_N], packed: bytearray) -> array[_N]:
    numbers.frombytes(packed)
    if sys.byteorder == "little":
        numbers.byteswap()
    return numbers
