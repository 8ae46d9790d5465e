"""Deadlines of requests."""

from __future__ import annotations

import gc
import weakref

import pytest

from tests.core.parts import Waiter
from tszmq.core.request import ABORTED, Request
from tszmq.net.mailbox import Expire
from tszmq.net.timers import Timers

pytestmark = pytest.mark.timeout(30)


def request(name: str) -> Request:
    return Request(name, 1, Waiter(), 0.0)


def test_requests_expire_at_their_deadline_unless_they_have_ended() -> None:
    timers = Timers()
    late, ended, later = (request(name) for name in ("late", "ended", "later"))
    for deadline, each in ((1.0, late), (1.0, ended), (2.0, later)):
        timers.watch(Expire(deadline, 0.5, each))
    ended.end = ABORTED
    assert timers.next_due() == 1.0
    assert timers.expired(0.9) == []
    assert timers.expired(1.0) == [(late, 0.5)]
    assert timers.expired(3.0) == [(later, 0.5)]
    assert timers.next_due() is None


def test_nobody_is_kept_until_a_deadline() -> None:
    """Most requests end long before it, and their output may be large."""
    timers = Timers()
    kept = request("kept")
    timers.watch(Expire(3600.0, 3600.0, kept))
    gone = weakref.ref(kept)
    del kept
    gc.collect()
    assert gone() is None
    assert timers.expired(4000.0) == []
