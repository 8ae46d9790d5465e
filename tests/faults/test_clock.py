"""Clocks: the wall clock jumps, engines are slow, and only monotonic time counts."""

from __future__ import annotations

import os
import threading
import time
from functools import partial

import pytest

import tszmq
from tests.client_fixtures import answer_one, inflight
from tests.mock_engine import PATIENCE, eventually, in_thread, stays_true
from tszmq import SamplingParams
from tszmq.net.mailbox import Run

pytestmark = pytest.mark.timeout(30)

UNIT = float(os.environ.get("TSZMQ_TIME_UNIT", "1"))
LONG = SamplingParams(max_tokens=8000)


@pytest.fixture(params=[-3600.0, 3600.0], ids=["an hour back", "an hour on"])
def jump(request, monkeypatch):
    """Call it, and the wall clock of this process has jumped."""
    real = time.time

    def now() -> None:
        monkeypatch.setattr(time, "time", lambda: real() + request.param)

    return now


def silence_warnings(caplog) -> list[str]:
    return [record.message for record in caplog.records if "has sent nothing" in record.message]


def test_a_slow_engine_is_warned_about_once_and_waited_for(client_and_engines, caplog, jump):
    """Three times the warning's time, connected and silent: the result comes all the same."""
    client, engines = client_and_engines(2, silence_warning=0.2 * UNIT)
    call = in_thread(client.generate, [1], data_parallel_rank=0)
    rid = engines[0].recv_add().rid
    jump()
    stays_true(lambda: not call.done() and client.engines[0].alive, 0.7 * UNIT)
    eventually(lambda: silence_warnings(caplog))
    engines[0].tokens(rid, [5], "stop")
    assert call.result(PATIENCE).token_ids == [5]
    assert len(silence_warnings(caplog)) == 1
    assert "engine 0 " in silence_warnings(caplog)[0]
    assert client.health()[0].first_error is None
    for engine in engines:
        answer_one(client, engine)


def test_silence_is_measured_in_monotonic_time(client_and_engines, jump):
    """Neither given up at once for an hour that was none, nor waited for an hour longer."""
    client, [engine] = client_and_engines(silence_timeout=0.6 * UNIT)
    started = time.monotonic()
    call = in_thread(client.generate, [1])
    engine.recv_add()
    jump()
    with pytest.raises(tszmq.EngineDead):
        call.result(PATIENCE)
    assert 0.5 * UNIT < time.monotonic() - started < PATIENCE


@pytest.mark.parametrize("kind", ["generate", "next", "unread", "many", "place", "result", "call"])
def test_timeouts_are_monotonic_time(client_and_engines, jump, kind):
    """Each ends in its own time, whatever the wall clock says meanwhile."""
    client, [engine] = client_and_engines(max_inflight=2)
    holder = client.stream([1], LONG)
    engine.recv_add()
    timeout = 0.4 * UNIT

    def unread():
        stream = client.stream([1], timeout=timeout)
        eventually(lambda: stream.finished)
        return stream.result()

    def place():
        with client.stream([1]):
            client.generate([1], timeout=timeout)

    call = {
        "generate": lambda: client.generate([1], timeout=timeout),
        "next": lambda: next(client.stream([1], timeout=timeout)),
        "unread": unread,
        "many": lambda: client.generate_many([[1], [2], [3]], timeout=timeout),
        "place": place,
        "result": lambda: holder.result(timeout),
        "call": lambda: tszmq.Client("tcp://127.0.0.1:*", engine_count=1, connect_timeout=timeout),
    }[kind]
    started = time.monotonic()
    ended = in_thread(call)
    threading.Event().wait(timeout / 4)  # how long it takes as a whole is looked at below
    jump()
    error = ended.exception(PATIENCE)
    took = time.monotonic() - started
    assert isinstance(error, tszmq.QueueFull if kind == "place" else TimeoutError), error
    assert timeout * 0.95 <= took < PATIENCE
    holder.close()
    assert inflight(client) == [0]
    eventually(lambda: engine.drain() is not None and not engine.unfinished)
    answer_one(client, engine)


def test_reported_times_are_monotonic_time(client_and_engines, jump):
    """A result that took a moment does not say that it took an hour, or less than nothing."""
    client, [engine] = client_and_engines()
    call = in_thread(client.generate, [1])
    rid = engine.recv_add().rid
    jump()
    engine.tokens(rid, [5], "stop")
    done = call.result(PATIENCE)
    assert 0 <= done.queued <= done.finished < 5 * UNIT
    assert done.first_token is not None
    assert 0 <= done.first_token < 5 * UNIT
    assert 0 <= client.health()[0].last_output < 5 * UNIT


@pytest.mark.parametrize("timeout", [float("inf"), 1e300, 1e18, 1e10])
def test_timeouts_without_end(client_and_engines, timeout):
    """Longer than any clock can wait for is a way to say for ever."""
    client, [engine] = client_and_engines(silence_warning=None)
    calls = [
        in_thread(client.generate, [1], timeout=timeout),
        in_thread(client.generate_many, [[1]], timeout=timeout),
        in_thread(client.stream([1], timeout=timeout).result, timeout),
    ]
    rids = [add.rid for add in engine.recv_adds(3)]
    answer_one(client, engine)
    stays_true(lambda: client.is_alive, 0.1)
    for rid in rids:
        engine.tokens(rid, [5], "stop")
    first, many, streamed = [call.result(PATIENCE) for call in calls]
    assert [first.token_ids, many[0].token_ids, streamed.token_ids] == [[5]] * 3


def test_clocks_run_while_the_mailbox_never_empties(client_and_engines):
    """Whoever posts as fast as the control thread works must not have it to himself."""
    client, [engine] = client_and_engines()
    mailbox = client._session.shared.mailbox
    turns = 0

    def again() -> None:
        nonlocal turns
        turns += 1
        if not done:
            mailbox.post(Run(again))

    done = False
    try:
        again()
        call = in_thread(client.stream, [1], LONG, timeout=0.2)
        engine.recv_add()
        stream = call.result(PATIENCE)
        with pytest.raises(tszmq.DeadlineExceeded):
            in_thread(lambda: list(stream)).result(PATIENCE)
        engine.recv_abort()
        assert turns > 1
    finally:
        done = True


def test_what_one_turn_leaves_in_the_mailbox_is_taken_in_the_next(client_and_engines):
    client, _ = client_and_engines()
    mailbox = client._session.shared.mailbox
    entered, go = threading.Event(), threading.Event()
    mailbox.post(Run(lambda: entered.set() or go.wait(PATIENCE)))
    assert entered.wait(PATIENCE)
    taken: list[int] = []
    for number in range(60_000):
        mailbox.post(Run(partial(taken.append, number)))
    go.set()
    eventually(lambda: taken == list(range(60_000)))
