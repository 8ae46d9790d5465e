"""The sockets of a client: made and bound by one thread, then handed to the thread that uses them.

Options and why:

* LINGER 0 everywhere: closing never waits for an absent peer.
* ROUTER_MANDATORY: a send to nobody is an error instead of a silent drop.
* ROUTER_HANDOVER: an engine that comes back under its old identity is heard (without it the
  second connection under a live identity is ignored for good). On the input socket only while
  an engine is starting up: an engine of an earlier client, which never stops dialling, must not
  take the requests of the one that registered here. libzmq keeps what such a peer says unread
  until the socket is closed: so many messages as RCVHWM, of frames of MAXMSGSIZE.
* RCVHWM 0 on the output socket: what an engine managed to send arrives, also after it died.
* MAXMSGSIZE on all: a frame above it is refused before it takes memory (the peer is then
  disconnected, which the monitors see). Nothing bounds a message of ever more frames, which
  libzmq keeps until its last one comes: who can reach a socket can use up memory.
* TCP keep-alive and, for what is sent meanwhile, TCP_MAXRT: the kernel notices a host that is
  gone; a process that is merely stopped still counts as there.
"""

from __future__ import annotations

import errno
import math
import os
import resource
import threading
import traceback
from typing import Any, Generic, TypeVar

import attrs
import zmq

from tszmq.errors import ConnectError, LockOrderError
from tszmq.net.addresses import (
    IpcFiles,
    claim_ipc_path,
    has_only_ipv6,
    ipc_path,
    is_loopback,
    is_tcp,
    tcp_host,
)
from tszmq.net.monitors import Monitor
from tszmq.ownership import CHECKED
from tszmq.types import Endpoints

__all__ = [
    "NOWHERE",
    "WAKE",
    "CheckedSocket",
    "Owned",
    "Sockets",
    "bind_sockets",
    "free_descriptors",
    "source_fd",
]

T = TypeVar("T")

WAKE = b"tszmq-wake"
"""Tells the receiver to look at its orders. Anyone may send it: it says nothing itself."""
_UNDO_SECONDS = 1.0
_LOST_MS = 25_000
"""Until a host that acknowledges nothing is gone: what keep-alive comes to on idle connections."""
_LONGEST_SEND = 1e6  # seconds; the option is an int of 32 bits
_DESCRIPTORS = 24  # of a client's own
_DESCRIPTORS_EACH = 3  # of an engine's connections
_STARTUP_MESSAGES = 16
_STARTUP_BYTES = 1 << 20
"""Engines say one or two things on each ROUTER, of some hundred bytes."""

NOWHERE = -1


def source_fd(frame: zmq.Frame) -> int:
    """The descriptor of the connection that a message came on.

    ``NOWHERE`` for a peer that speaks ZMTP 1.0, for which random bytes pass: libzmq knows no
    properties of such a connection. No engine is one.
    """
    try:
        fd = frame.get(zmq.SRCFD)
    except zmq.ZMQError:
        return NOWHERE
    return fd if isinstance(fd, int) else NOWHERE


class CheckedSocket(zmq.Socket[bytes]):
    """Debug builds: every use must come from the thread that owns the socket."""

    _owner: int | None = None

    def adopt(self) -> None:
        """The calling thread is the owner from here on."""
        self._owner = threading.get_ident()

    def _check(self) -> None:
        if self._owner not in (None, threading.get_ident()):
            raise LockOrderError(
                f"a ZMQ socket of thread {self._owner} was used by thread "
                f"{threading.get_ident()} ({threading.current_thread().name!r})"
            )

    def send(self, *args: Any, **kwargs: Any) -> Any:
        self._check()
        return super().send(*args, **kwargs)

    def recv(self, *args: Any, **kwargs: Any) -> Any:
        self._check()
        return super().recv(*args, **kwargs)

    def getsockopt(self, option: int) -> Any:
        self._check()
        return super().getsockopt(option)

    def poll(self, *args: Any, **kwargs: Any) -> int:
        self._check()
        return super().poll(*args, **kwargs)

    def close(self, *args: Any, **kwargs: Any) -> None:
        self._check()
        super().close(*args, **kwargs)


class Owned(Generic[T]):
    """A hand-over: whoever takes it owns it, and nobody can take it again."""

    def __init__(self, value: T) -> None:
        self._box = [value]

    def take(self) -> T:
        """Become the owner. Raises LockOrderError when somebody already is."""
        try:
            value = self._box.pop()  # one C call: two takers cannot both succeed
        except IndexError:
            raise LockOrderError("this socket was taken by another thread") from None
        if isinstance(value, CheckedSocket):
            value.adopt()
        return value


@attrs.frozen(eq=False)
class Sockets:
    """Everything that was bound.

    Attributes:
        context: Of this client alone.
        handshake: ROUTER: HELLO, INIT, READY.
        input: ROUTER: requests out, registrations in.
        orders: PUSH into ``output``, by which the control thread wakes the receiver.
        output: PULL: tokens in.
        monitors: Of handshake, input and output.
        endpoints: The addresses actually bound.
        is_placed: The caller chose where ``input`` is, so that engines of an earlier client may
            know it.
        files: What they are on disk.
    """

    context: zmq.Context[zmq.Socket[bytes]]
    handshake: Owned[zmq.Socket[bytes]]
    input: Owned[zmq.Socket[bytes]]
    orders: Owned[zmq.Socket[bytes]]
    output: Owned[zmq.Socket[bytes]]
    monitors: tuple[Monitor, Monitor, Monitor]
    endpoints: Endpoints
    is_placed: bool
    files: IpcFiles


class _Binder:
    """Makes the sockets one after the other, and undoes all of it when one fails."""

    def __init__(self, max_message_bytes: int, send_timeout: float) -> None:
        self._max_message_bytes = max_message_bytes
        # An engine that does not read is given up by the outbox, not by the kernel.
        self._lost_ms = max(_LOST_MS, int(min(send_timeout, _LONGEST_SEND) * 1000))
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # Sockets that were merely garbage collected must not hang the context's end either.
        self.context.setsockopt(zmq.LINGER, 0)
        self.files = IpcFiles()
        self._made: list[zmq.Socket[bytes]] = []
        self._monitors: list[Monitor] = []

    def make(self, kind: int) -> zmq.Socket[bytes]:
        made: zmq.Socket[bytes]
        made = self.context.socket(kind, socket_class=CheckedSocket if CHECKED else None)
        self._made.append(made)
        made.setsockopt(zmq.LINGER, 0)
        return made

    def bind(self, kind: int, address: str) -> tuple[zmq.Socket[bytes], str]:
        bound = self.make(kind)
        most = self._max_message_bytes
        if kind == zmq.ROUTER:
            most = min(most, _STARTUP_BYTES)
        bound.setsockopt(zmq.MAXMSGSIZE, most)
        if kind == zmq.ROUTER:
            bound.setsockopt(zmq.ROUTER_MANDATORY, 1)
            bound.setsockopt(zmq.ROUTER_HANDOVER, 1)
            bound.setsockopt(zmq.RCVHWM, _STARTUP_MESSAGES)
        else:
            bound.setsockopt(zmq.RCVHWM, 0)
        if is_tcp(address):
            self._prepare_tcp(bound, address)
        else:
            claim_ipc_path(ipc_path(address))
            self.files.expect(ipc_path(address))
        try:
            bound.bind(address)
        except zmq.ZMQError as error:
            raise ConnectError(f"cannot bind {address}: {error}") from error
        if not is_tcp(address):
            self.files.bound(ipc_path(address))
        return bound, bound.getsockopt_string(zmq.LAST_ENDPOINT)

    def watch(self, bound: zmq.Socket[bytes], asks_who: bool = False) -> Monitor:
        """The monitor of a socket."""
        monitor = Monitor(bound, asks_who)
        self._monitors.append(monitor)
        return monitor

    def _prepare_tcp(self, bound: zmq.Socket[bytes], address: str) -> None:
        if has_only_ipv6(tcp_host(address)):
            bound.setsockopt(zmq.IPV6, 1)
        for option, value in (
            (zmq.TCP_KEEPALIVE, 1),
            (zmq.TCP_KEEPALIVE_IDLE, 10),
            (zmq.TCP_KEEPALIVE_INTVL, 5),
            (zmq.TCP_KEEPALIVE_CNT, 3),
            (zmq.TCP_MAXRT, self._lost_ms),
        ):
            bound.setsockopt(option, value)

    def undo(self, error: BaseException | None = None) -> None:
        """Close everything.

        A signal may have cut off the making of a socket, which only frames of the error have
        then, while a context does not end before all its sockets do.
        """
        for monitor in self._monitors:
            monitor.close()
        for made in self._made:
            made.disable_monitor()
            made.close(0)
        for frame, _ in traceback.walk_tb(error.__traceback__ if error else None):
            for value in list(frame.f_locals.values()):
                if isinstance(value, zmq.Socket) and value.context is self.context:
                    value.close(0)
        # In another thread, so that nobody waits for ever.
        ending = threading.Thread(target=self.context.destroy, args=(0,), daemon=True)
        ending.start()
        ending.join(_UNDO_SECONDS)
        self.files.remove()


def bind_sockets(
    endpoints: Endpoints,
    max_message_bytes: int,
    send_timeout: float = 0.0,
    engine_count: int = 1,
) -> Sockets:
    """Bind input and output, then the handshake: whoever dials in finds all three.

    Args:
        endpoints: Validated by ``check_endpoints``.
        max_message_bytes: What no single frame may exceed.
        send_timeout: Seconds that an engine may leave what it is sent unread.
        engine_count: Engines that will come.

    Raises:
        ConnectError: An address cannot be bound; nothing stays bound.
    """
    _require_descriptors(_DESCRIPTORS + _DESCRIPTORS_EACH * engine_count)
    binder = _Binder(max_message_bytes, send_timeout)
    try:
        output, output_address = binder.bind(
            zmq.PULL, endpoints.output or _data_address(endpoints.handshake, binder, "out")
        )
        input_, input_address = binder.bind(
            zmq.ROUTER, endpoints.input or _data_address(endpoints.handshake, binder, "in")
        )
        output.bind("inproc://orders")
        orders = binder.make(zmq.PUSH)
        orders.connect("inproc://orders")
        handshake, handshake_address = binder.bind(zmq.ROUTER, endpoints.handshake)
        monitors = (
            binder.watch(handshake),
            binder.watch(input_),
            binder.watch(output, asks_who=True),
        )
    except zmq.ZMQError as error:
        binder.undo(error)
        raise ConnectError(f"cannot make the client's sockets: {error}") from error
    except BaseException as error:
        binder.undo(error)
        raise
    return Sockets(
        context=binder.context,
        handshake=Owned(handshake),
        input=Owned(input_),
        orders=Owned(orders),
        output=Owned(output),
        monitors=monitors,
        endpoints=Endpoints(handshake_address, input_address, output_address),
        is_placed=endpoints.input is not None,
        files=binder.files,
    )


def free_descriptors() -> float:
    """How many files this process may still open; infinite where nothing tells."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return math.inf
    try:
        return limit - len(os.listdir("/dev/fd"))
    except OSError as error:  # else this system has no such list
        return 0 if error.errno in (errno.EMFILE, errno.ENFILE) else math.inf


def _require_descriptors(needed: int) -> None:
    """libzmq ends the process when it finds none for its own threads, or for a connection to an
    ipc address (zeromq/libzmq issue 1306).

    Raises:
        ConnectError: There are too few.
    """
    free = free_descriptors()
    if free < needed:
        raise ConnectError(
            f"a client and its engines' connections take about {needed} file descriptors, and "
            f"{free} are free: close some, or raise the limit (ulimit -n)"
        )


def _data_address(handshake: str, binder: _Binder, name: str) -> str:
    """Where a data socket goes that the caller did not place."""
    if is_tcp(handshake) and not is_loopback(tcp_host(handshake)):
        return handshake.rpartition(":")[0] + ":*"
    return binder.files.private_address(name)
