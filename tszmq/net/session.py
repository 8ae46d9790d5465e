"""Sockets and threads of one client: started together, taken down together, once.

``BoundClient`` and ``Client`` hold a session; its threads hold only what they share, so that a
client that is merely forgotten is collected and its threads end.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextvars import Context
from typing import Any

import attrs
import zmq

from tszmq.core.endings import client_closed
from tszmq.core.flights import Flights
from tszmq.core.ids import WireIds
from tszmq.core.policy import Policy
from tszmq.core.startup import Startup
from tszmq.errors import ConnectError, ForkedClient, LockOrderError
from tszmq.net import mailbox as mail
from tszmq.net.addresses import binding_alone
from tszmq.net.control import Settings, run_control
from tszmq.net.forks import close_copies
from tszmq.net.mailbox import Mailbox
from tszmq.net.receiver import run_receiver
from tszmq.net.shared import Readiness, Shared
from tszmq.net.sockets import Owned, Sockets, bind_sockets
from tszmq.ownership import Level, holds_a_lock, mutex
from tszmq.types import Endpoints
from tszmq.wire.base import WireProtocol

__all__ = ["Session"]

_EXIT_SECONDS = 0.8  # all sessions together, when the interpreter ends
_GREENLETS = {
    "gevent.monkey": ("is_module_patched", "threading"),
    "eventlet.patcher": ("is_monkey_patched", "thread"),
}
_UNDO_SECONDS = 5.0  # for a control thread whose receiver did not start
# Not the sessions: one that is forgotten just before the interpreter ends has threads that have
# not heard of it yet. They hold these until everything is down.
_open: weakref.WeakKeyDictionary[Shared, Endpoints] = weakref.WeakKeyDictionary()


class Session:
    """One set of sockets with its two threads.

    Args:
        endpoints: Validated addresses.
        protocol: The wire.
        engine_count: Engines that will come.
        settings: For the control thread.
        policy, max_inflight: For the routing.
        max_message_bytes: What no message of an engine may exceed.
        on_closed: Called in the control thread after everything is down.

    Raises:
        ConnectError: An address cannot be bound, or a thread not be started.
    """

    def __init__(
        self,
        endpoints: Endpoints,
        protocol: WireProtocol,
        engine_count: int,
        settings: Settings,
        *,
        policy: Policy | None,
        max_inflight: int | None,
        max_message_bytes: int,
        on_closed: list[Callable[[], object]],
    ) -> None:
        self.ids = WireIds(secrets.token_hex(8))
        self.engine_count = engine_count
        self.max_inflight = max_inflight
        self.claim = threading.RLock()  # of the thread that connects
        self.claimed = False
        """Whether a ``Client`` has taken it over from the ``BoundClient``."""
        _require_real_threads()
        startup = Startup(engine_count)
        with binding_alone(endpoints):
            sockets = bind_sockets(
                endpoints, max_message_bytes, settings.send_timeout, engine_count
            )
        mailbox = None
        try:
            self.endpoints = sockets.endpoints
            mailbox = Mailbox()
            self.shared = Shared(
                state=mutex(Level.STATE, Flights(self.ids, policy, max_inflight)),
                mailbox=mailbox,
                protocol=protocol,
                readiness=Readiness(
                    startup.num_missing(), startup.describe_missing(), startup.advise()
                ),
            )
            self._threads = _threads(
                sockets, self.shared, startup, settings, max_message_bytes, on_closed
            )
        except BaseException as error:
            _release(sockets)
            if mailbox is not None:
                mailbox.close()
            if isinstance(error, OSError):  # no descriptor is left for the mailbox
                raise ConnectError(f"cannot make the client's own sockets: {error}") from error
            raise
        _open[self.shared] = self.endpoints
        # A forgotten session: the finalizer only posts; the threads do the rest.
        self._finalizer = weakref.finalize(self, _stop, self.shared)
        self._finalizer.atexit = False
        self._start(sockets)

    def _start(self, sockets: Sockets) -> None:
        try:
            for thread in self._threads:
                thread.start()
        except BaseException as error:
            self._take_back(sockets)
            if isinstance(error, Exception):
                raise ConnectError(f"a thread of the client cannot be started: {error}") from error
            raise

    def _take_back(self, sockets: Sockets) -> None:
        """Not both threads run, or a signal came meanwhile: nothing stays.

        A thread that is on its way is listed, too: it will own its sockets.
        """
        running = threading.enumerate()
        control, receiver = self._threads
        self._threads = tuple(thread for thread in self._threads if thread in running)
        if receiver not in running:
            _close(sockets.output)
            self.shared.receiver_ended.set()
        if control in running:  # it takes down the rest
            self.close(_UNDO_SECONDS)
            return
        _release(sockets)
        self.shared.mailbox.close()

    def is_foreign(self) -> bool:
        """Whether this is a forked child: its copies of locks and sockets must not be touched."""
        return os.getpid() != self.shared.pid

    def check_process(self) -> None:
        """Raise ForkedClient in a child process."""
        if self.is_foreign():
            raise ForkedClient(
                f"this client belongs to process {self.shared.pid}: make a new one in the child"
            )

    def check_caller(self) -> None:
        """Before whatever submits or waits: that the process is right, and that no client's state
        is being changed further up in this very thread.

        Raises:
            ForkedClient: In a child process.
            RuntimeError: In a signal handler, or a finalizer, that interrupts such a change.
        """
        self.check_process()
        if holds_a_lock():
            raise RuntimeError(
                "a signal handler or finalizer that interrupts a call of a client can abort and "
                "close, not submit or wait: all others would wait for it; let a thread do that"
            )

    def is_closed(self) -> bool:
        """Whether it was closed, or failed."""
        with self.shared.state as flights:
            return flights.closed is not None

    def raise_if_closed(self) -> None:
        """Raise why it is closed, if it is."""
        with self.shared.state as flights:
            closed = flights.closed
        if closed is not None:
            raise closed()

    def close(self, timeout: float) -> None:
        """Wake every waiter, then free the addresses. Any thread, any number of times.

        Args:
            timeout: Seconds to wait for the threads; they go on ending after that.
        """
        if self.is_foreign():
            return
        if holds_a_lock():
            # The garbage collector runs this inside a guarded block: leave it to the thread.
            self.shared.mailbox.post(mail.Stop())
            return
        # Posted first: the control thread does all of it again, should a signal cut this off.
        self.shared.mailbox.post(mail.Stop())
        self.shared.close(client_closed)
        self.join(timeout)

    def join(self, timeout: float) -> None:
        """Wait until everything is down, unless this is one of the threads."""
        if threading.current_thread() in self._threads:
            return
        deadline = time.monotonic() + timeout
        self.shared.ended.wait(max(0.0, min(timeout, threading.TIMEOUT_MAX)))
        if self.shared.ended.is_set():
            for thread in self._threads:  # they have nothing left to do but to return
                thread.join(min(max(0.0, deadline - time.monotonic()), 1.0))


def _require_real_threads() -> None:
    """Greenlets in their place would all stop where the first of ours waits for a socket.

    Raises:
        ConnectError: gevent or eventlet has put them there.
    """
    for name, (test, what) in _GREENLETS.items():
        patching = sys.modules.get(name)
        if patching is not None and getattr(patching, test)(what):
            raise ConnectError(
                f"the threads of this process are greenlets ({name}), and a client needs real "
                "ones: use it in a process of its own"
            )


def _stop(shared: Shared) -> None:
    if shared.pid == os.getpid():  # what a forked child posts would reach the parent
        shared.mailbox.post(mail.Stop())


def _close(owned: Owned[zmq.Socket[bytes]]) -> None:
    with contextlib.suppress(LockOrderError):  # it has been taken, and closed
        closed = owned.take()
        closed.disable_monitor()
        closed.close(0)


def _release(sockets: Sockets) -> None:
    """What no thread has taken."""
    for owned in (sockets.output, sockets.input, sockets.orders, sockets.handshake):
        _close(owned)
    for monitor in sockets.monitors:
        monitor.close()
    sockets.context.term()
    sockets.files.remove()


def _threads(
    sockets: Sockets,
    shared: Shared,
    startup: Startup,
    settings: Settings,
    max_message_bytes: int,
    on_closed: list[Callable[[], object]],
) -> tuple[threading.Thread, ...]:
    """Control and receiver, to be started in this order.

    Daemons: nothing of ours keeps a process alive. Targets are functions, not methods of
    anything that could be kept from being collected.
    """
    orders: deque[Any] = deque()
    receiver = _daemon(
        "tszmq-receiver", run_receiver, sockets.output, orders, shared, max_message_bytes
    )
    control = _daemon(
        "tszmq-control", run_control, sockets, orders, shared, startup, settings, on_closed
    )
    return control, receiver


def _daemon(name: str, target: Callable[..., None], *args: object) -> threading.Thread:
    # From 3.14 on a thread may run in a copy of its maker's context, and keep all that is in it.
    context: dict[str, Any] = {"context": Context()} if sys.version_info >= (3, 14) else {}
    return threading.Thread(target=target, args=args, name=name, daemon=True, **context)


def _let_go_in_child() -> None:
    # Of a closed one they may be somebody else's by now.
    open_ones = [where for shared, where in list(_open.items()) if not shared.ended.is_set()]
    _open.clear()  # the parent's: here others may have their addresses from now on
    close_copies(address for where in open_ones for address in attrs.astuple(where))


os.register_at_fork(after_in_child=_let_go_in_child)


@atexit.register
def _close_all() -> None:
    """The interpreter ends: tell the engines to stop, and do not wait long for anything."""
    # A fork that the interpreter did not see has left them listed.
    everyone = [shared for shared in list(_open) if shared.pid == os.getpid()]
    for shared in everyone:
        shared.abandon(client_closed)
        shared.mailbox.post(mail.Stop(quiet=True))
    deadline = time.monotonic() + _EXIT_SECONDS
    for shared in everyone:
        shared.ended.wait(max(0.0, deadline - time.monotonic()))
