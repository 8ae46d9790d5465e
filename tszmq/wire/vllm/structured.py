"""Constrained output on vLLM's wire: one map, whose constraint is one of six kinds.

A frontend names the engine's backend in it, since the engine asserts that it is there. Checked
here is what vLLM's own frontend checks because the engine itself would crash of it: empty or
too deeply nested grammars, a NUL in a regular expression, no constraint at all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from tszmq.checks import shown
from tszmq.errors import InvalidRequest, UnsupportedField
from tszmq.types import SamplingParams
from tszmq.wire.described import is_text
from tszmq.wire.vllm.schemas import beyond_guidance, beyond_xgrammar

__all__ = ["structured_outputs", "without_choice"]

# Constraints with a neutral name, and their names on the wire.
_NEUTRAL = {
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "structural_tag": "structural_tag",
}
_NEUTRAL_OF = {wire: neutral for neutral, wire in _NEUTRAL.items()}
_OTHERS = ("choice", "json_object")
_BACKENDS = ("xgrammar", "guidance", "outlines", "lm-format-enforcer")
# Levels of arrays and objects; a structural tag has some of its own around its schemas.
_MAX_LEVELS = {"json": 64, "structural_tag": 80}
_REMEMBERED = 16  # texts: the requests of a batch mostly have the same, which takes long to read


def structured_outputs(params: SamplingParams) -> dict[str, Any] | None:
    """The constraint of a request, from its neutral field and ``extra["structured_outputs"]``.

    Raises:
        InvalidRequest: With what is wrong.
        UnsupportedField: A key of the extra field that is not on the wire, or has a neutral
            name.
    """
    constraint: dict[str, Any] = {
        wire: getattr(params, neutral)
        for neutral, wire in _NEUTRAL.items()
        if getattr(params, neutral) is not None
    }
    options = params.extra.get("structured_outputs")
    if not constraint and options is None:
        return None
    if options is not None:
        _check_options(options)
        constraint.update({key: value for key, value in options.items() if value is not None})
    kinds = [key for key in constraint if key in _NEUTRAL_OF or key in _OTHERS]
    if len(kinds) != 1:
        raise InvalidRequest(
            "structured_outputs must have one constraint (json_schema, regex, ebnf, "
            f"structural_tag, or in extra choice or json_object), got {kinds or 'none'}"
        )
    [kind] = kinds
    _check_grammar(kind, constraint[kind])
    if constraint.get("_backend") is None:
        constraint["_backend"] = _backend_for(constraint[kind]) if kind == "json" else "xgrammar"
    return constraint


@lru_cache(_REMEMBERED)
def _backend_for(text: str) -> str:
    """What an engine's "auto" takes for a schema; which backend it was started with is not in its
    registration.

    Raises:
        UnsupportedField: No backend is known to heed all of it.
    """
    schema = json.loads(text)
    ignored = beyond_xgrammar(schema)
    if ignored is None:
        return "xgrammar"
    if not beyond_guidance(schema):
        return "guidance"
    raise UnsupportedField(
        f"json_schema has {ignored}, which xgrammar ignores, and patternProperties, which guidance "
        "does not know: change it, or name the backend that the engine was started with in "
        "extra={'structured_outputs': {'_backend': ...}}"
    )


def without_choice(constraint: dict[str, Any]) -> dict[str, Any]:
    """The same for xgrammar before 0.33, which compiles no choice: the frontend writes a grammar
    (``choice_as_grammar``). Other backends do."""
    if constraint["_backend"] != "xgrammar":
        return constraint
    texts = [text.replace("\\", "\\\\").replace('"', '\\"') for text in constraint["choice"]]
    grammar = "root ::= " + " | ".join(f'"{text}"' for text in texts)
    rest = {key: value for key, value in constraint.items() if key != "choice"}
    return {**rest, "grammar": grammar}


def _check_options(options: object) -> None:
    if not isinstance(options, Mapping):
        raise InvalidRequest(
            f"extra field 'structured_outputs' must be a mapping, got {shown(options)}"
        )
    for key, value in options.items():
        neutral = _NEUTRAL_OF.get(key) if isinstance(key, str) else None
        if neutral is not None:
            raise UnsupportedField(
                f"structured_outputs[{key!r}] is not for extra: use SamplingParams({neutral}=...)"
            )
        test = _OPTIONS.get(key) if isinstance(key, str) else None
        if test is None:
            raise UnsupportedField(
                f"structured_outputs[{shown(key)}] is not for extra; known: {', '.join(_OPTIONS)}"
            )
        fine, expected = test
        if value is not None and not fine(value):
            raise InvalidRequest(
                f"structured_outputs[{key!r}] must be {expected}, got {shown(value)}"
            )


def _is_bool(value: object) -> bool:
    return type(value) is bool


def _is_choice(value: object) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(map(is_text, value))


_OPTIONS: dict[str, Any] = {
    "choice": (_is_choice, "a list of at least one text"),
    "json_object": (lambda value: value is True, "True, or left out"),
    "disable_any_whitespace": (_is_bool, "True or False"),
    "disable_additional_properties": (_is_bool, "True or False"),
    "whitespace_pattern": (is_text, "text"),
    "_backend": (lambda value: value in _BACKENDS, f"one of {', '.join(_BACKENDS)}"),
}


def _check_grammar(kind: str, grammar: object) -> None:
    name = _NEUTRAL_OF.get(kind, kind)
    if kind == "regex":
        if "\x00" in str(grammar):
            raise InvalidRequest(f"regex must not have a NUL character, got {shown(grammar)}")
    elif isinstance(grammar, str) and not grammar.strip():
        raise InvalidRequest(f"{name} must not be empty, got {shown(grammar)}")
    if kind in _MAX_LEVELS:
        _check_json(name, str(grammar), _MAX_LEVELS[kind])


@lru_cache(_REMEMBERED)
def _check_json(name: str, text: str, max_levels: int) -> None:
    try:
        document = json.loads(text)
        levels = _levels(document, max_levels)
    except RecursionError:
        levels = max_levels + 1
    except ValueError as error:
        raise InvalidRequest(f"{name} must be JSON: {error}, got {shown(text)}") from None
    if levels > max_levels:
        raise InvalidRequest(
            f"{name} must not nest more than {max_levels} levels of arrays and objects: the "
            "engine's grammar compiler takes too long, or crashes"
        )


def _levels(document: object, limit: int) -> int:
    """How deep arrays and objects nest; counted to one more than the limit."""
    layer = [document]
    for level in range(limit + 1):
        layer = [
            child
            for node in layer
            if isinstance(node, (dict, list))
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, (dict, list))
        ]
        if not layer:
            return level + 1 if isinstance(document, (dict, list)) else 0
    return limit + 1
