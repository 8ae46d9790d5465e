"""What in a JSON schema the engine's grammar backends do not heed.

xgrammar ignores such parts, and output that breaks them looks well. vLLM's frontend looks for them
and takes another backend; the lists are those of 0.33 (``has_xgrammar_unsupported_json_features``
and ``has_guidance_unsupported_json_features``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["beyond_guidance", "beyond_xgrammar"]

_FORMATS = (
    *("email", "hostname", "ipv4", "ipv6", "uuid"),
    *("date", "time", "date-time", "duration"),
    *("uri", "uri-reference", "uri-template", "json-pointer", "relative-json-pointer"),
)
_OF_ARRAYS = ("uniqueItems", "contains", "minContains", "maxContains")
_BESIDE_NAMES = ("patternProperties", "properties")

Node = Mapping[str, Any]


def beyond_xgrammar(schema: object) -> str | None:
    """The first thing that xgrammar ignores, in words; None when there is none."""
    return next((found for node in _nodes(schema) if (found := _ignored(node))), None)


def beyond_guidance(schema: object) -> bool:
    """Whether guidance cannot do it."""
    return any("patternProperties" in node for node in _nodes(schema))


def _nodes(schema: object) -> Iterator[Node]:
    """The schema's objects, in its lists, too."""
    pending = [schema]
    while pending:
        node = pending.pop()
        if isinstance(node, Mapping):
            yield node
            for value in node.values():
                pending += value if isinstance(value, list) else [value]


def _ignored(node: Node) -> str | None:
    kinds = node.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if "multipleOf" in node and ("integer" in kinds or "number" in kinds):
        return "multipleOf"
    if "array" in kinds:
        for key in _OF_ARRAYS:
            if key in node:
                return key
    if "string" in kinds:
        if "format" in node and node["format"] not in _FORMATS:
            return "a format that it does not know"
        if _is_bounded(node):
            return "a length beside a pattern or format"
    found = _ignored_names(node) if "object" in kinds else None
    branches = node.get("allOf")
    if found is None and isinstance(branches, list) and len(branches) > 1:
        return "allOf with several branches"
    return found


def _ignored_names(node: Node) -> str | None:
    """What an object says of its properties' names."""
    if "propertyNames" in node:
        names = node["propertyNames"]
        if isinstance(names, Mapping) and _is_bounded(names):
            return "propertyNames with a length beside a pattern or format"
        if any(key in node for key in _BESIDE_NAMES):
            return "propertyNames beside properties or patternProperties"
        if node.get("unevaluatedProperties", True) is not True:
            return "propertyNames beside unevaluatedProperties"
    patterns = node.get("patternProperties")
    if isinstance(patterns, Mapping) and ("properties" in node or len(patterns) > 1):
        return "patternProperties beside properties, or several"
    return None


def _is_bounded(node: Node) -> bool:
    return ("pattern" in node or "format" in node) and ("minLength" in node or "maxLength" in node)
