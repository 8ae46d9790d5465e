"""TokenSpeed's decoder: the usual output message in a few passes of C code.

The usual message is a batch of today's 14 elements, with logprobs in all rows or in none. What
is read here, ``read_batch`` would read with the same result; everything else is left to it,
errors included.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain, compress, count
from operator import countOf
from typing import Any

from tszmq.codec import HOLE, PLACEHOLDER, unpack_pieces
from tszmq.errors import DecodeError
from tszmq.types import EngineLoad
from tszmq.wire.base import RUNNING, EngineBatch, OneEach
from tszmq.wire.tokenspeed_known import (
    HEADER,
    LARGE,
    MAX_TAIL,
    KnownRows,
    Repeated,
    Shape,
    Streak,
    hides_a_bool,
)
from tszmq.wire.tokenspeed_output import MAX_ENGINE_INDEX, TAG, engine_load, read_batch

__all__ = ["TokenSpeedDecoder"]

_HEAD = b"\x9e\xb3" + TAG.encode()  # an array of 14, the tag
_LARGE_HEADER = b"\xdc"  # of an array of 16 items or more; two bytes for their number follow
_ELEMENTS = 14
_NINE = b"\x99"  # an array of nine
_IDS = len(_HEAD) + HEADER  # where the first id is, in a large batch
_KEY = 29  # bytes of the first id, if it is ours: they tell engines apart
_KEY_END = _IDS + _KEY
_TWO_HOLES = HOLE * 2
_THREE_HOLES = HOLE * 3
_MOST_KNOWN = 64  # engines are remembered
_TOKEN_PROBE = 60  # bytes of the tokens that they are looked for by
_COLUMNS = 7  # after the ids
_STREAK = 3  # batches with the same rows after which the next is expected to repeat the last
_LONG_TIME = 1000  # batches until that is tried again when it did not hold
# What the steps below raise on a message that is not the usual one.
_UNUSUAL = (DecodeError, TypeError, ValueError, OverflowError, AttributeError)


class TokenSpeedDecoder:
    """Reads output messages; for one thread.

    Remembers the rows of large batches: an engine's batch mostly starts with the rows of its
    one before that have not ended. The strings in its ``request_ids`` are the same objects then,
    and when nothing changed the list is. When nothing has changed for a few batches, all columns
    that need not be decoded again are taken from the last one.
    """

    __slots__ = ("_known", "_load", "_repeated", "_shape", "_streaks", "_tail")

    def __init__(self) -> None:
        self._shape = Shape.of(_LARGE_HEADER + b"\0\0")  # of the last large batch
        self._known: dict[bytes, KnownRows] = {}  # by the start of their ids
        self._streaks: dict[bytes, Streak] = {}  # by their number and the start of their ids
        self._repeated: dict[bytes, Repeated] = {}  # by the same
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
            batch = self._read_usual_batch(data) if data.startswith(_HEAD) else None
        except _UNUSUAL:
            batch = None
        return read_batch(data) if batch is None else batch

    def _read_usual_batch(self, data: bytes) -> EngineBatch | None:
        """A batch of today's shape; None, or an error, for anything else."""
        if data.startswith(_LARGE_HEADER, len(_HEAD)):
            return self._read_large(data)
        values, scored = _unpack_small(data)
        start = len(_HEAD) + len("".join(values[1]))
        return self._checked(values, scored, data[start:], b"", None)

    def _read_large(self, data: bytes) -> EngineBatch | None:
        """One of 16 rows or more."""
        key = data[len(_HEAD) : _KEY_END]
        repeated = self._repeated.get(key)
        if repeated is not None:
            batch = self._read_repeated(data, repeated)
            if batch is not None:
                return batch
            del self._repeated[key]
        shape = self._shape
        if not data.startswith(shape.header, len(_HEAD)):
            if len(key) < HEADER or int.from_bytes(key[1:HEADER], "big") > len(data):
                return None  # nothing is made for rows that are not there
            self._shape = shape = Shape.of(key[:HEADER])
        values, scored, known = _unpack_large(data, shape, self._known.get(key[HEADER:]))
        start = _IDS + len("".join(values[1]) if known is None else known.ids)
        batch = self._checked(values, scored, data[start:], key[1:HEADER], shape.zeros)
        if batch is not None:
            self._remember(known, batch)
            if not scored and not batch.num_finished:
                self._learn(key, batch)
        return batch

    def _checked(
        self,
        values: list[Any],
        scored: bool,
        rest: bytes,
        header: bytes,
        zeros: list[int] | None,
    ) -> EngineBatch | None:
        """The batch that the values are; None, or an error, when they are none.

        Args:
            values: Its elements; that the ids are strings has been seen.
            scored: Whether any row has logprobs.
            rest: Its bytes, at the latest from the end of the ids on.
            header: Each column's number of rows there, where that takes bytes.
            zeros: Cached tokens that need no checking.
        """
        _, rids, tokens, reasons, prompt, completion, cached, logprobs, logprob_ids, *tail = values
        if not type(rids) is type(tokens) is type(reasons) is list:
            return None
        rows = len(rids)
        num_finished = rows - reasons.count(RUNNING)
        if num_finished:
            "".join(reasons)  # proves str
        if not len(tokens) == len(reasons) == len(prompt) == len(completion) == len(cached) == rows:
            return None
        # Ints in [0, 2**32), or bools: fromlist takes no other items, in no other row than a list.
        new, counts, others = array("I"), array("I"), array("I")
        any(map(new.fromlist, tokens))
        counts.fromlist(completion)
        others.fromlist(tail)
        others.fromlist(prompt)
        if cached is not zeros:
            others.fromlist(cached)
        floats = None
        if scored:
            floats = _floats(logprobs, logprob_ids, tokens)
            ids = () if logprob_ids is tokens else chain.from_iterable(logprob_ids)
            _require_ints(chain(ids, *tokens, prompt, completion, cached, tail))
        elif hides_a_bool(rest, header * _COLUMNS, new, counts, others):
            return None
        if tail[0] > MAX_ENGINE_INDEX:
            return None
        step = None
        if len(new) == rows and rows and all(tokens):
            step = OneEach(new, counts.tobytes(), floats)
        return EngineBatch(
            tail[0],
            rids,
            tokens,
            reasons,
            num_finished,
            len(new),
            completion,
            prompt,
            cached,
            logprobs if floats else None,  # where rows have tokens
            step,
            self._load_of(tail),
        )

    def _read_repeated(self, data: bytes, repeated: Repeated) -> EngineBatch | None:
        """A batch that differs from the one before in its tokens, counts and tail alone."""
        parts = repeated.split(data)
        if parts is None:
            return None
        column, counted, last = parts
        values = unpack_pieces((_NINE, column, HOLE, counted, HOLE, last))
        tokens, hole, completion, other, *tail = values
        # Each by itself: two hostile values may be nested too deeply to be compared.
        if hole != PLACEHOLDER or other != PLACEHOLDER:
            return None
        rows = len(repeated.rids)
        new, counts, load = array("I"), array("I"), array("I")
        any(map(new.fromlist, tokens))
        counts.fromlist(completion)
        load.fromlist(tail)
        if not len(tokens) == len(counts) == rows or tail[0] > MAX_ENGINE_INDEX:
            return None
        if hides_a_bool(column + counted + last, repeated.headers, new, counts, load):
            return None
        single = len(new) == rows and all(tokens)
        return EngineBatch(
            tail[0],
            repeated.rids,
            tokens,
            repeated.reasons,
            0,
            len(new),
            completion,
            repeated.prompt,
            repeated.cached,
            None,
            OneEach(new, counts.tobytes(), None) if single else None,
            self._load_of(tail),
        )

    def _load_of(self, tail: list[int]) -> EngineLoad | None:
        if tail != self._tail:
            self._tail, self._load = tail, engine_load(*tail[1:])
        return self._load

    def _remember(self, known: KnownRows | None, batch: EngineBatch) -> None:
        """The rows that the next batch is likely to start with: those of this one that go on."""
        rids = batch.request_ids
        if known is None:
            if len(rids) < LARGE:
                return  # a header that is longer than it has to be
            _make_room(self._known)
            known = KnownRows.of(rids)
            self._known[known.ids[:_KEY]] = known
        elif rids is not known.rids:
            known.join(rids, rids[len(known.rids) :])
        if batch.num_finished:
            self._known.pop(known.ids[:_KEY], None)
            if known.drop(list(compress(count(), batch.finish_reasons))):
                self._known[known.ids[:_KEY]] = known

    def _learn(self, key: bytes, batch: EngineBatch) -> None:
        """Whether to expect the next batch to repeat this one."""
        streak = self._streaks.get(key)
        if streak is None or streak.rids != batch.request_ids:
            _make_room(self._streaks)
            self._streaks[key] = Streak(batch.request_ids)
            return
        streak.count += 1
        if streak.count == _STREAK:
            _make_room(self._repeated)
            self._repeated[key] = Repeated.of(_HEAD, batch)
        elif streak.count > _STREAK:
            streak.count = -_LONG_TIME


def _make_room(remembered: dict[bytes, Any]) -> None:
    """For one more; what was noted first goes first."""
    if len(remembered) >= _MOST_KNOWN:
        del remembered[next(iter(remembered))]


def _unpack_small(data: bytes) -> tuple[list[Any], bool]:
    """The values of a batch of fewer than 16 rows, and whether any row has logprobs."""
    values: list[Any] = unpack_pieces((data,))
    # Not compared with one another: two hostile ones may be nested too deeply for that.
    empty: list[Any] = [[]] * len(values[1])
    return values, not (values[7] == empty and values[8] == empty)


def _unpack_large(
    data: bytes, shape: Shape, known: KnownRows | None
) -> tuple[list[Any], bool, KnownRows | None]:
    """The values of a batch of 16 rows or more, whether any row has logprobs, and the rows
    whose ids its own start with.

    Empty logprob columns are cut out before decoding: they hold two lists a row, more than
    all the rest, and enough of them start a garbage collection in every message. The column
    before them, cached tokens, is where no row has any. Known ids are cut out as well, and so
    are the ids of logprobs where they are the tokens again.

    Args:
        data: The message.
        shape: Of its columns.
        known: Rows with the same first id, if any.
    """
    end, last, zeros = len(data), b"", False
    cut = shape.find(data, shape.zeros_and_empty)
    if cut >= 0:
        end, last, zeros = cut, _THREE_HOLES + data[cut + len(shape.zeros_and_empty) :], True
    else:
        cut = shape.find(data, shape.empty)
        if cut >= 0:
            end, last = cut, _TWO_HOLES + data[cut + len(shape.empty) :]
    if known and data.startswith(known.ids, _IDS) and len(known.rids) <= shape.rows:
        values = _unpack_known(data, known, shape.rows - len(known.rids), end, last)
    else:
        known = None
        values = unpack_pieces((data[:end], last))
    if last and (values[7] != PLACEHOLDER or values[8] != PLACEHOLDER):
        raise DecodeError("the bytes that were cut out were something else")
    if zeros:
        if values[6] != PLACEHOLDER:
            raise DecodeError("the bytes that were cut out were something else")
        values[6] = shape.zeros
    return values, not last, known


@lru_cache(64)
def _head(elements: int) -> bytes:
    """The start of a message of so many elements, up to its ids."""
    return b"\xdc" + elements.to_bytes(2, "big") + _HEAD[1:]


def _unpack_known(data: bytes, known: KnownRows, new: int, end: int, last: bytes) -> list[Any]:
    """The values of a batch that starts with known rows.

    Args:
        data: The message.
        known: The rows.
        new: How many rows it has after them.
        end: Where ``last`` takes over.
        last: What else is to be decoded; empty when the batch may have logprobs.
    """
    start = _IDS + len(known.ids)
    if new:
        values: list[Any] = unpack_pieces((_head(_ELEMENTS + new), HOLE, data[start:end], last))
        joined = values[2 : 2 + new]
        "".join(joined)  # proves str
        values[1 : 2 + new] = [known.rids + joined]
        return values
    twin = None if last else _twin(data, start)
    if twin is None:
        values = unpack_pieces((_HEAD, HOLE, data[start:end], last))
    else:
        at, size = twin
        stop = start + size
        # One hole more, after the tokens: it shows that they are one column.
        pieces = (data[start:stop], HOLE, data[stop:at], HOLE, data[at + size :])
        values = unpack_pieces((_head(_ELEMENTS + 1), HOLE, *pieces))
        if values.pop(3) != PLACEHOLDER or values[8] != PLACEHOLDER:
            raise DecodeError("the bytes that were cut out were something else")
        values[8] = values[2]
    values[1] = known.rids
    return values


def _twin(data: bytes, start: int) -> tuple[int, int] | None:
    """Where the column at ``start`` stands again, before the tail, and its size.

    The ids of logprobs are those of the tokens. That the bytes are the same is compared here;
    that they are one column each has to be seen from where the decoder finds what is around.
    """
    at = data.rfind(data[start : start + _TOKEN_PROBE])
    short, long = max(0, len(data) - at - MAX_TAIL), len(data) - at
    while short < long:  # the longest common start: an array follows the one, an int the other
        middle = (short + long + 1) // 2
        if data.startswith(data[at : at + middle], start):
            short = middle
        else:
            long = middle - 1
    if at < start + short or not data.startswith(data[at : at + short], start):
        return None
    return at, short


def _floats(logprobs: Any, logprob_ids: Any, tokens: list[list[int]]) -> array[float]:
    """A logprob for every token, in a row.

    Raises:
        ValueError: Not every row has as many as tokens, or the ids beside them are others.
    """
    floats = array("d")
    if not type(logprobs) is type(logprob_ids) is list or (
        logprob_ids is not tokens and logprob_ids != tokens
    ):
        raise ValueError("logprobs are not for these tokens")
    any(map(floats.fromlist, logprobs))
    if list(map(len, logprobs)) != list(map(len, tokens)) or countOf(
        map(type, chain.from_iterable(logprobs)), float
    ) != len(floats):
        raise ValueError("logprobs are not one float a token")
    return floats


def _require_ints(items: Iterable[Any]) -> None:
    """No bool is among what passed for an int.

    Raises:
        ValueError: One is.
    """
    if not set(map(type, items)) <= {int}:
        raise ValueError("a bool is not a number here")
