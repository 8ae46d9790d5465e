"""Gates: no wake is lost, no sleeper is left behind, deadlines and signals end a wait."""

from __future__ import annotations

import gc
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from tests.core.parts import interrupt_everywhere
from tests.mock_engine import PATIENCE, eventually, in_thread
from tszmq.net.gate import Gate, remaining

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def quick_switches():
    """Threads take turns after a few bytecodes."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


class Flag:
    """A condition that somebody brings about."""

    def __init__(self) -> None:
        self.set = False

    def __call__(self) -> bool:
        return self.set


def test_a_true_condition_is_not_waited_for():
    gate = Gate()
    assert gate.wait(lambda: True)
    assert gate.wait(lambda: True, time.monotonic() - 5)
    assert gate._sleepers == []


def test_a_waker_ends_the_wait():
    gate, flag = Gate(), Flag()
    waiting = in_thread(gate.wait, flag)
    eventually(lambda: gate._sleepers)
    flag.set = True
    gate.wake()
    assert waiting.result(PATIENCE) is True
    assert gate._sleepers == []


def sleeps_again(gate: Gate, before: object) -> bool:
    return bool(gate._sleepers) and gate._sleepers != [before]


def test_a_wake_for_another_reason_does_not_end_the_wait():
    gate, flag = Gate(), Flag()
    waiting = in_thread(gate.wait, flag)
    for _ in range(20):
        [before] = eventually(lambda: list(gate._sleepers))
        gate.wake()
        eventually(partial(sleeps_again, gate, before))
    assert not waiting.done()
    flag.set = True
    gate.wake()
    assert waiting.result(PATIENCE) is True


def test_everyone_is_woken():
    gate, flag = Gate(), Flag()
    waiting = [in_thread(gate.wait, flag) for _ in range(8)]
    eventually(lambda: len(gate._sleepers) == 8)
    flag.set = True
    gate.wake()
    assert all(each.result(PATIENCE) for each in waiting)
    assert gate._sleepers == []


def test_a_wake_that_nobody_waits_for_is_forgotten():
    gate = Gate()
    gate.wake()
    started = time.monotonic()
    assert not gate.wait(lambda: False, started + 0.05)
    assert time.monotonic() - started >= 0.05


# --- deadlines -------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [0.0, -3.0, 0.03])
def test_a_deadline_ends_the_wait(seconds):
    gate = Gate()
    started = time.monotonic()
    assert not gate.wait(lambda: False, started + seconds)
    assert max(0.0, seconds) <= time.monotonic() - started < PATIENCE
    assert gate._sleepers == []


def test_wakes_do_not_move_the_deadline():
    gate, stop = Gate(), threading.Event()

    def disturb():
        while not stop.is_set():
            gate.wake()

    disturbing = in_thread(disturb)
    started = time.monotonic()
    try:
        assert not gate.wait(lambda: False, started + 0.1)
    finally:
        stop.set()
    assert 0.1 <= time.monotonic() - started < PATIENCE
    disturbing.result(PATIENCE)


def test_a_condition_that_comes_true_at_the_deadline_counts():
    gate = Gate()
    answers = iter([False, False, True])
    assert gate.wait(lambda: next(answers), time.monotonic() + 0.01)


def test_a_deadline_beyond_what_a_lock_can_wait():
    gate, flag = Gate(), Flag()
    waiting = in_thread(gate.wait, flag, time.monotonic() + 1e15)
    eventually(lambda: gate._sleepers)
    flag.set = True
    gate.wake()
    assert waiting.result(PATIENCE) is True


def test_remaining():
    assert remaining(None) is None
    assert 4 < (remaining(time.monotonic() + 5) or 0) <= 5
    assert (remaining(time.monotonic() - 5) or 0) <= -5
    assert remaining(1e300) == threading.TIMEOUT_MAX


# --- no wake is lost ---------------------------------------------------------------------------


def test_the_condition_is_looked_at_again_once_listed():
    """It comes true, and is woken for, between the first look and the listing."""
    gate, looks = Gate(), []

    def ready() -> bool:
        looks.append(len(gate._sleepers))
        if len(looks) == 1:
            gate.wake()  # too early for this waiter: it must look once more by itself
            return False
        return True

    assert gate.wait(ready, time.monotonic() + 1)
    assert looks == [0, 1]
    assert gate._sleepers == []


def test_a_wake_between_the_look_and_the_sleep_counts():
    gate, flag, looks = Gate(), Flag(), []

    def ready() -> bool:
        looks.append(flag.set)
        if len(looks) == 2:  # listed, not asleep: the condition comes true behind its back
            flag.set = True
            gate.wake()
            return False
        return flag.set

    started = time.monotonic()
    assert gate.wait(ready, started + PATIENCE)
    assert time.monotonic() - started < PATIENCE / 2
    assert looks == [False, False, True]


def test_two_threads_hand_a_ball_back_and_forth(quick_switches):
    """One lost wake and both wait for ever."""
    gate, turn, rounds = Gate(), [0], 4000

    def play(me: int) -> None:
        for _ in range(rounds):
            assert gate.wait(lambda: turn[0] == me, time.monotonic() + PATIENCE), "a lost wake"
            turn[0] = 1 - me
            gate.wake()

    for playing in [in_thread(play, 0), in_thread(play, 1)]:
        playing.result(2 * PATIENCE)
    assert gate._sleepers == []


def test_many_waiters_and_wakers_race(quick_switches):
    """Each round's number is announced by three wakers at once to four waiters."""
    gate, rounds = Gate(), 300
    announced = [0]
    arrived = [0] * 4
    start = [threading.Barrier(3) for _ in range(rounds)]

    def is_announced(number: int) -> bool:
        return announced[0] >= number

    def follow(me: int) -> None:
        for number in range(1, rounds + 1):
            deadline = time.monotonic() + PATIENCE
            assert gate.wait(partial(is_announced, number), deadline), "a lost wake"
            arrived[me] = number

    def announce() -> None:
        for number in range(1, rounds + 1):
            start[number - 1].wait(PATIENCE)
            announced[0] = number
            gate.wake()

    following = [in_thread(follow, me) for me in range(4)]
    for each in [in_thread(announce) for _ in range(3)]:
        each.result(2 * PATIENCE)
    for each in following:
        each.result(2 * PATIENCE)
    assert arrived == [rounds] * 4
    assert gate._sleepers == []


# --- whatever ends a wait, it leaves nothing ---------------------------------------------------


@pytest.mark.parametrize("when", [1, 2, 3])
def test_an_error_of_the_condition_comes_through(when):
    gate, looks = Gate(), []

    def ready() -> bool:
        looks.append(1)
        if len(looks) == when:
            raise ZeroDivisionError
        if len(looks) == 2:
            gate.wake()
        return False

    with pytest.raises(ZeroDivisionError):
        gate.wait(ready, time.monotonic() + PATIENCE)
    assert gate._sleepers == []


@pytest.fixture
def on_alarm() -> Iterator[Callable[[Callable[[], object]], None]]:
    """Has a call made in a signal handler of this thread, once, soon after it is asked to.

    A signal that comes just before the thread falls asleep does not wake it, so that it is sent
    again until it was handled.
    """
    handler: list[Callable[[], object]] = []

    def handle(*_: Any) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        if handler:
            handler.pop()()

    def arm(call: Callable[[], object]) -> None:
        handler.append(call)
        signal.setitimer(signal.ITIMER_REAL, 0.05, 0.1)

    before = signal.signal(signal.SIGALRM, handle)
    yield arm
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("deadline", [None, 2 * PATIENCE])
def test_ctrl_c_ends_a_wait_and_leaves_no_sleeper_behind(on_alarm, deadline):
    gate = Gate()

    def call() -> None:
        on_alarm(interrupt)
        gate.wait(lambda: False, deadline and time.monotonic() + deadline)

    with pytest.raises(KeyboardInterrupt):
        call()
    assert gate._sleepers == []
    # And it works as before.
    flag = Flag()
    waiting = in_thread(gate.wait, flag)
    eventually(lambda: gate._sleepers)
    flag.set = True
    gate.wake()
    assert waiting.result(PATIENCE)


def test_a_waker_in_a_signal_handler_and_in_a_finalizer(on_alarm):
    """Both run in the middle of the waiting thread's own calls."""
    gate, flag = Gate(), Flag()

    def wake() -> None:
        flag.set = True
        gate.wake()

    on_alarm(wake)
    assert gate.wait(flag, time.monotonic() + PATIENCE)

    class Wakes:
        def __init__(self) -> None:
            self.cycle = self

        def __del__(self) -> None:
            flag.set = True
            gate.wake()

    flag.set = False
    waiting = in_thread(gate.wait, flag)
    eventually(lambda: gate._sleepers)
    Wakes()
    gc.collect()
    assert waiting.result(PATIENCE)


def test_a_waker_that_a_signal_cuts_off_strands_nobody():
    """Ctrl-C while the main thread closes: those who wait in other threads must come back."""

    def prepare():
        gate = Gate()
        sleepers = [threading.Lock() for _ in range(2)]
        for sleeper in sleepers:
            sleeper.acquire()
            gate._sleepers.append(sleeper)

        def verify():
            gate.wake()
            assert not any(sleeper.locked() for sleeper in sleepers)

        return gate.wake, verify

    assert interrupt_everywhere(prepare) >= 2
