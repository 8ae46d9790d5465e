"""The receiver thread: owns the output socket; blocks, decodes, applies, wakes, and no more.

It never refers to the client. It blocks in one ``recv`` without a timeout; the control thread
wakes it through an inproc connection to the same socket (``WAKE``) after putting an order in
``orders``. Messages are received as frames, not as bytes: their flag says whether more frames
follow, and their metadata names the connection they came on, which is the only way to tell
which engine sent a death sentinel or bytes that cannot be read.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import zmq

from tszmq.core.endings import engine_died
from tszmq.core.request import Wakeable
from tszmq.errors import DecodeError, EngineDead, TszmqError
from tszmq.net.gate import never_waits
from tszmq.net.log import Limited, log
from tszmq.net.mailbox import Dropped, Learnt, OutputLost, Suspect, Wave
from tszmq.net.orders import Blame, Halt, Joined, OutputClosed, Retire
from tszmq.net.peers import Attribution
from tszmq.net.shared import Shared, wake_all
from tszmq.net.sockets import NOWHERE, WAKE, Owned, source_fd
from tszmq.wire.base import (
    ENGINE_CORE_DEAD,
    BatchDecoder,
    EngineBatch,
    StartWave,
    UtilityResult,
    WaveComplete,
)

__all__ = ["run_receiver"]


_DRAIN_BATCHES = 32  # messages handled before those who wait are woken, if as many are ready
_WAKES_A_BATCH = 2  # and one for so many: a thread takes about as long to wake as half a message
_WAKES_AT_ONCE = 16  # threads: every one that waits for the interpreter slows the others down
# Connections are read in turn: when so many messages in a row are from others, a dead engine's
# last one has been read.
_OTHERS_IN_A_ROW = 1000
_DRAIN_SECONDS = 5.0  # for an engine that is called dead and goes on sending
_UNREADABLE_IN_A_ROW = 3
_LULL = 0.0005  # seconds without a message
_MOST_FRAMES = 1 << 16  # of a message: a few a request, where many have logprobs
_POLLIN = int(zmq.POLLIN)  # the flag itself is an object that computes in Python


def run_receiver(
    output: Owned[zmq.Socket[bytes]], orders: deque[Any], shared: Shared, max_message_bytes: int
) -> None:
    """The thread's whole life. Whatever happens in it, every waiter hears of it."""
    never_waits()
    socket = output.take()
    try:
        _Receiver(socket, orders, shared, max_message_bytes).run()
    except BaseException as error:
        # MemoryError and bugs of ours included: nobody else would tell the waiters.
        shared.fail("the receiver thread", error)
        log.exception("tszmq: the receiver thread failed; the client is closed")
    finally:
        with contextlib.suppress(zmq.ZMQError):  # whoever ended the context waits for the next line
            socket.disable_monitor()
        socket.close(0)
        shared.receiver_ended.set()


class _Receiver:
    def __init__(
        self,
        socket: zmq.Socket[bytes],
        orders: deque[Any],
        shared: Shared,
        max_message_bytes: int,
    ) -> None:
        self._socket = socket
        self._orders = orders
        self._shared = shared
        self._decoder: BatchDecoder = shared.protocol.decoder()
        self._wakes: list[Wakeable] = []
        self._patience = _DRAIN_BATCHES  # messages
        self._last_woken = 0  # how many
        self._dead: list[Retire] = []
        self._halted = False
        self._hidden = False  # somebody reads along and has not been shown what came
        self._sources = Attribution()
        self._unreadable: dict[int, int] = {}  # fd -> messages in a row
        self._strangers = Limited()
        self._max_bytes = max_message_bytes  # of all frames together

    def run(self) -> None:
        recv, clock = self._socket.recv, time.monotonic
        try:
            while not self._halted:
                asked = clock()
                frame = recv(copy=False)
                now = clock()
                self._take(frame, now)
                if not (self._hidden or self._wakes or self._dead):
                    continue
                lull = now - asked > _LULL
                if lull and self._last_woken <= _WAKES_AT_ONCE and not self._dead:
                    self._wake()  # nothing else is ready, most likely, and looking takes time
                else:
                    self._drain()
        finally:
            # Their requests have ended: whoever looks for unfinished ones does not find them.
            wake_all(self._wakes)

    def _drain(self) -> None:
        """Take what else is ready, then wake once; look longer for a dead engine's last words."""
        socket, limit = self._socket, time.monotonic() + _DRAIN_SECONDS
        taken = others = 0
        while socket.getsockopt(zmq.EVENTS) & _POLLIN:  # type: ignore[operator]
            if taken >= self._patience:
                if not self._dead or others > _OTHERS_IN_A_ROW or time.monotonic() > limit:
                    break
                self._wake()
                taken = 0
            source = self._take(socket.recv(copy=False), time.monotonic())
            taken += 1
            if self._dead:
                dying = {order.engine_index for order in self._dead}
                others = 0 if source in dying else others + 1
            if self._halted:
                break
        self._wake()
        dead, self._dead = self._dead, []
        for order in dead:
            self._retire(order)

    def _wake(self) -> None:
        """Wake everyone whom the last batches concern."""
        if self._hidden:
            self._hidden = False
            with self._shared.state as flights:
                self._wakes += flights.reveal()
        wakes, self._wakes = self._wakes, []
        self._last_woken = len(wakes)
        self._patience = max(_DRAIN_BATCHES, len(wakes) // _WAKES_A_BATCH)
        for start in range(0, len(wakes), _WAKES_AT_ONCE):
            if start:
                time.sleep(0)  # lets them have the interpreter
            wake_all(wakes[start : start + _WAKES_AT_ONCE])

    def _take(self, frame: Any, now: float) -> int | None:
        """One message, which came at that time. Returns the engine whose batch it was, if it was
        one of ours."""
        data = frame.bytes
        frames = [data]
        if frame.more:
            if not self._take_rest(frames):
                self._refuse(source_fd(frame))
                return None
        elif data == WAKE:
            self._obey()
            return None
        elif data == ENGINE_CORE_DEAD:
            self._blame(source_fd(frame), "it sent ENGINE_CORE_DEAD", unreadable=False)
            return None
        try:
            batch = self._decoder.decode(frames)
            if not batch.request_ids:
                self._check_sender(batch, source_fd(frame))
            with self._shared.state as flights:
                applied = flights.apply(batch, now)
            if batch.signals:
                self._pass_on(batch.signals)
        except DecodeError as error:
            self._note_unreadable(source_fd(frame), error)
            return None
        self._wakes += applied.wakes
        self._hidden |= applied.hidden
        if applied.owed:
            self._shared.abort_ended(applied.owed)
        if self._unreadable:
            self._unreadable.pop(source_fd(frame), None)
        # Anybody can name an engine; its requests' ids are secret.
        named = applied.source if batch.request_ids else None
        if named is not None and not self._sources.knows(named):
            self._obey()  # that it joined may stand there unread, and would make it forgotten again
            fd = source_fd(frame)
            if fd != NOWHERE:
                self._sources.learn(named, fd)
                self._shared.mailbox.post(Learnt(named, fd))
        return applied.source

    def _pass_on(self, signals: Sequence[WaveComplete | StartWave | UtilityResult]) -> None:
        """What is not rows: answers to their callers, waves to the control thread."""
        for signal in signals:
            if isinstance(signal, UtilityResult):
                with self._shared.state as flights:
                    self._wakes += flights.calls.answer(signal)
            else:
                self._shared.mailbox.post(Wave(signal))

    def _take_rest(self, frames: list[bytes]) -> bool:
        """The other frames of a message: they belong to it, whatever becomes of it. False when
        they are too many, or too large together."""
        size = len(frames[0])
        more = fits = True
        while more:
            frame = self._socket.recv(copy=False)
            more = frame.more
            size += len(frame)
            fits = fits and size <= self._max_bytes and len(frames) < _MOST_FRAMES
            if fits:
                frames.append(frame.bytes)
        return fits

    def _refuse(self, fd: int) -> None:
        """A message was too large: whose it was knows what it said, and will not say it again."""
        reason = (
            f"a message was too large for max_message_bytes, {self._max_bytes}, or of more than "
            f"{_MOST_FRAMES} frames"
        )
        suspects = self._suspects(fd, unreadable=False)
        if len(suspects) == 1:
            with self._shared.state as flights:
                flights.doubt(suspects[0], reason, math.inf)
            self._shared.mailbox.post(OutputLost(suspects[0], reason))
        self._note_unreadable(fd, DecodeError(reason))

    def _check_sender(self, batch: EngineBatch, fd: int) -> None:
        """Anybody can send a batch without rows: it tells an engine's load if that is known to
        have sent it."""
        index = batch.engine_index
        if index is not None and not self._sources.is_of(fd, index):
            batch.engine_index = None

    # -- engines that are dead or cannot be understood

    def _note_unreadable(self, fd: int, error: DecodeError) -> None:
        if not self._unreadable.get(fd):
            self._strangers.warning(f"an output message is dropped: {error}")
        if len(self._unreadable) > 1000:  # strangers that come and go
            self._unreadable.clear()
        count = self._unreadable[fd] = self._unreadable.get(fd, 0) + 1
        # Looked into once, and now and then again.
        if count == _UNREADABLE_IN_A_ROW or count % 1000 == 0:
            reason = f"{count} of its messages in a row could not be read, the last: {error!s:.300}"
            self._blame(fd, reason, unreadable=True)

    def _blame(self, fd: int, reason: str, *, unreadable: bool) -> None:
        """Find out which engine it was. The control thread, which knows when the connection was
        made, and that of the engines, has the last word unless an engine's batches came there."""
        suspects = self._suspects(fd, unreadable)
        if suspects and self._sources.is_known(fd):
            self._condemn(suspects[0], reason, unreadable)
        elif suspects:
            sole = suspects[0] if len(suspects) == 1 else None
            self._shared.mailbox.post(Suspect(reason, fd, unreadable, sole))
        else:
            self._warn_of_stranger(reason)

    def _warn_of_stranger(self, reason: str) -> None:
        self._strangers.warning(f"a connection that belongs to no living engine: {reason}")

    def _suspects(self, fd: int, unreadable: bool) -> list[int]:
        """Who may have sent what came there. Nobody sends batches who holds no requests."""
        with self._shared.state as flights:
            alive = [
                index
                for index, record in flights.engines.items()
                if not record.dropped and (not unreadable or flights.routing.inflight(index))
            ]
        return self._sources.suspects(fd, alive)

    def _condemn(self, index: int, reason: str, unreadable: bool) -> None:
        with self._shared.state as flights:
            flights.suspend(index, reason)
            epoch = flights.engines[index].epoch
        self._unreadable.clear()
        self._retire(Retire(index, epoch, reason), unreadable=unreadable)

    def _retire(self, order: Retire, *, unreadable: bool = False) -> None:
        kind = DecodeError if unreadable else EngineDead
        index, reason = order.engine_index, order.reason
        end = engine_died(kind, index, reason)
        with self._shared.state as flights:
            dropped = flights.drop(index, order.epoch, end, time.monotonic())
            waiting = flights.grant()
            if dropped is not None:
                failed = partial(_engine_dead_in_call, kind, index, reason)
                waiting += flights.calls.fail(flights.calls.unanswered(index), failed)
        wake_all(waiting)
        if dropped is None:
            return
        self._sources.forget(index)
        wake_all(request.gate for request in dropped)
        self._shared.mailbox.post(Dropped(index, order.epoch, reason, dropped))
        log.error("tszmq: engine %d is dead: %s; %d requests failed", index, reason, len(dropped))

    # -- orders of the control thread

    def _obey(self) -> None:
        while self._orders:
            order = self._orders.popleft()
            self._actions[type(order)](self, order)

    def _joined(self, order: Joined) -> None:
        self._sources.join(order.engine_index, order.pid)

    def _retire_soon(self, order: Retire) -> None:
        if order.last_call or not self._sources.knows(order.engine_index):
            self._dead.append(order)

    def _output_closed(self, order: OutputClosed) -> None:
        self._unreadable.pop(order.fd, None)
        with self._shared.state as flights:
            engines = list(flights.engines)
        index = self._sources.closed(order.fd, order.pid, engines)
        if index is None:
            return
        with self._shared.state as flights:
            record = flights.engines[index]
        if not record.info.alive:
            reason = record.first_error or "it went away"
            self._dead.append(Retire(index, record.epoch, reason))

    def _blame_all(self, order: Blame) -> None:
        # A connection may be gone by now: who may have had it is looked up while it is there.
        sole = order.sole
        suspects = self._suspects(order.fd, order.unreadable) if sole is None else [sole]
        guilty = [index for index in suspects if index in order.candidates]
        for index in guilty:
            self._condemn(index, order.reason, order.unreadable)
        if suspects and not guilty:
            self._warn_of_stranger(order.reason)

    def _halt(self, _: Halt) -> None:
        self._halted = True

    _actions: dict[type, Callable[..., None]] = {  # noqa: RUF012 - a dispatch table
        Joined: _joined,
        Retire: _retire_soon,
        OutputClosed: _output_closed,
        Blame: _blame_all,
        Halt: _halt,
    }


def _engine_dead_in_call(kind: type[EngineDead], index: int, reason: str) -> TszmqError:
    return kind(
        f"engine {index} is dead: {reason}; it did not answer the call",
        engine_index=index,
        reason=reason,
    )
