"""What a forked child does with its copies of a client's sockets: closes them.

Nobody uses them there: the threads are the parent's. But a copy of a listening one keeps its
address bound after the parent has closed the client, and one of a connection keeps it open, so
that the engine at its other end does not see that it ended.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterable

from tszmq.net.addresses import ipc_path, is_tcp, is_wildcard, tcp_host

__all__ = ["close_copies"]

_Name = tuple[int, str, int]  # family; host, empty for all of them, or path; port


def close_copies(addresses: Iterable[str]) -> None:
    """Close every listening or accepted socket of this process that has one of these local
    addresses. For a process with one thread."""
    names = {_name(address) for address in addresses}
    if not names:
        return
    # A socket object made from a descriptor would else have the timeout that sockets have here:
    # the descriptor would not block any more, nor would the parent's.
    timeout = socket.getdefaulttimeout()
    socket.setdefaulttimeout(None)
    try:
        with contextlib.suppress(OSError):  # this system has no such list
            for entry in os.listdir("/dev/fd"):
                with contextlib.suppress(OSError):  # the list's own descriptor, and odd kinds
                    _close_if_named(int(entry), names)
    finally:
        socket.setdefaulttimeout(timeout)


def _close_if_named(descriptor: int, names: set[_Name]) -> None:
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        return
    borrowed = socket.SocketType(fileno=descriptor)
    try:
        family, kind, found = borrowed.family, borrowed.type, borrowed.getsockname()
    finally:
        borrowed.detach()
    if kind != socket.SOCK_STREAM:
        return
    if family == socket.AF_UNIX:
        ours = (family, found, 0) in names
    elif family in (socket.AF_INET, socket.AF_INET6):
        # A port that is bound at every address is nobody else's, among those of this family.
        host, port = found[0].partition("%")[0], found[1]
        ours = (family, host, port) in names or (family, "", port) in names
    else:
        return
    if ours:
        os.close(descriptor)


def _name(address: str) -> _Name:
    if not is_tcp(address):
        return socket.AF_UNIX, ipc_path(address), 0
    host = tcp_host(address).partition("%")[0]
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return family, "" if is_wildcard(host) else host, int(address.rpartition(":")[2])
