"""Values in error texts: short, however large or deep the value is. And texts in values."""

from __future__ import annotations

__all__ = ["described", "is_text"]

_MAX_CHARS = 60


def described(value: object) -> str:
    """A scalar as it is, text shortened, and of a container its kind and size."""
    if value is None or type(value) in (bool, int, float):
        return repr(value)
    if isinstance(value, str):
        return repr(value[:_MAX_CHARS])
    if isinstance(value, (list, tuple)):
        return f"an array of {len(value)}"
    if isinstance(value, dict):
        return f"a map of {len(value)}"
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    return f"a {type(value).__name__}"


def is_text(value: object) -> bool:
    """A str that UTF-8 can carry: no lone surrogates."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False
