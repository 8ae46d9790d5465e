"""The handshake socket: peers that are gone before they are answered."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NoReturn, cast

import pytest
import zmq

from tszmq.core.startup import Startup
from tszmq.net.greeter import Greeter
from tszmq.net.peers import Connections
from tszmq.types import Endpoints
from tszmq.wire.startup import engine_identity

pytestmark = pytest.mark.timeout(30)


class Router:
    """A socket at which only some peers are left, and where nothing comes in."""

    def __init__(self, *there: int) -> None:
        self._there = {engine_identity(index) for index in there}
        self.tried: list[bytes] = []
        self.sent: list[bytes] = []

    def recv_multipart(self, *_: object, **__: object) -> NoReturn:
        raise zmq.Again

    def send_multipart(self, frames: Sequence[bytes], flags: int = 0) -> None:
        self.tried.append(frames[0])
        if frames[0] not in self._there:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        self.sent.append(frames[0])


def greeter(router: Router, startup: Startup) -> Greeter:
    """One that answers there."""
    return Greeter(
        cast(Any, router),
        startup,
        Endpoints("ipc:///h", "ipc:///i", "ipc:///o"),
        {},
        Connections(),
        lambda fd: True,
        before_init=lambda _: True,
    )


@pytest.mark.parametrize("how", ["before its INIT", "at its INIT"])
def test_hundreds_that_wait_are_gone_one_after_another(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Each is found out when its turn comes, and the first that is there gets its INIT."""
    caplog.set_level(logging.CRITICAL, "tszmq")  # one line each
    count, startup = 1500, Startup(1)
    router = Router(count, count + 1)
    greeting = greeter(router, startup)
    for index in range(count + 2):
        assert startup.hello(index, 10 + index) is (index == 0)
    if how == "before its INIT":
        greeting.closed(10)
    else:
        greeting.send_init(0)
    assert router.sent == [engine_identity(count)]
    first = 1 if how == "before its INIT" else 0
    assert router.tried == [engine_identity(index) for index in range(first, count + 1)]
    assert startup.is_greeted(count)
    assert not startup.is_known(count + 1)
    # Who comes later is answered as ever.
    greeting.closed(10 + count)
    assert router.sent == [engine_identity(count), engine_identity(count + 1)]


def test_what_anybody_can_cause_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Peers that say HELLO, get their INIT and leave."""
    caplog.set_level(logging.WARNING, "tszmq")
    startup = Startup(1)
    greeting = greeter(Router(0), startup)
    for connection in range(300):
        assert startup.hello(0, connection)
        greeting.closed(connection)
    assert 1 <= len(caplog.records) < 100
