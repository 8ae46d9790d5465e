"""Engines that fail before they serve."""

from __future__ import annotations

import time

import pytest

import tszmq
from tests.client_fixtures import answer_one
from tests.mock_engine import PATIENCE, eventually, in_thread

pytestmark = pytest.mark.timeout(30)


@pytest.mark.parametrize("when", ["after HELLO", "after INIT"])
def test_an_engine_that_says_it_failed(client_and_engines, when):
    """Nobody waits minutes for what will not come; the addresses are free again."""
    bound = client_and_engines.bind(engine_count=2)
    endpoints = bound.endpoints
    connecting = in_thread(bound.connect, 20)
    engine = client_and_engines.engine(endpoints.handshake, 1)
    engine.hello()
    if when == "after INIT":
        engine.wait_init()
    started = time.monotonic()
    engine.say("FAILED")
    with pytest.raises(tszmq.ConnectError) as caught:
        connecting.result(PATIENCE)
    assert time.monotonic() - started < PATIENCE
    assert not isinstance(caught.value, TimeoutError)
    assert "engine 1" in str(caught.value)
    assert "failed to start" in str(caught.value)
    with tszmq.Client.bind(endpoints):
        pass


def test_a_failed_start_up_of_a_running_client_hurts_nobody(client_and_engines):
    """The successor of a dead engine fails; the others go on, and the next one is served."""
    client, engines = client_and_engines(2)
    engines[0].close()
    eventually(lambda: not client.engines[0].alive)
    failed = client_and_engines.engine(client.endpoints.handshake, 0)
    failed.hello()
    failed.wait_init()
    failed.say("FAILED")
    answer_one(client, engines[1])
    assert client.is_alive
    engine = client_and_engines.engine(client.endpoints.handshake, 0).connect()
    eventually(lambda: client.engines[0].alive)
    answer_one(client, engine)
