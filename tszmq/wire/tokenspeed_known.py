"""Rows that an engine's batches have had: what need not be decoded when they come again."""

from __future__ import annotations

from array import array

import attrs

from tszmq.codec import pack
from tszmq.wire.base import EngineBatch

__all__ = [
    "HEADER",
    "LARGE",
    "MAX_TAIL",
    "KnownRows",
    "Repeated",
    "Shape",
    "Streak",
    "hides_a_bool",
]

LARGE = 16
"""Rows from which on a column's header has more than one byte."""
HEADER = 3
"""How many it has then."""
MAX_TAIL = 5 * 9
"""Bytes after the columns: five integers at their widest."""
_BOOLS = b"\xc2\xc3"
_PROBE = 60  # bytes of what is repeated that it is looked for by


@attrs.define(eq=False, slots=True)
class Shape:
    """Columns of a large batch that hold nothing, on the wire.

    Attributes:
        header: Of each column.
        rows: How many it has.
        empty: Both logprob columns, when nobody asked for logprobs.
        zeros_and_empty: The cached tokens before them, when nothing was cached; and these.
        zeros: Those cached tokens, for everybody to read.
        tail: Bytes after them, in the last message.
    """

    header: bytes
    rows: int
    empty: bytes
    zeros_and_empty: bytes
    zeros: list[int]
    tail: int = 0

    @classmethod
    def of(cls, header: bytes) -> Shape:
        """Of the columns with this header, three bytes long."""
        rows = int.from_bytes(header[1:], "big")
        empty = (header + b"\x90" * rows) * 2
        return cls(header, rows, empty, header + bytes(rows) + empty, [0] * rows)

    def find(self, data: bytes, ending: bytes) -> int:
        """Where the columns end with this; -1 when they do not."""
        at = find_ending(data, ending, self.tail)
        if at >= 0:
            self.tail = len(data) - at - len(ending)
        return at


def find_ending(data: bytes, ending: bytes, tail: int) -> int:
    """Where this stands, with at most ``MAX_TAIL`` bytes behind; -1 when it does not.

    Args:
        data: A message.
        ending: What its columns may end with.
        tail: How many bytes are likely to follow.
    """
    at = len(data) - tail - len(ending)
    if at > 0 and data.startswith(ending, at):
        return at
    return data.find(ending, max(0, len(data) - len(ending) - MAX_TAIL))


@attrs.define(eq=False, slots=True)
class Streak:
    """How many batches in a row had just these rows; negative when they were no repetitions."""

    rids: list[str]
    count: int = 0


@attrs.define(eq=False, slots=True)
class Repeated:
    """What the next batch will repeat of this one, checked: as values and as on the wire.

    Attributes:
        start: All up to the end of the ids.
        middle: Reasons and prompt tokens, which are neighbours.
        probe: The first bytes of that.
        rest: Cached tokens and the empty logprob columns.
        headers: Those of the other columns, their first bytes excepted.
        tail: Bytes after ``rest``, in the last message.
    """

    rids: list[str]
    reasons: list[str]
    prompt: list[int]
    cached: list[int]
    start: bytes
    middle: bytes
    probe: bytes
    rest: bytes
    headers: bytes
    tail: int = 0

    @classmethod
    def of(cls, head: bytes, batch: EngineBatch) -> Repeated:
        """Of a large batch without logprobs.

        Args:
            head: What precedes the ids.
            batch: What they and the rest are.
        """
        rids, reasons = batch.request_ids, batch.finish_reasons
        prompt, cached = batch.prompt_tokens or [], batch.cached_tokens or []
        middle = pack(reasons) + pack(prompt)
        empty = pack([[]] * len(rids))
        rest = pack(cached) + empty * 2
        start = head + pack(rids)
        headers = empty[1:HEADER] * 2
        return cls(rids, reasons, prompt, cached, start, middle, middle[:_PROBE], rest, headers)

    def split(self, data: bytes) -> tuple[bytes, bytes, bytes] | None:
        """What a message has between and after what is repeated; None when it repeats too little.

        Returns:
            Its tokens, counts and tail, each of which is yet to be seen to be just that.
        """
        first = data.find(self.probe, len(self.start))
        after = first + len(self.middle)
        end = find_ending(data, self.rest, self.tail)
        last = end + len(self.rest)
        if not (
            0 < first <= after <= end
            and data.startswith(self.start)
            and data.startswith(self.middle, first)
        ):
            return None
        self.tail = len(data) - last
        return data[len(self.start) : first], data[after:end], data[last:]


def hides_a_bool(data: bytes, headers: bytes, *numbers: array[int]) -> bool:
    """Whether one of the numbers in a message, which arrays have taken, is no int.

    On the wire a bool is a byte 0xc2 or 0xc3; an int has as many of these bytes there, at
    whatever width, as in its four bytes in an array. (A float has not: it may have four or
    eight.) So when a message has no more of them than its numbers and headers, none of them is a
    bool.

    Args:
        data: The message, or what of it has numbers.
        headers: What else in it may have such bytes.
        numbers: The numbers in it.
    """
    suspects = len(data) - len(data.translate(None, _BOOLS))
    if not suspects:
        return False
    known = headers + b"".join(numbers)
    return suspects != len(known) - len(known.translate(None, _BOOLS))


@attrs.define(eq=False, slots=True)
class KnownRows:
    """Rows that have been seen.

    Attributes:
        rids: Their ids, as values.
        ids: As they are on the wire.
        size: Bytes of each there; 0 when they differ.
    """

    rids: list[str]
    ids: bytes
    size: int

    @classmethod
    def of(cls, rids: list[str]) -> KnownRows:
        """Of a large batch."""
        ids = pack(rids)[HEADER:]
        same = set(map(len, rids)) == {len(rids[0])} and "".join(rids).isascii()
        return cls(rids, ids, len(pack(rids[0])) if same else 0)

    def join(self, rids: list[str], joined: list[str]) -> None:
        """The rows are these, the last of which have joined."""
        ids = list(map(pack, joined))
        if set(map(len, ids)) != {self.size}:
            self.size = 0
        self.ids += b"".join(ids)
        self.rids = rids

    def drop(self, ended: list[int]) -> bool:
        """Leave those rows out; False when that cannot be done, or leaves no large batch."""
        size = self.size
        if not size or len(self.rids) - len(ended) < LARGE:
            return False
        rids, ids = list(self.rids), bytearray(self.ids)
        for row in reversed(ended):
            del rids[row], ids[row * size : (row + 1) * size]
        self.rids, self.ids = rids, bytes(ids)
        return True
