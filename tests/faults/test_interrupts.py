"""Ctrl-C and other signals while the main thread is in a call."""

from __future__ import annotations

import contextlib
import itertools
import random
import signal
import tempfile
import threading
import time

import pytest
import zmq

import tszmq
import tszmq.net.session
from tests.client_fixtures import answer_after_aborts, answer_one, inflight, waiting_for_a_place
from tests.core.parts import interrupt_everywhere
from tests.mock_engine import PATIENCE, eventually, in_thread, predicted
from tszmq import SamplingParams
from tszmq.ownership import CHECKED

pytestmark = pytest.mark.timeout(40)

MAIN = threading.main_thread().ident or 0


def interrupted(call, when):
    """Run the call in this thread, interrupted once ``when()`` has returned.

    A signal that comes just before the thread falls asleep does not wake it (CPython looks for
    signals before it waits for a lock, and the kernel wakes only who waits): it is sent again
    until it was noticed, and counts once.
    """
    noticed = threading.Event()

    def on_sigint(*_):
        if not noticed.is_set():
            noticed.set()
            raise KeyboardInterrupt

    def send():
        when()
        pause = 0.05  # for the main thread to be in its wait
        while not noticed.wait(pause):
            signal.pthread_kill(MAIN, signal.SIGINT)
            pause = 0.5
        return time.monotonic()

    sent = []

    def interruptible():
        sent.append(in_thread(send))
        call()

    previous = signal.signal(signal.SIGINT, on_sigint)
    try:
        with pytest.raises(KeyboardInterrupt):
            interruptible()
        assert time.monotonic() - sent[0].result(PATIENCE) < PATIENCE
    finally:
        noticed.set()
        signal.signal(signal.SIGINT, previous)


# --- Ctrl-C in every kind of wait ----------------------------------------------------------


@pytest.mark.parametrize("timeout", [None, 30])
def test_ctrl_c_in_generate(client_and_engines, timeout):
    """That request is aborted, the client stays usable."""
    client, [engine] = client_and_engines()
    interrupted(lambda: client.generate([1], timeout=timeout), engine.recv_add)
    [rid] = engine.requests
    assert engine.recv_abort() == [rid]
    engine.expect_nothing(0.1)
    assert inflight(client) == [0]
    answer_one(client, engine)


@pytest.mark.parametrize("timeout", [None, 30])
def test_ctrl_c_in_next(client_and_engines, timeout):
    """In a loop inside a block, as programs have it."""
    client, [engine] = client_and_engines()
    got = []

    def call():
        with client.stream([1], timeout=timeout) as stream:
            for chunk in stream:
                got.extend(chunk.token_ids)

    def when():
        engine.tokens(engine.recv_add().rid, [5])
        eventually(lambda: got)

    interrupted(call, when)
    [rid] = engine.requests
    assert got == [5]
    assert engine.recv_abort() == [rid]
    engine.expect_nothing(0.1)
    assert inflight(client) == [0]
    answer_one(client, engine)


def test_ctrl_c_in_next_aborts_though_the_stream_is_kept(client_and_engines):
    """No block, and the stream still has a name: next() itself aborts it."""
    client, [engine] = client_and_engines()
    stream = client.stream([1])
    interrupted(lambda: next(stream), engine.recv_add)
    [rid] = engine.requests
    assert engine.recv_abort() == [rid]
    assert inflight(client) == [0]
    stream.close()
    engine.expect_nothing(0.1)
    answer_one(client, engine)


@pytest.mark.parametrize("timeout", [None, 30])
def test_ctrl_c_in_result_aborts_though_the_stream_is_kept(client_and_engines, timeout):
    """As in every blocking call; only its timeout leaves the request alone."""
    client, [engine] = client_and_engines()
    stream = client.stream([1])

    def when():
        engine.tokens(engine.recv_add().rid, [5])
        answer_one(client, engine)

    interrupted(lambda: stream.result(timeout), when)
    [rid, _] = engine.requests
    assert engine.recv_abort() == [rid]
    assert inflight(client) == [0]
    done = stream.result(0)
    assert (done.token_ids, done.finish_reason) == ([5], "abort")
    stream.close()
    engine.expect_nothing(0.1)
    answer_one(client, engine)


def test_ctrl_c_in_result(client_and_engines):
    """Leaving the block aborts, and only once."""
    client, [engine] = client_and_engines()

    def call():
        with client.stream([1]) as stream:
            stream.result(30)

    interrupted(call, engine.recv_add)
    [rid] = engine.requests
    assert engine.recv_abort() == [rid]
    engine.expect_nothing(0.1)
    assert inflight(client) == [0]
    answer_one(client, engine)


@pytest.mark.parametrize("errors", ["raise", "return"])
@pytest.mark.parametrize("kind", ["list", "iterator"])
def test_ctrl_c_in_generate_many(client_and_engines, errors, kind):
    """All of its requests are aborted, those of other threads are not."""
    client, engines = client_and_engines(2)
    other = in_thread(client.generate, [99], data_parallel_rank=0)
    kept = engines[0].recv_add().rid
    prompts = [[n + 1] for n in range(9)]

    def call():
        if kind == "list":
            client.generate_many(prompts, errors=errors)
        else:
            client.generate_many(iter(prompts), errors=errors, max_inflight=9)

    def when():
        eventually(lambda: [engine.drain() for engine in engines] and sum_of(engines) == 10)

    def sum_of(its):
        return sum(len(engine.requests) for engine in its)

    interrupted(call, when)
    assert inflight(client) == [1, 0]
    for engine in engines:
        engine.recv_aborts_of(rid for rid in engine.requests if rid != kept)
    engines[0].tokens(kept, [5], "stop")
    assert other.result(PATIENCE).token_ids == [5]
    for engine in engines:
        answer_one(client, engine)


def test_ctrl_c_in_as_completed(client_and_engines):
    """The same for the iterator of results."""
    client, [engine] = client_and_engines()
    results = client.as_completed([[1], [2], [3]])

    def call():
        for _ in results:
            pass

    def when():
        engine.tokens(engine.recv_adds(3)[1].rid, [5], "stop")

    interrupted(call, when)
    assert inflight(client) == [0]
    rids = list(engine.requests)
    engine.recv_aborts_of([rids[0], rids[2]])
    answer_one(client, engine)


def test_ctrl_c_while_waiting_for_a_place(client_and_engines):
    """Nothing was sent, nothing is reserved."""
    client, [engine] = client_and_engines(max_inflight=1)
    stream = client.stream([1])
    rid = engine.recv_add().rid
    interrupted(
        lambda: client.generate([2]), lambda: eventually(lambda: waiting_for_a_place(client) == 1)
    )
    assert client.inflight(0) == 1
    engine.tokens(rid, [5], "stop")
    assert stream.result(PATIENCE).token_ids == [5]
    assert inflight(client) == [0]
    answer_one(client, engine)


def test_ctrl_c_in_the_iterator_of_prompts(client_and_engines):
    """The caller's own code is interrupted inside ours."""
    client, [engine] = client_and_engines()

    def prompts():
        yield [1]
        yield [2]
        threading.Event().wait(20)

    interrupted(
        lambda: client.generate_many(prompts(), max_inflight=8), lambda: engine.recv_adds(2)
    )
    assert inflight(client) == [0]
    engine.recv_aborts_of(engine.requests)
    answer_one(client, engine)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["generate", "stream", "generate_many", "as_completed"])
def test_ctrl_c_at_any_moment(client_and_engines, kind):
    """Wherever it lands, nothing stays reserved or running, and the client works on."""
    client, [engine] = client_and_engines(auto=True, engine={"step_delay": 0.0005})
    params = SamplingParams(max_tokens=4)

    def stream():
        with client.stream([1], params) as opened:
            for _ in opened:
                pass

    def as_completed():
        for _ in client.as_completed([[1], [2], [3]], params):
            pass

    call = {
        "generate": lambda: client.generate([1], params),
        "stream": stream,
        "generate_many": lambda: client.generate_many([[1], [2], [3]], params),
        "as_completed": as_completed,
    }[kind]
    armed = [False]

    def on_sigint(*_):
        if armed[0]:
            armed[0] = False
            raise KeyboardInterrupt

    chance = random.Random(kind)
    hits = 0
    previous = signal.signal(signal.SIGINT, on_sigint)
    try:
        for _ in range(250):
            delay = chance.random() * 0.004
            timer = threading.Timer(delay, signal.pthread_kill, (MAIN, signal.SIGINT))
            timer.daemon = True
            try:
                try:
                    armed[0] = True
                    timer.start()
                    call()
                finally:
                    armed[0] = False
            except KeyboardInterrupt:
                hits += 1
            timer.join()
    finally:
        signal.signal(signal.SIGINT, previous)
    assert hits > 20, "the interrupts missed the calls: this test tests nothing"
    eventually(lambda: inflight(client) == [0])
    eventually(lambda: engine.running == 0)
    assert client.generate([5], params, timeout=PATIENCE).token_ids == predicted([5], 4)


# --- other signals -------------------------------------------------------------------------


@pytest.fixture
def tick():
    """SIGUSR1 for the main thread every 20 ms, with a handler that does nothing of interest."""
    count = [0]

    def on_signal(*_):
        count[0] += 1

    stop = threading.Event()

    def run():
        while not stop.wait(0.02):
            signal.pthread_kill(MAIN, signal.SIGUSR1)

    previous = signal.signal(signal.SIGUSR1, on_signal)
    ticking = in_thread(run)
    yield count
    stop.set()
    ticking.result(PATIENCE)
    signal.signal(signal.SIGUSR1, previous)


@pytest.mark.parametrize("kind", ["generate", "next", "result", "generate_many"])
def test_deadlines_hold_under_a_stream_of_signals(client_and_engines, tick, kind):
    """A wait that starts over after each signal would never end."""
    client, [engine] = client_and_engines()
    call = {
        "generate": lambda: client.generate([1], timeout=1),
        "next": lambda: next(client.stream([1], timeout=1)),
        "result": lambda: client.stream([1], timeout=1).result(),
        "generate_many": lambda: client.generate_many([[1], [2]], timeout=1),
    }[kind]
    started = time.monotonic()
    with pytest.raises(tszmq.DeadlineExceeded):
        call()
    assert 0.95 <= time.monotonic() - started < PATIENCE
    assert tick[0] > 3, "hardly any signal came: this test tests nothing"
    assert inflight(client) == [0]
    answer_after_aborts(client, engine)


def test_waiting_for_a_place_ends_in_time_under_a_stream_of_signals(client_and_engines, tick):
    """The same for max_inflight."""
    client, [engine] = client_and_engines(max_inflight=1)
    with client.stream([1]):
        engine.recv_add()
        started = time.monotonic()
        with pytest.raises(tszmq.QueueFull):
            client.generate([2], timeout=0.5)
        assert 0.45 <= time.monotonic() - started < PATIENCE
        assert tick[0] > 3


def test_tokens_arrive_under_a_stream_of_signals(client_and_engines, tick):
    """Nothing is lost or doubled."""
    client, _ = client_and_engines(auto=True, engine={"step_delay": 0.002})
    with client.stream([1], SamplingParams(max_tokens=300)) as stream:
        tokens = [token for chunk in stream for token in chunk.token_ids]
    assert tokens == predicted([1], 300)
    assert tick[0] > 3


# --- turns ---------------------------------------------------------------------------------------


@pytest.mark.skipif(CHECKED, reason="checkers of a debug build swallow some of the signals")
def test_a_turn_survives_a_signal_while_it_is_given_up(client_and_engines):
    """Whoever finds no place leaves the queue, whatever comes between."""
    client, [engine] = client_and_engines(max_inflight=1)
    with client.stream([1]) as holder:
        rid = engine.recv_add().rid

        def prepare():
            def call():
                with contextlib.suppress(tszmq.QueueFull):
                    client.generate([2], timeout=0)

            return call, lambda: eventually(lambda: waiting_for_a_place(client) == 0)

        assert interrupt_everywhere(prepare) >= 4
        engine.tokens(rid, [5], "stop")
        assert holder.result(PATIENCE).token_ids == [5]
    answer_one(client, engine)


# --- a handler that calls the client, inside a change of the client's own ------------------


@pytest.mark.parametrize(
    "kind",
    ["generate", "stream", "generate_many", "as_completed", "stream_many", "next", "result"],
)
def test_who_interrupts_a_change_can_neither_submit_nor_wait(client_and_engines, kind):
    """Whoever else needs the lock would wait for it, and the change is half made."""
    client, [engine] = client_and_engines()
    stream = client.stream([1])
    rid = engine.recv_add().rid
    paused = client.as_completed([[1], [2]])
    calls = {
        "next": lambda: next(stream),
        "result": lambda: stream.result(timeout=0.1),
        "as_completed": lambda: next(paused),
    }
    call = calls.get(kind) or (lambda: getattr(client, kind)([[1]] if "many" in kind else [1]))
    with (
        client._session.shared.state,  # as in a signal handler at this place
        pytest.raises(RuntimeError, match="let a thread do that"),
    ):
        call()
    engine.expect_nothing()
    assert inflight(client) == [1]
    engine.tokens(rid, [5], "stop")
    assert stream.result(PATIENCE).token_ids == [5]
    answer_one(client, engine)


@pytest.mark.parametrize(
    "kind",
    ["generate", "stream", "generate_many", "as_completed", "stream_many", "next", "result"],
)
def test_who_interrupts_a_change_of_another_client_cannot_wait_either(client_and_engines, kind):
    """Whoever is served by that other client would wait for this one's engines."""
    (client, [engine]), (other, _) = (client_and_engines(auto=True) for _ in range(2))
    stream = client.stream([1])
    paused = client.as_completed([[1], [2]])
    assert stream.result(PATIENCE).token_ids == predicted([1], 16)
    calls = {
        "next": lambda: next(stream),
        "result": lambda: stream.result(timeout=PATIENCE),
        "as_completed": lambda: next(paused),
    }
    call = calls.get(kind) or (lambda: getattr(client, kind)([[1]] if "many" in kind else [1]))
    with (
        other._session.shared.state,  # as in a finalizer at this place
        pytest.raises(RuntimeError, match="let a thread do that") as caught,
    ):
        call()
    assert caught.type is RuntimeError  # not of a debug build's checks
    assert inflight(client) == [0]
    assert len(engine.served) == 1
    assert client.generate([2]).token_ids == predicted([2], 16)


@pytest.mark.embedded
def test_who_interrupts_a_change_of_another_client_can_call_no_engine() -> None:
    """Calls of an engine's own methods wait, too."""
    embedded = tszmq.Client.embedded
    with embedded(1, protocol="vllm") as client, embedded(1) as other:
        with (
            other._session.shared.state,
            pytest.raises(RuntimeError, match="let a thread do that"),
        ):
            client.is_sleeping()
        assert client.is_sleeping() == {0: False}


# --- while the sockets are made ------------------------------------------------------------


@pytest.mark.parametrize("nth", range(7))
def test_ctrl_c_while_a_socket_is_made(monkeypatch, short_dir, nth):
    """Only frames of the interrupt have the socket then; the context does not end before it."""
    make, count = zmq.Context.socket, itertools.count()

    def cut_off(context, kind, *args, **kwargs):
        if next(count) != nth:
            return make(context, kind, *args, **kwargs)
        half_made = zmq.Socket(context, kind)
        raise KeyboardInterrupt(half_made.closed)

    address = f"ipc://{short_dir}/handshake.sock"
    before = threading.active_count()
    with monkeypatch.context() as patched:
        patched.setattr(zmq.Context, "socket", cut_off)
        call = in_thread(tszmq.Client.bind, address)
        assert type(call.exception(PATIENCE)) is KeyboardInterrupt
    assert next(count) == nth + 1
    eventually(lambda: threading.active_count() == before)
    assert list(short_dir.iterdir()) == []
    tszmq.Client.bind(address).close()


@pytest.mark.parametrize("nth", range(3))
def test_ctrl_c_just_after_a_socket_is_bound(monkeypatch, short_dir, nth):
    """Its file is removed although nobody was told yet that it is there."""
    bind, count = zmq.Socket.bind, itertools.count()

    def cut_off(bound, address):
        bind(bound, address)
        if "inproc" not in address and next(count) == nth:
            raise KeyboardInterrupt

    check_nothing_stays(monkeypatch, short_dir, zmq.Socket, "bind", cut_off)
    assert next(count) == nth + 1


@pytest.mark.parametrize("what", ["Mailbox", "mutex", "Readiness", "_threads"])
def test_ctrl_c_after_all_sockets_are_bound(monkeypatch, short_dir, what):
    def cut_off(*_, **__):
        raise KeyboardInterrupt

    check_nothing_stays(monkeypatch, short_dir, tszmq.net.session, what, cut_off)


def check_nothing_stays(monkeypatch, short_dir, owner, name, cut_off):
    """Neither files nor threads, and the address is free."""
    private = short_dir / "private"
    private.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(private))
    address = f"ipc://{short_dir}/h/handshake.sock"
    before = threading.active_count()
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, cut_off)
        call = in_thread(tszmq.Client.bind, address)
        assert type(call.exception(PATIENCE)) is KeyboardInterrupt
    eventually(lambda: threading.active_count() == before)
    assert list(private.iterdir()) == []
    assert list((short_dir / "h").iterdir()) == []
    tszmq.Client.bind(address).close()
