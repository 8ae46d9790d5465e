"""Rows are removed, one by one or all at once."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from tszmq.removal import remove_rows, without_rows


@example(60, set(range(0, 60, 2)), 4)
@given(st.integers(0, 60), st.sets(st.integers(0, 59)), st.integers(1, 5))
def test_the_others_stay_in_order(rows: int, gone: set[int], size: int) -> None:
    positions = sorted(row for row in gone if row < rows)
    left = [row for row in range(rows) if row not in gone]
    column = list(range(rows))
    remove_rows(column, positions)
    assert column == left
    packed = b"".join(bytes([row]) * size for row in range(rows))
    assert without_rows(packed, size, positions) == b"".join(bytes([row]) * size for row in left)
