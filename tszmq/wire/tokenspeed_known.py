"""Rows that an engine's batches have had: what need not be decoded when they come again."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import attrs

from tszmq.codec import pack
from tszmq.removal import remove_rows, without_rows
from tszmq.wire.tokenspeed_output import RUNNING

__all__ = [
    "CUT_ZEROS",
    "HEADER",
    "LARGE",
    "KnownRows",
    "Shape",
    "Span",
    "hides_a_bool",
]

LARGE = 16
"""Rows from which on a column's header has more than one byte."""
HEADER = 3
"""How many it has then."""
CUT_ZEROS = 3
"""Columns that are cut when nothing was cached: cached tokens, and the two of logprobs."""
Span = tuple[int, int, int]
"""Columns that are neighbours in a message: where they start, where they end, how many."""
_MAX_TAIL = 5 * 9  # bytes after the columns: five integers at their widest
_FALSE, _TRUE = 0xC2, 0xC3  # as they are on the wire
_BOOLS = bytes([_FALSE, _TRUE])


@attrs.define(eq=False, slots=True)
class Shape:
    """Columns of a large batch that hold nothing, on the wire.

    Attributes:
        header: Of each column.
        rows: How many it has.
        running: The finish reasons, when no request ends.
        empty: Both logprob columns, when nobody asked for logprobs.
        zeros_and_empty: The cached tokens before them, when nothing was cached; and these.
        zeros: Those cached tokens, for everybody to read.
        tail: Bytes after them, in the last message.
    """

    header: bytes
    rows: int
    running: bytes
    empty: bytes
    zeros_and_empty: bytes
    zeros: list[int]
    tail: int = 0

    @classmethod
    def of(cls, header: bytes) -> Shape:
        """Of the columns with this header."""
        rows = int.from_bytes(header[1:], "big") if header[1:] else header[0] & 0x0F
        empty = (header + b"\x90" * rows) * 2
        running = header + pack(RUNNING) * rows
        zeros_and_empty = header + bytes(rows) + empty
        return cls(header, rows, running, empty, zeros_and_empty, [0] * rows)

    def cut(self, data: bytes) -> Span:
        """The last columns before a message's tail, as far as they hold nothing."""
        start = self.find(data, self.zeros_and_empty)
        if start >= 0:
            return start, start + len(self.zeros_and_empty), CUT_ZEROS
        start = self.find(data, self.empty)
        if start >= 0:
            return start, start + len(self.empty), CUT_ZEROS - 1
        return len(data), len(data), 0

    def find(self, data: bytes, ending: bytes) -> int:
        """Where the columns end with this, with at most ``_MAX_TAIL`` bytes behind; -1 when they
        do not."""
        at = len(data) - self.tail - len(ending)
        if at <= 0 or not data.startswith(ending, at):
            at = data.find(ending, max(0, len(data) - len(ending) - _MAX_TAIL))
            if at >= 0:
                self.tail = len(data) - at - len(ending)
        return at


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
    if _FALSE not in data and _TRUE not in data:
        return False
    suspects = len(data) - len(data.translate(None, _BOOLS))
    known = headers + b"".join(numbers)
    return suspects != len(known) - len(known.translate(None, _BOOLS))


@attrs.define(eq=False, slots=True)
class KnownRows:
    """Rows that have been seen.

    Attributes:
        rids: Their ids, as values.
        ids: As they are on the wire.
        size: Bytes of each there; 0 when they differ.
        prompt: Their prompt tokens, as values.
    """

    rids: list[str]
    ids: bytes
    size: int
    prompt: list[int]
    _prompts: bytes = b""

    @classmethod
    def of(cls, rids: list[str], prompt: list[int]) -> KnownRows:
        """Of a large batch."""
        ids = pack(rids)[HEADER:]
        same = set(map(len, rids)) == {len(rids[0])} and "".join(rids).isascii()
        return cls(rids, ids, len(pack(rids[0])) if same else 0, prompt)

    @property
    def prompts(self) -> bytes:
        """Their prompt tokens as they are on the wire."""
        if not self._prompts:
            self._prompts = pack(self.prompt)[HEADER:]
        return self._prompts

    def note_prompt(self, prompt: list[int]) -> None:
        """A batch had these beside the rows."""
        self.prompt = prompt
        self._prompts = b""

    def join(self, rids: list[str], joined: list[str], prompt: list[int]) -> None:
        """The rows are these, the last of which have joined."""
        ids = list(map(pack, joined))
        if set(map(len, ids)) != {self.size}:
            self.size = 0
        self.ids += b"".join(ids)
        self.rids = rids
        self.note_prompt(prompt)

    def drop(self, ended: Sequence[int]) -> bool:
        """Leave those rows out; False when that cannot be done, or leaves no large batch."""
        size = self.size
        if not size or len(self.rids) - len(ended) < LARGE:
            return False
        self.ids = without_rows(self.ids, size, ended)
        rids = list(self.rids)  # batches have the other
        remove_rows(rids, ended)
        self.rids = rids
        remove_rows(self.prompt, ended)
        self._prompts = b""
        return True
