"""What strangers can make the client log."""

from __future__ import annotations

import logging

import pytest

import tszmq.net.log
from tests.net.test_greeter import Router, greeter
from tszmq.core.startup import Startup
from tszmq.net.log import Limited

pytestmark = pytest.mark.timeout(30)


def test_so_many_in_a_while_and_then_their_number(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(tszmq.net.log.time, "monotonic", lambda: now)
    limited = Limited()
    for number in range(60):
        limited.warning(f"number {number}")
    assert [record.getMessage() for record in caplog.records] == [
        f"tszmq: number {number}" for number in range(50)
    ]
    caplog.clear()
    now += 601
    for number in range(60):
        limited.warning(f"number {number}")
    first, *others = [record.getMessage() for record in caplog.records]
    assert first == "tszmq: 10 more such warnings were left out"
    assert len(others) == 50
    caplog.clear()
    now += 601
    limited = Limited()
    limited.warning("alone")
    now += 601
    limited.warning("alone")
    assert len(caplog.records) == 2


def test_strangers_do_not_hide_what_is_said_of_engines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "tszmq")
    greeting = greeter(Router(), Startup(1))
    for _ in range(1000):
        greeting._ignore("a scanner of ports")
    assert len(caplog.records) == 50
    greeting.warn("engine 3 is one too many")
    assert "engine 3" in caplog.records[-1].getMessage()
