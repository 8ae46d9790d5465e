"""Which engine a request goes to; loads, figures, bounds and aborts by label."""

from __future__ import annotations

import random
import threading
import time

import pytest

import tszmq
from tests.client_fixtures import answer_one, inflight, waiting_for_a_place
from tests.mock_engine import PATIENCE, UNIT, Load, eventually, in_thread, predicted, stays_true
from tszmq import SamplingParams

pytestmark = pytest.mark.timeout(40)

ONE = SamplingParams(max_tokens=1)


def open_stream(client, engines, **options):
    """A stream, the engine that it went to and its wire id."""
    stream = client.stream([1], **options)
    [engine] = [engine for engine in engines if engine.index == stream.engine_index]
    return stream, engine, engine.recv_add().rid


def report(client, engine, load):
    """Have an engine with something in flight say that load; returns when it is known."""
    rid = next(iter(engine.unfinished))
    engine.tokens(rid, [1], load=load)
    eventually(
        lambda: (
            (known := client.load(engine.index)) is not None
            and known.num_running == load.num_running
            and known.num_waiting == load.num_waiting
            and known.kv_cache_usage == load.kv_active_pages / load.kv_total_pages
        )
    )


# --- choosing ------------------------------------------------------------------------------


def test_ties_rotate(client_and_engines):
    """Idle engines take turns: 400 requests one after the other, 100 each."""
    client, engines = client_and_engines(4, auto=True)
    for number in range(400):
        client.generate([number + 1], ONE)
    assert all(98 <= len(engine.served) <= 102 for engine in engines)


def test_ties_rotate_across_clients_from_the_start(client_and_engines):
    """The first request of a client is no special case: two requests, two engines."""
    client, engines = client_and_engines(2, auto=True)
    for number in range(2):
        client.generate([number + 1], ONE)
    assert [len(engine.served) for engine in engines] == [1, 1]


def test_concurrent_requests_spread(client_and_engines):
    """Choosing reserves the place: 64 threads at once, 16 each."""
    client, engines = client_and_engines(4)
    start = threading.Barrier(64)

    def one():
        start.wait()
        return client.generate([1], timeout=20)

    calls = [in_thread(one) for _ in range(64)]
    eventually(lambda: sum(inflight(client)) == 64)
    assert inflight(client) == [16, 16, 16, 16]
    for engine in engines:
        for add in engine.recv_adds(16):
            engine.tokens(add.rid, [1], "stop")
    for call in calls:
        call.result(PATIENCE)
    assert inflight(client) == [0, 0, 0, 0]


def test_idle_engine_that_said_busy_gets_work_again(client_and_engines):
    """Its last batch was sampled before its own finish; idle is idle."""
    client, engines = client_and_engines(2)
    for engine in engines:
        call = in_thread(client.generate, [1], data_parallel_rank=engine.index)
        rid = engine.recv_add().rid
        busy = Load(5, 2, 900) if engine.index == 0 else None
        engine.tokens(rid, [1], "stop", load=busy)
        call.result(PATIENCE)
    for _ in range(3):
        streams = [client.stream([1]) for _ in range(2)]
        assert sorted(stream.engine_index for stream in streams) == [0, 1]
        for stream in streams:
            stream.close()


@pytest.mark.parametrize("era", [9, 10])
def test_engine_without_figures_gets_its_fair_share(client_and_engines, era):
    """Unknown is not zero, and not infinity either."""
    bound = client_and_engines.bind(engine_count=2)
    call = in_thread(bound.connect)
    address = bound.endpoints.handshake
    engines = [
        client_and_engines.engine(address, 0, auto=True),
        client_and_engines.engine(address, 1, auto=True, era=era),
    ]
    client = call.result(PATIENCE)
    for number in range(100):
        client.generate([number + 1], ONE)
    assert all(48 <= len(engine.served) <= 52 for engine in engines)
    for engine in engines:
        engine.stall()
    streams = [client.stream([1], SamplingParams(max_tokens=500)) for _ in range(20)]
    assert inflight(client) == [10, 10]
    assert client.load(1) is None
    for stream in streams:
        stream.close()
    client.close()


def test_requests_of_others_count(client_and_engines):
    """An engine that reports more than ours is busier than it looks from here."""
    client, engines = client_and_engines(2)
    first, engine, _ = open_stream(client, engines, data_parallel_rank=0)
    second, other, _ = open_stream(client, engines, data_parallel_rank=1)
    report(client, engine, Load(4))
    report(client, other, Load(1))
    streams = [open_stream(client, engines) for _ in range(3)]
    assert [stream.engine_index for stream, _, _ in streams] == [1, 1, 1]
    for stream in (first, second, *(stream for stream, _, _ in streams)):
        stream.close()


def test_waiting_requests_are_not_counted_twice(client_and_engines):
    """This engine's num_running includes those that wait."""
    client, engines = client_and_engines(2)
    streams = [open_stream(client, engines, data_parallel_rank=0)]
    streams += [open_stream(client, engines, data_parallel_rank=1) for _ in range(3)]
    report(client, engines[0], Load(2, 2, 500))  # half full: no pressure yet
    streams.append(open_stream(client, engines))
    assert streams[-1][0].engine_index == 0
    for stream, _, _ in streams:
        stream.close()


def test_pressure_on_the_cache_counts(client_and_engines):
    """Each waiting request weighs six times the share of the cache in use beyond a half."""
    client, engines = client_and_engines(2)
    streams = [open_stream(client, engines, data_parallel_rank=rank) for rank in (0, 1)]
    report(client, engines[0], Load(1, 1, 900))  # 1 + 1 * 6 * 0.4 = 3.4
    report(client, engines[1], Load(1, 0, 900))  # 1: nobody waits
    streams += [open_stream(client, engines) for _ in range(5)]
    assert [stream.engine_index for stream, _, _ in streams[2:]] == [1, 1, 1, 0, 1]
    for stream, _, _ in streams:
        stream.close()


def test_a_report_never_lowers_our_own_count(client_and_engines):
    """Requests on their way are not in the engine's figures yet."""
    client, engines = client_and_engines(2)
    streams = [open_stream(client, engines, data_parallel_rank=0) for _ in range(3)]
    streams.append(open_stream(client, engines, data_parallel_rank=1))
    report(client, engines[0], Load(0, 0, 10))
    assert inflight(client) == [3, 1]
    streams += [open_stream(client, engines) for _ in range(2)]
    assert [stream.engine_index for stream, _, _ in streams[4:]] == [1, 1]
    for stream, _, _ in streams:
        stream.close()


# --- pins ----------------------------------------------------------------------------------


def test_pin(client_and_engines):
    """Goes there, however busy it is."""
    client, engines = client_and_engines(indexes=[2, 3])
    streams = [open_stream(client, engines, data_parallel_rank=3) for _ in range(5)]
    assert {stream.engine_index for stream, _, _ in streams} == {3}
    assert (client.inflight(2), client.inflight(3)) == (0, 5)
    for stream, _, _ in streams:
        stream.close()


@pytest.mark.parametrize("rank", [0, 1, 4, 65536, 10**30])
def test_pin_on_nobody(client_and_engines, rank):
    """InvalidRank lists who there is; nothing is reserved."""
    client, engines = client_and_engines(indexes=[2, 3])
    for call in (client.generate, client.stream):
        with pytest.raises(tszmq.InvalidRank, match=r"\b2\b.*\b3\b") as caught:
            call([1], data_parallel_rank=rank)
        assert isinstance(caught.value, ValueError)
    assert (client.inflight(2), client.inflight(3)) == (0, 0)
    for engine in engines:
        answer_one(client, engine)


@pytest.mark.parametrize("rank", [-1, True, False, 1.5, 0.0, "0", b"0", [0]])
def test_pin_that_is_no_number(client_and_engines, rank):
    """InvalidRequest or TypeError, before anything is reserved."""
    client, engines = client_and_engines(2)
    for call in (client.generate, client.stream):
        with pytest.raises((tszmq.InvalidRequest, TypeError)):
            call([1], data_parallel_rank=rank)
    assert inflight(client) == [0, 0]
    for engine in engines:
        answer_one(client, engine)


def test_pin_on_the_only_engine(client_and_engines):
    """Zero is the single engine's index."""
    client, [engine] = client_and_engines()
    assert answer_one(client, engine).engine_index == 0


def test_pin_on_a_dead_engine(client_and_engines):
    """Known, but dead: not InvalidRank. Unpinned requests go to the others."""
    client, engines = client_and_engines(2)
    engines[0].close()
    eventually(lambda: not client.engines[0].alive)
    with pytest.raises(tszmq.EngineDead) as caught:
        client.generate([1], data_parallel_rank=0)
    assert caught.value.engine_index == 0
    for _ in range(4):
        stream, _, _ = open_stream(client, engines)
        assert stream.engine_index == 1
        stream.close()
        engines[1].recv_abort()
    assert inflight(client) == [0, 0]


def test_all_engines_dead(client_and_engines):
    """No engine can be named."""
    client, engines = client_and_engines(2)
    for engine in engines:
        engine.close()
    eventually(lambda: not client.is_alive)
    for call in (client.generate, client.stream):
        with pytest.raises(tszmq.EngineDead) as caught:
            call([1])
        assert caught.value.engine_index is None


# --- figures -------------------------------------------------------------------------------


def test_load_is_what_the_engine_said(client_and_engines):
    """None at first, then its last report; a tail of zeros is no report."""
    client, engines = client_and_engines(2)
    assert client.load(0) is None
    stream, engine, rid = open_stream(client, engines, data_parallel_rank=0)
    engine.tokens(rid, [1])
    assert next(stream).token_ids == [1]
    assert client.load(0) is None
    report(client, engine, Load(7, 3, 250))
    load = client.load(0)
    assert (load.num_running, load.num_waiting, load.kv_cache_usage) == (7, 3, 0.25)
    with pytest.raises(AttributeError):
        load.num_running = 0
    assert client.load(1) is None
    engine.tokens(rid, [9])
    answer_one(client, engine)
    assert client.load(0) == load, "a batch without a report changes nothing"
    stream.close()


def test_load_of_an_idle_engine(client_and_engines):
    """No requests, but its cache is as full as it said with its last batch."""
    client, engines = client_and_engines(2)
    stream, engine, rid = open_stream(client, engines, data_parallel_rank=0)
    report(client, engine, Load(7, 3, 250))
    engine.tokens(rid, [2], "stop", load=Load(8, 4, 500))
    stream.result(PATIENCE)
    load = client.load(0)
    assert (load.num_running, load.num_waiting, load.kv_cache_usage) == (0, 0, 0.5)


def test_load_of_an_engine_whose_requests_were_aborted(client_and_engines):
    """Idle by abort is idle too."""
    client, engines = client_and_engines(1)
    stream, engine, _ = open_stream(client, engines)
    report(client, engine, Load(7, 3, 250))
    stream.close()
    load = client.load(0)
    assert (load.num_running, load.num_waiting, load.kv_cache_usage) == (0, 0, 0.25)


def test_idle_engines_never_show_counts(client_and_engines):
    """At every moment that another thread can look."""
    client, _ = client_and_engines(2, auto=True)
    stop = threading.Event()
    wrong = []

    def look():
        while not stop.is_set():
            for index in (0, 1):
                # In flight is read on both sides: only a figure between two zeros of an engine
                # that took nothing meanwhile is wrong, and its counts are then read again.
                before = client.inflight(index)
                load = client.load(index)
                if before == client.inflight(index) == 0 and load and load.num_running:
                    again = client.load(index)
                    if again is load and client.inflight(index) == 0:
                        wrong.append(load)

    looking = [in_thread(look) for _ in range(2)]
    callers = [
        in_thread(client.generate_many, [[n, k + 1] for k in range(60)], max_inflight=2)
        for n in range(1, 5)
    ]
    for call in callers:
        call.result(20)
    stop.set()
    for call in looking:
        call.result(PATIENCE)
    assert wrong == []
    assert [client.load(n).num_running for n in (0, 1)] == [0, 0]


def test_inflight_counts_unfinished_requests(client_and_engines):
    """Ours, on that engine, until the end of each."""
    client, engines = client_and_engines(2)
    streams = [open_stream(client, engines, data_parallel_rank=1) for _ in range(3)]
    assert inflight(client) == [0, 3]
    streams[0][1].tokens(streams[0][2], [1], "stop")
    streams[0][0].result(PATIENCE)
    assert inflight(client) == [0, 2]
    streams[1][0].close()
    assert inflight(client) == [0, 1]
    streams[2][1].tokens(streams[2][2], [], "abort")
    with pytest.raises(tszmq.RequestRejected):
        streams[2][0].result(PATIENCE)
    assert inflight(client) == [0, 0]


def test_place_is_free_when_generate_returns(client_and_engines):
    """Immediately, not after a while."""
    client, _ = client_and_engines(auto=True)
    for number in range(300):
        client.generate([number + 1], ONE)
        assert client.inflight(0) == 0


@pytest.mark.parametrize("index", [1, -1, 70000, True, "0", None])
def test_figures_of_nobody(client_and_engines, index):
    """An error that says who there is, not a zero."""
    client, _ = client_and_engines()
    for figure in (client.load, client.inflight):
        with pytest.raises((tszmq.InvalidRequest, TypeError)):
            figure(index)


def test_health(client_and_engines):
    """A frozen record for each engine."""
    client, engines = client_and_engines(indexes=[0, 4])
    health = client.health()
    assert sorted(health) == [0, 4]
    for index, record in health.items():
        assert record.engine_index == index
        assert record.connected is True
        assert record.inflight == 0
        assert 0 <= record.last_output < 5
        assert record.first_error is None
        with pytest.raises(AttributeError):
            record.connected = False
    stream, engine, rid = open_stream(client, engines, data_parallel_rank=4)
    assert client.health()[4].inflight == 1
    eventually(lambda: client.health()[4].last_output > 0.2)
    engine.tokens(rid, [1])
    next(stream)
    health = client.health()
    assert health[4].last_output < health[0].last_output - 0.1
    engine.close()
    with pytest.raises(tszmq.EngineDead):
        next(stream)
    record = client.health()[4]
    assert (record.connected, record.inflight) == (False, 0)
    assert isinstance(record.first_error, str)
    assert record.first_error
    assert client.health()[0].connected
    assert health[4].connected, "a record is of its moment"


def test_is_alive(client_and_engines):
    """Open, and at least one engine."""
    client, engines = client_and_engines(2)
    assert client.is_alive
    engines[1].close()
    eventually(lambda: [info.alive for info in client.engines] == [True, False])
    assert client.is_alive
    engines[0].close()
    eventually(lambda: not client.is_alive)


# --- aborts --------------------------------------------------------------------------------


def test_abort_by_label(client_and_engines):
    """Every unfinished request with that label, wherever it is, and no other."""
    client, engines = client_and_engines(2)
    kept = [
        open_stream(client, engines, request_id=label)
        for label in ("batch_10", "batch_", "", None, "BATCH_1")
    ]
    doomed = [open_stream(client, engines, request_id="batch_1") for _ in range(4)]
    blocked = in_thread(client.generate, [5], request_id="batch_1", data_parallel_rank=0)
    doomed_rids: dict[int, list[str]] = {engine.index: [] for engine in engines}
    for _, engine, rid in doomed:
        doomed_rids[engine.index].append(rid)
    rid = engines[0].recv_add().rid
    doomed_rids[0].append(rid)
    engines[0].tokens(rid, [7])
    answer_one(client, engines[0])
    client.abort("batch_1")
    done = blocked.result(PATIENCE)
    assert (done.token_ids, done.finish_reason) == ([7], "abort")
    for stream, _, _ in doomed:
        assert stream.result(PATIENCE).finish_reason == "abort"
        assert stream.result(PATIENCE).token_ids == []
    for engine in engines:
        engine.recv_aborts_of(doomed_rids[engine.index])
        engine.expect_nothing(0.05)
    assert sum(inflight(client)) == 5
    for stream, engine, rid in kept:
        engine.tokens(rid, [1], "stop")
        assert stream.result(PATIENCE).finish_reason == "stop"


@pytest.mark.parametrize("label", ["nobody", "", "lab", "label "])
def test_abort_of_a_label_that_nobody_has(client_and_engines, label):
    """Nothing is sent, no prefix is matched."""
    client, engines = client_and_engines()
    stream, engine, rid = open_stream(client, engines, request_id="label")
    client.abort(label)
    answer_one(client, engine)
    engine.tokens(rid, [1], "stop")
    assert stream.result(PATIENCE).finish_reason == "stop"
    client.abort("label")
    engine.expect_nothing(0.1)


def test_abort_of_a_wire_id_does_nothing(client_and_engines):
    """Labels are the caller's, wire ids are not."""
    client, engines = client_and_engines()
    stream, engine, rid = open_stream(client, engines, request_id="label")
    client.abort(rid)
    answer_one(client, engine)
    stream.close()
    assert engine.recv_abort() == [rid]


@pytest.mark.parametrize("label", [None, 5, [], b"label"])
def test_abort_needs_text(client_and_engines, label):
    """None is not "all of them"."""
    client, engines = client_and_engines()
    stream, engine, rid = open_stream(client, engines)
    with pytest.raises((tszmq.InvalidRequest, TypeError)):
        client.abort(label)
    answer_one(client, engine)
    engine.tokens(rid, [1], "stop")
    assert stream.result(PATIENCE).finish_reason == "stop"


def test_abort_all(client_and_engines):
    """Every unfinished request of this client; the client stays usable."""
    client, engines = client_and_engines(2)
    streams = [open_stream(client, engines, request_id=f"r{n}") for n in range(6)]
    client.abort_all()
    for stream, _, _ in streams:
        assert stream.result(PATIENCE).finish_reason == "abort"
    assert inflight(client) == [0, 0]
    for engine in engines:
        engine.recv_aborts_of(rid for _, its, rid in streams if its is engine)
    client.abort_all()
    for engine in engines:
        answer_one(client, engine)


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("kind", ["generate", "stream"])
def test_who_waits_for_a_place_can_be_aborted(client_and_engines, kind, everything):
    """And the place goes to the next, when there is one."""
    client, [engine] = client_and_engines(max_inflight=1)

    def run():
        call = getattr(client, kind)([2], request_id="b")
        return call if kind == "generate" else call.result()

    with client.stream([1], request_id="a") as stream:
        rid = engine.recv_add().rid
        waiting = in_thread(run)
        eventually(lambda: waiting_for_a_place(client) == 1)
        other = in_thread(client.generate, [3], request_id="c")
        eventually(lambda: waiting_for_a_place(client) == 2)
        if everything:
            client.abort_all()
        else:
            client.abort("b")
        done = waiting.result(PATIENCE)
        assert (done.finish_reason, done.token_ids, done.request_id) == ("abort", [], "b")
        if everything:
            assert other.result(PATIENCE).finish_reason == "abort"
            assert stream.result(PATIENCE).finish_reason == "abort"
            assert engine.recv_abort() == [rid]
        else:
            assert waiting_for_a_place(client) == 1
            engine.tokens(rid, [1], "stop")
            engine.tokens(engine.recv_add().rid, [4], "stop")
            assert other.result(PATIENCE).token_ids == [4]
    assert waiting_for_a_place(client) == 0
    assert inflight(client) == [0]
    answer_one(client, engine)


@pytest.mark.parametrize("bulk", [False, True])
def test_who_waited_for_a_place_is_checked_against_the_engines_there_are(client_and_engines, bulk):
    """One may have come back with a shorter context meanwhile: what is too long kills it."""
    client, engines = client_and_engines(2, max_inflight=1, engine={"max_model_len": 4096})
    stream, keeper, rid = open_stream(client, engines, data_parallel_rank=0)
    prompts = [[9] * 3000, [9] * 300]
    if bulk:
        waiting = in_thread(client.generate_many, prompts, errors="return")
    else:
        waiting = in_thread(client.generate, prompts[0])
    eventually(lambda: waiting_for_a_place(client) == 1)
    engines[1].close()
    eventually(lambda: not client.engines[1].alive)
    address = client.endpoints.handshake
    shorter = client_and_engines.engine(address, 1, max_model_len=1024).connect()
    eventually(lambda: client.engines[1].alive)
    keeper.tokens(rid, [1], "stop")
    assert stream.result(PATIENCE).finish_reason == "stop"
    if bulk:
        eventually(lambda: sum(inflight(client)) == 1)
        engine = (keeper, shorter)[inflight(client).index(1)]
        add = engine.recv_add()
        assert len(add.prompt) == 300
        engine.tokens(add.rid, [5], "stop")
        error, done = waiting.result(PATIENCE)
        assert done.token_ids == [5]
    else:
        error = waiting.exception(PATIENCE)
    assert type(error) is tszmq.InvalidRequest
    assert "3000 tokens, engine 1 takes" in str(error)
    assert waiting_for_a_place(client) == 0
    assert inflight(client) == [0, 0]


# --- bounds --------------------------------------------------------------------------------


def test_full_client_refuses_at_once_when_asked(client_and_engines):
    """timeout=0 asks without waiting."""
    client, engines = client_and_engines(max_inflight=2)
    streams = [open_stream(client, engines) for _ in range(2)]
    for call in (client.generate, client.stream):
        started = time.monotonic()
        with pytest.raises(tszmq.QueueFull):
            call([1], timeout=0)
        assert time.monotonic() - started < PATIENCE
    assert client.inflight(0) == 2
    engines[0].expect_nothing(0.05)
    for stream, _, _ in streams:
        stream.close()


def test_full_client_waits_until_the_timeout(client_and_engines):
    """Then QueueFull: a timeout, too, but nothing was sent."""
    client, engines = client_and_engines(max_inflight=1)
    stream, engine, _ = open_stream(client, engines)
    started = time.monotonic()
    with pytest.raises(TimeoutError, match="max_inflight, 1 requests, is reached") as caught:
        client.generate([1], timeout=0.3)
    assert type(caught.value) is tszmq.QueueFull
    assert 0.28 <= time.monotonic() - started < PATIENCE
    assert client.inflight(0) == 1
    engine.expect_nothing(0.05)
    stream.close()
    assert engine.recv_abort()
    answer_one(client, engine)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("how", ["finish", "close", "refusal", "deadline", "drop", "abort"])
def test_full_client_goes_on_when_a_place_is_free(client_and_engines, how):
    """However the place became free."""
    client, engines = client_and_engines(max_inflight=1)
    options = {"timeout": 1.5 * UNIT} if how == "deadline" else {}
    stream, engine, rid = open_stream(client, engines, request_id="first", **options)
    waiting = in_thread(client.generate, [2], request_id="waiting")
    if how != "deadline":  # which may come before that thread has its turn
        eventually(lambda: waiting_for_a_place(client) == 1)
    stays_true(lambda: not waiting.done(), 0.15)
    if how == "finish":
        engine.tokens(rid, [1], "stop")
    elif how == "refusal":
        engine.tokens(rid, [], "abort")
    elif how == "close":
        stream.close()
    elif how == "abort":
        client.abort("first")
    elif how == "drop":
        del stream
    add = engine.recv_add(skip_aborts=True)
    assert add.prompt == [2]
    engine.tokens(add.rid, [5], "stop")
    done = waiting.result(PATIENCE)
    assert done.token_ids == [5]
    assert done.queued >= (0.0 if how == "deadline" else 0.1)
    assert inflight(client) == [0]


def test_time_in_the_queue_counts_towards_the_timeout(client_and_engines):
    """``timeout`` is total."""
    client, engines = client_and_engines(max_inflight=1)
    stream, engine, rid = open_stream(client, engines)
    started = time.monotonic()
    waiting = in_thread(client.generate, [2], timeout=1.5 * UNIT)
    stays_true(lambda: not waiting.done(), 0.3)
    engine.tokens(rid, [1], "stop")
    stream.result(PATIENCE)
    second = engine.recv_add()
    with pytest.raises(tszmq.DeadlineExceeded):
        waiting.result(PATIENCE)
    assert 1.45 * UNIT <= time.monotonic() - started < PATIENCE
    assert engine.recv_abort() == [second.rid]


def test_engine_never_sees_more_than_the_bound(client_and_engines):
    """64 threads at a bound of 5, over two engines together."""
    client, engines = client_and_engines(2, auto=True, max_inflight=5)
    most = []

    def caller(number):
        for turn in range(10):
            done = client.generate([number, turn], SamplingParams(max_tokens=3), timeout=30)
            assert done.token_ids == predicted([number, turn], 3)
            most.append(sum(inflight(client)))
        return True

    calls = [in_thread(caller, number + 1) for number in range(64)]
    assert all(call.result(30) for call in calls)
    assert max(most) <= 5
    assert sum(engine.most_at_once for engine in engines) <= 10
    assert inflight(client) == [0, 0]


def test_death_frees_the_places(client_and_engines):
    """Those who wait go on with the engines that are left."""
    client, engines = client_and_engines(2, max_inflight=2)
    dying, _, _ = open_stream(client, engines, data_parallel_rank=0)
    kept, other, rid = open_stream(client, engines, data_parallel_rank=1)
    waiting = in_thread(client.generate, [2])
    stays_true(lambda: not waiting.done(), 0.1)
    engines[0].close()
    with pytest.raises(tszmq.EngineDead):
        dying.result(PATIENCE)
    second = other.recv_add()
    other.tokens(second.rid, [5], "stop")
    assert waiting.result(PATIENCE).token_ids == [5]
    other.tokens(rid, [6], "stop")
    assert kept.result(PATIENCE).token_ids == [6]


def test_those_who_wait_for_a_place_hear_of_the_last_death(client_and_engines):
    """Nobody will ever serve them."""
    client, [engine] = client_and_engines(max_inflight=1)
    stream, _, _ = open_stream(client, [engine])
    waiting = in_thread(client.generate, [2])
    stays_true(lambda: not waiting.done(), 0.1)
    engine.close()
    for call in (stream.result, waiting.result):
        with pytest.raises(tszmq.EngineDead):
            call(PATIENCE)


# --- everything at once --------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_every_reservation_is_released_once(client_and_engines):
    """A random mix of every way to end, then the figures are back where they were."""
    client, engines = client_and_engines(
        3, auto=True, engine={"step_delay": 0.0005, "refuse": lambda add: add.prompt[0] % 7 == 0}
    )

    def finish(prompt):
        client.generate(prompt, SamplingParams(max_tokens=5))

    def read_some(prompt):
        with client.stream(prompt, SamplingParams(max_tokens=50)) as stream:
            next(stream, None)

    def drop(prompt):
        client.stream(prompt, SamplingParams(max_tokens=50))

    def expire(prompt):
        client.generate(prompt, SamplingParams(max_tokens=5000), timeout=0.005)

    def wrong(prompt):
        client.generate([*prompt, -1])

    def label(prompt):
        stream = client.stream(prompt, SamplingParams(max_tokens=50), request_id="label")
        client.abort("label")
        stream.result(PATIENCE)

    ways = [finish, read_some, drop, expire, wrong, label]

    def worker(seed):
        chance = random.Random(seed)
        for _ in range(100):
            prompt = [chance.randrange(1, 1000), seed + 1]
            try:
                chance.choice(ways)(prompt)
            except (tszmq.RequestRejected, tszmq.DeadlineExceeded, tszmq.InvalidRequest):
                pass
        return True

    calls = [in_thread(worker, seed) for seed in range(16)]
    assert all(call.result(35) for call in calls)
    eventually(lambda: inflight(client) == [0, 0, 0])
    eventually(lambda: all(engine.running == 0 for engine in engines))
    before = [len(engine.served) for engine in engines]
    for number in range(1, 61):
        client.generate([number * 7 + 1], ONE)
    shares = [len(engine.served) - count for engine, count in zip(engines, before, strict=True)]
    assert all(19 <= share <= 21 for share in shares)
