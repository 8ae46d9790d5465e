"""Arguments beyond all sense: numbers that cannot be printed, prompts that fit no memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tszmq
from tests.client_fixtures import ClientAndEngines, answer_one, inflight
from tests.mock_engine import PATIENCE, in_thread
from tszmq import Client, SamplingParams
from tszmq.sim import Fleet

pytestmark = pytest.mark.timeout(30)

LOOPBACK = "tcp://127.0.0.1:*"
UNPRINTABLE = 10**5000  # str() refuses it, float() too
MODEL_LENGTH = 64
LONGEST_TEXT = 300


@pytest.fixture(scope="module")
def shared_client():
    """One client for all: none of these calls may leave a trace."""
    opened = ClientAndEngines()
    client, [engine] = opened(engine={"max_model_len": MODEL_LENGTH})
    yield client, engine
    opened.close()


def check_refused(call: Callable[[], object], error: type[Exception], text: str) -> None:
    """Exactly that error, and a text that fits on a screen."""
    with pytest.raises(error, match=text) as caught:
        call()
    assert caught.type is error
    assert len(str(caught.value)) < LONGEST_TEXT


# --- numbers of numpy ------------------------------------------------------------------------


def test_numbers_of_numpy_are_numbers(client_and_engines):
    """Whatever counts or times were computed with."""
    client, _ = client_and_engines(2, auto=True, max_inflight=np.int64(8))
    params = SamplingParams(max_tokens=np.int32(2), temperature=np.float32(0.5))
    one, number = np.int64(1), np.float64(PATIENCE)
    done = client.generate([1], params, data_parallel_rank=one, timeout=np.float32(PATIENCE))
    assert (done.engine_index, type(done.engine_index)) == (1, int)
    with client.stream([1], params, data_parallel_rank=np.uint8(0), timeout=number) as stream:
        assert stream.result(np.int16(PATIENCE)).engine_index == 0
    results = client.generate_many([[1], [2]], params, timeout=number, max_inflight=one)
    assert len(results) == 2
    assert client.inflight(one) == 0
    assert client.load(one) is not None
    with tszmq.Client.bind(LOOPBACK, engine_count=one, connect_timeout=np.float64(0)) as bound:
        check_refused(bound.connect, tszmq.HandshakeTimeout, "1 of 1")


@pytest.mark.parametrize("wrong", [np.float64(1), np.bool_(True), np.array([1]), "1", 1.0, True])
def test_what_is_no_int_is_no_rank_or_count(shared_client, wrong):
    client, _ = shared_client
    for call in (client.generate, client.stream):
        check_refused(
            lambda call=call: call([1], data_parallel_rank=wrong), TypeError, "int or None"
        )
    check_refused(lambda: client.generate_many([[1]], max_inflight=wrong), TypeError, "int or None")
    check_refused(lambda: client.load(wrong), TypeError, "engine_index must be an int")
    check_refused(lambda: tszmq.Client.bind(LOOPBACK, engine_count=wrong), TypeError, "an int")
    assert inflight(client) == [0]


# --- what changes after it was checked -------------------------------------------------------


@pytest.mark.parametrize(
    ("token", "bias", "error", "text"),
    [
        (5, math.nan, tszmq.InvalidRequest, "finite"),
        (5, "much", TypeError, "numbers"),
        ("x", 1.0, TypeError, "ints"),
        (-1, 1.0, tszmq.InvalidRequest, "got -1"),
    ],
)
def test_a_bias_is_checked_again_when_it_is_used(shared_client, token, bias, error, text):
    """The mapping in the parameters is a dict, which anybody can still change."""
    client, _ = shared_client
    params = SamplingParams(logit_bias={5: 1.0})
    params.logit_bias[token] = bias
    for call in (client.generate, client.stream):
        check_refused(lambda call=call: call([1], params), error, text)
    check_refused(lambda: list(client.generate_many([[1]], params)), error, text)
    assert inflight(client) == [0]


# --- numbers -------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [UNPRINTABLE, -UNPRINTABLE], ids=["huge", "hugely negative"])
@pytest.mark.parametrize("name", ["load", "inflight", "generate", "stream"])
def test_engines_that_cannot_be(shared_client, name, number):
    """Nobody has that index: said without printing it."""
    client, _ = shared_client
    calls: dict[str, Callable[[], object]] = {
        "load": lambda: client.load(number),
        "inflight": lambda: client.inflight(number),
        "generate": lambda: client.generate([1], data_parallel_rank=number),
        "stream": lambda: client.stream([1], data_parallel_rank=number),
    }
    check_refused(calls[name], tszmq.InvalidRank, "0")
    assert inflight(client) == [0]


@pytest.mark.parametrize("name", ["silence_timeout", "silence_warning", "send_timeout"])
def test_limits_that_never_come(name):
    """Not finite as a float: refused as infinity is."""
    options: dict[str, Any] = {name: UNPRINTABLE}
    check_refused(
        lambda: Client.bind(LOOPBACK, **options), tszmq.InvalidRequest, "positive and finite"
    )


def test_an_engine_that_reads_nothing_is_not_waited_for_for_ever():
    """None is "never" for the other limits, and would not be for this one."""
    options: dict[str, Any] = {"send_timeout": None}
    check_refused(lambda: Client.bind(LOOPBACK, **options), TypeError, "number of seconds, got")


@pytest.mark.parametrize(
    "name", ["engine_count", "max_message_bytes", "connect_timeout", "max_inflight"]
)
def test_bad_numbers_of_the_constructor(name):
    """Negative, and beyond printing."""
    options: dict[str, Any] = {name: -UNPRINTABLE}
    check_refused(lambda: Client.bind(LOOPBACK, **options), tszmq.InvalidRequest, name)


def test_options_that_are_no_numbers(shared_client):
    """Whatever was given is not printed whole, and not an error of its own."""
    client, _ = shared_client
    number: Any = UNPRINTABLE
    for name in ("eos_token_id", "model"):
        options = {name: number}
        check_refused(
            lambda options=options: Client.bind(LOOPBACK, **options), tszmq.UnsupportedField, name
        )
    check_refused(lambda: client.generate_many([[1]], progress=number), TypeError, "progress")
    for name in ("era", "kv_pages", "step_ms"):
        options = {name: -number}
        check_refused(
            lambda options=options: Fleet(**options), tszmq.InvalidRequest, f"{name} must be"
        )
    check_refused(lambda: Fleet(index=number), TypeError, "set by the fleet itself")


def test_calls_of_engines_that_cannot_be():
    """Each call of an engine's own methods can name one."""
    with Client.embedded(protocol="vllm") as client:
        for number in (UNPRINTABLE, -UNPRINTABLE):
            check_refused(
                lambda number=number: client.is_sleeping(engine_index=number),
                tszmq.InvalidRank,
                "the engines are: 0",
            )
        several: Any = [UNPRINTABLE]
        check_refused(lambda: client.is_sleeping(engine_index=several), TypeError, "engine_index")


def test_a_fleet_of_fewer_than_none():
    check_refused(lambda: Fleet(-UNPRINTABLE), tszmq.InvalidRequest, "number of engines must be in")


def test_timeouts_beyond_all_floats_are_for_ever(client_and_engines):
    """As infinity is."""
    bound = client_and_engines.bind(LOOPBACK, connect_timeout=UNPRINTABLE)
    call = in_thread(bound.connect)
    engine = client_and_engines.engine(bound.endpoints.handshake).connect()
    client = call.result(PATIENCE)
    with client.stream([1], timeout=UNPRINTABLE) as stream:
        engine.tokens(engine.recv_add().rid, [5], "stop")
        assert stream.result(timeout=UNPRINTABLE).token_ids == [5]
    client.close(timeout=UNPRINTABLE)


# --- prompts -------------------------------------------------------------------------------


class Endless:
    """Says that it is short, and is not."""

    def __init__(self, bound: int) -> None:
        self.taken = 0
        self._bound = bound

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Endless:
        return self

    def __next__(self) -> int:
        self.taken += 1
        assert self.taken <= self._bound, "more was taken than any engine takes"
        return 1


class HugeTensor:
    """Shows its length, and must not be made into a list."""

    def __len__(self) -> int:
        return 10**12

    def tolist(self) -> list[int]:
        raise AssertionError("it was copied before its length was looked at")


CALLS: dict[str, Callable[[Client, Any], object]] = {
    "generate": lambda client, prompt: client.generate(prompt),
    "stream": lambda client, prompt: client.stream(prompt),
    "generate_many": lambda client, prompt: client.generate_many([prompt]),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("prompt", "length"),
    [
        (range(10**12), "1000000000000"),
        (range(10**30), "more than"),
        (np.broadcast_to(np.int64(1), 10**12), "1000000000000"),
        (HugeTensor(), "1000000000000"),
        ([1] * (MODEL_LENGTH + 1), str(MODEL_LENGTH + 1)),
    ],
    ids=["range", "range beyond len()", "array", "tensor", "list"],
)
def test_prompts_that_fit_no_memory(shared_client, call, prompt, length):
    """Their length is said against the limit, before any of it is copied."""
    client, engine = shared_client
    text = f"at most {MODEL_LENGTH}, got {length}"
    check_refused(lambda: CALLS[call](client, prompt), tszmq.InvalidRequest, text)
    answer_one(client, engine)


def test_a_prompt_that_never_ends(shared_client):
    """No more of it is taken than one token beyond the limit."""
    client, _ = shared_client
    prompt = Endless(MODEL_LENGTH + 1)
    text = f"at most {MODEL_LENGTH}, got {MODEL_LENGTH + 1}"
    check_refused(lambda: client.generate(prompt), tszmq.InvalidRequest, text)


def test_an_array_of_few_rows_and_many_items(shared_client):
    client, _ = shared_client
    prompt = np.broadcast_to(np.int64(1), (1, 10**12))
    check_refused(lambda: client.generate(prompt), TypeError, "one-dimensional, got 2 dimensions")


@pytest.mark.parametrize(("said", "limit"), [(0, 2**24), (2**63, 2**31 - 1)])
def test_engines_that_state_no_length_or_any(client_and_engines, said, limit):
    """There is a bound all the same."""
    client, _ = client_and_engines(engine={"max_model_len": said})
    with pytest.raises(tszmq.InvalidRequest, match=f"at most {limit}, got 1000000000000"):
        client.generate(range(10**12))


def test_stop_tokens_that_fit_no_memory():
    check_refused(
        lambda: SamplingParams(stop_token_ids=range(10**12)),  # type: ignore[arg-type]
        tszmq.InvalidRequest,
        "the length of stop_token_ids must be at most",
    )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"parallel_config": 1}, "parallel_config must be a mapping, got 1"),
        ({"parallel_config": []}, r"parallel_config must be a mapping, got \[\]"),
        ({"protocol": "vllm", "model": 1}, "model must be a path, got 1"),
    ],
)
def test_options_of_a_wrong_type_are_named(options: dict[str, Any], text: str) -> None:
    check_refused(lambda: Client.bind(LOOPBACK, **options), TypeError, text)
