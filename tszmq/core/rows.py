"""The rows of an engine's last batch, remembered: its next one mostly has the same.

Three shortcuts rest on that, and each gives what the long way would give:

* While the ids stay the same, no id is looked up again.
* Requests that end leave the rows, and new ones join them at the end: only those are looked up.
* Batches of one token a row are kept together and dealt out later (``Steps``), unless the rows
  are few.

Everything here happens under the lock of the state that owns it. Whoever is about to look at
the tokens of a request, or to end it, calls ``spill`` first, or ``deal_to`` for that one.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import nan
from operator import attrgetter, length_hint
from typing import TypeVar

import attrs

from tszmq.core.request import Request, Wakeable
from tszmq.core.steps import Steps
from tszmq.errors import DecodeError
from tszmq.removal import remove_rows
from tszmq.wire.base import EngineBatch, Ranking

__all__ = ["Applied", "Rows", "only_rows"]

_FEWEST_KEPT = 8  # rows: a batch of fewer is dealt out at once
_append = array.append
_extend = array.fromlist
_engine_of = attrgetter("engine_index")
_T = TypeVar("_T")


@attrs.define(eq=False)
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


def _extend_top(row: Request, tops: list[Ranking] | None, count: int) -> None:
    """One mapping a token, empty where none came, or later ones would slip.

    Args:
        row: A request that asked for them; it has the tokens already.
        tops: Those of its new tokens, or None.
        count: How many these are.
    """
    if tops is None:
        if row.top_logprobs is not None:
            row.top_logprobs += [{} for _ in range(count)]
        return
    if row.top_logprobs is None:
        row.top_logprobs = [{} for _ in range(len(row.tokens) - count)]
    # The token itself, and as many as it asked for, of which it may be one.
    row.top_logprobs += [dict(each[: 1 + row.top_limit]) for each in tops]


class Rows:
    """One batch's rows and their requests.

    Args:
        ids: Its ids, as the decoder gave them.
        requests: Their requests, beside them.

    Attributes:
        arrays: Their tokens, beside them.
        streams: Positions of those that somebody reads along.
        unstarted: Positions of those that have had no token.
        sources: The engines they were placed on; more than one from a broken sender only.
        source: The engine of the first.
        hidden: Streams among them have tokens that were not shown.
        nothing_to_do: What the third shortcut comes to.
    """

    __slots__ = (
        "_distinct",
        "_scored",
        "_steps",
        "_version",
        "arrays",
        "hidden",
        "ids",
        "nothing_to_do",
        "requests",
        "source",
        "sources",
        "streams",
        "unstarted",
    )

    def __init__(self, ids: list[str], requests: list[Request]) -> None:
        self.ids = ids
        self.requests = requests
        self.arrays = [request.tokens for request in requests]
        self.unstarted = [i for i, request in enumerate(requests) if request.first is None]
        self.sources = set(map(_engine_of, requests))
        self.source = requests[0].engine_index if requests else -1
        self.hidden = False
        self._distinct = set(ids)
        self._version: str | None = None  # of the weights, as those that have started know it
        self._find_readers()
        self._steps = Steps()

    def _find_readers(self) -> None:
        """Which rows are streams, and which have logprobs."""
        requests = self.requests
        self.streams = [i for i, request in enumerate(requests) if request.streaming]
        self._scored = [i for i, request in enumerate(requests) if request.logprobs is not None]
        self.nothing_to_do = Applied((), (), self.source, bool(self.streams))

    # -- which rows

    def are(self, ids: list[str]) -> bool:
        """Whether a batch with these ids, which are another list, has just these rows."""
        mine = self.ids
        if ids != mine or not mine:
            return False
        self.ids = ids  # the decoder gives the same list again
        return True

    def __contains__(self, wire_id: str) -> bool:
        return wire_id in self._distinct

    def lose(self, wire_id: str) -> None:
        """A request has ended: if it is one of these, the next batch has other rows."""
        if wire_id in self._distinct:
            self.ids = []

    def grow(self, ids: list[str], known: Mapping[str, Request]) -> bool:
        """Take in the rows that a batch has after these.

        Returns:
            False, having done nothing, when the batch's rows are others.
        """
        count = len(self.ids)
        if not 0 < count < len(ids) or ids[:count] != self.ids or not self._are_distinct():
            return False
        new = ids[count:]
        joined = list(filter(None, map(known.get, new)))
        if len(joined) != len(new) or not self._distinct.isdisjoint(new):
            return False
        if set(map(_engine_of, joined)) != self.sources:
            return False
        self._distinct.update(new)
        if len(self._distinct) != len(ids):  # one of them twice
            self._distinct.difference_update(new)
            return False
        arrays = [request.tokens for request in joined]
        read = any(request.streaming or request.logprobs is not None for request in joined)
        # What is kept has logprobs for every row or for none.
        if (read or self._scored) and not self._are_alike(joined):
            self.spill()
        if not self._steps.has_room(len(arrays)):
            self.spill()
        self._steps.join(arrays)
        self.ids = ids
        if any(request.first is not None for request in joined):
            self._version = None  # one that comes back may know another
        self.requests += joined
        self.arrays += arrays
        self.unstarted += range(count, len(ids))
        if read:
            self._find_readers()
        return True

    def _are_alike(self, joined: list[Request]) -> bool:
        """Whether all of them have logprobs, or none has, as the rows that are there."""
        scored = [request.logprobs is not None for request in joined]
        return all(scored) if self._scored else not any(scored)

    def drop(self, ended: Collection[int], ids: list[str]) -> None:
        """Those rows have ended; the next batch may well have the others.

        Args:
            ended: Their positions.
            ids: Of all the rows, as they were.
        """
        if not self._are_distinct() or len(self.sources) != 1:
            self._steps.forget()
            return  # they stay forgotten
        gone = sorted(ended)
        self._distinct.difference_update([ids[position] for position in gone])
        left = list(ids)
        for column in (left, self.requests, self.arrays):
            remove_rows(column, gone)
        if self.unstarted:
            waiting = [at for at in self.unstarted if at not in ended]
            self.unstarted = [at - bisect_left(gone, at) for at in waiting]
        self._steps.drop(gone)
        if self.streams or self._scored:
            self._find_readers()
        self.ids = left

    def _are_distinct(self) -> bool:
        return len(self._distinct) == len(self.requests)

    def disturb(self, ids: list[str]) -> None:
        """A batch with other rows comes, which may bring tokens for some of these."""
        if not self._distinct.isdisjoint(ids):
            self.spill()
            self._steps.forget()
            self._version = None

    def start(self, now: float, cached_tokens: Sequence[int] | None) -> list[Request]:
        """Those whose first token has come with this batch.

        Args:
            now: Monotonic seconds.
            cached_tokens: Of each row, where the wire tells.
        """
        if not self.unstarted:
            return []
        # Another batch, with other rows, may have brought it before. What is kept together
        # brought every row one.
        kept = bool(self._steps.tokens)
        started, waiting = [], []
        for position in self.unstarted:
            request = self.requests[position]
            if request.first is not None:
                continue
            if not (kept or request.tokens):
                waiting.append(position)
                continue
            request.first = now
            if cached_tokens is not None:  # not every request has an end that tells it
                request.cached_tokens = cached_tokens[position]
            started.append(request)
        self.unstarted = waiting
        return started

    def note_version(self, version: str, batch: EngineBatch, started: list[Request]) -> None:
        """The weights that made the tokens of a batch, which has been stored.

        Args:
            version: Theirs.
            batch: It.
            started: Those whose first token has come with it.
        """
        if version == self._version:
            for request in started:
                request.note_version(version, 0)
            return
        self._version = version
        for position, request in enumerate(self.requests):
            request.note_version(version, len(request.tokens) - batch.tokens_in(position))

    # -- one token each

    def take_step(self, batch: EngineBatch) -> bool:
        """The third shortcut; False when the batch has to go the long way.

        Args:
            batch: One with these rows.
        """
        steps, scored, step = self._steps, self._scored, batch.one_each
        if step is None or batch.details or (scored and step.logprobs is None):
            return False
        if not steps.is_next(step):
            return False
        if len(self.arrays) < _FEWEST_KEPT and not steps.tokens:
            any(map(_append, self.arrays, step.tokens))
            if scored:
                self.store_logprobs(batch)
            return True
        steps.keep(step, scored)
        if steps.steps_left <= 0:
            self.spill()
        return True

    def deal_to(self, ended: Iterable[int]) -> None:
        """Deal out what the third shortcut kept for those that end with it."""
        for position in ended:
            self._steps.deal_to(position, self.arrays[position], self.requests[position].logprobs)

    def spill(self) -> None:
        """Deal out what the third shortcut kept together."""
        if self._steps.tokens:
            self._steps.deal_out(self.arrays, self._logprobs())

    def _logprobs(self) -> list[tuple[int, array[float]]]:
        """Where logprobs go, by position."""
        if not self._scored:
            return []
        columns = [(position, self.requests[position].logprobs) for position in self._scored]
        return [(position, column) for position, column in columns if column is not None]

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

    def store(self, batch: EngineBatch) -> None:
        """Append each row's tokens. The arrays take ints in their range and bools; that there
        are no bools, the decoder has seen.

        Raises:
            DecodeError: A token id is not an int in [0, 2**32); nothing was stored.
        """
        if batch.one_each is not None:
            any(map(_append, self.arrays, batch.one_each.tokens))
            return
        token_ids = batch.token_ids
        pending = iter(self.arrays)
        try:
            # One pass in C: nothing else runs between two rows.
            any(map(_extend, pending, token_ids))
        except (TypeError, OverflowError) as error:
            stored = len(self.arrays) - length_hint(pending) - 1
            for tokens, ids in zip(self.arrays[:stored], token_ids, strict=False):
                if ids:
                    del tokens[-len(ids) :]
            self.ids = []
            raise DecodeError(f"a token id is not an int in [0, 2**32): {error!s:.80}") from None

    def count(self, batch: EngineBatch) -> bool:
        """Whether the batch, which has been stored, counts for each row what has come for it."""
        counted = self._steps.count(batch, self.arrays)
        if not self._are_distinct():
            self._steps.forget()  # it has a place for each once
        return counted

    def take_back(self, position: int, count: int) -> None:
        """Remove a row's last tokens, which nobody was shown: they came after a gap."""
        if count:
            del self.arrays[position][-count:]
            logprobs = self.requests[position].logprobs
            if logprobs is not None:
                del logprobs[-count:]

    def store_logprobs(self, batch: EngineBatch) -> None:
        """One a token for those who asked, NaN where none came, or later ones would slip."""
        if not self._scored:
            return
        logprobs = batch.rows_of_logprobs()
        for position, column in self._logprobs():
            values = logprobs[position] if logprobs is not None else None
            column.fromlist(values or [nan] * batch.tokens_in(position))

    def store_details(self, batch: EngineBatch) -> None:
        """What few rows carry beyond the columns."""
        details = batch.details or {}
        for position in self._scored:
            row, found = self.requests[position], details.get(position)
            if row.top_limit:
                tops = None if found is None else found.top_logprobs
                _extend_top(row, tops, batch.tokens_in(position))
        for position, detail in details.items():
            row = self.requests[position]
            if detail.cached_tokens is not None:
                row.cached_tokens = detail.cached_tokens
            before = row.detail
            if before is not None:
                detail.prompt_logprobs = detail.prompt_logprobs or before.prompt_logprobs
                detail.kv_transfer_params = detail.kv_transfer_params or before.kv_transfer_params
            row.detail = detail


def only_rows(batch: EngineBatch, keep: list[int]) -> EngineBatch:
    """The batch with only those rows."""

    def pick(column: list[_T]) -> list[_T]:
        return [column[i] for i in keep]

    def pick_optional(column: list[_T] | None) -> list[_T] | None:
        return None if column is None else pick(column)

    details = batch.details
    ends = batch.finished
    return attrs.evolve(
        batch,
        request_ids=pick(batch.request_ids),
        token_ids=pick(batch.rows_of_tokens()),
        finished={at: ends[i] for at, i in enumerate(keep) if i in ends},
        completion_tokens=pick_optional(batch.rows_of_counts()),
        cached_tokens=pick_optional(batch.cached_tokens),
        logprobs=pick_optional(batch.rows_of_logprobs()),
        one_each=None,
        details=details and {at: details[i] for at, i in enumerate(keep) if i in details},
    )
