"""vLLM's ``EngineCoreRequest`` as the engine reads it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attrs

from tszmq.codec import unpack
from tszmq.errors import DecodeError

__all__ = ["Ask", "Unusable", "read_add", "unpack_any"]

_SHORTEST = 9
Fields = dict[str, Any]


class Unusable(Exception):
    """The engine's input thread ends over this message: the engine is deaf from then on."""


@attrs.define(eq=False)
class Ask:
    """A request as it arrived."""

    request_id: str
    prompt: list[int] | None
    params: Fields | None
    client_index: int
    wave: int


def unpack_any(payload: bytes) -> Any:
    """One msgpack object, maps with int keys included.

    Raises:
        Unusable: It is not one.
    """
    try:
        return unpack(payload, ext_hook=lambda _, data: data, int_keys=True)
    except DecodeError as exc:
        raise Unusable(str(exc)) from exc


def _is(*types: type) -> Callable[[Any], bool]:
    return lambda value: type(value) in types


def _list_of(kind: type) -> Callable[[Any], bool]:
    return lambda value: type(value) is list and set(map(type, value)) <= {kind}


def _or_nil(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or check(value)


def _is_bias(value: Any) -> bool:
    return type(value) is dict and all(
        type(key) is int and type(item) in (int, float) for key, item in value.items()
    )


_number, _int, _bool, _str = _is(float, int), _is(int), _is(bool), _is(str)

# Keys that the engine checks, and their defaults; what is not listed is not looked at here.
_PARAMS: dict[str, tuple[Callable[[Any], bool], Any]] = {
    "n": (_int, 1),
    "presence_penalty": (_number, 0.0),
    "frequency_penalty": (_number, 0.0),
    "repetition_penalty": (_number, 1.0),
    "temperature": (_number, 1.0),
    "top_p": (_number, 1.0),
    "top_k": (_int, 0),
    "min_p": (_number, 0.0),
    "seed": (_or_nil(_int), None),
    "stop": (lambda value: value is None or type(value) is str or _list_of(str)(value), None),
    "stop_token_ids": (_or_nil(_list_of(int)), None),
    "ignore_eos": (_bool, False),
    "max_tokens": (_or_nil(_int), 16),
    "min_tokens": (_int, 0),
    "logprobs": (_or_nil(_int), None),
    "prompt_logprobs": (_or_nil(_int), None),
    "detokenize": (_bool, True),
    "output_kind": (_int, 0),
    "stream_interval": (_or_nil(_int), None),
    "_eos_token_id": (_or_nil(_int), None),
    "_all_stop_token_ids": (_list_of(int), []),
    "structured_outputs": (_or_nil(_is(dict)), None),
    "logit_bias": (_or_nil(_is_bias), None),
    "allowed_token_ids": (_or_nil(_list_of(int)), None),
    "extra_args": (_or_nil(_is(dict)), None),
    "bad_words": (_or_nil(_list_of(str)), None),
}

# By position, from the first that is required.
_REQUEST: tuple[tuple[str, Callable[[Any], bool]], ...] = (
    ("request_id", _str),
    ("prompt_token_ids", _or_nil(_list_of(int))),
    ("mm_features", _or_nil(_is(list))),
    ("sampling_params", _or_nil(_is(dict))),
    ("pooling_params", _or_nil(_is(list))),
    ("arrival_time", _number),
    ("lora_request", _or_nil(_is(list))),
    ("cache_salt", _or_nil(_str)),
    ("data_parallel_rank", _or_nil(_int)),
    ("prompt_embeds", _or_nil(_is(list))),
    ("prompt_is_token_ids", _or_nil(_list_of(bool))),
    ("client_index", _int),
    ("current_wave", _int),
    ("priority", _int),
    ("trace_headers", _or_nil(_is(dict))),
    ("resumable", _bool),
    ("external_req_id", _or_nil(_str)),
    ("reasoning_ended", _or_nil(_bool)),
    ("reasoning_parser_kwargs", _or_nil(_is(dict))),
    ("abort_immediately", _bool),
    ("session_id", _or_nil(_str)),
    ("kv_hints", _or_nil(_is(dict))),
)


def read_add(payload: bytes) -> Ask:
    """An ADD.

    Raises:
        Unusable: A wrong shape or type, or a value that ``SamplingParams`` refuses.
    """
    message = unpack_any(payload)
    if type(message) is not list or len(message) < _SHORTEST:
        raise Unusable(f"a request is an array of at least {_SHORTEST} elements")
    fields: Fields = {"client_index": 0, "current_wave": 0}
    for value, (name, check) in zip(message, _REQUEST, strict=False):
        if not check(value):
            raise Unusable(f"{name}: {type(value).__name__} is not taken")
        fields[name] = value
    params = fields["sampling_params"]
    if params is not None:
        params = _read_params(params)
    return Ask(
        fields["request_id"],
        fields["prompt_token_ids"],
        params,
        fields["client_index"],
        fields["current_wave"],
    )


def _read_params(given: Fields) -> Fields:
    params: Fields = {}
    for name, (check, default) in _PARAMS.items():
        value = given.get(name, default)
        if not check(value):
            raise Unusable(f"sampling_params.{name}: {type(value).__name__} is not taken")
        params[name] = value
    for fine, reason in _checks(params):
        if not fine:
            raise Unusable(reason)
    return params


def _checks(params: Fields) -> tuple[tuple[bool, str], ...]:
    """What ``SamplingParams`` itself insists on after decoding."""
    longest, repetition = params["max_tokens"], params["repetition_penalty"]
    return (
        (params["n"] >= 1, "n must be at least 1"),
        (-2 <= params["presence_penalty"] <= 2, "presence_penalty must be in [-2, 2]"),
        (-2 <= params["frequency_penalty"] <= 2, "frequency_penalty must be in [-2, 2]"),
        (math.isfinite(repetition) and repetition > 0, "repetition_penalty must be above 0"),
        (0 <= params["temperature"] <= 2, "temperature must be in [0, 2]"),
        (0 < params["top_p"] <= 1, "top_p must be in (0, 1]"),
        (params["top_k"] >= -1, "top_k must be 0 or at least 1"),
        (0 <= params["min_p"] <= 1, "min_p must be in [0, 1]"),
        (longest is None or longest >= 1, "max_tokens must be at least 1"),
        (params["min_tokens"] >= 0, "min_tokens must be at least 0"),
        (longest is None or params["min_tokens"] <= longest, "min_tokens exceeds max_tokens"),
        ((params["stream_interval"] or 1) >= 1, "stream_interval must be at least 1"),
        ((params["logprobs"] or 0) >= -1, "logprobs must be at least -1"),
        ((params["prompt_logprobs"] or 0) >= -1, "prompt_logprobs must be at least -1"),
        (not params["stop"] or params["detokenize"], "stop strings need detokenize"),
        ("" not in (params["stop"] or ["-"]), "stop cannot contain an empty string"),
        (all(params["bad_words"] or ()), "bad_words cannot contain an empty string"),
    )
