"""Clients with engines of their own: what is refused, and engines that do not come."""

from __future__ import annotations

import time
from typing import Any

import pytest

import tszmq
import tszmq.sim.fleet
from tests.mock_engine import PATIENCE

pytestmark = pytest.mark.embedded


@pytest.mark.parametrize(
    ("count", "options", "error", "text"),
    [
        ("2", {}, TypeError, "the number of engines must be an int, got '2'"),
        (0, {}, tszmq.InvalidRequest, r"the number of engines must be in \[1, 65536\], got 0"),
        (1, {"step_ms": "x"}, TypeError, "step_ms must be a number, got 'x'"),
        (1, {"step_ms": -1}, tszmq.InvalidRequest, "step_ms must be finite and at least 0"),
        (1, {"kv_pages": 10.5}, TypeError, "kv_pages must be an int, got 10.5"),
        (1, {"stepms": 3}, TypeError, "'stepms' is no option.*connect_timeout.*step_ms"),
        (1, {"endpoints": "ipc:///x/h"}, TypeError, "'endpoints' is no option"),
        (1, {"protocol": "http"}, tszmq.InvalidRequest, "one of 'tokenspeed', 'vllm'"),
    ],
)
def test_what_no_engine_could_be_started_with(count, options, error, text):
    """Refused in the caller's own process, by name."""
    with pytest.raises(error, match=text) as caught:
        tszmq.Client.embedded(count, **options)
    assert caught.type is error


@pytest.fixture
def started(monkeypatch) -> list[Any]:
    """Every fleet that is started."""
    fleets: list[Any] = []
    original = tszmq.sim.fleet.Fleet.start

    def start(fleet: Any, address: str) -> None:
        fleets.append(fleet)
        original(fleet, address)

    monkeypatch.setattr(tszmq.sim.fleet.Fleet, "start", start)
    return fleets


def test_an_engine_that_ended_is_not_waited_for(monkeypatch, capfd, started):
    """Its exit code is told at once, and nothing is left behind."""
    monkeypatch.setattr(
        tszmq.sim.fleet, "command_line", lambda options: [f"--unknown={options.index}"]
    )
    began = time.monotonic()
    with pytest.raises(tszmq.ConnectError, match=r"engine [56] ended with exit code 2 before"):
        tszmq.Client.embedded(2, first_index=5, connect_timeout=4 * PATIENCE)
    assert time.monotonic() - began < 2 * PATIENCE
    assert "usage" in capfd.readouterr().err
    assert None not in started[0].exit_codes


def test_engines_that_are_late_are_waited_for_until_the_timeout(started):
    """They live, so that they may still come."""
    with pytest.raises(tszmq.HandshakeTimeout, match=r"after 0\.0 s at .*engines missing"):
        tszmq.Client.embedded(1, connect_timeout=0)
    assert None not in started[0].exit_codes
