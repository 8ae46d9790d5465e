"""What the client's own threads do not survive, and what must not hurt them: nobody waits on."""

from __future__ import annotations

import logging
import threading
import time

import pytest

import tszmq
from tests.client_fixtures import answer_one, inflight
from tests.mock_engine import eventually, in_thread, stays_true
from tszmq import SamplingParams
from tszmq.core.flights import Flights
from tszmq.core.rows import Rows
from tszmq.net import control, receiver
from tszmq.net.greeter import Greeter
from tszmq.net.outbox import Outbox
from tszmq.wire.tokenspeed_decoder import TokenSpeedDecoder

pytestmark = pytest.mark.timeout(30)

LONG = SamplingParams(max_tokens=8000)


class Waiters:
    """One thread in every kind of wait that there is."""

    def __init__(self, client, engine) -> None:
        self.stream = client.stream([1], LONG)
        self.result = client.stream([1], LONG)
        self.rids = [add.rid for add in engine.recv_adds(2)]
        self.reader = in_thread(list, self.stream)
        self.calls = [
            self.reader,
            in_thread(self.result.result),
            in_thread(client.generate, [1], LONG),
            in_thread(client.generate, [1], LONG, timeout=60),
            in_thread(client.generate_many, [[1], [2]], LONG),
            in_thread(list, client.as_completed([[1], [2]], LONG)),
            in_thread(list, client.stream_many([[1]], LONG)),
        ]
        self.returning = in_thread(client.generate_many, [[1], [2]], LONG, errors="return")
        engine.recv_adds(9)
        self.placeless = in_thread(client.generate, [1], LONG)
        stays_true(lambda: not self.placeless.done(), 0.05)
        self.calls.append(self.placeless)

    def check(self, kind) -> None:
        """Each has heard, and of what it was."""
        for call in self.calls:
            error = call.exception(3)
            assert isinstance(error, tszmq.ClientClosed), error
            assert isinstance(error.__cause__, kind)
            assert kind.__name__ in str(error)
        for error in self.returning.result(3):
            assert isinstance(error, tszmq.ClientClosed)
            assert kind.__name__ in str(error)


def waiters(client, engine) -> Waiters:
    """For a client with ``max_inflight=11``."""
    return Waiters(client, engine)


def check_closed(client, kind) -> None:
    """It says so, refuses with the cause, and goes down as any other."""
    assert client.is_alive is False
    for call in (client.generate, client.stream, lambda ids: client.generate_many([ids])):
        with pytest.raises(tszmq.ClientClosed) as caught:
            call([1])
        assert isinstance(caught.value.__cause__, kind)
    started = time.monotonic()
    client.close()
    assert time.monotonic() - started < 2
    assert not [t for t in client._session._threads if t.is_alive()]


def failing(error):
    """A method that a bug, or the memory's end, has struck."""

    def fail(*_, **__):
        raise error

    return fail


BUGS = {
    "MemoryError in the decoder": (TokenSpeedDecoder, "decode", MemoryError("no more")),
    "SystemExit in the decoder": (TokenSpeedDecoder, "decode", SystemExit(3)),
    "a bug in the decoder": (TokenSpeedDecoder, "decode", AttributeError("a bug")),
    "KeyboardInterrupt in the decoder": (TokenSpeedDecoder, "decode", KeyboardInterrupt()),
    "a bug in apply": (Flights, "apply", RecursionError("a bug")),
    "a bug in the middle of apply": (Flights, "_commit", ZeroDivisionError("a bug")),
    "a bug in dealing out tokens": (Rows, "spill", IndexError("a bug")),
    "a bug in ending a request": (Flights, "_finish", KeyError("a bug")),
    "a bug in what is shown": (Flights, "reveal", TypeError("a bug")),
    "a bug in waking": (receiver, "wake_all", OSError("a bug")),
}


@pytest.mark.parametrize("name", BUGS)
def test_whatever_ends_the_receiver_everybody_hears_of_it(client_and_engines, monkeypatch, name):
    """Nobody waits for tokens that nobody will read."""
    client, [engine] = client_and_engines(max_inflight=11)
    waiting = waiters(client, engine)
    owner, method, error = BUGS[name]
    monkeypatch.setattr(owner, method, failing(error))
    engine.tokens(waiting.rids[0], [5])
    engine.tokens(waiting.rids[1], [5], "stop")
    waiting.check(type(error))
    if method not in ("spill", "_finish"):  # those would have to give the places back
        assert inflight(client) == [0]
    check_closed(client, type(error))
