"""``SamplingParams.extra``: what both wires do with fields that have no neutral name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from tszmq.checks import shown
from tszmq.errors import InvalidRequest, UnsupportedField
from tszmq.types import SamplingParams

__all__ = ["NEUTRAL", "check_fields"]

NEUTRAL = tuple(each.name for each in attrs.fields(SamplingParams) if each.name != "extra")
"""Fields that have a neutral name."""


def check_fields(
    extra: Mapping[str, Any], wire: str, fields: Mapping[str, Any], elsewhere: Mapping[str, str]
) -> None:
    """Refuse fields that the wire has not, or not for callers, and values it would not take.

    Args:
        extra: The caller's.
        wire: What the error texts call it.
        fields: By name; ``refuses(value)`` of each is what was expected, None for a good value.
        elsewhere: Names that callers might try, and where they belong instead.

    Raises:
        UnsupportedField: An unknown name, one that has a neutral spelling, or one that has no
            effect or a fatal one.
        InvalidRequest: A value of a wrong type or out of range.
    """
    for name, value in extra.items():
        if name in elsewhere:
            raise UnsupportedField(f"extra field {shown(name)} is not for extra: {elsewhere[name]}")
        if name not in fields:
            raise UnsupportedField(
                f"extra field {shown(name)} is not in {wire}'s requests; known: "
                f"{', '.join(sorted(fields))}"
            )
        expected = fields[name].refuses(value)
        if expected is not None:
            raise InvalidRequest(
                f"extra field {shown(name)} must be {expected}, got {shown(value)}"
            )
