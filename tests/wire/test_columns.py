"""Columns read from their bytes: what decoding them gives, or nothing."""

from __future__ import annotations

import itertools
import random
import struct
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tszmq.codec import pack, unpack
from tszmq.errors import DecodeError
from tszmq.wire.columns import rare_texts, single_floats, single_ints


def column_of(values: list[Any]) -> bytes:
    """On the wire, one value a row, without the header."""
    return b"".join(b"\x91" + pack(value) for value in values)


def decoded(column: bytes, rows: int, kind: type) -> list[Any] | None:
    """Its values, if it is a column of one value of this type a row."""
    try:
        values = unpack(b"\xdd" + rows.to_bytes(4, "big") + column)
    except DecodeError:
        return None
    if not all(type(row) is list and len(row) == 1 and type(row[0]) is kind for row in values):
        return None
    return [value for [value] in values]


def check_ints(column: bytes, rows: int) -> bool:
    """It is read as it is decoded, or not at all; whether it was read."""
    read = single_ints(column, rows)
    if read is not None:
        assert read.tolist() == decoded(column, rows, int), column.hex()
    return read is not None


WIDE = st.integers(128, 2**24 - 1) | st.sampled_from(
    [0x80, 0x91, 0xCC, 0xFF, 0x100, 0x91CC, 0x91CD, 0x91CE, 0x9191, 0xFFFF, 0x10000, 0x91CE00]
)
ROWS = st.lists(WIDE | st.sampled_from([0, 1, 11, 0x7F]), min_size=1, max_size=40)


@given(ROWS)
def test_ints_are_those_that_were_written(values: list[int]) -> None:
    check_ints(column_of(values), len(values))


def test_the_usual_columns_are_read() -> None:
    """A vocabulary's ids, of which some are small; a wrong guess about one is rare."""
    chance = random.Random(1)
    for vocabulary, share in itertools.product((32000, 2**16, 151936), (0.0, 0.01, 0.1)):
        read = 0
        for rows in (16, 64, 256, 1024) * 10:
            values = [
                chance.randrange(128)
                if chance.random() < share
                else chance.randrange(128, vocabulary)
                for _ in range(rows)
            ]
            read += check_ints(column_of(values), rows)
        assert read >= 32


@pytest.mark.parametrize("value", [0, 1, 127, 128, 255, 256, 65535, 65536, 2**24, 2**32 - 1])
def test_one_row_of_any_width_is_read(value: int) -> None:
    assert check_ints(column_of([value]), 1)


@pytest.mark.parametrize("value", [2**32, -1, -200, True, 1.0, "", "a", [], [1], {}, None])
def test_one_row_of_something_else_is_not_read(value: Any) -> None:
    assert not check_ints(column_of([value]), 1)


def test_one_row_is_read_as_it_is_decoded_whatever_its_bytes() -> None:
    for start in (b"", b"\x90", b"\x91", b"\x92", b"\x91\xcc", b"\x91\xcd", b"\x91\xce\0\0"):
        for first in range(256):
            check_ints(start + bytes([first]), 1)
            for second in range(0, 256, 3):
                check_ints(start + bytes([first, second]), 1)
    check_ints(b"", 1)


def test_a_column_of_small_ids_is_left_to_the_decoder() -> None:
    assert single_ints(column_of([5] * 256), 256) is None
    assert single_ints(column_of([300, 5] * 128), 256) is None


@pytest.mark.parametrize(
    "value", [2**24, 2**32 - 1, 2**32, -1, True, 1.0, "", "a", [], [1], {}, None]
)
@pytest.mark.parametrize("row", [0, 7, 15])
def test_other_rows_are_not_read(value: Any, row: int) -> None:
    values: list[Any] = list(range(500, 516))
    values[row] = value
    assert single_ints(column_of(values), 16) is None
    bare = [b"\x91" + pack(each) for each in range(500, 516)]
    for other in (pack(7), pack([]), pack([1, 2]), pack({}), b""):
        assert single_ints(b"".join([*bare[:row], other, *bare[row + 1 :]]), 16) is None


PIECES = [
    *(b"\x91", b"\xcc", b"\xcd", b"\xce", b"\x00", b"\x01", b"\x7f", b"\x80", b"\xff"),
    *(b"\x91\xcc", b"\x91\xcd", b"\x91\xce", b"\x91\xce\0", b"\0\0\0", b"\x91\x05", b"\x92\1\1"),
]


def sequences(alphabet: bytes, lengths: range) -> Iterator[bytes]:
    """All that can be made of these bytes."""
    for length in lengths:
        for parts in itertools.product(alphabet, repeat=length):
            yield bytes(parts)


def test_no_short_sequence_is_read_wrongly() -> None:
    """All of the bytes that mean something, up to the length of two rows of 16 bits."""
    wide, narrow = b"\x91\xcc\xcd\xce\0\5", b"\x91\xcc\xcd\0"
    read = 0
    for column in itertools.chain(sequences(wide, range(8)), sequences(narrow, range(8, 9))):
        for rows in (1, 2, 3):
            read += check_ints(column, rows)
    assert read > 300


@settings(max_examples=2000)
@given(st.lists(st.sampled_from(PIECES), max_size=24).map(b"".join), st.integers(1, 8))
def test_no_sequence_is_read_wrongly(column: bytes, rows: int) -> None:
    check_ints(column, rows)


@settings(max_examples=1000)
@given(
    st.lists(WIDE, min_size=7, max_size=20).map(lambda values: (column_of(values), len(values))),
    st.lists(
        st.tuples(st.integers(0, 120), st.integers(0, 3), st.sampled_from([b"", *PIECES])),
        min_size=1,
        max_size=3,
    ),
)
def test_no_mangled_column_is_read_wrongly(
    written: tuple[bytes, int], changes: list[tuple[int, int, bytes]]
) -> None:
    column, rows = written
    for at, dropped, piece in changes:
        column = column[:at] + piece + column[at + dropped :]
    for count in (rows - 1, rows, rows + 1):
        check_ints(column, count)


@given(st.lists(st.floats(), min_size=1, max_size=20))
def test_floats_are_those_that_were_written(values: list[float]) -> None:
    read = single_floats(column_of(values), len(values))
    assert read is not None
    assert list(map(repr, read)) == list(map(repr, values))


def test_other_columns_are_not_floats() -> None:
    values: list[Any] = [-0.25, -1e-300, float("-inf")]
    column = column_of(values)
    single = b"\x91\xca" + struct.pack(">f", 1.0)
    for other in (
        column[:-1],
        column + b"\0",
        column[:20] + b"\x92" + column[21:],
        column[:21] + b"\xcf" + column[22:],
        single + column[10:],
        single * 5,
        column_of([-0.25, 1, -0.5]),
        b"",
    ):
        assert single_floats(other, 3) is None


def check_texts(column: bytes, rows: int) -> bool:
    """They are read as they are decoded, or not at all; whether they were."""
    try:
        expected = unpack(b"\xdd" + rows.to_bytes(4, "big") + column)
    except DecodeError:
        expected = None
    try:
        read = rare_texts(column, rows)
    except UnicodeDecodeError:
        read = None
    if read is not None:
        assert list(read) == sorted(read)
        assert [read.get(at, "") for at in range(rows)] == expected, column.hex()
        assert all(read.values())
    return read is not None


TEXTS = st.sampled_from(["", "", "", "", "stop", "length", "a", "x" * 31, "\u00e9", "\u00a0\u3000"])


@given(st.lists(TEXTS, max_size=40))
def test_texts_are_those_that_were_written(texts: list[str]) -> None:
    assert check_texts(b"".join(map(pack, texts)), len(texts))


def test_long_texts_are_left_to_the_decoder() -> None:
    for length in (32, 255, 256):
        assert not check_texts(pack("") * 3 + pack("x" * length) + pack(""), 5)


@given(
    st.lists(TEXTS | st.sampled_from([None, True, 7, 1.5, [], ["a"], {}, -1, 300]), max_size=12),
    st.integers(-2, 2),
    st.integers(0, 60),
    st.binary(max_size=3),
)
def test_other_columns_of_texts_are_not_misread(
    values: list[Any], more: int, at: int, inserted: bytes
) -> None:
    column = b"".join(map(pack, values))
    rows = max(0, len(values) + more)
    check_texts(column, rows)
    check_texts(column[:at] + inserted + column[at:], rows)
    check_texts(column[:at] + inserted + column[at + 1 :], rows)
    check_texts(column[:at], rows)


@pytest.mark.parametrize("first", range(256))
def test_what_starts_no_short_text_is_not_read_as_one(first: int) -> None:
    for size in {abs(first - 0xA0) + more for more in (-1, 0, 1)}:
        for before in (b"", b"\xa0"):
            check_texts(before + bytes([first]) + b"a" * size, 1 + len(before))


def test_so_many_rows_are_left_to_the_decoder() -> None:
    """What is kept for each number of them would add up."""
    assert check_ints(column_of([300] * 10_000), 10_000)
    assert not check_ints(column_of([300] * 10_001), 10_001)
