"""Placing a request and taking it back: what every calling thread does."""

from __future__ import annotations

import time
from functools import partial

import attrs

from tszmq.core.request import End, Request, Wakeable
from tszmq.errors import QueueFull
from tszmq.net.gate import Gate
from tszmq.net.mailbox import Add, Expire, Run, Settle
from tszmq.net.session import Session
from tszmq.net.shared import Shared, wake_all
from tszmq.ownership import holds_a_lock
from tszmq.types import EngineInfo
from tszmq.wire.base import AddRequest, WireProtocol

__all__ = [
    "Prepared",
    "admit",
    "expire_at",
    "give_up",
    "send",
    "submit",
    "withdraw",
    "withdraw_all",
]


@attrs.define(eq=False)
class Prepared:
    """A request that is validated and encoded, and not admitted yet.

    Attributes:
        request: Its local half.
        pinned: The engine that it has to go to, or None.
        add: What its engine is asked for, and the registration that this was validated against.
        frames: The same on the wire.
    """

    request: Request
    pinned: int | None
    add: AddRequest
    frames: list[bytes]

    def adapt(self, protocol: WireProtocol, engine: EngineInfo) -> None:
        """Engines have come or gone: validate and encode again.

        Raises:
            InvalidRequest: It does not fit those that are there.
        """
        add = self.add
        protocol.check(add.prompt_token_ids, add.sampling_params, add.priority, engine)
        self.add = attrs.evolve(add, engine=engine)
        self.frames = protocol.encode_add(self.add)


def admit(session: Session, prepared: Prepared, ticket: Wakeable) -> bool:
    """Take a place without waiting; False when there is none.

    Also True without a place when the request was aborted before it got one.

    Raises:
        ClientClosed, EngineDead, InvalidRequest: Nothing was reserved.
    """
    while True:
        with session.shared.state as flights:
            engine = flights.limits(prepared.pinned)
            if engine is prepared.add.engine:
                return flights.admit(prepared.request, prepared.pinned, time.monotonic(), ticket)
        prepared.adapt(session.shared.protocol, engine)


def give_up(session: Session, ticket: Wakeable) -> None:
    """A ticket will not be used: its turn goes to the next."""
    if session.max_inflight is None or session.is_foreign():
        return
    if holds_a_lock():
        # A finalizer of the caller's, run by the collector inside a guarded block.
        session.shared.mailbox.post(Run(partial(_give_up, session.shared, ticket)))
        return
    _give_up(session.shared, ticket)


def _give_up(shared: Shared, ticket: Wakeable) -> None:
    with shared.state as flights:
        # Also those whom a caller gave a turn and was cut off before it woke them.
        flights.give_up(ticket)
        granted = flights.places.granted()
    wake_all(granted)


def submit(session: Session, prepared: Prepared, deadline: float | None) -> None:
    """Place a request, waiting for a place until the deadline, and send it; neither when it is
    aborted meanwhile.

    Raises:
        QueueFull: No place until then.
        ClientClosed, EngineDead, InvalidRequest: Nothing was reserved.
    """
    if session.max_inflight is None:
        admit(session, prepared, prepared.request.gate)
    else:
        _wait_for_place(session, prepared, deadline)
    if prepared.request.engine_index >= 0:
        send(session, prepared)


def send(session: Session, prepared: Prepared) -> None:
    """Hand a request that has its place to the control thread.

    A caller that submits without a pause keeps the interpreter for a switch interval at a time,
    and the control thread lets go of it with each frame: it would send some hundred requests a
    second. So whoever is far ahead of it makes way.
    """
    mailbox = session.shared.mailbox
    mailbox.post(Add(prepared.request, prepared.frames))
    if mailbox.is_crowded():
        time.sleep(0)


def _wait_for_place(session: Session, prepared: Prepared, deadline: float | None) -> None:
    turn = _Turn()
    try:
        try:
            _take_turn(session, prepared, deadline, turn)
            if prepared.request.engine_index < 0:
                give_up(session, turn)  # aborted: the place is the next one's
        except BaseException:
            give_up(session, turn)
            raise
    except BaseException:
        give_up(session, turn)  # again: a signal may have cut that off
        raise


def _take_turn(session: Session, prepared: Prepared, deadline: float | None, turn: _Turn) -> None:
    while not admit(session, prepared, turn):
        if not turn.wait(turn.take, deadline):
            raise QueueFull(
                f"max_inflight, {session.max_inflight} requests, is reached, and no place became "
                "free in time: give a longer timeout, or the client a larger max_inflight"
            )


class _Turn(Gate):
    """A place in the queue: remembers that it was woken."""

    __slots__ = ("_woken",)

    def __init__(self) -> None:
        super().__init__()
        self._woken = False

    def wake(self) -> None:
        self._woken = True
        super().wake()

    def take(self) -> bool:
        """Whether it was woken since the last call."""
        if not self._woken:
            return False
        self._woken = False
        return True


def expire_at(session: Session, request: Request, deadline: float, timeout: float) -> None:
    """Have the request end at its deadline even if nobody reads."""
    session.shared.mailbox.post(Expire(deadline, timeout, request))


def withdraw(session: Session, request: Request, end: End) -> None:
    """End a request from this side and abort it; no-op when it has ended or was never placed."""
    withdraw_all(session, [request], end)


def withdraw_all(session: Session, requests: list[Request], end: End) -> None:
    """The same for several, in one step."""
    if not requests or session.is_foreign():
        return
    shared = session.shared
    # Before anything else, so that nothing is lost wherever a signal cuts this off.
    shared.mailbox.post(Settle(requests, end))
    if not holds_a_lock():
        wake_all(shared.settle(requests, end))
