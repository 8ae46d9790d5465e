"""Columns without some of their rows, however many: in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any

__all__ = ["remove_rows", "without_rows"]

_FEW = 16  # are quicker removed one by one


def remove_rows(column: list[Any], rows: Sequence[int]) -> None:
    """Remove items.

    Args:
        column: What to remove them from.
        rows: Their positions, in order.
    """
    if len(rows) <= _FEW:
        for row in reversed(rows):
            del column[row]
        return
    keep = bytearray(b"\1") * len(column)
    for row in rows:
        keep[row] = 0
    column[:] = compress(column, keep)


def without_rows(column: bytes, size: int, rows: Sequence[int]) -> bytes:
    """A column of rows of one size, without some of them.

    Args:
        column: All of them.
        size: Of each, in bytes.
        rows: Which to leave out, in order.
    """
    parts = []
    start = 0
    for row in rows:
        parts.append(column[start : row * size])
        start = (row + 1) * size
    parts.append(column[start:])
    return b"".join(parts)
