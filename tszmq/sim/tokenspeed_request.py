"""``TokenizedGenerateReqInput`` as the engine reads it: strict types, then the refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tszmq.sim.request import EngineFault

__all__ = ["Malformed", "read_add", "refusal_reason"]

_TAG = "TokenizedGenerateReqInput"
_TOP_K_OFF = 1 << 30
_TOP_K_MAX = 128
_EPSILON = 1e-6
_REQUIRED = 6

Fields = dict[str, Any]


class Malformed(Exception):
    """The message cannot be read; the engine logs and drops it."""


def _is_int(value: Any) -> bool:
    return type(value) is int


def _is_float(value: Any) -> bool:
    return type(value) is float or type(value) is int


def _is_bool(value: Any) -> bool:
    return type(value) is bool


def _is_str(value: Any) -> bool:
    return type(value) is str


def _is_list(value: Any) -> bool:
    return type(value) is list


def _is_ints(value: Any) -> bool:
    return type(value) is list and set(map(type, value)) <= {int}


def _is_text_or_texts(value: Any) -> bool:
    return type(value) is str or (type(value) is list and set(map(type, value)) <= {str})


def _is_map(value: Any) -> bool:
    return type(value) is dict


def _is_bias(value: Any) -> bool:
    return type(value) is dict and all(_is_float(item) for item in value.values())


def _or_nil(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or check(value)


def _anything(_: Any) -> bool:
    return True


_Row = tuple[str, Callable[[Any], bool], Any]

# Position is the contract: name, check, default.
_SAMPLING: tuple[_Row, ...] = (
    ("max_new_tokens", _or_nil(_is_int), None),
    ("stop", _or_nil(_is_text_or_texts), None),
    ("stop_token_ids", _or_nil(_is_ints), None),
    ("temperature", _is_float, 1.0),
    ("top_p", _is_float, 1.0),
    ("top_k", _is_int, -1),
    ("min_p", _is_float, 0.0),
    ("frequency_penalty", _is_float, 0.0),
    ("presence_penalty", _is_float, 0.0),
    ("repetition_penalty", _is_float, 1.0),
    ("min_new_tokens", _is_int, 0),
    ("json_schema", _or_nil(_is_str), None),
    ("regex", _or_nil(_is_str), None),
    ("ebnf", _or_nil(_is_str), None),
    ("structural_tag", _or_nil(_is_str), None),
    ("ignore_eos", _is_bool, False),
    ("skip_special_tokens", _is_bool, True),
    ("spaces_between_special_tokens", _is_bool, True),
    ("no_stop_trim", _is_bool, False),
    ("thinking_budget", _or_nil(_is_int), None),
    ("custom_params", _or_nil(_is_map), None),
    ("stream_interval", _or_nil(_is_int), None),
    ("logit_bias", _or_nil(_is_bias), None),
    ("seed", _or_nil(_is_int), None),
    ("logprobs", _or_nil(_is_int), None),
    ("n", _is_int, 1),
    ("stop_strs", _or_nil(_is_text_or_texts), None),
    ("stop_str_max_len", _is_int, 0),
    ("is_normalized", _is_bool, False),
)

_REQUEST: tuple[_Row, ...] = (
    ("tag", _is_str, None),
    ("rid", _or_nil(_is_text_or_texts), None),
    ("http_worker_ipc", _or_nil(_is_str), None),
    ("input_text", _or_nil(_is_str), None),
    ("input_ids", _or_nil(_is_ints), None),
    ("sampling_params", _is_list, None),
    ("return_logprob", _is_bool, False),
    ("logprob_start_len", _is_int, -1),
    ("top_logprobs_num", _is_int, 0),
    ("token_ids_logprob", _or_nil(_is_ints), None),
    ("stream", _is_bool, False),
    ("input_embeds", _or_nil(_is_list), None),
    ("session_params", _or_nil(_is_list), None),
    ("custom_logit_processor", _or_nil(_is_str), None),
    ("return_hidden_states", _is_bool, False),
    ("created_time", _is_float, 0.0),
    ("bootstrap_host", _or_nil(_is_str), None),
    ("bootstrap_port", _or_nil(_is_int), None),
    ("bootstrap_room", _or_nil(_is_int), None),
    ("input_multi_ids", _or_nil(_is_list), None),
    ("input_extra_infos", _or_nil(_is_list), None),
    ("input_ids_unpadded", _or_nil(_is_ints), None),
    ("multimodal_inputs", _anything, None),
    ("validation_error", _or_nil(_is_str), None),
    ("data_parallel_rank", _or_nil(_is_int), None),
)


def _read_row(values: list[Any], rows: tuple[_Row, ...]) -> Fields:
    """The fields by name. Missing trailing ones take their default, unknown ones are skipped."""
    fields = {}
    given = len(values)
    for position, (name, check, default) in enumerate(rows):
        if position >= given:
            fields[name] = default
            continue
        value = values[position]
        if not check(value):
            raise Malformed(f"{name} at ${position}: {type(value).__name__} is not taken")
        fields[name] = value
    return fields


def read_add(message: Any) -> tuple[Fields, Fields]:
    """The request's fields and its sampling parameters, normalized as the engine does.

    Raises:
        Malformed: The engine drops the message.
        EngineFault: The engine dies of it.
    """
    if type(message) is not list:
        raise Malformed("a request is an array")
    if len(message) < _REQUIRED:
        raise Malformed(f"a request has at least {_REQUIRED} elements, got {len(message)}")
    if message[0] != _TAG:
        raise Malformed(f"unknown tag {message[0]!r}")
    fields = _read_row(message, _REQUEST)
    params = _read_row(fields["sampling_params"], _SAMPLING)
    if not params["is_normalized"]:
        _normalize(params)
    if type(fields["rid"]) is not str:
        if params["seed"] is None:  # deriving a seed from the id fails while it is decoded
            raise Malformed("the id is not a string")
        raise EngineFault("the id is not a string")
    if fields["input_ids"] is None:
        raise EngineFault("input_ids is nil")
    return fields, params


def _normalize(params: Fields) -> None:
    if params["temperature"] < _EPSILON:
        params["temperature"] = 1.0
        params["top_k"] = 1
    if params["top_k"] == 1:
        params["seed"] = 0
    if params["top_k"] == -1:
        params["top_k"] = _TOP_K_OFF


def refusal_reason(
    fields: Fields, params: Fields, *, vocab_size: int, logprobs_enabled: bool
) -> str | None:
    """Why the engine refuses the request, or None. The first reason wins, in this order."""
    if params["n"] != 1:
        return "n is not supported on this wire, the frontend fans out"
    if fields["validation_error"] is not None:
        return str(fields["validation_error"])
    reason = None
    if fields["return_logprob"]:
        reason = _logprob_reason(fields, logprobs_enabled)
    if reason is None:
        reason = _sampling_reason(params, vocab_size)
    session = fields["session_params"]
    if reason is None and session and session[0] is not None:
        reason = "session does not exist"
    return reason


def _logprob_reason(fields: Fields, enabled: bool) -> str | None:
    start, length = fields["logprob_start_len"], len(fields["input_ids"])
    for fine, reason in (
        (enabled, "logprobs asked for, server started without them"),
        (not fields["top_logprobs_num"], "top-k logprobs are not supported"),
        (not fields["token_ids_logprob"], "token_ids_logprob is not supported"),
        (start >= -1, "logprob_start_len must be -1 or at least 0"),
        (start < length, "logprob_start_len must be smaller than the prompt"),
        (start in (-1, length - 1), "prompt logprobs are not carried on this wire"),
    ):
        if not fine:
            return reason
    return None


def _sampling_reason(params: Fields, vocab_size: int) -> str | None:
    top_k, longest, shortest = (
        params[name] for name in ("top_k", "max_new_tokens", "min_new_tokens")
    )
    grammars = [params[name] for name in ("json_schema", "regex", "ebnf")]
    for fine, reason in (
        (not params["temperature"] < 0, "temperature must be non-negative"),  # NaN passes
        (0 < params["top_p"] <= 1, "top_p must be in (0, 1]"),
        (0 <= params["min_p"] <= 1, "min_p must be in [0, 1]"),
        (top_k == -1 or top_k >= 1, "top_k must be -1 or at least 1"),
        (top_k == _TOP_K_OFF or top_k < _TOP_K_MAX, "top_k must be below 128"),
        (-2 <= params["frequency_penalty"] <= 2, "frequency_penalty must be in [-2, 2]"),
        (-2 <= params["presence_penalty"] <= 2, "presence_penalty must be in [-2, 2]"),
        (0 <= params["repetition_penalty"] <= 2, "repetition_penalty must be in (0, 2]"),
        (shortest >= 0, "min_new_tokens must be in (0, max_new_tokens]"),
        (longest is None or longest >= 0, "max_new_tokens must be at least 0"),
        (longest is None or shortest <= longest, "min_new_tokens exceeds max_new_tokens"),
        (_bias_fits(params["logit_bias"], vocab_size), "logit_bias keys must be token ids"),
        (not params["logprobs"], "only logprobs=0 is supported"),
        (sum(text is not None for text in grammars) <= 1, "only one grammar can be set"),
    ):
        if not fine:
            return reason
    return None


def _bias_fits(bias: dict[str, float] | None, vocab_size: int) -> bool:
    try:
        return all(0 <= int(key) < vocab_size for key in bias or ())
    except ValueError:
        return False
