"""Rows that an engine's batches have had: what need not be decoded when they come again."""

from __future__ import annotations

from array import array

import attrs

from tszmq.codec import pack

__all__ = ["LARGE", "MAX_TAIL", "KnownRows", "SameColumns", "Shape", "suspects_in"]

LARGE = 16
"""Rows from which on a column's header has three bytes."""
MAX_TAIL = 5 * 9
"""Bytes after the columns: five integers at their widest."""
_BOOLS = b"\xc2\xc3"
_STREAK = 3  # batches with the same rows after which their columns are looked at
_LONG_TIME = 1000  # batches until they are looked at again when they vary


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
        at = len(data) - self.tail - len(ending)
        if at > 0 and data.startswith(ending, at):
            return at
        at = data.find(ending, max(0, len(data) - len(ending) - MAX_TAIL))
        if at >= 0:
            self.tail = len(data) - at - len(ending)
        return at


@attrs.frozen(eq=False)
class SameColumns:
    """Columns that stay the same while the rows do, checked: as values and as on the wire."""

    reasons: list[str]
    prompt: list[int]
    cached: list[int]
    zeros: bool  # ``cached`` is that of the shape
    first: bytes  # reasons and prompt, which are neighbours
    second: bytes  # cached, where they are not zeros
    suspects: int  # bytes in prompt and cached that a bool would be

    @classmethod
    def of(
        cls, reasons: list[str], prompt: list[int], cached: list[int], shape: Shape
    ) -> SameColumns:
        """Of a large batch that has been checked."""
        first = pack(reasons) + pack(prompt)
        zeros = cached is shape.zeros
        suspects = suspects_in(array("I", prompt + cached).tobytes())
        return cls(reasons, prompt, cached, zeros, first, b"" if zeros else pack(cached), suspects)


def suspects_in(data: bytes) -> int:
    """How many bytes may be a bool on the wire."""
    return len(data) - len(data.translate(None, _BOOLS))


@attrs.define(eq=False, slots=True)
class KnownRows:
    """Rows that have been seen.

    Attributes:
        rids: Their ids, as values.
        ids: As they are on the wire.
        size: Bytes of each there; 0 when they differ.
        same: Columns that a batch had as well, and the next one may have.
        streak: How many batches had just these rows; negative when their columns vary.
    """

    rids: list[str]
    ids: bytes
    size: int
    same: SameColumns | None = None
    streak: int = 0

    @classmethod
    def of(cls, rids: list[str]) -> KnownRows:
        """Of a large batch."""
        ids = pack(rids)[3:]
        same = set(map(len, rids)) == {len(rids[0])} and "".join(rids).isascii()
        return cls(rids, ids, len(pack(rids[0])) if same else 0)

    def learn(self, reasons: list[str], prompt: list[int], cached: list[int], shape: Shape) -> None:
        """A batch with just these rows had these columns."""
        if self.same is not None:
            if reasons is not self.same.reasons:
                self.same, self.streak = None, -_LONG_TIME
            return
        self.streak += 1
        if self.streak == _STREAK:
            self.same = SameColumns.of(reasons, prompt, cached, shape)

    def join(self, rids: list[str], joined: list[str]) -> None:
        """The rows are these, the last of which have joined."""
        self.same, self.streak = None, 0
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
        self.same, self.streak = None, 0
        return True
