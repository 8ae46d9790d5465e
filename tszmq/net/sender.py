"""Everything that is sent to registered engines, in the order in which it was posted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import attrs
import zmq

from tszmq.core.request import Request
from tszmq.net.mailbox import Add, Call
from tszmq.net.outbox import Outbox
from tszmq.wire.base import WireProtocol

__all__ = ["Link", "Sender"]

_ABORTS_A_MESSAGE = 1024


@attrs.frozen(eq=False)
class Link:
    """A registered engine's input connection.

    Attributes:
        connection: Its number.
        epoch: Of the registration.
        lockstep: The engine steps together with the others of its group.
    """

    connection: int
    epoch: int
    lockstep: bool


class Sender:
    """For the control thread.

    Args:
        router: The input socket.
        protocol: The wire.
        send_timeout: Seconds that an engine may leave what it is sent unread.
        on_lost: Told an engine that nothing can be sent to, and why.

    Attributes:
        links: The engines that things are sent to, by index.
    """

    def __init__(
        self,
        router: zmq.Socket[bytes],
        protocol: WireProtocol,
        send_timeout: float,
        on_lost: Callable[[int, str], None],
    ) -> None:
        self.links: dict[int, Link] = {}
        self._protocol = protocol
        self._outbox = Outbox(router, send_timeout)
        self._on_lost = on_lost
        self._new_work = False  # of a lockstep group that has not been woken for it

    def lockstep(self) -> Iterator[int]:
        """The engines that step together; some may be dropped meanwhile."""
        return (index for index, link in list(self.links.items()) if link.lockstep)

    def drop(self, index: int) -> None:
        """The engine is dead: nothing that is queued for it will be sent."""
        del self.links[index]
        self._outbox.forget(index)

    def is_blocked(self) -> bool:
        """Whether some engine does not read what it is sent: then ``retry`` soon."""
        return bool(self._outbox.blocked)

    def retry(self) -> None:
        """Send what engines had no room for."""
        for index, reason in self._outbox.retry(time.monotonic()):
            self._on_lost(index, reason)

    def add(self, item: Add) -> None:
        """A request, unless it has ended meanwhile."""
        request = item.request
        if request.end is None:
            request.sent = True
            self._send(request.engine_index, item.frames)
            link = self.links.get(request.engine_index)
            self._new_work |= link is not None and link.lockstep

    def call(self, item: Call) -> None:
        """A utility call."""
        if item.engine_index in self.links:  # else the receiver has failed it
            self._send(item.engine_index, item.frames)

    def abort(self, requests: list[Request]) -> None:
        """One message an engine, not one a request. What was never sent needs none."""
        by_engine: dict[int, list[str]] = {}
        for request in requests:
            sent, request.sent = request.sent, False  # one abort, whoever else asks for it
            if sent and request.engine_index in self.links:
                by_engine.setdefault(request.engine_index, []).append(request.wire_id)
        for index, ids in by_engine.items():
            for start in range(0, len(ids), _ABORTS_A_MESSAGE):
                part = ids[start : start + _ABORTS_A_MESSAGE]
                self._send(index, self._protocol.encode_abort(part))

    def has_new_work(self) -> bool:
        """Whether a lockstep group was sent a request since ``send_to_group``."""
        return self._new_work

    def send_to_group(self, frames: list[bytes]) -> None:
        """The same to every rank, whoever got a request: none steps before all are awake."""
        self._new_work = False
        for index in self.lockstep():
            self._send(index, frames)

    def _send(self, index: int, frames: list[bytes]) -> None:
        reason = self._outbox.send(index, frames, time.monotonic())
        if reason is not None:
            self._on_lost(index, reason)
