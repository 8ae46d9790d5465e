"""vLLM's utility calls: methods of the engine by name, and what they returned.

A call is ``[client index, call id, method, args]``. The engine looks the method up and answers
``[call id, failure, [type info, value]]``. What it cannot even decode ends its input thread in
silence, so that only plain values are sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tszmq.checks import shown
from tszmq.codec import pack
from tszmq.errors import DecodeError, InvalidRequest, UnsupportedField
from tszmq.wire.base import UtilityResult
from tszmq.wire.described import described, is_text

__all__ = ["Opaque", "encode_call", "holds_opaque", "plain_fault", "read_result"]

_UTILITY = b"\x03"
_CLIENT_INDEX = 0  # one input and one output address are given to the engine: there is no other
_CALL_IDS = 2**64
_MAX_DEPTH = 64  # an engine's decoder gives up at about 1,000 levels, and with it the thread
_INT_LOW, _INT_HIGH = -(2**63), 2**64 - 1
# Handled in the engine's input thread, which ends over one wrong argument.
_DEADLY = frozenset({"handle_fault_tolerance"})

_ANSWER = 3  # elements
_RESULT = 2


class Opaque:
    """A value of an extension type that is not read: a pickled object."""

    __slots__ = ("code",)

    def __init__(self, code: int) -> None:
        self.code = code


def encode_call(call_id: int, method: str, args: Sequence[object]) -> list[bytes]:
    """The frames of a call.

    Raises:
        TypeError, InvalidRequest, UnsupportedField: The engine would end over it.
    """
    if type(call_id) is not int:
        raise TypeError(f"call_id must be an int, got {shown(call_id)}")
    if not 0 <= call_id < _CALL_IDS:
        raise InvalidRequest(f"call_id must be in [0, 2**64), got {shown(call_id)}")
    if not isinstance(method, str):
        raise TypeError(f"method must be a str, got {shown(method)}")
    if not method.isidentifier() or method.startswith("_"):
        raise InvalidRequest(
            f"method must be the name of a public method of the engine, got {shown(method)}"
        )
    if method in _DEADLY:
        raise UnsupportedField(f"method {method!r} is between the engine and its launcher")
    if isinstance(args, (str, bytes)) or not isinstance(args, Sequence):
        raise TypeError(f"args must be a sequence, got {shown(args)}")
    fault = plain_fault(list(args))
    if fault is not None:
        raise InvalidRequest(f"args of {method} must be plain values, got {fault}")
    return [_UTILITY, pack([_CLIENT_INDEX, call_id, method, list(args)], int_keys=True)]


def plain_fault(value: object, depth: int = 0) -> str | None:
    """What in a value an engine's decoder would not take; None when it is plain throughout.

    Plain are None, bools, ints of 64 bits, floats, bytes, valid text, and lists, tuples and
    dicts of these with keys of text or ints.
    """
    kind = type(value)
    if value is None or kind in (bool, float, bytes):
        return None
    if isinstance(value, int) and kind is int:
        return None if _INT_LOW <= value <= _INT_HIGH else f"an int beyond 64 bits: {shown(value)}"
    if isinstance(value, str) and kind is str:
        return None if is_text(value) else f"text that is not Unicode: {shown(value)}"
    if depth >= _MAX_DEPTH:
        return f"more than {_MAX_DEPTH} levels"
    if isinstance(value, dict) and kind is dict:
        kinds = set(map(type, value)) - {str, int}
        if kinds:
            return f"a key of type {kinds.pop().__name__}"
        return _first_fault([*value, *value.values()], depth)
    if isinstance(value, (list, tuple)) and kind in (list, tuple):
        return _first_fault(value, depth)
    return f"a value of type {kind.__name__}: {shown(value)}"


def _first_fault(items: Sequence[object], depth: int) -> str | None:
    faults = (plain_fault(item, depth + 1) for item in items)
    return next((fault for fault in faults if fault is not None), None)


def read_result(value: object) -> UtilityResult:
    """The answer to a call.

    A result that holds pickled objects (an engine with VLLM_ALLOW_INSECURE_SERIALIZATION=1
    sends some) is a failure: they are not read. Tensors come as ``[dtype, shape, bytes]``, or
    with the number of a frame, which is not kept, when they are large.

    Raises:
        DecodeError: It is none.
    """
    if type(value) is not list or len(value) < _ANSWER:
        raise DecodeError(f"utility_output must be an array of 3, got {described(value)}")
    call_id, failure, result = value[:_ANSWER]
    if type(call_id) is not int:
        raise DecodeError(f"a utility call_id must be an int, got {described(call_id)}")
    if failure is not None and type(failure) is not str:
        raise DecodeError(f"a utility failure must be text or nil, got {described(failure)}")
    if failure is not None or result is None:
        return UtilityResult(call_id, failure, None)
    if type(result) is not list or len(result) != _RESULT:
        raise DecodeError(f"a utility result must be [type info, value], got {described(result)}")
    if holds_opaque(result[1]):
        return UtilityResult(call_id, "the result holds pickled objects: they are not read", None)
    return UtilityResult(call_id, None, result[1])


def holds_opaque(value: Any) -> bool:
    """Whether a value holds, at whatever depth, something that is not read."""
    pending = [value]
    while pending:
        item = pending.pop()
        if type(item) is Opaque:
            return True
        if type(item) in (list, tuple):
            pending += item
        elif type(item) is dict:
            pending += item.keys()
            pending += item.values()
    return False
