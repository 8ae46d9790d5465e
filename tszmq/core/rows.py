"""The rows of the last batch, remembered: an engine's next one mostly has the same.

Two shortcuts rest on that, and each gives what the long way would give:

* While the ids stay the same, no id is looked up again.
* While every row brings exactly one token and nothing ends, a batch is
  appended whole to one array (``_run``) and dealt out to its requests later, with one strided
  copy a request, when somebody needs them. That each count has grown by exactly one is checked
  at once, for all rows with one addition and one comparison of long integers.

Everything here happens under the lock of the state that owns it. Whoever is about to look at
the tokens of a request, or to end it, calls ``spill`` first.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from math import nan
from operator import attrgetter, length_hint
from typing import Any, TypeVar

import attrs

from tszmq.core.request import Request, Wakeable
from tszmq.errors import DecodeError
from tszmq.wire.base import RUNNING, EngineBatch

__all__ = ["Applied", "Rows", "most_likely", "only_rows"]

_extend = array.fromlist
_engine_of = attrgetter("engine_index")
_T = TypeVar("_T")
_SPILL_STEPS = 64  # bounds how long a spill takes


def _long(counts: bytes) -> int:
    """32-bit counts side by side, as one integer."""
    return int.from_bytes(counts, sys.byteorder)


@attrs.frozen(eq=False)
class Applied:
    """What is to be done about a batch once the lock is released.

    Attributes:
        wakes: Whom to wake.
        owed: Requests that ended here while their engine may still generate: abort them.
        source: The engine it came from, or None for a batch that is none of ours.
        hidden: Somebody reads along: ``Flights.reveal`` once no more batches are ready.
    """

    wakes: Sequence[Wakeable]
    owed: Sequence[Request]
    source: int | None
    hidden: bool = False


def most_likely(logprobs: dict[int, float], limit: int) -> dict[int, float]:
    """The sampled token, which comes first, and the ``limit`` most likely ones.

    Engines fill a batch up to its widest request, so that there may be more.
    """
    if len(logprobs) <= limit:
        return logprobs
    (sampled, value), *others = logprobs.items()
    among_them = value >= others[limit - 1][1]
    return {sampled: value, **dict(others[: limit - among_them])}


class Rows:
    """One batch's rows and their requests.

    Args:
        ids: Its ids, as the decoder gave them.
        requests: Their requests, beside them.

    Attributes:
        arrays: Their tokens, beside them.
        streams: Positions of those that somebody reads along.
        sources: The engines they were placed on; more than one from a broken sender only.
        source: The engine of the first.
        nothing_to_do: What the second shortcut comes to.
    """

    __slots__ = (
        "_expected",
        "_ones",
        "_run",
        "_scored",
        "_scores",
        "arrays",
        "ids",
        "nothing_to_do",
        "requests",
        "source",
        "sources",
        "streams",
    )

    def __init__(self, ids: list[str], requests: list[Request]) -> None:
        self.ids = ids
        self.requests = requests
        self.arrays = [request.tokens for request in requests]
        self.streams = [i for i, request in enumerate(requests) if request.streaming]
        self.sources = set(map(_engine_of, requests))
        self.source = requests[0].engine_index if requests else -1
        self.nothing_to_do = Applied((), (), self.source, bool(self.streams))
        self._scored = [i for i, request in enumerate(requests) if request.logprobs is not None]
        self._run = array("I")
        self._scores = array("d")  # the logprobs beside them
        self._expected: int | None = None  # the rows' counts, while the second shortcut is open
        self._ones = 0

    def are(self, ids: list[str]) -> bool:
        """Whether a batch with these ids has just these rows."""
        mine = self.ids
        return bool(mine) and (ids is mine or ids == mine)

    def forget(self) -> None:
        """A row has ended: the next batch has other rows."""
        self.ids = []
        self._expected = None

    # -- one token each

    def take_step(self, batch: EngineBatch) -> bool:
        """The second shortcut; False when the batch has to go the long way.

        Args:
            batch: One with these rows.
        """
        step = batch.one_each
        if self._expected is None or step is None or batch.details:
            return False
        expected = self._expected + self._ones
        if _long(step.counts) != expected:
            return False
        if self._scored:
            if step.logprobs is None:
                return False
            self._scores.extend(step.logprobs)
        self._expected = expected
        self._run.extend(step.tokens)
        if len(self._run) >= _SPILL_STEPS * len(step.tokens):
            self.spill()
        return True

    def open_steps(self, batch: EngineBatch) -> None:
        """Offer the second shortcut to the next batch, after one that went the long way."""
        self._expected = None
        if batch.one_each is None or len(self.sources) != 1:
            return
        if len(self._scored) not in (0, len(self.arrays)) or len(set(self.ids)) != len(self.ids):
            return
        counts = batch.one_each.counts
        if counts == array("I", map(len, self.arrays)).tobytes():
            self._expected = _long(counts)
            self._ones = _long(array("I", [1]).tobytes() * len(self.arrays))

    def spill(self) -> None:
        """Deal out what the second shortcut kept together."""
        if not self._run:
            return
        count = len(self.arrays)
        columns: list[array[Any]] = list(self.arrays)
        parts: list[array[Any]] = [self._run[i::count] for i in range(count)]
        for position in self._scored:
            column = self.requests[position].logprobs
            assert column is not None
            columns.append(column)
            parts.append(self._scores[position::count])
        run, scores = array("I"), array("d")
        dealing = map(array.extend, columns, parts)
        # Callers' threads come here too, where a signal handler may raise after any call: from
        # here on there is but one, which deals out everything.
        self._run = run
        self._scores = scores
        any(dealing)

    def publish(self) -> list[Wakeable]:
        """Let readers see what their rows have; after ``spill``. Returns whom to wake."""
        gates: dict[Wakeable, None] = {}  # each once: those of a group share theirs
        for position in self.streams:
            request = self.requests[position]
            request.publish()
            if request.group is not None:
                request.group.touched.append(request)
            gates[request.gate] = None
        return list(gates)

    # -- the long way

    def store(self, token_ids: list[list[int]]) -> None:
        """Append each row's tokens. The arrays prove the types: they take nothing but ints.

        Raises:
            DecodeError: A token id is not an int in [0, 2**32); nothing was stored.
        """
        pending = iter(self.arrays)
        try:
            # One pass in C: nothing else runs between two rows.
            any(map(_extend, pending, token_ids))
        except (TypeError, OverflowError) as error:
            stored = len(self.arrays) - length_hint(pending) - 1
            for tokens, ids in zip(self.arrays[:stored], token_ids, strict=False):
                if ids:
                    del tokens[-len(ids) :]
            self.forget()
            raise DecodeError(f"a token id is not an int in [0, 2**32): {error!s:.80}") from None

    def take_back(self, position: int, count: int) -> None:
        """Remove a row's last tokens, which nobody was shown: they came after a gap."""
        if count:
            del self.arrays[position][-count:]
            logprobs = self.requests[position].logprobs
            if logprobs is not None:
                del logprobs[-count:]

    def store_logprobs(self, batch: EngineBatch) -> None:
        """One a token for those who asked, NaN where none came, or later ones would slip."""
        for position in self._scored:
            column = self.requests[position].logprobs
            assert column is not None
            values = batch.logprobs[position] if batch.logprobs is not None else None
            column.fromlist(values or [nan] * len(batch.token_ids[position]))

    def store_details(self, batch: EngineBatch) -> None:
        """What few rows carry beyond the columns."""
        for position, detail in (batch.details or {}).items():
            row = self.requests[position]
            if detail.top_logprobs is not None and row.top_limit:
                if row.top_logprobs is None:
                    row.top_logprobs = []
                row.top_logprobs += [most_likely(x, row.top_limit) for x in detail.top_logprobs]
            if detail.cached_tokens is not None:
                row.cached_tokens = detail.cached_tokens
            if row.detail is not None and detail.prompt_logprobs is None:
                detail.prompt_logprobs = row.detail.prompt_logprobs
            row.detail = detail


def only_rows(batch: EngineBatch, keep: list[int]) -> EngineBatch:
    """The batch with only those rows."""

    def pick(column: list[_T]) -> list[_T]:
        return [column[i] for i in keep]

    def pick_optional(column: list[_T] | None) -> list[_T] | None:
        return None if column is None else pick(column)

    details = batch.details
    reasons = pick(batch.finish_reasons)
    return attrs.evolve(
        batch,
        request_ids=pick(batch.request_ids),
        token_ids=pick(batch.token_ids),
        finish_reasons=reasons,
        num_finished=len(reasons) - reasons.count(RUNNING),
        completion_tokens=pick_optional(batch.completion_tokens),
        prompt_tokens=pick_optional(batch.prompt_tokens),
        cached_tokens=pick_optional(batch.cached_tokens),
        logprobs=pick_optional(batch.logprobs),
        details=details and {at: details[i] for at, i in enumerate(keep) if i in details},
    )
