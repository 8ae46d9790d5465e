"""``generate_many`` and ``as_completed``: order, laziness, errors, progress, deadlines."""

from __future__ import annotations

import gc
import itertools
import queue
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import tszmq
from tests.client_fixtures import (
    answer_after_aborts,
    answer_one,
    inflight,
    partial_of,
    waiting_for_a_place,
)
from tests.core.parts import interrupt_everywhere
from tests.mock_engine import PATIENCE, UNIT, eventually, in_thread, predicted, stays_true
from tszmq import SamplingParams
from tszmq.bulk import _Batch
from tszmq.ownership import CHECKED
from tszmq.progress import Meter, meter

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


# --- while the caller's code runs ----------------------------------------------------------

SHARED = ["as_completed", "stream_many", "progress"]


def paused(client, engine, kind):
    """A bulk call at ``max_inflight=2`` that is stopped in its caller's code, with two requests
    in flight and the next one waiting for a place.

    Returns the ids of the two, and what ends the call early.
    """
    prompts = [[n + 1] for n in range(4)]
    if kind == "progress":
        reached, leave = threading.Event(), threading.Event()

        def progress(done, total):
            reached.set()
            assert leave.wait(PATIENCE)
            raise ZeroDivisionError("mine")

        def end():
            leave.set()
            with pytest.raises(ZeroDivisionError, match="mine"):
                call.result(PATIENCE)

        call = in_thread(client.generate_many, prompts, progress=progress)
        adds = engine.recv_adds(2)
        assert reached.wait(PATIENCE)
        return adds[0].rid, adds[1].rid, end
    results = getattr(client, kind)(prompts)
    first = in_thread(next, results)
    adds = engine.recv_adds(2)
    engine.tokens(adds[0].rid, [10], "stop")
    adds.append(engine.recv_add())
    assert first.result(PATIENCE)[0] == 0
    return adds[1].rid, adds[2].rid, results.close


@pytest.mark.parametrize("kind", SHARED)
def test_a_caller_that_takes_his_time_holds_up_nobody(client_and_engines, kind):
    """A place that becomes free meanwhile is for whoever asks; no turn is kept for the batch."""
    client, [engine] = client_and_engines(max_inflight=2)
    done, running, end = paused(client, engine, kind)
    engine.tokens(done, [20], "stop")
    for _ in range(3):
        answer_one(client, engine)
    assert inflight(client) == [1]
    end()
    assert engine.recv_abort() == [running]
    assert inflight(client) == [0]


@pytest.mark.parametrize("kind", SHARED)
def test_ending_early_gives_every_place_back(client_and_engines, kind):
    """To those who wait for one, too; and what was not sent by then never is."""
    client, [engine] = client_and_engines(max_inflight=2)
    *running, end = paused(client, engine, kind)
    waiting = [in_thread(client.generate, [n]) for n in (50, 51)]
    eventually(lambda: waiting_for_a_place(client) == 2)
    end()
    engine.recv_aborts_of(running)
    adds = sorted(engine.recv_adds(2), key=lambda add: add.prompt)
    assert [add.prompt for add in adds] == [[50], [51]]
    for add in adds:
        engine.tokens(add.rid, add.prompt, "stop")
    assert [call.result(PATIENCE).token_ids for call in waiting] == [[50], [51]]
    engine.expect_nothing()
    assert (inflight(client), waiting_for_a_place(client)) == ([0], 0)


class Asked:
    """A meter that counts how often it was asked, and what it showed."""

    def __init__(self, real: Meter) -> None:
        self._real = real
        self.times = 0
        self.shown: list[int] = []

    def is_due(self, done: int, last: bool) -> bool:
        self.times += 1
        return self._real.is_due(done, last)

    def show(self, done: int, total: int | None, last: bool) -> None:
        self._real.show(done, total, last)
        self.shown.append(done)


@pytest.mark.parametrize("progress", [True, lambda done, total: None], ids=["line", "callable"])
def test_a_batch_that_has_no_news_to_show_keeps_its_turn(client_and_engines, monkeypatch, progress):
    """However often it looks: it goes before those who came later."""
    asked: list[Asked] = []

    def counted(progress):
        real = meter(progress)
        if real is None:
            return None
        asked.append(Asked(real))
        return asked[-1]

    monkeypatch.setattr("tszmq.bulk.meter", counted)
    for module in ("bulk", "progress"):
        monkeypatch.setattr(f"tszmq.{module}.PROGRESS_SECONDS", 0.005)
    client, [engine] = client_and_engines(max_inflight=1)
    holder = client.stream([1])
    rid = engine.recv_add().rid
    batch = in_thread(client.generate_many, [[2]], progress=progress)
    # It shows once that it has begun, and has left the queue for that.
    eventually(lambda: asked and asked[0].shown and waiting_for_a_place(client) == 1)
    later = in_thread(client.generate, [3])
    eventually(lambda: waiting_for_a_place(client) == 2)
    before = asked[0].times
    eventually(lambda: asked[0].times > before + 5)
    for prompt in ([2], [3]):
        engine.tokens(rid, [5], "stop")
        add = engine.recv_add()
        assert add.prompt == prompt
        rid = add.rid
    engine.tokens(rid, [5], "stop")
    assert [done.token_ids for done in batch.result(PATIENCE)] == [[5]]
    assert later.result(PATIENCE).token_ids == [5]
    assert holder.result(PATIENCE).token_ids == [5]
    assert asked[0].shown[0] == 0


def test_a_batch_keeps_its_turn_while_it_collects(client_and_engines, monkeypatch):
    """Nobody else's code runs meanwhile that could take its time."""
    waits: list[None] = []
    wait = _Batch._wait

    def counted(batch):
        waits.append(None)
        return wait(batch)

    monkeypatch.setattr(_Batch, "_wait", counted)
    client, [engine] = client_and_engines(max_inflight=2)
    holders = [client.stream([n]) for n in (50, 51)]
    held = [add.rid for add in engine.recv_adds(2)]
    batch = in_thread(client.generate_many, [[1], [2]])
    eventually(lambda: waiting_for_a_place(client) == 1)
    before = in_thread(client.generate, [10])
    eventually(lambda: waiting_for_a_place(client) == 2)
    engine.tokens(held[0], [5], "stop")
    first = engine.recv_add()
    assert first.prompt == [1]
    eventually(lambda: waiting_for_a_place(client) == 2)  # its second prompt is behind [10]
    after = in_thread(client.generate, [11])
    eventually(lambda: waiting_for_a_place(client) == 3 and len(waits) >= 2)
    seen = len(waits)
    engine.tokens(first.rid, [5], "stop")
    rids = [engine.recv_add()]
    assert rids[0].prompt == [10]
    eventually(lambda: len(waits) > seen)  # it has taken the result of its first
    for rid, prompt in ((held[1], [2]), (rids[0].rid, [11])):
        engine.tokens(rid, [5], "stop")
        rids.append(engine.recv_add())
        assert rids[-1].prompt == prompt
    for add in rids[1:]:
        engine.tokens(add.rid, [5], "stop")
    assert [done.token_ids for done in batch.result(PATIENCE)] == [[5], [5]]
    for call in (before, after):
        assert call.result(PATIENCE).token_ids == [5]
    for stream in holders:
        assert stream.result(PATIENCE).token_ids == [5]


@pytest.mark.parametrize("kind", ["as_completed", "stream_many"])
def test_an_expired_batch_keeps_no_turn(client_and_engines, kind):
    """Its caller is still busy with the first of the errors."""
    client, [engine] = client_and_engines(max_inflight=1)
    with client.stream([1]) as holder:
        rid = engine.recv_add().rid
        results = getattr(client, kind)([[2], [3]], timeout=0.2 * UNIT, errors="return")
        index, error = next(results)
        assert index == 0
        assert isinstance(error, tszmq.DeadlineExceeded)
        assert waiting_for_a_place(client) == 0
        engine.tokens(rid, [5], "stop")
        assert holder.result(PATIENCE).token_ids == [5]
        answer_one(client, engine)
    [(index, error)] = results
    assert index == 1
    assert isinstance(error, tszmq.DeadlineExceeded)
    engine.expect_nothing()


@pytest.mark.parametrize("kind", ["as_completed", "stream_many"])
def test_a_batch_that_found_no_engine_keeps_no_turn(client_and_engines, kind):
    """The place that the death freed is there for whoever comes once the engine is back."""
    client, [engine] = client_and_engines(max_inflight=1)
    results = getattr(client, kind)([[1], [2], [3]], errors="return")
    first = in_thread(next, results)
    engine.recv_add()
    eventually(lambda: waiting_for_a_place(client) == 1)
    engine.close()
    _, error = first.result(PATIENCE)
    assert isinstance(error, tszmq.EngineDead)
    again = client_and_engines.engine(client.endpoints.handshake, 0).connect()
    eventually(lambda: client.is_alive)
    answer_one(client, again)
    rest = list(itertools.islice(results, 1))
    assert all(isinstance(error, tszmq.EngineDead) for _, error in rest)
    results.close()
    assert waiting_for_a_place(client) == 0
    answer_one(client, again)


@pytest.mark.skipif(CHECKED, reason="checkers of a debug build swallow some of the signals")
def test_a_turn_survives_a_signal_at_the_end_of_the_batch(client_and_engines):
    """The second Ctrl-C, in the clean-up after the first."""
    client, [engine] = client_and_engines(max_inflight=1)
    with client.stream([1]) as holder:
        rid = engine.recv_add().rid

        def prepare():
            batch = tszmq.bulk._Batch(client, [[2]], None, None, None, "raise", False, eager=True)
            batch._fill()
            assert waiting_for_a_place(client) == 1
            kept = [batch]

            def verify():
                kept.clear()
                eventually(lambda: waiting_for_a_place(client) == 0)

            # Not the bound method: it would keep the batch.
            return lambda: kept[0].abort_rest(), verify

        assert interrupt_everywhere(prepare) >= 4
        engine.tokens(rid, [5], "stop")
        assert holder.result(PATIENCE).token_ids == [5]
    answer_one(client, engine)


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
    answer_after_aborts(client, engine)


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
    answer_after_aborts(client, engine)


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


BAD_BULK: dict[str, tuple[type[Exception], Any, dict[str, Any]]] = {
    "too few params": (tszmq.InvalidRequest, [[1], [2]], {"sampling_params": [SHORT]}),
    "params number": (TypeError, [[1]], {"sampling_params": 5}),
    "params text": (TypeError, [[1]], {"sampling_params": "12"}),
    "params item": (TypeError, [[1], [2]], {"sampling_params": [SHORT, 5]}),
    "prompts number": (TypeError, 5, {}),
    "prompts text": (TypeError, "12", {}),
    "prompts bytes": (TypeError, b"12", {}),
    "errors": (tszmq.InvalidRequest, [[1]], {"errors": "ignore"}),
    "max_inflight zero": (tszmq.InvalidRequest, [[1]], {"max_inflight": 0}),
    "max_inflight unprintable": (tszmq.InvalidRequest, [[1]], {"max_inflight": -(10**5000)}),
    "max_inflight bool": (TypeError, [[1]], {"max_inflight": True}),
    "timeout negative": (tszmq.InvalidRequest, [[1]], {"timeout": -1}),
    "timeout beyond floats": (tszmq.InvalidRequest, [[1]], {"timeout": -(10**400)}),
    "timeout unprintable": (tszmq.InvalidRequest, [[1]], {"timeout": -(10**5000)}),
    "timeout text": (TypeError, [[1]], {"timeout": "1"}),
    "timeout bool": (TypeError, [[1]], {"timeout": True}),
}


@pytest.mark.parametrize("kind", ["generate_many", "as_completed", "stream_many"])
def test_bulk_arguments_are_checked_at_the_call(client_and_engines, kind):
    """Not at the first next(): nothing is pulled, sent or kept."""
    client, [engine] = client_and_engines(max_inflight=1)
    for error, prompts, options in BAD_BULK.values():
        with pytest.raises(error) as caught:
            getattr(client, kind)(prompts, **options)
        assert caught.type is error
        assert len(str(caught.value)) < 300
    engine.expect_nothing()
    assert inflight(client) == [0]
    answer_one(client, engine)


class Refusing(Iterator):
    """Empty prompts, which are refused, and an error once too many of them were pulled."""

    def __init__(self):
        self.count = 0

    def __next__(self):
        self.count += 1
        assert self.count <= 50, "pulled on without handing out what had failed"
        return []


@pytest.mark.parametrize("kind", ["generate_many", "as_completed", "stream_many"])
def test_a_refused_prompt_is_told_before_the_next_is_pulled(client_and_engines, kind):
    """However many there are, and however long the next one takes."""
    client, [engine] = client_and_engines()
    prompts = Refusing()
    with pytest.raises(tszmq.InvalidRequest):
        list(getattr(client, kind)(prompts))
    assert prompts.count == 1
    engine.expect_nothing()


@pytest.mark.parametrize("kind", ["as_completed", "stream_many"])
def test_endless_refused_prompts_are_handed_out(client_and_engines, kind):
    """One by one: an error takes no place, so no bound would ever end the pulling."""
    client, [engine] = client_and_engines()
    prompts = Refusing()
    results = getattr(client, kind)(prompts, errors="return")
    for number, (index, error) in enumerate(itertools.islice(results, 20)):
        assert index == number
        assert isinstance(error, tszmq.InvalidRequest)
        assert prompts.count == number + 1
    results.close()
    engine.expect_nothing()


def test_the_first_error_says_which_prompt_it_is_about(client_and_engines):
    client, [engine] = client_and_engines(auto=True)
    for call in (client.generate_many, lambda *given: list(client.as_completed(*given))):
        with pytest.raises(TypeError) as caught:
            call([[1], "x", [2]])
        assert caught.value.__notes__ == ["this is about prompts[1] of the call"]
    for prompt in ([1, 2, 3], np.array([1, 2, 3])):  # where prompts should be
        with pytest.raises(TypeError) as caught:
            client.generate_many(prompt)
        assert any("a sequence of token ids" in note for note in caught.value.__notes__)
    eventually(lambda: engine.running == 0)


@pytest.mark.parametrize("error", [TypeError("theirs"), tszmq.InvalidRequest("theirs")], ids=repr)
def test_errors_of_the_callers_params_are_no_prompts(client_and_engines, error):
    """Nor are those of its prompts: both end the call."""
    client, [engine] = client_and_engines(auto=True)

    def broken(first):
        yield first
        raise error

    for given in ((iter([[1], [2], [3]]), broken(SHORT)), (broken([1]), SHORT)):
        with pytest.raises(type(error), match="theirs"):
            client.generate_many(*given, errors="return")
    with pytest.raises(tszmq.InvalidRequest, match=r"prompt 1 has no sampling_params"):
        client.generate_many(endless(), iter([SHORT]), errors="return")
    assert inflight(client) == [0]
    eventually(lambda: engine.running == 0)


def test_params_of_the_wrong_type_among_good_ones(client_and_engines):
    """Found out on the way: the error stands in its prompt's place, and only that one is kept
    from the engine."""
    client, [engine] = client_and_engines(auto=True)
    results = client.generate_many(iter([[1], [2], [3]]), iter([SHORT, 5, None]), errors="return")
    assert type(results[1]) is TypeError
    assert [len(results[n].token_ids) for n in (0, 2)] == [3, 16]
    assert [add.prompt for add in engine.served] == [[1], [3]]


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
    call = in_thread(client.generate_many, [[1], [2], [3]], timeout=1.5 * UNIT)
    adds = engine.recv_adds(3)
    engine.tokens(adds[0].rid, [10], "stop")
    engine.tokens(adds[1].rid, [20])
    with pytest.raises(tszmq.DeadlineExceeded):
        call.result(PATIENCE)
    assert 1.45 * UNIT <= time.monotonic() - started < PATIENCE
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
        timeout=1.5 * UNIT,
        errors="return",
        max_inflight=3,
    )
    adds = engine.recv_adds(3)
    engine.tokens(adds[0].rid, [10], "stop")
    adds.append(engine.recv_add())
    engine.tokens(adds[1].rid, [20, 21])
    results = call.result(PATIENCE)
    assert 1.45 * UNIT <= time.monotonic() - started < PATIENCE
    assert results[0].token_ids == [10]
    assert all(isinstance(result, tszmq.DeadlineExceeded) for result in results[1:])
    assert len(results) == 6
    assert partial_of(results[1]).token_ids == [20, 21]
    assert inflight(client) == [0]
    engine.recv_aborts_of(add.rid for add in adds[1:])
    engine.expect_nothing(0.1)


@pytest.mark.parametrize("slow", ["prompts", "params"])
@pytest.mark.parametrize("kind", ["generate_many", "as_completed", "stream_many"])
def test_batch_timeout_holds_while_an_iterator_is_slow(client_and_engines, kind, slow):
    """What runs is aborted in time, and what comes after the deadline is not sent."""
    client, [engine] = client_and_engines()
    leave = threading.Event()

    def each(item, is_slow):
        for _ in range(2):
            yield item
        if is_slow:
            assert leave.wait(PATIENCE)
        yield item

    def run():
        call = getattr(client, kind)
        items = call(
            each([1], slow == "prompts"),
            each(SHORT, slow == "params"),
            timeout=1.5 * UNIT,
            errors="return",
        )
        return items if kind == "generate_many" else list(items)

    started = time.monotonic()
    call = in_thread(run)
    engine.recv_aborts_of(add.rid for add in engine.recv_adds(2))
    assert time.monotonic() - started >= 1.45 * UNIT
    assert inflight(client) == [0]
    leave.set()
    results = call.result(PATIENCE)
    if kind != "generate_many":
        results = [error for _, error in sorted(results)]
    assert [type(error) for error in results] == [tszmq.DeadlineExceeded] * 3
    assert [error.partial is None for error in results] == [False, False, True]
    engine.expect_nothing()
    answer_one(client, engine)


@pytest.mark.parametrize("kind", ["as_completed", "stream_many"])
def test_batch_timeout_holds_while_nobody_asks(client_and_engines, kind):
    """The deadline is the requests', not that of whoever iterates."""
    client, [engine] = client_and_engines()
    results = getattr(client, kind)([[1], [2]], timeout=2 * UNIT)
    first = in_thread(next, results)
    adds = engine.recv_adds(2)
    engine.tokens(adds[0].rid, [10], "stop")
    assert first.result(PATIENCE)[0] == 0
    assert engine.recv_abort() == [adds[1].rid]
    eventually(lambda: inflight(client) == [0])
    with pytest.raises(tszmq.DeadlineExceeded):
        next(results)
    engine.expect_nothing()
    answer_one(client, engine)


BATCHES = ["generate_many", "as_completed", "stream_many"]


def one_by_one(client, engine, kind, prompts, timeout, **options):
    """How many items a batch has, and which errors, whose thread is slow: two requests are
    answered, and the deadline passes before another prompt is pulled."""
    started = []

    def timed():
        started.append(time.monotonic())  # the batch's clock runs by now
        yield from prompts

    def be_late(*_):
        eventually(lambda: inflight(client) == [0])
        eventually(lambda: time.monotonic() > started[0] + timeout, timeout + PATIENCE)

    def run():
        call = getattr(client, kind)
        if kind == "generate_many":  # its progress is the caller's code
            options["progress"] = lambda done, _: done and be_late()
            return call(timed(), SHORT, timeout=timeout, max_inflight=1, **options)
        items = []
        for _, item in call(timed(), SHORT, timeout=timeout, max_inflight=1, **options):
            items.append(item)
            be_late()
        return items

    batch = in_thread(run)
    for _ in range(2):
        engine.tokens(engine.recv_add().rid, [10], "stop")
    items = batch.result(timeout + PATIENCE)
    engine.expect_nothing()
    assert inflight(client) == [0]
    return len(items), [item for item in items if isinstance(item, Exception)]


@pytest.mark.parametrize("kind", BATCHES)
def test_batch_timeout_is_told_where_nobody_knows_how_many_prompts_there_are(
    client_and_engines, kind
):
    """Else a batch that the deadline cut short would look like a whole one."""
    client, [engine] = client_and_engines()
    prompts = Pulls([n + 1] for n in range(10))
    count, [error] = one_by_one(client, engine, kind, prompts, 2 * UNIT, errors="return")
    assert count >= 3
    assert type(error) is tszmq.DeadlineExceeded
    assert error.partial is None
    assert prompts.count == 3
    with pytest.raises(tszmq.DeadlineExceeded) as caught:
        one_by_one(client, engine, kind, endless(), 2 * UNIT)
    assert caught.value.__notes__ == ["this is about prompts[2] of the call"]
    answer_one(client, engine)


@pytest.mark.parametrize("kind", BATCHES)
def test_batch_timeout_that_was_told_asks_for_no_more_prompts(client_and_engines, kind):
    """Whoever makes them may wait for ever, such as for a result of this call."""
    client, [engine] = client_and_engines()
    prompts: queue.SimpleQueue[list[int] | None] = queue.SimpleQueue()
    prompts.put([1])

    def run():
        call = getattr(client, kind)
        pulled = iter(prompts.get, None)
        items = call(pulled, timeout=0.5 * UNIT, max_inflight=1, errors="return")
        return items if kind == "generate_many" else [item for _, item in items]

    batch = in_thread(run)
    engine.recv_add()
    [error] = batch.result(PATIENCE)
    assert type(error) is tszmq.DeadlineExceeded
    assert engine.recv_abort()


@pytest.mark.parametrize("kind", BATCHES)
def test_a_batch_that_is_whole_before_its_timeout_is_no_error(client_and_engines, kind):
    """Although its iterator is asked after that whether it is."""
    client, [engine] = client_and_engines()
    count, errors = one_by_one(client, engine, kind, Pulls([[1], [2]]), 2 * UNIT)
    assert count >= 2
    assert errors == []


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


@pytest.mark.parametrize("kind", BATCHES)
def test_abort_all_ends_what_a_bulk_call_has_not_sent(client_and_engines, kind):
    """Or a batch that is to be stopped would go on with its other prompts."""
    client, [engine] = client_and_engines()

    def run():
        items = getattr(client, kind)([[n + 1] for n in range(20)], max_inflight=2)
        if kind == "generate_many":
            return items
        return [item for _, item in sorted(items, key=lambda item: item[0])]

    call = in_thread(run)
    adds = engine.recv_adds(2)
    engine.tokens(adds[0].rid, [10])
    answer_one(client, engine)
    client.abort_all()
    results = call.result(PATIENCE)
    ends = [item for item in results if item.finish_reason is not None]
    assert [done.finish_reason for done in ends] == ["abort"] * 20
    assert sum(map(len, (item.token_ids for item in results))) == 1
    engine.recv_aborts_of(add.rid for add in adds)
    engine.expect_nothing()
    assert inflight(client) == [0]
    again = in_thread(client.generate_many, [[1]])  # later ones are not concerned
    engine.tokens(engine.recv_add().rid, [7], "stop")
    assert again.result(PATIENCE)[0].token_ids == [7]


def test_abort_all_of_a_batch_that_is_fed_spares_what_comes_later(client_and_engines):
    """Such as a worker's, whose requests are aborted while weights are updated."""
    client, [engine] = client_and_engines()
    feed = queue.SimpleQueue()
    for number in range(4):
        feed.put([number + 1])
    results = client.as_completed(iter(feed.get, None), SHORT, max_inflight=4)
    call = in_thread(lambda: dict(results))
    adds = engine.recv_adds(4)
    client.abort_all()
    engine.recv_aborts_of(add.rid for add in adds)
    for prompt in ([5], [6], None):
        feed.put(prompt)
    for add in engine.recv_adds(2):
        engine.tokens(add.rid, [7], "stop")
    reasons = [done.finish_reason for _, done in sorted(call.result(PATIENCE).items())]
    assert reasons == ["abort"] * 4 + ["stop"] * 2


@pytest.mark.parametrize("bound", [None, 1])
def test_abort_all_of_a_batch_without_end_is_told_as_it_goes(client_and_engines, bound):
    """Not after all prompts have been pulled, of which there is no last."""
    client, [engine] = client_and_engines(max_inflight=bound)
    results = client.as_completed(endless(), SHORT, max_inflight=4)
    first = in_thread(next, results)
    rid = engine.recv_add().rid
    engine.tokens(rid, [10], "stop")
    assert first.result(PATIENCE)[1].token_ids == [10]
    second = in_thread(next, results)
    eventually(lambda: inflight(client) == [bound or 4])
    client.abort_all()
    assert second.result(PATIENCE)[1].finish_reason == "abort"
    results.close()
    assert waiting_for_a_place(client) == 0
    assert inflight(client) == [0]


def test_params_of_an_iterator_without_end(client_and_engines):
    """As many are taken as there are prompts, whether these say how many they are or not."""
    client, _ = client_and_engines(auto=True)
    short, shorter = SamplingParams(max_tokens=2), SamplingParams(max_tokens=1)
    for prompts in ([[1], [2], [3]], iter([[1], [2], [3]])):
        results = client.generate_many(prompts, itertools.cycle([short, shorter]))
        assert [len(done.token_ids) for done in results] == [2, 1, 2]
    taken = iter([short] * 5)
    client.generate_many([[1], [2]], taken)
    assert len(list(taken)) == 3


class Reader(Sequence):
    """A prompt that is made when it is looked at, or not."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, _: object) -> int:
        raise ValueError("no such shard")


class Tensor:
    def tolist(self) -> list[int]:
        raise RuntimeError("no such device")


@pytest.mark.parametrize(("prompt", "kind"), [(Reader(), ValueError), (Tensor(), RuntimeError)])
def test_a_prompt_that_cannot_be_read_fails_alone(client_and_engines, prompt, kind):
    client, _ = client_and_engines(auto=True)
    first, bad, last = client.generate_many([[1], prompt, [2]], SHORT, errors="return")
    assert first.token_ids
    assert last.token_ids
    assert isinstance(bad, kind)
    with pytest.raises(kind, match="no such") as caught:
        client.generate_many([[1], prompt, [2]], SHORT)
    assert "prompts[1]" in caught.value.__notes__[0]


def test_prompts_of_every_kind_of_iterable(client_and_engines):
    client, _ = client_and_engines(auto=True)

    class Loader:
        def __iter__(self):
            return iter([[1], [2]])

        def __len__(self):
            raise TypeError("a stream has no length")

    class Old:
        def __getitem__(self, index):
            return [[1], [2]][index]

    for prompts in (Loader(), Old(), {(1,): 0, (2,): 0}, ([n + 1] for n in range(2))):
        assert len(client.generate_many(prompts, SHORT)) == 2


@pytest.mark.parametrize("kind", BATCHES)
def test_a_batch_of_nothing_on_a_closed_client(client_and_engines, kind):
    client, _ = client_and_engines()
    assert list(getattr(client, kind)([])) == []
    client.close()
    with pytest.raises(tszmq.ClientClosed):
        list(getattr(client, kind)([]))


def test_abort_all_ends_a_bulk_call_that_waits_for_a_place(client_and_engines):
    client, [engine] = client_and_engines(max_inflight=1)
    with client.stream([1]) as stream:
        rid = engine.recv_add().rid
        call = in_thread(client.generate_many, [[2], [3]])
        eventually(lambda: waiting_for_a_place(client) == 1)
        client.abort_all()
        assert [done.finish_reason for done in call.result(PATIENCE)] == ["abort", "abort"]
        assert stream.result(PATIENCE).finish_reason == "abort"
    assert engine.recv_abort() == [rid]
    assert waiting_for_a_place(client) == 0
    answer_one(client, engine)


def test_what_abort_all_ended_in_the_queue_keeps_no_turn(client_and_engines):
    """While the batch is in the caller's iterator, others get their places."""
    client, [engine] = client_and_engines(max_inflight=1)
    pulling, go_on = threading.Event(), threading.Event()

    def prompts():
        yield [2]
        pulling.set()
        assert go_on.wait(PATIENCE)

    with client.stream([1]) as stream:
        rid = engine.recv_add().rid
        call = in_thread(client.generate_many, prompts())
        eventually(lambda: waiting_for_a_place(client) == 1)
        client.abort_all()
        assert stream.result(PATIENCE).finish_reason == "abort"
    assert engine.recv_abort() == [rid]
    assert pulling.wait(PATIENCE)
    answer_one(client, engine)
    go_on.set()
    assert [done.finish_reason for done in call.result(PATIENCE)] == ["abort"]


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
            inner.append(client.generate([99], SHORT, timeout=PATIENCE).token_ids)

    results = client.generate_many([[n + 1] for n in range(10)], SHORT, progress=progress)
    assert len(results) == 10
    assert inner == [predicted([99], 3)]


def test_progress_is_shown_in_the_callers_thread_only(client_and_engines):
    """Not in one where the collector ends the iterator."""
    client, [engine] = client_and_engines()
    threads: list[str] = []

    def begin() -> Any:
        results = client.as_completed(
            [[1], [2]], progress=lambda *_: threads.append(threading.current_thread().name)
        )
        assert next(results)[0] == 0
        cycle: list[Any] = [results]
        cycle.append(cycle)
        return weakref.ref(results)

    beginning = in_thread(begin)
    adds = engine.recv_adds(2)
    engine.tokens(adds[0].rid, [5], "stop")
    results = beginning.result(PATIENCE)
    told = len(threads)
    eventually(lambda: gc.collect() >= 0 and results() is None)
    assert engine.recv_abort() == [adds[1].rid]
    assert len(threads) == told
    # Whoever closes it is told what there was.
    results = client.as_completed([[1], [2]], progress=lambda done, _: threads.append(f"{done}"))
    first = in_thread(next, results)
    adds = engine.recv_adds(2)
    engine.tokens(adds[0].rid, [5], "stop")
    first.result(PATIENCE)
    engine.tokens(adds[1].rid, [5], "stop")
    assert next(results)[0] == 1
    results.close()
    assert threads[-1] == "2"


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


class Millions:
    """More prompts than there is time to make an error for each, one by one."""

    def __len__(self) -> int:
        return 10**9

    def __iter__(self) -> Iterator[list[int]]:
        return itertools.repeat([1])


@pytest.mark.parametrize("how", ["the deadline", "close"])
def test_the_end_of_a_batch_does_not_wait_for_its_prompts(client_and_engines, how) -> None:
    """However many are left, each of which gets an error when it is asked for."""
    client, [engine] = client_and_engines()
    timeout = 0.3 * UNIT if how == "the deadline" else None
    results = client.as_completed(Millions(), max_inflight=1, timeout=timeout, errors="return")
    first = in_thread(next, results)
    engine.recv_add()
    if how == "close":
        client.close()
    outcomes = [
        first.result(PATIENCE)[1],
        *(outcome for _, outcome in itertools.islice(results, 3)),
    ]
    kind = tszmq.DeadlineExceeded if how == "the deadline" else tszmq.ClientClosed
    assert [type(outcome) for outcome in outcomes] == [kind] * 4
    results.close()
    with pytest.raises(kind):
        in_thread(client.generate_many, Millions(), max_inflight=1, timeout=timeout).result(
            PATIENCE
        )


class Prompt(list[int]):
    """One that can be seen to be kept."""


def test_errors_that_are_returned_keep_no_prompts(client_and_engines) -> None:
    """A traceback's frames would."""
    client, _ = client_and_engines()
    seen = []

    def prompts() -> Iterator[Prompt]:
        for _ in range(3):
            prompt = Prompt([-1])
            seen.append(weakref.ref(prompt))
            yield prompt

    errors = client.generate_many(prompts(), errors="return")
    assert [type(error) for error in errors] == [tszmq.InvalidRequest] * 3
    gc.collect()
    assert [ref() for ref in seen] == [None] * 3


def test_errors_that_are_returned_keep_no_client(client_and_engines) -> None:
    """Those of requests that were sent, too."""
    client, [engine] = client_and_engines()
    call = in_thread(client.generate_many, [[1]], errors="return")
    engine.tokens(engine.recv_add().rid, [], "abort")
    (error,) = call.result(PATIENCE)
    assert isinstance(error, tszmq.RequestRejected)
    assert error.__traceback__ is None


def test_an_error_in_the_callers_own_code_says_where(client_and_engines) -> None:
    client, _ = client_and_engines()

    class Broken:
        def __len__(self) -> int:
            raise ValueError("mine")

        def __iter__(self) -> Iterator[int]:
            raise ValueError("mine")

    (error,) = client.generate_many([Broken()], errors="return")
    assert isinstance(error, ValueError)
    assert error.__traceback__ is not None


def test_an_error_of_the_callers_iter_is_the_callers(client_and_engines) -> None:
    client, _ = client_and_engines()

    class Broken:
        def __iter__(self) -> Iterator[list[int]]:
            raise TypeError("mine")

    with pytest.raises(TypeError, match="mine"):
        client.generate_many(Broken())


def test_the_window_is_twice_what_the_engines_run():
    """TokenSpeed's register what their whole group runs, vLLM's each its own."""
    for protocol in ("tokenspeed", "vllm"):
        with tszmq.Client.embedded(2, protocol=protocol, max_num_seqs=3000) as client:
            assert tszmq.bulk._window(client, None) == 2 * 2 * 3000
