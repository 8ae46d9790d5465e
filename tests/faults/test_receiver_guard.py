"""What the client's own threads do not survive, and what must not hurt them: nobody waits on."""

from __future__ import annotations

import logging
import math
import threading
import time

import pytest

import tszmq
from tests.client_fixtures import answer_one, inflight
from tests.mock_engine import PATIENCE, eventually, in_thread, stays_true
from tszmq import SamplingParams
from tszmq.core.flights import Flights
from tszmq.core.rows import Rows
from tszmq.net.control import _Control
from tszmq.net.greeter import Greeter
from tszmq.net.outbox import Outbox
from tszmq.wire.tokenspeed_decoder import TokenSpeedDecoder

pytestmark = pytest.mark.timeout(30)

LONG = SamplingParams(max_tokens=8000)


class Waiters:
    """One thread in every kind of wait that there is; for a client with ``max_inflight=11``."""

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
            error = call.exception(PATIENCE)
            assert isinstance(error, tszmq.ClientClosed), error
            assert isinstance(error.__cause__, kind)
            assert kind.__name__ in str(error)
        for error in self.returning.result(PATIENCE):
            assert isinstance(error, tszmq.ClientClosed)
            assert kind.__name__ in str(error)


def check_closed(client, kind) -> None:
    """It says so, refuses with the cause, and goes down as any other."""
    assert client.is_alive is False
    for call in (client.generate, client.stream, lambda ids: client.generate_many([ids])):
        with pytest.raises(tszmq.ClientClosed) as caught:
            call([1])
        assert isinstance(caught.value.__cause__, kind)
    started = time.monotonic()
    client.close()
    assert time.monotonic() - started < PATIENCE
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
}


@pytest.mark.parametrize("name", BUGS)
def test_whatever_ends_the_receiver_everybody_hears_of_it(client_and_engines, monkeypatch, name):
    """Nobody waits for tokens that nobody will read."""
    client, [engine] = client_and_engines(max_inflight=11)
    waiting = Waiters(client, engine)
    owner, method, error = BUGS[name]
    monkeypatch.setattr(owner, method, failing(error))
    engine.tokens(waiting.rids[0], [5], "stop" if method == "_finish" else "")
    waiting.check(type(error))
    if method not in ("spill", "_finish"):  # those would have to give the places back
        assert inflight(client) == [0]
    check_closed(client, type(error))


def test_a_request_that_ended_just_before_is_a_result(client_and_engines, monkeypatch):
    """Its end was stored, and those who wait were not woken yet when the next message struck."""
    client, [engine] = client_and_engines()
    calls = [in_thread(client.generate, [1]) for _ in range(3)]
    group = in_thread(client.generate_many, [[1]])
    rids = [add.rid for add in engine.recv_adds(4)]
    decode = TokenSpeedDecoder.decode
    busy = threading.Event()

    def strike(self, frames):
        if frames == [b"strike"]:
            raise MemoryError("no more")
        batch = decode(self, frames)
        busy.wait(0.3)  # until all of them are there, so that they are taken in one go
        return batch

    monkeypatch.setattr(TokenSpeedDecoder, "decode", strike)
    monkeypatch.setattr("tszmq.net.receiver._LULL", math.inf)  # it looks for more before it wakes
    engine.send_batch([engine.row(rid, [5], "stop") for rid in rids])
    engine.send_raw([b"strike"])
    for call in calls:
        assert call.result(PATIENCE).token_ids == [5]
    assert group.result(PATIENCE)[0].token_ids == [5]
    check_closed(client, MemoryError)


CONTROL_BUGS = {
    "in sending": (Outbox, "send", MemoryError("no more")),
    "in greeting": (Greeter, "read", SystemExit(3)),
}


@pytest.mark.parametrize("name", CONTROL_BUGS)
def test_whatever_ends_the_control_thread_everybody_hears_of_it(
    client_and_engines, monkeypatch, name
):
    """Nobody waits for what nobody will send, and the addresses are free."""
    client, [engine] = client_and_engines(max_inflight=11)
    waiting = Waiters(client, engine)
    owner, method, error = CONTROL_BUGS[name]
    monkeypatch.setattr(owner, method, failing(error))
    if method == "send":
        waiting.result.close()  # has an abort sent
        waiting.calls.pop(1)
    else:
        client_and_engines.engine(client.endpoints.handshake, 7).hello()
    waiting.check(type(error))
    check_closed(client, type(error))
    again = tszmq.Client.bind(client.endpoints)
    again.close()


@pytest.mark.parametrize("name", BUGS)
def test_whatever_ends_the_receiver_the_addresses_are_free(client_and_engines, monkeypatch, name):
    """Without ``close()``: whoever has heard that the client is closed may make another."""
    client, [engine] = client_and_engines()
    stream = client.stream([1], LONG)
    call = in_thread(lambda: list(stream))
    rid = engine.recv_add().rid
    owner, method, error = BUGS[name]
    with monkeypatch.context() as patched:
        patched.setattr(owner, method, failing(error))
        engine.tokens(rid, [5], "stop" if method == "_finish" else "")
        assert isinstance(call.exception(PATIENCE), tszmq.ClientClosed)
        assert client._session.shared.ended.wait(PATIENCE)
    eventually(lambda: not any(thread.is_alive() for thread in client._session._threads))
    with tszmq.Client.bind(client.endpoints) as again:
        assert again.endpoints == client.endpoints
    check_closed(client, type(error))


def test_a_control_thread_that_cannot_be_set_up(client_and_engines, monkeypatch):
    """Whoever waits for engines hears of it, and everything is taken down."""
    monkeypatch.setattr(_Control, "__init__", failing(MemoryError("no more")))
    bound = client_and_engines.bind()
    session = bound._session
    with pytest.raises(tszmq.ClientClosed, match="no more") as caught:
        in_thread(bound.connect, 60).result(PATIENCE)
    assert isinstance(caught.value.__cause__, MemoryError)
    assert session.shared.ended.wait(PATIENCE)
    in_thread(bound.close).result(PATIENCE)
    eventually(lambda: not any(thread.is_alive() for thread in session._threads))
    with tszmq.Client.bind(bound.endpoints) as again:
        assert again.endpoints == bound.endpoints


def test_a_failure_while_engines_are_awaited(client_and_engines, monkeypatch):
    """The constructor hears of it, too."""
    monkeypatch.setattr(Greeter, "read", failing(MemoryError("no more")))
    bound = client_and_engines.bind()
    connecting = in_thread(bound.connect, 20)
    client_and_engines.engine(bound.endpoints.handshake, 0).hello()
    with pytest.raises(tszmq.ClientClosed) as caught:
        connecting.result(PATIENCE)
    assert isinstance(caught.value.__cause__, MemoryError)


# --- log handlers run in the client's own threads ---------------------------------------------


@pytest.fixture
def on_log():
    """Calls a function for every record of the logger ``tszmq``, in the thread that logs."""
    logger = logging.getLogger("tszmq")
    handlers = []

    def add(function):
        handler = logging.Handler()
        handler.emit = function
        handlers.append(handler)
        logger.addHandler(handler)

    yield add
    for handler in handlers:
        logger.removeHandler(handler)


def provoke(client, engine, thread) -> None:
    """Have that thread of the client's log something."""
    if thread == "receiver":
        engine.send_raw([b"\xc1"])
    else:
        stranger = type(engine)(client.endpoints.handshake, engine.index)
        stranger.hello()
        eventually(lambda: f"taken: {engine.index}" in client._session.shared.readiness.text)
        stranger.close()


@pytest.mark.parametrize("thread", ["receiver", "control"])
def test_a_log_handler_may_look_and_abort(client_and_engines, on_log, thread):
    """No lock is held while something is logged."""
    client, [engine] = client_and_engines()
    seen = []

    def emit(record):
        client.abort("mine")
        seen.append((client.health()[0].inflight, client.load(0), client.is_alive))

    doomed = in_thread(client.generate, [1], request_id="mine")
    engine.recv_add()
    on_log(emit)
    provoke(client, engine, thread)
    assert doomed.result(PATIENCE).finish_reason == "abort"
    engine.recv_abort()
    eventually(lambda: seen)
    assert seen[0] == (0, None, True)
    answer_one(client, engine)


@pytest.mark.parametrize("thread", ["receiver", "control"])
def test_a_log_handler_may_close(client_and_engines, on_log, thread):
    """It does not wait for the thread that it runs in."""
    client, [engine] = client_and_engines()
    call = in_thread(client.generate, [1])
    engine.recv_add()
    took = []

    def emit(record):
        started = time.monotonic()
        client.close()
        took.append(time.monotonic() - started)

    on_log(emit)
    provoke(client, engine, thread)
    with pytest.raises(tszmq.ClientClosed):
        call.result(PATIENCE)
    eventually(lambda: took)
    assert took[0] < PATIENCE
    client.close()
    assert not [t for t in client._session._threads if t.is_alive()]


@pytest.mark.parametrize("thread", ["receiver", "control"])
@pytest.mark.parametrize("kind", ["generate", "next", "result", "generate_many", "place"])
def test_a_log_handler_that_would_wait_for_itself(client_and_engines, on_log, thread, kind):
    """The tokens it waits for come through the very thread that waits: an error at once."""
    client, [engine] = client_and_engines(max_inflight=2)
    errors = []
    stream = client.stream([1], LONG)
    engine.recv_add()
    call = {
        "generate": lambda: client.generate([1]),
        "next": lambda: next(stream),
        "result": lambda: stream.result(),
        "generate_many": lambda: client.generate_many([[1]]),
        "place": lambda: [client.generate([1]) for _ in range(2)],
    }[kind]

    def emit(record):
        if errors:
            return
        errors.append(None)
        try:
            call()
        except RuntimeError as error:
            errors[0] = error

    on_log(emit)
    provoke(client, engine, thread)
    eventually(lambda: errors and errors[0])
    assert "thread of the client's own" in str(errors[0])
    stream.close()
    eventually(lambda: inflight(client) == [0])
    eventually(lambda: engine.drain() is not None and not engine.unfinished)
    answer_one(client, engine)


@pytest.mark.parametrize("thread", ["receiver", "control"])
def test_a_log_handler_that_raises_hurts_nobody(client_and_engines, on_log, thread, capsys):
    """It is somebody else's bug, and not worth the requests of all."""
    client, [engine] = client_and_engines()
    call = in_thread(client.generate, [1])
    rid = engine.recv_add().rid
    on_log(failing(ZeroDivisionError("a bug of the handler's")))
    provoke(client, engine, thread)
    engine.tokens(rid, [5], "stop")
    assert call.result(PATIENCE).token_ids == [5]
    answer_one(client, engine)
    assert "a bug of the handler's" in capsys.readouterr().err
