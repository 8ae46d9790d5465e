"""Fields of vLLM's requests that have no neutral name: ``SamplingParams.extra``.

One table says where each goes and what it may be. A value of a wrong type ends the engine's
input thread, so the types are those of the wire, unconverted. Limits are those of the engine's
sampler (0.33, ``v1/worker/gpu/sample``), which ends the engine when they are exceeded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import attrs

from tszmq.checks import MAX_TOKEN_ID
from tszmq.wire.described import is_text
from tszmq.wire.extra import NEUTRAL, check_fields
from tszmq.wire.vllm.utility import plain_fault

__all__ = ["EXTRA_TOKENS", "check_extra", "place_extra"]

_MAX_INT = 2**31 - 1
_MAX_ALLOWED = 1024  # token ids
_MAX_BAD_WORDS = 128
_MAX_BAD_WORD_TOKENS = 1024
_DELTA = 1  # output_kind


def check_extra(extra: Mapping[str, Any]) -> None:
    """As ``check_fields``."""
    check_fields(extra, "vLLM", _FIELDS, _ELSEWHERE)


def place_extra(extra: Mapping[str, Any], sampling: dict[str, Any], request: list[Any]) -> None:
    """Put checked fields into the map and the array; those of a module of their own are not."""
    for name, value in extra.items():
        field = _FIELDS[name]
        if value is None:
            continue
        if field.key is not None:
            sampling[field.key] = value
        elif field.position is not None:
            put(request, field.position, value)


# The rest of a request, from its tenth element, at its defaults.
_SHORTEST = 9
_TAIL = (None, None, 0, 0, 0, None, False, None, None, None, False, None)


def put(request: list[Any], position: int, value: object) -> None:
    """Set an element, lengthening the array with defaults up to it."""
    if position >= len(request):
        request += _TAIL[len(request) - _SHORTEST : position + 1 - _SHORTEST]
    request[position] = value


def _ids(low: int, high: int) -> Callable[[Any], str | None]:
    def refuses(value: Any) -> str | None:
        good = isinstance(value, (list, tuple)) and low <= len(value) <= high
        if good and all(type(item) is int and 0 <= item <= MAX_TOKEN_ID for item in value):
            return None
        return f"a list of {low} to {high} token ids"

    return refuses


def _bad_words(value: Any) -> str | None:
    is_word = _ids(1, _MAX_BAD_WORD_TOKENS)
    if (
        isinstance(value, (list, tuple))
        and len(value) <= _MAX_BAD_WORDS
        and not any(map(is_word, value))
        and sum(map(len, value)) <= _MAX_BAD_WORD_TOKENS
    ):
        return None
    return (
        f"a list of at most {_MAX_BAD_WORDS} words, each a list of token ids (the engine has no "
        f"tokenizer for text), {_MAX_BAD_WORD_TOKENS} ids in all"
    )


def _integer(low: int) -> Callable[[Any], str | None]:
    def refuses(value: Any) -> str | None:
        good = type(value) is int and low <= value <= _MAX_INT
        return None if good else f"an int in [{low}, {_MAX_INT}] or None"

    return refuses


def _token_id(value: Any) -> str | None:
    good = type(value) is int and 0 <= value <= MAX_TOKEN_ID
    return None if good else "a token id or None"


def _only(wanted: object, why: str) -> Callable[[Any], str | None]:
    def refuses(value: Any) -> str | None:
        return None if type(value) is type(wanted) and value == wanted else f"{wanted}, {why}"

    return refuses


def _boolean(value: Any) -> str | None:
    return None if type(value) is bool else "True, False or None"


def _text(value: Any) -> str | None:
    return None if is_text(value) and value else "text that is not empty, or None"


def _headers(value: Any) -> str | None:
    if type(value) is dict and all(map(is_text, chain(value, value.values()))):
        return None
    return "a dict from text to text, or None"


def _extra_args(value: Any) -> str | None:
    """The engine looks for three keys in it, and uses what it finds unchecked."""
    if type(value) is dict and set(map(type, value)) <= {str} and plain_fault(value) is None:
        transfers = (value.get("kv_transfer_params"), value.get("ec_transfer_params"))
        mode = value.get("kv_cache_report_mode", "")
        if all(item is None or type(item) is dict for item in transfers) and type(mode) is str:
            return None
    return (
        "a dict from text to plain values, kv_transfer_params and ec_transfer_params dicts and "
        "kv_cache_report_mode text, or None"
    )


_PATTERN_KEYS = ("max_pattern_size", "min_pattern_size", "min_count")


def _repetition(value: Any) -> str | None:
    if type(value) is dict and value.keys() <= set(_PATTERN_KEYS):
        sizes = [value.get(key, 0) for key in _PATTERN_KEYS]
        if all(type(size) is int and 0 <= size <= _MAX_INT for size in sizes):
            largest, smallest, count = sizes
            if smallest <= largest and (largest == 0 or count > 1):
                return None
    return (
        "a dict of max_pattern_size, min_pattern_size (no larger than that) and min_count (at "
        "least 2), or None"
    )


def _checked_elsewhere(_: Any) -> str | None:
    return None


@attrs.frozen
class _Field:
    """Where a field goes, and the test of its value.

    Attributes:
        test: What was expected, when the value is not that; else None.
        key: Its key in the map of sampling parameters.
        position: Or its place in the request.
        optional: Whether None stands for leaving it out.
    """

    test: Callable[[Any], str | None]
    key: str | None = None
    position: int | None = None
    optional: bool = True

    def refuses(self, value: Any) -> str | None:
        return None if value is None and self.optional else self.test(value)


_FIELDS: Mapping[str, _Field] = {
    "watermarking": _Field(_boolean, "watermarking"),
    "allowed_token_ids": _Field(_ids(1, _MAX_ALLOWED), "allowed_token_ids"),
    "bad_words": _Field(_bad_words, "_bad_words_token_ids"),
    "_bad_words_token_ids": _Field(_bad_words, "_bad_words_token_ids"),
    "skip_reading_prefix_cache": _Field(_boolean, "skip_reading_prefix_cache"),
    "thinking_token_budget": _Field(_integer(-1), "thinking_token_budget"),
    "repetition_detection": _Field(_repetition, "repetition_detection"),
    "trace_decode_token_ids": _Field(_ids(1, _MAX_INT), "trace_decode_token_ids"),
    "extra_args": _Field(_extra_args, "extra_args"),
    "_eos_token_id": _Field(_token_id),
    "structured_outputs": _Field(_checked_elsewhere),
    "lora_request": _Field(_checked_elsewhere),
    "n": _Field(_only(1, "send the prompt n times"), optional=False),
    "detokenize": _Field(_only(False, "token ids are what comes back"), optional=False),
    "output_kind": _Field(_only(_DELTA, "new tokens are what is read"), optional=False),
    "cache_salt": _Field(_text, position=7),
    "trace_headers": _Field(_headers, position=14),
    "reasoning_ended": _Field(_boolean, position=17),
    "session_id": _Field(_text, position=20),
}

EXTRA_TOKENS = ("allowed_token_ids", "bad_words", "_bad_words_token_ids", "trace_decode_token_ids")
"""Fields that hold token ids, flat or one level deep."""

_NO_TEXT = "the engine makes no text: match the tokens, or use stop_token_ids"
_FRONTEND_ONLY = "the engine does not read it"
_NOT_RETURNED = "what it asks for is not among the results"
_TOKENS_ONLY = "prompts are token ids"
_OURS = "tszmq fills it in itself"

# Names that callers might try, and where they belong instead.
_ELSEWHERE: Mapping[str, str] = {
    **{name: f"use SamplingParams({name}=...)" for name in NEUTRAL},
    "json": "use SamplingParams(json_schema=...)",
    "grammar": "use SamplingParams(ebnf=...)",
    "choice": "use the extra field structured_outputs={'choice': [...]}",
    "json_object": "use the extra field structured_outputs={'json_object': True}",
    "eos_token_id": "use eos_token_id=... of the client, or the extra field '_eos_token_id'",
    "_all_stop_token_ids": _OURS,
    "stop": _NO_TEXT,
    "include_stop_str_in_output": _NO_TEXT,
    "skip_special_tokens": _FRONTEND_ONLY,
    "spaces_between_special_tokens": _FRONTEND_ONLY,
    "flat_logprobs": _FRONTEND_ONLY,
    "stream_interval": _FRONTEND_ONLY,
    "skip_clone": _FRONTEND_ONLY,
    "output_text_buffer_length": _FRONTEND_ONLY,
    "_watermarking_skipped": _FRONTEND_ONLY,
    "logprob_token_ids": _NOT_RETURNED,
    "prompt_logprob_token_ids": _NOT_RETURNED,
    "prompt_logprob_start": _NOT_RETURNED,
    "routed_experts_prompt_start": _NOT_RETURNED,
    "request_id": "wire ids are made by tszmq; request_id=... labels the result",
    "external_req_id": "wire ids are made by tszmq; request_id=... labels the result",
    "prompt_token_ids": _TOKENS_ONLY + ", the first argument of the call",
    "prompt_embeds": _TOKENS_ONLY,
    "prompt_is_token_ids": _TOKENS_ONLY,
    "mm_features": _TOKENS_ONLY,
    "pooling_params": "requests generate tokens",
    "arrival_time": _OURS,
    "client_index": "an engine dies of one that it has no socket for",
    "current_wave": _OURS,
    "resumable": "requests end when their output does",
    "abort_immediately": "it would be aborted before it starts",
    "data_parallel_rank": "use the argument data_parallel_rank=...",
    "priority": "use the argument priority=...",
    "reasoning_parser_kwargs": "the engine dies of one that its parser does not know",
    "kv_hints": "it is between the engine and its own frontend",
}
