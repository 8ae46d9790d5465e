"""Addresses: which may be bound, and what of them belongs to us on disk."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import stat
import tempfile
import time
from collections.abc import Iterator

import zmq

from tszmq.errors import ConnectError, InvalidRequest
from tszmq.types import Endpoints

__all__ = [
    "IpcFiles",
    "binding_alone",
    "check_endpoints",
    "claim_ipc_path",
    "ipc_path",
    "is_tcp",
    "tcp_host",
]

_LOCK_SECONDS = 2.0  # binding takes some milliseconds

# sockaddr_un.sun_path less its terminator; libzmq reports 107 on Linux, 103 on macOS.
IPC_PATH_BYTES: int = zmq.IPC_PATH_MAX_LEN


def is_tcp(address: str) -> bool:
    """Whether the address is a tcp one."""
    return address.startswith("tcp://")


def tcp_host(address: str) -> str:
    """The host of ``tcp://host:port``, brackets of IPv6 removed."""
    return address[len("tcp://") :].rpartition(":")[0].strip("[]")


def has_only_ipv6(host: str) -> bool:
    """Whether none of a host's addresses is of IPv4, which is all that libzmq looks for unless told
    otherwise."""
    try:
        found = socket.getaddrinfo(host, None)
    except (OSError, ValueError):  # "*", a network interface, or no name at all
        return False
    return {family for family, *_ in found} == {socket.AF_INET6}


def is_wildcard(host: str) -> bool:
    """Whether a host stands for every address of the machine."""
    return host in ("0.0.0.0", "::", "*")


def ipc_path(address: str) -> str:
    """The path of ``ipc://path``."""
    return address[len("ipc://") :]


def is_loopback(host: str) -> bool:
    """Whether a host can only be reached from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_endpoints(endpoints: object, allow_remote: bool) -> Endpoints:
    """Validate what the caller gave, before anything is bound.

    Returns:
        The addresses, ipc paths absolute: engines may be started elsewhere, and the working
        directory be another when the file is removed. A relative path stays one where only
        that is short enough for a socket.

    Raises:
        TypeError, InvalidRequest: With the address and what is wrong with it.
    """
    if isinstance(endpoints, str):
        endpoints = Endpoints(endpoints)
    if not isinstance(endpoints, Endpoints):
        raise TypeError(
            f"endpoints must be an address (a str) or Endpoints, got {type(endpoints).__name__}"
        )
    for what in ("handshake", "input", "output"):
        address = getattr(endpoints, what)
        if address is not None or what == "handshake":
            _check_address(address, what, allow_remote)
    return Endpoints(
        _located(endpoints.handshake),
        endpoints.input and _located(endpoints.input),
        endpoints.output and _located(endpoints.output),
    )


def _located(address: str) -> str:
    if is_tcp(address):
        return address
    path = _absolute(ipc_path(address))
    return f"ipc://{path}" if len(os.fsencode(path)) <= IPC_PATH_BYTES else address


def _absolute(path: str) -> str:
    if os.path.isabs(path):
        return path
    directory, name = os.path.split(path)
    try:
        # Not abspath: it would take "link/.." for the working directory.
        return os.path.join(os.path.realpath(directory), name)
    except OSError:  # the working directory was removed: binding will say so
        return path


def _check_address(address: object, what: str, allow_remote: bool) -> None:
    if not isinstance(address, str):
        raise TypeError(f"the {what} address must be a str, got {type(address).__name__}")
    if is_tcp(address):
        _check_tcp(address, what, allow_remote)
    elif address.startswith("ipc://"):
        _check_ipc(ipc_path(address), what)
    else:
        raise InvalidRequest(
            f"the {what} address must begin with tcp:// or ipc://, got {address!r:.200}"
        )


def _check_tcp(address: str, what: str, allow_remote: bool) -> None:
    host, port = tcp_host(address), address.rpartition(":")[2]
    if not host or not (
        port == "*" or (port.isdecimal() and len(port) <= 5 and int(port) <= 65535)
    ):
        raise InvalidRequest(
            f"the {what} address must look like tcp://127.0.0.1:30500 or tcp://127.0.0.1:*, "
            f"got {address!r:.200}"
        )
    if not allow_remote and not is_loopback(host):
        raise InvalidRequest(
            f"the {what} address {address!r:.200} can be reached from other machines and the "
            "wire has no authentication: bind to 127.0.0.1, or say allow_remote=True"
        )


def _check_ipc(path: str, what: str) -> None:
    if not path or path.startswith(("@", "*")):
        raise InvalidRequest(
            f"the {what} address must name a file, such as ipc:///run/ts/handshake.sock: "
            f"got {path!r:.200}, which any user of this machine could reach"
        )
    if "\0" in path:
        raise InvalidRequest(f"the {what} path has a NUL character in it: {path!r:.200}")
    try:
        size = len(os.fsencode(path))
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"the {what} path cannot be a file's name: {error}") from None
    if size > IPC_PATH_BYTES:
        raise InvalidRequest(
            f"the {what} path is {size} bytes long, a socket's can have {IPC_PATH_BYTES}: "
            f"use a shorter directory than {path!r:.200}"
        )


@contextlib.contextmanager
def binding_alone(endpoints: Endpoints) -> Iterator[None]:
    """No other client is between its look at these ipc paths and its binding there.

    The directories themselves are locked, so that nothing is left on disk. Where that cannot
    be, or a program of somebody's keeps the lock, it is done without.
    """
    opened: dict[tuple[int, int], int] = {}  # by what they are: one may have several names
    try:
        for address in (endpoints.handshake, endpoints.input, endpoints.output):
            if address is not None and not is_tcp(address):
                _open_directory(os.path.dirname(ipc_path(address)) or ".", opened)
        for _, directory in sorted(opened.items()):  # in the same order by everyone
            _lock_directory(directory)
        yield
    finally:
        for directory in opened.values():
            with contextlib.suppress(OSError):
                # Closing would not do: a forked child may have a copy.
                fcntl.flock(directory, fcntl.LOCK_UN)
            os.close(directory)


def _open_directory(path: str, opened: dict[tuple[int, int], int]) -> None:
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:  # claiming the path will say so
        return
    found = os.fstat(directory)
    if (found.st_dev, found.st_ino) in opened:
        os.close(directory)
    else:
        opened[found.st_dev, found.st_ino] = directory


def _lock_directory(directory: int) -> None:
    deadline = time.monotonic() + _LOCK_SECONDS
    while time.monotonic() < deadline:
        try:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(0.002)
        except OSError:  # a file system without such locks
            return


def claim_ipc_path(path: str) -> None:
    """Make sure that binding there takes nothing from anybody.

    libzmq unlinks whatever stands at the path before it binds, so a live socket would be
    taken over and a regular file deleted.

    Raises:
        ConnectError: The path or its directory is not ours to use.
    """
    directory = os.path.dirname(path) or "."
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        _check_directory(directory)
        _clear_left_over(path)
    except OSError as error:
        raise ConnectError(f"cannot use the ipc path {path!r}: {error}") from error


def _check_directory(directory: str) -> None:
    found = os.stat(directory)
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid not in (0, os.geteuid()):
        raise ConnectError(
            f"the directory {directory!r} belongs to user {found.st_uid}, who could replace "
            "the socket: use a directory of your own"
        )
    if mode & 0o022 and not mode & stat.S_ISVTX:
        raise ConnectError(
            f"the directory {directory!r} has mode {mode:04o}: other users could replace the "
            "socket; chmod it to 0700 or use another"
        )


def _clear_left_over(path: str) -> None:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise ConnectError(f"{path!r} exists and is not a socket: it is left alone, use another")
    if _answers(path):
        raise ConnectError(f"the ipc path {path!r} is in use: another client is bound there")
    os.unlink(path)


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # a full backlog and the like: somebody is there
            return True
        return True


def _private_directory() -> str:
    directory = tempfile.mkdtemp(prefix="tszmq-")
    if len(os.fsencode(directory)) + 16 > IPC_PATH_BYTES:
        # A TMPDIR too long for a socket: clusters have those.
        os.rmdir(directory)
        directory = tempfile.mkdtemp(prefix="tszmq-", dir="/tmp")
    return directory


def _identity(path: str) -> tuple[int, int] | None:
    """What is there."""
    with contextlib.suppress(OSError):
        found = os.lstat(path)
        return found.st_dev, found.st_ino
    return None


class IpcFiles:
    """The socket files and private directory of one client, removed when it closes."""

    def __init__(self) -> None:
        self._directory: str | None = None
        self._paths: dict[str, tuple[int, int] | None] = {}  # to what is ours there

    def private_address(self, name: str) -> str:
        """``ipc://`` in a fresh directory that only this user can enter."""
        if self._directory is None:
            try:
                self._directory = _private_directory()
            except OSError as error:
                raise ConnectError(
                    f"there is no directory for the data sockets: {error}; set TMPDIR to one that "
                    "can be written, or give Endpoints with all three addresses"
                ) from error
        return f"ipc://{os.path.join(self._directory, name)}"

    def expect(self, path: str) -> None:
        """A socket of ours will be bound at that path, which nobody else has: should a signal
        come between, it is removed all the same."""
        self._paths[_absolute(path)] = None

    def bound(self, path: str) -> None:
        """A socket of ours is bound there now: only this user may connect."""
        os.chmod(path, 0o600)
        self._paths[_absolute(path)] = _identity(path)

    def missing(self) -> list[str]:
        """Paths at which ours is no more: removed, or replaced."""
        return [path for path, identity in self._paths.items() if _identity(path) != identity]

    def remove(self) -> None:
        """Remove what is still ours: not a file that somebody else has put there since."""
        for path, identity in self._paths.items():
            with contextlib.suppress(OSError, ConnectError):
                found = os.lstat(path)
                if identity is None:  # and closed by now, if it is ours
                    _clear_left_over(path)
                elif (found.st_dev, found.st_ino) == identity:
                    os.unlink(path)
        self._paths.clear()
        if self._directory is not None:
            with contextlib.suppress(OSError):
                os.rmdir(self._directory)
            self._directory = None
