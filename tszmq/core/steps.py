"""How many tokens each row has, and batches of one token a row, which are dealt out later.

Most batches bring exactly one token for each row. Such a batch is appended whole to one array,
the block, and dealt out when somebody needs the tokens, with one strided copy a row. That each
row's count has grown by exactly one is checked for all rows at once, with one addition and one
comparison of long integers.

Rows may end and join meanwhile: in the block every row has a lane of its own, the lane of a row
that ended stays empty, and a row that joins gets one that was spare. ::

    step 0   a b c d . .
    step 1   a b c d . .      c ended
    step 2   a b . d e .      e joined
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Any, TypeVar

from tszmq.removal import remove_rows, without_rows
from tszmq.wire.base import EngineBatch, OneEach, ones

__all__ = ["Steps"]

_STEPS_KEPT = 64  # at most: bounds how long it takes to deal them out
_ROWS_A_SPARE = 4  # one spare lane for so many rows
_N = TypeVar("_N", int, float)


class Steps:
    """Counts of an engine's rows, and tokens of theirs that have not been dealt out.

    A row's position is its place in the batches; its first is where its tokens start in the
    block: in its lane, at the step with which it joined.

    Attributes:
        steps_left: How many can be kept before it is time to deal them out.
        tokens: The block; empty when nothing is kept.
    """

    __slots__ = (
        "_counts",
        "_firsts",
        "_holes",
        "_last",
        "_logprobs",
        "_spare",
        "_stride",
        "steps_left",
        "tokens",
    )

    def __init__(self) -> None:
        # The counts, what is kept here included: those of a batch, or 32 bits each; or not known.
        self._last: OneEach | None = None
        self._counts = b""
        self.tokens = array("I")
        self._logprobs = array("d")  # beside it, where the rows have any
        self._stride = 0  # lanes of the block
        self.steps_left = 0
        self._firsts: list[int] = []
        self._holes: list[int] = []  # lanes of rows that ended, in order
        self._spare = False  # rows join: start with spare lanes

    def forget(self) -> None:
        """The rows are others, or get tokens in another way."""
        self._last = None
        self._counts = b""

    def count(self, batch: EngineBatch, arrays: Sequence[array[int]]) -> bool:
        """Whether a batch, which has been stored, counts for each row what has come for it; if
        so, ``is_next`` may be asked about those that follow."""
        step = batch.one_each
        if step is not None and self.is_next(step):
            return True
        self.forget()
        if batch.rows_of_counts() != list(map(len, arrays)):
            return False
        self._last = step
        return True

    def keep(self, step: OneEach, scored: Sequence[int]) -> None:
        """Deal it out later."""
        tokens = step.tokens
        if not self.tokens:
            self._begin(len(tokens))
        self.tokens += tokens if len(tokens) == self._stride else self._in_lanes(tokens)
        if scored and step.logprobs is not None:
            self._logprobs += self._in_lanes(step.logprobs)
        self.steps_left -= 1

    def is_next(self, step: OneEach) -> bool:
        """Whether each row counts one more than before, for all of them at once; if so, these
        are the counts from now on: ``keep`` the step, or store it."""
        last = self._last
        if last is not None and last.counts is step.counts:
            are_next = step.ahead == last.ahead + 1
        elif last is not None:
            are_next = step.number() == last.number() + ones(len(step.tokens))
        else:
            before = int.from_bytes(self._counts, sys.byteorder)
            are_next = bool(self._counts) and step.number() == before + ones(len(step.tokens))
        if are_next:
            self._last = step
        return are_next

    def _begin(self, rows: int) -> None:
        self._stride = rows + (rows // _ROWS_A_SPARE if self._spare else 0)
        self.steps_left = _STEPS_KEPT
        self._firsts = list(range(rows))
        self._holes = []

    def _in_lanes(self, values: array[_N]) -> array[_N]:
        """One step, each value in its lane."""
        if len(values) == self._stride:
            return values
        values = values[:]
        for hole in self._holes:
            values.insert(hole, 0)
        values.frombytes(bytes(values.itemsize * (self._stride - len(values))))
        return values

    # -- other rows

    def has_room(self, joined: int) -> bool:
        """Whether so many rows can join before what is kept is dealt out."""
        if not self.tokens or self._next_lane() + joined <= self._stride:
            return True
        self._spare = True  # the next time
        return False

    def _next_lane(self) -> int:
        return len(self._firsts) + len(self._holes)

    def join(self, joined: Sequence[array[int]]) -> None:
        """The rows are followed by these from now on, for which there is room."""
        if self.tokens:
            first = len(self.tokens) + self._next_lane()
            self._firsts += range(first, first + len(joined))
        counts = self._take_counts()
        if counts:
            self._counts = counts + array("I", map(len, joined)).tobytes()

    def drop(self, ended: Sequence[int]) -> None:
        """Rows have ended, and have been dealt out what they have; those after them move up.

        Args:
            ended: Their positions, in order.
        """
        if self.tokens:
            lanes = [self._firsts[position] % self._stride for position in ended]
            self._holes = sorted(self._holes + lanes)
            remove_rows(self._firsts, ended)
            if len(self._holes) * _ROWS_A_SPARE > self._stride:
                self.steps_left = 0  # every step has to be filled up: start anew
        self._counts = without_rows(self._take_counts(), self.tokens.itemsize, ended)

    def _take_counts(self) -> bytes:
        """The counts, 32 bits each; none when they are not known."""
        last, self._last = self._last, None
        if last is not None:
            self._counts = last.number().to_bytes(4 * len(last.tokens), sys.byteorder)
        return self._counts

    # -- dealing out

    def deal_to(self, position: int, tokens: array[int], logprobs: array[float] | None) -> None:
        """Give one row, which is to be dropped next, its own."""
        if self.tokens:
            own = slice(self._firsts[position], None, self._stride)
            tokens.extend(self.tokens[own])
            if logprobs is not None:
                logprobs.extend(self._logprobs[own])

    def deal_out(
        self, arrays: Sequence[array[int]], logprobs: Sequence[tuple[int, array[float]]]
    ) -> None:
        """Give every row its own.

        Args:
            arrays: Where each row's tokens go.
            logprobs: Where logprobs go, by position.
        """
        stride, firsts = self._stride, self._firsts
        columns: list[array[Any]] = list(arrays)
        parts: list[array[Any]] = [self.tokens[first::stride] for first in firsts]
        for position, column in logprobs:
            columns.append(column)
            parts.append(self._logprobs[firsts[position] :: stride])
        tokens, scores = array("I"), array("d")
        dealing = map(array.extend, columns, parts)
        # Callers' threads come here too, where a signal handler may raise after any call: from
        # here on there is but one, which deals out everything.
        self.tokens = tokens
        self._logprobs = scores
        any(dealing)
