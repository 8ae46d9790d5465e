"""Many requests driven by one thread: the batch calls of the client."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from tszmq.checks import shown, whole_number
from tszmq.core.endings import deadline_passed
from tszmq.core.request import ABORTED, Group, Request
from tszmq.errors import ClientClosed, DeadlineExceeded, ForkedClient, InvalidRequest, TszmqError
from tszmq.net.gate import Gate
from tszmq.net.mailbox import Run, Settle
from tszmq.net.submit import Prepared, admit, expire_at, give_up, send, withdraw_all
from tszmq.ownership import holds_a_lock
from tszmq.prepare import check_timeout
from tszmq.progress import PROGRESS_SECONDS, meter
from tszmq.prompts import Prompts
from tszmq.types import TokenChunk

if TYPE_CHECKING:
    from tszmq.client import Client

__all__ = ["as_completed", "generate_many", "stream_many"]

_PACKAGE = __name__.partition(".")[0]
_WINDOW = 1024  # requests in flight of one call, unless the engines run more


def generate_many(
    client: Client,
    prompts: Iterable[object],
    params: object,
    timeout: float | None,
    max_inflight: int | None,
    errors: str,
    progress: object,
) -> list[Any]:
    """See ``Client.generate_many``."""
    batch = _Batch(client, prompts, params, timeout, max_inflight, errors, progress)
    results: list[Any] = []
    try:
        for index, outcome in batch.outcomes():
            if index >= len(results):
                results.extend([None] * (index + 1 - len(results)))
            results[index] = outcome
    finally:
        batch.abort_rest()
    return results


def as_completed(
    client: Client,
    prompts: Iterable[object],
    params: object,
    timeout: float | None,
    max_inflight: int | None,
    errors: str,
    progress: object,
) -> Iterator[tuple[int, Any]]:
    """See ``Client.as_completed``. Arguments are checked at the call, not at the first next()."""
    batch = _Batch(client, prompts, params, timeout, max_inflight, errors, progress, eager=True)
    return _iterate(batch)


def stream_many(
    client: Client,
    prompts: Iterable[object],
    params: object,
    timeout: float | None,
    max_inflight: int | None,
    errors: str,
) -> Iterator[tuple[int, Any]]:
    """See ``Client.stream_many``. Arguments are checked at the call, as above."""
    batch = _Batch(
        client, prompts, params, timeout, max_inflight, errors, False, eager=True, chunks=True
    )
    return _iterate(batch)


def _iterate(batch: _Batch) -> Iterator[tuple[int, Any]]:
    try:
        for outcome in batch.outcomes():
            yield outcome
            batch.check_process()
    finally:
        batch.abort_rest()


class _Batch:
    """One batch call: pulls prompts while there is room, hands out what ended.

    Only the calling thread uses it; the receiver sees its ``Group``.
    """

    def __init__(
        self,
        client: Client,
        prompts: Iterable[object],
        params: object,
        timeout: float | None,
        max_inflight: int | None,
        errors: str,
        progress: object,
        *,
        eager: bool = False,
        chunks: bool = False,
    ) -> None:
        if errors not in ("raise", "return"):
            raise InvalidRequest(f"errors must be 'raise' or 'return', got {shown(errors)}")
        client._session.check_caller()
        self._session = client._session
        self._preparer = client._preparer
        self._timeout = timeout
        self._deadline = None
        if timeout is not None:
            self._deadline = time.monotonic() + check_timeout(timeout, "timeout")
        self._prompts = Prompts(prompts, params, self._session.check_process)
        self._total = self._prompts.total
        self._window = _window(client, max_inflight)
        self._meter = meter(progress)
        self._return_errors = errors == "return"
        self._eager = eager  # hand out each as soon as it ends
        self._chunks = chunks  # hand out chunks, too
        self._taken: dict[int, int] = {}  # of those that stream: tokens handed out
        self._gate = Gate()
        self._ticket = _Ticket(self._gate)
        with self._session.shared.state as flights:
            self._group = Group(self._gate, flights.batch_aborts)
        self._unfinished: dict[int, Request] = {}
        self._settled: deque[tuple[int, Any]] = deque()  # ended, not handed out
        # Those that will not be pulled, of which there may be millions, and why.
        self._given_up = range(0)
        self._why: Callable[[], Exception] | None = None
        self._held: Prepared | None = None  # no place yet
        self._queued = False  # the ticket may be in the queue, or granted a place
        self._exhausted = False  # no more are pulled
        self._cut_off = False  # by the deadline; prompts may be left that nobody has counted
        self._told = False  # by some outcome
        self._done = 0
        self._thread = threading.get_ident()  # the last that asked for an outcome

    # -- the loop

    def outcomes(self) -> Iterator[tuple[int, Any]]:
        """(index, Completion or exception) as they end."""
        try:
            while True:
                self._thread = threading.get_ident()
                self._session.check_caller()
                if self._is_late():
                    self._expire()
                self._fill()
                if self._settled or self._given_up:
                    yield from self._settle()
                    continue
                if self._exhausted and not self._unfinished and self._held is None:
                    if self._is_cut_short():
                        continue
                    if not self._prompts.pulled:  # nothing else has told
                        self._session.raise_if_closed()
                    return
                if not self._wait():
                    self._expire()
                self._collect()
        finally:
            # Else the collector ends this, wherever it runs.
            if self._thread == threading.get_ident() and not holds_a_lock():
                self._report(last=True)

    def _fill(self) -> None:
        """Send prompts while there is room."""
        while len(self._unfinished) < self._window:
            # What has ended is handed out first, however slowly the prompts come.
            if self._has_news() or self._is_late():
                return
            if self._held is None and not self._pull():
                return
            # A refused one is told first: there may be no end of them, and they take no place.
            # A late one is not sent: the caller's iterators take the time they take.
            if self._held is None or self._is_late() or not self._place(self._held):
                return

    def _pull(self) -> bool:
        """Prepare the next prompt; False when there is none."""
        if self._exhausted:
            return False
        index, prompt = self._prompts.pull()
        if index < 0:
            self._exhausted = True
            self._prompts.check_end()
            return False
        if self._total is None:  # it was not there to be aborted before
            with self._session.shared.state as flights:
                self._group.aborts = flights.batch_aborts
        params = self._prompts.params_of(index)
        try:
            self._held = self._preparer.prepare(
                prompt,
                params,
                label=None,
                rank=None,
                priority=None,
                gate=self._gate,
                chunks=self._chunks or self._deadline is not None,
                streaming=self._chunks,
                group=self._group,
                position=index,
            )
        except Exception as error:  # a prompt of the caller's making may raise anything
            if hasattr(prompt, "__index__") and not hasattr(prompt, "__len__"):
                error.add_note("each prompt is a sequence of token ids; for one, call generate")
            self._fail(index, error)
        return True

    def _place(self, prepared: Prepared) -> bool:
        """Send the prepared request; False when the client has no place for it now, or it got
        none because it failed or was aborted: that is told first, there may be no end of them.
        """
        request = prepared.request
        # Listed first: whatever interrupts the next lines, the request is aborted.
        self._unfinished[request.position] = request
        self._queued = True
        try:
            placed = admit(self._session, prepared, self._ticket)
        except TszmqError as error:
            placed, self._held = True, None
            self._leave_queue()
            self._fail(request.position, error)
        else:
            if placed and request.engine_index < 0:  # aborted
                self._leave_queue()
                self._end(request)
            elif placed:
                self._queued = False
                send(self._session, prepared)
                if self._deadline is not None and self._timeout is not None:
                    # This thread may be in the caller's code by then.
                    expire_at(self._session, request, self._deadline, self._timeout)
        if placed:
            self._held = None
        if request.engine_index < 0:
            del self._unfinished[request.position]
        return request.engine_index >= 0

    def _fail(self, index: int, error: Exception) -> None:
        """A prompt that was never sent. After a close, so are all that follow."""
        self._settled.append((index, error))
        if isinstance(error, (ClientClosed, ForkedClient)):
            self._give_up_rest(partial(_again, error))

    def _give_up_rest(self, error: Callable[[], Exception]) -> None:
        """No more prompts are pulled; where their number is known, each gets an error."""
        self._exhausted = True
        held, self._held = self._held, None
        if held is not None:
            self._settled.append((held.request.position, error()))
        rest = self._prompts.skip_rest()
        if rest:
            self._given_up, self._why = rest, error

    def _wait(self) -> bool:
        """Wait until enough has ended, or it is time to report; False when time is over."""
        self._group.wake_at = self._worth_waking()
        limit = self._deadline
        if self._meter is not None:
            limit = min(limit or math.inf, time.monotonic() + PROGRESS_SECONDS)
        if not self._gate.wait(self._has_news, limit):
            self._report()
        return not self._is_late()

    def _is_late(self) -> bool:
        return self._deadline is not None and time.monotonic() >= self._deadline

    def _worth_waking(self) -> int:
        """A wake costs more than a finish: take several at once where nobody waits for one."""
        if self._eager:
            return 1
        if self._exhausted and self._held is None:
            return len(self._unfinished)
        return max(1, min(self._window // 64, len(self._unfinished)))

    def _has_news(self) -> bool:
        group = self._group
        return self._ticket.woken or bool(group.touched) or group.is_worth_waking()

    def _collect(self) -> None:
        """Take what has ended."""
        self._ticket.woken = False
        group = self._group
        group.failed = False  # before looking: what ends from here on sets it again
        while group.touched:
            request = group.touched.popleft()
            if request.position in self._unfinished and request.end is None:
                self._take_chunk(request)
        while group.finished:
            request = group.finished.popleft()
            if self._unfinished.pop(request.position, None) is not None:
                self._end(request)

    def _end(self, request: Request) -> None:
        try:
            result = request.result()
        except TszmqError as error:
            self._take_chunk(request)
            self._settled.append((request.position, error))
            if isinstance(error, ClientClosed):
                self._give_up_rest(partial(_again, error))
        else:
            if self._chunks:
                self._take_chunk(request, result.finish_reason)
            else:
                self._settled.append((request.position, result))
        self._taken.pop(request.position, None)

    def _take_chunk(self, request: Request, finish_reason: str | None = None) -> None:
        """What came for a request since its last chunk, where chunks are handed out."""
        if not self._chunks:
            return
        start = self._taken.get(request.position, 0)
        if finish_reason is not None or request.visible > start:
            chunk = request.chunk(start, finish_reason)
            self._settled.append((request.position, chunk))
            # Not what is visible by now: more may have come since the chunk was made.
            self._taken[request.position] = chunk.completion_tokens

    def _expire(self) -> None:
        timeout = self._timeout
        assert timeout is not None
        withdraw_all(self._session, list(self._unfinished.values()), deadline_passed(timeout))
        self._cut_off |= self._total is None and not self._exhausted
        self._give_up_rest(partial(_too_late, timeout))

    def _is_cut_short(self) -> bool:
        """Whether a prompt was left although no outcome tells of the deadline: then that prompt's
        does, or the batch would look whole."""
        if self._told or not self._cut_off:
            return False
        self._cut_off = False
        index, _ = self._prompts.pull()
        if index < 0:
            return False
        self._settled.append((index, _too_late(self._timeout)))
        return True

    def _settle(self) -> Iterator[tuple[int, Any]]:
        """Hand out what has ended, or raise the first error."""
        if self._eager:
            self._leave_queue()
        while self._settled or self._given_up:
            index, outcome = self._next_settled()
            self._told |= isinstance(outcome, DeadlineExceeded)
            if not isinstance(outcome, TokenChunk) or outcome.finish_reason is not None:
                self._done += 1
            if isinstance(outcome, Exception):
                if not self._return_errors:
                    outcome.add_note(f"this is about prompts[{index}] of the call")
                    raise outcome
                _let_go(outcome)
            yield index, outcome
        self._report()

    def _next_settled(self) -> tuple[int, Any]:
        if self._settled:
            return self._settled.popleft()
        index, self._given_up = self._given_up[0], self._given_up[1:]
        assert self._why is not None
        return index, self._why()

    def check_process(self) -> None:
        """Raises ForkedClient in a forked child: what the caller waits for is not there."""
        self._session.check_process()

    def abort_rest(self) -> None:
        """Whatever happened: nothing of this call stays unfinished, and no place is queued for."""
        withdraw_all(self._session, list(self._unfinished.values()), ABORTED)
        self._unfinished.clear()
        give_up(self._session, self._ticket)
        self._queued = False

    def __del__(self) -> None:
        # A signal may cut off even the lines above.
        unfinished, queued = getattr(self, "_unfinished", None), getattr(self, "_queued", False)
        if not (unfinished or queued) or self._session.is_foreign():
            return
        mailbox = self._session.shared.mailbox
        if unfinished:
            mailbox.post(Settle(list(unfinished.values()), ABORTED))
        if queued:
            mailbox.post(Run(partial(give_up, self._session, self._ticket)))

    def _leave_queue(self) -> None:
        """The caller's code runs next, for as long as it likes: hold up nobody's turn. Whoever
        leaves goes to the end of the queue, and would never get a place if it did so for nothing.
        """
        if self._queued:
            give_up(self._session, self._ticket)
            self._queued = False
            self._ticket.woken = False

    def _report(self, *, last: bool = False) -> None:
        if self._meter is None:
            return
        done = self._done + len(self._settled) + len(self._given_up) + len(self._group.finished)
        if self._meter.is_due(done, last):
            self._leave_queue()
            self._meter.show(done, self._total, last)
            if not last:
                self._session.check_process()


def _too_late(timeout: float | None) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"the batch's timeout of {timeout} s passed before this prompt was sent"
    )


def _let_go(error: Exception) -> None:
    """An error that is kept must not keep its prompt and this client, which the frames of a
    traceback do. One that the caller's own code raised keeps it: it says where."""
    innermost = error.__traceback__
    while innermost is not None and innermost.tb_next is not None:
        innermost = innermost.tb_next
    raised_in = innermost.tb_frame.f_globals.get("__name__", "") if innermost else ""
    if raised_in.partition(".")[0] == _PACKAGE:
        error.__traceback__ = None


def _again(error: Exception) -> Exception:
    """The same error as an object of its own."""
    return type(error)(*error.args)


class _Ticket:
    """A place in the client's queue; its turn wakes the batch's thread."""

    __slots__ = ("_gate", "woken")

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self.woken = False

    def wake(self) -> None:
        self.woken = True
        self._gate.wake()


def _window(client: Client, max_inflight: object) -> int:
    """How many requests the call keeps in flight."""
    if max_inflight is not None:
        window = whole_number(max_inflight, "max_inflight", or_none=True)
        if window < 1:
            raise InvalidRequest(f"max_inflight must be at least 1, got {shown(max_inflight)}")
        return window
    # Twice what the engines run, so that their queues never run dry.
    runs_at_most = client._session.shared.protocol.runs_at_most
    running = sum(runs_at_most(info) for info in client.engines if info.alive)
    return max(_WINDOW, 2 * running)
