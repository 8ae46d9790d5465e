"""vLLM's requests: one positional array, with a map of sampling parameters inside.

An engine's input thread ends in silence over a wrong type or a value that ``SamplingParams``
refuses, and the engine goes on without ears; other values end the engine. What its own frontend
checks (0.33, ``v1/engine/input_processor.py`` and ``sampling_params.py``) is checked here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tszmq.checks import shown
from tszmq.codec import pack
from tszmq.errors import InvalidRequest
from tszmq.types import EngineInfo, SamplingParams
from tszmq.wire.base import AddRequest
from tszmq.wire.vllm.eos import ModelFacts
from tszmq.wire.vllm.extra import EXTRA_TOKENS, check_extra, place_extra, put
from tszmq.wire.vllm.lora import lora_array
from tszmq.wire.vllm.releases import release_of
from tszmq.wire.vllm.structured import structured_outputs, without_choice

__all__ = ["check_request", "encode_request"]

_ADD = b"\x00"
_PRIORITY = 13  # its place in a request
_DELTA = 1  # output_kind: only what is new
_FIRST_WITH_CHOICES = (0, 33)  # whose xgrammar backend compiles them
_MAX_TEMPERATURE = 2.0
_PRIORITY_LIMIT = 2**63
_MAX_LENGTH = 2**31 - 1
_MAX_FLOAT32 = 3.4e38
# The sampler's tables; what does not fit into them ends the engine.
_MAX_BIASES = 1024
_MAX_STOPS = 128
# Asking for more logprobs than there are tokens ends the engine, and no vocabulary is smaller
# than the bytes.
_SMALLEST_VOCABULARY = 256

# Parameters that are the same on the wire, and the values that stand for leaving them out.
_SAME: Mapping[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
    "ignore_eos": False,
    "seed": None,
    "prompt_logprobs": None,
}


def check_request(
    prompt: list[int],
    params: SamplingParams,
    priority: int | None,
    engine: EngineInfo,
    model: ModelFacts,
) -> None:
    """Refuse what ends the engine or its input thread, or would be misunderstood.

    Raises:
        InvalidRequest, UnsupportedField: With what is wrong, its value and what to do.
    """
    _check_prompt(prompt, engine)
    if params.extra:
        check_extra(params.extra)
        _check_together(len(prompt), params, engine)
    _check_lengths(len(prompt), params, engine)
    _check_sampling(params, priority)
    _check_tables(params, model)
    structured_outputs(params)
    if model.vocab_size is not None:
        _check_vocabulary(prompt, params, model.vocab_size)


def encode_request(request: AddRequest, model: ModelFacts) -> list[bytes]:
    """The frames of an add: the type, then the request array, as short as it can be."""
    params, extra = request.sampling_params, request.sampling_params.extra
    sampling = _sampling_map(request, model)
    values: list[Any] = [
        request.request_id,
        request.prompt_token_ids,
        None,  # mm_features
        sampling,
        None,  # pooling_params
        request.arrival_time,
        lora_array(extra.get("lora_request"), request.engine),
        None,  # cache_salt: only through extra
        None,  # data_parallel_rank: the identity has routed it
    ]
    if request.priority:
        put(values, _PRIORITY, request.priority)
    if extra:
        place_extra(extra, sampling, values)
    int_keys = params.logit_bias is not None or "extra_args" in extra
    return [_ADD, pack(values, int_keys=int_keys)]


def _sampling_map(request: AddRequest, model: ModelFacts) -> dict[str, Any]:
    """Without keys at their defaults, as vLLM's own encoder leaves them out.

    max_tokens must be a number by the time that it gets to an engine.
    """
    params = request.sampling_params
    sampling: dict[str, Any] = {
        "max_tokens": _max_tokens(len(request.prompt_token_ids), params, request.engine),
        "detokenize": False,
        "output_kind": _DELTA,
    }
    for name, default in _SAME.items():
        value = getattr(params, name)
        if value != default:
            sampling[name] = value
    if params.logprobs or params.top_logprobs:
        sampling["logprobs"] = params.top_logprobs
    if params.logit_bias:
        sampling["logit_bias"] = params.logit_bias
    constraint = structured_outputs(params)
    if constraint is not None:
        release = release_of(request.engine)
        if "choice" in constraint and release is not None and release < _FIRST_WITH_CHOICES:
            constraint = without_choice(constraint)
        sampling["structured_outputs"] = constraint
    _place_stops(sampling, params, model)
    return sampling


def _place_stops(sampling: dict[str, Any], params: SamplingParams, model: ModelFacts) -> None:
    """The engine stops at ``_eos_token_id`` and at ``stop_token_ids``. ``_all_stop_token_ids``
    stops nothing: it is what min_tokens holds back, and where a grammar may end."""
    ends, stops = _end_tokens(params, model), params.stop_token_ids
    if ends and not params.ignore_eos:
        sampling["_eos_token_id"] = ends[0]
        stops = tuple(dict.fromkeys((*stops, *ends[1:])))
    if stops:
        sampling["stop_token_ids"] = stops
    if stops or ends:
        sampling["_all_stop_token_ids"] = sorted({*stops, *ends})


def _end_tokens(params: SamplingParams, model: ModelFacts) -> tuple[int, ...]:
    """The request's own end token in place of the model's."""
    if "_eos_token_id" not in params.extra:
        return model.eos_token_ids
    own = params.extra["_eos_token_id"]
    return () if own is None else (own,)


def _max_tokens(prompt_tokens: int, params: SamplingParams, engine: EngineInfo) -> int:
    """As many as the context holds where the caller sets no limit."""
    if params.max_tokens is not None:
        return params.max_tokens
    return engine.max_model_len - prompt_tokens


def _check_prompt(prompt: list[int], engine: EngineInfo) -> None:
    if not prompt:
        raise InvalidRequest("the prompt must not be empty, got no token ids")
    if 0 < engine.max_model_len <= len(prompt):
        raise InvalidRequest(
            f"the prompt has {len(prompt)} tokens, engine {engine.engine_index} takes at most "
            f"{engine.max_model_len - 1} (max_model_len {engine.max_model_len} less one to "
            "generate): shorten it"
        )


def _check_lengths(prompt_tokens: int, params: SamplingParams, engine: EngineInfo) -> None:
    if params.max_tokens is None and engine.max_model_len <= 0:
        raise InvalidRequest(
            f"max_tokens=None needs a max_model_len, and engine {engine.engine_index} registered "
            "none: set max_tokens"
        )
    longest = _max_tokens(prompt_tokens, params, engine)
    if params.min_tokens > longest:
        raise InvalidRequest(
            f"min_tokens must not exceed the {longest} tokens that the context leaves, got "
            f"{params.min_tokens}"
        )
    if prompt_tokens + params.min_tokens > _MAX_LENGTH:
        raise InvalidRequest(
            f"min_tokens must be below 2**31 with the prompt's {prompt_tokens} tokens, got "
            f"{params.min_tokens}"
        )


def _check_sampling(params: SamplingParams, priority: int | None) -> None:
    """What is narrower here than ``SamplingParams`` itself allows."""
    if params.temperature > _MAX_TEMPERATURE:
        raise InvalidRequest(f"temperature must be in [0, 2] on vLLM, got {params.temperature}")
    if priority is not None and not -_PRIORITY_LIMIT <= priority < _PRIORITY_LIMIT:
        raise InvalidRequest(f"priority must be in [-2**63, 2**63), got {shown(priority)}")
    for token, value in (params.logit_bias or {}).items():
        if abs(value) > _MAX_FLOAT32:
            raise InvalidRequest(f"logit_bias must be a float32, got {value} for {token}")


def _check_tables(params: SamplingParams, model: ModelFacts) -> None:
    """Numbers of ids that the engine's sampler has room for."""
    most = model.vocab_size or _SMALLEST_VOCABULARY
    for name in ("top_logprobs", "prompt_logprobs"):
        asked = getattr(params, name)
        if asked is not None and asked > most:
            hint = "" if model.vocab_size else "; with model=... as many as its vocabulary has"
            raise InvalidRequest(f"{name} must be at most {most}, got {asked}{hint}")
    biases = len(params.logit_bias or ())
    if biases > _MAX_BIASES:
        raise InvalidRequest(f"logit_bias must have at most {_MAX_BIASES} ids, got {biases}")
    stops = len({*params.stop_token_ids, *_end_tokens(params, model)})
    if params.min_tokens and stops > _MAX_STOPS:
        raise InvalidRequest(
            f"min_tokens={params.min_tokens} goes with at most {_MAX_STOPS} stop and end token "
            f"ids, got {stops}"
        )


def _check_together(prompt_tokens: int, params: SamplingParams, engine: EngineInfo) -> None:
    """Extra fields that are fine by themselves."""
    extra = {name for name, value in params.extra.items() if value is not None}
    lora_array(params.extra.get("lora_request"), engine)
    if {"bad_words", "_bad_words_token_ids"} <= extra:
        raise InvalidRequest("bad_words and _bad_words_token_ids are the same: give one of them")
    if params.ignore_eos and "_eos_token_id" in extra:
        raise InvalidRequest("_eos_token_id would be ignored with ignore_eos=True: drop one")
    if params.prompt_logprobs is not None and "skip_reading_prefix_cache" in extra:
        raise InvalidRequest(
            "skip_reading_prefix_cache cannot be set with prompt_logprobs: cached tokens have none"
        )
    if "trace_decode_token_ids" in extra:
        _check_trace(prompt_tokens, params, engine)


def _check_trace(prompt_tokens: int, params: SamplingParams, engine: EngineInfo) -> None:
    """Tokens to emit instead of sampled ones: what the engine cannot do at the same time."""
    length = len(params.extra["trace_decode_token_ids"])
    if engine.max_model_len > 0 and length > engine.max_model_len - prompt_tokens:
        raise InvalidRequest(
            f"trace_decode_token_ids must have at most {engine.max_model_len - prompt_tokens} "
            f"ids (max_model_len less the prompt), got {length}"
        )
    clashes = [
        name
        for name in (
            "structured_outputs",
            "repetition_detection",
            "thinking_token_budget",
            "bad_words",
            "_bad_words_token_ids",
        )
        if params.extra.get(name) is not None
    ]
    if params.prompt_logprobs is not None:
        clashes.append("prompt_logprobs")
    if structured_outputs(params) is not None:
        clashes.append("a grammar")
    if clashes:
        raise InvalidRequest(f"trace_decode_token_ids cannot go with {' and '.join(clashes)}")


def _check_vocabulary(prompt: list[int], params: SamplingParams, size: int) -> None:
    """The engine looks such ids up out of bounds: nonsense on a CPU, its end on a GPU."""
    if max(prompt) >= size:
        raise InvalidRequest(
            f"the prompt's token ids must be below {size}, the vocabulary's size, got "
            f"{max(prompt)} at position {prompt.index(max(prompt))}"
        )
    for name, tokens in _token_fields(params):
        wrong = next((token for token in tokens if token >= size), None)
        if wrong is not None:
            raise InvalidRequest(f"{name} must be below {size}, the vocabulary's size, got {wrong}")


def _token_fields(params: SamplingParams) -> Iterator[tuple[str, list[int]]]:
    yield "stop_token_ids", list(params.stop_token_ids)
    yield "logit_bias keys", list(params.logit_bias or ())
    own_end = params.extra.get("_eos_token_id")
    if own_end is not None:
        yield "_eos_token_id", [own_end]
    for name in EXTRA_TOKENS:
        flat: list[int] = []
        for item in params.extra.get(name) or ():
            flat += [item] if isinstance(item, int) else item
        yield name, flat
