"""``Client.generate``: results, refusals, losses, deadlines, arguments, threads."""

from __future__ import annotations

import array
import asyncio
import math
import os
import pickle
import struct
import threading
import time
from typing import Any

import numpy as np
import pytest

import tszmq
from tests.client_fixtures import ClientAndEngines, answer_one, inflight, partial_of
from tests.mock_engine import (
    PATIENCE,
    UNIT,
    MockEngine,
    eventually,
    in_thread,
    predicted,
    predicted_logprob,
)
from tszmq import Client, SamplingParams

pytestmark = pytest.mark.timeout(30)

REFUSED = (tszmq.InvalidRequest, TypeError)


def bits(values):
    return [struct.pack("<d", value) for value in values]


# --- results -------------------------------------------------------------------------------


def test_generate_returns_all_tokens_and_what_the_engine_said(client_and_engines):
    """Several batches are joined; counts, label, engine and reason are in the result."""
    client, [engine] = client_and_engines()
    call = in_thread(
        client.generate, [1, 2, 3], SamplingParams(max_tokens=5), request_id="my label"
    )
    add = engine.recv_add()
    assert add.prompt == [1, 2, 3]
    assert add.sampling.max_new_tokens == 5
    engine.tokens(add.rid, [10], cached_tokens=2)
    engine.tokens(add.rid, [11, 12], cached_tokens=2)
    engine.tokens(add.rid, [13], "stop", cached_tokens=2)
    done = call.result(PATIENCE)
    assert done.token_ids == [10, 11, 12, 13]
    assert done.finish_reason == "stop"
    assert done.request_id == "my label"
    assert (done.prompt_tokens, done.completion_tokens, done.cached_tokens) == (3, 4, 2)
    assert done.engine_index == 0
    assert done.logprobs is None


def test_times_are_those_of_the_request(client_and_engines):
    """Seconds from sending to the first token and to the end; nothing waited for a place."""
    client, [engine] = client_and_engines()
    started = time.monotonic()
    call = in_thread(client.generate, [1])
    add = engine.recv_add()
    threading.Event().wait(0.1)
    engine.tokens(add.rid, [1])
    answer_one(client, engine)  # the client has read the first token now
    threading.Event().wait(0.1)
    engine.tokens(add.rid, [2], "stop")
    done = call.result(PATIENCE)
    took = time.monotonic() - started
    assert 0.09 <= done.first_token <= took
    assert done.first_token + 0.09 <= done.finished <= took
    assert 0 <= done.queued <= took - done.finished


def test_label_is_none_when_none_was_given(client_and_engines):
    """No label is made up."""
    client, [engine] = client_and_engines()
    assert answer_one(client, engine).request_id is None


@pytest.mark.parametrize(
    "label",
    ["x", "", "two words\n\0", "\u8bf7\u6c42-\U0001f642", "\ud800", "l" * 100_000],
    ids=["plain", "empty", "control", "unicode", "surrogate", "long"],
)
def test_any_text_is_a_label(client_and_engines, label):
    """A label is free text; the wire carries an id of the client's own."""
    client, [engine] = client_and_engines()
    call = in_thread(client.generate, [1], request_id=label)
    add = engine.recv_add()
    assert add.rid.isascii()
    assert add.rid != label
    assert 0 < len(add.rid) < 100
    engine.tokens(add.rid, [5], "stop")
    assert call.result(PATIENCE).request_id == label


def test_two_requests_with_one_label_both_finish(client_and_engines):
    """Labels need not be unique; wire ids are."""
    client, [engine] = client_and_engines()
    calls = [in_thread(client.generate, [n + 1], request_id="same") for n in range(2)]
    adds = engine.recv_adds(2)
    assert adds[0].rid != adds[1].rid
    for add in adds:
        engine.tokens(add.rid, [add.prompt[0] * 100], "stop")
    results = [call.result(PATIENCE) for call in calls]
    assert [done.token_ids for done in results] == [[100], [200]]
    assert {done.request_id for done in results} == {"same"}


def test_wire_ids_are_never_reused(client_and_engines):
    """Fixed length, ASCII, different for every request of every client."""
    rids = []
    for _ in range(2):
        client, [engine] = client_and_engines(auto=True)
        client.generate_many([[1]] * 200, SamplingParams(max_tokens=1))
        rids += [add.rid for add in engine.served]
    assert len(set(rids)) == len(rids) == 400
    assert len({len(rid) for rid in rids}) == 1
    assert all(rid.isascii() for rid in rids)


@pytest.mark.parametrize("reason", ["stop", "length", "repetition", "abort", "something-new"])
def test_finish_reasons_are_passed_on(client_and_engines, reason):
    """Any word of the engine's ends the request, "abort" with tokens included."""
    client, [engine] = client_and_engines()
    call = in_thread(client.generate, [1])
    engine.tokens(engine.recv_add().rid, [5, 6], reason)
    done = call.result(PATIENCE)
    assert done.token_ids == [5, 6]
    assert done.finish_reason == reason


def test_empty_last_row_ends_a_request(client_and_engines):
    """The finish may come without a token of its own."""
    client, [engine] = client_and_engines()
    call = in_thread(client.generate, [1])
    rid = engine.recv_add().rid
    engine.tokens(rid, [5, 6])
    engine.tokens(rid, [], "abort")
    done = call.result(PATIENCE)
    assert (done.token_ids, done.finish_reason) == ([5, 6], "abort")


def test_stop_without_tokens_is_an_empty_result(client_and_engines):
    """Only "abort" without tokens is a refusal."""
    client, [engine] = client_and_engines()
    call = in_thread(client.generate, [1])
    engine.tokens(engine.recv_add().rid, [], "stop")
    done = call.result(PATIENCE)
    assert (done.token_ids, done.finish_reason, done.first_token) == ([], "stop", None)


def test_one_batch_serves_many_requests(client_and_engines):
    """Rows are told apart by their ids, whatever their order."""
    client, [engine] = client_and_engines()
    calls = {n: in_thread(client.generate, [n]) for n in range(1, 9)}
    adds = engine.recv_adds(8)
    for step in range(3):
        rows = [
            engine.row(add.rid, [add.prompt[0] * 100 + step], "stop" if step == 2 else "")
            for add in (adds if step % 2 else reversed(adds))
        ]
        engine.send_batch(rows)
    for n, call in calls.items():
        assert call.result(PATIENCE).token_ids == [n * 100, n * 100 + 1, n * 100 + 2]


@pytest.mark.parametrize("width", [1, 14, 15, 16, 17, 255, 256, 300])
def test_batches_of_every_width(client_and_engines, width):
    """The widths at which the encoding of an array changes, with finishes inside a batch."""
    client, [engine] = client_and_engines()
    bulk = in_thread(client.generate_many, [[n + 1] for n in range(width)])
    adds = engine.recv_adds(width)
    for step in range(3):
        engine.send_batch([engine.row(add.rid, [add.prompt[0], step]) for add in adds])
    half = width // 2
    engine.send_batch([engine.row(add.rid, [7], "length") for add in adds[:half]])
    engine.send_batch([engine.row(add.rid, [8], "stop") for add in adds[half:]])
    results = bulk.result(PATIENCE)
    assert len(results) == width
    for n, done in enumerate(results):
        assert list(done.token_ids)[:-1] == [n + 1, 0, n + 1, 1, n + 1, 2]
    assert sorted(done.token_ids[-1] for done in results) == [7] * half + [8] * (width - half)


@pytest.mark.parametrize("ids", [[0, 127, 128, 255, 256, 65535, 65536, 2**31 - 1]])
def test_tokens_of_every_size(client_and_engines, ids):
    """Prompt and output keep their values at every encoded size."""
    client, [engine] = client_and_engines()
    call = in_thread(client.generate, ids)
    add = engine.recv_add()
    assert add.prompt == ids
    engine.tokens(add.rid, ids, "stop")
    assert call.result(PATIENCE).token_ids == ids


@pytest.mark.parametrize("era", [9, 10, 14])
def test_batches_of_older_engines(client_and_engines, era):
    """Batches without a load, or without an engine index, are read too."""
    client, [engine] = client_and_engines(engine={"era": era})
    answer_one(client, engine, [4, 5])


@pytest.mark.parametrize("extra", [[0], [{"a": 1}, None, b"bytes"], [None] * 20])
def test_batches_of_newer_engines(client_and_engines, extra):
    """Elements after the ones we know are skipped."""
    client, [engine] = client_and_engines()
    call = in_thread(client.generate, [1])
    row = engine.row(engine.recv_add().rid, [5], "stop")
    engine.send_batch([row], extra=extra)
    assert call.result(PATIENCE).token_ids == [5]


def test_rows_of_unknown_ids_are_noise(client_and_engines):
    """Ids that are nobody's, finished ones included, hurt nobody in their batch."""
    client, [engine] = client_and_engines()
    answer_one(client, engine)
    [old] = engine.requests
    call = in_thread(client.generate, [1])
    rid = engine.recv_add().rid
    engine.send_batch(
        [
            engine.row("nobody", [1, 2]),
            engine.row(rid, [5]),
            engine.row(old, [6], "stop"),
            engine.row("", [3], "length"),
        ]
    )
    engine.tokens(rid, [7], "stop")
    assert call.result(PATIENCE).token_ids == [5, 7]
    assert inflight(client) == [0]


def test_results_are_frozen_and_pickle(client_and_engines):
    """A Completion crosses process boundaries unchanged, and cannot be changed."""
    client, _ = client_and_engines(auto=True)
    done = client.generate([1, 2], SamplingParams(max_tokens=4, logprobs=True), request_id="a")
    again = pickle.loads(pickle.dumps(done))
    assert again == done
    assert again.token_ids == predicted([1, 2], 4)
    with pytest.raises(AttributeError):
        done.finish_reason = "other"


# --- log-probabilities ---------------------------------------------------------------------


def test_logprobs_come_beside_the_tokens(client_and_engines):
    """Asked for on the wire, and returned one a token."""
    client, [engine] = client_and_engines()
    call = in_thread(client.generate, [1], SamplingParams(logprobs=True))
    add = engine.recv_add()
    assert add.return_logprob
    engine.tokens(add.rid, [5, 6], logprobs=[-0.5, -0.25])
    engine.tokens(add.rid, [7], "stop", logprobs=[-0.0010000000474974513])
    done = call.result(PATIENCE)
    assert done.token_ids == [5, 6, 7]
    assert list(done.logprobs) == [-0.5, -0.25, -0.0010000000474974513]


def test_logprobs_are_not_asked_for_by_default(client_and_engines):
    """Engines without output log-probabilities refuse requests that ask for them."""
    client, [engine] = client_and_engines(auto=True)
    assert client.generate([1]).logprobs is None
    assert not engine.served[0].return_logprob


def test_odd_logprobs_are_kept_bit_for_bit(client_and_engines):
    """NaN (its payload too), infinities and minus zero are the engine's business."""
    odd_nan = struct.unpack("<d", bytes.fromhex("0100000000 00f8ff".replace(" ", "")))[0]
    values = [math.nan, -math.inf, math.inf, -0.0, 5e-324, odd_nan]
    client, [engine] = client_and_engines()
    call = in_thread(client.generate, [1], SamplingParams(logprobs=True))
    engine.tokens(engine.recv_add().rid, range(6), "stop", logprobs=values)
    assert bits(call.result(PATIENCE).logprobs) == bits(values)


def test_logprobs_of_some_requests_in_a_batch(client_and_engines):
    """Those that did not ask have none; the others' stay in their places."""
    client, _ = client_and_engines(auto=True, engine={"step_delay": 0.001})
    params = [SamplingParams(max_tokens=20, logprobs=n % 2 == 0) for n in range(10)]
    results = client.generate_many([[n + 1] for n in range(10)], params)
    for n, done in enumerate(results):
        assert done.token_ids == predicted([n + 1], 20)
        expected = [predicted_logprob(k) for k in range(20)] if n % 2 == 0 else None
        assert (done.logprobs and list(done.logprobs)) == expected


# --- refusals and losses -------------------------------------------------------------------


def test_refused_request_raises(client_and_engines):
    """An abort that the engine made up, without tokens, is an error and not an empty answer."""
    client, [engine] = client_and_engines()
    call = in_thread(client.generate, [1])
    engine.tokens(engine.recv_add().rid, [], "abort")
    with pytest.raises(tszmq.RequestRejected):
        call.result(PATIENCE)
    assert inflight(client) == [0]
    answer_one(client, engine)


def test_lost_tokens_raise_with_what_came(client_and_engines):
    """A row that counts more tokens than arrived: the result would have a hole."""
    client, [engine] = client_and_engines()
    call = in_thread(client.generate, [1], request_id="label")
    rid = engine.recv_add().rid
    engine.tokens(rid, [5, 6])
    engine.tokens(rid, [9], "stop", completion_tokens=7)
    with pytest.raises(tszmq.TokensLost) as caught:
        call.result(PATIENCE)
    partial = partial_of(caught.value)
    assert list(partial.token_ids)[:2] == [5, 6]
    assert partial.request_id == "label"
    assert inflight(client) == [0]
    answer_one(client, engine)


def test_lost_tokens_in_a_running_row_abort_the_request(client_and_engines):
    """The gap is noticed when it opens, and the engine need not go on."""
    client, [engine] = client_and_engines()
    call = in_thread(client.generate, [1])
    rid = engine.recv_add().rid
    engine.tokens(rid, [5])
    engine.tokens(rid, [9], completion_tokens=3)
    with pytest.raises(tszmq.TokensLost):
        call.result(PATIENCE)
    assert engine.recv_abort() == [rid]
    assert inflight(client) == [0]
    answer_one(client, engine)


def test_lost_tokens_hurt_only_their_request(client_and_engines):
    """The other rows of that batch are fine."""
    client, [engine] = client_and_engines()
    calls = [in_thread(client.generate, [n + 1]) for n in range(3)]
    adds = sorted(engine.recv_adds(3), key=lambda add: add.prompt)
    engine.send_batch(
        [
            engine.row(adds[0].rid, [5], "stop"),
            engine.row(adds[1].rid, [6], "stop", completion_tokens=2),
            engine.row(adds[2].rid, [7], "stop"),
        ]
    )
    assert calls[0].result(PATIENCE).token_ids == [5]
    with pytest.raises(tszmq.TokensLost):
        calls[1].result(PATIENCE)
    assert calls[2].result(PATIENCE).token_ids == [7]
    assert inflight(client) == [0]


# --- deadlines -----------------------------------------------------------------------------


def test_deadline_carries_what_came_and_aborts_once(client_and_engines):
    """``timeout`` is the request's: it is aborted, and its tokens are in the error."""
    client, [engine] = client_and_engines()
    started = time.monotonic()
    call = in_thread(client.generate, [1, 2], timeout=1.5 * UNIT, request_id="label")
    rid = engine.recv_add().rid
    engine.tokens(rid, [5, 6])
    with pytest.raises(tszmq.DeadlineExceeded) as caught:
        call.result(PATIENCE)
    assert 1.45 * UNIT <= time.monotonic() - started < PATIENCE
    assert isinstance(caught.value, TimeoutError)
    partial = partial_of(caught.value)
    assert partial.token_ids == [5, 6]
    assert partial.request_id == "label"
    assert partial.prompt_tokens == 2
    assert partial.finish_reason is None
    assert inflight(client) == [0]
    assert engine.recv_abort() == [rid]
    engine.expect_nothing(0.2)
    answer_one(client, engine)


def test_timeout_is_total_time_not_time_between_tokens(client_and_engines):
    """Tokens that keep coming do not extend it."""
    client, [engine] = client_and_engines(auto=True, engine={"step_delay": 0.05})
    started = time.monotonic()
    with pytest.raises(tszmq.DeadlineExceeded):
        client.generate([1], SamplingParams(max_tokens=1000), timeout=1.5 * UNIT)
    assert 1.45 * UNIT <= time.monotonic() - started < PATIENCE
    eventually(lambda: len(engine.aborts) == 1)


def test_finish_before_the_deadline_aborts_nothing(client_and_engines):
    """The deadline of a finished request means nothing."""
    client, [engine] = client_and_engines()
    call = in_thread(client.generate, [1], timeout=1.5 * UNIT)
    engine.tokens(engine.recv_add().rid, [5], "stop")
    assert call.result(PATIENCE).token_ids == [5]
    engine.expect_nothing(1.7 * UNIT)


def test_many_deadlines_each_in_its_time(client_and_engines):
    """They expire in their own order, not that of the requests."""
    client, [engine] = client_and_engines()
    longest = in_thread(client.generate, [1], timeout=10 * PATIENCE)
    rid = engine.recv_add().rid
    started = time.monotonic()

    def expire(timeout):
        with pytest.raises(tszmq.DeadlineExceeded):
            client.generate([1], timeout=timeout)
        return time.monotonic() - started

    timeouts = [1.6 * UNIT, 1.0 * UNIT, 1.4 * UNIT, 1.2 * UNIT]
    calls = [in_thread(expire, timeout) for timeout in timeouts]
    for timeout, call in zip(timeouts, calls, strict=True):
        assert timeout - 0.02 <= call.result(PATIENCE)
    adds = engine.recv_adds(4)
    engine.recv_aborts_of(add.rid for add in adds)
    engine.tokens(rid, [5], "stop")
    assert longest.result(PATIENCE).token_ids == [5]


def test_wall_clock_jumps_change_nothing(client_and_engines, monkeypatch):
    """Deadlines are monotonic time."""
    client, [engine] = client_and_engines()
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 3600)
    call = in_thread(client.generate, [1], timeout=PATIENCE)
    rid = engine.recv_add().rid
    monkeypatch.setattr(time, "time", lambda: real() - 3600)
    engine.tokens(rid, [5])
    engine.tokens(rid, [6], "stop")
    assert call.result(PATIENCE).token_ids == [5, 6]


@pytest.mark.parametrize("how", ["deadline", "abort"])
def test_unfinished_results_are_complete_to_the_last_step(client_and_engines, how):
    """Many steps of the same requests are the usual case, and may be stored late: whoever
    looks gets all of it, several tokens a step and log-probabilities included."""
    client, [engine] = client_and_engines()
    timeout = 1.5 * UNIT if how == "deadline" else None
    params = SamplingParams(logprobs=True)
    calls = [
        in_thread(client.generate, [1], timeout=timeout, request_id="label"),
        in_thread(client.generate, [2], params, timeout=timeout, request_id="label"),
        in_thread(client.stream([3], timeout=timeout, request_id="label").result),
        in_thread(client.generate_many, [[4]], errors="return", timeout=timeout),
    ]
    adds = sorted(engine.recv_adds(4), key=lambda add: add.prompt)
    for step in range(60):
        engine.send_batch(
            [
                engine.row(add.rid, [step, 7], logprobs=[-step, -7.0] if n == 1 else None)
                for n, add in enumerate(adds)
            ]
        )
    expected = [token for step in range(60) for token in (step, 7)]
    if how == "abort":
        answer_one(client, engine)
        client.abort_all()
        results = [call.result(PATIENCE) for call in calls[:3]] + calls[3].result(PATIENCE)
    else:
        results = [partial_of(call.exception(PATIENCE)) for call in calls[:3]]
        results += [partial_of(error) for error in calls[3].result(PATIENCE)]
    assert [list(done.token_ids) for done in results] == [expected] * 4
    assert list(results[1].logprobs) == [-float(token) for token in expected]
    engine.recv_aborts_of(add.rid for add in adds)


# --- arguments -----------------------------------------------------------------------------


BAD_PROMPTS: dict[str, Any] = {
    "empty": [],
    "empty array": np.array([], dtype=np.int64),
    "bool": [True, 2],
    "late bool": [1] * 1000 + [False],
    "float": [1.0],
    "text items": ["1"],
    "None item": [1, None],
    "nested": [[1, 2]],
    "str": "12",
    "bytes": b"12",
    "bytearray": bytearray(b"12"),
    "None": None,
    "number": 5,
    "mapping": {1: 2},
    "negative": [-1],
    "beyond int32": [1, 2**31],
    "beyond 64 bits": [2**64],
    "two dimensions": np.array([[1, 2], [3, 4]]),
    "zero dimensions": np.array(3),
    "float array": np.array([1.0, 2.0]),
    "bool array": np.array([True, False]),
    "object array": np.array([1, "x"], dtype=object),
    "negative array": array.array("i", [1, -2]),
    "float array.array": array.array("d", [1.0]),
    "longer than the model": [1] * 8191,
}

BAD_OPTIONS: dict[str, dict[str, Any]] = {
    "label float": {"request_id": 1.5},
    "label int": {"request_id": 7},
    "label bytes": {"request_id": b"x"},
    "params mapping": {"sampling_params": {"max_tokens": 3}},
    "params number": {"sampling_params": 5},
    "timeout text": {"timeout": "1"},
    "timeout negative": {"timeout": -1},
    "timeout nan": {"timeout": math.nan},
    "timeout bool": {"timeout": True},
    "rank negative": {"data_parallel_rank": -1},
    "rank bool": {"data_parallel_rank": False},
    "rank float": {"data_parallel_rank": 0.0},
    "rank text": {"data_parallel_rank": "0"},
    "rank of nobody": {"data_parallel_rank": 1},
    "priority": {"priority": 1},
    "top_logprobs": {"sampling_params": SamplingParams(logprobs=True, top_logprobs=2)},
    "prompt_logprobs": {"sampling_params": SamplingParams(prompt_logprobs=1)},
    "top_k too large": {"sampling_params": SamplingParams(top_k=128)},
    "unknown extra": {"sampling_params": SamplingParams(extra={"no_such_field": 1})},
    "n": {"sampling_params": SamplingParams(extra={"n": 2})},
    "deadly stream_interval": {"sampling_params": SamplingParams(extra={"stream_interval": 0})},
    "mistyped extra": {"sampling_params": SamplingParams(extra={"thinking_budget": "x"})},
}


@pytest.fixture(scope="module")
def shared_client():
    """One client for the many argument tests: none of them may leave a trace."""
    opened = ClientAndEngines()
    client, [engine] = opened()
    yield client, engine
    opened.close()


def check_no_trace(client: tszmq.Client, engine: MockEngine) -> None:
    assert inflight(client) == [0]
    answer_one(client, engine)  # its request is the next thing that the engine sees


CALLS = {
    "generate": lambda client, prompt: client.generate(prompt),
    "stream": lambda client, prompt: client.stream(prompt),
    "generate_many": lambda client, prompt: client.generate_many([prompt]),
    "as_completed": lambda client, prompt: list(client.as_completed([prompt])),
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
@pytest.mark.parametrize("call", CALLS)
def test_bad_prompts_are_refused_before_anything_is_sent(shared_client, call, name):
    """No byte, no reservation, and the next request works."""
    client, engine = shared_client
    with pytest.raises(REFUSED):
        CALLS[call](client, BAD_PROMPTS[name])
    check_no_trace(client, engine)


@pytest.mark.parametrize("name", BAD_OPTIONS)
@pytest.mark.parametrize("call", ["generate", "stream"])
def test_bad_options_are_refused_before_anything_is_sent(shared_client, call, name):
    """No byte, no reservation, and the next request works."""
    client, engine = shared_client
    with pytest.raises(REFUSED):
        getattr(client, call)([1, 2, 3], **BAD_OPTIONS[name])
    check_no_trace(client, engine)


class Unprintable:
    """Something whose text is an error."""

    def __repr__(self):
        raise ZeroDivisionError("no text")


ODD: dict[str, tuple[type[Exception], object, dict[str, Any]]] = {
    "priority float": (TypeError, [1], {"priority": 1.5}),
    "priority bool": (TypeError, [1], {"priority": True}),
    "priority text": (TypeError, [1], {"priority": "1"}),
    "priority unprintable": (TypeError, [1], {"priority": Unprintable()}),
    "rank of numpy's bool": (TypeError, [1], {"data_parallel_rank": np.bool_(False)}),
    "rank unprintable": (TypeError, [1], {"data_parallel_rank": Unprintable()}),
    "timeout beyond floats": (tszmq.InvalidRequest, [1], {"timeout": -(10**400)}),
    "timeout unprintable": (TypeError, [1], {"timeout": Unprintable()}),
    "iterator": (TypeError, iter([1, 2]), {}),
    "generator": (TypeError, (token for token in [1, 2]), {}),
    "set": (TypeError, {1, 2}, {}),
    "keys": (TypeError, {1: 2}.keys(), {}),
    "memoryview": (TypeError, memoryview(b"12"), {}),
    "class": (TypeError, list, {}),
    "unprintable item": (TypeError, [1, Unprintable()], {}),
    "array of one inside": (TypeError, [np.array([1])], {}),
    "beyond printing": (tszmq.InvalidRequest, [1, 10**5000], {}),
}


@pytest.mark.parametrize("call", ["generate", "stream"])
def test_odd_values_are_refused_as_what_they_are(shared_client, call):
    """The wrong type is a TypeError, a value out of range InvalidRequest; with a short text, and
    nothing sent."""
    client, engine = shared_client
    for name, (error, prompt, options) in ODD.items():
        with pytest.raises(error) as caught:
            getattr(client, call)(prompt, **options)
        assert caught.type is error, name
        assert len(str(caught.value)) < 300
    engine.expect_nothing()
    check_no_trace(client, engine)


class Label(str):
    """Text that cannot be compared."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other):
        raise ZeroDivisionError("compared")

    def __str__(self):
        raise ZeroDivisionError("converted")


def test_a_label_of_a_subclass_is_kept_as_its_text(client_and_engines):
    """Code of the caller's would run wherever labels are compared."""
    client, [engine] = client_and_engines()
    call = in_thread(client.generate, [1], request_id=Label("label"))
    add = engine.recv_add()
    client.abort("other")
    engine.tokens(add.rid, [5], "stop")
    label = call.result(PATIENCE).request_id
    assert type(label) is str
    assert label == "label"


def test_priority_is_an_unsupported_field(shared_client):
    """This wire has no priority: said, not dropped."""
    client, engine = shared_client
    with pytest.raises(tszmq.UnsupportedField, match="priority"):
        client.generate([1], priority=1)
    assert issubclass(tszmq.UnsupportedField, ValueError)
    check_no_trace(client, engine)


def test_refusals_say_what_is_wrong(shared_client):
    """The message names the value or its place."""
    client, _ = shared_client
    with pytest.raises(REFUSED, match="bool"):
        client.generate([5, True])
    with pytest.raises(REFUSED, match="2147483648"):
        client.generate([5, 2**31])
    with pytest.raises(REFUSED, match="8191"):
        client.generate([1] * 8191)


def test_the_longest_prompt_is_served(client_and_engines):
    """max_model_len - 2 tokens: the engine's own limit."""
    client, [engine] = client_and_engines(auto=True)
    assert client.generate([1] * 8190, SamplingParams(max_tokens=1)).completion_tokens == 1
    assert len(engine.served[0].prompt) == 8190


class FakeTensor:
    """What a one-dimensional torch tensor looks like from outside."""

    def __init__(self, values):
        self._values = values

    def tolist(self):
        return list(self._values)

    def __iter__(self):
        raise AssertionError("a tensor's items are tensors: tolist is what gives ints")


@pytest.mark.parametrize(
    "ids",
    [
        [3, 4, 5],
        (3, 4, 5),
        range(3, 6),
        array.array("i", [3, 4, 5]),
        array.array("I", [3, 4, 5]),
        array.array("q", [3, 4, 5]),
        np.array([3, 4, 5], dtype=np.int32),
        np.array([3, 4, 5], dtype=np.int64),
        np.array([3, 4, 5], dtype=np.uint8),
        np.array([3, 0, 4, 0, 5])[::2],
        [np.int64(3), np.int32(4), 5],
        FakeTensor([3, 4, 5]),
    ],
    ids=lambda ids: type(ids).__name__,
)
def test_array_likes_are_prompts(client_and_engines, ids):
    """All the same on the wire."""
    client, [engine] = client_and_engines(auto=True)
    done = client.generate(ids, SamplingParams(max_tokens=3))
    assert engine.served[0].prompt == [3, 4, 5]
    assert done.token_ids == predicted([3, 4, 5], 3)
    assert done.prompt_tokens == 3


def test_prompt_may_change_after_submission(client_and_engines):
    """The caller's list is copied, not kept."""
    client, [engine] = client_and_engines()
    prompt = list(range(1, 2001))
    with client.stream(prompt) as stream:
        prompt[:] = [0] * 5000
        add = engine.recv_add()
        assert add.prompt == list(range(1, 2001))
        engine.tokens(add.rid, [5], "stop")
        assert stream.result(PATIENCE).prompt_tokens == 2000


def test_sampling_params_arrive(client_and_engines):
    """Every neutral name in its place on the wire."""
    client, [engine] = client_and_engines(auto=True)
    client.generate(
        [1],
        SamplingParams(
            max_tokens=3,
            temperature=0.5,
            top_p=0.25,
            top_k=40,
            min_p=0.125,
            frequency_penalty=1.5,
            presence_penalty=-1.5,
            repetition_penalty=1.25,
            min_tokens=2,
            stop_token_ids=[31_999],
            seed=42,
            regex="[a-z]+",
            logit_bias={5: -100.0, 31_999: 1.5},
            extra={"thinking_budget": 64},
        ),
    )
    sent = engine.served[0].sampling
    assert sent.max_new_tokens == 3
    assert (sent.temperature, sent.top_p, sent.top_k, sent.min_p) == (0.5, 0.25, 40, 0.125)
    assert (sent.frequency_penalty, sent.presence_penalty) == (1.5, -1.5)
    assert (sent.repetition_penalty, sent.min_new_tokens) == (1.25, 2)
    assert (sent.stop_token_ids, sent.ignore_eos, sent.seed) == ([31_999], False, 42)
    assert (sent.regex, sent.json_schema, sent.n) == ("[a-z]+", None, 1)
    assert sent.logit_bias == {"5": -100.0, "31999": 1.5}
    assert sent.thinking_budget == 64
    client.generate([1], SamplingParams(max_tokens=3, ignore_eos=True))
    assert engine.served[1].sampling.ignore_eos is True


def test_default_params_generate_sixteen_tokens(client_and_engines):
    """No params are SamplingParams()."""
    client, _ = client_and_engines(auto=True)
    done = client.generate([1, 2])
    assert done.token_ids == predicted([1, 2], 16)
    assert done.finish_reason == "length"


def test_stop_token_is_part_of_the_output(client_and_engines):
    """As on the engine's wire."""
    client, _ = client_and_engines(auto=True)
    stop = predicted([1, 2], 5)[-1]
    done = client.generate([1, 2], SamplingParams(max_tokens=50, stop_token_ids=[stop]))
    assert done.token_ids == predicted([1, 2], 5)
    assert done.finish_reason == "stop"


# --- threads -------------------------------------------------------------------------------


def test_many_threads(client_and_engines):
    """64 threads, 20 requests each, over two engines: everybody gets their own tokens."""
    client, engines = client_and_engines(2, auto=True)

    def caller(number):
        for turn in range(20):
            prompt = [number, turn, number * turn + 1]
            count = 1 + (number + turn) % 60
            done = client.generate(prompt, SamplingParams(max_tokens=count), timeout=30)
            assert done.token_ids == predicted(prompt, count)
        return True

    calls = [in_thread(caller, number + 1) for number in range(64)]
    assert all(call.result(30) for call in calls)
    assert inflight(client) == [0, 0]
    assert sum(len(engine.served) for engine in engines) == 64 * 20


def test_thread_per_request(client_and_engines):
    """Short-lived threads leave nothing behind (no socket or descriptor each)."""
    client, _ = client_and_engines(auto=True)

    def one(number):
        return client.generate([number], SamplingParams(max_tokens=1), timeout=20)

    in_thread(one, 1).result(20)
    before = len(os.listdir("/proc/self/fd"))
    for start in range(0, 300, 20):
        calls = [in_thread(one, start + n + 1) for n in range(20)]
        for call in calls:
            call.result(20)
    assert len(os.listdir("/proc/self/fd")) <= before + 2


def test_inside_a_running_event_loop(client_and_engines):
    """No loop of ours: a notebook cell or a coroutine may call, and so may its threads."""
    client, _ = client_and_engines(auto=True)
    params = SamplingParams(max_tokens=5)

    async def main():
        direct = client.generate([1], params)
        with client.stream([2], params) as stream:
            streamed = [token for chunk in stream for token in chunk.token_ids]
        threaded = await asyncio.gather(
            *(asyncio.to_thread(client.generate, [n], params) for n in range(3, 9))
        )
        return direct, streamed, threaded

    direct, streamed, threaded = asyncio.run(main())
    assert direct.token_ids == predicted([1], 5)
    assert streamed == predicted([2], 5)
    assert [done.token_ids for done in threaded] == [predicted([n], 5) for n in range(3, 9)]


@pytest.mark.embedded
@pytest.mark.parametrize("how", ["generate", "stream", "generate_many"])
def test_prompt_logprobs_of_a_prompt_of_one_token(how: str) -> None:
    """Nothing predicts it, and the engine says nothing: as long as the prompt all the same."""
    params = SamplingParams(max_tokens=3, prompt_logprobs=1)
    with Client.embedded(1, protocol="vllm") as client:
        done = {
            "generate": lambda: client.generate([5], params),
            "stream": lambda: client.stream([5], params).result(),
            "generate_many": lambda: client.generate_many([[5]], params)[0],
        }[how]()
        assert done.prompt_logprobs == [None]
        assert len(done.token_ids) == 3
        assert client.generate([5], SamplingParams(max_tokens=3)).prompt_logprobs is None
        two = client.generate([5, 6], params).prompt_logprobs
        assert two is not None
        assert (two[0], len(two)) == (None, 2)
