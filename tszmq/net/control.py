"""The control thread: owns every socket but the output, and every clock.

It alone sends: requests and aborts come to it through the mailbox in the order they were
posted, so that an abort follows its request, no caller ever blocks on a socket, and a signal
can tear no message apart. An engine that does not read gets a queue of its own here, and is
dead when that makes no progress for ``send_timeout``.

What can happen, and what follows:

    HELLO                       INIT, or kept waiting while its index is taken by a living one
    registration                the engine is served; whoever waits in ``connect`` is told
    its input connection closed no new requests; the receiver delivers what came and ends the
                                rest: when its output connection closes, too, after 0.1 s when
                                that is not known, after 1 s in any case
    output connection alone     its requests fail 0.5 s later: what was in transit is lost; it
                                gets none until it has a new one, and is dead after 30 s
    send refused (EHOSTUNREACH) as a closed connection
    silence                     warned about; fatal after ``silence_timeout``, while it has work
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import attrs
import zmq

from tszmq.core.endings import client_closed, deadline_passed
from tszmq.core.startup import Startup
from tszmq.errors import DecodeError
from tszmq.net import mailbox as mail
from tszmq.net.gate import never_waits
from tszmq.net.greeter import Greeter
from tszmq.net.lockstep import Lockstep
from tszmq.net.log import log
from tszmq.net.losses import Losses
from tszmq.net.monitors import Connection
from tszmq.net.orders import Blame, Halt, Joined, OutputClosed, Retire
from tszmq.net.outputs import Outputs
from tszmq.net.peers import CLOSED, Connections, peer_pid
from tszmq.net.sender import Link, Sender
from tszmq.net.shared import Readiness, Shared, wake_all
from tszmq.net.silence import SilenceWatch
from tszmq.net.sockets import NOWHERE, WAKE, Sockets, free_descriptors, source_fd
from tszmq.net.timers import Timers
from tszmq.types import EngineInfo
from tszmq.wire.startup import engine_index

__all__ = ["Settings", "run_control"]


# libzmq closes a descriptor a moment after it reported its end; longer after, when its thread
# did not get its turn: look again and again.
_CLOSING_SECONDS = (0.02, 0.1, 0.5, 2.0, 8.0)
_SWEEP_SECONDS = 0.25
_GRACE = 0.1  # between the loss of an engine's input connection and its requests' end
_LONG_GRACE = 1.0  # the same, as long as its output connection is open: more may be on its way
# For a connection to close that tells who sent what names nobody.
_FAREWELL_GRACE = 5.0
_UNREADABLE_GRACE = 1.5
_REGISTRATION_GRACE = 1.0  # after READY, when a successor waits
_REDIAL_SECONDS = 0.35
_CLOSING_LINGER_MS = 200  # for the last aborts to leave
_JOIN_SECONDS = 5.0
_BLOCKED_POLL_MS = 5
_LONGEST_POLL = 3600.0
_MESSAGES_A_TURN = 1000
# libzmq ends the process when an engine dials an ipc address and no descriptor is free.
_FEWEST_DESCRIPTORS = 6
_DESCRIPTORS_SECONDS = 1.0  # until that is looked at again


@attrs.frozen
class Settings:
    """What the caller chose; times are seconds, lengths tokens."""

    silence_timeout: float | None
    silence_warning: float | None
    send_timeout: float
    max_request_tokens: int | None
    parallel_config: Mapping[str, Any]


def run_control(
    sockets: Sockets,
    orders: deque[Any],
    shared: Shared,
    startup: Startup,
    settings: Settings,
    on_closed: list[Callable[[], object]],
) -> None:
    """The thread's whole life: serve, then take everything down in the right order."""
    never_waits()
    own = _Own(sockets.handshake.take(), sockets.input.take(), sockets.orders.take(), orders)
    control = None
    try:
        control = _Control(sockets, own, shared, startup, settings)
        control.run()
    except BaseException as error:
        shared.fail("the control thread", error)
        log.exception("tszmq: the control thread failed; the client is closed")
    finally:
        try:
            if control is not None:
                control.say_goodbye()
            _take_down(sockets, own, shared)
            for step in on_closed:
                try:
                    step()
                except Exception:
                    log.exception("tszmq: a step after the client's end failed")
        finally:
            shared.ended.set()


@attrs.frozen(eq=False)
class _Own:
    """The sockets of this thread."""

    handshake: zmq.Socket[bytes]
    input: zmq.Socket[bytes]
    push: zmq.Socket[bytes]
    orders: deque[Any]

    def order(self, order: object) -> None:
        """Have the receiver do something."""
        self.orders.append(order)
        with contextlib.suppress(zmq.Again):  # it has a thousand unread reasons to look
            self.push.send(WAKE, zmq.NOBLOCK)


def _take_down(sockets: Sockets, own: _Own, shared: Shared) -> None:
    """End the receiver, free every address."""
    own.order(Halt())
    for monitored in (own.input, own.handshake):
        monitored.disable_monitor()
    own.input.close(_CLOSING_LINGER_MS)
    own.handshake.close(0)
    own.push.close(_CLOSING_LINGER_MS)
    receiver_ended = shared.receiver_ended.wait(_JOIN_SECONDS)
    for monitor in sockets.monitors:
        monitor.close()
    if not receiver_ended:
        # term() would wait for its socket for ever: somebody's log handler holds it up.
        log.error("tszmq: the receiver thread does not end; its context is left behind")
    else:
        sockets.context.term()
    sockets.files.remove()
    shared.mailbox.close()


class _Control:
    def __init__(
        self,
        sockets: Sockets,
        own: _Own,
        shared: Shared,
        startup: Startup,
        settings: Settings,
    ) -> None:
        self._sockets = sockets
        self._order = own.order
        self._shared = shared
        self._startup = startup
        self._input = own.input
        self._connections = Connections()
        self._held: set[int] = set()  # engines that wait for their INIT
        self._greeter = Greeter(
            own.handshake,
            startup,
            sockets.endpoints,
            settings.parallel_config,
            self._connections,
            sockets.monitors[0].is_open,
            before_init=self._invite,
        )
        self._sender = Sender(own.input, shared.protocol, settings.send_timeout, self._begin_death)
        self._lockstep = Lockstep(shared, self._sender, self._at)
        self._max_request_tokens = settings.max_request_tokens
        self._silence = SilenceWatch(settings.silence_timeout, settings.silence_warning)
        self._index_of: dict[int, int] = {}  # input connection -> engine index
        self._timers = Timers()
        self._newest: dict[int, int] = {}  # by dying engine: the last epoch when its death began
        self._outputs = Outputs(sockets.monitors[2])
        self._losses = Losses(
            shared, self._outputs, self._at, self._sender.abort, self._begin_death
        )
        self._actions: dict[type, Callable[[Any], object]] = {
            mail.Add: self._sender.add,
            mail.Call: self._sender.call,
            mail.Wave: self._lockstep.observe,
            mail.Answered: lambda _: self._lockstep.look_soon(),
            mail.Abort: lambda item: self._sender.abort(item.requests),
            mail.Settle: self._settle,
            mail.Run: lambda item: item.action(),
            mail.Expire: self._timers.watch,
            mail.Suspect: self._suspect,
            mail.OutputLost: self._losses.refused,
            mail.Learnt: self._outputs.learn,
            mail.Dropped: self._dropped,
            mail.Stop: self._stop,
        }
        self._stopping = False
        self._sweeping = False
        self._quiet = False
        self._poller = zmq.Poller()
        self._greeting = False
        if sockets.is_placed:
            # Engines of an earlier client dial at intervals of 0.1 s: let them come first, so
            # that those who register here take their places, and not the other way round.
            self._at(_REDIAL_SECONDS, self._open_door)
        else:
            self._open_door()
        for readable in (
            shared.mailbox.fileno(),
            self._input,
            *(monitor.socket for monitor in sockets.monitors),
        ):
            self._poller.register(readable, zmq.POLLIN)
        if self._silence.interval is not None:
            self._at(self._silence.interval, self._check_silence)

    # -- the loop

    def run(self) -> None:
        while not self._stopping:
            ready = dict(self._poller.poll(self._timeout_ms()))
            # What closed is read before the messages and acted on after them: a connection's
            # last messages are in the socket by the time its end is reported.
            closed = [
                monitor.closed() if monitor.socket in ready or monitor.has_news() else []
                for monitor in self._sockets.monitors
            ]
            if self._greeter.socket in ready or closed[0]:
                self._greet()
            if self._input in ready or closed[1]:
                self._read_input()
            self._note_closed(*closed)
            self._read_mail()
            if self._sender.is_blocked():
                self._sender.retry()
            self._run_timers()

    def _timeout_ms(self) -> int | None:
        """Until the next clock is due; None to wait for events alone."""
        if self._shared.mailbox.has_items() or any(
            monitor.has_news() for monitor in self._sockets.monitors
        ):
            return 0
        due = self._timers.next_due()
        limit = _BLOCKED_POLL_MS if self._sender.is_blocked() else None
        if due is None:
            return limit
        # Rounded up: waking a fraction early would only come round again. Bounded: poll() takes
        # an int of 32 bits, and a deadline may be infinite.
        wait = int(min(max(0.0, due - time.monotonic()), _LONGEST_POLL) * 1000) + 1
        return wait if limit is None else min(wait, limit)

    def _at(self, seconds: float, action: Callable[[], None]) -> None:
        self._timers.at(time.monotonic() + seconds, action)

    def _run_timers(self) -> None:
        now = time.monotonic()
        self._timers.run_due(now)
        for request, timeout in self._timers.expired(now):
            self._settle(mail.Settle([request], deadline_passed(timeout)))

    # -- engines come

    def _greet(self) -> None:
        if self._greeting and self._greeter.read(_MESSAGES_A_TURN):
            self._look_for_stalled()
            if not self._sweeping and not self._startup.is_settled():
                self._sweeping = True
                self._at(_SWEEP_SECONDS, self._sweep)
            self._publish_readiness()

    def _look_for_stalled(self) -> None:
        stalled = self._startup.stalled()
        if stalled:
            self._at(_REGISTRATION_GRACE, partial(self._replace, stalled))

    def _replace(self, stalled: list[int]) -> None:
        self._greeter.replace(stalled)
        self._publish_readiness()

    def _open_door(self) -> None:
        self._greeting = True
        self._poller.register(self._greeter.socket, zmq.POLLIN)

    def _sweep(self) -> None:
        """While engines come, connections end and descriptors are used again within a moment:
        look for ends that were missed."""
        for fd in self._connections.descriptors():
            self._look_at(fd)
        self._sweeping = not self._startup.is_settled()
        if self._sweeping:
            self._at(_SWEEP_SECONDS, self._sweep)

    def _read_input(self) -> None:
        """Registrations; nothing else is ever sent this way."""
        for _ in range(_MESSAGES_A_TURN):
            try:
                frames = self._input.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            index = engine_index(frames[0].bytes)
            if index is None or not self._startup.expects_registration(index):
                self._startup.ignored += 1
                continue
            payload = [frame.bytes for frame in frames[1:]]
            try:
                info = self._shared.protocol.read_registration(index, payload)
            except DecodeError as error:
                self._startup.ignored += 1
                self._greeter.warn(f"the registration of engine {index} is ignored: {error}")
                continue
            fd = source_fd(frames[-1])
            if fd != NOWHERE:
                self._register(info, fd)

    def _register(self, info: EngineInfo, fd: int) -> None:
        index = info.engine_index
        self._startup.registered(index)
        most = self._max_request_tokens
        if most is not None and not 0 < info.max_model_len <= most:
            info = attrs.evolve(info, max_model_len=most)
        with self._shared.state as flights:
            epoch = flights.register(info, time.monotonic())
        connection = self._connections.number(fd, self._sockets.monitors[1].is_open(fd))
        pid = peer_pid(fd)
        known = None if pid == CLOSED else pid
        self._sender.links[index] = Link(connection, epoch, info.lockstep)
        self._outputs.join(index, known)
        self._index_of[connection] = index
        self._order(Joined(index, pid))
        if info.lockstep:
            self._lockstep.look_soon()
        self._publish_readiness()
        log.info("tszmq: engine %d registered (version %.80r)", index, info.engine_version)

    def _allow_takeovers(self) -> None:
        """Only while an engine is on its way may one that dials in take an identity in use."""
        self._input.setsockopt(zmq.ROUTER_HANDOVER, int(self._startup.pending()))

    def _invite(self, index: int) -> bool:
        """An engine is about to be told where to dial; False when it has to wait for that."""
        if free_descriptors() < _FEWEST_DESCRIPTORS:
            if not self._held:
                self._at(_DESCRIPTORS_SECONDS, self._invite_held)
                self._greeter.warn(
                    f"hardly a file descriptor is free (ulimit -n): engine {index} is told where "
                    "to dial when there are some"
                )
            self._held.add(index)
            return False
        where = self._sockets.endpoints
        gone = {f"ipc://{path}" for path in self._sockets.files.missing()}
        gone &= {where.input, where.output}
        if gone:
            self._greeter.warn(
                f"{min(gone)} of this client is gone, removed or replaced by somebody else (a "
                f"cleaner of temporary files?): engine {index} cannot reach it; close the client "
                "and make a new one"
            )
        self._outputs.invite(index)
        self._allow_takeovers()
        return True

    def _invite_held(self) -> None:
        if free_descriptors() < _FEWEST_DESCRIPTORS:
            self._at(_DESCRIPTORS_SECONDS, self._invite_held)
            return
        held, self._held = self._held, set()
        for index in sorted(held):
            if self._startup.is_greeted(index):  # not gone meanwhile
                self._greeter.send_init(index)

    def _publish_readiness(self) -> None:
        self._allow_takeovers()
        self._shared.readiness = Readiness(
            self._startup.num_missing(),
            self._startup.describe_missing(),
            self._startup.advise(),
            self._greeter.failed,
        )
        self._shared.arrivals.wake()

    # -- engines go

    def _note_closed(
        self, handshake: list[Connection], input_: list[Connection], output: list[Connection]
    ) -> None:
        for connection in handshake + input_:
            self._look_at(connection.fd)
            for seconds in _CLOSING_SECONDS:
                self._at(seconds, partial(self._look_at, connection.fd))
        if output:
            self._read_mail()  # who was heard on which
        for connection in output:
            for seconds in _CLOSING_SECONDS:
                order = OutputClosed(connection.fd, connection.pid)
                self._at(seconds, partial(self._order, order))
            self._losses.closed(connection)

    def _look_at(self, fd: int) -> None:
        """Which connections at this descriptor are gone, and what that means."""
        gone = self._connections.closed(fd)
        if gone:  # what they said last is in the sockets by now
            self._greet()
            self._read_input()
        for connection in gone:
            self._greeter.closed(connection)
            self._look_for_stalled()  # its successor may have said HELLO before
            index = self._index_of.pop(connection, None)
            if index is not None and self._sender.links[index].connection == connection:
                self._begin_death(index, "its connection closed: it was killed, or it exited")
            self._publish_readiness()

    def _begin_death(self, index: int, reason: str, grace: float = _GRACE) -> None:
        """No new requests for it from here on; what it held ends after the grace."""
        with self._shared.state as flights:
            if not flights.suspend(index, reason):
                return
            epoch = flights.engines[index].epoch
        epochs = [link.epoch for link in self._sender.links.values()]
        self._newest[index] = max(epochs, default=epoch)
        self._at(grace, partial(self._order, Retire(index, epoch, reason, last_call=not grace)))
        if grace:
            self._at(_LONG_GRACE, partial(self._order, Retire(index, epoch, reason)))

    def _dropped(self, item: mail.Dropped) -> None:
        """The receiver has ended what the engine held: its index is free for a successor."""
        link = self._sender.links.get(item.engine_index)
        if link is None or link.epoch != item.epoch:
            return
        self._sender.abort(item.requests)  # it may still read, even if nobody can read it
        self._sender.drop(item.engine_index)
        self._outputs.forget(item.engine_index)
        self._index_of.pop(link.connection, None)
        # Not there: the receiver found it dead just now.
        newest = self._newest.pop(item.engine_index, math.inf)
        if link.lockstep:
            self._lose_group(item.engine_index, item.reason, newest)
        for index in self._startup.died(item.engine_index):
            self._greeter.send_init(index)
        self._publish_readiness()

    def _lose_group(self, dead: int, reason: str, newest: float) -> None:
        """No rank of a lockstep group can step without the others. What has registered since its
        death began is of another group."""
        text = f"engine {dead} of its lockstep group died ({reason})"
        for index in self._sender.lockstep():
            if self._sender.links[index].epoch <= newest:
                self._begin_death(index, text, grace=0.0)

    def _suspect(self, item: mail.Suspect) -> None:
        with self._shared.state as flights:
            alive = flights.alive_indices()
        candidates = frozenset(self._outputs.candidates(item.fd, alive))
        order = Blame(item.fd, item.reason, item.unreadable, candidates, item.sole)
        # The culprit's connections usually close now and tell who it was.
        grace = _UNREADABLE_GRACE if item.unreadable else _FAREWELL_GRACE
        self._at(grace if item.sole is None else 0.0, partial(self._order, order))

    def _check_silence(self) -> None:
        assert self._silence.interval is not None
        now = time.monotonic()
        with self._shared.state as flights:
            quiet = {
                index: now - max(record.last_output, record.busy_since)
                for index, record in flights.engines.items()
                if record.info.alive and flights.routing.inflight(index)
            }
        for index, seconds in self._silence.overdue(quiet, now):
            self._begin_death(
                index, f"it held requests and sent nothing for {seconds:.1f} s", grace=0.0
            )
        self._at(self._silence.interval, self._check_silence)

    # -- what callers post

    def _read_mail(self) -> None:
        items = self._shared.mailbox.take()
        # What is posted meanwhile waits: clocks and engines have their turn, too.
        for _ in range(min(len(items), _MESSAGES_A_TURN)):
            item = items.popleft()
            self._actions[type(item)](item)
        self._lockstep.wake_for_requests()

    def _settle(self, item: mail.Settle) -> None:
        wake_all(self._shared.settle(item.requests, item.end))
        self._sender.abort([request for request in item.requests if request.aborted])

    def _stop(self, item: mail.Stop) -> None:
        self._stopping = True
        self._quiet = self._quiet or item.quiet

    # -- the end

    def say_goodbye(self) -> None:
        """Tell everyone, and send the last aborts."""
        try:
            if not self._quiet:
                self._sender.abort(self._shared.close(client_closed))
            while self._shared.mailbox.has_items():
                self._read_mail()
        except Exception:
            log.exception("tszmq: the last aborts could not be sent")
