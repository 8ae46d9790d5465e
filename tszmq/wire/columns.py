"""Columns of one value a row, read from their bytes: no row becomes a Python object.

On the wire a row of one value is 0x91 and the value. Where all rows are of one width, the
column is a table of bytes, and strided slices of it are the columns of that table.
"""

from __future__ import annotations

import re
import sys
from array import array
from functools import lru_cache, partial
from typing import NamedTuple, TypeVar

__all__ = ["FLOAT_ROW", "rare_texts", "single_floats", "single_int", "single_ints"]

FLOAT_ROW = 10
"""Bytes of a row that holds a float of 64 bits."""
_N = TypeVar("_N", int, float)
_ORDER = sys.byteorder
_IS_LITTLE = _ORDER == "little"
_from_bytes = int.from_bytes
_ONE_ROW = {
    2: (0x91_00, 0x7F),
    3: (0x91_CC_00, 0xFF),
    4: (0x91_CD_0000, 0xFFFF),
    6: (0x91_CE_00000000, 0xFFFF_FFFF),
}
"""Bytes of a row of one int, to the row of zero, as an integer, and the largest int there."""
_NO_ROW = (0, -1)
_EMPTY_TEXT = 0xA0  # is a string that is empty; what follows it starts longer ones
_LONGEST_TEXT = 31
_NOT_EMPTY = re.compile(b"[^\xa0]")
_MOST_ROWS = 10_000  # bounds what is kept for each number of rows
_FEW = 16  # rows are quicker decoded than made a table
_MOST_NARROW = 6  # one in so many rows may be below 128, or decoding them is quicker


class _Form(NamedTuple):
    """What a column of ints is made: a table, all rows of which start in the same way.

    Attributes:
        width: Bytes of a row.
        start: The first of them.
        replacements: What makes longer rows as wide, those that are usual first.
        tiny: In place of 0x91, where the value is all that follows it.
    """

    width: int
    start: bytes
    replacements: tuple[tuple[bytes, bytes], ...]
    tiny: bytes


_INT32 = b"\x91\xce"  # starts a row that a narrow table has not
_NARROW = _Form(4, b"\x91\xcd", ((b"\x91\xcc", b"\x91\xcd\0"),), b"\x91\xcd\0")
_WIDE = _Form(
    6,
    b"\x91\xce\0",
    ((b"\x91\xcd", b"\x91\xce\0\0"), (b"\x91\xcc", b"\x91\xce\0\0\0")),
    b"\x91\xce\0\0\0",
)

# Kinds of bytes: the start of a row, a value below 128, and others.
_KINDS = bytes(ord("[") if b == 0x91 else ord("n") if b < 0x80 else ord(" ") for b in range(256))
_TINY = b"[n"


def single_ints(column: bytes, rows: int) -> array[int] | None:
    """The ints of a column of one int a row.

    Each row is made as wide as all others by replacing bytes: ``91 cc xx`` by ``91 cd 00 xx``,
    or, where some may need 32 bits, ``91 cd hh ll`` by ``91 ce 00 00 hh ll`` and so on. Such a
    sequence may also stand in the middle of a value, where replacing it is wrong. So what counts
    is the result: every row has to start with ``91 cd``, or ``91 ce 00``. No wrong replacement
    gives that: the first one stands in the middle of a row. What it wrote starts in the same way
    and goes on with a zero, and fits there only at the row's very end; then that zero would be
    where the next row starts.

    Args:
        column: Without its header.
        rows: How many it has.

    Returns:
        Ints in [0, 2**32), one a row. None when the column is something else, or is not worth
        reading in this way.
    """
    if rows == 1:
        return single_int(column)
    if rows > _MOST_ROWS or len(column) > rows * _WIDE.width:
        return None
    size = 4 * rows
    table = _replaced(column, size, _NARROW)
    if len(table) != size:
        if rows < _FEW:
            return None
        if _INT32 in column:
            return _wide_ints(column, rows)
        table = _widen_tiny(table, rows, _NARROW)
    if len(table) != size:
        return None
    starts, mask = _narrow_starts(rows)
    number = _from_bytes(table, "big") ^ starts
    if number & mask:
        return None
    ints = array("I", number.to_bytes(size, _ORDER))
    if _IS_LITTLE:
        ints.reverse()
    return ints


def single_int(column: bytes) -> array[int] | None:
    """The same where there is one row: all of it, read as one integer, starts with what its
    width asks for."""
    start, largest = _ONE_ROW.get(len(column), _NO_ROW)
    value = _from_bytes(column, "big") - start
    return array("I", (value,)) if 0 <= value <= largest else None


def _wide_ints(column: bytes, rows: int) -> array[int] | None:
    """The same, where some of them do not fit 16 bits."""
    size = rows * _WIDE.width
    table = _widen_tiny(_replaced(column, size, _WIDE), rows, _WIDE)
    if len(table) != size:
        return None
    starts, mask = _wide_starts(rows)
    if _from_bytes(table, "big") & mask != starts:
        return None
    packed = bytearray(4 * rows)
    for at in range(len(_WIDE.start), _WIDE.width):
        packed[at - 2 :: 4] = table[at :: _WIDE.width]
    return _from_network(array("I"), packed)


def _starts(form: _Form, rows: int) -> tuple[int, int]:
    """How all rows of a table start, as the integer that it is then; and which bits that is."""
    width, start = form.width, form.start
    starts, mask = (row.ljust(width, b"\0") * rows for row in (start, b"\xff" * len(start)))
    return _from_bytes(starts, "big"), _from_bytes(mask, "big")


_narrow_starts = lru_cache(64)(partial(_starts, _NARROW))
_wide_starts = lru_cache(64)(partial(_starts, _WIDE))


def _replaced(table: bytes, size: int, form: _Form) -> bytes:
    """Longer rows made as wide as those of a table of this size."""
    for old, new in form.replacements:
        if len(table) != size:
            table = table.replace(old, new)
    return table


def _widen_tiny(table: bytes, rows: int, form: _Form) -> bytes:
    """Rows of two bytes, which stand among others, made as wide as these, if there are some but
    not too many."""
    size = rows * form.width
    if not size > len(table) > size - rows * (form.width - 2) // _MOST_NARROW:
        return table
    kinds = table.translate(_KINDS)
    parts = []
    start = row = 0
    at = kinds.find(_TINY)
    while at >= 0:
        if (at - row) % form.width == 0:  # else it is in the middle of a value
            parts.append(table[start:at])
            start, row = at + 1, at + 2
        at = kinds.find(_TINY, at + 1)
    parts.append(table[start:])
    return form.tiny.join(parts)


def rare_texts(column: bytes, rows: int) -> dict[int, str] | None:
    """The strings of a column that are not empty, by row; most are.

    Args:
        column: Without its header.
        rows: How many it has.

    Returns:
        None when the column is something else, or holds a string of more than 31 bytes.
    """
    texts: dict[int, str] = {}
    at = row = 0
    found = _NOT_EMPTY.search(column)
    while found:
        start = found.start()
        row += start - at
        end = start + 1 + column[start] - _EMPTY_TEXT
        if not start < end - 1 <= start + _LONGEST_TEXT or row >= rows:
            return None
        texts[row] = column[start + 1 : end].decode()
        at, row = end, row + 1
        found = _NOT_EMPTY.search(column, at)
    return texts if row + len(column) - at == rows else None


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


def _from_network(numbers: array[_N], packed: bytes | bytearray) -> array[_N]:
    numbers.frombytes(packed)
    if _IS_LITTLE:
        numbers.byteswap()
    return numbers
