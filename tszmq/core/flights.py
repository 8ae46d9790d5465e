"""Every unfinished request of a client, and where each is: the state behind the one lock.

``Flights`` joins the requests (id to what arrived) with ``RoutingState`` (load and ids per
engine), because they change together: a batch's tokens, its load and the places that it frees
are one step, and a request that has ended is in neither. It has no thread, socket or clock:
it is told the time, and returns whom to wake once the lock is released.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import attrs

from tszmq.core.calls import Calls
from tszmq.core.endings import ending, output_lost, tokens_lost
from tszmq.core.ids import WireIds
from tszmq.core.places import Places
from tszmq.core.policy import Policy
from tszmq.core.request import ABORTED, End, Request, Wakeable
from tszmq.core.routing import RoutingState, all_dead
from tszmq.core.rows import Applied, Rows, only_rows
from tszmq.errors import TszmqError
from tszmq.types import EngineHealth, EngineInfo, EngineLoad
from tszmq.wire.base import EngineBatch, WaveComplete

__all__ = ["Applied", "EngineRecord", "Flights"]

_FEW = 16  # rows


@attrs.define(eq=False)
class EngineRecord:
    """What is known of an engine beside its routing.

    Attributes:
        info: Its registration.
        epoch: Counts registrations: tells an engine from its predecessor of the same index.
        born: The lowest wire id that this incarnation can have been sent.
        last_output: When its last readable message came (monotonic seconds).
        busy_since: When it last went from nothing in flight to something.
        first_error: What went wrong with it first.
        dropped: It is dead and holds nothing any more.
    """

    info: EngineInfo
    epoch: int
    born: str
    last_output: float
    busy_since: float
    first_error: str | None = None
    dropped: bool = False


class Flights:
    """Requests, load and in-flight places of one client.

    Args:
        ids: Makes the wire ids, and knows them again.
        policy: How engines are chosen; None for the default.
        max_inflight: Bound on unfinished requests, or None.
    """

    def __init__(
        self, ids: WireIds, policy: Policy | None = None, max_inflight: int | None = None
    ) -> None:
        self._wire_ids = ids
        self.routing = RoutingState(policy)
        self.engines: dict[int, EngineRecord] = {}
        self.requests: dict[str, Request] = {}
        self.calls = Calls()
        self._closing: dict[str, Request] = {}  # what ``close`` found unfinished
        self._narrowest: EngineInfo | None = None  # of the living engines
        self.closed: Callable[[], TszmqError] | None = None
        self.places = Places(max_inflight)
        self._epochs = 0
        self.batch_aborts = 0  # times that all batches were aborted
        self._rows: dict[int, Rows] = {}  # engine -> its last batch's, all of them placed on it
        self._shown: list[Wakeable] = []  # readers of rows that are remembered no more

    # -- engines

    def register(self, info: EngineInfo, now: float) -> int:
        """An engine is there: a new one, or a new incarnation of a dead one.

        Returns:
            Its epoch.
        """
        self._epochs += 1
        index = info.engine_index
        self.routing.add_engine(index)
        info = attrs.evolve(info, incarnation=self._epochs)
        self.engines[index] = EngineRecord(info, self._epochs, self._wire_ids.new(), now, now)
        self._rows.setdefault(index, Rows([], []))
        self._find_narrowest()
        return self._epochs

    def suspend(self, index: int, reason: str) -> bool:
        """No new requests for an engine that is dying; False when it is dead or unknown."""
        record = self.engines.get(index)
        if record is None or not record.info.alive:
            return False
        record.first_error = record.first_error or reason
        record.info = attrs.evolve(record.info, alive=False)
        self.routing.suspend_engine(index)
        self._find_narrowest()
        return True

    def mute(self, index: int) -> bool:
        """No new requests for an engine that cannot answer now, until ``unmute``; False when that
        was so before."""
        was_served = self.routing.is_alive(index)
        self.routing.suspend_engine(index)
        return was_served

    def unmute(self, index: int) -> None:
        """It can answer again, if it has not died meanwhile."""
        if self.engines[index].info.alive:
            self.routing.resume_engine(index)

    def infos(self) -> list[EngineInfo]:
        """Every engine's registration, in order."""
        infos = [self.engines[index].info for index in sorted(self.engines)]
        return [attrs.evolve(i, alive=False) for i in infos] if self.closed else infos

    def alive_indices(self) -> list[int]:
        """Engines that are not dead or dying, in order; they may have no output connection now."""
        return sorted(index for index, record in self.engines.items() if record.info.alive)

    def _find_narrowest(self) -> None:
        alive = [record.info for record in self.engines.values() if record.info.alive]
        self._narrowest = narrowest(alive) if alive else None

    def limits(self, pinned: int | None) -> EngineInfo:
        """What a request has to fit: the pinned engine, or the narrowest of the living ones.

        Raises:
            ClientClosed, EngineDead, InvalidRank: As ``admit`` would.
        """
        if self.closed is not None:
            raise self.closed()
        if pinned is not None:
            return self.engines[self.routing.choose(0, pinned)].info
        if self._narrowest is None:
            raise all_dead()
        return self._narrowest

    def drop(self, index: int, epoch: int, end: End, now: float) -> list[Request] | None:
        """An engine is dead: end every request it held, each with an error of its own.

        Returns:
            Those requests; None when this incarnation was dropped before.
        """
        record = self.engines.get(index)
        if record is None or record.epoch != epoch or record.dropped:
            return None
        self.suspend(index, "dropped")
        record.dropped = True
        self._rows[index].spill()
        dropped = [self.requests[request_id] for request_id in self.routing.drop_engine(index)]
        for request in dropped:
            self._finish(request, end, now)
        self._show(self._rows[index])
        self._rows[index] = Rows([], [])  # it may never come back: hold nothing
        return dropped

    def health(self, now: float) -> dict[int, EngineHealth]:
        """One record an engine."""
        return {
            index: EngineHealth(
                engine_index=index,
                connected=self.routing.is_alive(index) and self.closed is None,
                inflight=self.routing.inflight(index),
                last_output=now - record.last_output,
                first_error=record.first_error or self._muted(index, record),
            )
            for index, record in sorted(self.engines.items())
        }

    def _muted(self, index: int, record: EngineRecord) -> str | None:
        """Why an engine that is not dead gets no requests."""
        gets_none = record.info.alive and not self.routing.is_alive(index)
        return "it lost its output connection" if gets_none else None

    # -- admission and release

    def admit(self, request: Request, pinned: int | None, now: float, ticket: Wakeable) -> bool:
        """Place a request; False when ``max_inflight`` is reached. True without a place when it
        was aborted before: then ``give_up`` the ticket.

        Args:
            request: Not yet admitted.
            pinned: The engine it must go to, or None.
            now: Monotonic seconds.
            ticket: Woken when its turn comes, after a False; then ask again, or ``give_up``.

        Raises:
            ClientClosed, EngineDead, InvalidRank: Nothing was reserved.
        """
        if self.closed is not None:
            raise self.closed()
        group = request.group
        if group is not None and group.aborts != self.batch_aborts:
            self._end_unplaced(request, now)
        if request.end is not None:
            return True
        if not self.places.has_one_for(ticket, len(self.requests)):
            self.places.wait(ticket, request)
            return False
        index = self.routing.choose(request.prompt_tokens, pinned)
        # Listed before the place is taken: whatever interrupts the rest, withdraw() undoes it.
        request.engine_index = index
        self.requests[request.wire_id] = request
        self.routing.place(index, request.wire_id, request.prompt_tokens)
        self.places.leave(ticket)
        request.admitted = now
        if self.routing.inflight(index) == 1:
            self.engines[index].busy_since = now
        return True

    def give_up(self, ticket: Wakeable) -> list[Wakeable]:
        """A ticket is not used; its turn goes to the next."""
        self.places.leave(ticket)
        return self.grant()

    def abort_waiting(self, requests: set[Request], now: float) -> list[Wakeable]:
        """Abort those of the requests that wait for a place. Returns their tickets, to wake."""
        waiting = self.places.waiting
        tickets = [ticket for ticket, request in waiting.items() if request in requests]
        for ticket in tickets:
            self._end_unplaced(waiting[ticket], now)
        return tickets

    @staticmethod
    def _end_unplaced(request: Request, now: float) -> None:
        if request.end is None:
            request.admitted = request.ended = now
            request.end = ABORTED

    def grant(self) -> list[Wakeable]:
        """Whose turn it is, after places were freed."""
        return self.places.grant(len(self.requests))

    def withdraw(self, request: Request, end: End, now: float) -> bool:
        """End a request from this side; False when it had ended or was never admitted."""
        if request.end is not None:
            return False
        if request.wire_id not in self.requests:
            return False
        index = request.engine_index
        rows = self._rows[index]
        if request.wire_id in rows:
            rows.spill()
        released = self.routing.release(index, request.wire_id, len(request.tokens))
        self._finish(request, end, now)
        if not released:
            # A signal cut off an earlier withdrawal: batches since then counted its tokens.
            rows.spill()
            mine = [each for each in self.requests.values() if each.engine_index == index]
            self.routing.recount(index, {each.wire_id: len(each.tokens) for each in mine})
        return True

    def doubt(self, index: int, reason: str, until: float) -> None:
        """Something that an engine sent will not come: where the wire does not count tokens, nobody
        can tell whether what ends from here on is whole, if it was sent before then."""
        for request in self.held(index, until):
            request.doubt = reason

    def held(self, index: int, until: float = math.inf) -> list[Request]:
        """What an engine has been sent until then and has not finished."""
        held = [self.requests[wire_id] for wire_id in self.routing.inflight_ids(index)]
        return [request for request in held if request.admitted <= until]

    def close(self, error: Callable[[], TszmqError]) -> list[Request]:
        """No new requests. Returns the unfinished ones, and those of earlier calls. Idempotent.

        Whoever waits for a place is to be woken, and leaves the queue by itself.
        """
        if self.closed is None:
            self.closed = error
        self._closing.update(self.requests)
        return list(self._closing.values())

    def _finish(self, request: Request, end: End, now: float) -> None:
        """The request is over. Its place is freed by the caller, under the same lock."""
        if request.streaming:
            request.publish()
        self._rows[request.engine_index].lose(request.wire_id)
        # No call from here to the end's being set: a signal that comes between must not lose it.
        del self.requests[request.wire_id]
        request.ended = now
        request.end = end
        group = request.group
        if group is not None:
            group.finished.append(request)
            if end.error is not None:
                group.failed = True

    # -- output

    def apply(self, batch: EngineBatch, now: float) -> Applied:
        """Store a batch: its tokens, its load, its finishes; all of it or nothing.

        Raises:
            DecodeError: A token id is not an int in [0, 2**32); nothing was stored.
        """
        ids = batch.request_ids
        rows = None if batch.engine_index is None else self._rows.get(batch.engine_index)
        if rows is None or not (ids is rows.ids or rows.are(ids) or rows.grow(ids, self.requests)):
            known, rows = self._resolve(batch)
            if not rows.requests:
                return Applied([], [], self._apply_load(batch, now))
            batch = known
        elif rows.take_step(batch):
            if batch.finished or rows.unstarted:
                return self._apply_step(rows, batch, now)
            self.routing.advance(rows.source, batch.load, len(rows.arrays))
            self.engines[rows.source].last_output = now
            rows.hidden = rows.nothing_to_do.hidden
            return rows.nothing_to_do
        else:
            rows.spill()
        rows.store(batch)
        rows.store_logprobs(batch)
        rows.store_details(batch)
        started = rows.start(now, batch.cached_tokens)
        if batch.weight_version is not None:
            rows.note_version(batch.weight_version, batch, started)
        ended = self._ends(rows, batch)
        gaps = [] if rows.count(batch) else self._find_gaps(rows, batch.rows_of_counts(), ended)
        self._commit(rows, batch, started, ended, now)
        for position in gaps:
            rows.take_back(position, batch.tokens_in(position))
        return self._deliver(rows, batch, ended, now)

    def _apply_step(self, rows: Rows, batch: EngineBatch, now: float) -> Applied:
        """The rest of ``apply`` for a batch whose tokens the rows have taken in one step, where
        requests start or end with it."""
        started = rows.start(now, batch.cached_tokens)
        rows.deal_to(batch.finished)
        ended = self._ends(rows, batch)
        self._commit(rows, batch, started, ended, now)
        return self._deliver(rows, batch, ended, now)

    def _resolve(self, batch: EngineBatch) -> tuple[EngineBatch, Rows]:
        """Whose rows these are; without those of requests that are not (or no longer) ours."""
        found = list(map(self.requests.get, batch.request_ids))
        if None in found:
            batch = only_rows(batch, [i for i, row in enumerate(found) if row is not None])
        rows = Rows(batch.request_ids, [row for row in found if row is not None])
        for index in rows.sources:  # mostly the one that the batch names
            self._rows[index].disturb(rows.ids)
        if len(rows.sources) == 1:
            before = self._rows[rows.source]
            # The first tokens of a few new requests may come by themselves: keep the others.
            if not len(rows.ids) < _FEW <= len(before.ids):
                before.spill()
                self._show(before)
                self._rows[rows.source] = rows
        return batch, rows

    @staticmethod
    def _ends(rows: Rows, batch: EngineBatch) -> dict[int, End]:
        """Row number to how that row's request ended."""
        ends: dict[int, End] = {}
        counted = batch.one_each is not None or batch.completion_tokens is not None
        for position, reason in batch.finished.items():
            row = rows.requests[position]
            if row.doubt is not None and not counted:
                ends[position] = output_lost(row.engine_index, row.doubt)
            else:
                ends[position] = ending(row, reason)
            if batch.cached_tokens is not None:
                row.cached_tokens = batch.cached_tokens[position]
        return ends

    @staticmethod
    def _find_gaps(rows: Rows, counts: list[int] | None, ended: dict[int, End]) -> list[int]:
        """A row that counts more tokens than arrived has lost a message: end it with that."""
        if counts is None:  # the wire does not tell
            return []
        gaps = [at for at, count in enumerate(counts) if count > len(rows.arrays[at])]
        for position in gaps:
            ended[position] = tokens_lost(counts[position], abort=position not in ended)
        return gaps

    def _commit(
        self,
        rows: Rows,
        batch: EngineBatch,
        started: list[Request],
        ended: dict[int, End],
        now: float,
    ) -> None:
        """Load and releases in one step. The rows tell whose batch it is: ids are secret to the
        engine that got them, while old senders name no engine and a broken one the wrong one."""
        source = rows.source
        load = batch.load if source == batch.engine_index else None
        finished = [rows.requests[position] for position in ended]
        if len(rows.sources) == 1:
            self._commit_to(source, load, started, batch.num_tokens(), finished)
        else:  # a broken sender: every engine's figures stay its own
            for index in rows.sources:
                mine = [i for i, row in enumerate(rows.requests) if row.engine_index == index]
                self._commit_to(
                    index,
                    load if index == source else None,
                    [row for row in started if row.engine_index == index],
                    sum(map(batch.tokens_in, mine)),
                    [row for row in finished if row.engine_index == index],
                )
        self.engines[source].last_output = now

    def _commit_to(
        self,
        index: int,
        load: EngineLoad | None,
        started: list[Request],
        generated: int,
        finished: list[Request],
    ) -> None:
        self.routing.commit(
            index,
            load,
            [row.wire_id for row in started],
            generated,
            [(row.wire_id, len(row.tokens)) for row in finished],
        )

    def _deliver(
        self, rows: Rows, batch: EngineBatch, ended: dict[int, End], now: float
    ) -> Applied:
        """Show readers what came, and end what ended."""
        wakes: list[Wakeable] = []
        owed: list[Request] = []
        requests = rows.requests
        rows.hidden = hidden = bool(rows.streams)
        ids = rows.ids
        for position, end in ended.items():
            row = requests[position]
            if row.end is None:
                self._finish(row, end, now)
                if end.abort:
                    owed.append(row)
                if row.group is None or row.group.is_worth_waking():
                    wakes.append(row.gate)
        if ended:
            wakes += self.grant()
            rows.drop(ended, ids)
        if self._rows.get(rows.source) is not rows:
            self._show(rows)
        return Applied(wakes, owed, rows.source, hidden)

    def reveal(self) -> list[Wakeable]:
        """Show readers what was stored since the last call. Returns whom to wake for it.

        Once for as many batches as are ready: a reader that is woken for each token costs more
        than everything else together.
        """
        for rows in self._rows.values():
            if rows.hidden:
                rows.spill()
                self._show(rows)
        shown, self._shown = self._shown, []
        return shown

    def _show(self, rows: Rows) -> None:
        if rows.hidden:
            rows.hidden = False
            self._shown += rows.publish()

    def _apply_load(self, batch: EngineBatch, now: float) -> int | None:
        """A batch without a row of ours: believed only from an engine that works for us.

        Stale engines of an earlier client, and the predecessor of a restarted one, send batches
        too. Their ids are not ours, or older than the engine that has their index now.
        """
        index = batch.engine_index
        record = None if index is None else self.engines.get(index)
        if index is None or record is None or not record.info.alive:
            return None
        if not all(self._wire_ids.since(wire_id, record.born) for wire_id in batch.request_ids):
            return None
        # A rank of a lockstep group that parks says that it does nothing.
        if not any(isinstance(signal, WaveComplete) for signal in batch.signals):
            record.last_output = now
        self.routing.commit(index, batch.load)
        return index


def narrowest(infos: list[EngineInfo]) -> EngineInfo:
    """The strictest limits of all, by the name of the engine that has the shortest: an unpinned
    request may go to any of them."""
    lengths = [info.max_model_len for info in infos if info.max_model_len > 0]
    caches = [i.kv_cache_size_tokens for i in infos if i.kv_cache_size_tokens is not None]
    return attrs.evolve(
        min(infos, key=_longest),
        max_model_len=min(lengths, default=0),
        kv_cache_size_tokens=min(caches, default=None),
    )


def _longest(info: EngineInfo) -> float:
    """How many tokens a sequence can have there at most, as far as the engine said."""
    limits = [info.max_model_len, info.kv_cache_size_tokens]
    return min((limit for limit in limits if limit is not None and limit > 0), default=math.inf)
