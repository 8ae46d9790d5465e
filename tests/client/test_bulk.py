"""``generate_many`` and ``as_completed``: order, laziness, errors, progress, deadlines."""

from __future__ import annotations

import itertools
import threading
import time

import pytest

import tszmq
from tests.client_fixtures import answer_one, inflight, partial_of
from tests.mock_engine import PATIENCE, eventually, in_thread, predicted, stays_true
from tszmq import SamplingParams

pytestmark = pytest.mark.timeout(30)

REFUSED = (tszmq.InvalidRequest, TypeError)
SHORT = SamplingParams(max_tokens=3)


class Pulls:
    """An iterator of prompts that counts how many were taken."""

    def __init__(self, prompts):
        self._prompts = iter(prompts)
        self.count = 0

    def __iter__(self):
        return self

    def __next__(self):
        prompt = next(self._prompts)
        self.count += 1
        return prompt


def endless():
    return ([number + 1] for number in itertools.count())


# --- results -------------------------------------------------------------------------------


def test_results_are_in_the_order_of_the_prompts(client_and_engines):
    """However they finish."""
    client, [engine] = client_and_engines()
    call = in_thread(client.generate_many, [[n + 1] for n in range(6)])
    for add in reversed(engine.recv_adds(6)):
        engine.tokens(add.rid, [add.prompt[0] * 10], "stop")
    results = call.result(PATIENCE)
    assert isinstance(results, list)
    assert [done.token_ids for done in results] == [[10], [20], [30], [40], [50], [60]]


def test_all_prompts_are_in_flight_together(client_and_engines):
    """One thread drives many: none waits for another's end."""
    client, engines = client_and_engines(2)
    call = in_thread(client.generate_many, [[n + 1] for n in range(40)])
    adds = [engine.recv_adds(20) for engine in engines]
    assert inflight(client) == [20, 20]
    for engine, its in zip(engines, adds, strict=True):
        engine.send_batch([engine.row(add.rid, add.prompt, "stop") for add in its])
    assert [done.token_ids for done in call.result(PATIENCE)] == [[n + 1] for n in range(40)]
    assert inflight(client) == [0, 0]


def test_results_of_a_large_batch(client_and_engines):
    """Every result is its own prompt's, lengths and engines mixed."""
    client, engines = client_and_engines(3, auto=True)
    prompts = [[number, number % 7 + 1] for number in range(1, 601)]
    params = [SamplingParams(max_tokens=1 + number % 90) for number in range(600)]
    results = client.generate_many(prompts, params)
    for number, done in enumerate(results):
        assert done.token_ids == predicted(prompts[number], 1 + number % 90)
        assert done.finish_reason == "length"
        assert done.prompt_tokens == 2
    assert {done.engine_index for done in results} == {0, 1, 2}
    assert max(len(engine.served) for engine in engines) <= 300


def test_one_set_of_params_for_all_and_one_each(client_and_engines):
    """A single SamplingParams, a sequence of them, or none."""
    client, _ = client_and_engines(auto=True)
    prompts = [[1], [2], [3]]

    def lengths(*args):
        return [len(done.token_ids) for done in client.generate_many(prompts, *args)]

    assert lengths() == [16, 16, 16]
    assert lengths(SamplingParams(max_tokens=5)) == [5, 5, 5]
    assert lengths([SamplingParams(max_tokens=n) for n in (4, 2, 9)]) == [4, 2, 9]
    assert lengths(tuple(SamplingParams(max_tokens=n) for n in (4, 2, 9))) == [4, 2, 9]


def test_logprobs_in_bulk(client_and_engines):
    """Beside the tokens of those that asked."""
    client, _ = client_and_engines(auto=True)
    first, second = client.generate_many(
        [[1], [2]], [SamplingParams(max_tokens=60, logprobs=True), SamplingParams(max_tokens=60)]
    )
    assert list(first.logprobs) == [-0.5 - 0.001 * k for k in range(60)]
    assert second.logprobs is None


@pytest.mark.parametrize("empty", [[], (), iter([])], ids=["list", "tuple", "iterator"])
def test_no_prompts_no_results(client_and_engines, empty):
    """Nothing to do is done."""
    client, [engine] = client_and_engines()
    assert client.generate_many(empty) == []
    assert list(client.as_completed([])) == []
    answer_one(client, engine)


def test_several_threads_at_once(client_and_engines):
    """Bulk calls of several threads and single requests share one client."""
    client, _ = client_and_engines(2, auto=True)

    def bulk(first):
        results = client.generate_many([[first, n + 1] for n in range(100)], SHORT, timeout=20)
        return [done.token_ids for done in results]

    calls = {n: in_thread(bulk, n) for n in range(1, 7)}
    singles = {n: in_thread(client.generate, [n], SHORT) for n in range(1, 30)}
    for n, call in calls.items():
        assert call.result(20) == [predicted([n, k + 1], 3) for k in range(100)]
    for n, call in singles.items():
        assert call.result(20).token_ids == predicted([n], 3)
    assert inflight(client) == [0, 0]


def test_as_completed_yields_as_they_finish(client_and_engines):
    """Pairs of position and result, the first to finish first."""
    client, [engine] = client_and_engines()
    results = client.as_completed([[1], [2], [3]])
    first = in_thread(next, results)
    adds = engine.recv_adds(3)
    engine.tokens(adds[1].rid, [20], "stop")
    index, done = first.result(PATIENCE)
    assert (index, done.token_ids) == (1, [20])
    engine.tokens(adds[2].rid, [30], "stop")
    index, done = in_thread(next, results).result(PATIENCE)
    assert (index, done.token_ids) == (2, [30])
    engine.tokens(adds[0].rid, [10], "stop")
    assert [(index, done.token_ids) for index, done in results] == [(0, [10])]


# --- laziness ------------------------------------------------------------------------------


def test_prompts_are_pulled_as_there_is_room(client_and_engines):
    """Never more in flight than asked, never more than one prompt taken ahead."""
    client, [engine] = client_and_engines()
    prompts = Pulls([n + 1] for n in range(30))
    call = in_thread(client.generate_many, prompts, max_inflight=4)
    waiting = engine.recv_adds(4)
    for finished in range(30):
        stays_true(lambda: client.inflight(0) <= 4, 0.005)
        assert prompts.count <= finished + 5
        add = waiting.pop(0)
        engine.tokens(add.rid, add.prompt, "stop")
        if finished < 26:
            waiting.append(engine.recv_add())
    assert [done.token_ids for done in call.result(PATIENCE)] == [[n + 1] for n in range(30)]


def test_an_endless_iterable(client_and_engines):
    """As many results as one wants; leaving aborts what is in flight."""
    client, [engine] = client_and_engines(auto=True)
    prompts = Pulls(endless())
    results = client.as_completed(prompts, SHORT, max_inflight=8)
    for index, done in itertools.islice(results, 200):
        assert done.token_ids == predicted([index + 1], 3)
    # At most: those taken, those that finished and wait to be taken, and those in flight.
    assert prompts.count <= 200 + 8 + 8
    results.close()
    eventually(lambda: inflight(client) == [0] and engine.running == 0)
    assert engine.most_at_once <= 8


def test_iterator_of_results_that_is_dropped_aborts(client_and_engines):
    """A generator without a reference is over."""
    client, [engine] = client_and_engines()
    results = client.as_completed(endless(), max_inflight=3)
    first = in_thread(next, results)
    adds = engine.recv_adds(3)
    engine.tokens(adds[0].rid, [1], "stop")
    first.result(PATIENCE)
    del results, first
    eventually(lambda: engine.drain() is not None and not engine.unfinished)
    assert set(engine.aborts) >= {add.rid for add in adds[1:]}
    eventually(lambda: inflight(client) == [0])


def test_client_bound_holds_for_bulk_calls(client_and_engines):
    """The client's max_inflight counts every request of every caller."""
    client, [engine] = client_and_engines(auto=True, max_inflight=5)
    calls = [
        in_thread(client.generate_many, [[n, k + 1] for k in range(50)], SHORT) for n in (1, 2)
    ]
    for n, call in zip((1, 2), calls, strict=True):
        assert [done.token_ids for done in call.result(20)] == [
            predicted([n, k + 1], 3) for k in range(50)
        ]
    assert engine.most_at_once <= 5


# --- errors --------------------------------------------------------------------------------


def test_first_error_is_raised_and_the_rest_aborted(client_and_engines):
    """The default: nothing is left running for nobody."""
    client, [engine] = client_and_engines()
    call = in_thread(client.generate_many, [[n + 1] for n in range(5)])
    adds = engine.recv_adds(5)
    engine.tokens(adds[3].rid, [1], "stop")
    engine.tokens(adds[1].rid, [], "abort")
    with pytest.raises(tszmq.RequestRejected):
        call.result(PATIENCE)
    assert inflight(client) == [0]
    engine.recv_aborts_of(adds[n].rid for n in (0, 2, 4))
    answer_one(client, engine)


def test_errors_in_their_places(client_and_engines):
    """One bad prompt does not sink the batch: engine's refusals, losses and our own checks."""
    client, [engine] = client_and_engines()
    prompts = [[1], [2], [], [4], [True], [6], [7]]
    call = in_thread(client.generate_many, prompts, errors="return")
    adds = {add.prompt[0]: add for add in engine.recv_adds(5)}
    engine.tokens(adds[1].rid, [10], "stop")
    engine.tokens(adds[2].rid, [], "abort")
    engine.tokens(adds[4].rid, [40], "stop", completion_tokens=3)
    engine.tokens(adds[6].rid, [60], "stop")
    engine.tokens(adds[7].rid, [70, 71], "abort")
    results = call.result(PATIENCE)
    assert len(results) == 7
    assert [results[n].token_ids for n in (0, 5, 6)] == [[10], [60], [70, 71]]
    assert results[6].finish_reason == "abort"
    assert isinstance(results[1], tszmq.RequestRejected)
    assert isinstance(results[2], tszmq.InvalidRequest)
    assert isinstance(results[3], tszmq.TokensLost)
    assert isinstance(results[4], REFUSED)
    assert inflight(client) == [0]
    answer_one(client, engine)


def test_bad_prompt_among_good_ones_raises(client_and_engines):
    """Ours to find: the good ones are aborted, or were never sent."""
    client, [engine] = client_and_engines()
    with pytest.raises(REFUSED):
        client.generate_many([[1], [2], [1.5], [3]])
    assert inflight(client) == [0]
    eventually(lambda: engine.drain() is not None and not engine.unfinished)


@pytest.mark.parametrize("errors", ["raise", "return"])
def test_iterator_that_raises(client_and_engines, errors):
    """Its exception is the caller's, and what was sent is aborted."""
    client, [engine] = client_and_engines()

    def prompts():
        yield [1]
        yield [2]
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        client.generate_many(prompts(), errors=errors)
    assert inflight(client) == [0]
    eventually(lambda: engine.drain() is not None and not engine.unfinished)
    answer_one(client, engine)


@pytest.mark.parametrize(
    ("prompts", "options"),
    [
        ([[1], [2]], {"sampling_params": [SHORT]}),
        ([[1], [2]], {"sampling_params": [SHORT] * 3}),
        ([[1], [2]], {"sampling_params": []}),
        ([[1], [2]], {"sampling_params": [SHORT, None, 5]}),
        ([[1], [2]], {"sampling_params": [SHORT, 5]}),
        ([[1], [2]], {"sampling_params": 5}),
        ([[1], [2]], {"sampling_params": {"max_tokens": 3}}),
        ([[1], [2]], {"errors": "ignore"}),
        ([[1], [2]], {"errors": None}),
        ([[1], [2]], {"max_inflight": 0}),
        ([[1], [2]], {"max_inflight": -1}),
        ([[1], [2]], {"max_inflight": True}),
        ([[1], [2]], {"max_inflight": 1.5}),
        ([[1], [2]], {"timeout": -1}),
        ([[1], [2]], {"timeout": "1"}),
        ([[1], [2]], {"timeout": float("nan")}),
        ([[1], [2]], {"progress": 5}),
        ([1, 2, 3], {}),
        (5, {}),
        (None, {}),
        ("text", {}),
    ],
    ids=repr,
)
def test_bad_arguments_are_refused_before_anything_is_sent(client_and_engines, prompts, options):
    """Of the call as a whole, in either mode of errors."""
    client, [engine] = client_and_engines()
    with pytest.raises(REFUSED):
        client.generate_many(prompts, **options)
    assert inflight(client) == [0]
    answer_one(client, engine)


@pytest.mark.parametrize("count", [2, 4])
def test_params_that_do_not_match_an_iterator_of_prompts(client_and_engines, count):
    """Found out on the way: an error, not a short or padded result."""
    client, [engine] = client_and_engines(auto=True)
    with pytest.raises(tszmq.InvalidRequest):
        client.generate_many(iter([[1], [2], [3]]), [SHORT] * count)
    assert inflight(client) == [0]
    eventually(lambda: engine.running == 0)


# --- deadlines and the end of the client ---------------------------------------------------


def test_batch_timeout_raises_and_aborts(client_and_engines):
    """One deadline for the whole batch."""
    client, [engine] = client_and_engines()
    started = time.monotonic()
    call = in_thread(client.generate_many, [[1], [2], [3]], timeout=0.4)
    adds = engine.recv_adds(3)
    engine.tokens(adds[0].rid, [10], "stop")
    engine.tokens(adds[1].rid, [20])
    with pytest.raises(tszmq.DeadlineExceeded):
        call.result(PATIENCE)
    assert 0.38 <= time.monotonic() - started < PATIENCE
    assert inflight(client) == [0]
    engine.recv_aborts_of([adds[1].rid, adds[2].rid])
    answer_one(client, engine)


def test_batch_timeout_in_places(client_and_engines):
    """Finished ones keep their results, unfinished ones say what had come."""
    client, [engine] = client_and_engines()
    started = time.monotonic()
    call = in_thread(
        client.generate_many,
        [[n + 1] for n in range(6)],
        timeout=0.4,
        errors="return",
        max_inflight=3,
    )
    adds = engine.recv_adds(3)
    engine.tokens(adds[0].rid, [10], "stop")
    adds.append(engine.recv_add())
    engine.tokens(adds[1].rid, [20, 21])
    results = call.result(PATIENCE)
    assert 0.38 <= time.monotonic() - started < PATIENCE
    assert results[0].token_ids == [10]
    assert all(isinstance(result, tszmq.DeadlineExceeded) for result in results[1:])
    assert len(results) == 6
    assert partial_of(results[1]).token_ids == [20, 21]
    assert inflight(client) == [0]
    engine.recv_aborts_of(add.rid for add in adds[1:])
    engine.expect_nothing(0.1)


def test_close_during_a_call_fills_the_places(client_and_engines):
    """What was finished stays; unfinished and unsent places hold ClientClosed."""
    client, [engine] = client_and_engines()
    call = in_thread(
        client.generate_many, [[n + 1] for n in range(6)], errors="return", max_inflight=3
    )
    adds = engine.recv_adds(3)
    engine.tokens(adds[1].rid, [20], "stop")
    engine.recv_add()
    client.close()
    results = call.result(PATIENCE)
    assert len(results) == 6
    assert results[1].token_ids == [20]
    assert all(isinstance(results[n], tszmq.ClientClosed) for n in (0, 2, 3, 4, 5))


def test_close_during_a_call_raises(client_and_engines):
    """With errors="raise"."""
    client, [engine] = client_and_engines()
    call = in_thread(client.generate_many, [[1], [2]])
    waiting = in_thread(lambda: list(client.as_completed([[3]])))
    engine.recv_adds(3)
    client.close()
    for each in (call, waiting):
        with pytest.raises(tszmq.ClientClosed):
            each.result(PATIENCE)


def test_abort_all_ends_a_bulk_call(client_and_engines):
    """Aborted requests are results with the tokens that came, not errors."""
    client, [engine] = client_and_engines()
    call = in_thread(client.generate_many, [[1], [2]])
    adds = engine.recv_adds(2)
    engine.tokens(adds[0].rid, [10])
    answer_one(client, engine)
    client.abort_all()
    results = call.result(PATIENCE)
    assert [done.finish_reason for done in results] == ["abort", "abort"]
    assert [done.token_ids for done in results] == [[10], []]
    engine.recv_aborts_of(add.rid for add in adds)


# --- progress ------------------------------------------------------------------------------


def test_progress_callable(client_and_engines):
    """Called in the calling thread, never backwards; the last call says all."""
    client, _ = client_and_engines(auto=True)
    calls = []

    def progress(done, total):
        calls.append((done, total, threading.get_ident()))

    client.generate_many([[n + 1] for n in range(50)], SHORT, progress=progress)
    assert calls[-1][:2] == (50, 50)
    counts = [done for done, _, _ in calls]
    assert counts == sorted(counts)
    assert {total for _, total, _ in calls} == {50}
    assert {ident for _, _, ident in calls} == {threading.get_ident()}


def test_progress_comes_while_the_call_runs(client_and_engines):
    """Not only at its end."""
    client, [engine] = client_and_engines()
    calls = []
    call = in_thread(
        client.generate_many,
        [[1], [2]],
        progress=lambda done, total: calls.append((done, total)),
    )
    adds = engine.recv_adds(2)
    engine.tokens(adds[0].rid, [1], "stop")
    eventually(lambda: (1, 2) in calls)
    assert not call.done()
    engine.tokens(adds[1].rid, [1], "stop")
    call.result(PATIENCE)
    assert calls[-1] == (2, 2)


def test_progress_of_an_iterator_has_no_total(client_and_engines):
    """None as long as nobody knows."""
    client, _ = client_and_engines(auto=True)
    calls = []
    client.generate_many(
        ([n + 1] for n in range(20)),
        SHORT,
        max_inflight=4,
        progress=lambda done, total: calls.append((done, total)),
    )
    assert calls[-1][0] == 20
    assert {total for _, total in calls[:-1]} <= {None, 20}
    assert calls[0][1] is None


def test_progress_counts_failures(client_and_engines):
    """Done is done, well or not."""
    client, _ = client_and_engines(auto=True, engine={"refuse": lambda add: add.prompt[0] % 2 == 0})
    calls = []
    results = client.generate_many(
        [[n + 1] for n in range(20)],
        SHORT,
        errors="return",
        progress=lambda done, total: calls.append((done, total)),
    )
    assert sum(isinstance(result, tszmq.RequestRejected) for result in results) == 10
    assert calls[-1] == (20, 20)


def test_exception_in_progress_ends_the_call(client_and_engines):
    """It is the caller's own: raised, and the rest aborted."""
    client, [engine] = client_and_engines()

    def progress(done, total):
        if done:
            raise ZeroDivisionError("mine")

    call = in_thread(client.generate_many, [[1], [2], [3]], errors="return", progress=progress)
    adds = engine.recv_adds(3)
    engine.tokens(adds[0].rid, [1], "stop")
    with pytest.raises(ZeroDivisionError, match="mine"):
        call.result(PATIENCE)
    assert inflight(client) == [0]
    engine.recv_aborts_of([adds[1].rid, adds[2].rid])
    answer_one(client, engine)


def test_progress_may_use_the_client(client_and_engines):
    """No lock is held: requests, figures and aborts all work from inside."""
    client, _ = client_and_engines(auto=True)
    inner: list[list[int]] = []

    def progress(done, total):
        client.load(0)
        client.health()
        assert client.inflight(0) >= 0
        if not inner:
            inner.append(client.generate([99], SHORT, timeout=5).token_ids)

    results = client.generate_many([[n + 1] for n in range(10)], SHORT, progress=progress)
    assert len(results) == 10
    assert inner == [predicted([99], 3)]


def test_progress_may_close_the_client(client_and_engines):
    """The call it is part of ends as when somebody else had closed it."""
    client, [engine] = client_and_engines()
    call = in_thread(
        client.generate_many,
        [[1], [2]],
        errors="return",
        progress=lambda done, total: client.close() if done == 1 else None,
    )
    adds = engine.recv_adds(2)
    engine.tokens(adds[0].rid, [10], "stop")
    results = call.result(PATIENCE)
    assert results[0].token_ids == [10]
    assert isinstance(results[1], tszmq.ClientClosed)


@pytest.mark.parametrize("progress", [True, False])
def test_progress_flag(client_and_engines, capfd, progress):
    """True shows something somewhere, but never on standard output; False shows nothing."""
    client, _ = client_and_engines(auto=True)
    client.generate_many([[n + 1] for n in range(10)], SHORT, progress=progress)
    out, err = capfd.readouterr()
    assert out == ""
    if not progress:
        assert err == ""
