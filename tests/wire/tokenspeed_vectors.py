"""The captured TokenSpeed messages, and a second reading of requests: the engine's side.

``engine_view`` models what the engine's receiver makes of a request: strict types, defaults,
normalization, the seed. It is checked against every captured request, those it drops included,
so that it can judge what our own encoder sends.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import msgspec

VECTORS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent.parent / "vectors" / "tokenspeed.json").read_text(encoding="utf-8")
)
TOP_K_OFF = 2**30
VOCAB = 32000  # of the engine that the vectors were captured from


def vectors(message: str, direction: str | None = None) -> list[dict[str, Any]]:
    """The vectors of one kind of message."""
    return [
        vector
        for vector in VECTORS
        if vector["message"] == message and direction in (None, vector["direction"])
    ]


def vector(name: str) -> dict[str, Any]:
    return next(vector for vector in VECTORS if vector["name"] == name)


def frames(vector: dict[str, Any]) -> list[bytes]:
    return [bytes.fromhex(text) for text in vector["frames_hex"]]


class Dropped(Exception):
    """The engine would log the message and forget it."""


SAMPLING: dict[str, tuple[str, Any]] = {
    "max_new_tokens": ("int?", None),
    "stop": ("texts?", None),
    "stop_token_ids": ("ints?", None),
    "temperature": ("float", 1.0),
    "top_p": ("float", 1.0),
    "top_k": ("int", -1),
    "min_p": ("float", 0.0),
    "frequency_penalty": ("float", 0.0),
    "presence_penalty": ("float", 0.0),
    "repetition_penalty": ("float", 1.0),
    "min_new_tokens": ("int", 0),
    "json_schema": ("str?", None),
    "regex": ("str?", None),
    "ebnf": ("str?", None),
    "structural_tag": ("str?", None),
    "ignore_eos": ("bool", False),
    "skip_special_tokens": ("bool", True),
    "spaces_between_special_tokens": ("bool", True),
    "no_stop_trim": ("bool", False),
    "thinking_budget": ("int?", None),
    "custom_params": ("map?", None),
    "stream_interval": ("int?", None),
    "logit_bias": ("bias?", None),
    "seed": ("int?", None),
    "logprobs": ("int?", None),
    "n": ("int", 1),
    "stop_strs": ("texts?", None),
    "stop_str_max_len": ("int", 0),
    "is_normalized": ("bool", False),
}
REQUEST: dict[str, tuple[str, Any]] = {
    "rid": ("str", None),
    "http_worker_ipc": ("str?", None),
    "input_text": ("str?", None),
    "input_ids": ("ints", None),
    "sampling_params": ("list", None),
    "return_logprob": ("bool", False),
    "logprob_start_len": ("int", -1),
    "top_logprobs_num": ("int", 0),
    "token_ids_logprob": ("ints?", None),
    "stream": ("bool", False),
    "input_embeds": ("list?", None),
    "session_params": ("list?", None),
    "custom_logit_processor": ("str?", None),
    "return_hidden_states": ("bool", False),
    "created_time": ("float", 0.0),
    "bootstrap_host": ("str?", None),
    "bootstrap_port": ("int?", None),
    "bootstrap_room": ("int?", None),
    "input_multi_ids": ("list?", None),
    "input_extra_infos": ("list?", None),
    "input_ids_unpadded": ("ints?", None),
    "multimodal_inputs": ("list?", None),
    "validation_error": ("str?", None),
    "data_parallel_rank": ("int?", None),
}


def _is_int(value: Any) -> bool:
    return type(value) is int


TESTS = {
    "int": _is_int,
    "str": lambda value: type(value) is str,
    "bool": lambda value: type(value) is bool,
    "float": lambda value: type(value) in (float, int),
    "list": lambda value: type(value) is list,
    "ints": lambda value: type(value) is list and all(map(_is_int, value)),
    "map": lambda value: type(value) is dict and all(type(key) is str for key in value),
    "texts": lambda value: (
        type(value) is str or (type(value) is list and all(type(text) is str for text in value))
    ),
    "bias": lambda value: (
        type(value) is dict
        and all(type(key) is str and type(bias) in (float, int) for key, bias in value.items())
    ),
}


def _fields(values: Any, table: dict[str, tuple[str, Any]], required: int) -> dict[str, Any]:
    if type(values) is not list or len(values) < required:
        raise Dropped(f"not an array of at least {required}")
    result = {}
    for number, (name, (kind, default)) in enumerate(table.items()):
        value = values[number] if number < len(values) else default
        may_be_none = kind.endswith("?") and value is None
        if number < len(values) and not (may_be_none or TESTS[kind.rstrip("?")](value)):
            raise Dropped(f"{name} must be {kind}, got {value!r:.80}")
        result[name] = float(value) if kind == "float" else value
    return result


def engine_view(message: list[bytes]) -> list[dict[str, Any]]:
    """What the engine's request handler would be handed.

    Raises:
        Dropped: It would be handed nothing.
    """
    if len(message) < 2 or message[0] not in (b"\x00", b"\x01"):
        raise Dropped("no type frame, or no payload")
    try:
        values = msgspec.msgpack.decode(message[1])
    except msgspec.DecodeError as error:
        raise Dropped(str(error)) from None
    if message[0] == b"\x01":
        if type(values) is not list or not all(type(rid) is str for rid in values):
            raise Dropped("an abort must be an array of str")
        return [{"_type": "AbortReq", "rid": rid, "http_worker_ipc": None} for rid in values]
    if type(values) is not list or not values or values[0] != "TokenizedGenerateReqInput":
        raise Dropped("wrong tag")
    request = _fields(values[1:], REQUEST, required=5)
    sampling = _normalized(_fields(request["sampling_params"], SAMPLING, 0), request["rid"])
    request["sampling_params"] = sampling
    if request["session_params"] is not None:
        keys = ("id", "rid", "offset", "replace")
        request["session_params"] = dict(zip(keys, request["session_params"], strict=True))
    request["validation_error"] = refusal(request)
    return [{"_type": "TokenizedGenerateReqInput", **request}]


def _normalized(sampling: dict[str, Any], rid: str) -> dict[str, Any]:
    if sampling["stop_token_ids"] is not None:
        sampling["stop_token_ids"] = sorted(set(sampling["stop_token_ids"]))
    if not sampling["is_normalized"]:
        sampling["stop_strs"] = sampling["stop"]
        sampling["stop_token_ids"] = sampling["stop_token_ids"] or None
        if sampling["temperature"] < 1e-6:
            sampling["temperature"], sampling["top_k"] = 1.0, 1
        if sampling["top_k"] == 1:
            sampling["seed"] = 0
        if sampling["top_k"] == -1:
            sampling["top_k"] = TOP_K_OFF
    if sampling["seed"] is None:
        sampling["seed"] = zlib.crc32(rid.encode())
    texts = sampling["stop_strs"]
    texts = [] if texts is None else [texts] if isinstance(texts, str) else texts
    sampling["stop_strs"] = texts
    sampling["stop_str_max_len"] = max(map(len, texts), default=0)
    sampling["is_normalized"] = True
    return sampling


def refusal(request: dict[str, Any]) -> str | None:
    """Why the engine would answer with an abort; resolves ``logprob_start_len`` on the way."""
    sampling = request["sampling_params"]
    last = len(request["input_ids"]) - 1
    if sampling["n"] != 1:
        return "n"
    if request["return_logprob"]:
        if request["top_logprobs_num"] or request["token_ids_logprob"]:
            return "top logprobs"
        if request["logprob_start_len"] == -1:
            request["logprob_start_len"] = last
        if request["logprob_start_len"] != last:
            return "logprob_start_len"
    budget, least = sampling["max_new_tokens"], sampling["min_new_tokens"]
    top_k = sampling["top_k"]
    grammars = [sampling[name] for name in ("json_schema", "regex", "ebnf")]
    checks = {
        "temperature": sampling["temperature"] >= 0,
        "top_p": 0 < sampling["top_p"] <= 1,
        "min_p": 0 <= sampling["min_p"] <= 1,
        "top_k": top_k in (-1, TOP_K_OFF) or 1 <= top_k < 128,
        "frequency_penalty": -2 <= sampling["frequency_penalty"] <= 2,
        "presence_penalty": -2 <= sampling["presence_penalty"] <= 2,
        "repetition_penalty": 0 <= sampling["repetition_penalty"] <= 2,
        "min_new_tokens": least >= 0 and (budget is None or least <= budget),
        "max_new_tokens": budget is None or budget >= 0,
        "logit_bias": all(0 <= int(key) < VOCAB for key in sampling["logit_bias"] or {}),
        "logprobs": sampling["logprobs"] in (None, 0),
        "grammar": sum(grammar is not None for grammar in grammars) <= 1,
    }
    return next((name for name, passed in checks.items() if not passed), None)


def deadly(request: dict[str, Any], max_model_len: int) -> str | None:
    """Why the request would end the engine's scheduler process."""
    prompt = request["input_ids"]
    if not prompt:
        return "empty prompt"
    if len(prompt) > max_model_len - 2:
        return "no budget left"
    if not all(-(2**31) <= token < 2**31 for token in prompt):
        return "token id outside int32"
    if request["stream"] and request["sampling_params"]["stream_interval"] == 0:
        return "stream_interval 0"
    return None
