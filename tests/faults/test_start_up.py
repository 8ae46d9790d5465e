"""Engines that fail before they serve."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

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


@pytest.mark.parametrize("replaced", [False, True], ids=["removed", "replaced"])
def test_data_sockets_that_somebody_removed(client_and_engines, short_dir, caplog, replaced):
    """Engines that are connected go on; one that comes later cannot, and somebody has to know."""
    client, [engine] = client_and_engines(endpoints=f"ipc://{short_dir}/h")
    path = client.endpoints.input.removeprefix("ipc://")
    os.unlink(path)
    if replaced:
        Path(path).touch()
    answer_one(client, engine)
    assert not caplog.records
    engine.close()
    eventually(lambda: not client.engines[0].alive)
    with caplog.at_level(logging.WARNING, "tszmq"):
        successor = client_and_engines.engine(client.endpoints.handshake, 0).hello()
        successor.wait_init()
    texts = [record.getMessage() for record in caplog.records]
    [text] = [text for text in texts if "engine 0 cannot reach it" in text]
    assert path in text
    if replaced:
        os.unlink(path)


def test_a_handshake_file_that_is_gone_is_in_nobodys_way(client_and_engines, short_dir, caplog):
    """Whoever said HELLO has found it, and needs it no more."""
    path = short_dir / "h"
    client, [engine] = client_and_engines(endpoints=f"ipc://{path}")
    successor = client_and_engines.engine(f"ipc://{path}", 0).hello()  # waits for its place
    eventually(lambda: "taken: 0" in client._session.shared.readiness.text)
    os.unlink(path)
    with caplog.at_level(logging.WARNING, "tszmq"):
        engine.close()
        successor.finish_connect()
        eventually(lambda: client.engines[0].alive)
    assert not [each for each in caplog.records if "cannot reach it" in each.getMessage()]


@pytest.mark.parametrize(
    ("module", "test", "what"),
    [
        ("gevent.monkey", "is_module_patched", "threading"),
        ("eventlet.patcher", "is_monkey_patched", "thread"),
    ],
)
def test_greenlets_are_no_threads(monkeypatch, module, test, what):
    """The first of them that waits for a socket would stop all others, for ever."""
    patched = SimpleNamespace(**{test: lambda asked: asked == what})
    monkeypatch.setitem(sys.modules, module, patched)
    with pytest.raises(tszmq.ConnectError, match=f"greenlets .{module}.*needs real"):
        tszmq.Client.bind("tcp://127.0.0.1:*")
    # Everything else may be patched.
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(**{test: lambda _: False}))
    with tszmq.Client.bind("tcp://127.0.0.1:*"):
        pass


def test_no_directory_for_the_data_sockets(monkeypatch, short_dir):
    """A container whose file systems are all read-only: told as one of ours, and what to do."""

    def mkdtemp(**_: object) -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    with pytest.raises(tszmq.ConnectError, match=r"No usable temporary directory.*set TMPDIR"):
        tszmq.Client.bind("tcp://127.0.0.1:*")
    given = tszmq.Endpoints(*(f"ipc://{short_dir}/{name}" for name in "hio"))
    with tszmq.Client.bind(given):
        pass
