"""Which engine is at the other end of a connection."""

from __future__ import annotations

import os
import socket
import struct

CLOSED = -1

__all__ = ["CLOSED", "Attribution", "local_host", "peer_pid"]


def peer_pid(fd: int) -> int | None:
    """The process at the other end of a local socket.

    Returns:
        None where the kernel does not say, ``CLOSED`` for a connection that is gone.

    Args:
        fd: A descriptor of libzmq's; it is not closed, and may be closed meanwhile.
    """
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return None
    try:
        with socket.socket(fileno=os.dup(fd)) as duplicate:
            if duplicate.family != socket.AF_UNIX:
                return None
            credentials = duplicate.getsockopt(socket.SOL_SOCKET, option, struct.calcsize("3i"))
    except OSError:
        return CLOSED
    pid: int = struct.unpack("3i", credentials)[0]
    return pid or None


def local_host(fd: int) -> str | None:
    """Our own address on a tcp connection: the one that its peer can reach us at."""
    try:
        with socket.socket(fileno=os.dup(fd)) as duplicate:
            if duplicate.family not in (socket.AF_INET, socket.AF_INET6):
                return None
            host: str = duplicate.getsockname()[0]
    except OSError:
        return None
    return f"[{host}]" if ":" in host else host


class Attribution:
    """Which connection of the output socket is which engine's.

    Nothing on the wire says so before an engine's first readable batch. Until then a local
    connection is known by its process, which also holds the engine's input connection.
    """

    def __init__(self) -> None:
        self._fds: dict[int, int] = {}  # engine index -> fd
        self._engines: dict[int, int] = {}  # fd -> engine index
        self._pids: dict[int, int | None] = {}

    def join(self, index: int, pid: int | None) -> None:
        """An engine registered."""
        self.forget(index)
        self._pids[index] = pid

    def forget(self, index: int) -> None:
        """Its output connection is not known (any more)."""
        fd = self._fds.pop(index, None)
        if fd is not None:
            self._engines.pop(fd, None)

    def knows(self, index: int) -> bool:
        """Whether the engine's connection is known."""
        return index in self._fds

    def learn(self, index: int, fd: int) -> None:
        """A readable batch of the engine came on that connection."""
        self.forget(index)
        self._fds[index] = fd
        self._engines[fd] = index

    def closed(self, fd: int) -> int | None:
        """A connection closed; the engine whose it was, when known."""
        index = self._engines.get(fd)
        if index is not None:
            self.forget(index)
        return index

    def suspects(self, fd: int, alive: list[int]) -> list[int]:
        """The living engines whose connection that may be."""
        known = self._engines.get(fd)
        if known is not None:
            return [known] if known in alive else []
        pid = peer_pid(fd)
        if pid == CLOSED:
            return []  # an engine that lives has its connection
        return [
            index
            for index in alive
            if index not in self._fds and (pid is None or self._pids.get(index) in (None, pid))
        ]
