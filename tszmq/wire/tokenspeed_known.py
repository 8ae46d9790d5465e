"""Rows that an engine's batches have had: what need not be decoded when they come again."""

from __future__ import annotations

from array import array

import attrs

from tszmq.codec import pack

__all__ = ["LARGE", "KnownRows", "SameColumns"]

LARGE = 16
"""Rows from which on a column's header has three bytes."""
_STREAK = 3  # batches with the same rows after which their columns are looked at
_LONG_TIME = 1000  # batches until they are looked at again when they vary


@attrs.frozen(eq=False)
class SameColumns:
    """Columns that stay the same while the rows do, checked: as values and as on the wire."""

    reasons: list[str]
    prompt: list[int]
    cached: list[int]
    prompt_numbers: array[int]
    cached_numbers: array[int]
    first: bytes  # reasons and prompt, which are neighbours
    second: bytes  # cached

    @classmethod
    def of(cls, reasons: list[str], prompt: list[int], cached: list[int]) -> SameColumns:
        """Of a large batch that has been checked."""
        first = pack(reasons) + pack(prompt)
        numbers = array("I", prompt), array("I", cached)
        return cls(reasons, prompt, cached, *numbers, first, pack(cached))


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

    def learn(self, reasons: list[str], prompt: list[int], cached: list[int]) -> None:
        """A batch with just these rows had these columns."""
        if self.same is not None:
            if reasons is not self.same.reasons:
                self.same, self.streak = None, -_LONG_TIME
            return
        self.streak += 1
        if self.streak == _STREAK:
            self.same = SameColumns.of(reasons, prompt, cached)

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
