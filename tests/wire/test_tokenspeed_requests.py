"""TokenSpeed: what we send, judged by captured messages and by a model of the engine's side."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.wire.tokenspeed_vectors import (
    REQUEST,
    SAMPLING,
    VECTORS,
    VOCAB,
    Dropped,
    deadly,
    engine_view,
    frames,
    vector,
    vectors,
)
from tszmq.codec import unpack
from tszmq.errors import InvalidRequest, UnsupportedField
from tszmq.types import EngineInfo, SamplingParams, token_id_list
from tszmq.wire.base import AddRequest
from tszmq.wire.tokenspeed import TokenSpeed

PROTOCOL = TokenSpeed()
REQUESTS = vectors("TokenizedGenerateReqInput")


def engine(**changes: Any) -> EngineInfo:
    values: dict[str, Any] = {
        "engine_index": 0,
        "alive": True,
        "max_model_len": 131072,
        "num_gpu_blocks": 6661,
        "block_size": 64,
        "dtype": "bfloat16",
        "engine_version": "tokenspeed-0.1.1",
        **changes,
    }
    return EngineInfo(**values)


def add(
    params: SamplingParams, ids: list[int], rid: str = "req-1", stream: bool = True
) -> list[bytes]:
    return PROTOCOL.encode_add(AddRequest(rid, ids, params, stream, None, engine()))


def sampling(frames: list[bytes]) -> dict[str, Any]:
    fields: dict[str, Any] = engine_view(frames)[0]["sampling_params"]
    return fields


def check(params: SamplingParams, ids: list[int] | None = None, **changes: Any) -> None:
    PROTOCOL.check(ids or [1, 2, 3], params, None, engine(**changes))


# -- the model of the engine, against every captured request ------------------------------


def test_every_kind_of_captured_message_has_a_test() -> None:
    here = {"TokenizedGenerateReqInput", "abort", "malformed"}
    startup = {
        "identity",
        "WireReadyMessage",
        "WireEngineCoreReadyResponse",
        "WireHandshakeInitMessage",
    }
    outputs = {"BatchTokenIDOutSlim", "ENGINE_CORE_DEAD"}
    assert {vector["message"] for vector in VECTORS} == here | startup | outputs
    assert len(VECTORS) == 77


def same_refusal(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    return (ours.pop("validation_error") is None) == (theirs.pop("validation_error") is None)


@pytest.mark.parametrize("vector", REQUESTS, ids=lambda vector: vector["name"])
def test_the_model_sees_what_the_engine_saw(vector: dict[str, Any]) -> None:
    (ours,) = engine_view(frames(vector))
    (theirs,) = (dict(seen) for seen in vector["engine_sees"])
    # A refused request stays as it came from the first failing gate on.
    assert same_refusal(ours, theirs)
    if vector["name"] == "request-every-sampling-field-invalid":
        assert ours["sampling_params"].pop("stop_strs") == ["</s>", "STOP"]
        theirs["sampling_params"] = dict(theirs["sampling_params"])
        theirs["sampling_params"].pop("stop_strs")
    assert ours == theirs


# The engine refuses INITs as well; those have their tests beside the start-up messages.
MALFORMED = [vector for vector in vectors("malformed") if "init" not in vector["name"]]


@pytest.mark.parametrize("vector", MALFORMED, ids=lambda vector: vector["name"])
def test_the_model_drops_what_the_engine_dropped(vector: dict[str, Any]) -> None:
    assert set(vector["engine_sees"]) == {"dropped"}
    with pytest.raises(Dropped):
        engine_view(frames(vector))


# -- captured requests that our names can say ---------------------------------------------

SAID: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "request-full-defaults": ({"max_tokens": 8}, {}),
    "request-prefix-11": ({"max_tokens": 8}, {}),
    "request-unknown-trailing": ({"max_tokens": 8}, {}),
    "request-prefix-6": ({"max_tokens": 8}, {"stream": False}),
    "request-full-normalized": (
        {
            "max_tokens": 8,
            "stop_token_ids": [2],
            "temperature": 0.5,
            "top_p": 0.9,
            "seed": 42,
            "logprobs": True,
        },
        {"rid": "vec-1"},
    ),
    "request-short-sampling": ({"max_tokens": 8, "stop_token_ids": (2,)}, {}),
    "request-empty-sampling": ({"max_tokens": None}, {}),
    "request-integers-for-floats": (
        {"max_tokens": 8, "temperature": 1, "top_p": 1, "min_p": 0, "repetition_penalty": 1},
        {},
    ),
    "request-greedy-unnormalized": ({"max_tokens": 8, "temperature": 0}, {}),
    "request-unicode-rid": (
        {"max_tokens": 2},
        {"rid": "请求-🙂-Ω", "ids": [1], "stream": False},
    ),
    "request-long-prompt": (
        {"max_tokens": 2},
        {"rid": "long", "ids": [0] * 70000, "stream": False},
    ),
}


@pytest.mark.parametrize("name", SAID)
def test_our_request_is_seen_as_the_captured_one(name: str) -> None:
    params, how = SAID[name]
    sent = add(SamplingParams(**params), **{"ids": [1, 2, 3], **how})
    assert engine_view(sent) == vector(name)["engine_sees"]


def test_every_sampling_field_arrives_where_the_captured_request_has_it() -> None:
    wanted = dict(vector("request-every-sampling-field")["engine_sees"][0]["sampling_params"])
    extra = ("skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "stop",
             "thinking_budget", "custom_params", "stream_interval")  # fmt: skip
    params = SamplingParams(
        max_tokens=100,
        stop_token_ids=[65536, 2, 128, 2],
        temperature=0.25,
        top_p=0.5,
        top_k=40,
        min_p=0.125,
        frequency_penalty=1.5,
        presence_penalty=-1.5,
        repetition_penalty=1.25,
        min_tokens=4,
        json_schema='{"type":"object"}',
        ignore_eos=True,
        logit_bias={5: -100, 31999: 1.5},
        seed=12345678901,
        extra={name: wanted[name] for name in extra},
    )
    # Two things differ: our names allow one grammar, and the wire's logprobs=0 is its None.
    wanted.update(structural_tag=None, logprobs=None)
    assert sampling(add(params, [7, 8])) == wanted


@pytest.mark.parametrize("name", ["json_schema", "regex", "ebnf", "structural_tag"])
def test_each_grammar_has_its_own_place(name: str) -> None:
    only: dict[str, Any] = {name: "g"}
    seen = sampling(add(SamplingParams(**only), [1]))
    names = ("json_schema", "regex", "ebnf", "structural_tag")
    assert {name: seen[name] for name in names if seen[name] is not None} == only


def test_request_fields_beyond_the_eleventh_lengthen_the_array() -> None:
    wanted = vector("request-every-field")["engine_sees"][0]
    names = ("input_text", "custom_logit_processor", "created_time", "bootstrap_host",
             "bootstrap_port", "bootstrap_room")  # fmt: skip
    for chosen in (names, names[::-1], names[:1], names[2:3]):
        extra = {name: wanted[name] for name in chosen}
        params = SamplingParams(extra=extra)
        check(params)
        (seen,) = engine_view(add(params, [1]))
        assert {name: seen[name] for name in chosen} == extra
        assert seen["return_hidden_states"] is False
        assert seen["stream"] is True


def test_a_plain_request_has_eleven_elements() -> None:
    assert len(unpack(add(SamplingParams(), [1])[1])) == 11


# Captured requests that the neutral names cannot say, and what says no.
UNSAYABLE: dict[str, dict[str, Any]] = {
    "request-every-sampling-field-invalid": {"json_schema": "{}", "regex": "[a-z]+"},
    "request-every-field": {"extra": {"return_hidden_states": True}},
    "request-data-parallel-rank": {"extra": {"data_parallel_rank": 3}},
    "request-greedy-normalized": {"extra": {"is_normalized": True}},
    "request-refused-top-p": {"top_p": 0.0},
    "request-refused-prompt-logprobs": {"logprobs": True, "prompt_logprobs": 0},
}


@pytest.mark.parametrize("name", UNSAYABLE)
def test_what_cannot_be_said_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest):
        check(SamplingParams(**UNSAYABLE[name]))


def test_every_captured_request_is_said_or_refused() -> None:
    said = set(SAID) | {"request-every-sampling-field"}
    assert said | set(UNSAYABLE) == {vector["name"] for vector in REQUESTS}


# -- aborts -------------------------------------------------------------------------------


@pytest.mark.parametrize("vector", vectors("abort"), ids=lambda vector: vector["name"])
def test_aborts_are_the_captured_bytes(vector: dict[str, Any]) -> None:
    sent = PROTOCOL.encode_abort(vector["fields"]["rids"])
    assert sent == frames(vector)
    assert engine_view(sent) == vector["engine_sees"]


# -- what is lost, refused or deadly is refused here --------------------------------------

# Each malformed message, and what keeps a caller from sending it. The rest is in the encoder's
# hands: see the property test below.
KEPT_OUT = {
    "malformed-float-token": lambda: token_id_list([1, 2.0]),
    "malformed-float-max-new-tokens": lambda: SamplingParams(max_tokens=8.0),  # type: ignore[arg-type]
    "malformed-bool-int": lambda: SamplingParams(max_tokens=True),
    "malformed-int-bool": lambda: SamplingParams(logprobs=1),  # type: ignore[arg-type]
    "malformed-nil-bool": lambda: SamplingParams(ignore_eos=None),  # type: ignore[arg-type]
    "malformed-nil-temperature": lambda: SamplingParams(temperature=None),  # type: ignore[arg-type]
    "malformed-logit-bias-int-keys": lambda: SamplingParams(logit_bias={"5": 1.0}),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("name", KEPT_OUT)
def test_wrong_types_never_reach_the_wire(name: str) -> None:
    assert name in {vector["name"] for vector in MALFORMED}
    with pytest.raises((TypeError, InvalidRequest)):
        KEPT_OUT[name]()


def test_integer_keys_of_logit_bias_are_sent_as_text() -> None:
    sent = add(SamplingParams(logit_bias={5: 1}), [1])
    assert unpack(sent[1])[5][22] == {"5": 1.0}


numbers = st.floats(0, 1) | st.integers(0, 1)
penalties = st.floats(-2, 2) | st.integers(-2, 2)
grammar = st.sampled_from(["json_schema", "regex", "ebnf", "structural_tag", None])


texts = st.text(max_size=3)
optional_texts = st.none() | texts
plain_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)
GOOD_EXTRA: dict[str, st.SearchStrategy[Any]] = {
    "stop": st.none() | st.text(min_size=1) | st.lists(st.text(min_size=1), max_size=2),
    "skip_special_tokens": st.booleans(),
    "spaces_between_special_tokens": st.booleans(),
    "no_stop_trim": st.booleans(),
    "thinking_budget": st.none() | st.integers(0, 2**31),
    "custom_params": st.none() | st.dictionaries(texts, plain_values, max_size=2),
    "stream_interval": st.none() | st.integers(1, 99),
    "n": st.just(1),
    "input_text": optional_texts,
    "custom_logit_processor": optional_texts,
    "created_time": st.floats(allow_nan=False, allow_infinity=False),
    "bootstrap_host": optional_texts,
    "bootstrap_port": st.none() | st.integers(0, 65535),
    "bootstrap_room": st.none() | st.integers(0, 2**63 - 1),
}
anything = (
    plain_values | st.binary(max_size=3) | st.integers() | st.dictionaries(st.integers(), texts)
)
ANY_EXTRA = dict.fromkeys(GOOD_EXTRA, anything)


@st.composite
def neutral(draw: st.DrawFn, extra: dict[str, st.SearchStrategy[Any]]) -> SamplingParams:
    """Any parameters that ``SamplingParams`` itself allows and this wire might."""
    budget = draw(st.none() | st.integers(1, 2**31 - 1))
    values: dict[str, Any] = {
        "max_tokens": budget,
        "min_tokens": draw(st.integers(0, 2**31 - 1 if budget is None else budget)),
        "temperature": draw(st.floats(0, 1e300) | st.integers(0, 3) | st.just(1e-7)),
        "top_p": draw(st.floats(0, 1, exclude_min=True) | st.just(1)),
        "top_k": draw(st.just(-1) | st.integers(1, 200)),
        "min_p": draw(numbers),
        "frequency_penalty": draw(penalties),
        "presence_penalty": draw(penalties),
        "repetition_penalty": draw(st.floats(0, 2, exclude_min=True) | st.just(2)),
        "stop_token_ids": draw(st.lists(st.integers(0, 2**31 - 1), max_size=4)),
        "ignore_eos": draw(st.booleans()),
        "seed": draw(st.none() | st.integers(0, 2**63 - 1)),
        "logprobs": draw(st.booleans()),
        "logit_bias": draw(
            st.none() | st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-9, 9), max_size=3)
        ),
        "extra": draw(st.fixed_dictionaries({}, optional=extra)),
    }
    named = draw(grammar)
    if named is not None:
        values[named] = draw(texts.filter(lambda text: "\0" not in text))
    return SamplingParams(**values)


prompts = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6)


@given(neutral(GOOD_EXTRA), prompts, st.booleans())
def test_the_engine_serves_what_check_passes(
    params: SamplingParams, ids: list[int], stream: bool
) -> None:
    limit = 8
    ignored_stops = params.ignore_eos and params.stop_token_ids
    if (params.top_k >= 128 and params.temperature >= 1e-6) or ignored_stops:
        with pytest.raises(InvalidRequest):
            check(params, ids, max_model_len=limit)
        return
    check(params, ids, max_model_len=limit)
    (seen,) = engine_view(add(params, ids, stream=stream))  # raises Dropped if it is lost
    assert seen["validation_error"] is None
    assert deadly(seen, limit) is None
    assert (seen["input_ids"], seen["stream"]) == (ids, stream)
    assert seen["return_logprob"] is params.logprobs
    assert seen["sampling_params"]["stop_token_ids"] == (sorted(set(params.stop_token_ids)) or None)
    for name, value in params.extra.items():
        if name != "custom_params":  # may hold NaN
            assert seen["sampling_params"].get(name, seen.get(name)) == value


@given(neutral(ANY_EXTRA), prompts, st.booleans())
def test_whatever_is_in_extra_is_refused_or_served(
    params: SamplingParams, ids: list[int], stream: bool
) -> None:
    try:
        check(params, ids)
    except InvalidRequest:
        return
    (seen,) = engine_view(add(params, ids, stream=stream))
    assert seen["validation_error"] is None
    assert deadly(seen, 131072) is None


# -- check, one thing at a time -----------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "sizes", "passes"),
    [
        (98, {"max_model_len": 100}, True),
        (99, {"max_model_len": 100}, False),
        (97, {"max_model_len": 100, "kv_cache_size_tokens": 100}, True),
        (98, {"max_model_len": 100, "kv_cache_size_tokens": 100}, False),
        (98, {"max_model_len": 100, "kv_cache_size_tokens": 101}, True),
        (47, {"max_model_len": 100, "kv_cache_size_tokens": 50}, True),
        (48, {"max_model_len": 100, "kv_cache_size_tokens": 50}, False),
        (5000, {"max_model_len": 0}, True),
        (5000, {"max_model_len": 0, "kv_cache_size_tokens": 0}, True),
        (5000, {"max_model_len": 0, "kv_cache_size_tokens": 1000}, False),
    ],
)
def test_a_prompt_must_leave_a_budget(length: int, sizes: dict[str, int], passes: bool) -> None:
    if passes:
        check(SamplingParams(), [1] * length, **sizes)
        return
    with pytest.raises(InvalidRequest, match=f"{length} tokens.*shorten"):
        check(SamplingParams(), [1] * length, **sizes)


def test_more_tokens_than_fit_are_the_engines_to_clamp() -> None:
    check(SamplingParams(max_tokens=10**9), [1] * 98, max_model_len=100)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="must not be empty"):
        PROTOCOL.check([], SamplingParams(), None, engine())


@pytest.mark.parametrize("priority", [0, -5])
def test_priority_is_not_on_this_wire(priority: int) -> None:
    with pytest.raises(UnsupportedField, match="priority"):
        PROTOCOL.check([1], SamplingParams(), priority, engine())


@pytest.mark.parametrize("params", [{"top_logprobs": 1}, {"prompt_logprobs": 0}])
def test_logprobs_that_the_wire_cannot_carry(params: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedField, match=next(iter(params))):
        check(SamplingParams(**params))


@pytest.mark.parametrize("top_k", [128, 2**30])
def test_top_k_at_the_kernels_limit_is_refused(top_k: int) -> None:
    check(SamplingParams(top_k=127))
    with pytest.raises(InvalidRequest, match=f"below 128.*{top_k}.*-1"):
        check(SamplingParams(top_k=top_k))
    greedy = SamplingParams(top_k=top_k, temperature=0)  # takes the most likely one
    check(greedy)
    assert sampling(add(greedy, [1]))["top_k"] == 1


def test_stop_tokens_that_would_be_ignored_are_refused() -> None:
    check(SamplingParams(ignore_eos=True))
    check(SamplingParams(ignore_eos=True, extra={"stop": "</s>"}))
    with pytest.raises(InvalidRequest, match="ignore_eos=True"):
        check(SamplingParams(ignore_eos=True, stop_token_ids=[2]))


def test_greedy_pins_the_seed_whatever_was_asked() -> None:
    assert sampling(add(SamplingParams(temperature=0, seed=7, top_k=50), [1]))["seed"] == 0
    seen = sampling(add(SamplingParams(temperature=1e-9), [1]))
    assert (seen["temperature"], seen["top_k"], seen["seed"]) == (1.0, 1, 0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2),
        ("n", True),
        ("stream_interval", 0),
        ("stream_interval", -1),
        ("stream_interval", True),
        ("stream_interval", 2.0),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [1]),
        ("stop", b"a"),
        ("stop", "\ud800"),
        ("skip_special_tokens", None),
        ("no_stop_trim", 1),
        ("thinking_budget", 2**63),
        ("custom_params", {1: 2}),
        ("custom_params", [1]),
        ("custom_params", {"a": 2**64}),
        ("custom_params", {"a": object()}),
        ("created_time", 1),
        ("created_time", math.nan),
        ("bootstrap_port", 65536),
        ("bootstrap_host", 1),
        ("input_text", b"x"),
    ],
)
def test_extra_values_are_typed_strictly(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"'{name}' must be .*got"):
        check(SamplingParams(extra={name: value}))


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("max_new_tokens", "max_tokens"),
        ("min_new_tokens", "min_tokens"),
        ("return_logprob", "logprobs=True"),
        ("temperature", "temperature="),
        ("logit_bias", "logit_bias="),
        ("stop_strs", "'stop'"),
        ("data_parallel_rank", "data_parallel_rank="),
        ("input_embeds", "prompt_token_ids"),
        ("validation_error", "engine"),
        ("session_params", "sessions"),
    ],
)
def test_names_with_a_better_place_say_which(name: str, instead: str) -> None:
    with pytest.raises(UnsupportedField, match=instead):
        check(SamplingParams(extra={name: 1}))


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(UnsupportedField, match=r"'top_n'.*known: .*stream_interval"):
        check(SamplingParams(extra={"top_n": 1}))


def test_every_field_of_the_wire_is_known_one_way_or_the_other() -> None:
    for name in {**REQUEST, **SAMPLING}:
        if name == "sampling_params":
            continue
        with pytest.raises(InvalidRequest) as caught:
            check(SamplingParams(extra={name: object()}))
        assert "is not in TokenSpeed's requests" not in str(caught.value), name


def test_the_protocol_reads_registrations_and_makes_decoders() -> None:
    registered = PROTOCOL.read_registration(3, frames(vector("registration-ready-response")))
    assert (registered.engine_index, registered.max_model_len) == (3, 131072)
    assert PROTOCOL.name == "tokenspeed"
    assert PROTOCOL.decoder() is not PROTOCOL.decoder()
