"""How many tokens each row has, and batches of one token a row, which are dealt out later.

Most batches bring exactly one token for each of the same rows. Such a batch is appended whole to
one array, and dealt out when somebody needs the tokens, with one strided copy a row. That each
row's count has grown by exactly one is checked for all rows at once, with one addition and one
comparison of long integers.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from tszmq.wire.base import EngineBatch

__all__ = ["Steps"]

_MOST = 64  # steps kept: bounds how long it takes to deal them out


class Steps:
    """Counts of an engine's rows, and tokens of theirs that have not been dealt out."""

    __slots__ = ("_lengths", "_logprobs", "_open", "_tokens")

    def __init__(self) -> None:
        self._lengths: int | None = None  # what is kept here included; None when not known
        self._tokens = array("I")
        self._logprobs = array("d")  # beside them, where the rows have any
        self._open = False

    def forget(self) -> None:
        """The rows are others, or get tokens in another way."""
        self._open = False
        self._lengths = None

    def count(self, batch: EngineBatch, arrays: Sequence[array[int]]) -> bool:
        """Whether a batch, which has been stored, counts for each row what has come for it."""
        step, lengths = batch.one_each, self._lengths
        self._lengths = None
        if step is not None and lengths is not None:
            lengths += _ones(len(step.tokens))
            if _long(step.counts) == lengths:
                self._lengths = lengths
                return True
        if batch.completion_tokens != list(map(len, arrays)):
            return False
        if step is not None:
            self._lengths = _long(step.counts)
        return True

    def open(self) -> None:
        """Take what comes next, after a batch with the rows of the one before."""
        self._open = self._lengths is not None

    def take(self, batch: EngineBatch, scored: bool) -> bool:
        """Keep a batch that has the same rows as the one before.

        Args:
            batch: The batch.
            scored: Whether the rows want logprobs, all of them.

        Returns:
            False when it has to be looked at.
        """
        step, lengths = batch.one_each, self._lengths
        if not self._open or step is None or lengths is None:
            return False
        if batch.num_finished or batch.details:
            return False
        lengths += _ones(len(step.tokens))
        if _long(step.counts) != lengths:
            return False
        if scored:
            if step.logprobs is None:
                return False
            self._logprobs.extend(step.logprobs)
        self._lengths = lengths
        self._tokens.extend(step.tokens)
        return True

    def are_many(self, rows: int) -> bool:
        """Whether it is time to deal out what is kept."""
        return len(self._tokens) >= _MOST * rows

    def deal_out(
        self, arrays: Sequence[array[int]], logprobs: Sequence[tuple[int, array[float]]]
    ) -> None:
        """Give every row its own.

        Args:
            arrays: Where each row's tokens go.
            logprobs: Where logprobs go, by position.
        """
        rows = len(arrays)
        columns: list[array[Any]] = list(arrays)
        parts: list[array[Any]] = [self._tokens[i::rows] for i in range(rows)]
        for position, column in logprobs:
            columns.append(column)
            parts.append(self._logprobs[position::rows])
        tokens, scores = array("I"), array("d")
        dealing = map(array.extend, columns, parts)
        # Callers' threads come here too, where a signal handler may raise after any call: from
        # here on there is but one, which deals out everything.
        self._tokens = tokens
        self._logprobs = scores
        any(dealing)

    def __bool__(self) -> bool:
        return bool(self._tokens)


def _long(counts: bytes) -> int:
    """32-bit counts side by side, as one integer."""
    return int.from_bytes(counts, sys.byteorder)


@lru_cache(256)
def _ones(rows: int) -> int:
    """One more for each."""
    return _long(array("I", [1]).tobytes() * rows)
