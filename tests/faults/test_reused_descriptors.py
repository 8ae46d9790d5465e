"""Connections that come just as others go get their descriptors: no engine pays for another.

The control thread learns of both at once when it was kept from looking for a moment, as on a
busy machine. Engines and strangers live in processes of their own here, so that the only
descriptors that come and go in this one are the client's.
"""

from __future__ import annotations

import threading

import pytest

import tszmq
from tests.client_fixtures import answer_one
from tests.mock_engine import PATIENCE, eventually, in_thread
from tszmq.net.mailbox import Mailbox

pytestmark = pytest.mark.timeout(45)

LOOPBACK = "tcp://127.0.0.1:*"
DATA_SOCKETS = {
    "ipc": LOOPBACK,
    "tcp": tszmq.Endpoints(handshake=LOOPBACK, input=LOOPBACK, output=LOOPBACK),
}


@pytest.fixture(params=DATA_SOCKETS)
def endpoints(request):
    return DATA_SOCKETS[request.param]


class Hold:
    """A block during which the control thread looks at nothing."""

    def __init__(self, monkeypatch) -> None:
        self._held, self._stands, self._go = (threading.Event() for _ in range(3))
        take = Mailbox.take

        def take_later(mailbox):
            if self._held.is_set():
                self._stands.set()
                self._go.wait(2 * PATIENCE)
            return take(mailbox)

        monkeypatch.setattr(Mailbox, "take", take_later)

    def of(self, session):
        self._session = session
        return self

    def __enter__(self) -> None:
        self._go.clear()
        self._stands.clear()
        self._held.set()
        self._session.shared.mailbox._writer.send(b"\0")
        assert self._stands.wait(PATIENCE)

    def __exit__(self, *_) -> None:
        threading.Event().wait(0.2)  # until what was done meanwhile has arrived
        self._held.clear()
        self._go.set()


@pytest.fixture
def hold(monkeypatch):
    """``with hold.of(session):``"""
    return Hold(monkeypatch)


def test_an_engine_says_hello_as_a_stranger_goes(client_and_engines, hold):
    """The stranger's end is not the engine's."""
    bound = client_and_engines.bind()
    address = bound.endpoints.handshake
    connecting = in_thread(bound.connect, 2 * PATIENCE)
    stranger = client_and_engines.engine(address, 1000, process=True)
    stranger.say("LATER")
    eventually(lambda: "strangers" in bound._session.shared.readiness.text)
    with hold.of(bound._session):
        stranger.kill()
        engine = client_and_engines.engine(address, 0, process=True)
        engine.hello()
    engine.finish_connect()
    client_and_engines.forget(bound)
    with connecting.result(PATIENCE) as client:
        answer_one(client, engine)


def test_a_successor_says_hello_as_a_stranger_goes(client_and_engines, hold):
    """One that is kept waiting is not forgotten for it."""
    client, [first] = client_and_engines(process=True)
    address = client.endpoints.handshake
    stranger = client_and_engines.engine(address, 1000, process=True)
    stranger.say("LATER")
    eventually(lambda: "strangers" in client._session.shared.readiness.text)
    with hold.of(client._session):
        stranger.kill()
        second = client_and_engines.engine(address, 0, process=True)
        second.hello()
    first.kill()
    second.finish_connect()
    eventually(lambda: client.engines[0].alive)
    answer_one(client, second)


def test_an_engine_says_hello_as_another_is_through_with_it(client_and_engines, hold):
    """Engines close that connection once they are ready: that one's READY counts."""
    bound = client_and_engines.bind(engine_count=2)
    address = bound.endpoints.handshake
    connecting = in_thread(bound.connect, 2 * PATIENCE)
    first = client_and_engines.engine(address, 0, process=True)
    first.hello()
    first.wait_init()
    with hold.of(bound._session):
        first.ready()
        threading.Event().wait(0.2)
        second = client_and_engines.engine(address, 1, process=True)
        second.hello()
    first.register()
    second.finish_connect()
    client_and_engines.forget(bound)
    with connecting.result(PATIENCE) as client:
        answer_one(client, first)
        answer_one(client, second)


def test_an_engine_registers_as_another_dies(client_and_engines, endpoints, hold):
    """The dead one is dead, and the one that came is not."""
    client, engines = client_and_engines(2, process=True, endpoints=endpoints)
    address = client.endpoints.handshake
    for _ in range(2):
        engines[1].kill()
        eventually(lambda: not client.engines[1].alive)
        engines[1] = client_and_engines.engine(address, 1, process=True)
        engines[1].hello()
        engines[1].wait_init()
        engines[1].ready()
        doomed = in_thread(client.generate, [1], data_parallel_rank=0)
        engines[0].recv_add()
        with hold.of(client._session):
            engines[0].kill()
            threading.Event().wait(0.1)
            engines[1].register()
        with pytest.raises(tszmq.EngineDead) as caught:
            doomed.result(PATIENCE)
        assert caught.value.engine_index == 0
        eventually(lambda: client.engines[1].alive)
        answer_one(client, engines[1])
        engines[0] = client_and_engines.engine(address, 0, process=True)
        engines[0].connect()
        eventually(lambda: client.engines[0].alive)
        answer_one(client, engines[0])
        assert client.engines[1].alive


def test_an_engine_that_registers_and_dies_at_once(client_and_engines, hold):
    """Learnt together with its registration: it was there, and is gone."""
    client, [engine] = client_and_engines(process=True)
    address = client.endpoints.handshake
    engine.kill()
    eventually(lambda: not client.is_alive)
    second = client_and_engines.engine(address, 0, process=True)
    second.hello()
    second.wait_init()
    second.ready()
    with hold.of(client._session):
        second.register()
        threading.Event().wait(0.2)
        second.kill()
    third = client_and_engines.engine(address, 0, process=True)
    third.connect()
    eventually(lambda: client.engines[0].alive)
    answer_one(client, third)
