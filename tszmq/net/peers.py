"""Which engine is at the other end of a connection."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from collections.abc import Iterator, Sequence

CLOSED = -1

__all__ = ["CLOSED", "Attribution", "Connections", "inode", "local_host", "peer_pid"]


@contextlib.contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket]:
    """The socket with that descriptor, which somebody else has and closes.

    Not a duplicate: the descriptor may be that of a file by now, and whoever closes a duplicate
    of a file gives up the locks that the process has on it.
    """
    if fd < 0:  # no descriptor, which would be a ValueError
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    blocks = os.get_blocking(fd)
    borrowed = socket.socket(fileno=fd)
    try:
        if os.get_blocking(fd) != blocks:  # socket.setdefaulttimeout() is for new sockets
            os.set_blocking(fd, blocks)
        yield borrowed
    finally:
        borrowed.detach()


def peer_pid(fd: int) -> int | None:
    """The process at the other end of a local socket.

    Returns:
        None where the kernel does not say, ``CLOSED`` for a connection that is gone.

    Args:
        fd: A descriptor of libzmq's, which may close it meanwhile.
    """
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return None
    try:
        with _borrowed(fd) as connection:
            if connection.family != socket.AF_UNIX:
                return None
            credentials = connection.getsockopt(socket.SOL_SOCKET, option, struct.calcsize("3i"))
    except OSError:
        return CLOSED
    pid: int = struct.unpack("3i", credentials)[0]
    return pid or None


def local_host(fd: int) -> str | None:
    """Our own address on a tcp connection: the one that its peer can reach us at."""
    try:
        with _borrowed(fd) as connection:
            if connection.family not in (socket.AF_INET, socket.AF_INET6):
                return None
            host: str = connection.getsockname()[0]
    except OSError:
        return None
    return f"[{host}]" if ":" in host else host


def inode(fd: int) -> int | None:
    """What the descriptor is now: every socket has an inode number of its own, while descriptors
    are given again as soon as they are closed. None when it is closed."""
    try:
        return os.fstat(fd).st_ino
    except OSError:
        return None


class Connections:
    """Numbers that name connections, where descriptors would name their successors, too."""

    def __init__(self) -> None:
        self._seen: dict[int, set[int]] = {}  # fd -> numbers of the connections it was
        self._gone = 0

    def number(self, fd: int, is_open: bool) -> int:
        """The number of the connection that a message has just come on.

        Args:
            fd: Its descriptor.
            is_open: Whether that socket still has a connection there.
        """
        found = inode(fd) if is_open else None
        if found is None:  # closed before its last message was read
            self._gone -= 1
            found = self._gone
        self._seen.setdefault(fd, set()).add(found)
        return found

    def closed(self, fd: int) -> list[int]:
        """One of them at that descriptor was closed: those that are not there any more.

        libzmq reports the end of a connection just before it closes the descriptor: look again
        a little later when this names none.
        """
        seen = self._seen.get(fd, set())
        there = inode(fd)
        gone = [number for number in seen if number != there]
        seen.difference_update(gone)
        if not seen:
            self._seen.pop(fd, None)
        return gone

    def descriptors(self) -> list[int]:
        """Where connections were seen and not reported closed."""
        return list(self._seen)


class Attribution:
    """Which connection of the output socket is which engine's.

    Nothing on the wire says so before an engine's first readable batch. Until then a local
    connection is known by its process, which also holds the engine's input connection.
    """

    def __init__(self) -> None:
        self._fds: dict[int, int] = {}  # engine index -> fd
        self._engines: dict[int, int] = {}  # fd -> engine index
        self._inodes: dict[int, int | None] = {}  # fd -> what it was when it was learnt
        self._pids: dict[int, int | None] = {}

    def join(self, index: int, pid: int | None) -> None:
        """An engine registered."""
        self.forget(index)
        self._pids[index] = pid

    def forget(self, index: int) -> None:
        """Its output connection is not known (any more)."""
        fd = self._fds.pop(index, None)
        if fd is not None and self._engines.get(fd) == index:  # not another's since
            del self._engines[fd], self._inodes[fd]

    def knows(self, index: int) -> bool:
        """Whether the engine's connection is known."""
        return index in self._fds

    def is_known(self, fd: int) -> bool:
        """Whether batches of an engine came on that connection."""
        return fd in self._engines

    def is_of(self, fd: int, index: int) -> bool:
        """Whether the connection is known to be that engine's."""
        if fd in self._engines or index in self._fds:
            return self._engines.get(fd) == index
        pid = peer_pid(fd)
        return pid not in (None, CLOSED) and pid == self._pids.get(index)

    def learn(self, index: int, fd: int) -> None:
        """A readable batch of the engine came on that connection."""
        self.forget(index)
        self._fds[index] = fd
        self._engines[fd] = index
        self._inodes[fd] = inode(fd)

    def closed(self, fd: int, pid: int | None = None, alive: Sequence[int] = ()) -> int | None:
        """A connection of that process closed a moment ago; the engine whose it was, when known."""
        index = self._engines.get(fd)
        there = inode(fd)
        if index is None and pid not in (None, CLOSED):
            # Its first message may have been what ended it.
            silent = [i for i in alive if i not in self._fds and self._pids.get(i) == pid]
            return silent[0] if len(silent) == 1 else None
        if index is None or (there is not None and there == self._inodes[fd]):
            return None  # nobody's, or that of a predecessor at the same descriptor
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
