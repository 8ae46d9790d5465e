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

_Name = tuple[str, int]  # host, empty for all of them, and port; or a path, and no port


def close_copies(addresses: Iterable[str]) -> None:
    """Close every socket of this process that has one of these local addresses."""
    names = {_name(address) for address in addresses}
    if not names:
        return
    with contextlib.suppress(OSError):  # this system has no such list
        for entry in os.listdir("/dev/fd"):
            with contextlib.suppress(OSError):  # the list's own descriptor, and odd kinds
                _close_if_named(int(entry), names)


def _close_if_named(descriptor: int, names: set[_Name]) -> None:
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        return
    borrowed = socket.socket(fileno=descriptor)
    try:
        found = borrowed.getsockname()
    finally:
        borrowed.detach()
    if isinstance(found, str):
        ours = (found, 0) in names
    else:
        # No other socket has a port that is bound at every address of the machine.
        host, port = found[:2]
        ours = (host, port) in names or ("", port) in names
    if ours:
        os.close(descriptor)


def _name(address: str) -> _Name:
    if not is_tcp(address):
        return ipc_path(address), 0
    host = tcp_host(address)
    return "" if is_wildcard(host) else host, int(address.rpartition(":")[2])
