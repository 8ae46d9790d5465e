"""What a client's threads and callers share. Threads hold this, never the client.

The locks of a client, outermost first; nothing else is ever locked:

    ``Level.READERS``  one a stream: its read position
    ``Level.STATE``    ``Shared.state``: requests, load and in-flight ids, together

Its threads, and what each owns:

    ``tszmq-receiver``  the output socket: blocks, decodes, applies, wakes
    ``tszmq-control``   every other socket: sends requests and aborts, greets engines, watches
                        connections and clocks, ends what the two of them began

Callers own no socket. They validate, encode, take a place under ``state``, post to ``mailbox``
and wait at a ``Gate`` while they hold nothing.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import attrs

from tszmq.core.endings import closed_by
from tszmq.core.flights import Flights
from tszmq.core.request import End, Request, Wakeable
from tszmq.errors import ClientClosed, TszmqError
from tszmq.net.gate import Gate
from tszmq.net.mailbox import Abort, Mailbox, Stop
from tszmq.ownership import Mutex
from tszmq.wire.base import WireProtocol

__all__ = ["Readiness", "Shared", "wake_all"]


@attrs.frozen
class Readiness:
    """How far the start-up is; replaced whole by the control thread, read by anyone.

    Attributes:
        missing: Engines that have not registered.
        text: Who is missing and why, for people.
        advice: What they may do about it.
        failed: What an engine said that failed to start, or None.
    """

    missing: int
    text: str
    advice: str
    failed: str | None = None


@attrs.define(eq=False)
class Shared:
    """One client's common ground.

    Attributes:
        state: The one lock and what it owns.
        mailbox: To the control thread.
        protocol: The wire in use.
        readiness: The start-up, for whoever waits for engines at ``arrivals``.
        arrivals: Woken when an engine registers, dies or fails to start.
        receiver_ended: The receiver has closed its socket. (``Thread.join`` would not do: before
            Python 3.13 a join that a signal interrupts declares the thread dead.)
        ended: Everything is taken down.
        pid: The process that the threads live in.
    """

    state: Mutex[Flights]
    mailbox: Mailbox
    protocol: WireProtocol
    readiness: Readiness
    arrivals: Gate = attrs.field(factory=Gate)
    receiver_ended: threading.Event = attrs.field(factory=threading.Event)
    ended: threading.Event = attrs.field(factory=threading.Event)
    pid: int = attrs.field(factory=os.getpid)

    def settle(self, requests: Sequence[Request], end: End) -> list[Wakeable]:
        """End those that have not ended. Returns everyone to be woken for all of them, also
        when another thread ended them and was cut off before it woke anybody."""
        now = time.monotonic()
        with self.state as flights:
            for request in requests:
                flights.withdraw(request, end, now)
            flights.grant()
            granted = flights.places.granted()
        return granted + [request.gate for request in requests if request.end is not None]

    def close(self, error: Callable[[], TszmqError]) -> list[Request]:
        """No new requests; end the unfinished ones and wake every waiter. Idempotent.

        Returns:
            What it has ever ended: to be aborted.
        """
        now = time.monotonic()
        end = closed_by(error)
        with self.state as flights:
            ended = flights.close(error)
            for request in ended:
                flights.withdraw(request, end, now)
            waiting = flights.places.everyone()
            waiting += flights.calls.fail(flights.calls.unanswered(), error)
        wake_all(waiting)
        wake_all(request.gate for request in ended)
        self.arrivals.wake()
        return ended

    def abandon(self, error: Callable[[], TszmqError]) -> None:
        """The process ends: abort what is unfinished at the engines, and wake nobody. Whoever
        waits in a daemon thread would only have its error printed while everything ends."""
        with self.state as flights:
            unfinished = flights.close(error)
        self.abort_ended(unfinished)

    def fail(self, what: str, cause: BaseException) -> None:
        """A thread of ours cannot go on: tell every waiter why."""

        def error() -> TszmqError:
            closed = ClientClosed(f"{what} failed, the client is closed: {cause!r:.500}")
            closed.__cause__ = cause
            return closed

        try:
            self.abort_ended(self.close(error))
        except BaseException:  # the state itself is what is broken: nobody shall wait for it
            self._let_go(error)
        self.mailbox.post(Stop())  # the other thread frees the addresses

    def _let_go(self, error: Callable[[], TszmqError]) -> None:
        """End what ``close`` could not; its places at the engines are not given back."""
        end = closed_by(error)
        with self.state as flights:
            ended = list(flights.requests.values())
            flights.requests.clear()
            for request in ended:
                request.end = end
                if request.group is not None:
                    request.group.finished.append(request)
                    request.group.failed = True
            waiting = flights.places.everyone()
            waiting += flights.calls.fail(flights.calls.unanswered(), error)
        wake_all([*waiting, *(request.gate for request in ended)])
        self.arrivals.wake()

    def abort_ended(self, ended: Sequence[Request]) -> None:
        """Abort what ended here but may go on at its engine."""
        if ended:
            self.mailbox.post(Abort(list(ended)))


def wake_all(gates: Iterable[Wakeable]) -> None:
    """Wake each; under no lock."""
    for gate in gates:
        gate.wake()
