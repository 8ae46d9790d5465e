"""Messages that repeat one another but for their tokens, counts and load.

While an engine's rows go on with one token each, its messages are, in this order::

    start     the tag, the ids, the header of the column of tokens    always the same
    tokens    one a row
    middle    finish reasons, prompt tokens, the header of counts     always the same
    counts    each one more than before
    rest      cached tokens, empty columns of logprobs                always the same
    logprobs  one a row, and the tokens again; where rows have any
    tail      engine index and load                                   mostly the same

What is always the same is compared, not decoded. So are the counts, while they are of one width:
as one integer, they grow by a one at each row's end.
"""

from __future__ import annotations

from array import array
from functools import partial
from operator import countOf

from tszmq.codec import HOLE, PLACEHOLDER, pack, unpack_pieces
from tszmq.errors import DecodeError
from tszmq.types import EngineLoad
from tszmq.wire.base import NONE_ENDS, Counts, EngineBatch, OneEach, ones
from tszmq.wire.columns import FLOAT_ROW, single_floats, single_int, single_ints
from tszmq.wire.startup import MAX_ENGINE_INDEX
from tszmq.wire.tokenspeed_known import Shape, hides_a_bool
from tszmq.wire.tokenspeed_output import engine_load

__all__ = ["Repeat"]

_TAIL = b"\x95"  # an array of five
_COUNTS_AND_TAIL = b"\x97"  # of seven: with what stands between them
_NEVER = -1  # no counts are this
_WIDTHS = {1: (b"", 0x7F), 2: (b"\xcc", 0xFF), 3: (b"\xcd", 0xFFFF), 5: (b"\xce", 0xFFFF_FFFF)}
"""Bytes of an int, to what they start with, and the largest."""
_from_bytes = int.from_bytes


class Repeat:
    """What an engine's messages have in common while its rows go on.

    Args:
        start: Of one of them, up to the first token.
        prompts: Its prompt tokens, without their header.
        shape: Of its columns.
        batch: What it was read as: every row goes on.
        step: The same batch: every row has one new token.
    """

    __slots__ = (
        "_ahead",
        "_cached",
        "_counts",
        "_header",
        "_ids",
        "_index",
        "_ints_of",
        "_load",
        "_middle",
        "_most_ahead",
        "_next",
        "_ones",
        "_rest",
        "_rows",
        "_scored",
        "_size",
        "_start",
        "_tail",
    )

    def __init__(
        self, start: bytes, prompts: bytes, shape: Shape, batch: EngineBatch, step: OneEach
    ) -> None:
        cached = batch.cached_tokens
        self._ids = batch.request_ids
        self._cached = cached
        self._rows = shape.rows
        self._ints_of = single_int if shape.rows == 1 else partial(single_ints, rows=shape.rows)
        self._header = header = shape.header
        self._scored = step.logprobs is not None
        self._start = start
        self._middle = shape.running + header + prompts + header
        if self._scored or cached != shape.zeros:
            self._rest = pack(cached) + (header if self._scored else shape.empty)
        else:
            self._rest = shape.zeros_and_empty
        self._tail = b""  # the first message that repeats this one is read with its counts
        self._index: int | None = None
        self._load: EngineLoad | None = None
        self._counts = step.counts
        self._ahead = self._most_ahead = 0
        self._size = 0
        self._next = _NEVER
        self._ones = 0

    def read(self, data: bytes) -> EngineBatch | None:
        """The batch of a message that is one of these.

        Returns:
            None when it is not.

        Raises:
            DecodeError, TypeError, OverflowError: It is not.
        """
        first, middle, rest = len(self._start), self._middle, self._rest
        end = data.find(middle, first)
        if end < 0 or not data.startswith(self._start):
            return None
        tokens = self._ints_of(data[first:end])
        if tokens is None:
            tokens = self._decode_tokens(data[first:end])
        counts = end + len(middle)
        stop = counts + self._size
        foretold = (
            _from_bytes(data[counts:stop], "big") == self._next
            and self._ahead < self._most_ahead
            and data.startswith(rest, stop)
        )
        if not foretold:
            stop = data.find(rest, counts)
            if stop < 0:
                return None
        at = stop + len(rest)
        logprobs = None
        if self._scored:
            column = data[first - len(self._header) : end]
            last = at + self._rows * FLOAT_ROW
            logprobs = single_floats(data[at:last], self._rows)
            if logprobs is None or not data.startswith(column, last):
                return None
            at = last + len(column)
        tail = data[at:]
        if foretold:
            if tail != self._tail:
                self._read_tail(tail)
            self._ahead += 1
            self._next += self._ones
        else:
            self._read_numbers(data[counts:stop], tail)
        step = OneEach(tokens, logprobs, self._counts, self._ahead)
        return EngineBatch(
            self._index, self._ids, [], NONE_ENDS, None, self._cached, None, step, self._load
        )

    def _foretell(self, counts: Counts, packed: bytes) -> None:
        """A message has these counts: what those of the next will be, where that can be said."""
        self._counts = counts
        self._ahead = self._most_ahead = 0
        self._next = _NEVER
        self._size = len(packed)
        width, odd = divmod(len(packed), self._rows)
        start, largest = _WIDTHS.get(width, (b"", 0))
        if largest and not odd and (width == 1 or packed[::width] == start * self._rows):
            self._ones = ones(self._rows, width)
            self._next = _from_bytes(packed, "big") + self._ones
            self._most_ahead = largest - max(counts.column)

    def _decode_tokens(self, column: bytes) -> array[int]:
        """Those of a column that is not of the usual form."""
        rows = unpack_pieces((self._header, column))
        tokens = array("I")
        any(map(tokens.fromlist, rows))
        if not len(tokens) == len(rows) == countOf(map(len, rows), 1):
            raise DecodeError("not every row has one token")
        if hides_a_bool(column, b"", tokens):
            raise DecodeError("a bool is not a token")
        return tokens

    def _read_numbers(self, packed: bytes, tail: bytes) -> None:
        """Decode counts that were not foretold, and the load."""
        pieces = (_COUNTS_AND_TAIL, self._header, packed, HOLE, tail)
        column, hole, *values = unpack_pieces(pieces)
        if hole != PLACEHOLDER:
            raise DecodeError("the counts do not end where they should")
        counts = array("I", column)
        self._note_tail(tail, values, packed + tail, counts)
        self._foretell(Counts.of(column, counts), packed)

    def _read_tail(self, tail: bytes) -> None:
        """Decode the load."""
        self._note_tail(tail, unpack_pieces((_TAIL, tail)), tail, array("I"))

    def _note_tail(self, tail: bytes, values: list[int], data: bytes, counts: array[int]) -> None:
        numbers = array("I", values)
        if hides_a_bool(data, b"", numbers, counts):
            raise DecodeError("a bool is not a number here")
        index, *load = values
        if index > MAX_ENGINE_INDEX:
            raise DecodeError("there is no such engine")
        self._tail = tail
        self._index = index
        self._load = engine_load(*load)
