"""The outbox: never waits for an engine, keeps the order, and gives up one that never reads."""

from __future__ import annotations

import logging
from collections import defaultdict
from typing import Any

import pytest
import zmq

from tszmq.net.outbox import Outbox
from tszmq.wire.startup import engine_identity

pytestmark = pytest.mark.timeout(20)


class Router:
    """A ROUTER's send half: room for so many messages an engine, or gone. The first frame of a
    message tells, as in libzmq."""

    def __init__(self) -> None:
        self.room: dict[bytes, int] = defaultdict(lambda: 1000)
        self.gone: set[bytes] = set()
        self.sent: dict[bytes, list[list[bytes]]] = defaultdict(list)

        self._message: list[bytes] = []

    def send(self, frame: bytes, flags: int) -> None:
        assert flags & zmq.NOBLOCK
        if not self._message:
            self._find_room(frame)
        self._message.append(frame)
        if not flags & zmq.SNDMORE:
            (identity, *frames), self._message = self._message, []
            self.sent[identity].append(frames)

    def _find_room(self, identity: bytes) -> None:
        if identity in self.gone:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        if self.room[identity] == 0:
            raise zmq.Again
        self.room[identity] -= 1


ZERO, ONE = engine_identity(0), engine_identity(1)


@pytest.fixture
def router() -> Router:
    return Router()


@pytest.fixture
def outbox(router: Router) -> Outbox:
    stand_in: Any = router
    return Outbox(stand_in, send_timeout=10.0)


def test_what_has_room_is_sent_at_once(router, outbox):
    assert outbox.send(0, [b"a", b"b"], 1.0) is None
    assert outbox.send(1, [b"c"], 1.0) is None
    assert router.sent == {ZERO: [[b"a", b"b"]], ONE: [[b"c"]]}
    assert outbox.blocked == {}
    assert outbox.retry(100.0) == []


def test_a_blocked_engine_keeps_its_order_and_holds_up_nobody(router, outbox):
    router.room[ZERO] = 0
    for number in range(3):
        assert outbox.send(0, [b"%d" % number], 1.0) is None
    assert outbox.send(1, [b"other"], 1.0) is None
    assert router.sent == {ONE: [[b"other"]]}
    router.room[ZERO] = 1
    # Room has come, but what was queued first goes first.
    assert outbox.send(0, [b"3"], 1.5) is None
    assert router.sent[ZERO] == []
    assert outbox.retry(2.0) == []
    assert router.sent[ZERO] == [[b"0"]]
    router.room[ZERO] = 10
    assert outbox.retry(3.0) == []
    assert router.sent[ZERO] == [[b"0"], [b"1"], [b"2"], [b"3"]]
    assert outbox.blocked == {}
    outbox.send(0, [b"4"], 4.0)
    assert router.sent[ZERO][-1] == [b"4"]


def retry_until(outbox: Outbox, since: float, until: float) -> None:
    """Tries as often as the control thread does; nobody is given up."""
    for turn in range(1, round((until - since) / 0.25) + 1):
        assert outbox.retry(since + turn * 0.25) == []


def test_no_progress_for_the_timeout_gives_it_up(router, outbox):
    router.room[ZERO] = 0
    outbox.send(0, [b"a"], 1.0)
    retry_until(outbox, 1.0, 9.0)
    outbox.send(0, [b"b"], 9.0)
    retry_until(outbox, 9.0, 11.0)
    [(index, reason)] = outbox.retry(11.1)
    assert index == 0
    assert "has not read its requests for 10.0 s" in reason
    assert outbox.blocked == {}
    assert outbox.retry(30.0) == []


def test_any_progress_starts_the_time_anew(router, outbox):
    """A slow reader is no dead one."""
    router.room[ZERO] = 0
    for _ in range(5):
        outbox.send(0, [b"a"], 1.0)
    now = 1.0
    for _ in range(3):
        retry_until(outbox, now, now + 9.0)
        now += 9.0
        router.room[ZERO] = 1
        assert outbox.retry(now) == []
    retry_until(outbox, now, now + 10.0)
    assert [index for index, _ in outbox.retry(now + 10.1)] == [0]


def test_our_own_sleep_is_not_its_reluctance(router, outbox):
    """The process was stopped, and with it perhaps the engine: both go on now."""
    router.room[ZERO] = 0
    outbox.send(0, [b"a"], 1.0)
    assert outbox.retry(3600.0) == []
    retry_until(outbox, 3600.0, 3609.5)
    assert [index for index, _ in outbox.retry(3609.6)] == [0]


def test_it_is_warned_about_once_in_good_time(router, caplog):
    stand_in: Any = router
    outbox = Outbox(stand_in, send_timeout=60.0)
    router.room[ZERO] = 0
    with caplog.at_level(logging.WARNING, "tszmq"):
        outbox.send(0, [b"a"], 1.0)
        outbox.send(0, [b"b"], 1.0)
        retry_until(outbox, 1.0, 50.0)
    assert [record.getMessage() for record in caplog.records] == [
        "tszmq: engine 0 has read no request for 10.2 s, and 2 wait; it is given up after 60.0 s"
    ]


def test_an_engine_that_is_gone_is_told_at_once(router, outbox):
    router.gone.add(ZERO)
    reason = outbox.send(0, [b"a"], 1.0)
    assert reason is not None
    assert "nothing can be sent to it" in reason
    assert outbox.blocked == {}


def test_one_that_goes_while_it_is_blocked_is_lost_alone(router, outbox):
    router.room[ZERO] = router.room[ONE] = 0
    outbox.send(0, [b"a"], 1.0)
    outbox.send(1, [b"b"], 1.0)
    router.gone.add(ZERO)
    router.room[ONE] = 1
    [(index, reason)] = outbox.retry(2.0)
    assert index == 0
    assert "nothing can be sent to it" in reason
    assert router.sent[ONE] == [[b"b"]]
    assert outbox.blocked == {}


def test_nothing_queued_for_a_dead_engine_reaches_its_successor(router, outbox):
    router.room[ZERO] = 0
    outbox.send(0, [b"old"], 1.0)
    outbox.forget(0)
    outbox.forget(7)
    router.room[ZERO] = 10
    assert outbox.retry(2.0) == []
    outbox.send(0, [b"new"], 3.0)
    assert router.sent[ZERO] == [[b"new"]]
