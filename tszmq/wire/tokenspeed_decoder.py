"""TokenSpeed's decoder: the usual output message in a few passes of C code.

The usual message is a batch of today's 14 elements, with logprobs in all rows or in none. What
is read here, ``read_batch`` would read with the same result; everything else is left to it,
errors included.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import countOf
from typing import Any

from tszmq.codec import pack, unpack_pieces
from tszmq.errors import DecodeError
from tszmq.types import EngineLoad
from tszmq.wire.base import NONE_ENDS, Counts, EngineBatch, OneEach
from tszmq.wire.startup import MAX_ENGINE_INDEX
from tszmq.wire.tokenspeed_known import (
    HEADER,
    LARGE,
    KnownRows,
    Shape,
    hides_a_bool,
)
from tszmq.wire.tokenspeed_large import (
    HEAD,
    IDS,
    Single,
    find_single,
    unpack_large,
    unpack_single,
)
from tszmq.wire.tokenspeed_output import engine_load, read_batch
from tszmq.wire.tokenspeed_repeat import Repeat

__all__ = ["TokenSpeedDecoder"]

_LARGE_HEADER = b"\xdc"  # of an array of 16 items or more; two bytes for their number follow
_LARGE_HEAD = HEAD + _LARGE_HEADER
_KEY = 29  # bytes of the first id, if it is ours: they tell engines apart
_KEY_END = IDS + _KEY
_MOST_KNOWN = 64  # engines are remembered
_MOST_BYTES = 1 << 18  # of their ids: bounds what a broken one can make us keep
_COLUMNS = 7  # after the ids
_PROMPTS = 4  # the element that has the prompt tokens
_COUNTS_AND_ON = 4  # of them: those after the prompt tokens
# What the steps below raise on a message that is not the usual one.
_UNUSUAL = (DecodeError, TypeError, ValueError, OverflowError, AttributeError)


class TokenSpeedDecoder:
    """Reads output messages; for one thread.

    Remembers the rows of large batches: an engine's batch mostly starts with the rows of its
    one before that have not ended. Their ids are not decoded again then, and the strings in its
    ``request_ids`` are the same objects; when nothing changed the list is. Messages whose rows
    all go on, with one token each, are not decoded at all (``Repeat``).
    """

    __slots__ = ("_known", "_load", "_repeats", "_shape", "_tail")

    def __init__(self) -> None:
        self._shape = Shape.of(_LARGE_HEADER + b"\0\0")  # of the last large batch
        self._known: dict[bytes, KnownRows] = {}  # by the start of their ids
        self._tail: list[int] = []  # engine index and load of the last usual batch
        self._load: EngineLoad | None = None
        # By the start of their ids; None where one message is not yet repeated.
        self._repeats: dict[bytes, Repeat | None] = {}

    def decode(self, frames: Sequence[bytes]) -> EngineBatch:
        """One message. The batch is frame 0; further frames are not used by this wire.

        Raises:
            DecodeError: The bytes are not a whole and consistent batch.
        """
        if not frames:
            raise DecodeError("expected an output message, got no frames")
        data = frames[0]
        key = data[:_KEY_END]
        repeat = self._repeats.get(key)
        if repeat is not None:
            try:
                batch = repeat.read(data)
                if batch is not None:
                    return batch
            except _UNUSUAL:
                pass
        batch = self._read(data)
        if batch is None:
            return read_batch(data)
        self._note_repeat(key, data, batch)
        return batch

    def _read(self, data: bytes) -> EngineBatch | None:
        """A usual batch; None for others."""
        try:
            if data.startswith(_LARGE_HEAD):
                return self._read_large(data)
            if data.startswith(HEAD):
                return self._read_small(data)
        except _UNUSUAL:
            pass
        return None

    def _note_repeat(self, key: bytes, data: bytes, batch: EngineBatch) -> None:
        """The next message may repeat this one; when it is the second that looks like that, see
        to it that it need not be decoded."""
        repeats, step = self._repeats, batch.one_each
        if step is None or batch.finished:
            repeats.pop(key, None)
        elif key in repeats:
            repeats[key] = self._repeat(data, batch, step)
        else:
            if len(repeats) >= _MOST_KNOWN:
                del repeats[next(iter(repeats))]
            repeats[key] = None

    def _repeat(self, data: bytes, batch: EngineBatch, step: OneEach) -> Repeat | None:
        """What messages like this one have in common; None where that is too much to keep."""
        if len(step.tokens) < LARGE:
            ids = pack(batch.request_ids)
            shape = Shape.of(ids[:1])
            ids, prompts = ids[1:], pack(unpack_pieces((data,))[_PROMPTS])[1:]
        else:
            known = self._known.get(data[IDS:_KEY_END])
            if known is None or known.rids is not batch.request_ids:
                return None
            ids, prompts, shape = known.ids, known.prompts, self._shape
        if len(ids) > _MOST_BYTES:
            return None
        start = b"".join((HEAD, shape.header, ids, shape.header))
        return Repeat(start, prompts, shape, batch, step)

    def _read_small(self, data: bytes) -> EngineBatch | None:
        """A batch of today's shape and fewer than 16 rows; None, or an error, for others."""
        values: list[Any] = unpack_pieces((data,))
        # Not compared with one another: two hostile ones may be nested too deeply for that.
        empty: list[Any] = [[]] * len(values[1])
        scored = not (values[7] == empty and values[8] == empty)
        start = len(HEAD) + len("".join(values[1]))
        return self._read_rows(values, scored, data[start:], b"", None)

    def _read_large(self, data: bytes) -> EngineBatch | None:
        """The same of 16 rows or more."""
        shape = self._shape
        if not data.startswith(shape.header, len(HEAD)):
            header = data[len(HEAD) : IDS]
            if len(header) < HEADER or int.from_bytes(header[1:], "big") > len(data):
                return None  # nothing is made for rows that are not there
            self._shape = shape = Shape.of(header)
        known = self._known.get(data[IDS:_KEY_END])
        if known and not (data.startswith(known.ids, IDS) and len(known.rids) <= shape.rows):
            known = None
        cut = shape.cut(data)
        single = known and find_single(data, shape, known, cut)
        if known and single:
            values, joined = unpack_single(data, shape, known, single)
            batch = self._read_single(data, shape, values, joined, single)
        else:
            values = unpack_large(data, shape, known, cut)
            start = IDS + len(known.ids if known else "".join(values[1]))
            headers = shape.header[1:] * _COLUMNS
            batch = self._read_rows(values, not cut[2], data[start:], headers, shape.zeros)
        if batch is not None:
            self._remember(known, batch, values[_PROMPTS])
        return batch

    def _read_single(
        self,
        data: bytes,
        shape: Shape,
        values: list[Any],
        joined: list[int],
        single: Single,
    ) -> EngineBatch | None:
        """One that starts with known rows, and has one token in each, with a logprob or not."""
        tokens, logprobs, finished, _, prompts_end, (stop, tail, left_out) = single
        cached = values[6]
        unseen = [joined, values[9:]] if cached is shape.zeros else [joined, cached, values[9:]]
        counts, others = _numbers(values[5], unseen)
        headers = shape.header[1:] * (_COUNTS_AND_ON - left_out)
        if hides_a_bool(data[prompts_end:stop] + data[tail:], headers, counts, others):
            return None
        step = OneEach(tokens, logprobs, Counts.of(values[5], counts))
        return self._batch(values, step, finished)

    def _read_rows(
        self,
        values: list[Any],
        scored: bool,
        rest: bytes,
        headers: bytes,
        zeros: list[int] | None,
    ) -> EngineBatch | None:
        """Any other usual batch.

        Args:
            values: Its elements; that the ids are strings has been seen.
            scored: Whether any row has logprobs.
            rest: Its bytes from the end of the ids on.
            headers: The numbers of rows there, where they take bytes.
            zeros: Cached tokens that need no checking.
        """
        tokens, logprobs, logprob_ids = values[2], values[7], values[8]
        if type(tokens) is not list or type(values[3]) is not list:
            return None
        if not len(tokens) == len(values[1]) == len(values[3]) == len(values[_PROMPTS]):
            return None
        # Ints in [0, 2**32), or bools: fromlist takes no other items, in no other row than a list.
        new = array("I")
        any(map(new.fromlist, tokens))
        prompt, completion, cached = values[4:7]
        unseen = [prompt, values[9:]] if cached is zeros else [prompt, cached, values[9:]]
        counts, others = _numbers(completion, unseen)
        floats = None
        if scored:
            floats = _floats(logprobs, logprob_ids, tokens)
            _require_ints(chain(*tokens, *logprob_ids, *values[4:7], values[9:]))
        elif hides_a_bool(rest, headers, new, counts, others):
            return None
        reasons, finished = values[3], NONE_ENDS
        if "".join(reasons):  # which proves str
            finished = {row: reason for row, reason in enumerate(reasons) if reason}
        if len(new) == len(tokens) > 0 and all(tokens):
            step = OneEach(new, floats, Counts.of(completion, counts))
            return self._batch(values, step, finished)
        batch = self._batch(values, None, finished)
        if batch is not None:
            batch.token_ids = tokens
            batch.logprobs = logprobs if floats else None  # where rows have tokens
        return batch

    def _batch(
        self,
        values: list[Any],
        one_each: OneEach | None,
        finished: Mapping[int, str],
    ) -> EngineBatch | None:
        """The batch that the values are, the items of which have been seen."""
        _, rids, _, _, _, completion, cached, _, _, *tail = values
        if type(rids) is not list or tail[0] > MAX_ENGINE_INDEX:
            return None
        if not len(rids) == len(completion) == len(cached):
            return None
        if tail != self._tail:
            self._tail, self._load = tail, engine_load(*tail[1:])
        return EngineBatch(
            tail[0],
            rids,
            [],
            finished,
            None if one_each else completion,
            cached,
            None,
            one_each,
            self._load,
        )

    def _remember(self, known: KnownRows | None, batch: EngineBatch, prompt: list[int]) -> None:
        """The rows that the next batch is likely to start with: those of this one that go on."""
        rids = batch.request_ids
        if known is None:
            if len(rids) < LARGE:
                return
            if len(self._known) >= _MOST_KNOWN:
                del self._known[next(iter(self._known))]  # what was noted first goes first
            known = KnownRows.of(rids, prompt)
            self._known[known.ids[:_KEY]] = known
        elif rids is not known.rids:
            known.join(rids, rids[len(known.rids) :], prompt)
        elif prompt is not known.prompt:
            known.note_prompt(prompt)
        if batch.finished or len(known.ids) > _MOST_BYTES:
            self._known.pop(known.ids[:_KEY], None)
            if len(known.ids) <= _MOST_BYTES and known.drop(list(batch.finished)):
                self._known[known.ids[:_KEY]] = known


def _numbers(completion: list[int], unseen: Iterable[list[int]]) -> tuple[array[int], array[int]]:
    """The counts of a batch's rows, and its other numbers that have to be looked at.

    Raises:
        TypeError, OverflowError: One of them is no int in [0, 2**32), nor a bool.
    """
    counts, others = array("I"), array("I")
    counts.fromlist(completion)
    any(map(others.fromlist, unseen))
    return counts, others


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


def _require_ints(items: Iterable[Any]) -> None:
    """No bool is among what passed for an int.

    Raises:
        ValueError: One is.
    """
    if not set(map(type, items)) <= {int}:
        raise ValueError("a bool is not a number here")
