"""Fields of TokenSpeed's request that have no neutral name: ``SamplingParams.extra``.

One table says where each goes and what it may be. A value of a wrong type would lose the whole
message in silence on the engine, so the types are those of the wire, unconverted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from tszmq.codec import pack, unpack
from tszmq.errors import DecodeError, InvalidRequest
from tszmq.wire.described import is_text
from tszmq.wire.extra import NEUTRAL, check_fields

__all__ = ["check_extra", "place_extra"]

_INT64 = 2**63
_MAX_PORT = 65535


def check_extra(extra: Mapping[str, Any]) -> None:
    """As ``check_fields``: the engine answers the others with an abort, its death or silence."""
    check_fields(extra, "TokenSpeed", _FIELDS, _ELSEWHERE)


def place_extra(extra: Mapping[str, Any], sampling: list[Any], request: list[Any]) -> None:
    """Put checked fields into the two arrays, lengthening ``request`` with defaults."""
    for name, value in extra.items():
        field = _FIELDS[name]
        if field.position is None:
            continue
        if field.in_sampling:
            sampling[field.position] = value
            continue
        if field.position >= len(request):
            request += _REQUEST_TAIL[len(request) - _SHORTEST : field.position + 1 - _SHORTEST]
        request[field.position] = value


# Elements 11 to 18 of a request, at their defaults.
_SHORTEST = 11
_REQUEST_TAIL = (None, None, None, False, 0.0, None, None, None)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _int_or_nil(low: int, high: int) -> Callable[[Any], str | None]:
    def refuses(value: Any) -> str | None:
        if value is None or (_is_int(value) and low <= value <= high):
            return None
        return f"an int in [{low}, {high}] or None"

    return refuses


def _one(value: Any) -> str | None:
    if _is_int(value) and value == 1:
        return None
    return "1, the engine makes one completion a request (send the prompt n times)"


def _boolean(value: Any) -> str | None:
    return None if isinstance(value, bool) else "True or False"


def _time(value: Any) -> str | None:
    good = isinstance(value, float) and math.isfinite(value)
    return None if good else "a finite float (seconds)"


def _text_or_nil(value: Any) -> str | None:
    return None if value is None or is_text(value) else "valid Unicode text or None"


def _stop(value: Any) -> str | None:
    """An empty stop string would match the first token."""
    texts = value if isinstance(value, (list, tuple)) else [value]
    if value is None or all(is_text(text) and text for text in texts):
        return None
    return "a non-empty text, a list of them, or None"


def _map_or_nil(value: Any) -> str | None:
    """Decoded again, because the encoder has types that the engine's decoder refuses."""
    if value is None:
        return None
    try:
        if isinstance(value, dict) and unpack(pack(value)) is not None:
            return None
    except (InvalidRequest, DecodeError):
        pass
    return "a dict from str to plain values (str, int, float, bool, None, lists, dicts), or None"


@attrs.frozen
class _Field:
    """Where a field goes, and the test of its value.

    Attributes:
        refuses: What was expected, when the value is not that; else None.
        position: Its place in the array; None when it is not sent.
        in_sampling: Whether the array is that of the sampling parameters.
    """

    refuses: Callable[[Any], str | None]
    position: int | None
    in_sampling: bool = False


_FIELDS: Mapping[str, _Field] = {
    "stop": _Field(_stop, 1, in_sampling=True),
    "skip_special_tokens": _Field(_boolean, 16, in_sampling=True),
    "spaces_between_special_tokens": _Field(_boolean, 17, in_sampling=True),
    "no_stop_trim": _Field(_boolean, 18, in_sampling=True),
    "thinking_budget": _Field(_int_or_nil(-_INT64, _INT64 - 1), 19, in_sampling=True),
    "custom_params": _Field(_map_or_nil, 20, in_sampling=True),
    # The engine divides by it: 0 ends the scheduler process at the first token.
    "stream_interval": _Field(_int_or_nil(1, 2**31 - 1), 21, in_sampling=True),
    "n": _Field(_one, None),
    "input_text": _Field(_text_or_nil, 3),
    "custom_logit_processor": _Field(_text_or_nil, 13),
    "created_time": _Field(_time, 15),
    "bootstrap_host": _Field(_text_or_nil, 16),
    "bootstrap_port": _Field(_int_or_nil(0, _MAX_PORT), 17),
    "bootstrap_room": _Field(_int_or_nil(0, _INT64 - 1), 18),
}

_ENGINE_OWN = "the engine fills it in itself"
_TOKENS_ONLY = "prompts are token ids, given as prompt_token_ids"
_NOT_RETURNED = "TokenSpeed's output wire cannot carry what it asks for"

# Names that callers might try, and where they belong instead.
_ELSEWHERE: Mapping[str, str] = {
    **{name: f"use SamplingParams({name}=...)" for name in NEUTRAL},
    "max_new_tokens": "use SamplingParams(max_tokens=...)",
    "min_new_tokens": "use SamplingParams(min_tokens=...)",
    "return_logprob": "use SamplingParams(logprobs=True)",
    "top_logprobs_num": "it is the neutral top_logprobs, and " + _NOT_RETURNED,
    "logprob_start_len": "it is the neutral prompt_logprobs, and " + _NOT_RETURNED,
    "token_ids_logprob": _NOT_RETURNED,
    "return_hidden_states": _NOT_RETURNED,
    "stop_strs": "use the extra field 'stop'",
    "stop_str_max_len": _ENGINE_OWN,
    "is_normalized": _ENGINE_OWN,
    "validation_error": _ENGINE_OWN,
    "rid": "wire ids are made by tszmq; request_id=... labels the result",
    "http_worker_ipc": "outputs come over the client's own socket",
    "stream": "stream() and generate() choose it",
    "data_parallel_rank": "use the argument data_parallel_rank=...",
    "priority": "use the argument priority=..., where the wire has one",
    "input_ids": _TOKENS_ONLY,
    "input_ids_unpadded": _TOKENS_ONLY,
    "input_multi_ids": _TOKENS_ONLY,
    "input_extra_infos": _TOKENS_ONLY,
    "input_embeds": _TOKENS_ONLY,
    "multimodal_inputs": _TOKENS_ONLY,
    "session_params": "TokenSpeed's scheduler knows no sessions on this wire",
}
