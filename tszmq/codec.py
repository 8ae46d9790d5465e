"""msgpack in and out: the only module that imports ormsgpack.

Two things that ormsgpack leaves to its caller are settled here: it ignores bytes after the
first object (``unpackb(b"\\x01\\x02") == 1``), and releases before 1.13.1 can crash the
interpreter on a few bytes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import ormsgpack

from tszmq.errors import DecodeError, InvalidRequest

__all__ = ["HOLE", "PLACEHOLDER", "pack", "preview", "unpack", "unpack_pieces"]

_PREVIEW_BYTES = 24
_REASON_CHARS = 120
_OLDEST = (1, 13, 1)


def _require_release(version: str) -> None:
    """Refuse an ormsgpack that untrusted bytes can crash.

    Raises:
        ImportError: ``version`` is older than 1.13.1, or not a version number.
    """
    numbers = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    if numbers is None or tuple(int(part or 0) for part in numbers.groups()) < _OLDEST:
        raise ImportError(
            f"tszmq needs ormsgpack 1.13.1 or newer, found {version}: older releases crash the "
            "interpreter on a malformed message of five bytes; "
            "run: pip install 'ormsgpack>=1.13.1'"
        )


_require_release(ormsgpack.__version__)


def _new_marker() -> bytes:
    """A packed binary of 16 random bytes, none of which starts a binary.

    Without its own first byte inside, it cannot overlap with itself: nothing but the whole
    marker decodes to its value.
    """
    return b"\xc4\x10" + os.urandom(16).replace(b"\xc4", b"\x00")


# One object is decoded as [object, marker]. Exactly one object and nothing after it has the
# marker as its neighbour: trailing bytes would come before the marker, and a truncated object
# would swallow it. Costs one copy of the message, a few per cent of its decoding.
_OPEN = b"\x92"
HOLE = _new_marker()
PLACEHOLDER = HOLE[2:]


def pack(obj: Any, *, int_keys: bool = False) -> bytes:
    """One msgpack object.

    Args:
        obj: Plain values: None, bool, int, float, str, bytes, list, tuple, dict.
        int_keys: Let maps have keys other than str (vLLM's ``logit_bias``).

    Raises:
        InvalidRequest: A value that msgpack cannot carry, such as an int of 2**64 or text with
            a lone surrogate.
    """
    try:
        return ormsgpack.packb(obj, option=ormsgpack.OPT_NON_STR_KEYS if int_keys else None)
    except ormsgpack.MsgpackEncodeError as error:
        raise InvalidRequest(f"cannot be sent as msgpack: {str(error)[:_REASON_CHARS]}") from None


def preview(data: bytes) -> str:
    """The size and the first bytes of a message, for error texts."""
    dots = "..." if len(data) > _PREVIEW_BYTES else ""
    return f"{len(data)} bytes: {data[:_PREVIEW_BYTES].hex(' ')}{dots}"


def unpack(
    data: bytes,
    what: str = "a msgpack object",
    *,
    ext_hook: Callable[[int, bytes], Any] | None = None,
    int_keys: bool = False,
) -> Any:
    """The one object that ``data`` is.

    Args:
        data: A whole message.
        what: What was expected, for the error text.
        ext_hook: Reads extension types; without it they are errors.
        int_keys: Let maps have keys other than str.

    Raises:
        DecodeError: ``data`` is not exactly one msgpack object: malformed, truncated, followed
            by more bytes, nested too deeply (about 1,000 levels), not UTF-8 in a string, or a
            map with a key that is not a string.
    """
    option = ormsgpack.OPT_NON_STR_KEYS if int_keys else None
    try:
        pair = ormsgpack.unpackb(_OPEN + data + HOLE, ext_hook=ext_hook, option=option)
    except Exception as error:
        raise _unreadable(data, what, str(error)) from None
    if pair[1] != PLACEHOLDER:
        raise _unreadable(data, what, "bytes follow the first object")
    return pair[0]


def unpack_pieces(pieces: Sequence[bytes]) -> Any:
    """The one object that ``pieces`` are in a row, some of them ``HOLE``.

    Saves decoding parts of a message whose bytes are known: put a hole there. A value that
    equals ``PLACEHOLDER`` stands where a hole is and nowhere else, no message can forge it.

    Raises:
        DecodeError: As ``unpack``.
    """
    try:
        pair = ormsgpack.unpackb(b"".join((_OPEN, *pieces, HOLE)))
    except Exception as error:
        raise _unreadable(b"".join(pieces), "a msgpack object", str(error)) from None
    if pair[1] != PLACEHOLDER:
        raise _unreadable(b"".join(pieces), "a msgpack object", "bytes follow the first object")
    return pair[0]


def _unreadable(data: bytes, what: str, reason: str) -> DecodeError:
    return DecodeError(f"expected {what}, {reason[:_REASON_CHARS]}; got {preview(data)}")
