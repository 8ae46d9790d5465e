"""Output that is lost while its engine lives: whoever waits for it is told.

A connection of the output socket closed, or a message was refused. What was on its way will not
come again, and the wire does not say whose it was: everything ends that the engine was sent before
it had the connection that it has now. As long as it has none it gets nothing new, and when it
makes none it is dead.
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
from tszmq.net.monitors import Connection
from tszmq.net.outputs import Outputs
from tszmq.net.shared import Shared, wake_all

__all__ = ["Losses"]

_READ_SECONDS = 0.05  # until what came before a connection closed has been read
_GRACE = 0.5  # seconds for the engine to turn out dead, or to make a new connection
_GRACE_OF_SEVERAL = 5.0  # the same, where it is one of several: one that ends takes its time
_LOOK_SECONDS = 0.1  # after that, whether it has
_MOST_LOOKS = 300
_CLOSED = "a message was too large for max_message_bytes, or the connection broke"


@attrs.define(eq=False)
class _Loss:
    """Output that is lost, and who waited for it.

    Attributes:
        epochs: Of the engine that sent it; or of several, one of which did.
        reason: For the error.
        refused: Its connection is there.
        requests, calls: What they held then.
        looks: How often it was looked whether the engine has a new connection.
    """

    epochs: dict[int, int]
    reason: str
    refused: bool
    requests: list[Request]
    calls: list[Call]
    looks: int = 0


class Losses:
    """For the control thread.

    Args:
        shared: The client's.
        outputs: Which connections may be whose.
        at: Calls a function after so many seconds.
        abort: Tells engines that nobody waits for these requests.
        give_up: An engine is dead, and why.
    """

    def __init__(
        self,
        shared: Shared,
        outputs: Outputs,
        at: Callable[[float, Callable[[], None]], None],
        abort: Callable[[list[Request]], None],
        give_up: Callable[[int, str], None],
    ) -> None:
        self._shared = shared
        self._outputs = outputs
        self._at = at
        self._abort = abort
        self._give_up = give_up

    def refused(self, item: OutputLost) -> None:
        """A message was not read."""
        self._note([item.engine_index], item.reason, refused=True)

    def closed(self, gone: Connection) -> None:
        """A connection of the output socket closed."""
        with self._shared.state as flights:
            alive = flights.alive_indices()
        suspects = self._outputs.suspects(gone, alive)
        if len(suspects) == 1:
            self._at(_READ_SECONDS, partial(self._doubt, suspects[0]))
        if suspects:
            self._note(suspects, _CLOSED, refused=False)

    def _doubt(self, index: int) -> None:
        """Before it has dialled in again, and goes on as if nothing were missing."""
        with self._shared.state as flights:
            alive = flights.alive_indices()
        until = self._outputs.reachable_since(index, alive)
        with self._shared.state as flights:
            flights.doubt(index, _CLOSED, until)

    def _note(self, suspects: list[int], reason: str, *, refused: bool) -> None:
        with self._shared.state as flights:
            loss = _Loss(
                {index: flights.engines[index].epoch for index in suspects},
                reason,
                refused,
                [request for index in suspects for request in flights.held(index)],
                [call for index in suspects for call in flights.calls.unanswered(index)],
            )
        self._at(_GRACE if len(suspects) == 1 else _GRACE_OF_SEVERAL, partial(self._tell, loss))

    def _tell(self, loss: _Loss) -> None:
        """Unless an engine died of the same, those who wait for what is lost are told."""
        with self._shared.state as flights:
            if _has_died(flights, loss.epochs):
                return  # that was why, and what it held has ended
            alive = flights.alive_indices()
        since = {index: self._outputs.reachable_since(index, alive) for index in loss.epochs}
        cut_off = [] if loss.refused else [i for i, each in since.items() if each == math.inf]
        sole = _only(cut_off) if cut_off else _only(list(since))
        # Where others are cut off, too, it may have a connection that may be one of theirs.
        silenced = sole if cut_off and not self._may_be_reachable(sole) else None
        is_new = False
        with self._shared.state as flights:
            requests = loss.requests if sole is None else _of(sole, loss.requests)
            if silenced is not None:
                requests = flights.held(silenced)
                is_new = flights.mute(silenced)
            elif sole is not None and not loss.refused:
                requests = requests if cut_off else flights.held(sole, since[sole])
                flights.unmute(sole)
            ended, waiting = _end(flights, loss, requests)
        wake_all(waiting)
        wake_all(request.gate for request in ended)
        self._abort(ended)
        _log(loss, ended, silenced if is_new else None)
        if cut_off:
            loss.epochs = {index: loss.epochs[index] for index in cut_off}
            self._look_again(loss, silenced)

    def _may_be_reachable(self, index: int | None) -> bool:
        return index is None or self._outputs.may_be_reachable(index)

    def _look_again(self, loss: _Loss, silenced: int | None) -> None:
        loss.looks += 1
        if loss.looks < _MOST_LOOKS:
            self._at(_LOOK_SECONDS, partial(self._tell, loss))
        elif silenced is not None:
            self._give_up(silenced, "it lost its output connection and did not make a new one")


def _only(indices: list[int]) -> int | None:
    return indices[0] if len(indices) == 1 else None


def _of(index: int, requests: list[Request]) -> list[Request]:
    return [request for request in requests if request.engine_index == index]


def _has_died(flights: Flights, epochs: dict[int, int]) -> bool:
    """Whether one of these engines is not the one any more that it was."""
    for index, epoch in epochs.items():
        record = flights.engines[index]
        if record.epoch != epoch or not record.info.alive:
            return True
    return False


def _end(
    flights: Flights, loss: _Loss, requests: list[Request]
) -> tuple[list[Request], list[Wakeable]]:
    """End those requests, and the calls that a loss is about. Returns the requests that this has
    ended, and whom to wake beside them."""
    now = time.monotonic()
    ended = [
        request
        for request in requests
        if flights.withdraw(request, output_lost(request.engine_index, loss.reason), now)
    ]
    waiting = flights.grant()
    for call in loss.calls:
        waiting += flights.calls.fail([call], partial(answer_lost, call.engine_index, loss.reason))
    return ended, waiting


def _log(loss: _Loss, ended: list[Request], muted: int | None) -> None:
    if ended:
        whose = " or ".join(map(str, sorted({request.engine_index for request in ended})))
        log.error(
            "tszmq: output of engine %s was lost: %s; %d requests failed",
            *(whose, loss.reason, len(ended)),
        )
    if muted is not None:
        log.warning("tszmq: engine %d gets no requests until it has a new output connection", muted)
