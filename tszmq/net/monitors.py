"""The connections of a socket, as libzmq tells of them: which are there, since when, and which
of them ended."""

from __future__ import annotations

import time
from collections.abc import Iterable

import attrs
import zmq
from zmq.utils.monitor import recv_monitor_message

from tszmq.net.peers import peer_pid

__all__ = ["Connection", "Monitor"]

_NOT_ZMTP = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


@attrs.define(eq=False)
class Connection:
    """One that a monitored socket accepted.

    Attributes:
        fd: Its descriptor, which others have before and after it.
        number: Which it was, in order; 0 when its beginning was not seen.
        since: When (monotonic seconds).
        pid: The process at the other end, where that was asked for and is known.
        speaks: It is not known that it never spoke ZMTP.
        owner: The engine that has been heard on it.
    """

    fd: int
    number: int = 0
    since: float = 0.0
    pid: int | None = None
    speaks: bool = True
    owner: int | None = None


class Monitor:
    """The connections of one socket.

    Made by the thread that binds, read and closed by the control thread. The owner of the
    monitored socket calls its ``disable_monitor()`` before it closes that.
    """

    def __init__(self, monitored: zmq.Socket[bytes], asks_who: bool = False) -> None:
        self._asks = asks_who
        self.socket: zmq.Socket[bytes] = monitored.get_monitor_socket(
            zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | _NOT_ZMTP
        )
        self.socket.setsockopt(zmq.LINGER, 0)
        self._open: dict[int, Connection] = {}  # by descriptor, in order of their numbers
        self._last: dict[int, Connection] = {}  # that closed, by descriptor
        self._accepted = 0
        self._failing = False  # the next to close is one that never spoke ZMTP
        self._closed: list[Connection] = []

    def _read(self) -> None:
        while self.socket.poll(0):
            event = recv_monitor_message(self.socket, zmq.NOBLOCK)
            fd = event["value"]
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._accepted += 1
                pid = peer_pid(fd) if self._asks else None
                self._open.pop(fd, None)  # or it would keep the place of the one before
                self._open[fd] = Connection(fd, self._accepted, time.monotonic(), pid)
            elif event["event"] == zmq.EVENT_DISCONNECTED:
                gone = self._open.pop(fd, None) or Connection(fd)
                gone.speaks, self._failing = not self._failing, False
                self._last[fd] = gone
                self._closed.append(gone)
            else:  # libzmq's one thread reports it just before that connection's end
                self._failing = True

    def closed(self) -> list[Connection]:
        """Connections that closed since the last call."""
        self._read()
        closed, self._closed = self._closed, []
        return closed

    def has_news(self) -> bool:
        """Whether another question met the end of a connection that has not been reported."""
        return bool(self._closed)

    def is_open(self, fd: int) -> bool:
        """Whether this socket has a connection at that descriptor now."""
        self._read()
        return fd in self._open

    def at(self, fd: int) -> Connection | None:
        """The connection at that descriptor, or the last there was."""
        self._read()
        return self._open.get(fd) or self._last.get(fd)

    def connections(self) -> Iterable[Connection]:
        """Those that are open, in order of their numbers."""
        self._read()
        return self._open.values()

    def num_accepted(self) -> int:
        """How many connections have been accepted so far."""
        self._read()
        return self._accepted

    def close(self) -> None:
        """Stop reading."""
        self.socket.close(0)
