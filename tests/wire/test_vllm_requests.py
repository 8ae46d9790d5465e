"""vLLM: what we send, judged by captured messages and by a model of the engine's side."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.wire.vllm_vectors import (
    REQUEST,
    VECTORS,
    Deaf,
    add,
    deadly,
    engine,
    engine_view,
    extra,
    frames,
    sampling,
    vector,
    vectors,
)
from tszmq.codec import pack, unpack
from tszmq.errors import InvalidRequest, UnsupportedField
from tszmq.types import SamplingParams
from tszmq.wire import startup
from tszmq.wire.base import AddRequest
from tszmq.wire.vllm import Vllm

# -- the model of the engine, against every captured request ------------------------------


def test_every_kind_of_captured_message_has_a_test() -> None:
    here = {"ADD", "ABORT", "UTILITY", "START_DP_WAVE", "INIT", "EngineCoreReadyResponse"}
    outputs = {"EngineCoreOutputs", "ENGINE_CORE_DEAD"}
    handshake = {"handshake HELLO", "handshake READY"}
    coordinator = {"stats publish"}  # to frontends of a coordinator, which we never are
    assert {vector["message"] for vector in VECTORS} == here | outputs | handshake | coordinator
    assert len(VECTORS) == 58


def plain(value: Any) -> Any:
    """A value as the vectors' ``fields`` show it: arrays aside."""
    if isinstance(value, dict):
        return "array" if "dtype" in value else {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list):
        is_array = len(value) == 3 and isinstance(value[0], str) and isinstance(value[1], list)
        return "array" if is_array else [plain(item) for item in value]
    return value


@pytest.mark.parametrize("vector", vectors("ADD"), ids=lambda vector: vector["name"])
def test_the_model_sees_what_the_engine_saw(vector: dict[str, Any]) -> None:
    assert plain(engine_view(frames(vector))) == plain(vector["fields"])


def test_the_model_refuses_what_ends_the_input_thread() -> None:
    head, body = frames(vector("ADD_minimal"))
    values = unpack(body)
    with pytest.raises(Deaf):
        engine_view([b"\x04", body])
    for position, (name, *_) in enumerate(REQUEST[: len(values)]):
        wrong = [*values[:position], {1: 2}, *values[position + 1 :]]
        with pytest.raises(Deaf, match=name):
            engine_view([head, pack(wrong, int_keys=True)])
        with pytest.raises(Deaf, match=name):
            engine_view([head, pack(values[:position])])


# -- captured requests that our names can say ---------------------------------------------

# What each of our requests says that vLLM's own need not: tokens come as they are made, and no
# text is wanted of the engine.
ALWAYS = {"detokenize": False, "output_kind": 1}
SAID: dict[str, tuple[SamplingParams, dict[str, Any]]] = {
    "ADD_minimal": (SamplingParams(), {}),
    "ADD_minimal_with_client_index": (SamplingParams(max_tokens=4), {"client_index": 0}),
    "ADD_with_wave": (SamplingParams(max_tokens=4), {"current_wave": 0}),
    "ADD_trailing_extra": (SamplingParams(max_tokens=4), {}),
    "ADD_as_vllm_sends": (SamplingParams(max_tokens=8, temperature=0), {}),
    "ADD_detokenize_false": (SamplingParams(max_tokens=None), {"max_tokens": 4095}),
    "ADD_all_sampling_params": (
        SamplingParams(
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            repetition_penalty=1.25,
            temperature=0.75,
            top_p=0.5,
            top_k=40,
            min_p=0.125,
            seed=42,
            stop_token_ids=[5, 6],
            ignore_eos=True,
            max_tokens=99,
            min_tokens=3,
            logprobs=True,
            top_logprobs=4,
            regex="a+",
            logit_bias={5: 1.5, 6: -100.0},
            extra={
                "watermarking": True,
                "allowed_token_ids": [1, 2, 3],
                "extra_args": {
                    "kv_transfer_params": {"do_remote_decode": True},
                    "x": [1, "a", None],
                },
                "_bad_words_token_ids": [[11, 12]],
                "skip_reading_prefix_cache": True,
                "thinking_token_budget": 100,
                "repetition_detection": {
                    "max_pattern_size": 4,
                    "min_pattern_size": 2,
                    "min_count": 3,
                },
                "structured_outputs": {
                    "disable_any_whitespace": True,
                    "disable_additional_properties": True,
                    "whitespace_pattern": " ",
                },
            },
        ),
        {
            # One completion a request; text, and what only a frontend reads, are not sent.
            "n": 1,
            "stop": [],
            "bad_words": [],
            "include_stop_str_in_output": False,
            "skip_special_tokens": True,
            "spaces_between_special_tokens": True,
            "flat_logprobs": False,
            "stream_interval": None,
            "skip_clone": False,
            "output_text_buffer_length": 0,
            "_watermarking_skipped": False,
            # The engine would stop at its end token in spite of ignore_eos.
            "_eos_token_id": None,
            # Not among the results, or not at the same time as others.
            "prompt_logprobs": None,
            "prompt_logprob_token_ids": None,
            "prompt_logprob_start": None,
            "logprob_token_ids": None,
            "routed_experts_prompt_start": 0,
            "trace_decode_token_ids": None,
            "structured_outputs": {
                "json": None,
                "regex": "a+",
                "choice": None,
                "grammar": None,
                "json_object": None,
                "disable_any_whitespace": True,
                "disable_additional_properties": True,
                "whitespace_pattern": " ",
                "structural_tag": None,
                "_backend": "xgrammar",
                "_backend_was_auto": False,
            },
        },
    ),
    "ADD_all_request_fields": (
        SamplingParams(
            max_tokens=4,
            extra={
                "lora_request": {
                    "lora_name": "ad",
                    "lora_int_id": 1,
                    "lora_path": "/p",
                    "base_model_name": "base",
                    "load_inplace": True,
                    "is_3d_lora_weight": True,
                },
                "cache_salt": "salt",
                "trace_headers": {"traceparent": "00-aa"},
                "reasoning_ended": False,
                "session_id": "s1",
            },
        ),
        {
            "client_index": 0,
            "current_wave": 0,
            "data_parallel_rank": None,
            "prompt_is_token_ids": None,
            "resumable": False,
            "external_req_id": None,
            "reasoning_parser_kwargs": None,
            "abort_immediately": False,
        },
    ),
}


def test_the_only_request_we_cannot_say_is_one_of_embeddings() -> None:
    unsaid = {vector["name"] for vector in vectors("ADD")} - set(SAID)
    assert unsaid == {"ADD_prompt_embeds_aux"}
    with pytest.raises(UnsupportedField, match="prompt_embeds"):
        add(extra(prompt_embeds=[[0.5]]))


@pytest.mark.parametrize("name", SAID)
def test_what_we_send_reads_as_the_captured_request(name: str) -> None:
    params, differences = SAID[name]
    fields = vector(name)["fields"]
    info = engine()
    protocol = Vllm([2] if name == "ADD_all_sampling_params" else [])
    prompt, priority = fields["prompt_token_ids"], fields["priority"]
    protocol.check(prompt, params, priority, info)
    request = AddRequest(
        fields["request_id"], prompt, params, True, priority, info, fields["arrival_time"]
    )
    ours = engine_view(protocol.encode_add(request))
    expected = {**fields, "sampling_params": {**fields["sampling_params"], **ALWAYS}}
    for key, value in differences.items():
        part = expected if key in expected else expected["sampling_params"]
        part[key] = value
    assert plain(ours) == plain(expected)


def test_an_abort_is_the_captured_one() -> None:
    captured = vector("ABORT")
    assert Vllm().encode_abort(captured["fields"]) == frames(captured)


@pytest.mark.parametrize("vector", vectors("UTILITY"), ids=lambda vector: vector["name"])
def test_utility_calls_are_the_captured_ones(vector: dict[str, Any]) -> None:
    _, call_id, method, args = vector["fields"]
    assert Vllm().encode_utility(call_id, method, args) == frames(vector)


def test_a_wave_is_the_captured_one() -> None:
    """The one that excludes nobody: a frontend wakes each rank for itself."""
    everyone, but_one = vectors("START_DP_WAVE")
    assert Vllm().encode_start_wave(5) == frames(everyone)
    assert unpack(frames(but_one)[1]) == [5, 1]
    for wave in (-1, 2**63, True, 1.0, None):
        with pytest.raises(InvalidRequest, match="wave must be"):
            Vllm().encode_start_wave(wave)  # type: ignore[arg-type]


def test_init_is_the_captured_one() -> None:
    """The other two are of a coordinator's frontend and of one that leaves nils out."""
    captured = vector("INIT")
    addresses = captured["fields"]["addresses"]
    init = startup.encode_init(*addresses["inputs"], *addresses["outputs"])
    assert [init] == frames(captured)
    minimal = unpack(frames(vector("INIT_minimal"))[0])
    assert minimal["addresses"].items() <= unpack(init)["addresses"].items()
    group = vector("INIT_dp_coordinator")["fields"]
    theirs = unpack(startup.encode_init("i", "o", group["parallel_config"]))
    assert theirs["parallel_config"] == group["parallel_config"]
    assert theirs["addresses"]["coordinator_input"] is None


def test_the_registration_is_read() -> None:
    captured = vector("registration_ready_response")
    info = Vllm().read_registration(3, frames(captured))
    assert (info.engine_index, info.lockstep, info.engine_version) == (3, False, "0.33.0")
    assert info.max_model_len == captured["fields"]["max_model_len"]
    assert info.registration == captured["fields"]


def test_a_rank_of_a_larger_group_is_in_lockstep() -> None:
    fields = {**vector("registration_ready_response")["fields"], "data_parallel_size": 2}
    assert Vllm().read_registration(0, [pack(fields)]).lockstep


@pytest.mark.parametrize("name", ["HELLO", "READY", "READY_dp"])
def test_handshakes_are_read(name: str) -> None:
    message = startup.read_handshake(frames(vector(name)))
    assert message.message == vector(name)["fields"]


# -- the neutral names --------------------------------------------------------------------


def test_a_request_is_as_short_as_it_can_be() -> None:
    values = unpack(add()[1])
    assert values == [
        "req-1", [1, 2, 3], None, {"max_tokens": 16, "detokenize": False, "output_kind": 1}, None,
        1.5, None, None, None,
    ]  # fmt: skip
    assert len(unpack(add(priority=0)[1])) == 9
    assert len(unpack(add(priority=-1)[1])) == 14


@pytest.mark.parametrize(
    ("params", "logprobs"),
    [
        ({}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 5}, 5),
        ({"top_logprobs": 5}, 5),
    ],
)
def test_logprobs(params: dict[str, Any], logprobs: int | None) -> None:
    assert sampling(SamplingParams(**params))["logprobs"] == logprobs


def test_prompt_logprobs_keep_the_engine_off_its_prefix_cache() -> None:
    seen = sampling(SamplingParams(prompt_logprobs=0))
    assert (seen["prompt_logprobs"], seen["skip_reading_prefix_cache"]) == (0, True)


def test_no_limit_is_what_the_context_leaves() -> None:
    params = SamplingParams(max_tokens=None, min_tokens=4093)
    assert sampling(params)["max_tokens"] == 4093
    assert sampling(SamplingParams(max_tokens=10**6))["max_tokens"] == 10**6


@pytest.mark.parametrize(
    ("params", "wire"),
    [
        ({"json_schema": '{"a": 1}'}, {"json": '{"a": 1}'}),
        ({"json_schema": {"a": 1}}, {"json": '{"a": 1}'}),
        ({"regex": "a*"}, {"regex": "a*"}),
        ({"regex": ""}, {"regex": ""}),
        ({"ebnf": "root ::= 'a'"}, {"grammar": "root ::= 'a'"}),
        ({"structural_tag": "{}"}, {"structural_tag": "{}"}),
        ({"extra": {"structured_outputs": {"choice": ["a", ""]}}}, {"choice": ["a", ""]}),
        ({"extra": {"structured_outputs": {"json_object": True}}}, {"json_object": True}),
        ({"extra": {"structured_outputs": {"choice": ["a"], "json_object": None}}},
         {"choice": ["a"]}),
    ],
)  # fmt: skip
def test_grammars(params: dict[str, Any], wire: dict[str, Any]) -> None:
    seen = sampling(SamplingParams(**params))["structured_outputs"]
    assert {key: value for key, value in seen.items() if value} == {
        "_backend": "xgrammar",
        **{key: value for key, value in wire.items() if value},
    }
    assert {key: seen[key] for key in wire} == wire


@pytest.mark.parametrize("version", ["0.26.0", "0.32.1"])
def test_a_choice_is_a_grammar_where_xgrammar_knows_none(version: str) -> None:
    """Such an engine refuses every choice, and gives no reason."""
    given = {"choice": ["yes", 'a "quoted" \\', ""]}
    params = SamplingParams(extra={"structured_outputs": given})
    seen = engine_view(add(params, engine_version=version))["sampling_params"]
    outputs = seen["structured_outputs"]
    assert outputs["choice"] is None
    assert outputs["grammar"] == 'root ::= "yes" | "a \\"quoted\\" \\\\" | ""'
    named = SamplingParams(extra={"structured_outputs": {**given, "_backend": "outlines"}})
    seen = engine_view(add(named, engine_version=version))["sampling_params"]
    assert seen["structured_outputs"]["choice"] == given["choice"]


def test_the_grammar_backend_can_be_named() -> None:
    params = SamplingParams(regex="a", extra={"structured_outputs": {"_backend": "guidance"}})
    assert sampling(params)["structured_outputs"]["_backend"] == "guidance"


def test_a_schema_is_looked_for_where_there_is_one() -> None:
    text = json.dumps({"type": "integer", "multipleOf": 7})
    seen = sampling(SamplingParams(structural_tag=text))["structured_outputs"]
    assert seen["_backend"] == "xgrammar"


WORDS = {"type": "string"}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 7},
        {"type": ["number", "null"], "multipleOf": 0.5},
        {"type": "array", "uniqueItems": True},
        {"type": "array", "contains": {"const": 9}},
        {"type": "array", "minContains": 1},
        {"type": "array", "maxContains": 1},
        {**WORDS, "format": "iban"},
        {**WORDS, "format": ["email"]},
        {**WORDS, "format": "email", "minLength": 40},
        {**WORDS, "pattern": "a*", "maxLength": 4},
        {"type": "object", "propertyNames": {"pattern": "a", "minLength": 2}},
        {"type": "object", "propertyNames": WORDS, "properties": {}},
        {"type": "object", "propertyNames": WORDS, "unevaluatedProperties": False},
        {"allOf": [WORDS, {"enum": ["yes"]}]},
        {"type": "object", "properties": {"a": {"anyOf": [{"type": "integer", "multipleOf": 2}]}}},
    ],
    ids=lambda schema: json.dumps(schema)[:40],
)
def test_what_xgrammar_ignores_is_for_guidance(schema: dict[str, Any]) -> None:
    """Its output would break the schema, and nobody would be told."""
    seen = sampling(SamplingParams(json_schema=schema))["structured_outputs"]
    assert seen["_backend"] == "guidance"
    chosen = {"structured_outputs": {"_backend": "xgrammar"}}
    seen = sampling(SamplingParams(json_schema=json.dumps(schema), extra=chosen))
    assert seen["structured_outputs"]["_backend"] == "xgrammar"


@pytest.mark.parametrize(
    "schema",
    [
        True,
        [{"type": "integer", "multipleOf": 7}],
        {"multipleOf": 7},
        {**WORDS, "format": "email"},
        {**WORDS, "pattern": "a*"},
        {**WORDS, "minLength": 4},
        {"type": "array", "items": WORDS, "minItems": 1},
        {"type": "object", "propertyNames": WORDS},
        {"type": "object", "patternProperties": {"^a": WORDS}},
        {"allOf": [WORDS]},
    ],
    ids=lambda schema: json.dumps(schema)[:40],
)
def test_what_xgrammar_heeds_stays_with_it(schema: Any) -> None:
    text = json.dumps(schema)
    assert (
        sampling(SamplingParams(json_schema=text))["structured_outputs"]["_backend"] == "xgrammar"
    )


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": WORDS}, "patternProperties": {"^b": WORDS}},
        {"type": "object", "patternProperties": {"^a": WORDS, "^b": WORDS}},
        {"allOf": [WORDS, {"patternProperties": {}}]},
    ],
)
def test_what_no_backend_heeds_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedField, match=r"xgrammar ignores.*'_backend'"):
        sampling(SamplingParams(json_schema=schema))
    named = {"structured_outputs": {"_backend": "outlines"}}
    seen = sampling(SamplingParams(json_schema=schema, extra=named))["structured_outputs"]
    assert seen["_backend"] == "outlines"


# -- end tokens ---------------------------------------------------------------------------


def stops(params: SamplingParams, *eos: int) -> tuple[Any, ...]:
    seen = sampling(params, protocol=Vllm(eos))
    return seen["_eos_token_id"], seen["stop_token_ids"], seen["_all_stop_token_ids"]


def test_end_tokens() -> None:
    assert stops(SamplingParams()) == (None, [], [])
    assert stops(SamplingParams(), 7) == (7, [], [7])
    assert stops(SamplingParams(), 7, 9, 8) == (7, [9, 8], [7, 8, 9])
    assert stops(SamplingParams(stop_token_ids=[3, 9]), 7, 9, 8) == (7, [3, 9, 8], [3, 7, 8, 9])


def test_end_tokens_that_are_to_be_ignored_are_only_held_back() -> None:
    params = SamplingParams(ignore_eos=True, stop_token_ids=[3], min_tokens=2)
    assert stops(params, 7, 9) == (None, [3], [3, 7, 9])


def test_a_request_can_have_an_end_token_of_its_own() -> None:
    assert stops(extra(_eos_token_id=5), 7, 9) == (5, [], [5])
    assert stops(extra(_eos_token_id=None), 7, 9) == (None, [], [])
    with pytest.raises(InvalidRequest, match="ignore_eos"):
        stops(SamplingParams(ignore_eos=True, extra={"_eos_token_id": 5}))


# -- refusals -----------------------------------------------------------------------------

IDS_1025 = list(range(1025))


def nested(levels: int) -> str:
    return "[" * levels + "]" * levels


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 2.01}, "temperature must be in"),
    ({"top_logprobs": 257}, "top_logprobs must be at most 256"),
    ({"prompt_logprobs": 257}, "prompt_logprobs must be at most 256"),
    ({"logit_bias": dict.fromkeys(IDS_1025, 1.0)}, "at most 1024 ids, got 1025"),
    ({"logit_bias": {5: 1e39}}, "float32"),
    ({"min_tokens": 1, "stop_token_ids": IDS_1025[:129]}, "at most 128 stop"),
    ({"max_tokens": None, "min_tokens": 4094}, "4093 tokens that the context leaves"),
    ({"max_tokens": 2**31 - 1, "min_tokens": 2**31 - 1}, r"below 2\*\*31"),
    ({"json_schema": "{"}, "json_schema must be JSON"),
    ({"json_schema": " "}, "json_schema must not be empty"),
    ({"json_schema": nested(65)}, "more than 64 levels"),
    ({"json_schema": nested(100_000)}, "more than 64 levels"),
    ({"structural_tag": nested(81)}, "more than 80 levels"),
    ({"structural_tag": ""}, "structural_tag must not be empty"),
    ({"ebnf": "\n"}, "ebnf must not be empty"),
    ({"regex": "a\x00b"}, "regex must not have a NUL"),
]


@pytest.mark.parametrize(("params", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_values_that_end_the_engine_are_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        add(SamplingParams(**params))


def test_the_last_values_that_do_not_are_sent() -> None:
    for params in (
        {"temperature": 2.0},
        {"top_logprobs": 256, "prompt_logprobs": 256},
        {"logit_bias": dict.fromkeys(IDS_1025[:1024], -100.0)},
        {"min_tokens": 1, "stop_token_ids": IDS_1025[:128]},
        {"stop_token_ids": IDS_1025},
        {"json_schema": nested(64)},
        {"structural_tag": nested(80)},
        {"max_tokens": 2**31 - 1, "min_tokens": 2**31 - 4},
    ):
        assert deadly(engine_view(add(SamplingParams(**params)))) == []


def test_prompts() -> None:
    protocol, info = Vllm(), engine(max_model_len=8)
    protocol.check([1] * 7, SamplingParams(), None, info)
    for length in (8, 9):
        with pytest.raises(InvalidRequest, match=f"has {length} tokens, engine 0 takes at most 7"):
            protocol.check([1] * length, SamplingParams(), None, info)
    with pytest.raises(InvalidRequest, match="must not be empty"):
        protocol.check([], SamplingParams(), None, info)


def test_an_engine_that_names_no_length() -> None:
    unlimited = engine(max_model_len=0)
    Vllm().check([1] * 10_000, SamplingParams(), None, unlimited)
    with pytest.raises(InvalidRequest, match="set max_tokens"):
        Vllm().check([1], SamplingParams(max_tokens=None), None, unlimited)


@pytest.mark.parametrize(
    "priority", [2**63, -(2**63) - 1, 10**5000], ids=["above", "below", "without a repr"]
)
def test_priorities_beyond_the_wire(priority: int) -> None:
    with pytest.raises(InvalidRequest, match="priority must be in"):
        add(priority=priority)


def test_priorities() -> None:
    for priority in (-(2**63), -1, 1, 2**63 - 1):
        assert engine_view(add(priority=priority))["priority"] == priority


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"stop_token_ids": [10]}, "stop_token_ids must be below 10"),
        ({"logit_bias": {10: 1.0}}, "logit_bias keys must be below 10"),
        ({"extra": {"allowed_token_ids": [1, 10]}}, "allowed_token_ids must be below 10"),
        ({"extra": {"bad_words": [[1], [2, 10]]}}, "bad_words must be below 10"),
        ({"extra": {"trace_decode_token_ids": [10]}}, "trace_decode_token_ids must be below 10"),
        ({"extra": {"_eos_token_id": 10}}, "_eos_token_id must be below 10"),
        ({"top_logprobs": 11}, "top_logprobs must be at most 10, got 11$"),
    ],
)
def test_ids_beyond_a_known_vocabulary(params: dict[str, Any], message: str) -> None:
    known = Vllm(vocab_size=10)
    with pytest.raises(InvalidRequest, match=message):
        add(SamplingParams(**params), protocol=known)
    if "top_logprobs" not in params:
        add(SamplingParams(**params))


def test_prompt_ids_beyond_a_known_vocabulary() -> None:
    add(prompt=[9, 0], protocol=Vllm(vocab_size=10))
    with pytest.raises(InvalidRequest, match="below 10, the vocabulary's size, got 10 at position"):
        add(prompt=[9, 10], protocol=Vllm(vocab_size=10))


def test_a_known_vocabulary_allows_more_logprobs() -> None:
    params = SamplingParams(top_logprobs=1000, prompt_logprobs=1000)
    assert sampling(params, protocol=Vllm(vocab_size=1000))["logprobs"] == 1000


@pytest.mark.parametrize(
    "options",
    [
        {"eos_token_ids": [True]},
        {"eos_token_ids": [1.0]},
        {"eos_token_ids": "12"},
        {"eos_token_ids": None},
        {"vocab_size": True},
        {"vocab_size": 1.0},
    ],
)
def test_wrong_options_are_type_errors(options: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        Vllm(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"eos_token_ids": [-1]},
        {"eos_token_ids": [2**31]},
        {"vocab_size": 0},
        {"eos_token_ids": [10], "vocab_size": 10},
    ],
)
def test_options_out_of_range(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        Vllm(**options)


# -- whatever SamplingParams allows -------------------------------------------------------

ids = st.lists(st.integers(0, 40_000), max_size=6)
floats = st.floats(allow_nan=False, allow_infinity=False)
any_params = st.fixed_dictionaries(
    {},
    optional={
        "max_tokens": st.none() | st.integers(1, 2**31 - 1),
        "temperature": floats.map(abs),
        "top_p": st.floats(0, 1, exclude_min=True),
        "top_k": st.just(-1) | st.integers(1, 2**31 - 1),
        "min_p": st.floats(0, 1),
        "frequency_penalty": st.floats(-2, 2),
        "presence_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(0, 2, exclude_min=True),
        "min_tokens": st.integers(0, 2**31 - 1),
        "stop_token_ids": ids,
        "ignore_eos": st.booleans(),
        "seed": st.none() | st.integers(0, 2**63 - 1),
        "logprobs": st.booleans(),
        "top_logprobs": st.integers(0, 300),
        "prompt_logprobs": st.none() | st.integers(0, 300),
        "logit_bias": st.none() | st.dictionaries(st.integers(0, 2**31 - 1), floats, max_size=3),
        "regex": st.none() | st.text(max_size=5),
    },
)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | floats
    | st.text(max_size=3)
    | st.binary(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3) | st.integers(0, 9), inner, max_size=3)
    ),
    max_leaves=6,
)
extras = st.dictionaries(
    st.sampled_from(["watermarking", "allowed_token_ids", "bad_words", "thinking_token_budget",
                     "repetition_detection", "extra_args", "cache_salt", "lora_request",
                     "trace_headers", "session_id", "structured_outputs", "_eos_token_id", "n",
                     "output_kind", "trace_decode_token_ids", "reasoning_ended", "client_index"]),
    values | ids | st.lists(ids, max_size=3),
    max_size=3,
)  # fmt: skip


@given(any_params, extras, st.integers(1, 5000), st.none() | st.integers())
def test_what_passes_the_check_is_read_by_the_engine(
    given_params: dict[str, Any], fields: dict[str, Any], length: int, priority: int | None
) -> None:
    try:
        params = SamplingParams(**given_params, extra=fields)
        message = add(params, [1] * length, priority, Vllm([2, 5]))
    except InvalidRequest:
        return
    seen = engine_view(message)
    assert deadly(seen) == []
    assert seen["priority"] == (priority or 0)
    assert seen["prompt_token_ids"] == [1] * length
