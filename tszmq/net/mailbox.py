"""What other threads, and finalizers, want the control thread to do.

Posting is a C-level append and one non-blocking byte: it takes no lock and touches no ZMQ
socket, so a finalizer may do it wherever the garbage collector runs it.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable
from typing import Any

import attrs

from tszmq.core.request import End, Request
from tszmq.wire.base import StartWave, WaveComplete

__all__ = [
    "Abort",
    "Add",
    "Answered",
    "Call",
    "Dropped",
    "Expire",
    "Mailbox",
    "Run",
    "Settle",
    "Stop",
    "Suspect",
    "Wave",
]


@attrs.frozen(eq=False)
class Add:
    """Send a request to its engine, unless it has ended meanwhile."""

    request: Request
    frames: list[bytes]


@attrs.frozen(eq=False)
class Abort:
    """Tell an engine to stop these requests, which have ended here."""

    requests: list[Request]


@attrs.frozen(eq=False)
class Settle:
    """See these requests end: free their places, wake who waits, abort what was sent.

    Posted before the poster does what of it cannot wait, and harmless after that: a signal may
    cut the poster off anywhere. Finalizers post it and do nothing else.
    """

    requests: list[Request]
    end: End


@attrs.frozen(eq=False)
class Run:
    """Call that: what a finalizer may not do where the collector runs it."""

    action: Callable[[], object]


@attrs.frozen(eq=False)
class Answered:
    """Calls of engines were answered, or given up: a lockstep group may heed now what it did not
    before."""


@attrs.frozen(eq=False)
class Expire:
    """End a request with DeadlineExceeded at that time, whether anybody reads or not."""

    deadline: float
    timeout: float
    request: Request


@attrs.frozen(eq=False)
class OutputLost:
    """What an engine sent will not be read, for that reason, while its connection is there."""

    engine_index: int
    reason: str


@attrs.frozen(eq=False)
class Learnt:
    """An engine was heard on the output connection at that descriptor."""

    engine_index: int
    fd: int


@attrs.frozen(eq=False)
class Suspect:
    """The receiver saw a death that names nobody.

    Attributes:
        reason: For the error.
        fd: The connection in question.
        unreadable: Whether its messages could not be read.
        sole: The only engine that it may have been, as far as the receiver knows.
    """

    reason: str
    fd: int
    unreadable: bool
    sole: int | None


@attrs.frozen(eq=False)
class Call:
    """Send a utility call, whose answer is waited for."""

    engine_index: int
    frames: list[bytes]


@attrs.frozen(eq=False)
class Wave:
    """A lockstep group said where its waves are."""

    signal: WaveComplete | StartWave


@attrs.frozen(eq=False)
class Dropped:
    """The receiver has ended everything that a dead engine held."""

    engine_index: int
    epoch: int
    reason: str
    requests: list[Request]


@attrs.frozen(eq=False)
class Stop:
    """Close the client: abort what is unfinished, end both threads.

    Attributes:
        quiet: The process ends: callers that wait are not woken.
    """

    quiet: bool = False


_CROWD = 64  # items


class Mailbox:
    """Posts from any thread to the control thread."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._rung = False

    def post(self, item: object) -> None:
        """Hand over an item and wake the control thread; any thread, never blocks."""
        self._items.append(item)
        # No call stands between the flag and the byte, so no signal can come between them.
        if not self._rung:
            self._rung = True
            try:
                self._writer.send(b"\0")
            except OSError:  # full: it is awake anyway; closed: nobody is there any more
                pass

    def has_items(self) -> bool:
        """Whether something waits to be taken."""
        return bool(self._items)

    def is_crowded(self) -> bool:
        """Whether the control thread is far behind."""
        return len(self._items) > _CROWD

    def fileno(self) -> int:
        """For the control thread's poller."""
        return self._reader.fileno()

    def take(self) -> deque[Any]:
        """Everything posted so far; the control thread only."""
        try:
            while self._reader.recv(4096):
                pass
        except BlockingIOError:
            pass
        # Cleared before the items are taken: what is posted from here on rings again.
        self._rung = False
        return self._items

    def close(self) -> None:
        """The control thread has ended."""
        self._reader.close()
        self._writer.close()
