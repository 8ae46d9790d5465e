"""The captured vLLM messages, and a second reading of requests: the engine's side.

``engine_view`` models what the engine's decoder makes of an ADD: positions, types, defaults,
and what ``SamplingParams`` does after decoding. It is checked against every captured request,
so that it can judge what our own encoder sends.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from tszmq.types import EngineInfo, SamplingParams
from tszmq.wire.base import AddRequest
from tszmq.wire.vllm import Vllm

VECTORS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent.parent / "vectors" / "vllm.json").read_text(encoding="utf-8")
)


def vectors(message: str) -> list[dict[str, Any]]:
    """The vectors of one kind of message."""
    return [vector for vector in VECTORS if vector["message"] == message]


def vector(name: str) -> dict[str, Any]:
    return next(vector for vector in VECTORS if vector["name"] == name)


def frames(vector: dict[str, Any]) -> list[bytes]:
    return [bytes.fromhex(text) for text in vector["frames_hex"]]


def engine(**changes: Any) -> EngineInfo:
    """A registered engine of the release that the vectors are from."""
    values: dict[str, Any] = {
        "engine_index": 0,
        "alive": True,
        "max_model_len": 4096,
        "num_gpu_blocks": 4096,
        "block_size": 16,
        "dtype": "bfloat16",
        "engine_version": "0.33.0",
        "registration": {"supports_lora": True, "max_loras": 4},
        **changes,
    }
    return EngineInfo(**values)


class Deaf(Exception):
    """The engine's input thread would end over the message."""


Test = Callable[[Any], bool]


def _is(*kinds: type) -> Test:
    return lambda value: type(value) in kinds


def _nil_or(test: Test) -> Test:
    return lambda value: value is None or test(value)


def _all(kind: Test) -> Test:
    return lambda value: type(value) is list and all(map(kind, value))


def _map(key: Test, item: Test) -> Test:
    return lambda value: (
        type(value) is dict and all(map(key, value)) and all(map(item, value.values()))
    )


_anything: Test = lambda value: True  # noqa: E731 - one of the table's tests
_int, _bool, _text, _number = _is(int), _is(bool), _is(str), _is(int, float)
_ids = _all(_int)

SAMPLING: dict[str, tuple[Test, Any]] = {
    "n": (_int, 1),
    "presence_penalty": (_number, 0.0),
    "frequency_penalty": (_number, 0.0),
    "repetition_penalty": (_number, 1.0),
    "temperature": (_number, 1.0),
    "watermarking": (_nil_or(_bool), None),
    "top_p": (_number, 1.0),
    "top_k": (_int, 0),
    "min_p": (_number, 0.0),
    "seed": (_nil_or(_int), None),
    "stop": (lambda value: value is None or _text(value) or _all(_text)(value), None),
    "stop_token_ids": (_nil_or(_ids), None),
    "ignore_eos": (_bool, False),
    "max_tokens": (_nil_or(_int), 16),
    "min_tokens": (_int, 0),
    "logprobs": (_nil_or(_int), None),
    "prompt_logprobs": (_nil_or(_int), None),
    "prompt_logprob_token_ids": (_nil_or(_is(list)), None),
    "prompt_logprob_start": (_nil_or(_int), None),
    "logprob_token_ids": (_nil_or(_ids), None),
    "flat_logprobs": (_bool, False),
    "detokenize": (_bool, True),
    "skip_special_tokens": (_bool, True),
    "spaces_between_special_tokens": (_bool, True),
    "include_stop_str_in_output": (_bool, False),
    "output_kind": (lambda value: value in (0, 1, 2), 0),
    "stream_interval": (_nil_or(_int), None),
    "skip_clone": (_bool, False),
    "output_text_buffer_length": (_int, 0),
    "_eos_token_id": (_nil_or(_int), None),
    "_all_stop_token_ids": (_ids, []),
    "_watermarking_skipped": (_bool, False),
    "structured_outputs": (_nil_or(_map(_text, _anything)), None),
    "logit_bias": (_nil_or(_map(_int, _number)), None),
    "allowed_token_ids": (_nil_or(_ids), None),
    "extra_args": (_nil_or(_map(_text, _anything)), None),
    "bad_words": (_nil_or(_all(_text)), None),
    "_bad_words_token_ids": (_nil_or(_all(_ids)), None),
    "skip_reading_prefix_cache": (_nil_or(_bool), None),
    "thinking_token_budget": (_nil_or(_int), None),
    "repetition_detection": (_nil_or(_map(_text, _int)), None),
    "routed_experts_prompt_start": (_int, 0),
    "trace_decode_token_ids": (_nil_or(_ids), None),
}
STRUCTURED: dict[str, Any] = {
    "json": None,
    "regex": None,
    "choice": None,
    "grammar": None,
    "json_object": None,
    "disable_any_whitespace": False,
    "disable_additional_properties": False,
    "whitespace_pattern": None,
    "structural_tag": None,
    "_backend": None,
    "_backend_was_auto": False,
}
CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
PATTERN = {"max_pattern_size": 0, "min_pattern_size": 0, "min_count": 0}
LORA = ("lora_name", "lora_int_id", "lora_path", "base_model_name", "load_inplace",
        "is_3d_lora_weight")  # fmt: skip
LORA_DEFAULTS = [None, None, "", None, False, False]
REQUEST: tuple[tuple[str, Test, Any], ...] = (
    ("request_id", _text, Deaf),
    ("prompt_token_ids", _nil_or(_ids), Deaf),
    ("mm_features", _nil_or(_is(list)), Deaf),
    ("sampling_params", _nil_or(_map(_text, _anything)), Deaf),
    ("pooling_params", _nil_or(_is(list)), Deaf),
    ("arrival_time", _number, Deaf),
    ("lora_request", _nil_or(_is(list)), Deaf),
    ("cache_salt", _nil_or(_text), Deaf),
    ("data_parallel_rank", _nil_or(_int), Deaf),
    ("prompt_embeds", _nil_or(_is(list)), None),
    ("prompt_is_token_ids", _nil_or(_all(_bool)), None),
    ("client_index", _int, 0),
    ("current_wave", _int, 0),
    ("priority", _int, 0),
    ("trace_headers", _nil_or(_map(_text, _text)), None),
    ("resumable", _bool, False),
    ("external_req_id", _nil_or(_text), None),
    ("reasoning_ended", _nil_or(_bool), None),
    ("reasoning_parser_kwargs", _nil_or(_map(_text, _anything)), None),
    ("abort_immediately", _bool, False),
    ("session_id", _nil_or(_text), None),
    ("kv_hints", _nil_or(_is(dict)), None),
)


def engine_view(message: list[bytes]) -> dict[str, Any]:
    """An ADD as the engine's own structs hold it, arrays left as they came.

    Raises:
        Deaf: The engine's decoder or ``SamplingParams`` refuses it.
    """
    kind, body, *_ = message
    if kind != b"\x00":
        raise Deaf(f"type {kind.hex()}")
    values = msgspec.msgpack.decode(body, ext_hook=lambda code, data: (code, bytes(data)))
    if type(values) is not list:
        raise Deaf("no array")
    fields: dict[str, Any] = {}
    for position, (name, test, default) in enumerate(REQUEST):
        if position >= len(values) and default is Deaf:
            raise Deaf(f"{name} is missing")
        fields[name] = values[position] if position < len(values) else default
        if not test(fields[name]):
            raise Deaf(f"{name}: {fields[name]!r}")
    if fields["sampling_params"] is not None:
        fields["sampling_params"] = _sampling_view(fields["sampling_params"])
    lora = fields["lora_request"]
    if lora is not None:
        fields["lora_request"] = _lora_view(lora)
    return fields


def _lora_view(values: list[Any]) -> dict[str, Any]:
    filled = [*values[: len(LORA)], *LORA_DEFAULTS[len(values) :]]
    tests = (_text, _int, _text, _nil_or(_text), _bool, _bool)
    for name, test, value in zip(LORA, tests, filled, strict=True):
        if not test(value):
            raise Deaf(f"{name}: {value!r}")
    if filled[1] < 1 or not filled[2]:
        raise Deaf(f"lora_request: {filled}")
    return dict(zip(LORA, filled, strict=True))


def _sampling_view(given: dict[str, Any]) -> dict[str, Any]:
    view: dict[str, Any] = {}
    for name, (test, default) in SAMPLING.items():
        view[name] = given.get(name, default)
        if not test(view[name]):
            raise Deaf(f"{name}: {view[name]!r}")
    if type(view["stop"]) is str:
        view["stop"] = [view["stop"]]
    for name in ("stop", "bad_words"):
        view[name] = view[name] or []
    view["stop_token_ids"] = list(dict.fromkeys(view["stop_token_ids"] or []))
    view["_all_stop_token_ids"] = sorted({*view["_all_stop_token_ids"], *view["stop_token_ids"]})
    if view["thinking_token_budget"] == -1:
        view["thinking_token_budget"] = None
    if 0 < view["temperature"] < 0.01:
        view["temperature"] = 0.01
    _verify(view)
    if view["temperature"] < 1e-5:
        view.update(top_p=1.0, top_k=0, min_p=0.0)
    if view["skip_reading_prefix_cache"] is None:
        asked = (view["prompt_logprobs"], view["prompt_logprob_token_ids"])
        view["skip_reading_prefix_cache"] = asked != (None, None)
    if view["structured_outputs"] is not None:
        view["structured_outputs"] = {**STRUCTURED, **view["structured_outputs"]}
        kinds = [key for key in CONSTRAINTS if view["structured_outputs"][key] is not None]
        if len(kinds) != 1:
            raise Deaf(f"structured_outputs: {kinds}")
    if view["repetition_detection"] is not None:
        view["repetition_detection"] = {**PATTERN, **view["repetition_detection"]}
    return view


def _verify(view: dict[str, Any]) -> None:
    """What ``SamplingParams`` insists on."""
    longest = math.inf if view["max_tokens"] is None else view["max_tokens"]
    fine = {
        "n": view["n"] >= 1,
        "presence_penalty": -2 <= view["presence_penalty"] <= 2,
        "frequency_penalty": -2 <= view["frequency_penalty"] <= 2,
        "repetition_penalty": 0 < view["repetition_penalty"] < math.inf,
        "temperature": 0 <= view["temperature"] <= 2,
        "top_p": 0 < view["top_p"] <= 1,
        "top_k": view["top_k"] >= -1,
        "min_p": 0 <= view["min_p"] <= 1,
        "max_tokens": longest >= 1,
        "min_tokens": 0 <= view["min_tokens"] <= longest,
        "logprobs": (view["logprobs"] or 0) >= -1,
        "prompt_logprobs": (view["prompt_logprobs"] or 0) >= -1,
        "thinking_token_budget": (view["thinking_token_budget"] or 0) >= 0,
        "stop": "" not in view["stop"] and (view["detokenize"] or not view["stop"]),
        "bad_words": "" not in view["bad_words"],
    }
    wrong = [name for name, good in fine.items() if not good]
    if wrong:
        raise Deaf(", ".join(wrong))


def deadly(fields: dict[str, Any]) -> list[str]:
    """What of a request the engine reads and then dies of, or never answers."""
    sampling = fields["sampling_params"]
    constraint = sampling["structured_outputs"]
    bad = sampling["_bad_words_token_ids"] or []
    dead = {
        "empty prompt": not fields["prompt_token_ids"],
        "long prompt": len(fields["prompt_token_ids"] or ()) >= engine().max_model_len,
        "no such client": fields["client_index"] != 0,
        "resumable": fields["resumable"],
        "max_tokens": sampling["max_tokens"] is None,
        "no backend": constraint is not None and constraint["_backend"] is None,
        "biases": len(sampling["logit_bias"] or ()) > 1024,
        "allowed": len(sampling["allowed_token_ids"] or ()) > 1024,
        "bad words": len(bad) > 128 or not all(bad) or sum(map(len, bad)) > 1024,
        "stops": sampling["min_tokens"] > 0 and len(sampling["_all_stop_token_ids"]) > 128,
        "parser": fields["reasoning_parser_kwargs"] is not None,
    }
    return [name for name, wrong in dead.items() if wrong]


def add(
    params: SamplingParams | None = None,
    prompt: list[int] | None = None,
    priority: int | None = None,
    protocol: Vllm | None = None,
    **changes: Any,
) -> list[bytes]:
    """Check and encode, as a client does."""
    protocol = protocol or Vllm()
    params, prompt = params or SamplingParams(), prompt or [1, 2, 3]
    info = engine(**changes)
    protocol.check(prompt, params, priority, info)
    return protocol.encode_add(AddRequest("req-1", prompt, params, True, priority, info, 1.5))


def sampling(params: SamplingParams | None = None, **arguments: Any) -> dict[str, Any]:
    fields: dict[str, Any] = engine_view(add(params, **arguments))["sampling_params"]
    return fields


def extra(**fields: Any) -> SamplingParams:
    return SamplingParams(extra=fields)
