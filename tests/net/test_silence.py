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


def silent_for(watched: SilenceWatch, seconds: float, now: float = 1000.0) -> float:
    """Looks as often as it should, while engine 0 is silent and nothing follows from it.

    Returns:
        The time then.
    """
    assert watched.interval is not None
    for look in range(1, round(seconds / watched.interval) + 1):
        silence = look * watched.interval
        assert watched.overdue({0: silence}, now + silence) == []
    return now + seconds


def test_silence_beyond_the_timeout_is_fatal():
    watched = watch(2.0)
    now = silent_for(watched, 2.0)
    assert watched.overdue({0: 2.4, 1: 0.7}, now + 0.4) == [(0, pytest.approx(2.4))]


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
        now = silent_for(watched, 6.0)
        watched.overdue(between, now + 1.0)
        silent_for(watched, 6.0, now + 1.0)
    assert len(caplog.records) == 2


def test_no_warning_when_it_is_given_up_at_once(caplog):
    watched = watch(2.0, 5.0)
    now = silent_for(watched, 2.0)
    with caplog.at_level(logging.WARNING, "tszmq"):
        assert watched.overdue({0: 2.4}, now + 0.4) == [(0, pytest.approx(2.4))]
    assert caplog.records == []


@pytest.mark.parametrize("asleep", [0.4, 1.2, 2.0, 3600.0])
def test_our_own_sleep_is_not_their_silence(asleep):
    """The process was stopped: the outputs of that time may be there unread."""
    watched = watch(1.0)
    assert watched.overdue({0: 0.1}, 1000.2) == []
    now = 1000.2 + asleep
    # A late look counts as one.
    for look in (0.0, 0.2, 0.4, 0.6):
        assert watched.overdue({0: asleep + 0.1 + look}, now + look) == []
    [(index, seconds)] = watched.overdue({0: asleep + 0.9}, now + 0.8)
    assert (index, seconds) == (0, pytest.approx(1.1))


def test_a_late_look_decides_nothing():
    """It was nearly overdue when we slept; what it said meanwhile is read before the next look."""
    watched = watch(1.0)
    now = silent_for(watched, 1.0)
    assert watched.overdue({0: 31.0}, now + 30.0) == []
    assert watched.overdue({0: 0.2}, now + 30.2) == []
    # It said nothing.
    watched = watch(1.0)
    now = silent_for(watched, 1.0)
    assert watched.overdue({0: 31.0}, now + 30.0) == []
    assert [index for index, _ in watched.overdue({0: 31.2}, now + 30.2)] == [0]


def test_a_machine_that_is_always_late_gives_up_in_the_end():
    """Every look comes after twice the time."""
    watched = watch(2.0, 1.5)
    assert watched.interval == pytest.approx(0.3)
    for look in range(1, 8):
        assert watched.overdue({0: look * 0.6}, 1000.0 + look * 0.6) == []
    assert watched.overdue({0: 4.8}, 1004.8) == [(0, pytest.approx(2.4))]


def test_what_was_silent_before_the_first_look_counts_as_one():
    watched = SilenceWatch(2.0, 1.5)
    for look in range(6):
        assert watched.overdue({0: 2.5 + 0.3 * look}, 1000.0 + 0.3 * look) == []
    assert watched.overdue({0: 4.3}, 1001.8) == [(0, pytest.approx(2.1))]
