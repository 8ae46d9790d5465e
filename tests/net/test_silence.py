"""Silence: warned about once, fatal only when told so, and never blamed for our own sleep."""

from __future__ import annotations

import logging

import pytest

from tszmq.net.silence import SilenceWatch

pytestmark = pytest.mark.timeout(10)


@pytest.mark.parametrize(
    ("timeout", "warning", "interval"),
    [
        (None, None, None),
        (10.0, None, 2.0),
        (None, 60.0, 5.0),  # never rarer than every 5 s
        (0.05, None, 0.02),  # never more often than every 20 ms
        (10.0, 1.0, 0.2),
        (1.0, 10.0, 0.2),
    ],
)
def test_how_often_it_looks(timeout, warning, interval):
    assert SilenceWatch(timeout, warning).interval == interval


def watch(timeout: float | None, warning: float | None = None, now: float = 1000.0):
    """A watch that has looked at nothing silent so far."""
    made = SilenceWatch(timeout, warning)
    assert made.overdue({}, now) == []
    return made


def test_silence_beyond_the_timeout_is_fatal():
    watched = watch(2.0)
    assert watched.overdue({0: 1.9, 1: 0.1}, 1000.3) == []
    assert watched.overdue({0: 2.0, 1: 0.4}, 1000.6) == []
    assert watched.overdue({0: 2.1, 1: 0.7}, 1000.9) == [(0, 2.1)]


def test_without_a_timeout_it_is_never_fatal():
    watched = watch(None, 5.0)
    for second in range(200):
        assert watched.overdue({0: float(second)}, 1000.0 + second) == []


def test_a_silent_engine_is_warned_about_once(caplog):
    watched = watch(None, 5.0)
    with caplog.at_level(logging.WARNING, "tszmq"):
        for second in range(20):
            watched.overdue({0: float(second), 1: 0.5}, 1000.0 + second)
    assert [record.getMessage() for record in caplog.records] == [
        "tszmq: engine 0 holds requests and has sent nothing for 6.0 s"
    ]


@pytest.mark.parametrize("between", [{}, {0: 0.5}])
def test_after_it_spoke_or_had_no_work_it_is_warned_about_again(caplog, between):
    watched = watch(None, 5.0)
    with caplog.at_level(logging.WARNING, "tszmq"):
        watched.overdue({0: 6.0}, 1001.0)
        watched.overdue(between, 1002.0)
        watched.overdue({0: 6.0}, 1003.0)
    assert len(caplog.records) == 2


def test_no_warning_when_it_is_given_up_at_once(caplog):
    watched = watch(2.0, 5.0)
    with caplog.at_level(logging.WARNING, "tszmq"):
        assert watched.overdue({0: 6.0}, 1000.5) == [(0, 6.0)]
    assert caplog.records == []


def test_our_own_sleep_is_not_their_silence():
    """The process was stopped for an hour: the outputs of that time may be there unread."""
    watched = watch(2.0)
    assert watched.overdue({0: 0.5}, 1000.4) == []
    assert watched.overdue({0: 3600.0}, 4600.0) == []
    # From here on it counts anew.
    for step in range(1, 6):
        assert watched.overdue({0: 3600.0 + 0.4 * step}, 4600.0 + 0.4 * step) == []
    [(index, seconds)] = watched.overdue({0: 3602.4}, 4602.4)
    assert index == 0
    assert 2.0 < seconds < 2.5


def test_a_late_look_is_no_sleep():
    """A busy machine is late by a moment."""
    watched = watch(2.0)
    assert watched.overdue({0: 2.5}, 1001.7) == [(0, 2.5)]


def test_the_first_look_counts_the_whole_silence():
    watched = SilenceWatch(2.0, None)
    assert watched.overdue({0: 2.5}, 1000.0) == [(0, 2.5)]
