"""TokenSpeed's decoder: the usual output message in a few passes of C code.

The usual message is a batch of today's 14 elements, with logprobs in all rows or in none. What
is read here, ``read_batch`` would read with the same result; everything else is left to it,
errors included.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain
from operator import countOf
from typing import Any

from tszmq.codec import HOLE, PLACEHOLDER, pack, unpack_pieces
from tszmq.errors import DecodeError
from tszmq.types import EngineLoad
from tszmq.wire.base import RUNNING, EngineBatch, OneEach
from tszmq.wire.tokenspeed_output import MAX_ENGINE_INDEX, TAG, engine_load, read_batch

__all__ = ["TokenSpeedDecoder"]

_HEAD = b"\x9e\xb3" + TAG.encode()  # an array of 14, the tag
_LARGE_HEADER = b"\xdc"  # of an array of 16 items or more; two bytes for their number follow
_MAX_TAIL = 5 * 9  # five integers at their widest
_FALSE = b"\xc2"
_TRUE = b"\xc3"
# What the steps below raise on a message that is not the usual one.
_UNUSUAL = (DecodeError, TypeError, ValueError, OverflowError, AttributeError)


class TokenSpeedDecoder:
    """Reads output messages; for one thread.

    Remembers the ids of the last large batch: an engine's batch mostly has the same rows as the
    one before, and then its ``request_ids`` is the same list object.
    """

    __slots__ = ("_empty", "_head", "_header", "_load", "_rids", "_tail", "_text")

    def __init__(self) -> None:
        self._header = b""  # of the arrays of the last large batch
        self._empty = b""  # both of its logprob columns, when nobody asked for logprobs
        self._rids: list[str] = []  # its ids
        self._text = 0  # characters in them
        self._head = b""  # its tag and ids, when the batch before had the same
        self._tail: list[int] = []  # engine index and load of the last usual batch
        self._load: EngineLoad | None = None

    def decode(self, frames: Sequence[bytes]) -> EngineBatch:
        """One message. The batch is frame 0; further frames are not used by this wire.

        Raises:
            DecodeError: The bytes are not a whole and consistent batch.
        """
        if not frames:
            raise DecodeError("expected an output message, got no frames")
        data = frames[0]
        try:
            batch = self._read_usual_batch(data)
        except _UNUSUAL:
            batch = None
        return read_batch(data) if batch is None else batch

    def _read_usual_batch(self, data: bytes) -> EngineBatch | None:
        """A batch of today's shape; None, or an error, for anything else."""
        if not data.startswith(_HEAD):
            return None
        large = data.startswith(_LARGE_HEADER, len(_HEAD))
        values, scored = self._unpack_large(data) if large else _unpack_small(data)
        _, rids, tokens, reasons, prompt, completion, cached, logprobs, logprob_ids, *tail = values
        if not type(rids) is type(tokens) is type(reasons) is list:
            return None
        rows = len(rids)
        text = self._text if rids is self._rids else len("".join(rids))  # join proves str
        num_finished = rows - reasons.count(RUNNING)
        if num_finished:
            "".join(reasons)
        if not (
            len(tokens) == len(reasons) == len(prompt) == len(completion) == len(cached) == rows
            and tail[0] <= MAX_ENGINE_INDEX
        ):
            return None
        numbers = _integers(values)
        floats = _floats(logprobs, logprob_ids, tokens) if scored else None
        start = len(_HEAD) + rows + text
        if not _without_bools(data, start, numbers, floats, rows if large else 0):
            return None
        if large:
            rids = self._remembered(rids, text)
        if tail != self._tail:
            self._tail, self._load = tail, engine_load(*tail[1:])
        return EngineBatch(
            tail[0],
            rids,
            tokens,
            reasons,
            num_finished,
            completion,
            prompt,
            cached,
            logprobs if scored else None,
            None if num_finished else _one_each(numbers, tokens, floats),
            self._load,
        )

    def _unpack_large(self, data: bytes) -> tuple[list[Any], bool]:
        """The values of a batch of 16 rows or more, and whether any row has logprobs.

        Empty logprob columns are cut out before decoding: they hold two lists a row, more than
        all the rest, and enough of them start a garbage collection in every message. The ids
        are cut out as well when they are those of the last message.
        """
        header = data[len(_HEAD) : len(_HEAD) + 3]
        if header != self._header:
            self._header = header
            self._empty = (header + b"\x90" * int.from_bytes(header[1:], "big")) * 2
        empty = len(self._empty)
        cut = data.find(self._empty, max(0, len(data) - empty - _MAX_TAIL))
        end = cut if cut >= 0 else len(data)
        head = len(self._head)
        known_ids = 0 < head <= end and data.startswith(self._head)
        pieces = (_HEAD, HOLE, data[head:end]) if known_ids else (data[:end],)
        if cut >= 0:
            pieces = (*pieces, HOLE, HOLE, data[cut + empty :])
        values: list[Any] = unpack_pieces(pieces)
        if known_ids:
            values[1] = self._rids
        if cut >= 0 and (values[7] != PLACEHOLDER or values[8] != PLACEHOLDER):
            raise DecodeError("the bytes that were cut out were something else")
        return values, cut < 0

    def _remembered(self, rids: list[str], text: int) -> list[str]:
        """The last batch's list when the ids are the same."""
        if rids is self._rids:
            return rids
        if rids == self._rids:
            self._head = _HEAD + pack(rids)
            return self._rids
        self._rids, self._text, self._head = rids, text, b""
        return rids


def _unpack_small(data: bytes) -> tuple[list[Any], bool]:
    """The values of a batch of fewer than 16 rows, and whether any row has logprobs."""
    values: list[Any] = unpack_pieces((data,))
    # Not compared with one another: two hostile ones may be nested too deeply for that.
    empty: list[Any] = [[]] * len(values[1])
    return values, not (values[7] == empty and values[8] == empty)


def _integers(values: list[Any]) -> array[int]:
    """Tokens, counts and tail in a row: ints in [0, 2**32), or bools.

    ``array.fromlist`` takes no other items, in no other row than a list.
    """
    numbers = array("I")
    add = numbers.fromlist
    any(map(add, values[2]))
    add(values[4])
    add(values[5])
    add(values[6])
    add(values[9:])
    return numbers


def _floats(logprobs: Any, logprob_ids: Any, tokens: list[list[int]]) -> array[float]:
    """A logprob for every token, in a row.

    Raises:
        ValueError: Not every row has as many as tokens, or the ids beside them are others.
    """
    floats = array("d")
    if not type(logprobs) is type(logprob_ids) is list or logprob_ids != tokens:
        raise ValueError("logprobs are not for these tokens")
    any(map(floats.fromlist, logprobs))
    if list(map(len, logprobs)) != list(map(len, tokens)) or countOf(
        map(type, chain.from_iterable(logprobs)), float
    ) != len(floats):
        raise ValueError("logprobs are not one float a token")
    return floats


def _without_bools(
    data: bytes, start: int, numbers: array[int], floats: array[float] | None, header_count: int
) -> bool:
    """Whether no bool is among what passed for an int.

    On the wire a bool is a byte 0xc2 or 0xc3; an int has as many of these bytes there, at
    whatever width, as in its four bytes in the array, and a float in its eight. So when the
    message from ``start`` on has no more of them than the arrays, none of them is a bool.

    Args:
        data: The message.
        start: An offset no later than the end of its ids.
        numbers: As from ``_integers``: the tokens, three counts a row and five of the tail.
        floats: The logprobs, whose column of ids repeats the tokens; or None.
        header_count: Rows, where the columns' headers have two bytes for it.
    """
    suspects = data.count(_FALSE, start) + data.count(_TRUE, start)
    if not suspects:
        return True
    found = _suspects_in(numbers.tobytes()) + 7 * _suspects_in(header_count.to_bytes(2, "big"))
    if floats is not None:
        found += _suspects_in(numbers[: len(floats)].tobytes()) + _suspects_in(floats.tobytes())
    return suspects == found


def _suspects_in(data: bytes) -> int:
    return data.count(_FALSE) + data.count(_TRUE)


def _one_each(
    numbers: array[int], tokens: list[list[int]], floats: array[float] | None
) -> OneEach | None:
    """``EngineBatch.one_each``, from what ``_integers`` gave."""
    rows = len(tokens)
    if not rows or len(numbers) != 4 * rows + 5 or not all(tokens):
        return None
    return OneEach(numbers[:rows], numbers[2 * rows : 3 * rows].tobytes(), floats)
