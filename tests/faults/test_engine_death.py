"""Engines that die, fall silent, come back, or send what cannot be read."""

from __future__ import annotations

import contextlib
import threading
import time

import msgspec
import pytest
import zmq

import tszmq
from tests.client_fixtures import answer_one, inflight, partial_of
from tests.mock_engine import (
    PATIENCE,
    UNIT,
    Load,
    Row,
    encode_batch,
    eventually,
    in_thread,
    stays_true,
)
from tszmq import SamplingParams
from tszmq.net.peers import inode
from tszmq.wire.tokenspeed_decoder import TokenSpeedDecoder

pytestmark = pytest.mark.timeout(30)

LONG = SamplingParams(max_tokens=8000)

LOOPBACK = "tcp://127.0.0.1:*"
ENDPOINTS = {
    "ipc": LOOPBACK,  # the data sockets are then ipc
    "tcp": tszmq.Endpoints(handshake=LOOPBACK, input=LOOPBACK, output=LOOPBACK),
}


@pytest.fixture(params=ENDPOINTS)
def endpoints(request):
    """Both kinds of data sockets: what can be known of a peer differs."""
    return ENDPOINTS[request.param]


def blocked_reader(client, engine):
    """A stream on that engine with a thread that waits for its next chunk."""
    stream = client.stream([1], LONG, data_parallel_rank=engine.index)
    rid = engine.recv_add().rid
    engine.tokens(rid, [5])
    assert next(stream).token_ids == [5]
    return stream, rid, in_thread(next, stream)


def check_dead(client, index):
    """What the client shows of an engine that it lost."""
    [info] = [info for info in client.engines if info.engine_index == index]
    assert info.alive is False
    assert client.inflight(index) == 0
    record = client.health()[index]
    assert record.connected is False
    assert record.first_error


@pytest.fixture
def pusher():
    """Sockets that push to the client's output address without being an engine."""
    context = zmq.Context()

    def make(client):
        sock = context.socket(zmq.PUSH)
        sock.linger = 1000
        sock.connect(client.endpoints.output)
        return sock

    yield make
    context.destroy(linger=0)


# --- death ---------------------------------------------------------------------------------


def test_killed_engine_ends_its_requests(client_and_engines, endpoints):
    """SIGKILL: no farewell, and yet every call on it raises within a second."""
    client, [engine] = client_and_engines(process=True, endpoints=endpoints)
    _, _, blocked = blocked_reader(client, engine)
    calls = [
        blocked,
        in_thread(client.generate, [1]),
        in_thread(client.generate, [1], timeout=60),
        in_thread(client.generate_many, [[1], [2]]),
        in_thread(client.stream([1]).result),
    ]
    for _ in range(5):
        engine.recv_add()
    engine.kill()
    started = time.monotonic()
    for call in calls:
        with pytest.raises(tszmq.EngineDead) as caught:
            call.result(PATIENCE)
        assert caught.value.engine_index == 0
        assert isinstance(caught.value.reason, str)
    assert time.monotonic() - started < PATIENCE
    assert not client.is_alive
    check_dead(client, 0)
    started = time.monotonic()
    with pytest.raises(tszmq.EngineDead) as caught:
        client.generate([1])
    assert caught.value.engine_index is None
    assert time.monotonic() - started < PATIENCE


def test_others_go_on_when_one_is_killed(client_and_engines, endpoints):
    """Their streams see nothing of it, and take the new requests."""
    client, engines = client_and_engines(2, process=True, endpoints=endpoints)
    _, _, doomed = blocked_reader(client, engines[0])
    stream, rid, other = blocked_reader(client, engines[1])
    engines[0].kill()
    with pytest.raises(tszmq.EngineDead) as caught:
        doomed.result(PATIENCE)
    assert caught.value.engine_index == 0
    assert partial_of(caught.value).token_ids == [5]
    assert not other.done()
    engines[1].tokens(rid, [6])
    assert other.result(PATIENCE).token_ids == [6]
    for _ in range(3):
        call = in_thread(client.generate, [1])
        engines[1].tokens(engines[1].recv_add().rid, [1], "stop")
        assert call.result(PATIENCE).engine_index == 1
    engines[1].tokens(rid, [7], "stop")
    assert stream.result(PATIENCE).token_ids == [5, 6, 7]
    assert client.is_alive
    check_dead(client, 0)


def test_errors_in_bulk_calls_of_a_dead_engine(client_and_engines):
    """Places of the dead engine's requests hold the error, the others their results."""
    client, engines = client_and_engines(2)
    call = in_thread(client.generate_many, [[n + 1] for n in range(6)], errors="return")
    adds = [engine.recv_adds(3) for engine in engines]
    engines[0].close()
    for add in adds[1]:
        engines[1].tokens(add.rid, add.prompt, "stop")
    results = call.result(PATIENCE)
    for n, result in enumerate(results):
        if [n + 1] in [add.prompt for add in adds[1]]:
            assert result.token_ids == [n + 1]
        else:
            assert isinstance(result, tszmq.EngineDead)
            assert result.engine_index == 0


def test_each_waiter_gets_an_error_of_its_own(client_and_engines):
    """One exception object raised in many threads would mix their tracebacks."""
    client, [engine] = client_and_engines()
    calls = [in_thread(client.generate, [1]) for _ in range(4)]
    engine.recv_adds(4)
    engine.close()
    errors = [call.exception(PATIENCE) for call in calls]
    assert all(isinstance(error, tszmq.EngineDead) for error in errors)
    assert len({id(error) for error in errors}) == 4


@pytest.mark.parametrize("finish", ["", "stop"])
def test_tokens_sent_before_the_death_are_delivered(client_and_engines, endpoints, finish):
    """Disconnection overtakes unread messages: they come first, the error after them."""
    client, engines = client_and_engines(2, endpoints=endpoints)
    stream = client.stream([1], LONG, data_parallel_rank=0)
    _, rid, other = blocked_reader(client, engines[1])
    first = engines[0].recv_add().rid
    for token in range(3000):
        last = finish if token == 2999 else ""
        engines[0].tokens(first, [token], last)
    engines[0].close(flush=True)
    got = []
    if finish:
        for chunk in stream:
            got += chunk.token_ids
        assert stream.result(0).finish_reason == "stop"
    else:

        def read():
            for chunk in stream:
                got.extend(chunk.token_ids)

        with pytest.raises(tszmq.EngineDead):
            read()
    assert got == list(range(3000))
    eventually(lambda: not client.engines[0].alive)
    engines[1].tokens(rid, [6], "stop")
    assert other.result(PATIENCE).token_ids == [6]


def test_tokens_that_follow_the_loss_of_the_input_connection(client_and_engines, monkeypatch):
    """libzmq may read an engine's connections one long after the other: what it has sent before
    it died comes as long as its output connection is open."""
    monkeypatch.setattr("tszmq.net.control._LONG_GRACE", PATIENCE)
    client, engines = client_and_engines(2)
    stream, rid, _ = blocked_reader(client, engines[0])
    engines[0].input.close()
    eventually(lambda: not client.engines[0].alive)
    threading.Event().wait(0.3)  # longer than the usual grace
    engines[0].tokens(rid, [6, 7], "stop")
    assert stream.result(PATIENCE).token_ids == [5, 6, 7]


def test_the_end_of_a_connection_is_seen_however_late_it_is_closed(client_and_engines, monkeypatch):
    """libzmq reports it first and closes the descriptor then: at once, or much later."""
    late = threading.Event()
    seen = {}

    def inode_before(fd):
        found = inode(fd)
        if found is None and not late.is_set():
            return seen.get(fd)
        seen[fd] = found
        return found

    monkeypatch.setattr("tszmq.net.peers.inode", inode_before)
    client, engines = client_and_engines(2)
    _, _, blocked = blocked_reader(client, engines[0])
    threading.Event().wait(0.6)  # connections are looked at all the time until all have started
    engines[0].close()
    threading.Event().wait(0.2)
    late.set()
    with pytest.raises(tszmq.EngineDead):
        blocked.result(PATIENCE)
    eventually(lambda: not client.engines[0].alive)
    answer_one(client, engines[1])


def test_a_slow_receiver_reads_all_that_a_dead_engine_sent(client_and_engines, monkeypatch):
    """However long it takes: the other engine's batches are taken in between."""
    decode = TokenSpeedDecoder.decode
    pause = threading.Event()

    def slowly(decoder, frames):
        pause.wait(0.001)
        return decode(decoder, frames)

    client, engines = client_and_engines(2)
    streams = [client.stream([1], LONG, data_parallel_rank=rank) for rank in (0, 1)]
    first, second = (engine.recv_add().rid for engine in engines)
    monkeypatch.setattr(TokenSpeedDecoder, "decode", slowly)
    for token in range(1000):
        engines[0].tokens(first, [token], "stop" if token == 999 else "")
        engines[1].tokens(second, [token])
    engines[0].close(flush=True)
    assert streams[0].result(PATIENCE).token_ids == list(range(1000))
    eventually(lambda: not client.engines[0].alive)
    engines[1].tokens(second, [1000], "stop")
    assert streams[1].result(PATIENCE).token_ids == list(range(1001))


def test_finish_in_the_last_batch_of_a_killed_process(client_and_engines):
    """A result that came whole is a result."""
    client, [engine] = client_and_engines(process=True)
    calls = [in_thread(client.generate, [1]) for _ in range(8)]
    for _ in range(8):
        engine.tokens(engine.recv_add().rid, [5, 6], "stop")
    engine.call("close", flush=True)
    engine.kill()
    assert [call.result(PATIENCE).token_ids for call in calls] == [[5, 6]] * 8
    eventually(lambda: not client.is_alive)


def test_sentinel_of_the_only_engine(client_and_engines, endpoints):
    """It says that it goes down: that is enough, connected or not."""
    client, [engine] = client_and_engines(endpoints=endpoints)
    _, _, blocked = blocked_reader(client, engine)
    engine.sentinel()
    with pytest.raises(tszmq.EngineDead) as caught:
        blocked.result(PATIENCE)
    assert caught.value.engine_index == 0
    check_dead(client, 0)
    with pytest.raises(tszmq.EngineDead):
        client.generate([1])
    for wrong in ("abc", [True], [0.5], None):
        with pytest.raises(TypeError):
            client.generate(wrong)


def test_sentinel_of_an_engine_that_has_sent_nothing_else(client_and_engines, endpoints):
    """Its connection is not known by a batch; it is that of one that was told to dial in."""
    client, [engine] = client_and_engines(endpoints=endpoints)
    call = in_thread(client.generate, [1])
    engine.recv_add()
    engine.sentinel()
    with pytest.raises(tszmq.EngineDead, match="ENGINE_CORE_DEAD"):
        call.result(PATIENCE)
    check_dead(client, 0)


def test_sentinel_of_one_of_two(client_and_engines, endpoints):
    """It names nobody; the other engine is not taken for dead."""
    client, engines = client_and_engines(2, endpoints=endpoints)
    _, _, doomed = blocked_reader(client, engines[1])
    stream, rid, other = blocked_reader(client, engines[0])
    engines[1].sentinel()
    engines[1].close(flush=True)
    with pytest.raises(tszmq.EngineDead) as caught:
        doomed.result(PATIENCE)
    assert caught.value.engine_index == 1
    stays_true(lambda: not other.done() and client.engines[0].alive, 0.3)
    engines[0].tokens(rid, [6], "stop")
    assert other.result(PATIENCE).token_ids == [6]
    assert stream.result(0).finish_reason == "stop"
    answer_one(client, engines[0])


def test_tokens_before_the_sentinel_count(client_and_engines):
    """In the order in which they were sent."""
    client, [engine] = client_and_engines()
    done = in_thread(client.generate, [1])
    cut = in_thread(client.generate, [2])
    adds = {add.prompt[0]: add for add in engine.recv_adds(2)}
    engine.tokens(adds[1].rid, [5], "stop")
    engine.sentinel()
    assert done.result(PATIENCE).token_ids == [5]
    with pytest.raises(tszmq.EngineDead):
        cut.result(PATIENCE)


def test_lost_input_connection(client_and_engines, endpoints):
    """An engine that can no longer be reached is dead, though it could still talk."""
    client, [engine] = client_and_engines(endpoints=endpoints)
    _, _, blocked = blocked_reader(client, engine)
    engine.input.close()
    with pytest.raises(tszmq.EngineDead):
        blocked.result(PATIENCE)
    with pytest.raises(tszmq.EngineDead):
        client.generate([1])
    assert client.inflight(0) == 0


def test_lost_output_connection(client_and_engines, endpoints):
    """Nor can one that can no longer answer."""
    client, [engine] = client_and_engines(endpoints=endpoints)
    _, _, blocked = blocked_reader(client, engine)
    engine.output.close()
    with pytest.raises(tszmq.EngineDead):
        blocked.result(PATIENCE)
    assert client.inflight(0) == 0


def test_submitting_at_the_moment_of_death(client_and_engines):
    """Whether the send failed or was accepted for nobody: an error soon, nothing left over."""
    for _ in range(10):
        client, [engine] = client_and_engines()
        calls = [in_thread(client.generate, [1]) for _ in range(4)]
        engine.close()
        calls += [in_thread(client.generate, [1]) for _ in range(4)]
        started = time.monotonic()
        for call in calls:
            with pytest.raises(tszmq.EngineDead):
                call.result(PATIENCE)
        assert time.monotonic() - started < PATIENCE
        assert inflight(client) == [0]
        client.close()


def test_stopped_engine_does_not_hold_up_the_others(client_and_engines):
    """It reads nothing: submissions to it end somehow, and everybody else goes on."""
    client, engines = client_and_engines(2, process=True, send_timeout=60)
    engines[1].stop()

    def flood():
        streams: list[tszmq.RequestStream] = []
        with contextlib.suppress(tszmq.TszmqError):
            streams.extend(client.stream([1] * 8000, data_parallel_rank=1) for _ in range(3000))
        return len(streams)

    flooding = in_thread(flood)
    for _ in range(20):
        answer_one(client, engines[0])
    assert client.engines[1].alive  # nobody waited for it to be given up
    assert flooding.result(25) > 0
    engines[1].kill()
    eventually(lambda: client.inflight(1) == 0)


# --- coming back ---------------------------------------------------------------------------


def test_restarted_engine_is_served(client_and_engines):
    """Old requests have failed, new ones work, and nothing is known of its load."""
    client, [first] = client_and_engines()
    stream, rid, blocked = blocked_reader(client, first)
    first.tokens(rid, [6], load=Load(3, 1, 700))
    assert blocked.result(PATIENCE).token_ids == [6]
    eventually(lambda: client.load(0) is not None)
    first.close()
    second = client_and_engines.engine(
        client.endpoints.handshake, 0, num_gpu_blocks=77, vllm_version="tokenspeed-9"
    )
    second.connect()
    with pytest.raises(tszmq.EngineDead):
        stream.result(PATIENCE)
    eventually(lambda: client.engines[0].alive)
    assert client.is_alive
    assert client.load(0) is None
    assert client.inflight(0) == 0
    assert (client.engines[0].num_gpu_blocks, client.engines[0].engine_version) == (
        77,
        "tokenspeed-9",
    )
    assert client.health()[0].connected
    answer_one(client, second)
    second.tokens(rid, [7], "stop")  # of its predecessor: noise
    answer_one(client, second)


def test_engine_that_restarts_at_once(client_and_engines, endpoints):
    """Killed and started again within milliseconds, ten times over."""
    client, [engine] = client_and_engines(process=True, endpoints=endpoints)
    for _ in range(10):
        _, _, blocked = blocked_reader(client, engine)
        engine.kill()
        engine = client_and_engines.engine(client.endpoints.handshake, 0, process=True)
        engine.connect()
        with pytest.raises(tszmq.EngineDead):
            blocked.result(PATIENCE)
        eventually(lambda: client.engines[0].alive)
        answer_one(client, engine)
    assert inflight(client) == [0]


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_restart_while_others_work(client_and_engines):
    """Routing takes it back in, and pins work again."""
    client, engines = client_and_engines(2)
    stream, rid, other = blocked_reader(client, engines[1])
    engines[0].close()
    eventually(lambda: not client.engines[0].alive)
    second = client_and_engines.engine(client.endpoints.handshake, 0)
    second.connect()
    eventually(lambda: client.engines[0].alive)
    assert client.stream([1]).engine_index == 0  # idle, while the other one is not
    second.recv_add()
    second.recv_abort()
    answer_one(client, second)
    engines[1].tokens(rid, [6], "stop")
    assert other.result(PATIENCE).token_ids == [6]
    assert stream.finished


@pytest.mark.slow
def test_engines_that_die_and_come_back_together(client_and_engines, endpoints):
    """Connections of several engines close and open at once, and get each other's descriptors;
    the engine that stays is never mistaken for one that went."""
    client, engines = client_and_engines(3, endpoints=endpoints)
    stream, rid, blocked = blocked_reader(client, engines[2])
    address = client.endpoints.handshake
    for turn in range(15):
        for engine in engines[:2]:
            engine.close()
        for index in (turn % 2, 1 - turn % 2):
            engines[index] = client_and_engines.engine(address, index).hello()
        for engine in engines[:2]:
            engine.finish_connect()
        eventually(lambda: all(info.alive for info in client.engines))
        for engine in engines[:2]:
            answer_one(client, engine)
        engines[2].tokens(rid, [turn])
        assert blocked.result(PATIENCE).token_ids == [turn]
        blocked = in_thread(next, stream)
    engines[2].tokens(rid, [], "stop")
    assert stream.result(PATIENCE).token_ids == [5, *range(15)]
    assert inflight(client) == [0, 0, 0]


def test_stale_batches_of_an_outlived_engine_are_noise(client_and_engines, short_dir):
    """Its sockets reconnect to the next client's: unknown ids, and a load of the past."""
    endpoints = tszmq.Endpoints(
        handshake=f"ipc://{short_dir}/h",
        input=f"ipc://{short_dir}/i",
        output=f"ipc://{short_dir}/o",
    )
    client, [old] = client_and_engines(endpoints=endpoints)
    stream = client.stream([1])
    rid = old.recv_add().rid
    old.tokens(rid, [5])
    assert next(stream).token_ids == [5]
    reconnected = old.output.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    old.input.close()  # the next engine needs the identity
    client.close()
    client, [engine] = client_and_engines(endpoints=endpoints)
    assert reconnected.poll(PATIENCE * 1000)
    old.output.disable_monitor()
    reconnected.close()
    with client.stream([1]) as running:
        mine = engine.recv_add().rid
        for token in range(50):
            old.tokens(rid, [token], load=Load(40, 20, 990))
        engine.tokens(mine, [6], load=Load(1, 0, 10))
        assert next(running).token_ids == [6]

        def as_said():
            load = client.load(0)
            return (load.num_running, load.num_waiting, load.kv_cache_usage) == (1, 0, 0.01)

        stays_true(as_said, 0.2)
        old.close()
        stays_true(lambda: client.engines[0].alive, 0.2)
        engine.tokens(mine, [7], "stop")
        assert running.result(PATIENCE).token_ids == [6, 7]
    answer_one(client, engine)


# --- silence -------------------------------------------------------------------------------

SILENCE = 1.5 * UNIT
"""Longer than a busy machine keeps an engine or its reader from its turn."""


def test_silent_engine_with_work_is_dead(client_and_engines):
    """silence_timeout: connected, holding a request, and not a word."""
    client, engines = client_and_engines(2, silence_timeout=SILENCE)
    started = time.monotonic()
    doomed = in_thread(client.generate, [1], data_parallel_rank=0)
    engines[0].recv_add()
    with pytest.raises(tszmq.EngineDead) as caught:
        doomed.result(PATIENCE)
    assert 0.95 * SILENCE <= time.monotonic() - started < PATIENCE
    assert caught.value.engine_index == 0
    check_dead(client, 0)
    assert client.engines[1].alive
    answer_one(client, engines[1])


def test_idle_engine_may_be_silent(client_and_engines):
    """It has nothing to say; and the clock does not start before it has work."""
    client, [engine] = client_and_engines(silence_timeout=SILENCE)
    stays_true(lambda: client.is_alive, 2 * UNIT)
    call = in_thread(client.generate, [1])
    rid = engine.recv_add().rid
    stays_true(lambda: not call.done(), 0.25)
    engine.tokens(rid, [5])
    stays_true(lambda: not call.done(), 0.25)
    engine.tokens(rid, [6], "stop")
    assert call.result(PATIENCE).token_ids == [5, 6]
    stays_true(lambda: client.is_alive, 2 * UNIT)
    answer_one(client, engine)


def test_slow_engine_is_not_silent(client_and_engines):
    """Any readable output of it counts, also other requests'."""
    client, [engine] = client_and_engines(silence_timeout=SILENCE)
    waiting = in_thread(client.generate, [1])
    first = engine.recv_add().rid
    busy = in_thread(client.generate, [2])
    second = engine.recv_add().rid
    for token in range(13):  # much longer than the limit in all
        stays_true(lambda: not waiting.done(), 0.2 * UNIT)
        engine.tokens(second, [token])
    engine.tokens(second, [13], "stop")
    engine.tokens(first, [5], "stop")
    assert waiting.result(PATIENCE).token_ids == [5]
    assert busy.result(PATIENCE).token_ids == list(range(14))


def test_silence_alone_is_no_death_by_default(client_and_engines):
    """Long prefills are long."""
    client, [engine] = client_and_engines()
    call = in_thread(client.generate, [1])
    rid = engine.recv_add().rid
    stays_true(lambda: not call.done() and client.is_alive, 1.5)
    engine.tokens(rid, [5], "stop")
    assert call.result(PATIENCE).token_ids == [5]


def test_stopped_process_with_work_is_dead(client_and_engines):
    """SIGSTOP gives no event at all: silence is what tells."""
    client, [engine] = client_and_engines(process=True, silence_timeout=SILENCE)
    _, _, blocked = blocked_reader(client, engine)
    engine.stop()
    with pytest.raises(tszmq.EngineDead):
        blocked.result(PATIENCE)
    check_dead(client, 0)


# --- what cannot be read -------------------------------------------------------------------

GARBAGE: dict[str, list[bytes]] = {
    "empty": [b""],
    "reserved byte": [b"\xc1"],
    "one letter": [b"E"],
    "text": [b"\xa5hello"],
    "number": [b"\x07"],
    "map": [b"\x81\xa1a\x01"],
    "empty array": [b"\x90"],
    "truncated": [encode_batch([Row("x", [1])], None, 0)[:20]],
    "another tag": [b"\x9e" + b"\xa3abc" + b"\x90" * 8 + b"\x00" * 5],
    "too few elements": [encode_batch([Row("x", [1])], None, 0, era=8)],
    "huge array": [b"\xdd\xff\xff\xff\xff" + b"\x00" * 10],
    "huge map": [b"\xdf\xff\xff\xff\xff"],
    "huge bytes": [b"\xc6\xff\xff\xff\xff"],
    "deeply nested": [b"\xdc\xff\xff" * 1000 + b"\x00" * 65536],
    "trailing bytes": [encode_batch([Row("x", [1])], None, 0) + b"\x00"],
    "sentinel and more": [b"ENGINE_CORE_DEAD", b""],
    "longer sentinel": [b"ENGINE_CORE_DEAD!"],
    "many frames": [b"\x00"] * 50,
    "large": [b"\xff" * 200_000],
    "unreadable id": [encode_batch([Row("xx", [1])], None, 0).replace(b"\xa2xx", b"\xa2\xff\xfe")],
}


@pytest.mark.parametrize("name", GARBAGE)
def test_one_unreadable_message_fails_nobody(client_and_engines, name):
    """It is dropped; what comes before and after it is not hurt."""
    client, engines = client_and_engines(2)
    streams = [blocked_reader(client, engine) for engine in engines]
    engines[0].send_raw(GARBAGE[name])
    for engine, (stream, rid, blocked) in zip(engines, streams, strict=True):
        engine.tokens(rid, [6])
        assert blocked.result(PATIENCE).token_ids == [6]
        engine.tokens(rid, [7], "stop")
        assert stream.result(PATIENCE).token_ids == [5, 6, 7]
    assert [info.alive for info in client.engines] == [True, True]
    for engine in engines:
        answer_one(client, engine)


def _broken(change):
    """A batch for two requests with one column changed."""

    def make(first, second):
        batch = msgspec.msgpack.decode(
            encode_batch([Row(first, [6], "", 1, 2), Row(second, [6], "", 1, 2)], None, 0)
        )
        change(batch)
        return msgspec.msgpack.encode(batch)

    return make


def _set(column, value):
    def change(batch):
        batch[column] = value

    return _broken(change)


BROKEN = {
    "ragged ids": _set(1, ["x"]),
    "ragged tokens": _set(2, [[6]]),
    "ragged reasons": _set(3, ["", "", ""]),
    "ragged counts": _set(5, [2]),
    "ragged logprobs": _set(7, [[]]),
    "ids no list": _set(1, "xx"),
    "ids numbers": _set(1, [1, 2]),
    "tokens flat": _set(2, [6, 6]),
    "tokens text": _set(2, [["6"], ["6"]]),
    "tokens floats": _set(2, [[6.0], [6.0]]),
    "late token too large": _set(2, [[6], [2**40]]),
    "late token negative": _set(2, [[6], [-1]]),
    "tokens None": _set(2, [[6], None]),
    "reasons numbers": _set(3, [0, 0]),
    "reasons None": _set(3, ["", None]),
    "counts text": _set(5, ["2", "2"]),
    "counts None": _set(5, None),
    "logprobs text": _set(7, [["x"], ["x"]]),
    "logprobs too many": _set(7, [[-1.0, -2.0], []]),
    "index text": _set(9, "0"),
    "load text": _set(10, "many"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_unreadable_batch_is_rejected_whole(client_and_engines, name):
    """Not half of it: none of its tokens may have been delivered before the fault was seen."""
    client, [engine] = client_and_engines()
    calls = [in_thread(client.generate, [n + 1]) for n in range(2)]
    adds = sorted(engine.recv_adds(2), key=lambda add: add.prompt)
    for add in adds:
        engine.tokens(add.rid, [5])
    engine.send_raw([BROKEN[name](adds[0].rid, adds[1].rid)])
    for add in adds:
        engine.tokens(add.rid, [6], "stop")
    assert [call.result(PATIENCE).token_ids for call in calls] == [[5, 6], [5, 6]]
    answer_one(client, engine)


def test_aux_frames_belong_to_their_message(client_and_engines):
    """A readable batch behind an unreadable frame is not a message of its own."""
    client, [engine] = client_and_engines()
    call = in_thread(client.generate, [1])
    rid = engine.recv_add().rid
    hidden = encode_batch([Row(rid, [99], "stop", 1, 1)], None, 0)
    engine.send_raw([b"\xc1", hidden])
    engine.send_raw([b"\xc1", b"", hidden, hidden])
    stays_true(lambda: not call.done(), 0.1)
    engine.tokens(rid, [5], "stop")
    assert call.result(PATIENCE).token_ids == [5]


@pytest.mark.parametrize("name", ["empty", "reserved byte", "another tag", "huge array", "large"])
def test_engine_that_sends_only_garbage_is_dead(client_and_engines, endpoints, name):
    """DecodeError within three seconds, for its own requests only."""
    client, engines = client_and_engines(2, endpoints=endpoints)
    _, _, doomed = blocked_reader(client, engines[0])
    second = in_thread(client.generate, [1], data_parallel_rank=0)
    engines[0].recv_add()
    stream, rid, other = blocked_reader(client, engines[1])
    started = time.monotonic()

    def send_until_noticed():
        if not doomed.done():
            engines[0].send_raw(GARBAGE[name])
        return doomed.done()

    eventually(send_until_noticed)
    for call in (doomed, second):
        with pytest.raises(tszmq.DecodeError) as caught:
            call.result(PATIENCE)
        assert isinstance(caught.value, tszmq.EngineDead)
        assert caught.value.engine_index == 0
        assert len(str(caught.value)) < 2000
    assert time.monotonic() - started < PATIENCE
    check_dead(client, 0)
    assert not other.done()
    for _ in range(4):
        call = in_thread(client.generate, [1])
        engines[1].tokens(engines[1].recv_add().rid, [1], "stop")
        assert call.result(PATIENCE).engine_index == 1
    engines[1].tokens(rid, [6], "stop")
    assert stream.result(PATIENCE).token_ids == [5, 6]
    assert other.result(PATIENCE).token_ids == [6]


def test_a_few_unreadable_messages_are_noticed_within_three_seconds(client_and_engines):
    """An engine whose every message is unreadable sends no flood of them."""
    client, [engine] = client_and_engines()
    _, _, doomed = blocked_reader(client, engine)
    started = time.monotonic()
    for _ in range(5):
        engine.send_raw([b"\xc1"])
    with pytest.raises(tszmq.DecodeError):
        doomed.result(PATIENCE)
    assert time.monotonic() - started < PATIENCE


def test_unreadable_messages_between_readable_ones(client_and_engines, endpoints):
    """As long as it also makes sense, an engine lives."""
    client, [engine] = client_and_engines(endpoints=endpoints)
    stream = client.stream([1], LONG)
    rid = engine.recv_add().rid
    for token in range(200):
        engine.send_raw([b"\xc1"])
        engine.tokens(rid, [token])
        if token % 20 == 0:
            answer_one(client, engine)
    engine.tokens(rid, [], "stop")
    assert stream.result(PATIENCE).token_ids == list(range(200))
    assert client.is_alive


def test_engine_whose_first_words_are_garbage_is_dead(client_and_engines):
    """It has never been understood, and so cannot be known by what it said."""
    client, engines = client_and_engines(2, process=True)
    doomed = in_thread(client.generate, [1], data_parallel_rank=1)
    engines[1].recv_add()
    other = in_thread(client.generate, [1], data_parallel_rank=0)
    rid = engines[0].recv_add().rid
    for _ in range(5):
        engines[1].send_raw(["c1"])
    with pytest.raises(tszmq.DecodeError) as caught:
        doomed.result(PATIENCE)
    assert caught.value.engine_index == 1
    stays_true(lambda: client.engines[0].alive and not other.done(), 0.7)
    engines[0].tokens(rid, [5], "stop")
    assert other.result(PATIENCE).token_ids == [5]


def test_garbage_of_another_process_hurts_no_engine(client_and_engines, run_script):
    """Not even one that has not said anything yet."""
    client, engines = client_and_engines(2)
    call = in_thread(client.generate, [1], data_parallel_rank=0)
    rid = engines[0].recv_add().rid
    result = run_script(
        """
import sys, zmq
context = zmq.Context()
junk = context.socket(zmq.PUSH)
junk.linger = 5000
junk.connect(sys.argv[1])
for _ in range(50):
    junk.send(bytes([0xC1]))
junk.close()
context.term()
""",
        client.endpoints.output,
    )
    assert result.exit_code == 0, result
    stays_true(lambda: all(info.alive for info in client.engines), 0.8)
    engines[0].tokens(rid, [5], "stop")
    assert call.result(PATIENCE).token_ids == [5]
    for engine in engines:
        answer_one(client, engine)


def test_garbage_of_a_stranger_hurts_nobody(client_and_engines, endpoints, pusher):
    """It is not the engines' fault, however much of it there is."""
    client, engines = client_and_engines(2, endpoints=endpoints)
    streams = [blocked_reader(client, engine) for engine in engines]
    junk = pusher(client)
    for _ in range(30):
        for frames in GARBAGE.values():
            if len(frames[0]) < 100_000:
                junk.send_multipart(frames)
    stays_true(lambda: client.engines[0].alive and client.engines[1].alive, 0.5)
    for engine, (stream, rid, blocked) in zip(engines, streams, strict=True):
        engine.tokens(rid, [6])
        assert blocked.result(PATIENCE).token_ids == [6]
        engine.tokens(rid, [7], "stop")
        assert stream.result(PATIENCE).token_ids == [5, 6, 7]
    junk.close(linger=0)
    stays_true(lambda: client.engines[0].alive and client.engines[1].alive, 0.2)
    for engine in engines:
        answer_one(client, engine)


def test_strangers_that_come_and_go_are_no_deaths(client_and_engines, pusher):
    """Their connections are nobody's."""
    client, engines = client_and_engines(2)
    for _ in range(20):
        stranger = pusher(client)
        stranger.send(b"\xc1")
        stranger.close(linger=200)
    stays_true(lambda: all(info.alive for info in client.engines), 0.3)
    for engine in engines:
        answer_one(client, engine)
