"""vLLM's fields without a neutral name: adapters, and what else ``extra`` takes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.wire.vllm_vectors import REQUEST, SAMPLING, add, engine_view, extra
from tszmq.codec import unpack
from tszmq.errors import InvalidRequest, UnsupportedField
from tszmq.types import SamplingParams

IDS_1025 = list(range(1025))

# -- adapters -----------------------------------------------------------------------------


def lora(value: Any, version: str = "0.33.0", **changes: Any) -> list[Any]:
    body = add(extra(lora_request=value), engine_version=version, **changes)[1]
    array: list[Any] = unpack(body)[6]
    return array


ADAPTER: dict[Any, Any] = {"name": "ad", "id": 3, "path": "/p"}


@pytest.mark.parametrize("version", ["0.26.0", "0.29.1", "0.33.0", "dev", ""])
def test_an_adapter_is_the_same_for_every_release_without_flags(version: str) -> None:
    assert lora(ADAPTER, version) == ["ad", 3, "/p", None]
    assert lora(("ad", 3, "/p"), version) == ["ad", 3, "/p", None]
    assert lora({**ADAPTER, "load_inplace": False}, version) == ["ad", 3, "/p", None]


@pytest.mark.parametrize(
    ("version", "array"),
    [
        ("0.26.0", ["ad", 3, "/p", None, None, True, False]),
        ("0.26.2+cu130", ["ad", 3, "/p", None, None, True, False]),
        ("0.31.0", ["ad", 3, "/p", None, None, True, False]),
        ("0.32.0", ["ad", 3, "/p", None, True, False]),
        ("0.33.0", ["ad", 3, "/p", None, True, False]),
        ("0.33.1rc1.dev7+gabc", ["ad", 3, "/p", None, True, False]),
        ("1.0.0", ["ad", 3, "/p", None, True, False]),
    ],
)
def test_an_adapters_flags_are_where_the_release_has_them(version: str, array: list[Any]) -> None:
    assert lora({**ADAPTER, "load_inplace": True}, version) == array


@pytest.mark.parametrize("version", ["dev", ""])
def test_an_adapters_flags_are_not_guessed(version: str) -> None:
    with pytest.raises(UnsupportedField, match="elsewhere in other releases"):
        lora({**ADAPTER, "is_3d_lora_weight": True}, version)


def test_an_engine_without_adapters_gets_none() -> None:
    with pytest.raises(UnsupportedField, match="enable-lora"):
        lora(ADAPTER, registration={"supports_lora": False})
    assert lora(ADAPTER, registration={})[0] == "ad"  # 0.26 does not say
    assert lora(None, registration={"supports_lora": False}) is None


@pytest.mark.parametrize(
    "wrong",
    [
        "ad",
        ("ad", 3),
        {"name": "ad", "id": 3},
        {**ADAPTER, "id": 0},
        {**ADAPTER, "id": True},
        {**ADAPTER, "id": 2**31},
        {**ADAPTER, "id": "3"},
        {**ADAPTER, "path": ""},
        {**ADAPTER, "name": ""},
        {**ADAPTER, "name": "\ud800"},
        {**ADAPTER, "load_inplace": 1},
        {**ADAPTER, "base_model_name": 5},
        {**ADAPTER, "tensorizer_config_dict": {}},
        {**ADAPTER, "lora_name": "twice"},
        {**ADAPTER, 5: 6},
    ],
)
def test_wrong_adapters_are_refused(wrong: Any) -> None:
    with pytest.raises(InvalidRequest, match="lora_request"):
        lora(wrong)


# -- extra --------------------------------------------------------------------------------

ELSEWHERE = {
    "temperature": "temperature=",
    "top_logprobs": "top_logprobs=",
    "json": "json_schema=",
    "grammar": "ebnf=",
    "choice": "structured_outputs",
    "stop": "makes no text",
    "logprob_token_ids": "not among the results",
    "client_index": "no socket",
    "current_wave": "tszmq fills it in",
    "resumable": "requests end",
    "abort_immediately": "aborted",
    "prompt_embeds": "token ids",
    "pooling_params": "generate tokens",
    "request_id": "wire ids",
    "external_req_id": "wire ids",
    "data_parallel_rank": "data_parallel_rank=",
    "priority": "priority=",
    "arrival_time": "fills it in",
    "reasoning_parser_kwargs": "dies",
    "kv_hints": "frontend",
    "_all_stop_token_ids": "fills it in",
    "stream_interval": "does not read it",
    "no_such_field": "known: _bad_words_token_ids",
}


@pytest.mark.parametrize(("name", "message"), ELSEWHERE.items())
def test_fields_that_are_not_for_extra(name: str, message: str) -> None:
    with pytest.raises(UnsupportedField, match=message):
        add(extra(**{name: None}))


def test_every_field_of_a_request_is_known() -> None:
    """Each is sent, or has a reason why not."""
    for name in {*SAMPLING, *(name for name, *_ in REQUEST)} - {"sampling_params"}:
        with pytest.raises(InvalidRequest) as refusal:
            add(extra(**{name: object()}))
        assert "is not in vLLM's requests" not in str(refusal.value), name


WRONG_EXTRA: list[tuple[str, Any]] = [
    ("n", 2), ("n", True), ("n", None), ("n", 1.0),
    ("detokenize", True), ("detokenize", 0),
    ("output_kind", 0), ("output_kind", 2), ("output_kind", True),
    ("watermarking", 1), ("skip_reading_prefix_cache", "yes"), ("reasoning_ended", 0),
    ("allowed_token_ids", []), ("allowed_token_ids", IDS_1025), ("allowed_token_ids", [True]),
    ("allowed_token_ids", [-1]), ("allowed_token_ids", [2**31]), ("allowed_token_ids", {1}),
    ("bad_words", ["text"]), ("bad_words", [[]]), ("bad_words", [[1]] * 129),
    ("bad_words", [IDS_1025]), ("bad_words", [[1] * 600, [2] * 600]), ("bad_words", [1]),
    ("bad_words", "abc"), ("_bad_words_token_ids", [[1.5]]),
    ("thinking_token_budget", -2), ("thinking_token_budget", True),
    ("thinking_token_budget", 1.0), ("thinking_token_budget", 2**31),
    ("repetition_detection", {"max_pattern_size": 3}),
    ("repetition_detection", {"max_pattern_size": 3, "min_count": 1}),
    ("repetition_detection", {"min_pattern_size": 3, "min_count": 2}),
    ("repetition_detection", {"max_pattern_size": -1}),
    ("repetition_detection", {"max_pattern_size": True, "min_count": 2}),
    ("repetition_detection", {"size": 1}), ("repetition_detection", [1]),
    ("trace_decode_token_ids", []), ("trace_decode_token_ids", [1.0]),
    ("trace_decode_token_ids", [1] * 4094),
    ("extra_args", [1]), ("extra_args", {1: 2}), ("extra_args", {"a": object()}),
    ("extra_args", {"a": {1, 2}}), ("extra_args", {"a": 2**64}), ("extra_args", {"a": "\ud800"}),
    ("extra_args", {"a": {(1, 2): 3}}), ("extra_args", {"kv_transfer_params": 5}),
    ("extra_args", {"kv_cache_report_mode": None}),
    ("_eos_token_id", -1), ("_eos_token_id", True), ("_eos_token_id", [2]),
    ("cache_salt", ""), ("cache_salt", 5), ("cache_salt", b"x"), ("cache_salt", "\ud800"),
    ("session_id", 5), ("session_id", ""),
    ("trace_headers", {"a": 1}), ("trace_headers", {1: "a"}), ("trace_headers", [("a", "b")]),
    ("structured_outputs", "choice"), ("structured_outputs", {}),
    ("structured_outputs", {"choice": []}), ("structured_outputs", {"choice": "abc"}),
    ("structured_outputs", {"choice": ["a", 1]}), ("structured_outputs", {"choice": ["\ud800"]}),
    ("structured_outputs", {"json_object": False}), ("structured_outputs", {"json_object": 1}),
    ("structured_outputs", {"choice": ["a"], "json_object": True}),
    ("structured_outputs", {"choice": ["a"], "_backend": "auto"}),
    ("structured_outputs", {"choice": ["a"], "_backend": ["xgrammar"]}),
    ("structured_outputs", {"choice": ["a"], "disable_any_whitespace": 1}),
    ("structured_outputs", {"choice": ["a"], "whitespace_pattern": 1}),
    ("structured_outputs", {"_backend": "xgrammar"}),
    ("structured_outputs", {"choice": ["a"], "_backend_was_auto": True}),
    ("structured_outputs", {"regex": "a"}), ("structured_outputs", {1: 2}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WRONG_EXTRA, ids=lambda value: str(value)[:30])
def test_wrong_values_of_extra_are_refused(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=name):
        add(extra(**{name: value}))


def test_a_value_that_is_its_own_part_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(InvalidRequest, match="extra_args"):
        add(extra(extra_args={"a": endless}))


def test_values_of_extra_where_the_engine_looks_for_them() -> None:
    params = extra(
        n=1,
        output_kind=1,
        detokenize=False,
        bad_words=[(1, 2), [3]],
        thinking_token_budget=-1,
        allowed_token_ids=(1,),
        cache_salt="pinch",
        session_id="s",
        reasoning_ended=True,
        trace_headers={"a": "b"},
        extra_args={"deep": [{"x": {7: b"y"}}]},
    )
    seen = engine_view(add(params))
    request = ("cache_salt", "session_id", "reasoning_ended", "trace_headers")
    assert [seen[name] for name in request] == ["pinch", "s", True, {"a": "b"}]
    inner = seen["sampling_params"]
    assert inner["_bad_words_token_ids"] == [[1, 2], [3]]
    assert inner["allowed_token_ids"] == [1]
    assert inner["thinking_token_budget"] is None
    assert inner["extra_args"] == {"deep": [{"x": {7: b"y"}}]}


def test_none_leaves_a_field_out() -> None:
    names = ("watermarking", "bad_words", "extra_args", "cache_salt", "session_id", "lora_request")
    assert add(extra(**dict.fromkeys(names))) == add()


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (extra(bad_words=[[1]], _bad_words_token_ids=[[1]]), "are the same"),
        (
            SamplingParams(prompt_logprobs=1, extra={"skip_reading_prefix_cache": False}),
            "cached tokens have none",
        ),
        (
            SamplingParams(prompt_logprobs=1, extra={"trace_decode_token_ids": [1]}),
            "cannot go with prompt_logprobs",
        ),
        (
            SamplingParams(regex="a", extra={"trace_decode_token_ids": [1]}),
            "cannot go with a grammar",
        ),
        (
            extra(trace_decode_token_ids=[1], bad_words=[[1]], thinking_token_budget=1),
            "cannot go with thinking_token_budget and bad_words",
        ),
        (SamplingParams(regex="a", extra={"structured_outputs": {"choice": ["a"]}}), "one constr"),
    ],
)
def test_fields_that_do_not_go_together(params: SamplingParams, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        add(params)
