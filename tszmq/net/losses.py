"""Output that is lost while its engine lives: whoever waits for it is told.

A connection of the output socket closed, or a message was refused. What was on its way will not
come again, and the wire does not say whose it was: everything that the engine held then ends, and
what it was sent before it had a new connection. As long as it has none it gets nothing new, and
when it makes none it is dead.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial

import attrs

from tszmq.core.calls import Call
from tszmq.core.endings import answer_lost, output_lost
from tszmq.core.flights import Flights
from tszmq.core.request import Request, Wakeable
from tszmq.net.log import log
from tszmq.net.mailbox import OutputLost
from tszmq.net.shared import Shared, wake_all
from tszmq.net.sockets import Monitor

__all__ = ["Losses"]

_GRACE = 0.5  # seconds for the engine to turn out dead, or to make a new connection
_LOOK_SECONDS = 0.1  # after that, whether it has
_MUTE_SECONDS = 10.0  # without a new one


@attrs.frozen(eq=False)
class _Loss:
    """Output that is lost, and who waited for it.

    Attributes:
        item: As it was told.
        epochs: Of the engines one of which sent it.
        ids, calls: What they held then.
        at: When (monotonic seconds).
    """

    item: OutputLost
    epochs: dict[int, int]
    ids: list[str]
    calls: list[Call]
    at: float


class Losses:
    """For the control thread.

    Args:
        shared: The client's.
        monitor: Of the output socket.
        at: Calls a function after so many seconds.
        pid_of: An engine's process, as far as it is known.
        abort: Tells engines that nobody waits for these requests.
        give_up: An engine is dead, and why.
    """

    def __init__(
        self,
        shared: Shared,
        monitor: Monitor,
        *,
        at: Callable[[float, Callable[[], None]], None],
        pid_of: Callable[[int], int | None],
        abort: Callable[[list[Request]], None],
        give_up: Callable[[int, str], None],
    ) -> None:
        self._shared = shared
        self._monitor = monitor
        self._at = at
        self._pid_of = pid_of
        self._abort = abort
        self._give_up = give_up

    def note(self, item: OutputLost) -> None:
        """Output was lost: unless its engine dies of the same, those who wait for it are told."""
        with self._shared.state as flights:
            epochs = {index: flights.engines[index].epoch for index in item.suspects}
            ids = [each for index in epochs for each in flights.routing.inflight_ids(index)]
            calls = [call for index in epochs for call in flights.calls.unanswered(index)]
        loss = _Loss(item, epochs, ids, calls, time.monotonic())
        self._at(_GRACE, partial(self._tell, loss))

    def _tell(self, loss: _Loss) -> None:
        item = loss.item
        until = self._lost_until(item)
        with self._shared.state as flights:
            if _has_died(flights, loss.epochs):
                return  # that was why, and what it held has ended
            ended, waiting = _end(flights, loss, until)
            is_new = until == math.inf and flights.mute(item.suspects[0])
            if until < math.inf and item.accepted is not None and len(item.suspects) == 1:
                flights.unmute(item.suspects[0])
        wake_all(waiting)
        wake_all(request.gate for request in ended)
        self._abort(ended)
        if ended:
            whose = " or ".join(map(str, item.suspects))
            log.error(
                "tszmq: output of engine %s was lost: %s; %d requests failed",
                *(whose, item.reason, len(ended)),
            )
        if until < math.inf:
            return
        if is_new:
            text = "tszmq: engine %d gets no requests until it has a new output connection"
            log.warning(text, item.suspects[0])
        if time.monotonic() - loss.at < _MUTE_SECONDS:
            self._at(_LOOK_SECONDS, partial(self._tell, loss))
        else:
            reason = "it lost its output connection and did not make a new one"
            self._give_up(item.suspects[0], reason)

    def _lost_until(self, item: OutputLost) -> float:
        """When what was sent to the engine could be answered again; infinite when not yet."""
        if item.accepted is None:
            return 0.0  # it has its connection
        if len(item.suspects) > 1:
            return self._monitor.last_accepted
        pid = self._pid_of(item.suspects[0])
        return (
            self._monitor.last_accepted if self._monitor.came_back(pid, item.accepted) else math.inf
        )


def _has_died(flights: Flights, epochs: dict[int, int]) -> bool:
    """Whether one of these engines is not the one any more that it was."""
    for index, epoch in epochs.items():
        record = flights.engines[index]
        if record.epoch != epoch or not record.info.alive:
            return True
    return False


def _end(flights: Flights, loss: _Loss, until: float) -> tuple[list[Request], list[Wakeable]]:
    """End the requests and calls that a loss is about. Returns those requests, and whom to wake
    beside them."""
    reason, now = loss.item.reason, time.monotonic()
    ids = dict.fromkeys(loss.ids)
    for index in loss.epochs:
        for wire_id in flights.routing.inflight_ids(index):
            if flights.requests[wire_id].admitted <= until:
                ids[wire_id] = None
    ended = []
    for wire_id in ids:
        request = flights.requests.get(wire_id)
        if request is not None:
            end = output_lost(request.engine_index, reason)
            if flights.withdraw(request, end, now):
                ended.append(request)
    waiting = flights.grant()
    for call in loss.calls:
        waiting += flights.calls.fail([call], partial(answer_lost, call.engine_index, reason))
    return ended, waiting
