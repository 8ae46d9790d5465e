"""Engines that do not read, bursts larger than any queue, and messages larger than the limit."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import Any

import msgspec
import pytest
import zmq

import tszmq
from tests.client_fixtures import answer_one, can_be_chosen, inflight
from tests.mock_engine import (
    PATIENCE,
    Add,
    MockEngine,
    eventually,
    in_thread,
    predicted,
    stays_true,
)
from tszmq import Client, SamplingParams
from tszmq.codec import unpack
from tszmq.net.receiver import _MOST_FRAMES
from tszmq.sim import expected_tokens

pytestmark = pytest.mark.timeout(45)

UNIT = float(os.environ.get("TSZMQ_TIME_UNIT", "1"))
LONG = SamplingParams(max_tokens=8000)
LOOPBACK = "tcp://127.0.0.1:*"
DATA_SOCKETS = {
    "ipc": LOOPBACK,  # the data sockets are then ipc
    "tcp": tszmq.Endpoints(handshake=LOOPBACK, input=LOOPBACK, output=LOOPBACK),
}


@pytest.fixture(params=DATA_SOCKETS)
def endpoints(request):
    """Both kinds of data sockets: their kernel buffers differ."""
    return DATA_SOCKETS[request.param]


def resident() -> int:
    """Bytes of memory that this process has now."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def timed(call, *args, **kwargs):
    """What it returned, and how long that took."""
    started = time.monotonic()
    value = call(*args, **kwargs)
    return value, time.monotonic() - started


# --- engines that do not read ------------------------------------------------------------------


class Reluctant(MockEngine):
    """Takes nothing from its connection beyond the next few messages until it is told to."""

    def _socket(self, kind):
        socket = super()._socket(kind)
        socket.rcvhwm = 5
        socket.rcvbuf = 4096
        return socket


@pytest.fixture
def reluctant(client_and_engines):
    """Makes a client whose engines, in this process, do not read."""
    made = []

    def make(endpoints=LOOPBACK, count=1, **options):
        bound = client_and_engines.bind(endpoints, engine_count=count, **options)
        connecting = in_thread(bound.connect, 2 * PATIENCE)
        engines = [Reluctant(bound.endpoints.handshake, index) for index in range(count)]
        made.extend(engines)
        for engine in engines:
            engine.connect()
        return connecting.result(PATIENCE), engines

    yield make
    for engine in made:
        engine.close()
        engine.check()


def test_nobody_waits_for_an_engine_that_does_not_read(reluctant, endpoints):
    """Its requests are kept for it; nobody's thread stands in a send, no lock is held."""
    client, engines = reluctant(endpoints, 2)
    streams, slowest = [], 0.0
    for _ in range(2500):
        stream, took = timed(client.stream, [1] * 2000, LONG, data_parallel_rank=1)
        streams.append(stream)
        slowest = max(slowest, took)
    assert client.inflight(1) == 2500
    for call in (client.health, lambda: client.load(1), lambda: client.engines):
        slowest = max(slowest, timed(call)[1])
    for stream in streams[::100]:
        slowest = max(slowest, timed(stream.close)[1])
    assert slowest < PATIENCE
    for _ in range(5):
        assert timed(answer_one, client, engines[0])[1] < PATIENCE
    _, took = timed(client.abort_all)
    assert took < PATIENCE
    assert inflight(client) == [0, 0]
    _, took = timed(client.close)
    assert took < PATIENCE


def test_a_burst_larger_than_every_queue_arrives_in_order(reluctant, endpoints):
    """Nothing is lost, and no abort overtakes its request, though most of them had to wait."""
    client, [engine] = reluctant(endpoints)
    streams = [client.stream([number + 1] * 2000, LONG) for number in range(3000)]
    # Handed to the socket or queued behind it: one that ends before that is never sent.
    eventually(lambda: all(stream._request.sent for stream in streams))
    for stream in streams[::5]:
        stream.close()
    kept = {number + 1 for number, stream in enumerate(streams) if not stream.finished}
    assert client.inflight(0) == len(kept) == 2400
    adds, aborted = {}, []
    while not kept <= adds.keys():
        message = engine.recv()
        if isinstance(message, Add):
            adds[message.prompt[0]] = message.rid
        else:
            assert set(message.rids) <= set(adds.values()), "an abort before its request"
            aborted += message.rids
    assert list(adds) == sorted(adds), "requests of one thread arrive in their order"
    owed = sorted(rid for number, rid in adds.items() if number not in kept)
    while len(aborted) < len(owed):
        aborted += engine.recv_abort()
    assert sorted(aborted) == owed
    assert len(owed) == 600
    for number in (2, 1000, 3000):  # and they are served
        engine.tokens(adds[number], [number], "stop")
        assert streams[number - 1].result(PATIENCE).token_ids == [number]


def test_an_engine_that_never_reads_is_dead_alone(reluctant, client_and_engines, endpoints):
    """After ``send_timeout``, with an error that says so; the next one of its index is served."""
    client, engines = reluctant(endpoints, 2, send_timeout=0.6 * UNIT)
    other = in_thread(client.generate, [1], data_parallel_rank=0)
    rid = engines[0].recv_add().rid
    doomed = [client.stream([1] * 2000, LONG, data_parallel_rank=1) for _ in range(50)]
    stays_true(lambda: client.engines[1].alive, 1.0 * UNIT)  # what fits is sent, and that is all
    started = time.monotonic()
    with contextlib.suppress(tszmq.EngineDead):
        doomed.extend(client.stream([1] * 2000, LONG, data_parallel_rank=1) for _ in range(20_000))
    for stream in doomed:
        with pytest.raises(tszmq.EngineDead) as caught:
            stream.result(PATIENCE)
        assert caught.value.engine_index == 1
        assert "has not read" in caught.value.reason
    assert 0.5 * UNIT < time.monotonic() - started < PATIENCE
    assert [info.alive for info in client.engines] == [True, False]
    assert client.inflight(1) == 0
    assert not other.done()
    engines[0].tokens(rid, [5], "stop")
    assert other.result(PATIENCE).token_ids == [5]
    successor = client_and_engines.engine(client.endpoints.handshake, 1).connect()
    eventually(lambda: client.engines[1].alive)
    answer_one(client, successor)  # and gets nothing of what its predecessor did not read


def test_an_engine_that_reads_slowly_is_not_dead(reluctant):
    """Progress will do, however long the whole takes."""
    client, [engine] = reluctant(send_timeout=1.2 * UNIT)
    submitting = in_thread(lambda: [client.stream([1] * 500, LONG) for _ in range(6000)])
    pause = threading.Event()
    started = time.monotonic()
    for _ in range(8):
        pause.wait(0.25 * UNIT)
        engine.recv_adds(600)  # a connection counts as writable again only half its queue later
    assert time.monotonic() - started > 1.2 * UNIT
    assert client.is_alive
    last = engine.recv_adds(6000 - 8 * 600)[-1]
    engine.tokens(last.rid, [5], "stop")
    assert submitting.result(PATIENCE)[-1].result(PATIENCE).token_ids == [5]


def test_a_burst_of_output_while_nobody_reads_is_kept(client_and_engines):
    """The engine is not held up either: what it sends arrives once the thread has its turn."""
    client, [engine] = client_and_engines()
    stream = client.stream([1], LONG)
    rid = engine.recv_add().rid
    with client._session.shared.state:  # as a thread that has been put to sleep there
        for token in range(5000):
            engine.tokens(rid, [token])
        engine.tokens(rid, [], "stop")
        stays_true(lambda: not stream.finished, 0.05)
    assert stream.result(PATIENCE).token_ids == list(range(5000))


def test_callers_wait_for_places_while_one_engine_stalls(client_and_engines):
    """``max_inflight`` holds through it; whoever has a deadline is refused in time."""
    client, engines = client_and_engines(2, auto=True, max_inflight=8)
    engines[1].stall()
    held = [client.stream([1], data_parallel_rank=1) for _ in range(6)]
    done = client.generate_many([[n + 1] for n in range(200)], max_inflight=2, timeout=20)
    assert sum(each.engine_index == 0 for each in done) >= 150
    held += [client.stream([1], data_parallel_rank=1) for _ in range(2)]
    started = time.monotonic()
    with pytest.raises(tszmq.QueueFull):
        client.generate([1], timeout=0.2)
    assert 0.2 <= time.monotonic() - started < PATIENCE
    engines[1].resume()
    for stream in held:
        assert stream.result(PATIENCE).token_ids == predicted([1], 16)


# --- messages above the limit ------------------------------------------------------------------

LIMIT = 1 << 20
TOO_LARGE = {  # sizes of the frames
    "alone": [LIMIT + 1],
    "together": [LIMIT // 2 + 1] * 2,
    "too many": [0] * (_MOST_FRAMES + 1),
}


@pytest.mark.parametrize("sizes", TOO_LARGE.values(), ids=TOO_LARGE)
def test_a_message_above_the_limit_ends_the_requests_it_may_have_been_for(
    client_and_engines, endpoints, sizes
):
    """It is refused unread and what it held is lost: an error says so, and only there."""
    client, engines = client_and_engines(2, endpoints=endpoints, max_message_bytes=LIMIT)
    streams = [client.stream([1], LONG, data_parallel_rank=index) for index in (0, 1)]
    rids = [engine.recv_add().rid for engine in engines]
    for engine, rid in zip(engines, rids, strict=True):
        engine.tokens(rid, [5])
    for stream in streams:
        assert next(stream).token_ids == [5]
    engines[0].send_raw([b"\xff" * size for size in sizes])
    with pytest.raises(tszmq.DecodeError) as caught:
        streams[0].result(PATIENCE)
    assert caught.value.engine_index == 0
    assert "too large" in str(caught.value)
    assert inflight(client) == [0, 1]
    engines[1].tokens(rids[1], [6], "stop")
    assert streams[1].result(PATIENCE).token_ids == [5, 6]
    assert [info.alive for info in client.engines] == [True, True]
    assert engines[0].recv_abort() == [rids[0]]  # it may still be at it
    for engine in engines:
        answer_one(client, engine)


def test_a_first_message_above_the_limit(client_and_engines):
    """Nothing that the engine said tells whose that connection was; its process does."""
    client, engines = client_and_engines(2, process=True, max_message_bytes=LIMIT)
    calls = [in_thread(client.generate, [1], data_parallel_rank=index) for index in (0, 1)]
    rids = [engine.recv_add().rid for engine in engines]
    engines[0].send_raw(["ff" * (LIMIT + 1)])
    with pytest.raises(tszmq.DecodeError) as caught:
        calls[0].result(PATIENCE)
    assert caught.value.engine_index == 0
    assert inflight(client) == [0, 1]
    engines[1].tokens(rids[1], [6], "stop")
    assert calls[1].result(PATIENCE).token_ids == [6]
    assert engines[0].recv_abort() == [rids[0]]
    for engine in engines:
        answer_one(client, engine)


def test_a_message_just_below_the_limit_is_read(client_and_engines):
    """As long as it is."""
    client, [engine] = client_and_engines(max_message_bytes=LIMIT)
    stream = client.stream([1], LONG)
    rid = engine.recv_add().rid
    tokens = list(range(150_000, 350_000))
    engine.tokens(rid, tokens, "stop")
    assert stream.result(PATIENCE).token_ids == tokens


@pytest.mark.embedded
@pytest.mark.parametrize("name", ["alone", "together"])
def test_a_message_above_the_limit_ends_the_calls_it_may_have_answered(name: str) -> None:
    """Together with the requests of that engine, which lives; another's are not hurt."""
    with Client.embedded(2, protocol="vllm", step_ms=5, max_message_bytes=LIMIT) as client:
        params = SamplingParams(max_tokens=4000)
        streams = [client.stream([1], params, data_parallel_rank=index) for index in (0, 1)]
        for stream in streams:
            next(stream)
        calls = [  # answered when the engine has nothing left to do
            in_thread(client.utility, "pause_scheduler", "wait", engine_index=index)
            for index in (0, 1)
        ]
        eventually(lambda: unanswered(client) == 2)
        assert client.fleet is not None
        client.fleet.send(0, "garbage " + ",".join("ff" * size for size in TOO_LARGE[name]))
        for wait in (streams[0].result, calls[0].result):
            with pytest.raises(tszmq.DecodeError, match="too large") as caught:
                wait(PATIENCE)
            assert caught.value.engine_index == 0
        assert next(streams[1]).token_ids
        assert not calls[1].done()
        assert (inflight(client), unanswered(client)) == ([0, 1], 1)
        streams[1].close()
        assert calls[1].result(PATIENCE) is None
        assert [info.alive for info in client.engines] == [True, True]
        client.resume()
        for index in (0, 1):
            done = in_thread(client.generate, [1], data_parallel_rank=index).result(PATIENCE)
            assert done.finish_reason == "length"


def unanswered(client: Client) -> int:
    """Calls that wait for an answer."""
    with client._session.shared.state as flights:
        return len(flights.calls.unanswered())


@pytest.mark.embedded
def test_an_answer_above_the_limit() -> None:
    """Also when it is the first that the engine says: it does not come again."""
    with Client.embedded(1, protocol="vllm", max_message_bytes=LIMIT) as client:
        for _ in range(2):
            call = in_thread(client.collective_rpc, "echo", args=[bytes(LIMIT)], engine_index=0)
            with pytest.raises(tszmq.DecodeError, match="answer to the call") as caught:
                call.result(PATIENCE)
            assert caught.value.engine_index == 0
            assert unanswered(client) == 0
            done = in_thread(client.generate, [1]).result(PATIENCE)
            assert done.finish_reason == "length"


@pytest.mark.parametrize("how", ["too large", "broken"])
def test_a_call_whose_answer_may_be_lost_with_its_connection(client_and_engines, how: str) -> None:
    """The engine lives, but whoever asked it would wait for ever."""
    client, [engine] = client_and_engines(protocol="vllm", max_message_bytes=LIMIT)
    call, _ = ask(client, engine)
    if how == "too large":
        engine.send_raw([bytes(LIMIT + 1)])
    else:
        engine.output.close()
    with pytest.raises(tszmq.DecodeError, match="the connection broke") as caught:
        call.result(PATIENCE)
    assert caught.value.engine_index == 0
    assert client.is_alive
    if how == "broken":
        engine.output = engine._socket(zmq.PUSH)
        engine.output.connect(engine.init["addresses"]["outputs"][0])
        eventually(lambda: can_be_chosen(client, 0))
    call, call_id = ask(client, engine)
    answer = [0, [], None, 1.0, [call_id, None, [None, True]], None, None, None, None]
    engine.send_raw([msgspec.msgpack.encode(answer)])
    assert call.result(PATIENCE) is True


def ask(client: Client, engine: MockEngine) -> tuple[Any, int]:
    """A call that has reached the engine, and its number there."""
    call = in_thread(client.is_sleeping, engine_index=0)
    assert engine.input is not None
    assert engine.input.poll(round(PATIENCE * 1000))
    kind, body = engine.input.recv_multipart()
    assert kind == b"\x03"
    return call, unpack(body)[1]


@pytest.mark.embedded
def test_a_message_of_large_frames_is_read_whole() -> None:
    """Alternatives of thousands of prompt tokens: more than any batch of new tokens can be."""
    options: dict[str, Any] = {"max_num_seqs": 1, "max_model_len": 20_000}
    with Client.embedded(1, protocol="vllm", **options) as client:
        prompt = list(range(1, 8001))
        params = SamplingParams(max_tokens=2, prompt_logprobs=20)
        done = in_thread(client.generate, prompt, params).result(PATIENCE)
        assert done.token_ids == expected_tokens(prompt, 2)
        assert done.prompt_logprobs is not None
        assert len(done.prompt_logprobs) == 8000
        assert all(each and len(each) == 21 for each in done.prompt_logprobs[1:])
        large = bytes(3 << 20)
        call = in_thread(client.collective_rpc, "echo", args=[large], engine_index=0)
        assert call.result(PATIENCE) == [{"method": "echo", "args": [large], "kwargs": {}}]


@pytest.mark.parametrize("where", ["handshake", "input", "output"])
def test_huge_messages_of_strangers_take_no_memory(client_and_engines, run_script, where):
    """Refused by their length, before there is room made for them."""
    client, engines = client_and_engines(2, max_message_bytes=LIMIT)
    for engine in engines:
        answer_one(client, engine)
    before, most, sent = resident(), [0], threading.Event()

    def watch():
        while not sent.wait(0.002):
            most[0] = max(most[0], resident())

    watching = in_thread(watch)
    script = """
import sys, zmq
context = zmq.Context()
for _ in range(4):
    junk = context.socket(zmq.PUSH if sys.argv[2] == "output" else zmq.DEALER)
    junk.linger = 500
    junk.connect(sys.argv[1])
    junk.send(bytes(200_000_000), copy=False)
    junk.close()
context.term()
"""
    try:
        address = getattr(client.endpoints, where)
        assert run_script(script, address, where).exit_code == 0
    finally:
        sent.set()
    watching.result(PATIENCE)
    assert most[0] - before < 64 << 20
    assert [info.alive for info in client.engines] == [True, True]
    for engine in engines:
        answer_one(client, engine)
