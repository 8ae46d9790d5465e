"""LoRA adapters on vLLM's wire: a positional array that lost an element between releases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tszmq.checks import shown
from tszmq.errors import InvalidRequest, UnsupportedField
from tszmq.types import EngineInfo
from tszmq.wire.described import is_text
from tszmq.wire.vllm.releases import release_of

__all__ = ["lora_array"]

_MAX_ID = 2**31 - 1
# The wire's names, and the short ones that say the same.
_NAMES = {
    "lora_name": "name",
    "lora_int_id": "id",
    "lora_path": "path",
    "name": "name",
    "id": "id",
    "path": "path",
    "base_model_name": "base_model_name",
    "load_inplace": "load_inplace",
    "is_3d_lora_weight": "is_3d_lora_weight",
}
_POSITIONAL = ("name", "id", "path")
_FLAGS = ("load_inplace", "is_3d_lora_weight")

# Earlier ones have tensorizer_config_dict before the flags (0.22 to 0.33 were looked at). A flag in
# the wrong place ends the engine's input thread.
_FIRST_WITH_SIX = (0, 32)


def lora_array(value: object, engine: EngineInfo) -> list[Any] | None:
    """An adapter as the engine's release reads it.

    Args:
        value: A mapping with ``name``, ``id`` (at least 1, one adapter each) and ``path`` (on
            the engine's machine), or these three in a tuple; None for no adapter. The mapping
            may have ``base_model_name``, ``load_inplace`` and ``is_3d_lora_weight``, too.
        engine: For its version, and whether it serves adapters.

    Raises:
        InvalidRequest: Not that.
        UnsupportedField: The engine serves no adapters, or where its release has the flags is
            not known.
    """
    if value is None:
        return None
    if engine.registration.get("supports_lora") is False:
        raise UnsupportedField(
            f"lora_request={shown(value)}: engine {engine.engine_index} serves no adapters; "
            "start it with --enable-lora"
        )
    fields = _fields(value)
    array = [fields["name"], fields["id"], fields["path"], fields.get("base_model_name")]
    flags = [fields.get(name, False) for name in _FLAGS]
    if not any(flags):
        return array  # what is missing takes its default, wherever it would be
    return [*array, *_between(engine), *flags]


def _between(engine: EngineInfo) -> list[None]:
    release = release_of(engine)
    if release is None:
        raise UnsupportedField(
            f"{' and '.join(_FLAGS)} of lora_request are elsewhere in other releases of vLLM, "
            f"engine {engine.engine_index} is {engine.engine_version!r:.40}: leave them out"
        )
    return [] if release >= _FIRST_WITH_SIX else [None]


def _fields(value: object) -> dict[str, Any]:
    if isinstance(value, (tuple, list)) and len(value) == len(_POSITIONAL):
        value = dict(zip(_POSITIONAL, value, strict=True))
    if not isinstance(value, Mapping):
        raise InvalidRequest(
            f"lora_request must be a mapping or a tuple of name, id and path, got {shown(value)}"
        )
    fields: dict[str, Any] = {}
    for key, item in value.items():
        name = _NAMES.get(key) if isinstance(key, str) else None
        if name is None or name in fields:
            raise InvalidRequest(
                f"lora_request must have the keys name, id and path once each, got {shown(key)}"
            )
        fields[name] = item
    for name, (fine, expected) in _TESTS.items():
        if not fine(fields.get(name)):
            raise InvalidRequest(
                f"{name} of lora_request must be {expected}, got {shown(fields.get(name))}"
            )
    return fields


def _is_name(value: object) -> bool:
    return is_text(value) and value != ""


def _is_flag(value: object) -> bool:
    return value is None or type(value) is bool


_TESTS: dict[str, Any] = {
    "name": (_is_name, "text that is not empty"),
    "id": (lambda value: type(value) is int and 0 < value <= _MAX_ID, f"an int in [1, {_MAX_ID}]"),
    "path": (_is_name, "text that is not empty"),
    "base_model_name": (lambda value: value is None or is_text(value), "text or None"),
    "load_inplace": (_is_flag, "True or False"),
    "is_3d_lora_weight": (_is_flag, "True or False"),
}
