"""``Client.stream``: chunks, every way out of a stream, readers in several threads."""

from __future__ import annotations

import concurrent.futures
import gc
import math
import pickle
import random
import struct
import threading
import time
import weakref
from typing import Any

import pytest

import tszmq
from tests.client_fixtures import answer_one, inflight, partial_of
from tests.mock_engine import PATIENCE, UNIT, eventually, in_thread, predicted, stays_true
from tszmq import SamplingParams
from tszmq.core.request import Request

pytestmark = [
    pytest.mark.timeout(30),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # streams are dropped on purpose
]


class Holder:
    """Something to make reference cycles with."""

    stream: Any
    tokens: Any
    itself: Any


STILL_WAITING = (TimeoutError, concurrent.futures.TimeoutError)  # one class since Python 3.11


def bits(values):
    return [struct.pack("<d", value) for value in values]


def expect_one_abort(engine, rid, client):
    """Exactly one abort of that id comes, and the place is free."""
    assert engine.recv_abort() == [rid]
    engine.expect_nothing(0.15)
    eventually(lambda: inflight(client) == [0] * len(client.engines))


# --- reading -------------------------------------------------------------------------------


def test_stream_yields_chunks_as_they_come(client_and_engines):
    """New tokens, counts so far, the label; the reason only on the last."""
    client, [engine] = client_and_engines()
    with client.stream([1, 2, 3], request_id="label") as stream:
        rid = engine.recv_add().rid
        engine.tokens(rid, [5])
        first = next(stream)
        engine.tokens(rid, [6, 7])
        second = next(stream)
        engine.tokens(rid, [8], "stop")
        third = next(stream)
        assert [chunk.token_ids for chunk in (first, second, third)] == [[5], [6, 7], [8]]
        assert [chunk.completion_tokens for chunk in (first, second, third)] == [1, 3, 4]
        assert [chunk.finish_reason for chunk in (first, second, third)] == [None, None, "stop"]
        assert {chunk.request_id for chunk in (first, second, third)} == {"label"}
        assert {chunk.prompt_tokens for chunk in (first, second, third)} == {3}
        assert first.logprobs is None
        for _ in range(2):
            with pytest.raises(StopIteration):
                next(stream)


def test_stream_is_submitted_by_the_call(client_and_engines):
    """Nobody has to read for the engine to begin; the wire says that somebody will."""
    client, [engine] = client_and_engines()
    stream = client.stream([1])
    add = engine.recv_add()
    assert add.stream
    assert client.inflight(0) == 1
    engine.tokens(add.rid, [1], "stop")
    assert [chunk.token_ids for chunk in stream] == [[1]]


def test_stream_tells_what_it_is(client_and_engines):
    """Label, engine and whether it has ended."""
    client, engines = client_and_engines(indexes=[3, 5])
    with client.stream([1], request_id="label", data_parallel_rank=5) as stream:
        assert stream.request_id == "label"
        assert stream.engine_index == 5
        assert stream.finished is False
        engines[1].tokens(engines[1].recv_add().rid, [1], "stop")
        stream.result(PATIENCE)
        assert stream.finished is True
    with client.stream([1], data_parallel_rank=3) as stream:
        assert stream.request_id is None
        engines[0].recv_add()
        stream.close()
        assert stream.finished is True


def test_lagging_reader_gets_one_chunk(client_and_engines):
    """Everything that came meanwhile, in order, in one piece."""
    client, [engine] = client_and_engines()
    with client.stream([1]) as stream:
        rid = engine.recv_add().rid
        for token in range(50):
            engine.tokens(rid, [token])
        answer_one(client, engine)  # the client has read all of it now
        chunk = next(stream)
        assert chunk.token_ids == list(range(50))
        assert chunk.completion_tokens == 50
        assert chunk.finish_reason is None
        engine.tokens(rid, [50, 51])
        engine.tokens(rid, [52], "length")
        answer_one(client, engine)
        [last] = stream
        assert (last.token_ids, last.finish_reason) == ([50, 51, 52], "length")


def test_merged_chunks_keep_logprobs_beside_tokens(client_and_engines):
    """Fifty batches before the first read, then an empty finish: nothing moves, NaN stays."""
    client, [engine] = client_and_engines()
    values = [-0.01 * n for n in range(50)]
    values[7], values[20], values[49] = math.nan, -math.inf, math.nan
    with client.stream([1], SamplingParams(logprobs=True)) as stream:
        rid = engine.recv_add().rid
        for token in range(50):
            engine.tokens(rid, [token], logprobs=[values[token]])
        answer_one(client, engine)
        engine.tokens(rid, [], "stop")
        chunks = list(stream)
        assert all(len(chunk.logprobs or ()) == len(chunk.token_ids) for chunk in chunks)
        assert [token for chunk in chunks for token in chunk.token_ids] == list(range(50))
        assert bits(value for chunk in chunks for value in chunk.logprobs or ()) == bits(values)
        assert chunks[-1].finish_reason == "stop"
        done = stream.result(PATIENCE)
        assert done.token_ids == list(range(50))
        assert bits(done.logprobs) == bits(values)


def test_empty_last_chunk(client_and_engines):
    """A finish without a token, when everything before it was read."""
    client, [engine] = client_and_engines()
    with client.stream([1]) as stream:
        rid = engine.recv_add().rid
        engine.tokens(rid, [5])
        assert next(stream).token_ids == [5]
        engine.tokens(rid, [], "stop")
        last = next(stream)
        assert (last.token_ids, last.finish_reason, last.completion_tokens) == ([], "stop", 1)


def test_chunks_are_frozen_and_pickle(client_and_engines):
    """A TokenChunk crosses process boundaries unchanged."""
    client, _ = client_and_engines(auto=True)
    with client.stream([1], SamplingParams(logprobs=True, max_tokens=3)) as stream:
        chunk = next(stream)
        assert pickle.loads(pickle.dumps(chunk)) == chunk
        with pytest.raises(AttributeError):
            chunk.token_ids = []


def test_result_joins_what_was_read_with_the_rest(client_and_engines):
    """The same Completion whether chunks were taken or not."""
    client, [engine] = client_and_engines()
    with client.stream([1, 2], request_id="label") as stream:
        rid = engine.recv_add().rid
        engine.tokens(rid, [5, 6], cached_tokens=1)
        assert next(stream).token_ids == [5, 6]
        engine.tokens(rid, [7], cached_tokens=1)
        engine.tokens(rid, [8], "stop", cached_tokens=1)
        done = stream.result(PATIENCE)
        assert done.token_ids == [5, 6, 7, 8]
        assert (done.finish_reason, done.request_id, done.engine_index) == ("stop", "label", 0)
        assert (done.prompt_tokens, done.completion_tokens, done.cached_tokens) == (2, 4, 1)
        assert stream.result(PATIENCE) == done
        # Whether asking for the result takes the chunks that nobody read is left open.
        assert [chunk.token_ids for chunk in stream] in ([], [[7, 8]])
        assert list(stream) == []


def test_result_timeout_only_stops_waiting(client_and_engines):
    """The request goes on, and a later call gets the whole of it."""
    client, [engine] = client_and_engines()
    with client.stream([1]) as stream:
        rid = engine.recv_add().rid
        engine.tokens(rid, [5])
        started = time.monotonic()
        with pytest.raises(STILL_WAITING):
            stream.result(0.2)
        assert 0.18 <= time.monotonic() - started < PATIENCE
        with pytest.raises(STILL_WAITING):
            stream.result(0)
        assert not stream.finished
        assert client.inflight(0) == 1
        engine.tokens(rid, [6])
        answer_one(client, engine)  # no abort came before it
        engine.tokens(rid, [7], "stop")
        assert stream.result(PATIENCE).token_ids == [5, 6, 7]


def test_result_timeouts_that_are_none(client_and_engines):
    """Refused as what they are; the stream is as before, and its engine hears nothing."""
    client, [engine] = client_and_engines()
    with client.stream([1]) as stream:
        rid = engine.recv_add().rid
        for error, timeout in (
            (TypeError, "1"),
            (TypeError, True),
            (TypeError, [1]),
            (tszmq.InvalidRequest, -1),
            (tszmq.InvalidRequest, math.nan),
            (tszmq.InvalidRequest, -(10**400)),
        ):
            with pytest.raises(error) as caught:
                stream.result(timeout)
            assert caught.type is error
        engine.expect_nothing()
        assert client.inflight(0) == 1
        engine.tokens(rid, [5], "stop")
        assert stream.result(PATIENCE).token_ids == [5]


def test_results_of_refused_and_truncated_streams_raise(client_and_engines):
    """Reading and asking for the result tell the same."""
    client, [engine] = client_and_engines()
    with client.stream([1]) as stream:
        engine.tokens(engine.recv_add().rid, [], "abort")
        with pytest.raises(tszmq.RequestRejected):
            next(stream)
        with pytest.raises(tszmq.RequestRejected):
            stream.result(PATIENCE)
    with client.stream([1]) as stream:
        rid = engine.recv_add().rid
        engine.tokens(rid, [5])
        assert next(stream).token_ids == [5]
        engine.tokens(rid, [9], "stop", completion_tokens=4)
        with pytest.raises(tszmq.TokensLost) as caught:
            stream.result(PATIENCE)
        assert list(partial_of(caught.value).token_ids)[:1] == [5]
    assert inflight(client) == [0]


def test_place_is_free_when_the_end_is_seen(client_and_engines):
    """Not some time later."""
    client, _ = client_and_engines(auto=True)
    for number in range(200):
        with client.stream([number + 1], SamplingParams(max_tokens=2)) as stream:
            for chunk in stream:
                if chunk.finish_reason is not None:
                    assert client.inflight(0) == 0


# --- ways out ------------------------------------------------------------------------------


def test_leaving_the_block_aborts_once_on_the_right_engine(client_and_engines):
    """The other engine hears nothing."""
    client, engines = client_and_engines(2)
    with client.stream([1], data_parallel_rank=1) as stream:
        rid = engines[1].recv_add().rid
        engines[1].tokens(rid, [5])
        assert next(stream).token_ids == [5]
    expect_one_abort(engines[1], rid, client)
    engines[0].expect_nothing(0)
    assert stream.result(0).finish_reason == "abort"
    assert stream.result(0).token_ids == [5]


def test_leaving_the_block_after_the_end_sends_nothing(client_and_engines):
    """Finished is finished."""
    client, [engine] = client_and_engines()
    with client.stream([1]) as stream:
        engine.tokens(engine.recv_add().rid, [5], "stop")
        assert len(list(stream)) == 1
        stream.close()
    del stream
    gc.collect()
    engine.expect_nothing(0.15)


def test_leaving_after_an_unread_end_sends_nothing(client_and_engines):
    """The engine has finished, whether anybody read it or not."""
    client, [engine] = client_and_engines()
    with client.stream([1]) as stream:
        engine.tokens(engine.recv_add().rid, [5], "stop")
        answer_one(client, engine)
    engine.expect_nothing(0.15)
    done = stream.result(PATIENCE)
    assert (done.token_ids, done.finish_reason) == ([5], "stop")


def test_break_aborts(client_and_engines):
    """Leaving the loop inside a block."""
    client, [engine] = client_and_engines()
    with client.stream([1]) as stream:
        rid = engine.recv_add().rid
        engine.tokens(rid, [5])
        for _chunk in stream:
            break
    expect_one_abort(engine, rid, client)


def test_close_twice_aborts_once(client_and_engines):
    """Closing is idempotent, and a closed stream iterates to nothing."""
    client, [engine] = client_and_engines()
    stream = client.stream([1])
    rid = engine.recv_add().rid
    stream.close()
    assert client.inflight(0) == 0
    stream.close()
    assert list(stream) == []
    with stream:
        pass
    del stream
    gc.collect()
    expect_one_abort(engine, rid, client)


def test_unread_tokens_are_in_the_result_of_a_closed_stream(client_and_engines):
    """What had come, with the reason "abort"."""
    client, [engine] = client_and_engines()
    stream = client.stream([1], SamplingParams(logprobs=True), request_id="label")
    rid = engine.recv_add().rid
    engine.tokens(rid, [5], logprobs=[-0.5])
    assert next(stream).token_ids == [5]
    engine.tokens(rid, [6, 7], logprobs=[-0.25, -0.125])
    answer_one(client, engine)
    stream.close()
    done = stream.result(PATIENCE)
    assert done.token_ids == [5, 6, 7]
    assert list(done.logprobs) == [-0.5, -0.25, -0.125]
    assert (done.finish_reason, done.completion_tokens) == ("abort", 3)
    assert done.request_id == "label"


def test_dropping_the_last_reference_aborts_once(client_and_engines):
    """On the right engine, soon, with or without anything read."""
    client, engines = client_and_engines(2)
    for read_first in (False, True):
        stream = client.stream([1], data_parallel_rank=1)
        rid = engines[1].recv_add().rid
        if read_first:
            engines[1].tokens(rid, [5])
            next(stream)
        del stream
        gc.collect()
        expect_one_abort(engines[1], rid, client)
    engines[0].expect_nothing(0)


def test_dropping_an_iterator_of_the_stream_aborts(client_and_engines):
    """``for chunk in client.stream(...)`` without a name or a block."""
    client, [engine] = client_and_engines()
    rids = []

    def loop():
        for _chunk in client.stream([1]):
            return

    call = in_thread(loop)
    rids.append(engine.recv_add().rid)
    engine.tokens(rids[0], [5])
    call.result(PATIENCE)
    gc.collect()
    expect_one_abort(engine, rids[0], client)


def test_stream_in_a_reference_cycle_aborts_when_collected(client_and_engines):
    """The collector may run anywhere; the abort comes all the same."""
    client, [engine] = client_and_engines()

    holder = Holder()
    holder.stream = client.stream([1])
    holder.itself = holder
    watch = weakref.ref(holder)
    rid = engine.recv_add().rid
    engine.expect_nothing(0.05)
    del holder
    gc.collect()
    assert watch() is None
    expect_one_abort(engine, rid, client)


def test_many_cycles_collected_while_tokens_flow(client_and_engines):
    """The collector strikes inside our own calls too, in any thread: nothing may hang."""
    client, [engine] = client_and_engines(auto=True)

    def churn(number):
        for turn in range(25):
            holder = Holder()
            holder.stream = client.stream([number, turn], SamplingParams(max_tokens=10_000))
            holder.itself = holder
            if turn % 2:
                next(holder.stream)
            del holder
            done = client.generate([number, turn], SamplingParams(max_tokens=3), timeout=20)
            assert done.token_ids == predicted([number, turn], 3)
        return True

    calls = [in_thread(churn, number) for number in range(1, 9)]
    assert all(call.result(20) for call in calls)
    gc.collect()
    eventually(lambda: inflight(client) == [0] and engine.running == 0)
    assert len(engine.aborts) == 200


def test_generator_around_a_block_dropped_in_a_cycle(client_and_engines):
    """Its clean-up runs inside the collector: it must not wait for anything."""
    client, [engine] = client_and_engines()

    def tokens():
        with client.stream([1]) as stream:
            for chunk in stream:
                yield from chunk.token_ids

    holder = Holder()
    holder.tokens = tokens()
    holder.itself = holder
    reading = in_thread(next, holder.tokens)
    rid = engine.recv_add().rid
    engine.tokens(rid, [5])
    assert reading.result(PATIENCE) == 5
    del holder
    gc.collect()
    expect_one_abort(engine, rid, client)
    answer_one(client, engine)


def test_exception_in_the_loop_body_aborts_while_it_is_kept(client_and_engines):
    """Its traceback keeps the stream alive: leaving the block is what counts."""
    client, [engine] = client_and_engines()
    kept = []

    def body():
        with client.stream([1]) as stream:
            for _chunk in stream:
                raise ZeroDivisionError("mine")

    call = in_thread(body)
    rid = engine.recv_add().rid
    engine.tokens(rid, [5])
    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        call.result(PATIENCE)
    kept.append(caught.value)
    expect_one_abort(engine, rid, client)
    assert kept


def test_exception_in_a_loop_without_a_block_aborts_when_it_is_dropped(client_and_engines):
    """No ``with``: the stream lives as long as the exception that refers to it."""
    client, [engine] = client_and_engines()

    def body():
        try:
            for _chunk in client.stream([1]):
                raise ZeroDivisionError
        except ZeroDivisionError:
            return

    call = in_thread(body)
    rid = engine.recv_add().rid
    engine.tokens(rid, [5])
    call.result(PATIENCE)
    del call
    gc.collect()
    expect_one_abort(engine, rid, client)


def test_close_from_another_thread_ends_a_blocked_reader(client_and_engines):
    """StopIteration within 0.2 s; the result has what had come."""
    client, [engine] = client_and_engines()
    stream = client.stream([1])
    rid = engine.recv_add().rid
    engine.tokens(rid, [5])
    assert next(stream).token_ids == [5]
    blocked = in_thread(lambda: next(stream, "end"))
    waiting_result = in_thread(stream.result)
    stays_true(lambda: not blocked.done(), 0.1)
    started = time.monotonic()
    stream.close()
    assert blocked.result(PATIENCE) == "end"
    assert time.monotonic() - started < PATIENCE
    for done in (stream.result(0), waiting_result.result(PATIENCE)):
        assert (done.token_ids, done.finish_reason) == ([5], "abort")
    expect_one_abort(engine, rid, client)


def test_abort_by_label_ends_a_blocked_reader(client_and_engines):
    """Not an error: the tokens that came, and the reason "abort"."""
    client, [engine] = client_and_engines()
    stream = client.stream([1], request_id="label")
    rid = engine.recv_add().rid
    engine.tokens(rid, [5])
    blocked = in_thread(lambda: list(stream))
    stays_true(lambda: not blocked.done(), 0.1)
    client.abort("label")
    chunks = blocked.result(PATIENCE)
    assert [token for chunk in chunks for token in chunk.token_ids] == [5]
    assert {chunk.finish_reason for chunk in chunks} <= {None, "abort"}
    done = stream.result(PATIENCE)
    assert (done.token_ids, done.finish_reason) == ([5], "abort")
    expect_one_abort(engine, rid, client)


def test_output_after_an_abort_is_noise(client_and_engines):
    """Late batches and a duplicate finish change neither the result nor later requests."""
    client, [engine] = client_and_engines()
    stream = client.stream([1])
    rid = engine.recv_add().rid
    engine.tokens(rid, [5])
    assert next(stream).token_ids == [5]
    stream.close()
    assert engine.recv_abort() == [rid]
    engine.tokens(rid, [6])
    engine.tokens(rid, [7])
    engine.tokens(rid, [8], "length")
    engine.tokens(rid, [8], "length")
    answer_one(client, engine)
    assert stream.result(0).token_ids == [5]
    assert stream.result(0).finish_reason == "abort"
    assert inflight(client) == [0]
    engine.expect_nothing(0.1)


# --- deadlines -----------------------------------------------------------------------------


def test_request_timeout_aborts_though_nobody_reads(client_and_engines):
    """The deadline is the request's, not the reader's."""
    client, [engine] = client_and_engines()
    started = time.monotonic()
    stream = client.stream([1], timeout=1.5 * UNIT)
    rid = engine.recv_add().rid
    engine.tokens(rid, [5])
    assert engine.recv_abort() == [rid]
    assert 1.45 * UNIT <= time.monotonic() - started < PATIENCE
    eventually(lambda: client.inflight(0) == 0)
    got = []

    def read():
        for chunk in stream:
            got.extend(chunk.token_ids)

    with pytest.raises(tszmq.DeadlineExceeded) as caught:
        read()
    assert partial_of(caught.value).token_ids == [5]
    assert got in ([], [5])
    with pytest.raises(tszmq.DeadlineExceeded):
        stream.result(PATIENCE)
    engine.expect_nothing(0.1)


def test_request_timeout_wakes_a_blocked_reader(client_and_engines):
    """With what was read before it in the partial result."""
    client, [engine] = client_and_engines()
    started = time.monotonic()
    with client.stream([1], timeout=1.5 * UNIT) as stream:
        rid = engine.recv_add().rid
        engine.tokens(rid, [5])
        assert next(stream).token_ids == [5]
        with pytest.raises(tszmq.DeadlineExceeded) as caught:
            next(stream)
        assert 1.45 * UNIT <= time.monotonic() - started < PATIENCE
        assert partial_of(caught.value).token_ids == [5]
    expect_one_abort(engine, rid, client)


# --- several threads -----------------------------------------------------------------------


def test_several_readers_share_one_stream(client_and_engines):
    """Each chunk goes to one of them, none twice, and all of them end."""
    client, [engine] = client_and_engines()
    stream = client.stream([1])
    rid = engine.recv_add().rid
    readers = [in_thread(lambda: list(stream)) for _ in range(6)]
    for token in range(300):
        engine.tokens(rid, [token])
        if token % 50 == 0:
            answer_one(client, engine)
    engine.tokens(rid, [300], "stop")
    chunks = [chunk for reader in readers for chunk in reader.result(PATIENCE)]
    tokens = sorted(token for chunk in chunks for token in chunk.token_ids)
    assert tokens == list(range(301))
    assert [chunk.finish_reason for chunk in chunks].count("stop") == 1
    assert stream.result(0).token_ids == list(range(301))


def test_close_while_a_reader_takes_a_chunk(client_and_engines, monkeypatch):
    """The reader has that chunk, and none after it."""
    client, [engine] = client_and_engines()
    stream = client.stream([1])
    rid = engine.recv_add().rid
    engine.tokens(rid, [5])
    chunk = Request.chunk

    def closed_meanwhile(request, *args):
        taken = chunk(request, *args)
        in_thread(stream.close).result(PATIENCE)
        return taken

    with monkeypatch.context() as patched:
        patched.setattr(Request, "chunk", closed_meanwhile)
        assert next(stream).token_ids == [5]
    assert next(stream, "end") == "end"
    expect_one_abort(engine, rid, client)


def test_several_blocked_readers_all_end_when_closed(client_and_engines):
    """Nobody is left waiting."""
    client, [engine] = client_and_engines()
    stream = client.stream([1])
    rid = engine.recv_add().rid
    readers = [in_thread(lambda: list(stream)) for _ in range(6)]
    stays_true(lambda: not any(reader.done() for reader in readers), 0.1)
    stream.close()
    assert [reader.result(PATIENCE) for reader in readers] == [[]] * 6
    expect_one_abort(engine, rid, client)


def test_several_blocked_readers_all_see_the_error(client_and_engines):
    """An error is not used up by the first."""
    client, [engine] = client_and_engines()
    stream = client.stream([1])
    rid = engine.recv_add().rid
    readers = [in_thread(lambda: list(stream)) for _ in range(4)]
    waiting = in_thread(stream.result)
    stays_true(lambda: not any(reader.done() for reader in readers), 0.1)
    engine.tokens(rid, [], "abort")
    for call in [*readers, waiting]:
        with pytest.raises(tszmq.RequestRejected):
            call.result(PATIENCE)


def test_close_races_with_the_finish(client_and_engines):
    """Whoever is first wins; the place is freed once and the result says which."""
    client, [engine] = client_and_engines()
    for number in range(100):
        stream = client.stream([number + 1])
        rid = engine.recv_add(skip_aborts=True).rid
        barrier = threading.Barrier(2)

        def close(stream=stream, barrier=barrier):
            barrier.wait()
            stream.close()

        closing = in_thread(close)
        barrier.wait()
        engine.tokens(rid, [5], "stop")
        closing.result(PATIENCE)
        done = stream.result(PATIENCE)
        expected = {"stop": ([5],), "abort": ([5], [])}[done.finish_reason]
        assert done.token_ids in expected
        assert client.inflight(0) == 0
    answered = in_thread(client.generate, [1])
    engine.tokens(engine.recv_add(skip_aborts=True).rid, [1], "stop")
    assert answered.result(PATIENCE).token_ids == [1]


# --- whatever the engine does --------------------------------------------------------------


@pytest.mark.parametrize("seed", range(24))
def test_any_sequence_of_batches(client_and_engines, seed):
    """Steady steps, changing sets, finishes, closes, noise and rubbish: everyone gets exactly
    what was sent for them while they wanted it."""
    chance = random.Random(seed)
    client, [engine] = client_and_engines()
    count = chance.choice([1, 2, 5, 20])
    asked = [chance.random() < 0.3 for _ in range(count)]
    streams = [
        client.stream([n + 1], SamplingParams(max_tokens=5000, logprobs=asked[n]))
        for n in range(count)
    ]
    rids = {add.prompt[0] - 1: add.rid for add in engine.recv_adds(count)}
    tokens: dict[int, list[int]] = {n: [] for n in range(count)}
    logprobs: dict[int, list[float]] = {n: [] for n in range(count)}
    read: dict[int, list[int]] = {n: [] for n in range(count)}
    reasons: dict[int, str] = {}

    def row(n, size, finish=""):
        ids = [chance.randrange(2**31) for _ in range(size)]
        values = [chance.uniform(-5, 0) for _ in ids] if asked[n] else []
        if n not in reasons:
            tokens[n] += ids
            logprobs[n] += values
        if finish:
            reasons.setdefault(n, finish)
        return engine.row(rids[n], ids, finish, logprobs=values)

    def steady():
        running = [n for n in range(count) if n not in reasons]
        for _ in range(chance.randrange(1, 40)):
            engine.send_batch([row(n, 1) for n in running])

    def mixed():
        some = chance.sample(range(count), chance.randrange(1, count + 1))
        rows = [row(n, chance.randrange(0, 4)) for n in some if n not in reasons]
        late = [row(n, 1, chance.choice(["", "stop"])) for n in some if n in reasons]
        noise = [engine.row(f"nobody-{chance.random()}", [1])] if chance.random() < 0.3 else []
        rows += late + noise
        chance.shuffle(rows)
        engine.send_batch(rows, era=chance.choice([9, 10, 14, 14]))

    def finish():
        running = [n for n in range(count) if n not in reasons]
        ending = set(chance.sample(running, chance.randrange(1, len(running) + 1)))
        rows = [row(n, chance.randrange(1, 3), "length" if n in ending else "") for n in running]
        engine.send_batch(rows)

    def rubbish():
        engine.send_raw([bytes(chance.randrange(256) for _ in range(20))])

    def close():
        n = chance.choice([n for n in range(count) if n not in reasons])
        answer_skipping_aborts()
        streams[n].close()
        reasons[n] = "abort"

    def look():
        answer_skipping_aborts()
        n = chance.randrange(count)
        if len(tokens[n]) > len(read[n]) and n not in reasons:
            read[n] += next(streams[n]).token_ids

    def answer_skipping_aborts():
        call = in_thread(client.generate, [9999])
        engine.tokens(engine.recv_add(skip_aborts=True).rid, [1], "stop")
        assert call.result(PATIENCE).token_ids == [1]

    actions = [steady, steady, mixed, mixed, finish, rubbish, close, look, look]
    while len(reasons) < count:
        chance.choice(actions)()
    answer_skipping_aborts()
    for n, stream in enumerate(streams):
        done = stream.result(PATIENCE)
        assert done.token_ids == tokens[n]
        assert done.finish_reason == reasons[n]
        assert (list(done.logprobs) if asked[n] else None) == (logprobs[n] if asked[n] else None)
        rest = [token for chunk in stream for token in chunk.token_ids]
        assert reasons[n] == "abort" or read[n] + rest == tokens[n]
    assert inflight(client) == [0]


# --- what it says of itself ------------------------------------------------------------------


def test_repr_shows_how_far_it_is(client_and_engines):
    """Label, engine, tokens and state, and never much of it."""
    client, [engine] = client_and_engines()
    with client.stream([1], request_id="one") as stream:
        rid = engine.recv_add().rid
        assert repr(stream) == "<tszmq.RequestStream 'one' at engine 0, tokens: 0, running>"
        engine.tokens(rid, [5, 6])
        next(stream)
        assert repr(stream) == "<tszmq.RequestStream 'one' at engine 0, tokens: 2, running>"
        engine.tokens(rid, [7], "stop")
        stream.result(PATIENCE)
        assert repr(stream) == "<tszmq.RequestStream 'one' at engine 0, tokens: 3, ended: 'stop'>"
    with client.stream([1], request_id="x" * 1000) as stream:
        engine.recv_add()
        assert len(repr(stream)) < 200
    assert "ended: 'abort'" in repr(stream)
    with client.stream([1], timeout=0.05) as stream:
        with pytest.raises(tszmq.DeadlineExceeded):
            next(stream)
        assert repr(stream) == "<tszmq.RequestStream at engine 0, tokens: 0, failed>"
